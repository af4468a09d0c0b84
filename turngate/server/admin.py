"""The native API, under `/admin`: sessions, their traces and samples, events, the fence. Everything here needs the admin key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turngate.control import Control
from turngate.errors import BadRequest
from turngate.fence import Pause
from turngate.server.auth import Auth
from turngate.server.http import body, read_cursor, reply, route, whole_number
from turngate.trace.session import SessionConfig
from turngate.types import Mode


class Open(SessionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/sessions`: a session's settings, and optionally its id."""

    id: str | None = None
    mode: Mode | None = None  # type: ignore[assignment]  # None: what this gateway serves

    def config(self, default_mode: Mode) -> SessionConfig:
        values = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(SessionConfig)}
        return SessionConfig(**{**values, "mode": self.mode or default_mode})


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop: str = ""


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Pause = "hold"


class ResumeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None


class Admin:
    def __init__(self, control: Control, auth: Auth) -> None:
        self._control = control
        self._auth = auth

    def routes(self) -> list[Route]:
        one = "/admin/sessions/{id}"
        table: list[tuple[str, Literal["GET", "POST", "DELETE"], object]] = [
            ("/admin/sessions", "POST", self.open),
            ("/admin/sessions", "GET", self.listing),
            (one, "GET", self.show),
            (one, "DELETE", self.delete),
            (f"{one}/trace", "GET", self.trace),
            (f"{one}/samples", "GET", self.samples),
            (f"{one}/events", "GET", self.events),
            (f"{one}/seal", "POST", self.seal),
            (f"{one}/cancel", "POST", self.cancel),
            ("/admin/events", "GET", self.events),
            ("/admin/fence", "GET", self.fence),
            ("/admin/fence/pause", "POST", self.pause),
            ("/admin/fence/resume", "POST", self.resume),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def open(self, request: Request) -> Response:
        wanted = await body(request, Open)
        session, secret = self._control.open(wanted.config(self._control.default_mode), wanted.id)
        return reply({**self._control.show(session.id), "api_key": secret}, 201)

    async def listing(self, request: Request) -> Response:
        status = request.query_params.get("status")
        if status not in (None, "open", "sealed", "cancelled"):
            raise BadRequest(f"status: {status!r} is not one of open, sealed, cancelled", param="status")
        limit = whole_number(request, "limit", 100)
        before = whole_number(request, "before")
        return reply({"sessions": self._control.listing(status=status, before=before, limit=min(limit or 100, 1000))})

    async def show(self, request: Request) -> Response:
        return reply(self._control.show(request.path_params["id"]))

    async def trace(self, request: Request) -> Response:
        return reply(self._control.trace(request.path_params["id"]))

    async def samples(self, request: Request) -> Response:
        keep = request.query_params.get("all", "") in ("1", "true")
        session_id = request.path_params["id"]
        return reply({"session": session_id, "samples": self._control.samples(session_id, keep_empty=keep)})

    async def seal(self, request: Request) -> Response:
        wanted = await body(request, Seal)
        session = await self._control.seal(request.path_params["id"], wanted.stop)
        return reply(self._control.show(session.id))

    async def cancel(self, request: Request) -> Response:
        session = await self._control.cancel(request.path_params["id"])
        return reply(self._control.show(session.id))

    async def delete(self, request: Request) -> Response:
        await self._control.delete(request.path_params["id"])
        return reply({"id": request.path_params["id"], "deleted": True})

    async def events(self, request: Request) -> Response:
        session_id = request.path_params.get("id", "")
        if session_id:
            self._control.find(session_id)
        (after,) = read_cursor(request)
        return StreamingResponse(
            self._events(session_id, after), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def _events(self, session_id: str, after: int) -> AsyncIterator[bytes]:
        yield b": events\n\n"
        async for event in self._control.events.follow(session_id, after):
            if event is None:
                yield b": alive\n\n"
            else:
                yield b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), msgspec.json.encode(event))

    async def fence(self, request: Request) -> Response:
        return reply(self._control.fence())

    async def pause(self, request: Request) -> Response:
        wanted = await body(request, PauseBody)
        return reply(await self._control.pause(wanted.mode))

    async def resume(self, request: Request) -> Response:
        wanted = await body(request, ResumeBody)
        return reply(self._control.resume(wanted.version))
