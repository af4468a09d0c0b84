"""A pool of engines: a session stays on the replica that has cached its prefix, and moves if that replica is down, draining or crowded.

A *replica* is one engine, with its own health. A *lane* is a destination for calls: a replica, or one of its data-parallel ranks.

- A session's first call goes to the least loaded lane, and later calls go to the same lane. `placement.py` decides when the session moves.
- An unreachable replica is down until a health check succeeds. Checks become less frequent with each failure. If no replica accepts calls,
  a call first checks those that are not draining.
- A call that fails *before its first chunk* because its replica is unavailable is retried on another lane, and its session moves
  there. This is safe because the caller has not seen any output. A call that fails because its replica is busy is retried once.
- If that retry also finds a busy replica, or there is no other lane for it, the call is tried again for up to `wait_s` seconds. The same
  applies if all replicas are draining. If a replica accepts the call in this time, the agent sees a slow call, not a failed one.
- All other errors, and every error after the first chunk, are raised.
- Replicas can be added, drained and removed while the pool serves calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from turngate.engines.base import Chunk, Engine, Generate, Health
from turngate.engines.placement import is_saturated, should_move
from turngate.engines.replica import Lane, PoolTiming, Replica
from turngate.errors import ConfigError, EngineBusy, EngineError, EngineUnavailable

_WAIT_S = 0.25  # the first pause of a call that is waiting for a busy engine; pauses double up to `_WAIT_MAX_S`
_WAIT_MAX_S = 4.0


class Pool:
    """An engine that spreads sessions over several engines.

    A call is tried on at most `attempts` lanes. If they are busy, it is tried again for up to `wait_s` seconds. The pool remembers the
    lanes of at most `max_sessions` sessions, and forgets the least recently used first. With `may_be_empty`, the pool may start without
    engines, which can be added later.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        name: str = "pool",
        timing: PoolTiming | None = None,
        attempts: int = 3,
        wait_s: float = 0.0,
        max_sessions: int = 100_000,
        may_be_empty: bool = False,
    ) -> None:
        if not engines and not may_be_empty:
            raise ConfigError("a pool needs at least one engine")
        self.name = name
        self._timing = timing or PoolTiming()
        self._replicas = [Replica(engine, self._timing) for engine in engines]
        self._lanes = [lane for replica in self._replicas for lane in replica.lanes]
        self._attempts = attempts
        self._max_sessions = max_sessions
        self._placed: OrderedDict[str, Lane] = OrderedDict()
        self._is_started = False
        self.wait_s = wait_s
        self.waiting = 0  # calls that are waiting for a busy engine

    async def start(self) -> None:
        for replica in self._replicas:
            await replica.engine.start()
        await asyncio.gather(*(replica.check() for replica in self._replicas))
        for replica in self._replicas:
            replica.watch()
        self._is_started = True

    async def close(self) -> None:
        self._is_started = False
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def engines(self) -> list[Engine]:
        return [replica.engine for replica in self._replicas]

    @property
    def replicas(self) -> Sequence[Replica]:
        return self._replicas

    async def check(self) -> None:
        """Check every replica now."""
        await asyncio.gather(*(replica.check() for replica in self._replicas))

    async def health(self) -> list[Health]:
        """Return the health of all replicas, without checking them now."""
        return [health for replica in self._replicas for health in replica.snapshot()]

    @property
    def is_saturated(self) -> bool:
        """Whether more calls would only lengthen the queues. This is also true if no engine accepts calls."""
        return self.waiting > 0 or is_saturated([lane.load for lane in self._lanes if lane.accepts_calls])

    @property
    def room(self) -> float:
        """The number of calls that can begin before all engines are saturated, or infinity if this is unknown."""
        return 0 if self.waiting else sum(lane.load.room for lane in self._lanes if lane.accepts_calls)

    @property
    def accepts_calls(self) -> bool:
        """Whether at least one engine is up and not draining."""
        return any(lane.accepts_calls for lane in self._lanes)

    @property
    def is_crowded(self) -> bool:
        """Whether at least one engine accepts calls, and more calls would only lengthen the queues."""
        return self.accepts_calls and self.is_saturated

    # ── replicas that come and go ───────────────────────────────────────────────────────────────────────────────

    async def add(self, engine: Engine) -> None:
        """Start an engine, check it, and let it serve calls if it is up."""
        replica = Replica(engine, self._timing)
        await engine.start()
        try:
            await replica.check()
        except BaseException:
            await engine.close()
            raise
        self._replicas.append(replica)
        self._lanes += replica.lanes
        if self._is_started:
            replica.watch()

    def set_draining(self, address: str, is_draining: bool) -> None:
        """Stop or resume sending calls to a replica. After a stop, calls in flight continue, and sessions move with their next call."""
        self._find(address).is_draining = is_draining

    async def wait_until_idle(self, address: str) -> None:
        """Wait until a replica has no calls in flight."""
        await self._find(address).idle.wait()

    async def remove(self, address: str) -> None:
        """Remove a replica, and close its connections.

        Its calls in flight fail if they have produced tokens. Otherwise, they are retried on another replica.
        """
        replica = self._find(address)
        self._replicas.remove(replica)
        self._lanes = [lane for lane in self._lanes if lane.replica is not replica]
        for session in [session for session, lane in self._placed.items() if lane.replica is replica]:
            self._forget(session)
        await replica.close()

    def _find(self, address: str) -> Replica:
        return next(replica for replica in self._replicas if replica.address == address)

    # ── placement ───────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, session: str) -> None:
        lane = self._forget(session)
        if lane is not None:
            lane.engine.release(session)

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        return _Call(self, request)

    async def check_before_call(self) -> None:
        """If no replica accepts calls, check those that are not draining, because one of them may be up again."""
        if not self.accepts_calls:
            await asyncio.gather(*(replica.recheck() for replica in self._replicas if not replica.is_draining))

    def place(self, session: str) -> Lane:
        """Choose the lane for a session's call. Raise an error if every replica is down or draining."""
        home = self._placed.get(session)
        if home is not None and home.accepts_calls:
            if not home.load.is_crowded:
                self._placed.move_to_end(session)
                return home
            best = self._least_loaded((home,))
            if best is None or not should_move(home.load, best.load):
                self._placed.move_to_end(session)
                return home
            home.load.moves_left -= 1
            return self._settle(session, best)
        best = self._least_loaded(())
        if best is None:
            raise self._explain_unplaced()
        return self._settle(session, best)

    def _explain_unplaced(self) -> EngineError:
        """Build the error for a call that no replica accepts."""
        replicas = [replica for replica in self._replicas if not replica.is_draining]
        if not replicas:
            return EngineBusy(f"{self.name}: no engine accepts calls; add one with POST /admin/engines")
        if all(replica.is_wrong for replica in replicas):
            return EngineUnavailable(f"{self.name}: no engine has the current weights; see GET /admin/weights")
        return next(replica.explain_down() for replica in replicas if not replica.is_wrong)

    def place_retry(self, session: str, tried: Sequence[Lane]) -> Lane | None:
        """Choose a different lane after a failure. Return None if no lane is left, or if the call has used all its attempts."""
        lane = self._least_loaded(tried) if len(tried) < self._attempts else None
        return None if lane is None else self._settle(session, lane)

    def _least_loaded(self, tried: Sequence[Lane]) -> Lane | None:
        lanes = [lane for lane in self._lanes if lane.accepts_calls and lane not in tried]
        used = {lane.replica for lane in tried}
        elsewhere = [lane for lane in lanes if lane.replica not in used]  # ranks share their replica's state and queue
        return min(elsewhere or lanes, key=lambda lane: lane.load.order(), default=None)

    def _settle(self, session: str, lane: Lane) -> Lane:
        if session:
            self._forget(session)
            self._placed[session] = lane
            lane.load.sessions += 1
        if len(self._placed) > self._max_sessions:
            self._forget(next(iter(self._placed)))
        return lane

    def _forget(self, session: str) -> Lane | None:
        lane = self._placed.pop(session, None)
        if lane is not None:
            lane.load.sessions -= 1
        return lane


