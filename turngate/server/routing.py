"""Find the dialect, operation and model of a model call from its path."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.requests import HTTPConnection, Request

from turngate.dialects import DIALECTS, Dialect, Route, Verb
from turngate.server.asgi import Scope
from turngate.server.operations import Operation
from turngate.server.scopes import MODEL_CALLS

SESSION_PREFIX = re.compile(r"^/(s|rollout|v1/rollouts)/[^/]+")
# Headers that identify a dialect, because several dialects share paths such as /v1/models.
_DIALECT_HEADERS = {"anthropic-version": "messages", "x-goog-api-key": "gemini"}

# Path endings of model calls, including calls to APIs that no dialect serves.
_CALL_SUFFIXES = (
    "/completions",
    "/responses",
    "/responses/compact",
    "/messages",
    ":generateContent",
    ":streamGenerateContent",
    "/embeddings",
)


_BASES = ("", "/s/{id}", "/rollout/{id}", "/v1/rollouts/{id}")
_SUMMARIES: dict[Verb, str] = {
    "generate": "Call the model.",
    "stream": "Call the model, and stream the reply.",
    "count": "Count the tokens of a prompt.",
}


class RouteMatch(msgspec.Struct, frozen=True):
    """The dialect, operation and model that a path identifies."""

    dialect: Dialect
    verb: Verb
    model: str = ""
    socket: bool = False  # whether calls can also be made over a WebSocket


class DialectRoutes:
    """The model-call routes of all dialects."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._routes = routes = [(dialect, route) for dialect in dialects for route in dialect.routes]
        self._plain = {
            route.path: RouteMatch(dialect, route.verb, socket=route.socket)
            for dialect, route in routes
            if "{" not in route.path
        }
        self._patterns = [
            (re.compile(re.escape(route.path).replace(r"\{model\}", "(.+)")), RouteMatch(dialect, route.verb))
            for dialect, route in routes
            if "{" in route.path
        ]

    @property
    def operations(self) -> list[Operation]:
        """An operation for each model-call route, with and without a session in the path."""
        return [_describe_call(base, dialect, route) for base in _BASES for dialect, route in self._routes]

    def match(self, path: str) -> RouteMatch | None:
        route = self._plain.get(path)
        if route is not None:
            return route
        for pattern, route in self._patterns:
            if match := pattern.fullmatch(path):
                return msgspec.structs.replace(route, model=match[1])
        return None


def _describe_call(base: str, dialect: Dialect, route: Route) -> Operation:
    return Operation(
        path=base + route.path,
        method="POST",
        access="session",
        scopes=MODEL_CALLS if base else frozenset(),
        summary=_SUMMARIES[route.verb] + " Calls can also be made over a WebSocket at this path." * route.socket,
        body=dialect.request_type,
        dialect=dialect.name,
    )


def dialect_of(request: HTTPConnection) -> Dialect:
    """Return the dialect that the headers or the path of a request suggest. Headers take precedence."""
    path = SESSION_PREFIX.sub("", request.url.path) or "/"
    for header, name in _DIALECT_HEADERS.items():
        for dialect in DIALECTS:
            if dialect.name == name and header in request.headers:
                return dialect
    candidates = [dialect for dialect in DIALECTS if path.startswith(dialect.path_prefix)]
    return max(candidates, key=lambda dialect: len(dialect.path_prefix))


def hint_for(request: Request) -> str:
    """Return a hint to append to the error for an unknown route, or an empty string."""
    if request.url.path.endswith("/v1/completions"):
        return "; text completions are not supported: use POST /v1/chat/completions"
    if request.method != "POST" and request.url.path.endswith(
        ("/seal", "/cancel", "/pause", "/resume", "/register", "/unregister")
    ):
        return "; use POST"
    return ""


def is_unserved_call(request: Request) -> bool:
    """Return whether a request to an unknown route looks like a model call.

    It may be a call to an API that no dialect serves, such as text completions, or a call with a wrong base URL.
    """
    return request.method == "POST" and request.url.path.endswith(_CALL_SUFFIXES)


def client_host(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""
