"""The admin API for attempts at rollouts, under `/admin/attempts`. Any worker can serve these routes.

Each route requires the admin key, or an API key with one of the route's scopes (`scopes.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from turngate.client.protocol import AttemptList, SupersededAttempt
from turngate.errors import BadRequest
from turngate.gateway.attempts import Attempts
from turngate.server.auth import Auth
from turngate.server.http import json_response, route
from turngate.server.operations import JsonReply
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.session import MAX_ATTEMPT, check_rollout, check_session_id


class SupersedeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /admin/attempts/supersede`. `session` is the id that was chosen for the attempt's session, if any."""

    rollout: str
    attempt: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPT)]
    session: str = ""


class AttemptsQuery(msgspec.Struct, frozen=True):
    """Query parameters. `rollout` is the name of a rollout."""

    rollout: str


class AttemptRoutes:
    def __init__(self, attempts: Attempts, auth: Auth) -> None:
        self._attempts = attempts
        self._auth = auth

    def routes(self) -> list[Route]:
        return [
            route("/admin/attempts", "GET", self.listing, self._auth),
            route("/admin/attempts/supersede", "POST", self.supersede, self._auth),
        ]

    async def listing(self, request: Request, query: AttemptsQuery) -> JsonReply[AttemptList]:
        """List the attempts at a rollout."""
        if not query.rollout:
            raise BadRequest("'rollout' must not be empty; pass the name of the rollout", param="rollout")
        return json_response(AttemptList(self._attempts.list_attempts(query.rollout)))

    async def supersede(self, request: Request, body: SupersedeBody) -> JsonReply[SupersededAttempt[RecordedOutcome]]:
        """Give up an attempt at a rollout, unless the attempt already has an outcome."""
        if not body.rollout:
            raise BadRequest("'rollout' must not be empty; pass the name of the rollout", param="rollout")
        check_rollout(body.rollout)
        if body.session:
            check_session_id(body.session, "session")
        return json_response(await self._attempts.supersede(body.rollout, body.attempt, body.session))
