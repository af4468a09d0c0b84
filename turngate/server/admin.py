"""The native API under `/admin`: sessions, their traces, samples, outcomes and tool calls, and events. Requires the admin key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turngate.client.protocol import NewSession
from turngate.errors import BadRequest, NotFound
from turngate.gateway.attempts import Attempts
from turngate.gateway.events import Events
from turngate.gateway.host_tools import HostTools
from turngate.gateway.outcomes import OutcomeRecorder
from turngate.gateway.projects import AuditNote
from turngate.gateway.quotas import ProjectQuota
from turngate.gateway.sampling import pin_for_training
from turngate.gateway.sessions import Sessions
from turngate.server.auth import Auth
from turngate.server.http import decode_body, int_param, json_response, raw_json_response, read_cursor, route
from turngate.store.outcomes import RecordedOutcome
from turngate.telemetry.logs import redact_known
from turngate.telemetry.spans import TRACEPARENT, current_tracer, parse_traceparent
from turngate.trace.session import SessionConfig
from turngate.types import Json, Mode
from turngate.views.session import SessionView, SessionViews, encode_json, encode_piece
from turngate.views.session_directory import SessionDirectory

RunnerEventKind = Literal["stage", "rollout", "graded", "note"]  # events that a runner may add


class OpenSessionBody(SessionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/sessions`: a session's settings, and optionally its id."""

    id: str | None = None
    mode: Mode | None = None  # type: ignore[assignment]  # None means the gateway's default mode
    purpose: Literal["", "train"] = ""  # train: pin temperature 1 in exact and gate mode, unless `sampling` sets one

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

    `session` need not be open yet, and is empty if the event does not concern a session.
    """

    kind: RunnerEventKind
    session: str = ""
    data: dict[str, Json] = {}


class AnswerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reply: Json


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
        table: list[tuple[str, Literal["GET", "POST", "PUT", "DELETE"], object]] = [
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
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def open(self, request: Request) -> Response:
        body = await decode_body(request, OpenSessionBody)
        config = body.config(self._sessions.default_mode)
        if current_tracer() is not None and (parent := parse_traceparent(request.headers.get(TRACEPARENT, ""))):
            # Stored with the session, so that spans of its turns keep this parent after a restart.
            config = msgspec.structs.replace(config, metadata={**config.metadata, TRACEPARENT: parent})
        await self._quota.require_session()
        session, secret = self._sessions.open(config, body.id)
        if config.attempt > 1:
            await self._attempts.cancel_lower(config.rollout)
        if config.rollout:
            await self._attempts.require_current(session)
        return json_response(
            NewSession(**msgspec.structs.asdict(self._directory.describe(session)), api_key=secret), 201
        )

    async def listing(self, request: Request) -> Response:
        status = request.query_params.get("status")
        if status not in (None, "open", "sealed", "cancelled"):
            raise BadRequest(f"status must be one of open, sealed, cancelled, not {status!r}", param="status")
        limit = int_param(request, "limit", 100)
        before = int_param(request, "before")
        return json_response(
            {"sessions": self._directory.list_sessions(status=status, before=before, limit=min(limit or 100, 1000))}
        )

    async def show(self, request: Request) -> Response:
        return json_response(await self._directory.show(request.path_params["id"]))

    async def trace(self, request: Request) -> Response:
        return raw_json_response(await self._session_views.build(request.path_params["id"], SessionView.encode_trace))

    async def samples(self, request: Request) -> Response:
        keep_empty = request.query_params.get("all", "") in ("1", "true")
        return raw_json_response(
            await self._session_views.build(request.path_params["id"], lambda view: _encode_samples(view, keep_empty))
        )

    async def seal(self, request: Request) -> Response:
        body = await decode_body(request, SealBody)
        if "\0" in body.stop:
            raise BadRequest("stop must not contain null characters", param="stop")
        session = await self._sessions.seal(request.path_params["id"], body.stop)
        return json_response(self._directory.describe(session))

    async def cancel(self, request: Request) -> Response:
        session = await self._sessions.cancel(request.path_params["id"])
        return json_response(self._directory.describe(session))

    async def delete(self, request: Request) -> Response:
        await self._sessions.delete(request.path_params["id"])
        self._note(request.state.caller, "session deleted", request.path_params["id"])
        return json_response({"id": request.path_params["id"], "deleted": True})

    async def record(self, request: Request) -> Response:
        outcome = await decode_body(request, RecordedOutcome)
        session_id = request.path_params["id"]
        replace = request.query_params.get("replace", "") in ("1", "true")
        excluded = self._outcomes.record(session_id, outcome, replace=replace)
        return json_response({"id": session_id, "outcome": outcome, "excluded": excluded})

    async def tool_calls(self, request: Request) -> Response:
        session = self._sessions.find(request.path_params["id"])
        limit = int_param(request, "limit", 100) or 100
        calls = self._host_tools.list_calls(session, int_param(request, "after", 0) or 0, min(limit, 1000))
        return json_response({"session": session.id, "calls": calls})

    async def answer_tool(self, request: Request) -> Response:
        body = await decode_body(request, AnswerBody)
        session = self._sessions.find(request.path_params["id"])
        return json_response(self._host_tools.answer(session, request.path_params["call"], body.reply))

    async def announce(self, request: Request) -> Response:
        body = await decode_body(request, EventBody)
        return json_response({"seq": self._events.announce(body.session, body.kind, body.data)}, 201)

    async def events(self, request: Request) -> Response:
        session_id = request.path_params.get("id", "")
        if session_id and not self._sessions.knows(session_id):
            raise NotFound(f"unknown session {redact_known(session_id)!r}; no session or event has this id")
        wait = request.query_params.get("wait", "1") not in ("0", "false")
        return StreamingResponse(
            self._stream_events(session_id, read_cursor(request), wait),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    async def _stream_events(self, session_id: str, after: int, wait: bool) -> AsyncIterator[bytes]:
        yield b": events\n\n"
        async with aclosing(self._events.follow(session_id, after, wait=wait)) as following:
            async for event in following:
                if event is None:
                    yield b": alive\n\n"
                else:
                    data = msgspec.json.encode(event)
                    yield b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), data)


def _encode_samples(view: SessionView, keep_empty: bool) -> bytes:
    rows = [encode_piece(row) for row in view.samples(keep_empty=keep_empty)]
    return encode_json({"session": view.session.id, "samples": rows})
