"""A client of a gateway's admin API, whether the gateway runs in this process or elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import quote

import aiohttp
import msgspec

from turngate.client.protocol import (
    AnsweredToolCall,
    DeliveryPage,
    EventReceipt,
    FeedConfig,
    FeedList,
    FeedReader,
    FeedView,
    FenceView,
    ModelList,
    OpenedSession,
    PauseMode,
    SessionInfo,
    SessionList,
    ToolCallPage,
    ToolCallView,
)
from turngate.client.transport import GatewayTransport, GatewayUnreachable, InvalidReply, RequestRejected
from turngate.store.events import Event
from turngate.store.outcomes import RecordedOutcome
from turngate.telemetry.spans import TRACEPARENT
from turngate.types import Json

__all__ = ["GatewayClient", "GatewayUnreachable", "InvalidReply", "RequestRejected"]

_PAGE = 100  # tool calls that are requested at once
_BUILD_S = 120  # for which a gateway may be silent while it builds the rows of a large group
_event_decoder = msgspec.json.Decoder(Event)


class _Ignored(msgspec.Struct, frozen=True):
    """A reply of which nothing is read."""


class GatewayClient(GatewayTransport):
    """The verbs of the admin API."""

    async def open(self, config: dict[str, Json], session: str | None = None, traceparent: str = "") -> OpenedSession:
        """A new session; under an id of the caller's own, so that it can be ended even where no answer came. `traceparent`: the span
        that its turns belong to, where there are spans."""
        headers = {TRACEPARENT: traceparent} if traceparent else {}
        body = {**config, "id": session}
        return await self._request("POST", "/admin/sessions", OpenedSession, body, headers=headers)

    async def check(self) -> None:
        """That it is there, and takes our key. `ConfigError` where something else answers."""
        await self.fence()

    async def fence(self) -> FenceView:
        return await self._request("GET", "/admin/fence", FenceView)

    async def pause(self, mode: PauseMode = "hold", limit_s: float | None = None) -> FenceView:
        """New calls wait from now on. `drain` answers when those in flight have ended, however long that takes; `keep` freezes them.

        `limit_s`: without a resume for so long calls go on at the old version.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request(
            "POST", "/admin/fence/pause", FenceView, {"mode": mode, "limit_s": limit_s}, within=limit
        )

    async def resume(self, version: int | None = None, model: str | None = None) -> FenceView:
        """Calls go on, at a policy version; None: the one that it was. `model`: the name under which the engine has it."""
        return await self._request("POST", "/admin/fence/resume", FenceView, {"version": version, "model": model})

    async def load_weights(
        self, version: int, *, path: str = "", lora_path: str = "", name: str = "", mode: PauseMode | None = None
    ) -> FenceView:
        """Have every replica load a model or an adapter, and go on at that version. `RequestRejected` (502): the old one stays in force."""
        body: dict[str, Json] = {"version": version, "path": path, "lora_path": lora_path, "mode": mode}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        if name:
            body["name"] = name
        return await self._request("POST", "/admin/weights", FenceView, body, within=limit)

    async def models(self) -> list[str]:
        """The names of the models that it serves."""
        return [model.id for model in (await self._request("GET", "/v1/models", ModelList)).data]

    async def sessions(self) -> list[str]:
        """Ids, newest first."""
        return [
            session.id for session in (await self._request("GET", "/admin/sessions?limit=1000", SessionList)).sessions
        ]

    async def show(self, session: str) -> SessionInfo:
        return await self._request("GET", f"/admin/sessions/{quote(session)}", SessionInfo)

    async def trace(self, session: str) -> Json:
        return await self._request("GET", f"/admin/sessions/{quote(session)}/trace", dict[str, Json])

    async def samples(self, session: str, *, everything: bool = False) -> list[Json]:
        suffix = "?all=1" if everything else ""
        path = f"/admin/sessions/{quote(session)}/samples{suffix}"
        found: list[Json] = (await self._request("GET", path, dict[str, Json]))["samples"]
        return found

    async def seal(self, session: str, stop: str = "") -> SessionInfo:
        return await self._request("POST", f"/admin/sessions/{quote(session)}/seal", SessionInfo, {"stop": stop})

    async def cancel(self, session: str) -> SessionInfo:
        return await self._request("POST", f"/admin/sessions/{quote(session)}/cancel", SessionInfo)

    async def delete(self, session: str) -> None:
        """With everything that was recorded of it."""
        await self._request("DELETE", f"/admin/sessions/{quote(session)}", _Ignored)

    async def announce(self, session: str, kind: str, data: dict[str, Json]) -> int:
        """Put an event into the stream, beside the turns; the session need not be open yet. Its place there.

        A failure is a `TurngateError`, and what becomes of it is the caller's choice.
        """
        body = {"session": session, "kind": kind, "data": data}
        return (await self._request("POST", "/admin/events", EventReceipt, body)).seq

    async def record(self, session: str, recorded: RecordedOutcome, *, replace: bool = False) -> None:
        """How the rollout ended, kept beside its trace. Once: the same again is fine, another one is refused without `replace`."""
        recorded.check()
        suffix = "?replace=1" if replace else ""
        path = f"/admin/sessions/{quote(session)}/outcome{suffix}"
        await self._request("PUT", path, _Ignored, msgspec.to_builtins(recorded))

    async def close_group(self, group: str) -> None:
        """No further rollout of it will come. Once or more often, and whether anybody waits for it or not."""
        await self._request("POST", f"/admin/groups/{quote(group, safe='')}/close", _Ignored)

    # ── feeds; `trainers/feed.py` is the easy way to read one ────────────────────────────────────────────────────

    async def feeds(self) -> list[FeedView]:
        return (await self._request("GET", "/admin/feeds", FeedList)).feeds

    async def show_feed(self, name: str) -> FeedView:
        """With the groups that are not complete."""
        return await self._request("GET", _feed_path(name), FeedView)

    async def open_feed(self, name: str, config: FeedConfig) -> FeedView:
        """The feed of that name, made if there is none. `RequestRejected` (409) where it is there with other choices."""
        return await self._request("PUT", _feed_path(name), FeedView, msgspec.to_builtins(config))

    async def delete_feed(self, name: str) -> None:
        await self._request("DELETE", _feed_path(name), _Ignored)

    async def take_over_feed(self, name: str) -> str:
        """Become its reader: the token that pages and commits want. Who was so before is refused from now on."""
        return (await self._request("POST", f"{_feed_path(name)}/reader", FeedReader)).reader

    async def fetch_deliveries(
        self, name: str, reader: str, *, after: int | None = None, wait: float = 0, limit: int = 1
    ) -> DeliveryPage:
        """Deliveries past a number (None: the committed one), in order; waits up to so many seconds for the first."""
        asked = f"{_feed_path(name)}/deliveries?reader={quote(reader, safe='')}&wait={wait:.3f}&limit={limit}"
        past = "" if after is None else f"&after={after}"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=wait + _BUILD_S)
        return await self._request("GET", asked + past, DeliveryPage, msgpack=True, within=limits)

    async def commit_feed(self, name: str, reader: str, number: int) -> int:
        """All up to a number is trained, and in a checkpoint. What is committed now, which may be more."""
        body = {"reader": reader, "number": number}
        return (await self._request("POST", f"{_feed_path(name)}/commit", FeedView, body)).committed

    async def tool_calls(self, session: str) -> list[ToolCallView]:
        """Every call of a host tool, oldest first."""
        calls: list[ToolCallView] = []
        while True:
            after = calls[-1].call if calls else 0
            path = f"/admin/sessions/{quote(session)}/tools?after={after}&limit={_PAGE}"
            page = (await self._request("GET", path, ToolCallPage)).calls
            calls += page
            if len(page) < _PAGE:
                return calls

    async def answer_tool(self, session: str, call: int, reply: Json) -> AnsweredToolCall:
        """Answer a call that waits for the host. `RequestRejected` (409) if the agent no longer waits."""
        path = f"/admin/sessions/{quote(session)}/tools/{call}/answer"
        return await self._request("POST", path, AnsweredToolCall, {"reply": reply})

    async def events(self, session: str = "", after: int = 0, *, wait: bool = True) -> AsyncGenerator[Event, None]:
        """What happens in a session, or (empty) in all, past a cursor: `seq` of the last event that was seen, 0 for the beginning.

        Goes on for as long as the gateway is there, through its restarts: nothing is lost or told twice. `wait=False`: it ends
        with what there is now.
        """
        assert self._http is not None, "use it as a context manager"
        path = f"/admin/sessions/{quote(session)}/events" if session else "/admin/events"
        while True:
            try:
                url = f"{self.url}{path}?after={after}" + ("" if wait else "&wait=0")
                limit = aiohttp.ClientTimeout(sock_read=60)
                async with self._http.get(url, timeout=limit, allow_redirects=False) as response:
                    if response.status in (401, 403, 404):
                        return
                    async for line in response.content:
                        if line.startswith(b"data: ") and response.status == 200:
                            event = _event_decoder.decode(line[6:])
                            after = event.seq
                            yield event
                    if not wait and response.status == 200:
                        return
            except (
                aiohttp.ClientError,
                TimeoutError,
                ValueError,
            ):  # ValueError: a line that is too long to be one of ours
                pass
            await asyncio.sleep(0.5)


def _feed_path(name: str) -> str:
    return f"/admin/feeds/{quote(name, safe='')}"
