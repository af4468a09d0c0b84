"""Sessions that nobody used for a moment leave memory, and so do those that have ended. docs/decisions/0013-rest.md.

    used ─► `rest_s` without a call ─► at rest: the trace is only in the store ─► next call: it is read back, as after a restart

An agent may run tests for an hour, or never come back. `Control` owns the one instance, and the sessions.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections.abc import Mapping
from functools import cache, partial

from turngate.errors import NotFound
from turngate.store.sqlite import Store
from turngate.trace.session import Session
from turngate.trace.tree import Trace

_AT_ONCE = 16  # sessions that are put to rest before turns go on: each takes a tenth of a millisecond and more
_GIVE_BACK_S = 10.0  # between two times: it makes turns wait
_LEAST_S = 0.01  # between two sweeps, however soon sessions are to rest


class Rest:
    def __init__(self, store: Store, live: Mapping[str, Session], rest_s: float) -> None:
        self._store = store
        self._live = live
        self._rest_s = rest_s or math.inf
        self._over: list[Session] = []  # that have ended since the last sweep, and are still in memory
        self._rested = 0  # since memory was last given back
        self._given_back = 0.0

    @property
    def every_s(self) -> float:
        """How often it is worth a look."""
        return min(30.0, max(_LEAST_S, self._rest_s / 4))

    def ended(self, session: Session) -> None:
        self._over.append(session)

    async def sweep(self, now: float) -> int:
        """Put to rest whoever may be. How many were."""
        over, self._over = self._over, []
        unused = [s for s in self._live.values() if not s.at_rest and self._is_unused(s, now)]
        rested = 0
        for n, session in enumerate(unused + over, 1):
            rested += self._put(session, now)
            if n % _AT_ONCE == 0:
                await asyncio.sleep(0)
        self._rested += rested
        if self._rested and time.monotonic() - self._given_back > _GIVE_BACK_S:
            self._rested, self._given_back = 0, time.monotonic()
            await asyncio.to_thread(give_back)
        return rested

    def _is_unused(self, session: Session, now: float) -> bool:
        return session.status != "open" or now - session.last_used > self._rest_s

    def _put(self, session: Session, now: float) -> bool:
        if session.busy and session.status != "open":
            self._over.append(session)  # the next sweep finds it
        if session.busy or not self._is_unused(session, now):
            return False
        session.rest(partial(self._woken, session.key))
        return True

    def _woken(self, key: int) -> Trace:
        row = self._store.find_key(key)  # its id may be another session's by now
        if row is None:
            raise NotFound("this session was deleted")
        return self._store.load(row).trace


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl, macOS: they have none
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def give_back() -> None:
    """Memory that is free goes back to the system; left alone, the C library keeps what was freed between two things that were not.

    For a thread: it does not hold the interpreter. It does hold the C library's lock, and whoever allocates something larger waits
    with it: 3 ms where 100 MB are in use, 9 where 600 are, and 0.4 ms more for every megabyte that goes.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
