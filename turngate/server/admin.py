"""The native API, under `/admin`: sessions, their traces, samples, outcomes and tool calls, events. Everything here needs
the admin key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turngate.errors import BadRequest, NotFound
from turngate.gateway.events import Events
from turngate.gateway.host_tools import HostTools
from turngate.gateway.outcomes import OutcomeRecorder
from turngate.gateway.sessions import Sessions
from turngate.server.auth import Auth
from turngate.server.http import decode_body, encoded_response, int_param, json_response, read_cursor, route
from turngate.store.outcomes import RecordedOutcome
from turngate.telemetry.spans import TRACEPARENT, current_tracer, parse_traceparent
from turngate.trace.session import SessionConfig
from turngate.types import Json, Mode
from turngate.views.session import SessionView, SessionViews, encode_json, encode_piece
from turngate.views.session_directory import SessionDirectory

RunnerEventKind = Literal["stage", "rollout", "graded", "note"]  # kinds of events that whoever runs rollouts may tell


class OpenSessionBody(SessionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/sessions`: a session's settings, and optionally its id."""

    id: str | None = None
    mode: Mode | None = None  # type: ignore[assignment]  # None: what this gateway serves

    def config(self, default_mode: Mode) -> SessionConfig:
        values = {name: getattr(self, name) for name in SessionConfig.__struct_fields__}
        return SessionConfig(**{**values, "mode": self.mode or default_mode})


class SealBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop: str = ""


class EventBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /admin/events`. `session`: its id, whether it is open yet or not; empty: it is about none."""

    kind: RunnerEventKind
    session: str = ""
    data: dict[str, Json] = {}


class AnswerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reply: Json


class AdminRoutes:
    def __init__(
        self,
        sessions: Sessions,
        directory: SessionDirectory,
        session_views: SessionViews,
        events: Events,
        outcomes: OutcomeRecorder,
        host_tools: HostTools,
        auth: Auth,
    ) -> None:
        self._sessions = sessions
        self._directory = directory
        self._session_views = session_views
        self._events = events
        self._outcomes = outcomes
        self._host_tools = host_tools
        self._auth = auth

    def routes(self) -> list[Route]:
        one = "/admin/sessions/{id}"
        table: list[tuple[str, Literal["GET", "POST", "PUT", "DELETE"], object]] = [
            ("/admin/sessions", "POST", self.open),
            ("/admin/sessions", "GET", self.listing),
            (one, "GET", self.show),
            (one, "DELETE", self.delete),
            (f"{one}/trace", "GET", self.trace),
            (f"{one}/samples", "GET", self.samples),
            (f"{one}/events", "GET", self.events),
            (f"{one}/seal", "POST", self.seal),
            (f"{one}/cancel", "POST", self.cancel),
            (f"{one}/outcome", "PUT", self.record),
            (f"{one}/tools", "GET", self.tool_calls),
            (f"{one}/tools/{{call:int}}/answer", "POST", self.answer_tool),
            ("/admin/events", "GET", self.events),
            ("/admin/events", "POST", self.announce),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def open(self, request: Request) -> Response:
        wanted = await decode_body(request, OpenSessionBody)
        config = wanted.config(self._sessions.default_mode)
        if current_tracer() is not None and (parent := parse_traceparent(request.headers.get(TRACEPARENT, ""))):
            # Kept with the session: its turns hang there after a restart as well.
            config = msgspec.structs.replace(config, metadata={**config.metadata, TRACEPARENT: parent})
        session, secret = self._sessions.open(config, wanted.id)
        return json_response({**self._directory.describe(session), "api_key": secret}, 201)

    async def listing(self, request: Request) -> Response:
        status = request.query_params.get("status")
        if status not in (None, "open", "sealed", "cancelled"):
            raise BadRequest(f"status: {status!r} is not one of open, sealed, cancelled", param="status")
        limit = int_param(request, "limit", 100)
        before = int_param(request, "before")
        return json_response(
            {"sessions": self._directory.list_sessions(status=status, before=before, limit=min(limit or 100, 1000))}
        )

    async def show(self, request: Request) -> Response:
        return json_response(await self._directory.show(request.path_params["id"]))

    async def trace(self, request: Request) -> Response:
        return encoded_response(await self._session_views.build(request.path_params["id"], _encode_trace))

    async def samples(self, request: Request) -> Response:
        keep = request.query_params.get("all", "") in ("1", "true")
        return encoded_response(
            await self._session_views.build(request.path_params["id"], lambda shown: _encode_samples(shown, keep))
        )

    async def seal(self, request: Request) -> Response:
        wanted = await decode_body(request, SealBody)
        session = await self._sessions.seal(request.path_params["id"], wanted.stop)
        return json_response(self._directory.describe(session))

    async def cancel(self, request: Request) -> Response:
        session = await self._sessions.cancel(request.path_params["id"])
        return json_response(self._directory.describe(session))

    async def delete(self, request: Request) -> Response:
        await self._sessions.delete(request.path_params["id"])
        return json_response({"id": request.path_params["id"], "deleted": True})

    async def record(self, request: Request) -> Response:
        outcome = await decode_body(request, RecordedOutcome)
        session_id = request.path_params["id"]
        self._outcomes.record(session_id, outcome, replace=request.query_params.get("replace", "") in ("1", "true"))
        return json_response({"id": session_id, "outcome": outcome})

    async def tool_calls(self, request: Request) -> Response:
        session = self._sessions.find(request.path_params["id"])
        limit = int_param(request, "limit", 100) or 100
        calls = self._host_tools.list_calls(session, int_param(request, "after", 0) or 0, min(limit, 1000))
        return json_response({"session": session.id, "calls": calls})

    async def answer_tool(self, request: Request) -> Response:
        wanted = await decode_body(request, AnswerBody)
        session = self._sessions.find(request.path_params["id"])
        return json_response(self._host_tools.answer(session, request.path_params["call"], wanted.reply))

    async def announce(self, request: Request) -> Response:
        wanted = await decode_body(request, EventBody)
        return json_response({"seq": self._events.announce(wanted.session, wanted.kind, wanted.data)}, 201)

    async def events(self, request: Request) -> Response:
        session_id = request.path_params.get("id", "")
        if session_id and not self._sessions.knows(session_id):
            raise NotFound(f"there is no session {session_id!r}, and nothing was told of one")
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
                    told = msgspec.json.encode(event)
                    yield b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), told)


def _encode_trace(shown: SessionView) -> bytes:
    view = shown.trace()
    return encode_json({**view, "nodes": [encode_piece(node) for node in view["nodes"]]})


def _encode_samples(shown: SessionView, keep_empty: bool) -> bytes:
    rows = [encode_piece(row) for row in shown.samples(keep_empty=keep_empty)]
    return encode_json({"session": shown.session.id, "samples": rows})
