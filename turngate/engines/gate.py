"""The trainer as an engine: every model call waits until the trainer takes it, generates, and answers.

    gate = Gate()                                                   # the engine of a gateway in this process
    async for call in gate:                                         # in any thread and event loop, or in several
        ids, logprobs = sample(call.prompt, call.max_tokens, call.sampling)
        await call.answer(ids, logprobs)

The pipeline uses the gate like any other engine, and `server/gate.py` serves trainers in other processes. A call is *waiting*, *taken*
or *ended*. Every change of state happens under one lock, so an answer and the agent's disconnect cannot both end a call. Ended calls
are remembered for a while, so that a late answer gets an error that explains why it is no longer needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Generate, Health, refuse_top_logprobs
from turngate.engines.gate_call import GateCall, GateFault, GateFinish, GateRequest, check_piece
from turngate.engines.gate_ticket import EndedCall, Ticket, digest_piece
from turngate.errors import (
    Conflict,
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    Gone,
    NotFound,
    TurngateError,
)
from turngate.types import ID_DTYPE, Ids, Logprobs

__all__ = ["Gate", "GateCall", "QueueStatus"]

_REMEMBERED = 10_000  # how many ended calls are remembered
_FAULTS: dict[GateFault, type[TurngateError]] = {
    "unavailable": EngineUnavailable,
    "error": EngineError,
    "overflow": ContextOverflow,
}


class QueueStatus(msgspec.Struct, frozen=True):
    """The state of the gate's queue."""

    waiting: int
    taken: int
    oldest_s: float  # age of the oldest waiting call, or 0 if no call is waiting
    takers: int  # trainers that are waiting for a call