class _Call:
    """One call, as a stream of chunks from the lane that answers it. The call starts when the first chunk is requested."""

    def __init__(self, pool: Pool, request: Generate) -> None:
        self._pool = pool
        self._request = request
        self._lane: Lane | None = None  # the lane that counts this call as in flight
        self._generation: AbstractAsyncContextManager[AsyncIterator[Chunk]] | None = None  # on that lane
        self._chunks: AsyncIterator[Chunk] | None = None

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._chunks is not None:
            return await anext(self._chunks)
        try:
            return await self._first()
        except EngineBusy as error:
            if not self._pool.wait_s:
                raise
            return await self._wait(error.message)

    async def leave(self) -> None:
        lane, self._lane = self._lane, None
        generation, self._generation = self._generation, None
        try:
            if generation is not None:
                await generation.__aexit__(None, None, None)
        finally:
            if lane is not None:
                lane.replica.end_call(lane)

    async def _wait(self, reason: str) -> Chunk:
        """Try again, with growing pauses, until an engine accepts the call. Raise `EngineBusy` after `wait_s` seconds."""
        await self.leave()
        end = time.monotonic() + self._pool.wait_s
        pause = _WAIT_S
        self._pool.waiting += 1
        try:
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _WAIT_MAX_S)
                try:
                    return await self._first()
                except EngineBusy as error:
                    reason = error.message
                await self.leave()
        finally:
            self._pool.waiting -= 1
        raise EngineBusy(f"{reason}; the call waited {self._pool.wait_s:g} s for an engine")

    async def _first(self) -> Chunk:
        """Return the first chunk, from the first lane that produces one.

        An error is raised again in the `except` block that caught it. Storing it in a variable would create a reference cycle with its
        traceback and keep the request in memory.
        """
        tried: list[Lane] = []
        was_busy = False
        await self._pool.check_before_call()
        lane = self._pool.place(self._request.session)
        while True:
            try:
                return await self._begin(lane)
            except (EngineUnavailable, EngineBusy) as error:
                if isinstance(error, EngineUnavailable):
                    lane.replica.mark_lost(error)
                elif was_busy:
                    raise
                else:
                    was_busy = True
                await self.leave()
                tried.append(lane)
                other = self._pool.place_retry(self._request.session, tried)
                if other is None:
                    raise
                lane = other

    async def _begin(self, lane: Lane) -> Chunk:
        self._lane = lane
        lane.replica.begin_call(lane)
        generation = lane.engine.generate(self._request)
        chunks = await generation.__aenter__()
        self._generation = generation
        chunk = await anext(chunks)
        self._chunks = chunks  # from here on, the call stays on this lane
        lane.replica.record_success()
        return chunk
