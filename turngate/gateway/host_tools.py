"""Check, record and answer calls to host tools.

A call is recorded before it is answered. If the tool has `wait_s`, the call waits up to that long for the host's answer. The agent always
receives a reply or an error, at the latest when the wait is over, the session ends or the gateway stops.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

import msgspec

from turngate.client.protocol import ToolCallView
from turngate.common import clock
from turngate.errors import BadRequest, Conflict, NotFound
from turngate.gateway.events import Events
from turngate.store.store import Store
from turngate.store.tool_calls import HostToolCall
from turngate.trace.session import Session
from turngate.trace.tool_schema import MAX_CALLS, ArgumentChecker, HostTool, build_checker
from turngate.trace.turn_rewards import ToolCallRecord
from turngate.types import Json

MAX_KEY = 256  # characters of an idempotency key; further characters are ignored
_CHECK_S = 3.0  # time limit for checking arguments


class HostTools:
    def __init__(self, store: Store, events: Events) -> None:
        self._store = store
        self._calls = store.tool_calls
        self._events = events
        self._waiting: dict[asyncio.Future[bytes], int] = {}  # number of callers waiting for the same answer

    def find(self, session: Session, name: str) -> HostTool:
        for tool in session.config.tools:
            if tool.name == name:
                return tool
        names = ", ".join(tool.name for tool in session.config.tools)
        raise NotFound(f"unknown tool {name!r}; this session has {f'these tools: {names}' if names else 'no tools'}")

    async def call(self, session: Session, name: str, body: bytes, idempotency_key: str = "") -> bytes:
        """Call a tool and return its reply as JSON. Repeating the call with the same idempotency key returns the same reply."""
        session.require_open()
        tool = self.find(session, name)
        arguments = await _check_arguments(tool, body)
        session.require_open()  # checking may have taken a while
        session.last_used = clock.now()
        key = idempotency_key[:MAX_KEY]
        known = self._calls.find_repeat(session.key, key) if key else None
        if known is not None and (known.tool, bytes(known.arguments)) != (tool.name, arguments):
            raise Conflict(
                "Idempotency-Key was already used for a different call; use a new key", param="Idempotency-Key"
            )
        call = known or self._record(session, tool, arguments, key)
        if call.reply is not None:
            return bytes(call.reply)
        return await self._wait_for_host(session, tool, call)

    def _record(self, session: Session, tool: HostTool, arguments: bytes, key: str) -> HostToolCall:
        reply = msgspec.json.encode(tool.immediate_reply()) if tool.wait_s is None else None
        call = self._calls.add(session.key, session.id, tool.name, arguments, key, reply, MAX_CALLS)
        if call is None:
            raise Conflict(
                f"this session has reached its limit of {MAX_CALLS} tool calls; open a new session to make more"
            )
        self._events.wake(session.id)
        return call

    async def _wait_for_host(self, session: Session, tool: HostTool, call: HostToolCall) -> bytes:
        """Return the host's reply, or the default reply if the host does not answer in time. Repeated calls share the first call's wait.

        Raise an error if the session ends first.
        """
        pending = session.pending_tool_calls.get(call.call)
        if pending is None:
            pending = session.pending_tool_calls[call.call] = asyncio.get_running_loop().create_future()
        self._waiting[pending] = self._waiting.get(pending, 0) + 1
        end = call.called + (tool.wait_s or 0)
        deadline = session.deadline()
        left = (end if deadline is None else min(end, deadline)) - clock.now()
        try:
            await asyncio.wait([pending], timeout=max(0.0, left))
        finally:
            self._waiting[pending] -= 1
            if not self._waiting[pending]:  # a reply from the host would now be too late
                del self._waiting[pending]
                session.pending_tool_calls.pop(call.call, None)
        if pending.done() and not pending.cancelled():
            return pending.result()
        if pending.cancelled():
            session.require_open()  # raises with the reason
        reply = msgspec.json.encode(tool.default_reply())
        self._calls.answer(session.key, session.id, call, reply, "time")
        if not pending.done():
            pending.set_result(reply)
        self._events.wake(session.id)
        return reply

    def answer(self, session: Session, number: int, reply: Json) -> HostToolCall:
        """Record the host's reply to a waiting call, then deliver the reply."""
        call = self._calls.find(session.key, number)
        if call is None:
            raise NotFound(f"unknown tool call {number} in session {session.id}")
        if call.reply is not None:
            how = {
                "tool": f": calls to {call.tool!r} are answered immediately, because the tool has no wait_s",
                "time": " with the default reply, because the host did not answer in time",
            }.get(call.answered_by, "")
            raise Conflict(f"tool call {number} was already answered{how}")
        pending = session.pending_tool_calls.get(number)
        if pending is None or pending.done():
            raise Conflict(f"tool call {number} is no longer waiting for an answer: the agent's request has ended")
        written = msgspec.json.encode(reply)
        self._calls.answer(session.key, session.id, call, written, "host")
        pending.set_result(written)
        self._events.wake(session.id)
        found = self._calls.find(session.key, number)
        assert found is not None
        return found

    def list_records(self, session_id: str) -> list[ToolCallRecord]:
        """Return the number, tool and time of each host-tool call of a session, oldest first."""
        row = self._store.find(session_id)
        calls = [] if row is None else self._calls.page(row.key, 0, MAX_CALLS)
        return [ToolCallRecord(call.call, call.tool, call.called) for call in calls]

    def list_calls(self, session: Session, after: int = 0, limit: int = 100) -> list[ToolCallView]:
        """Return up to `limit` of a session's host-tool calls after call number `after`, oldest first."""
        return [describe_call(session, call) for call in self._calls.page(session.key, after, limit)]


def describe_call(session: Session, call: HostToolCall) -> ToolCallView:
    return ToolCallView(
        call=call.call,
        tool=call.tool,
        arguments=call.arguments,
        time=call.called,
        reply=call.reply,
        answered=call.answered,
        answered_by=call.answered_by,
        waiting=call.call in session.pending_tool_calls,
    )


async def _check_arguments(tool: HostTool, body: bytes) -> bytes:
    """Check the arguments of a call in a thread, since a complex schema makes the check slow. Return the arguments as normalized JSON."""
    try:
        arguments = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadRequest("the body must be a JSON object with the tool's arguments")
    try:
        async with asyncio.timeout(_CHECK_S):
            await asyncio.to_thread(_find_checker(msgspec.json.encode(tool.schema)), arguments)
    except TimeoutError:
        raise BadRequest(
            f"checking the arguments took longer than {_CHECK_S:.0f} s; send fewer or shorter arguments"
        ) from None
    return msgspec.json.encode(arguments)


@lru_cache(maxsize=64)
def _find_checker(schema: bytes) -> ArgumentChecker:
    """Return a checker for a schema. Checkers are cached, since the rollouts of one task have the same tools."""
    return build_checker(msgspec.json.decode(schema))
