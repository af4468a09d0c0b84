"""A cell's lease: the right to serve until a deadline. It is a state machine without I/O: the caller passes in the current time.

    register ─► held ──renew──► held ── deadline passes ──► lapsed ──renew──► held
                  └────── inactive in the shared store ────────┴────► lost ──► start over: register a new id

The shared store measures a lease on its own clock, from the moment it receives the request. The cell measures the lease from the moment
it sends the request. The cell therefore always stops serving before the shared store ends the lease, however long the request takes.
"""

from __future__ import annotations

import math
import time
from typing import Literal

import msgspec

LeaseState = Literal["waiting", "held", "lapsed", "lost"]
CLOCK_DRIFT = 0.02  # share of the lease by which the cell stops early, since two clocks do not run at the same speed
_RENEWALS = 3  # renewals per lease
_RETRIES = 30  # requests per lease while the shared store does not answer
_FIRST_RETRIES = 5  # the first 5 retries come 5 times as often, in case only the connection was lost


def lease_clock() -> float:
    """Return the time in seconds on a clock that never jumps, is the same in all processes, and keeps running while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Renewal(msgspec.Struct, frozen=True):
    """A request to register a cell or renew its lease, and the time at which it was sent."""

    cell: str
    sent: float


class Lease:
    """The lease of one cell, as the cell itself knows it."""

    def __init__(self, cell: str, ttl_s: float, *, registered: bool = False) -> None:
        self.cell = cell
        self.ttl_s = ttl_s
        self.registered = registered  # False: the next request must register the cell
        self.deadline = -math.inf
        self._lost = False
        self._failures = 0
        self._next = -math.inf

    def state(self, now: float) -> LeaseState:
        if self._lost:
            return "lost"
        if now < self.deadline:
            return "held"
        return "waiting" if self.deadline == -math.inf else "lapsed"

    def next_request(self) -> float:
        """Return the time at which the next request is due."""
        return self._next

    def send(self, now: float) -> Renewal:
        """Return a new request that is sent at `now`. Call this before anything is written to the connection."""
        return Renewal(self.cell, now)

    def confirm(self, renewal: Renewal) -> None:
        """Extend the lease after the shared store has confirmed this request. A late answer never shortens the lease."""
        if renewal.cell != self.cell or self._lost:
            return
        self.registered = True
        self._failures = 0
        self.deadline = max(self.deadline, renewal.sent + self.ttl_s * (1 - CLOCK_DRIFT))
        self._next = renewal.sent + self.ttl_s / _RENEWALS

    def fail(self, now: float) -> None:
        """Record that a request was not answered. The deadline is not extended, even if the shared store has renewed the lease."""
        self._failures += 1
        pause = self.ttl_s / _RETRIES
        self._next = now + (pause / _FIRST_RETRIES if self._failures <= _FIRST_RETRIES else pause)

    def lose(self, renewal: Renewal) -> None:
        """End the lease, because the cell is no longer active in the shared store. Ignore a reply that concerns an earlier id."""
        if renewal.cell == self.cell:
            self._lost = True
            self.deadline = -math.inf

    def start_over(self, cell: str, now: float) -> None:
        """Continue with a new id, which the next request registers."""
        self.cell = cell
        self.registered = self._lost = False
        self.deadline = -math.inf
        self._failures = 0
        self._next = now
