"""Calls of host tools: checked, recorded, answered. Part of `control.py`'s verbs; `server/tools.py` is the agent's way in.

A call is in the store before it is answered. With `wait_s` its answer is the host's, as long as that comes in time; an agent
is never left hanging: at the end of the time, of the session or of the gateway it is told something.
"""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache

import msgspec

from turngate.errors import BadRequest, Conflict, NotFound
from turngate.gateway.events import Events
from turngate.store.sqlite import Store
from turngate.store.tool_calls import HostToolCall
from turngate.trace.host_tools import MAX_CALLS, ArgumentChecker, HostTool, build_checker
from turngate.trace.session import Session
from turngate.types import Json

MARK_LIMIT = 256  # characters of a caller's own mark
_CHECK_S = 3.0


class HostTools:
    def __init__(self, store: Store, events: Events) -> None:
        self._calls = store.tool_calls
        self._events = events
        self._waiting: dict[asyncio.Future[bytes], int] = {}  # how many wait for the same answer

    def find(self, session: Session, name: str) -> HostTool:
        for tool in session.config.tools:
            if tool.name == name:
                return tool
        there = ", ".join(tool.name for tool in session.config.tools)
        raise NotFound(f"there is no tool {name!r} here; {f'there are {there}' if there else 'this session has none'}")

    async def call(self, session: Session, name: str, body: bytes, repeat: str = "") -> bytes:
        """The answer, as JSON. `repeat`: the caller's own mark; the same again is the same call, and gets the same answer."""
        session.require_open()
        tool = self.find(session, name)
        arguments = await _check_arguments(tool, body)
        session.require_open()  # that may have taken a while
        session.last_used = time.time()
        mark = repeat[:MARK_LIMIT]
        known = self._calls.find_repeat(session.key, mark) if mark else None
        if known is not None and (known.tool, bytes(known.arguments)) != (tool.name, arguments):
            raise Conflict("Idempotency-Key: was used for another call; make up a new one", param="Idempotency-Key")
        call = known or self._recorded(session, tool, arguments, mark)
        if call.reply is not None:
            return bytes(call.reply)
        return await self._answered(session, tool, call)

    def _recorded(self, session: Session, tool: HostTool, arguments: bytes, mark: str) -> HostToolCall:
        reply = msgspec.json.encode(tool.immediate_reply()) if tool.wait_s is None else None
        call = self._calls.add(session.key, session.id, tool.name, arguments, mark, reply, MAX_CALLS)
        if call is None:
            raise Conflict(f"this session has made {MAX_CALLS} tool calls, which is the most; no more are taken")
        self._events.wake(session.id)
        return call

    async def _answered(self, session: Session, tool: HostTool, call: HostToolCall) -> bytes:
        """What the host says, or nobody. A call that came again waits beside its first."""
        asked = session.pending_tool_calls.get(call.call)
        if asked is None:
            asked = session.pending_tool_calls[call.call] = asyncio.get_running_loop().create_future()
        self._waiting[asked] = self._waiting.get(asked, 0) + 1
        end = call.called + (tool.wait_s or 0)
        deadline = session.deadline()
        left = (end if deadline is None else min(end, deadline)) - time.time()
        try:
            await asyncio.wait([asked], timeout=max(0.0, left))
        finally:
            self._waiting[asked] -= 1
            if not self._waiting[asked]:  # from now on a host's answer comes too late
                del self._waiting[asked]
                session.pending_tool_calls.pop(call.call, None)
        if asked.done() and not asked.cancelled():
            return asked.result()
        if asked.cancelled():
            session.require_open()  # says why
        reply = msgspec.json.encode(tool.default_reply())
        self._calls.answer(session.key, session.id, call, reply, "time")
        if not asked.done():
            asked.set_result(reply)
        self._events.wake(session.id)
        return reply

    def answer(self, session: Session, number: int, reply: Json) -> HostToolCall:
        """The host's answer to a call that waits for it. Recorded before it is delivered."""
        call = self._calls.find(session.key, number)
        if call is None:
            raise NotFound(f"session {session.id} has made no tool call {number}")
        if call.reply is not None:
            told = {"tool": "at once", "time": "when its time was up"}.get(call.answered_by, "already")
            raise Conflict(f"tool call {number} was answered {told}")
        asked = session.pending_tool_calls.get(number)
        if asked is None or asked.done():
            raise Conflict(f"nobody waits for an answer to tool call {number} any more")
        written = msgspec.json.encode(reply)
        self._calls.answer(session.key, session.id, call, written, "host")
        asked.set_result(written)
        self._events.wake(session.id)
        found = self._calls.find(session.key, number)
        assert found is not None
        return found

    def listing(self, session: Session, after: int = 0, limit: int = 100) -> list[dict[str, Json]]:
        """Oldest first."""
        return [describe_call(session, call) for call in self._calls.page(session.key, after, limit)]


def describe_call(session: Session, call: HostToolCall) -> dict[str, Json]:
    return {
        "call": call.call,
        "tool": call.tool,
        "arguments": call.arguments,
        "time": call.called,
        "reply": call.reply,
        "answered": call.answered,
        "answered_by": call.answered_by,
        "waiting": call.call in session.pending_tool_calls,
    }


async def _check_arguments(tool: HostTool, body: bytes) -> bytes:
    """The arguments of a call, in one spelling. Checked in a thread: what a schema asks for may take long, and others are waiting."""
    try:
        arguments = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadRequest("the body must be a JSON object: the arguments of the tool")
    try:
        async with asyncio.timeout(_CHECK_S):
            await asyncio.to_thread(_cached_checker(msgspec.json.encode(tool.schema)), arguments)
    except TimeoutError:
        raise BadRequest(f"the arguments take longer than {_CHECK_S:.0f} s to check; send fewer") from None
    return msgspec.json.encode(arguments)


@lru_cache(maxsize=64)
def _cached_checker(schema: bytes) -> ArgumentChecker:
    """Rollouts of one task have the same tools."""
    return build_checker(msgspec.json.decode(schema))
