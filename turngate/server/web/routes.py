"""The web page and its API, under `/page`.

With several workers, any worker can serve the lists, which are read from the store. Requests that name a rollout are routed to the worker
that owns the rollout, because only that worker knows its live state and can end it.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from turngate.common.sharding import Shard
from turngate.errors import TooManyRequests, TurngateError
from turngate.gateway.api_keys import KeyRing
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.projects import AuditNote
from turngate.gateway.sessions import Sessions
from turngate.render import Tokenizer
from turngate.server.auth import Auth
from turngate.server.http import error_response, json_response
from turngate.server.operations import Access, ApiRoute, Endpoint, describe_operation
from turngate.server.scopes import Scopes, scopes_of
from turngate.server.web.event_streams import EventStreamRoutes
from turngate.server.web.export import ExportRoutes
from turngate.server.web.files import load_static_files
from turngate.server.web.lists import ListRoutes
from turngate.server.web.login import COOKIE_LIFETIME_S, PAGE_HEADER, PageLogin, require_same_origin, set_login_cookie
from turngate.server.web.reader import PageReader
from turngate.server.web.rollout import ActionRoutes, RolloutRoutes
from turngate.store.store import Store
from turngate.types import Json


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class WebPage:
    """The web page and its API. Close it when the gateway stops."""

    def __init__(
        self,
        sessions: Sessions,
        events: Events,
        fence: Fence,
        auth: Auth,
        ring: KeyRing,
        store: Store,
        *,
        admin_key: str,
        model: str,
        note: AuditNote,
        shard: Shard,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._sessions = sessions
        self._fence = fence
        self._model = model
        self._shard = shard
        self._files = load_static_files()
        self.login = PageLogin(admin_key, auth, ring, store)
        self._reader = PageReader(store, tokenizer)
        self._lists = ListRoutes(self._reader, self._describe_gateway)
        self._rollout = RolloutRoutes(self._reader, sessions)
        self._actions = ActionRoutes(self._reader, sessions, events, store)
        self._exports = ExportRoutes(self._reader, self.login, note)
        self._live = EventStreamRoutes(self._reader, sessions, events, store, self.login, self._describe_gateway)

    async def keep_lists_current(self) -> None:
        await self._reader.keep_lists_current()

    def close(self) -> None:
        self._reader.close()

    def routes(self) -> list[Route]:
        rollout = "/page/api/rollouts/{id}"
        table: list[tuple[str, str, Endpoint]] = [
            ("/page/api/me", "GET", self.show_login),
            ("/page/api/overview", "GET", self._lists.overview),
            ("/page/api/rollouts", "GET", self._lists.rollouts),
            ("/page/api/groups", "GET", self._lists.groups),
            ("/page/api/group", "GET", self._lists.group),
            ("/page/api/group/evidence", "GET", self._lists.group_evidence),
            ("/page/api/training", "GET", self._lists.training),
            ("/page/api/training/entropy", "GET", self._lists.training_entropy),
            ("/page/api/failures", "GET", self._lists.failures),
            ("/page/api/events", "GET", self._live.changes),
            ("/page/api/export", "GET", self._exports.export_group),
            (rollout, "GET", self._rollout.show),
            (f"{rollout}/tree", "GET", self._rollout.tree),
            (f"{rollout}/messages", "GET", self._rollout.messages),
            (f"{rollout}/tokens", "GET", self._rollout.tokens),
            (f"{rollout}/events", "GET", self._live.events),
            (f"{rollout}/export", "GET", self._exports.export_rollout),
            (f"{rollout}/cancel", "POST", self._actions.cancel),
            (f"{rollout}/seal", "POST", self._actions.seal),
            (f"{rollout}/retry", "POST", self._actions.retry),
        ]
        return [
            self._route("/page/login", "POST", self.log_in, needs_login=False),
            self._route("/page/logout", "POST", self.log_out, needs_login=False),
            *(self._route(path, method, endpoint) for path, method, endpoint in table),
            self._route("/page", "GET", self._redirect_to_page, needs_login=False),
            self._route("/page/{name:path}", "GET", self.file, needs_login=False),
        ]

    def _route(self, path: str, method: str, endpoint: Endpoint, *, needs_login: bool = True) -> Route:
        scopes: Scopes = scopes_of(method, path) if needs_login else frozenset()
        headers = (PAGE_HEADER,) if method == "POST" else ()
        access: Access = "page" if needs_login else "public"
        operation = describe_operation(path, method, endpoint, access, scopes=scopes, headers=headers)

        async def serve(request: Request) -> Response:
            try:
                if method == "POST":
                    require_same_origin(request)
                if needs_login:
                    self.login.require(request, scopes)
                return await endpoint(request, **await operation.read_arguments(request))
            except TurngateError as error:
                response = error_response(error)
                if isinstance(error, TooManyRequests):
                    response.headers["retry-after"] = str(int(error.wait_s) + 1)
                return response

        return ApiRoute(operation, serve)

    async def _redirect_to_page(self, request: Request) -> RedirectResponse:
        """Redirect to the page."""
        return RedirectResponse("/page/", 307)

    async def file(self, request: Request) -> Response:
        """Return one of the page's static files."""
        return self._files.serve(request, request.path_params["name"])

    async def log_in(self, request: Request, body: LoginBody) -> Response:
        """Log in to the page with a key. The reply sets a cookie."""
        token, end = self.login.log_in(request, body.key)
        return set_login_cookie(json_response({"expires": end}), request, token, COOKIE_LIFETIME_S)

    async def log_out(self, request: Request) -> Response:
        """Log out."""
        self.login.log_out(request)
        return set_login_cookie(json_response({}), request, "", 0)

    async def show_login(self, request: Request) -> Response:
        """Return the time at which the login expires."""
        return json_response({"expires": self.login.require(request)})

    def _describe_gateway(self) -> dict[str, Json]:
        return {
            "model": self._model,
            "modes": self._sessions.modes,
            "version": self._fence.version,
            "paused": self._fence.paused,
            "workers": self._shard.workers,
        }