class Gate:
    """An engine whose calls are answered by the code that iterates over it.

    A call that makes no progress for `silence_s` seconds, whether taken or not, fails with a retryable error.
    """

    def __init__(
        self,
        *,
        name: str = "gate",
        model: str = "",
        max_context: int | None = None,
        silence_s: float | None = 600.0,
    ) -> None:
        self.name = name
        self.model = model
        self._max_context = max_context
        self._silence_s = silence_s
        self._vocabulary: int | None = None
        self._version: Callable[[], int] | None = None
        # A threading lock, because trainers may run in other threads. It is held briefly and never across an `await`.
        self._lock = threading.Lock()
        self._live: dict[str, Ticket] = {}
        self._queue: OrderedDict[str, Ticket] = OrderedDict()
        self._ended: OrderedDict[str, EndedCall] = OrderedDict()
        self._takers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._closed = False

    def attach(self, *, vocabulary: int, version: Callable[[], int]) -> None:
        """Set the vocabulary size, and the function that returns the current policy version. Called by the gateway."""
        self._vocabulary, self._version = vocabulary, version

    # ── the gateway's side ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        with self._lock:
            self._closed = False

    async def close(self) -> None:
        """Fail all unfinished calls, and end every iteration over the gate."""
        with self._lock:
            self._closed = True
            for ticket in list(self._live.values()):
                ticket.push(EngineUnavailable("the gateway is stopping; retry this call in a moment"))
                self._end(ticket, "the gateway was stopped")
            self._wake()

    @property
    def closed(self) -> bool:
        return self._closed

    async def health(self) -> list[Health]:
        status = self.queue_status()
        detail = f"waiting calls: {status.waiting}, taken: {status.taken}" if status.waiting or status.taken else ""
        total = status.waiting + status.taken
        return [Health(self.name, True, detail, self.model, self._max_context, total)]

    def release(self, session: str) -> None:
        """Do nothing: a session is released only after all its calls have ended."""

    def generate(self, request: Generate) -> _Generation:
        return _Generation(self, request)

    def queue_status(self) -> QueueStatus:
        with self._lock:
            oldest = next(iter(self._queue.values()), None)
            age = 0.0 if oldest is None else time.monotonic() - oldest.arrived_at
            return QueueStatus(len(self._queue), len(self._live) - len(self._queue), age, len(self._takers))

    def admit(self, request: Generate) -> Ticket:
        refuse_top_logprobs(self.name, request)
        ticket = Ticket(request, asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the gateway is stopping; retry this call in a moment")
            self._live[ticket.id] = self._queue[ticket.id] = ticket
            self._wake()
        return ticket

    def next_event(self, ticket: Ticket) -> Chunk | TurngateError | float | None:
        """Return a call's next event. If there is none yet, return the call's deadline in monotonic time, or None if it has no deadline."""
        with self._lock:
            if ticket.events:
                return ticket.events.popleft()
            ticket.notified.clear()
            timeout = None if self._silence_s is None else ticket.last_event_at + self._silence_s
            return min((moment for moment in (timeout, ticket.until) if moment is not None), default=None)

    def check_deadlines(self, ticket: Ticket) -> None:
        """Requeue or fail a call whose deadline has passed.

        A call whose lease has expired returns to the queue, or fails if part of its answer was sent. A call without progress for
        `silence_s` seconds fails.
        """
        now = time.monotonic()
        with self._lock:
            if ticket.id not in self._live:
                return
            if ticket.until is not None and now >= ticket.until:
                if ticket.sent:
                    ticket.push(
                        EngineUnavailable("the trainer stopped responding in the middle of this answer; retry the call")
                    )
                    self._end(ticket, "its lease expired in the middle of the answer")
                    return
                self._requeue(ticket)
            if self._silence_s is not None and now >= ticket.last_event_at + self._silence_s:
                problem = (
                    "a trainer took this call, but no tokens arrived for"
                    if ticket.lease
                    else "no trainer answered this call within"
                )
                ticket.push(EngineTimeout(f"{problem} {self._silence_s:g} s; retry it"))
                self._end(ticket, f"it timed out after {self._silence_s:g} s without progress")

    def leave(self, ticket: Ticket, reason: str) -> None:
        with self._lock:
            if ticket.id in self._live:
                self._end(ticket, reason)

    # ── the trainer's side: from any thread ─────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> AsyncIterator[GateCall]:
        return self._each()

    async def _each(self) -> AsyncIterator[GateCall]:
        while calls := await self.take():
            yield calls[0]

    async def take(
        self, limit: int = 1, *, wait_s: float | None = None, lease_s: float | None = None
    ) -> list[GateCall]:
        """Wait for calls, and take up to `limit` of the oldest.

        Return an empty list if no call arrives within `wait_s` seconds, or if the gateway stops.

        A taken call is leased for `lease_s` seconds. Each part of its answer renews the lease, and so does `renew_lease`. When the lease
        expires, the call returns to the queue, or fails if part of its answer was sent. If `lease_s` is None, the lease never expires; this
        is meant for a trainer in the gateway's process.
        """
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        end = None if wait_s is None else loop.time() + wait_s
        while True:
            with self._lock:
                calls = [self._hand_out(lease_s) for _ in range(min(limit, len(self._queue)))]
                if calls or self._closed:
                    return calls
                woken.clear()
                self._takers[woken] = loop
            try:
                async with asyncio.timeout_at(end):
                    await woken.wait()
            except TimeoutError:
                return []
            finally:
                with self._lock:
                    self._takers.pop(woken, None)

    def accept_piece(
        self,
        call_id: str,
        lease: str,
        at: int,
        ids: Ids,
        logprobs: Logprobs | None,
        finish: GateFinish | None,
        version: int | None = None,
    ) -> None:
        """Accept the part of an answer that starts at token `at`. If `finish` is set, the part is the last one.

        Resending the latest part has no effect.
        """
        check_piece(ids, logprobs)
        digest = digest_piece(lease, at, ids, logprobs, finish)
        with self._lock:
            known = self._ended.get(call_id) or self._live.get(call_id)
            if known is not None and known.last == digest:
                return
            ticket = self._find_taken(call_id, lease)
            if at != ticket.sent:
                raise Conflict(f"'at' must be {ticket.sent}, the number of tokens sent so far, not {at}")
            ticket.check_fits(ids, finish, self._vocabulary)
            current = ticket.version if self._version is None else self._version()
            versions = ticket.version_range(version, current)
            scores = None if logprobs is None else [None if np.isnan(v) else v for v in logprobs.tolist()]
            ticket.sent += len(ids)
            ticket.stopped = bool(len(ids)) and int(ids[-1]) in ticket.request.stop_ids
            ticket.last = digest
            self._renew(ticket)
            ticket.push(Chunk(ids.tolist(), scores if len(ids) else [], finish, versions=versions))
            if finish is not None:
                self._end(ticket, "it was answered", answered=True)

    def fail_call(self, call_id: str, lease: str, message: str, fault: GateFault = "unavailable") -> None:
        with self._lock:
            ticket = self._find_taken(call_id, lease)
            ticket.push(_FAULTS[fault](f"the trainer failed: {message[:500]}"))
            self._end(ticket, "the trainer reported a failure", answered=True)

    def return_call(self, call_id: str, lease: str) -> None:
        with self._lock:
            ticket = self._find_taken(call_id, lease)
            if ticket.sent:
                raise Conflict("a call cannot be given back after part of its answer was sent; fail it instead")
            self._requeue(ticket)

    def renew_lease(self, call_id: str, lease: str) -> None:
        with self._lock:
            self._renew(self._find_taken(call_id, lease))

    async def piece(
        self, call: GateCall, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None, version: int | None
    ) -> None:
        self.accept_piece(call.id, call.lease, call.sent, ids, logprobs, finish, version)

    async def fail(self, call: GateCall, message: str, fault: GateFault) -> None:
        self.fail_call(call.id, call.lease, message, fault)

    async def give_back(self, call: GateCall) -> None:
        self.return_call(call.id, call.lease)

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        """Wake all takers. Waking only one is unsafe: it might be about to time out, or its loop might have stopped."""
        takers, self._takers = self._takers, {}
        for woken, loop in takers.items():
            with contextlib.suppress(RuntimeError):  # the taker's loop is closed
                loop.call_soon_threadsafe(woken.set)

    def _hand_out(self, lease_s: float | None) -> GateCall:
        _, ticket = self._queue.popitem(last=False)
        request = ticket.request
        ticket.lease, ticket.lease_s = os.urandom(8).hex(), lease_s
        ticket.version = request.version if self._version is None else self._version()
        self._renew(ticket)
        gate_request = GateRequest(
            session=request.session,
            prompt=np.asarray(request.prompt, ID_DTYPE),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=request.stop,
            stop_ids=request.stop_ids,
            constraint=request.constraint,
            stream=request.stream,
            version=ticket.version,
        )
        return GateCall(self, ticket.id, ticket.lease, gate_request)

    def _renew(self, ticket: Ticket) -> None:
        ticket.until = None if ticket.lease_s is None else time.monotonic() + ticket.lease_s
        ticket.notify()  # wake the waiter: the new deadline may be earlier

    def _requeue(self, ticket: Ticket) -> None:
        """Put a call back at the head of the queue, because it has already waited its turn."""
        ticket.lease, ticket.until, ticket.lease_s = "", None, None
        self._queue[ticket.id] = ticket
        self._queue.move_to_end(ticket.id, last=False)
        self._wake()

    def _end(self, ticket: Ticket, reason: str, *, answered: bool = False) -> None:
        self._live.pop(ticket.id, None)
        self._queue.pop(ticket.id, None)
        self._ended[ticket.id] = EndedCall(reason, answered, ticket.last)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _find_taken(self, call_id: str, lease: str) -> Ticket:
        ticket, ended = self._live.get(call_id), self._ended.get(call_id)
        if ticket is None and ended is None:
            raise NotFound(
                f"unknown call {call_id!r}: the gateway has restarted since the call was taken, or the call ended long ago"
            )
        if ended is not None:
            if ended.answered:
                raise Conflict(f"call {call_id} has already ended: {ended.reason}")
            raise Gone(f"call {call_id} no longer needs an answer: {ended.reason}")
        assert ticket is not None
        if ticket.lease != lease:
            raise Conflict(f"call {call_id} is no longer yours: its lease expired, or you gave it back")
        return ticket


class _Generation:
    """A call as the pipeline sees it.

    The call joins the queue when its first chunk is requested, and ends when the context exits, if not before.
    """

    def __init__(self, gate: Gate, request: Generate) -> None:
        self._gate, self._request = gate, request
        self._ticket: Ticket | None = None
        self._over = False

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ticket is not None:
            self._gate.leave(self._ticket, _explain_exit(kind))

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        if self._ticket is None:
            self._ticket = self._gate.admit(self._request)
        while True:
            event = self._gate.next_event(self._ticket)
            if isinstance(event, TurngateError):
                self._over = True
                try:
                    raise event
                finally:
                    del event  # the error's traceback refers to this frame; a cycle would keep the request in memory
            if isinstance(event, Chunk):
                self._over = event.finish is not None
                return event
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout_at(None if event is None else loop.time() + event - time.monotonic()):
                    await self._ticket.notified.wait()
            except TimeoutError:
                self._gate.check_deadlines(self._ticket)


def _explain_exit(kind: type[BaseException] | None) -> str:
    """Explain why a turn ended before its answer was complete. `kind` is the type of the exception that ended it, if any."""
    if kind is None:
        return "the turn ended before the whole answer arrived (because of a stop string or a session limit)"
    if issubclass(kind, TimeoutError):
        return "its session timed out"
    if issubclass(kind, asyncio.CancelledError):
        return "the agent disconnected, or its session ended"
    return "the turn failed"
