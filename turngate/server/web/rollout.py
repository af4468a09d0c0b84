"""One rollout on the web page: its header, tree, messages and tokens, and its cancel, seal and retry actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from turngate.errors import Conflict, NotFound
from turngate.gateway.events import Events
from turngate.gateway.sessions import Sessions
from turngate.server.decoding import Whole
from turngate.server.http import json_response, raw_json_response
from turngate.server.web.reader import PageReader
from turngate.store.store import Store
from turngate.types import BATCH_STREAM, Json
from turngate.views.rollout import RolloutView
from turngate.views.session import encode_json, encode_piece

_ANSWER_S = 4.0  # time to wait for the batch's answer to a retry request


class RolloutMessagesQuery(msgspec.Struct, frozen=True):
    """Query parameters. `node` selects a single node. Without it, the nodes after node `after` are selected.

    `branch` limits the selection to one branch.
    """

    after: Whole = 0
    limit: Whole = 50
    branch: Whole | None = None
    node: Whole | None = None


class RolloutTokensQuery(msgspec.Struct, frozen=True):
    """Query parameters. The reply starts at token `token` of node `node`, by default the first node.

    `branch` limits the reply to the tokens of one branch.
    """

    node: Whole | None = None
    branch: Whole | None = None
    token: Whole = 0
    limit: Whole = 4000


class RolloutRoutes:
    def __init__(self, reader: PageReader, sessions: Sessions) -> None:
        self._reader = reader
        self._views = reader.views
        self._sessions = sessions

    async def show(self, request: Request) -> Response:
        """Return the header of a rollout's page."""
        session = request.path_params["id"]
        live = self._sessions.find_live(session)
        state = None if live is None else {"in_flight": live.in_flight, "last_error": live.last_error}
        return await self._reader.respond(lambda store: {**self._views.header(store, session), "live": state})

    async def tree(self, request: Request) -> Response:
        """Return the tree of a rollout."""
        return await self._respond(request, lambda rollout: rollout.tree())

    async def messages(self, request: Request, query: RolloutMessagesQuery) -> Response:
        """Return the messages of a rollout."""
        limit = min(query.limit or 50, 200)
        return await self._respond(
            request,
            lambda rollout: rollout.messages(after=query.after, limit=limit, branch=query.branch, only=query.node),
        )

    async def tokens(self, request: Request, query: RolloutTokensQuery) -> Response:
        """Return the tokens of a rollout."""
        limit = min(query.limit or 4000, 20_000)
        return await self._respond(
            request,
            lambda rollout: rollout.tokens(node=query.node, token=query.token, limit=limit, branch=query.branch),
        )

    async def _respond(self, request: Request, view: Callable[[RolloutView], dict[str, Json]]) -> Response:
        session = request.path_params["id"]

        def query(store: Store) -> bytes:
            rollout, cursor = self._views.rollout(store, session)
            content = view(rollout)
            # Nodes are encoded one by one, because a long call into C would block all other threads.
            nodes = [encode_piece(node) for node in content["nodes"]]
            return encode_json({**content, "nodes": nodes, "cursor": cursor})

        return raw_json_response(await self._reader.run(query))


class ActionRoutes:
    def __init__(self, reader: PageReader, sessions: Sessions, events: Events, store: Store) -> None:
        self._reader = reader
        self._views = reader.views
        self._sessions = sessions
        self._events = events
        self._store = store

    async def cancel(self, request: Request) -> Response:
        """Cancel a rollout."""
        self._require_open(request.path_params["id"])
        await self._sessions.cancel(request.path_params["id"])
        return await self._row(request)

    async def seal(self, request: Request) -> Response:
        """Seal the session of a rollout."""
        self._require_open(request.path_params["id"])
        await self._sessions.seal(request.path_params["id"], "sealed by hand")
        return await self._row(request)

    async def retry(self, request: Request) -> Response:
        """Ask the rollout's batch for another attempt. The request is stored, so a batch that is not running reads it once resumed."""
        session = request.path_params["id"]
        row, why_not = await self._reader.run(partial(self._views.overview.check_retry, session=session))
        if why_not:
            raise Conflict(f"the rollout cannot be retried: {why_not}")
        stream = f"{BATCH_STREAM}{row.batch}"
        seq = self._events.announce(stream, "retry", {"rollout": row.name, "session": session, "attempt": row.attempt})
        answer = await self._events.wait_for(lambda: self._find_answer(stream, seq), _ANSWER_S, woken_by=stream)
        if answer is None:
            message = (
                "the batch has not answered yet, but the retry request is stored. If the batch is not running, it reads the request when "
                "you resume it"
            )
            return json_response({"asked": True, "taken": None, "message": message})
        return json_response({"asked": True, "taken": answer["taken"], "message": answer["message"]})

    def _find_answer(self, stream: str, seq: int) -> dict[str, Json] | None:
        notes = (event.data for event in self._events.page(stream, seq) if event.kind == "note")
        return next((data for data in notes if data.get("retry") == seq), None)

    def _require_open(self, session: str) -> None:
        row = self._store.find(session)
        if row is None:
            if self._events.knows(session):
                raise Conflict("the rollout has no session, so it cannot be cancelled or sealed")
            raise NotFound(f"unknown rollout {session!r}")
        if row.status != "open":
            raise Conflict(f"the rollout's session is already {row.status}")

    async def _row(self, request: Request) -> Response:
        session = request.path_params["id"]
        return await self._reader.respond(lambda store: {"rollout": self._views.overview.rollout(store, session)[0]})
