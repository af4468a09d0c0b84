"""The trainer as an engine: every model call waits here until the trainer takes it, generates, and answers.

    gate = Gate()                                                   # the engine of a gateway in this process
    async for call in gate:                                         # in any thread, in any event loop, several at once
        ids, logprobs = sample(call.prompt, call.max_tokens, call.sampling)
        await call.answer(ids, logprobs)

The pipeline uses it like any other engine; `server/gate.py` is the same for a trainer in another process. A call is *waiting*, then
*taken*, then *ended*, and every change of that happens under one lock, whoever makes it: an answer and the agent's hanging up cannot both
win. What is over is remembered for a while, so that a late answer is told why nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Generate, Health
from turngate.engines.gate_call import GateCall, GateFault, GateFinish, GateRequest, check_piece
from turngate.errors import (
    BadRequest,
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

_REMEMBERED = 10_000  # calls that are over
_FAULTS: dict[GateFault, type[TurngateError]] = {
    "unavailable": EngineUnavailable,
    "error": EngineError,
    "overflow": ContextOverflow,
}


class QueueStatus(msgspec.Struct, frozen=True):
    """The queue, for whoever looks at it."""

    waiting: int
    taken: int
    oldest_s: float  # since the oldest call that nobody has taken came; 0: there is none
    takers: int  # that wait for a call


class Ticket:
    """One call from when it came until it is over. Its fields change under the gate's lock."""

    def __init__(self, request: Generate, loop: asyncio.AbstractEventLoop) -> None:
        self.id = request.request_id or os.urandom(16).hex()
        self.request = request
        self.loop = loop  # the gateway's, which waits for news
        self.arrived = asyncio.Event()
        self.news: deque[Chunk | TurngateError] = deque()
        self.came = self.heard = time.monotonic()  # heard: of its last piece
        self.lease = ""  # of whoever has taken it; empty: it waits
        self.until: float | None = None  # when the lease runs out
        self.lease_s: float | None = None
        self.version = 0  # when it was taken
        self.sent = 0
        self.stopped = False  # its last token was a stop token
        self.last = b""  # by which its last piece is known again

    def tell(self, news: Chunk | TurngateError) -> None:
        self.news.append(news)
        self.heard = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the gateway's loop is closed, and nobody waits in it
            self.loop.call_soon_threadsafe(self.arrived.set)


class EndedCall(msgspec.Struct, frozen=True):
    reason: str
    answered: bool
    last: bytes


