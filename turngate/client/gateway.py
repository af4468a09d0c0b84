"""Client for the admin API of a gateway, which may run in this process or elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal
from urllib.parse import quote

import aiohttp
import msgspec

from turngate.client.feed_client import FeedClient, IgnoredReply
from turngate.client.protocol import (
    AnsweredToolCall,
    AttemptList,
    DecodedTrace,
    EnginesView,
    EventReceipt,
    FenceView,
    ModelList,
    OpenedSession,
    OutcomeReceipt,
    PauseMode,
    SampleList,
    SampleRow,
    SessionInfo,
    SessionList,
    SessionOutcome,
    SupersededAttempt,
    ToolCallPage,
    ToolCallView,
)
from turngate.client.transport import GatewayUnreachable, InvalidReply, RequestRejected
from turngate.store.attempts import AttemptRow
from turngate.store.events import GatewayEvent
from turngate.store.outcomes import RecordedOutcome
from turngate.telemetry.spans import TRACEPARENT
from turngate.types import Json

__all__ = ["GatewayClient", "GatewayUnreachable", "InvalidReply", "RequestRejected"]

_PAGE = 100  # tool calls per request
_RETRIED_STATUSES = (408, 425, 429)  # client errors that a later attempt may not get
_event_decoder = msgspec.json.Decoder(GatewayEvent)


class GatewayClient(FeedClient):
    """A client for most of the admin API, with one method per operation."""

    async def open(self, config: dict[str, Json], session: str | None = None, traceparent: str = "") -> OpenedSession:
        """Open a session. If the caller chooses the session's id (`session`), it can end the session even if the reply is lost.

        `traceparent` is the parent span of the session's turns.
        """
        headers = {TRACEPARENT: traceparent} if traceparent else {}
        body = {**config, "id": session}
        return await self._request("POST", "/admin/sessions", OpenedSession, body, headers=headers)

    async def check(self) -> None:
        """Check that the gateway answers and accepts the key.

        Raise `GatewayUnreachable` if it does not answer, returns status 503 or cannot be reached by a proxy, `Unauthorized` if it rejects
        the key, and `ConfigError` if the answer is not from a gateway.
        """
        await self.fence()

    async def fence(self) -> FenceView:
        return await self._request("GET", "/admin/fence", FenceView)

    async def pause(self, mode: PauseMode = "hold", limit_s: float | None = None) -> FenceView:
        """Hold new calls. Mode `drain` also waits, without a time limit, until the calls in flight have ended.

        Mode `keep` also freezes the calls in flight. If `limit_s` is set and calls are not resumed within that many seconds, the trainer
        is presumed gone, and calls continue at the old policy version.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request(
            "POST", "/admin/fence/pause", FenceView, {"mode": mode, "limit_s": limit_s}, within=limit
        )

    async def resume(self, version: int | None = None, model: str | None = None) -> FenceView:
        """Resume calls at a policy version; None keeps the current one.

        For a new version, `model` is the name under which the engine serves it. None means that the engine's weights were replaced in
        place; if the current version has a model name, pass "" instead.
        """
        return await self._request("POST", "/admin/fence/resume", FenceView, {"version": version, "model": model})

    async def load_weights(
        self, version: int, *, path: str = "", lora_path: str = "", name: str = "", mode: PauseMode | None = None
    ) -> FenceView:
        """Load a model or an adapter into every replica, and resume calls at `version`.

        If loading fails, raise `RequestRejected` (502). The old version then stays current. On a shared store, only the first
        engine decides this: another engine that fails is taken out of service.
        """
        body: dict[str, Json] = {"version": version, "path": path, "lora_path": lora_path, "mode": mode}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        if name:
            body["name"] = name
        return await self._request("POST", "/admin/weights", FenceView, body, within=limit)

    async def engines(self) -> EnginesView:
        """Return the engines of the gateway and their load.

        With an API key, return only whether the engines are saturated, and whether they are scripted.
        """
        return await self._request("GET", "/admin/engines", EnginesView)

    async def models(self) -> list[str]:
        """Return the names of the models that the gateway serves."""
        return [model.id for model in (await self._request("GET", "/v1/models", ModelList)).data]

    async def sessions(self, status: Literal["", "open", "sealed", "cancelled"] = "") -> list[str]:
        """Return the ids of up to 1000 sessions, newest first. With `status`, return only sessions with that status."""
        path = "/admin/sessions?limit=1000" + (f"&status={status}" if status else "")
        return [session.id for session in (await self._request("GET", path, SessionList)).sessions]

    async def show(self, session: str) -> SessionInfo:
        return await self._request("GET", f"/admin/sessions/{quote(session)}", SessionInfo)

    async def trace(self, session: str) -> DecodedTrace:
        return await self._request("GET", f"/admin/sessions/{quote(session)}/trace", DecodedTrace)

    async def samples(self, session: str, *, everything: bool = False, masks: bool = False) -> list[SampleRow]:
        """Return the training rows of a session. With `everything`, include rows without trained tokens.

        With `masks`, turns that can be trained only with their sampling masks also count as trained. The rows do not contain the masks.
        """
        query = "&".join(name for name, wanted in (("all=1", everything), ("masks=1", masks)) if wanted)
        path = f"/admin/sessions/{quote(session)}/samples{'?' if query else ''}{query}"
        return (await self._request("GET", path, SampleList)).samples

    async def seal(self, session: str, stop: str = "") -> SessionInfo:
        return await self._request("POST", f"/admin/sessions/{quote(session)}/seal", SessionInfo, {"stop": stop})

    async def cancel(self, session: str) -> SessionInfo:
        return await self._request("POST", f"/admin/sessions/{quote(session)}/cancel", SessionInfo)

    async def delete(self, session: str) -> None:
        """End a session, and delete its recorded data and events."""
        await self._request("DELETE", f"/admin/sessions/{quote(session)}", IgnoredReply)

    async def announce(self, session: str, kind: str, data: dict[str, Json]) -> int:
        """Add an event of a session to the event log, and return the event's number. The session need not be open yet."""
        body = {"session": session, "kind": kind, "data": data}
        return (await self._request("POST", "/admin/events", EventReceipt, body)).seq

    async def record(self, session: str, recorded: RecordedOutcome, *, replace: bool = False) -> str:
        """Record the outcome of a rollout. Recording the same outcome again is allowed. Recording a different one requires `replace`.

        Return why the outcome does not count, such as `superseded by attempt 2`, or an empty string if it counts.
        """
        recorded.encode()  # raises an error for data that the gateway would reject
        suffix = "?replace=1" if replace else ""
        path = f"/admin/sessions/{quote(session)}/outcome{suffix}"
        return (await self._request("PUT", path, OutcomeReceipt, msgspec.to_builtins(recorded))).excluded

    async def attempts(self, rollout: str) -> list[AttemptRow]:
        """Return the attempts at a rollout, lowest number first."""
        return (await self._request("GET", f"/admin/attempts?rollout={quote(rollout, safe='')}", AttemptList)).attempts

    async def supersede(self, rollout: str, attempt: int, session: str = "") -> SupersededAttempt[SessionOutcome]:
        """Mark an attempt as superseded, unless it already has an outcome.

        No session can be opened for a superseded attempt, and its outcome does not count. If the returned state is not `superseded`, the
        caller must use the returned outcome. `session` is the id that was chosen for the attempt's session.
        """
        body = {"rollout": rollout, "attempt": attempt, "session": session}
        reply = SupersededAttempt[SessionOutcome]
        return await self._request("POST", "/admin/attempts/supersede", reply, body)

    async def tool_calls(self, session: str) -> list[ToolCallView]:
        """Return all host-tool calls of a session, oldest first."""
        calls: list[ToolCallView] = []
        while True:
            after = calls[-1].call if calls else 0
            path = f"/admin/sessions/{quote(session)}/tools?after={after}&limit={_PAGE}"
            page = (await self._request("GET", path, ToolCallPage)).calls
            calls += page
            if len(page) < _PAGE:
                return calls

    async def answer_tool(self, session: str, call: int, reply: Json) -> AnsweredToolCall:
        """Answer a host-tool call that is waiting for the host. Raise `RequestRejected` (409) if the agent is no longer waiting."""
        path = f"/admin/sessions/{quote(session)}/tools/{call}/answer"
        return await self._request("POST", path, AnsweredToolCall, {"reply": reply})

    async def events(
        self, session: str = "", after: int = 0, *, wait: bool = True
    ) -> AsyncGenerator[GatewayEvent, None]:
        """Yield the events of one session. If `session` is empty, yield the events of all sessions and of the gateway.

        `after` is the `seq` of the last event that the caller has read, or 0 to start at the beginning. The stream survives gateway
        restarts without losing or repeating an event. It ends without an error if the gateway does not know the session or does not accept
        the key. It raises an error if the gateway rejects the request for another reason, such as a negative `after`. With `wait=False`, it
        stops after the existing events.
        """
        assert self._http is not None, "the client is not open; use it in an `async with` block"
        path = f"/admin/sessions/{quote(session)}/events" if session else "/admin/events"
        while True:
            try:
                url = f"{self.url}{path}?after={after}" + ("" if wait else "&wait=0")
                limit = aiohttp.ClientTimeout(sock_read=60)
                async with self._http.get(url, timeout=limit, allow_redirects=False) as response:
                    if response.status in (401, 403, 404):
                        return
                    if 400 <= response.status < 500 and response.status not in _RETRIED_STATUSES:
                        is_ours = "x-turngate" in response.headers
                        raise self._to_error(response.status, await response.read(), is_ours=is_ours)
                    if response.status == 200:
                        self._outage.add_answer()
                        async for line in response.content:
                            if line.startswith(b"data: "):
                                event = _event_decoder.decode(line[6:])
                                after = event.seq
                                yield event
                        if not wait:
                            return
                    else:
                        self._outage.add_failure()
            except (aiohttp.ClientError, TimeoutError, ValueError):  # ValueError: a line too long to be a gateway event
                self._outage.add_failure()
            await asyncio.sleep(0.5)
