"""Evict the traces of ended and idle sessions from memory. See docs/decisions/0013-eviction.md.

    a call ─► no other call for `rest_s` ─► evicted: the trace is only in the store ─► next call: it is read back, as after a restart

An agent may run tests for an hour between two calls, or never call again. If the traces in memory and the calls in flight take more than
`max_loaded_mb`, the traces of the least recently used sessions are evicted sooner.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from contextlib import suppress
from functools import cache, partial

from turngate.common import clock
from turngate.errors import NotFound
from turngate.gateway.sessions import Sessions
from turngate.store.store import Store
from turngate.trace.session import Session
from turngate.trace.tree import Trace

_BATCH = 16  # sessions evicted in a row while turns wait; each takes 0.1 ms or more
_TRIM_S = 10.0  # between two calls of `trim_memory`, which delays turns
_SHORTEST_S = 0.01  # minimum interval between sweeps
_LIMITED_S = 1.0  # maximum interval between sweeps if the memory of traces is limited
_EXCESS_SHARE = 1 / 16  # part of `max_loaded_mb` that may be loaded before the next sweep


class Evictor:
    """Evicts ended sessions, and open ones that have had no call for `rest_s` seconds.

    If traces and calls take more than `max_loaded_mb`, it also evicts the least recently used sessions. A setting of 0 means no limit.
    """

    def __init__(self, store: Store, sessions: Sessions, rest_s: float, max_loaded_mb: float = 0) -> None:
        self._store = store
        self._sessions = sessions
        self._rest_s = rest_s or math.inf
        self._max_bytes = max_loaded_mb * 1e6 or math.inf
        self._ended: list[Session] = []  # ended sessions that were still busy at the last sweep
        self._evicted = 0  # number evicted since the last trim
        self._trimmed = 0.0
        self._loaded_bytes = 0  # loaded since the last sweep
        self._is_due = asyncio.Event()

    @property
    def interval_s(self) -> float:
        """The longest time between sweeps, in seconds."""
        longest = 30.0 if self._max_bytes == math.inf else _LIMITED_S
        return min(longest, max(_SHORTEST_S, self._rest_s / 4))

    def count_loaded(self, size: int) -> None:
        """Count a trace of `size` bytes that was loaded again. If too much has been loaded since the last sweep, start the next one now."""
        self._loaded_bytes += size
        if self._loaded_bytes > self._max_bytes * _EXCESS_SHARE:
            self._is_due.set()

    async def run(self) -> None:
        """Sweep until this task is cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval_s):
                    await self._is_due.wait()
            await self.sweep(clock.now())

    async def sweep(self, now: float) -> int:
        """Evict the sessions that are due, and return how many were evicted."""
        self._loaded_bytes = 0
        self._is_due.clear()
        ended, self._ended = self._ended + self._sessions.take_ended(), []
        evicted = 0
        for n, session in enumerate(self._choose(now) + ended, 1):
            evicted += self._evict(session, now)
            if n % _BATCH == 0:
                await asyncio.sleep(0)
        self._evicted += evicted
        if self._evicted and time.monotonic() - self._trimmed > _TRIM_S:
            self._evicted, self._trimmed = 0, time.monotonic()
            await asyncio.to_thread(trim_memory)
        return evicted

    def _choose(self, now: float) -> list[Session]:
        """Return the open sessions to evict, the least recently used first.

        These are the sessions that have been idle for too long, and as many more as it takes to get below the memory limit.
        """
        loaded = [session for session in self._sessions.live() if not session.is_evicted]
        size = sum(session.trace.estimate_bytes() + session.estimate_call_bytes() for session in loaded)
        chosen = []
        for session in sorted((s for s in loaded if not s.busy), key=lambda s: s.last_used):
            if now - session.last_used <= self._rest_s and size <= self._max_bytes:
                break
            chosen.append(session)
            size -= session.trace.estimate_bytes()
        return chosen

    def _evict(self, session: Session, now: float) -> bool:
        if session.busy and session.status != "open":
            self._ended.append(session)  # for the next sweep
        if session.busy or (session.status == "open" and session.last_used > now):  # used since it was chosen
            return False
        session.evict(partial(self._load_trace, session.key))
        return True

    def _load_trace(self, key: int) -> Trace:
        row = self._store.find_key(key)  # not by id, which may belong to a different session by now
        if row is None:
            raise NotFound("this session was deleted")
        return self._store.load(row).trace


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl and macOS do not have it
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def trim_memory() -> None:
    """Return freed memory to the system. By itself, the C library keeps freed memory that lies between allocated blocks.

    Run this in a thread, since the call releases the interpreter lock. The call holds the C library's lock, which delays larger allocations
    by 3 ms with 100 MB in use, by 9 ms with 600 MB, and by another 0.4 ms for every megabyte returned.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