class Gate:
    """An engine whose calls are answered by whoever iterates over it.

    `silence_s`: a call of which nothing was heard for so long, taken or not, fails with an error that says "try again".
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
        # A plain lock: it is held for a few lines without waiting for anything, and guards against other threads too.
        self._lock = threading.Lock()
        self._live: dict[str, Ticket] = {}
        self._queue: OrderedDict[str, Ticket] = OrderedDict()
        self._ended: OrderedDict[str, EndedCall] = OrderedDict()
        self._takers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._closed = False

    def attach(self, *, vocabulary: int, version: Callable[[], int]) -> None:
        """Told by the gateway: how many tokens there are, and which policy version it is at."""
        self._vocabulary, self._version = vocabulary, version

    # ── the gateway's side ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        with self._lock:
            self._closed = False

    async def close(self) -> None:
        """Every call that is left fails, and every iteration ends."""
        with self._lock:
            self._closed = True
            for ticket in list(self._live.values()):
                ticket.tell(EngineUnavailable("the gateway is being stopped; repeat this call in a moment"))
                self._end(ticket, "the gateway was stopped")
            self._wake()

    @property
    def closed(self) -> bool:
        return self._closed

    async def health(self) -> list[Health]:
        seen = self.waiting()
        detail = f"{seen.waiting} calls wait, {seen.taken} are taken" if seen.waiting or seen.taken else ""
        total = seen.waiting + seen.taken
        return [Health(self.name, True, detail, self.model, self._max_context, total)]

    def release(self, session: str) -> None:
        """Nothing to forget: a session's calls are over before it is."""

    def generate(self, request: Generate) -> _Generation:
        return _Generation(self, request)

    def waiting(self) -> QueueStatus:
        with self._lock:
            oldest = next(iter(self._queue.values()), None)
            age = 0.0 if oldest is None else time.monotonic() - oldest.came
            return QueueStatus(len(self._queue), len(self._live) - len(self._queue), age, len(self._takers))

    def admit(self, request: Generate) -> Ticket:
        ticket = Ticket(request, asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the gateway is being stopped; repeat this call in a moment")
            self._live[ticket.id] = self._queue[ticket.id] = ticket
            self._wake()
        return ticket

    def next_news(self, ticket: Ticket) -> Chunk | TurngateError | float | None:
        """What there is to tell of a call, or the moment until which it may be waited for."""
        with self._lock:
            if ticket.news:
                return ticket.news.popleft()
            ticket.arrived.clear()
            silent = None if self._silence_s is None else ticket.heard + self._silence_s
            return min((moment for moment in (silent, ticket.until) if moment is not None), default=None)

    def overdue(self, ticket: Ticket) -> None:
        """Its time may be up: the taker's, and then it waits for another; or its own."""
        now = time.monotonic()
        with self._lock:
            if ticket.id not in self._live:
                return
            if ticket.until is not None and now >= ticket.until:
                if ticket.sent:
                    ticket.tell(EngineUnavailable("whoever answered this call is gone in the middle of it"))
                    self._end(ticket, "its lease ran out in the middle of the answer")
                else:
                    self._back(ticket)
            if self._silence_s is not None and now >= ticket.heard + self._silence_s:
                who = "the trainer has taken this call and not answered it" if ticket.lease else "no trainer took it"
                ticket.tell(EngineTimeout(f"{who} for {self._silence_s:g} s; try again"))
                self._end(ticket, f"nothing was heard of it for {self._silence_s:g} s")

    def leave(self, ticket: Ticket, reason: str) -> None:
        with self._lock:
            if ticket.id in self._live:
                self._end(ticket, reason)

    # ── the trainer's side: from any thread ─────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> AsyncIterator[GateCall]:
        return self._each()

    async def _each(self) -> AsyncIterator[GateCall]:
        while found := await self.take():
            yield found[0]

    async def take(
        self, limit: int = 1, *, wait_s: float | None = None, lease_s: float | None = None
    ) -> list[GateCall]:
        """The oldest calls, at least one and at most `limit`; none only when `wait_s` is over, or the gateway stops.

        `lease_s`: after this long without a word a call waits for somebody else again. None: for a taker whose end is the gateway's too.
        """
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        end = None if wait_s is None else loop.time() + wait_s
        while True:
            with self._lock:
                found = [self._hand_out(lease_s) for _ in range(min(limit, len(self._queue)))]
                if found or self._closed:
                    return found
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

    def piece_of(
        self,
        call_id: str,
        lease: str,
        at: int,
        ids: Ids,
        logprobs: Logprobs | None,
        finish: GateFinish | None,
        version: int | None = None,
    ) -> None:
        """Take a piece of an answer, past the first `at` tokens; with `finish` it is the last. The same piece again is fine."""
        check_piece(ids, logprobs)
        piece = _digest(lease, at, ids, logprobs, finish)
        with self._lock:
            known = self._ended.get(call_id) or self._live.get(call_id)
            if known is not None and known.last == piece:
                return
            ticket = self._held(call_id, lease)
            if at != ticket.sent:
                raise Conflict(f"at: {ticket.sent} tokens of this answer are here, so the next piece is not at {at}")
            self._check_fit(ticket, ids, finish)
            versions = self._versions(ticket, version)
            scores = None if logprobs is None else [None if np.isnan(v) else v for v in logprobs.tolist()]
            ticket.sent += len(ids)
            ticket.stopped = bool(len(ids)) and int(ids[-1]) in ticket.request.stop_ids
            ticket.last = piece
            self._renew(ticket)
            ticket.tell(Chunk(ids.tolist(), scores if len(ids) else [], finish, versions=versions))
            if finish is not None:
                self._end(ticket, "it was answered", answered=True)

    def fail_of(self, call_id: str, lease: str, message: str, fault: GateFault = "unavailable") -> None:
        with self._lock:
            ticket = self._held(call_id, lease)
            ticket.tell(_FAULTS[fault](f"the trainer failed: {message[:500]}"))
            self._end(ticket, "it was failed", answered=True)

    def give_back_of(self, call_id: str, lease: str) -> None:
        with self._lock:
            ticket = self._held(call_id, lease)
            if ticket.sent:
                raise Conflict("a call cannot be given back after its first piece; end it with fail")
            self._back(ticket)

    def renew_of(self, call_id: str, lease: str) -> None:
        with self._lock:
            self._renew(self._held(call_id, lease))

    async def piece(
        self, call: GateCall, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None, version: int | None
    ) -> None:
        self.piece_of(call.id, call.lease, call.sent, ids, logprobs, finish, version)

    async def fail(self, call: GateCall, message: str, fault: GateFault) -> None:
        self.fail_of(call.id, call.lease, message, fault)

    async def give_back(self, call: GateCall) -> None:
        self.give_back_of(call.id, call.lease)

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        """Everybody who waits for a call: one that is woken may be just about to give up, and its loop may never run again."""
        takers, self._takers = self._takers, {}
        for woken, loop in takers.items():
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(woken.set)

    def _hand_out(self, lease_s: float | None) -> GateCall:
        _, ticket = self._queue.popitem(last=False)
        request = ticket.request
        ticket.lease, ticket.lease_s = os.urandom(8).hex(), lease_s
        ticket.version = request.version if self._version is None else self._version()
        self._renew(ticket)
        asked = GateRequest(
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
        return GateCall(self, ticket.id, ticket.lease, asked)

    def _renew(self, ticket: Ticket) -> None:
        ticket.until = None if ticket.lease_s is None else time.monotonic() + ticket.lease_s
        # Whoever waits for news has to know of a moment that is earlier than the one it waits for.
        with contextlib.suppress(RuntimeError):
            ticket.loop.call_soon_threadsafe(ticket.arrived.set)

    def _back(self, ticket: Ticket) -> None:
        """To the head of the queue: it has waited longest."""
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

    def _held(self, call_id: str, lease: str) -> Ticket:
        ticket, ended = self._live.get(call_id), self._ended.get(call_id)
        if ticket is None and ended is None:
            raise NotFound(f"there is no call {call_id!r}; the gateway may have been started again since it was taken")
        if ended is not None:
            if ended.answered:
                raise Conflict(f"call {call_id} is over: {ended.reason} already")
            raise Gone(f"nobody waits for call {call_id} any more: {ended.reason}")
        assert ticket is not None
        if ticket.lease != lease:
            raise Conflict(f"call {call_id} is no longer yours: its lease ran out, and it was given to somebody else")
        return ticket

    def _check_fit(self, ticket: Ticket, ids: Ids, finish: GateFinish | None) -> None:
        request = ticket.request
        total = ticket.sent + len(ids)
        if total > request.max_tokens:
            raise BadRequest(f"ids: {total} tokens are more than the {request.max_tokens} of max_tokens", param="ids")
        if finish is not None and not total:
            raise BadRequest("ids: an answer has at least one token, be it the stop token", param="ids")
        if finish is None and not len(ids):
            raise BadRequest("ids: a piece has at least one token", param="ids")
        if self._vocabulary is not None and len(ids) and int(ids.max()) >= self._vocabulary:
            where = int(ids.argmax())
            raise BadRequest(
                f"ids: {int(ids[where])} at {where} is not in the vocabulary of {self._vocabulary} tokens", param="ids"
            )
        if len(ids) and ticket.stopped:
            raise BadRequest("ids: the piece before this one ended with a stop token; finish the call", param="ids")
        stops = np.flatnonzero(np.isin(ids, request.stop_ids))
        if len(stops) and (stops[0] != len(ids) - 1 or finish == "length"):
            where = int(stops[0])
            raise BadRequest(
                f"ids: {int(ids[where])} at {where} of {len(ids)} is a stop token: it is the last of an answer whose finish is "
                "stop, and nothing is sampled after it",
                param="ids",
            )

    def _versions(self, ticket: Ticket, version: int | None) -> tuple[int, int]:
        present = ticket.version if self._version is None else self._version()
        if version is None:
            return ticket.version, present
        if not 0 <= version <= present:
            raise BadRequest(
                f"version: {version} is not between 0 and the gateway's present {present}; resume its fence at a new one first",
                param="version",
            )
        return version, version


class _Generation:
    """One call as the pipeline sees it. It joins the queue when its first chunk is asked for, and has left it when it is left."""

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
            news = self._gate.next_news(self._ticket)
            if isinstance(news, TurngateError):
                self._over = True
                raise news
            if isinstance(news, Chunk):
                self._over = news.finish is not None
                return news
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout_at(None if news is None else loop.time() + news - time.monotonic()):
                    await self._ticket.arrived.wait()
            except TimeoutError:
                self._gate.overdue(self._ticket)


def _explain_exit(kind: type[BaseException] | None) -> str:
    """What became of a turn that is left before its answer."""
    if kind is None:
        return "the turn was complete before the whole answer came (a stop string, or a limit of its session)"
    if issubclass(kind, TimeoutError):
        return "its session's time ran out"
    if issubclass(kind, asyncio.CancelledError):
        return "the agent hung up, or its session was ended"
    return "the turn failed"


def _digest(lease: str, at: int, ids: Ids, logprobs: Logprobs | None, finish: GateFinish | None) -> bytes:
    """Of one piece of an answer, by which it is known again when it is sent twice because its receipt was lost."""
    mark = hashlib.blake2b(f"{lease} {at} {finish} {logprobs is None}".encode(), digest_size=16)
    mark.update(ids.tobytes())
    mark.update(b"" if logprobs is None else logprobs.tobytes())
    return mark.digest()
