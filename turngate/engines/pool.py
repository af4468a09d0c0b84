"""A pool of engines: sessions stay where their prefix is cached, and move when that replica is down.

A *replica* is one configured engine, with its own health. A *lane* is a destination for calls: a replica, or one of its
data-parallel ranks.

- A session's first call goes to the lane with the fewest calls in flight, with ties broken by the fewest sessions. Later calls
  go to the same lane.
- An unreachable replica is down until a health check succeeds. Checks become less frequent with each failure.
- A call that fails *before its first chunk* because its replica is unavailable is retried elsewhere, and its session moves
  there. This is safe because the caller has not seen any output. If a replica is busy, the call is retried elsewhere once. All
  other errors, and every error after the first chunk, are raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import msgspec

from turngate.engines.base import Chunk, Engine, Generate, Health
from turngate.errors import ConfigError, EngineBusy, EngineError, EngineUnavailable

log = logging.getLogger(__name__)


@runtime_checkable
class HasLanes(Protocol):
    """An engine with several data-parallel ranks. Its lanes share its connections, and only the engine itself is started and closed."""

    def lanes(self) -> Sequence[Engine]: ...


class Pool:
    """An engine that spreads sessions over several engines.

    A replica that is up is checked every `check_s`. One that is down is checked after `backoff_s`, with exponential backoff up to
    `backoff_max_s`. A replica is marked down after `misses` consecutive failed checks: under load, a single failure means little, and
    moving sessions loses their caches. A call is tried on at most `attempts` lanes. At most `max_sessions` placements are
    remembered; the least recently used is forgotten first.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        name: str = "pool",
        check_s: float = 10.0,
        backoff_s: float = 0.5,
        backoff_max_s: float = 30.0,
        misses: int = 2,
        attempts: int = 3,
        max_sessions: int = 100_000,
    ) -> None:
        if not engines:
            raise ConfigError("a pool needs at least one engine")
        self.name = name
        self._replicas = [_Replica(engine, check_s, backoff_s, backoff_max_s, misses) for engine in engines]
        self._lanes = [lane for replica in self._replicas for lane in replica.lanes]
        self._attempts = attempts
        self._max_sessions = max_sessions
        self._placed: OrderedDict[str, _Lane] = OrderedDict()
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for replica in self._replicas:
            await replica.engine.start()
        await asyncio.gather(*(replica.check() for replica in self._replicas))
        self._watches = [asyncio.create_task(replica.watch()) for replica in self._replicas]

    async def close(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for replica in self._replicas:
            await replica.engine.close()

    def engines(self) -> list[Engine]:
        return [replica.engine for replica in self._replicas]

    async def check(self) -> None:
        """Check every replica now."""
        await asyncio.gather(*(replica.check() for replica in self._replicas))

    async def health(self) -> list[Health]:
        """Return the health of all replicas as of the last check."""
        return [health for replica in self._replicas for health in replica.snapshot()]

    def release(self, session: str) -> None:
        lane = self._forget(session)
        if lane is not None:
            lane.engine.release(session)

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        return _Call(self, request)

    def place(self, session: str) -> _Lane:
        """Choose the lane for a session's call: the session's own lane if it is up, otherwise the least loaded one."""
        home = self._placed.get(session)
        if home is not None and home.replica.up:
            self._placed.move_to_end(session)
            return home
        # If all seem down, try one anyway: it may be up again, and a failure costs nothing.
        return self._settle(session, self._least_loaded(()) or home or min(self._lanes, key=_Lane.load))

    def place_retry(self, session: str, tried: Sequence[_Lane]) -> _Lane | None:
        """Choose a different lane after a failure, or return None if no lane is left to try."""
        lane = self._least_loaded(tried) if len(tried) < self._attempts else None
        return None if lane is None else self._settle(session, lane)

    def _least_loaded(self, tried: Sequence[_Lane]) -> _Lane | None:
        lanes = [lane for lane in self._lanes if lane.replica.up and lane not in tried]
        used = {lane.replica for lane in tried}
        elsewhere = [lane for lane in lanes if lane.replica not in used]  # ranks share their replica's state and queue
        return min(elsewhere or lanes, key=_Lane.load, default=None)

    def _settle(self, session: str, lane: _Lane) -> _Lane:
        if session:
            self._forget(session)
            self._placed[session] = lane
            lane.sessions += 1
        if len(self._placed) > self._max_sessions:
            self._forget(next(iter(self._placed)))
        return lane

    def _forget(self, session: str) -> _Lane | None:
        lane = self._placed.pop(session, None)
        if lane is not None:
            lane.sessions -= 1
        return lane


class _Lane:
    """A replica, or one data-parallel rank of it."""

    def __init__(self, replica: _Replica, engine: Engine) -> None:
        self.replica = replica
        self.engine = engine
        self.in_flight = 0
        self.sessions = 0

    def load(self) -> tuple[int, int]:
        return self.in_flight, self.sessions


class _Replica:
    """One engine, its lanes, and whether it is up."""

    def __init__(self, engine: Engine, check_s: float, backoff_s: float, backoff_max_s: float, misses: int) -> None:
        self.engine = engine
        self.lanes = [_Lane(self, lane) for lane in (engine.lanes() if isinstance(engine, HasLanes) else [engine])]
        self.up = True
        self._was_up = False  # whether it has ever been up
        self._misses = 0
        self._allowed = misses
        self._check_s, self._backoff_s, self._backoff_max_s = check_s, backoff_s, backoff_max_s
        self._lost = asyncio.Event()
        self._last_health: list[Health] = []

    def snapshot(self) -> list[Health]:
        in_flight = sum(lane.in_flight for lane in self.lanes)
        return [
            msgspec.structs.replace(health, ok=health.ok and self.up, in_flight=in_flight)
            for health in self._last_health
        ]

    def mark_lost(self, error: EngineError) -> None:
        """Record that a call could not reach the replica."""
        self._misses = max(self._misses, self._allowed)
        self._down(error.message)
        self._lost.set()

    def mark_up(self) -> None:
        """Record that a call or a check succeeded."""
        if not self.up:
            log.warning("%s is up again", self._address())
        self.up = self._was_up = True
        self._misses = 0

    async def check(self) -> None:
        self._last_health = await self.engine.health()
        missing = next((health for health in self._last_health if not health.ok), None)
        if missing is None:
            self.mark_up()
            return
        self._misses += 1
        if self._misses >= self._allowed or not self._was_up or missing.wrong:
            self._down(missing.detail)

    def _down(self, reason: str) -> None:
        if self.up:
            log.warning("%s is down: %s", self._address(), reason)
        self.up = False

    async def watch(self) -> None:
        """Check the replica forever: regularly while it is up, and with backoff while it is down."""
        while True:
            try:
                async with asyncio.timeout(self._pause()):
                    await self._lost.wait()
                self._lost.clear()
                await asyncio.sleep(self._backoff_s)  # a check right after a failed call would only repeat the failure
            except TimeoutError:
                pass  # the pause is over
            await self.check()

    def _pause(self) -> float:
        if self.up:
            return self._check_s
        doubled = self._backoff_s * 2.0 ** max(0, min(self._misses - self._allowed, 16))
        return min(doubled, self._backoff_max_s)

    def _address(self) -> str:
        return self._last_health[0].url if self._last_health else self.engine.name


class _Call:
    """The chunks of one call, from the lane that answers it. The call starts when the first chunk is requested."""

    def __init__(self, pool: Pool, request: Generate) -> None:
        self._pool = pool
        self._request = request
        self._lane: _Lane | None = None  # the lane whose in_flight counts this call
        self._generation: AbstractAsyncContextManager[AsyncIterator[Chunk]] | None = None  # entered on that lane
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
        return await self._first()

    async def leave(self) -> None:
        lane, self._lane = self._lane, None
        generation, self._generation = self._generation, None
        try:
            if generation is not None:
                await generation.__aexit__(None, None, None)
        finally:
            if lane is not None:
                lane.in_flight -= 1

    async def _first(self) -> Chunk:
        """Return the first chunk, from the first lane that produces one."""
        tried: list[_Lane] = []
        was_busy = False
        lane = self._pool.place(self._request.session)
        while True:
            failed: EngineError
            try:
                return await self._begin(lane)
            except EngineUnavailable as error:
                lane.replica.mark_lost(error)
                failed = error
            except EngineBusy as error:
                if was_busy:
                    raise
                was_busy, failed = True, error
            await self.leave()
            tried.append(lane)
            other = self._pool.place_retry(self._request.session, tried)
            if other is None:
                raise failed
            lane = other

    async def _begin(self, lane: _Lane) -> Chunk:
        self._lane = lane
        lane.in_flight += 1
        generation = lane.engine.generate(self._request)
        chunks = await generation.__aenter__()
        self._generation = generation
        chunk = await anext(chunks)
        self._chunks = chunks  # from here on the lane is fixed
        lane.replica.mark_up()
        return chunk
