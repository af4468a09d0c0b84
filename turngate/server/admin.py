"""The native API under `/admin` for sessions (traces, samples, outcomes and tool calls) and for events.

Each route requires the admin key, or an API key with one of the route's scopes (`scopes.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import EventReceipt, NewSession, ToolCallPage
from turngate.errors import BadRequest, NotFound
from turngate.gateway.attempts import Attempts
from turngate.gateway.events import Events
from turngate.gateway.host_tools import HostTools
from turngate.gateway.outcomes import OutcomeRecorder, complete_turn_rewards
from turngate.gateway.projects import AuditNote
from turngate.gateway.quotas import ProjectQuota
from turngate.gateway.sampling import pin_for_training
from turngate.gateway.sessions import Sessions
from turngate.server.auth import Auth
from turngate.server.decoding import Whole
from turngate.server.http import json_response, raw_json_response, read_cursor, respond_created, route
from turngate.server.operations import CreatedReply, Endpoint, EventStreamReply, JsonReply, encode_events
from turngate.store.outcomes import RecordedOutcome
from turngate.store.tool_calls import HostToolCall
from turngate.telemetry.logs import redact_known
from turngate.telemetry.spans import TRACEPARENT, current_tracer, parse_traceparent
from turngate.trace.session import SessionConfig, Status
from turngate.types import Json, Mode
from turngate.views.session import SessionView, SessionViews, encode_json, encode_piece
from turngate.views.session_directory import Description, SessionDirectory, Summary

RunnerEventKind = Literal["stage", "rollout", "graded", "note"]  # events that a runner may add


class OpenSessionBody(SessionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/sessions`: a session's settings, and optionally its id."""

    id: str | None = None
    mode: Mode | None = None  # type: ignore[assignment]  # None means the gateway's default mode
    # train: pins temperature 1, except in observe mode, if `bias` is record, or if `sampling` sets it
    purpose: Literal["", "train"] = ""

    def config(self, default_mode: Mode) -> SessionConfig:
        values = {name: getattr(self, name) for name in SessionConfig.__struct_fields__}
        mode = self.mode or default_mode
        if self.purpose == "train":
            values["sampling"] = pin_for_training(self.sampling, mode, self.bias)
        return SessionConfig(**{**values, "mode": mode})


class SealBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop: str = ""


class EventBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /admin/events`.

    `session` is the id of a session, which need not be open yet, or the name of a batch's event stream. It is empty if the event concerns
    neither.
    """

    kind: RunnerEventKind
    session: str = ""
    data: dict[str, Json] = {}


class AnswerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reply: Json


class SessionListQuery(msgspec.Struct, frozen=True):
    """Query parameters. `before` is the `key` of the last session on the previous page."""

    status: Status | None = None
    before: Whole | None = None
    limit: Whole = 100


class SamplesQuery(msgspec.Struct, frozen=True):
    """Query parameters. With `all`, rows without trained tokens are included.

    With `masks`, turns that can be trained only with their sampling masks also count as trained. The reply does not contain the masks.
    """

    all: bool = False
    masks: bool = False


class RecordQuery(msgspec.Struct, frozen=True):
    """Query parameters. With `replace`, the outcome replaces one that was recorded earlier."""

    replace: bool = False


class ToolCallsQuery(msgspec.Struct, frozen=True):
    after: Whole = 0
    limit: Whole = 100


class EventsQuery(msgspec.Struct, frozen=True):
    """Query parameters. `after` is the id of the last event received. With `wait=0`, the stream ends after the existing events."""

    after: str = ""
    wait: bool = True


class SessionPage(msgspec.Struct, frozen=True):
    sessions: list[Summary]


class DeletedSession(msgspec.Struct, frozen=True):
    id: str
    deleted: bool


class OutcomeReply(msgspec.Struct, frozen=True):
    """The reply to a request that records an outcome. `excluded` says why the outcome is not counted, or is empty if it is counted."""

    id: str
    outcome: RecordedOutcome
    excluded: str


class AdminRoutes:
    def __init__(
        self,
        sessions: Sessions,
        attempts: Attempts,
        directory: SessionDirectory,
        session_views: SessionViews,
        events: Events,
        outcomes: OutcomeRecorder,
        host_tools: HostTools,
        quota: ProjectQuota,
        note: AuditNote,
        auth: Auth,
    ) -> None:
        self._sessions = sessions
        self._attempts = attempts
        self._directory = directory
        self._session_views = session_views
        self._events = events
        self._outcomes = outcomes
        self._host_tools = host_tools
        self._quota = quota
        self._note = note
        self._auth = auth

    def routes(self) -> list[Route]:
        session = "/admin/sessions/{id}"
        table: list[tuple[str, str, Endpoint]] = [
            ("/admin/sessions", "POST", self.open),
            ("/admin/sessions", "GET", self.listing),
            (session, "GET", self.show),
            (session, "DELETE", self.delete),
            (f"{session}/trace", "GET", self.trace),
            (f"{session}/samples", "GET", self.samples),
            (f"{session}/events", "GET", self.events),
            (f"{session}/seal", "POST", self.seal),
            (f"{session}/cancel", "POST", self.cancel),
            (f"{session}/outcome", "PUT", self.record),
            (f"{session}/tools", "GET", self.tool_calls),
            (f"{session}/tools/{{call:int}}/answer", "POST", self.answer_tool),
            ("/admin/events", "GET", self.events),
            ("/admin/events", "POST", self.announce),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]

    async def open(
        self, request: Request, body: OpenSessionBody
    ) -> CreatedReply[NewSession[SessionConfig, RecordedOutcome]]:
        """Open a session."""
        config = body.config(self._sessions.default_mode)
        if current_tracer() is not None and (parent := parse_traceparent(request.headers.get(TRACEPARENT, ""))):
            # The parent is stored with the session, so that the spans of its turns keep it after a restart.
            config = msgspec.structs.replace(config, metadata={**config.metadata, TRACEPARENT: parent})
        await self._quota.require_session()
        session, secret = self._sessions.open(config, body.id)
        if config.attempt > 1:
            await self._attempts.cancel_lower(config.rollout)
        if config.rollout:
            await self._attempts.require_current(session)
        return respond_created(NewSession(**msgspec.structs.asdict(self._directory.describe(session)), api_key=secret))

    async def listing(self, request: Request, query: SessionListQuery) -> JsonReply[SessionPage]:
        """List sessions, newest first."""
        limit = min(query.limit or 100, 1000)
        listed = await self._directory.list_sessions(status=query.status, before=query.before, limit=limit)
        return json_response(SessionPage(listed))

    async def show(self, request: Request) -> JsonReply[Description]:
        """Return the state of a session."""
        return json_response(await self._directory.show(request.path_params["id"]))

    async def trace(self, request: Request) -> Response:
        """Return the trace of a session: every node with its ids, log-probabilities and messages."""
        return raw_json_response(await self._session_views.build(request.path_params["id"], SessionView.encode_trace))

    async def samples(self, request: Request, query: SamplesQuery) -> Response:
        """Return the training rows of a session."""
        return raw_json_response(
            await self._session_views.build(request.path_params["id"], lambda view: _encode_samples(view, query))
        )

    async def seal(self, request: Request, body: SealBody) -> JsonReply[Description]:
        """Seal a session, which ends it. Calls in flight are aborted and recorded."""
        if "\0" in body.stop:
            raise BadRequest("'stop' must not contain null characters", param="stop")
        session = await self._sessions.seal(request.path_params["id"], body.stop)
        return json_response(await self._directory.describe_ended(session))

    async def cancel(self, request: Request) -> JsonReply[Description]:
        """End an open session, and mark it as cancelled."""
        session = await self._sessions.cancel(request.path_params["id"])
        return json_response(await self._directory.describe_ended(session))

    async def delete(self, request: Request) -> JsonReply[DeletedSession]:
        """End a session, and delete its recorded data and events."""
        await self._sessions.delete(request.path_params["id"])
        self._note(request.state.caller, "session deleted", request.path_params["id"])
        return json_response(DeletedSession(request.path_params["id"], True))

    async def record(self, request: Request, query: RecordQuery, body: RecordedOutcome) -> JsonReply[OutcomeReply]:
        """Record the outcome of a rollout."""
        session_id = request.path_params["id"]
        if self._outcomes.has_turn_rewards(session_id, body):
            calls = self._host_tools.list_records(session_id)
            body = await self._session_views.build(
                session_id, lambda view: complete_turn_rewards(body, view.session, view.texts, calls)
            )
        excluded = self._outcomes.record(session_id, body, replace=query.replace)
        return json_response(OutcomeReply(session_id, body, excluded))

    async def tool_calls(self, request: Request, query: ToolCallsQuery) -> JsonReply[ToolCallPage]:
        """List the host-tool calls of a session, oldest first."""
        session = await self._sessions.find(request.path_params["id"])
        calls = self._host_tools.list_calls(session, query.after, min(query.limit or 100, 1000))
        return json_response(ToolCallPage(session.id, calls))

    async def answer_tool(self, request: Request, body: AnswerBody) -> JsonReply[HostToolCall]:
        """Answer a host-tool call."""
        session = await self._sessions.find(request.path_params["id"])
        return json_response(self._host_tools.answer(session, request.path_params["call"], body.reply))

    async def announce(self, request: Request, body: EventBody) -> CreatedReply[EventReceipt]:
        """Add an event that a runner reports."""
        return respond_created(EventReceipt(self._events.announce(body.session, body.kind, body.data)))

    async def events(self, request: Request, query: EventsQuery) -> EventStreamReply:
        """Stream the events of one session, or the events of all sessions and of the gateway."""
        session_id = request.path_params.get("id", "")
        if session_id and not self._sessions.knows(session_id):
            raise NotFound(
                f"unknown session {redact_known(session_id)!r}: there is no session with this id, and no event for it; check the id"
            )
        return EventStreamReply(
            self._stream_events(session_id, read_cursor(request, query.after), query.wait),
            headers={"cache-control": "no-cache"},
        )

    async def _stream_events(self, session_id: str, after: int, wait: bool) -> AsyncIterator[bytes]:
        yield b": events\n\n"
        async with aclosing(self._events.follow(session_id, after, wait=wait)) as following:
            async for page in following:
                yield encode_events(page)


def _encode_samples(view: SessionView, query: SamplesQuery) -> bytes:
    rows = [encode_piece(row) for row in view.samples(keep_empty=query.all, masks=query.masks)]
    return encode_json({"session": view.session.id, "samples": rows})
