"""Routes for stored responses of OpenAI's Responses API: read a response, list its input items, and delete it.

Like model calls, these routes require the session's secret or, if the path names the session, the admin key or an API key with a
scope for model calls. They serve only the session's own responses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.dialects.responses import Responses
from turngate.dialects.responses_items import PAGE_SIZE, encode_deleted, encode_page, read_page
from turngate.dialects.wire import field_error
from turngate.errors import TurngateError
from turngate.gateway.replies import ReplyArchive
from turngate.server.auth import Auth
from turngate.server.decoding import Whole
from turngate.server.operations import ApiRoute, describe_operation
from turngate.server.scopes import MODEL_CALLS
from turngate.trace.session import Session

_BASES = ("/v1", "", "/s/{id}/v1", "/s/{id}", "/rollout/{id}/v1", "/v1/rollouts/{id}/v1", "/v1/rollouts/{id}")
_responses = Responses()


class StoredResponseQuery(msgspec.Struct, frozen=True):
    stream: bool = False


class InputItemsQuery(msgspec.Struct, frozen=True):
    """Query parameters. `after` is the id of the last item on the previous page."""

    after: str = ""
    limit: Whole = PAGE_SIZE
    order: Literal["asc", "desc"] = "desc"


class ResponseRoutes:
    def __init__(self, archive: ReplyArchive, auth: Auth) -> None:
        self._archive = archive
        self._auth = auth

    def routes(self) -> list[Route]:
        actions = (("", "GET", self.read), ("/input_items", "GET", self.list_input), ("", "DELETE", self.delete))
        return [
            self._route(f"{base}/responses/{{response_id}}{path}", method, action)
            for base in _BASES
            for path, method, action in actions
        ]

    def read(self, session: Session, request: Request, query: StoredResponseQuery) -> bytes:
        """Return a stored response."""
        if query.stream:
            raise field_error("stream", "is not supported here, because the response is complete; remove the parameter")
        return self._archive.read(session, request.path_params["response_id"])

    def list_input(self, session: Session, request: Request, query: InputItemsQuery) -> bytes:
        """List the input items of a stored response."""
        page = read_page(query.after, query.limit, query.order)
        return encode_page(self._archive.list_input(session, request.path_params["response_id"]), page)

    def delete(self, session: Session, request: Request) -> bytes:
        """Delete a stored response."""
        session.require_open()  # the stored responses of an ended session do not change
        response_id = request.path_params["response_id"]
        self._archive.delete(session, response_id)
        return encode_deleted(response_id)

    def _route(self, path: str, method: str, action: Callable[..., bytes]) -> Route:
        scopes = MODEL_CALLS if "{id}" in path else frozenset()
        operation = describe_operation(path, method, action, "session", scopes=scopes, dialect=_responses.name)

        async def serve(request: Request) -> Response:
            try:
                key = _responses.read_key(request.headers, request.query_params)
                session = await self._auth.session(key, request.path_params.get("id"))
                content = action(session, request, **await operation.read_arguments(request))
                return Response(content, media_type="application/json")
            except TurngateError as error:
                body, status = _responses.encode_error(error), _responses.error_status(error)
                return Response(body, status_code=status, media_type="application/json")

        return ApiRoute(operation, serve)
