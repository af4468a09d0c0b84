"""The rules that choose a lane for a session's call, and that decide when a lane is crowded. `pool.py` explains lanes.

- A session stays in its lane, where its prefix is cached, unless that lane is *crowded*.
- A lane is crowded if its KV cache is at least 90 % full and at least one call is waiting, or if its queue is long: at least 4 calls
  are waiting, and at least one for every 4 that are running.
- A session leaves a crowded lane only for one that is not crowded and has at most half as many calls, because the new lane must compute
  the session's whole prefix again. Between two reports, a gateway moves at most as many sessions out of a lane
  as its share of the lane's waiting calls.
- Calls that this gateway has begun since the last report count as waiting once the lane is full, so a burst between two reports can
  crowd a lane. A lane is full when it has as many calls as it was running at the last report in which it was crowded. If it later
  runs more calls without being crowded, the number of calls that fill it is unknown again.
- A new session goes to a lane that is not crowded or, if all are crowded, to any lane. If several lanes qualify, the one with the fewest
  calls is chosen. A tie goes to the lane with the fewest of this gateway's sessions.

This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from turngate.engines.load import EngineLoad

FULL_KV = 0.9
LONG_QUEUE = 4
RUNNING_PER_WAITING = 4


class LaneLoad(msgspec.Struct):
    """The load of one lane.

    `in_flight` and `sessions` count only this gateway's calls and sessions. `report` is the engine's last report, which includes the calls
    of all gateways.
    """

    in_flight: int = 0
    sessions: int = 0
    report: EngineLoad | None = None
    in_flight_then: int = 0  # the value of `in_flight` when the report was made
    moves_left: int = 0  # sessions that may still leave the lane before the next report
    # How many calls fill the lane: as many as it was running when it was last reported as crowded. None if unknown.
    full_at: int | None = None

    def update(self, report: EngineLoad | None) -> None:
        """Store a new report, or None if there is none."""
        self.report = report
        self.in_flight_then = self.in_flight
        self.moves_left = count_moves(report, self.in_flight) if report is not None else 0
        if report is None:
            self.full_at = None
        elif is_crowded(report):
            self.full_at = report.running
        elif self.full_at is not None and report.running > self.full_at:
            self.full_at = None

    @property
    def is_crowded(self) -> bool:
        """Whether the lane was crowded at the last report, or has become crowded because of calls that began since then."""
        return not self.room

    @property
    def room(self) -> float:
        """The number of calls that can begin before the lane is crowded, or infinity if it is unknown how many calls fill the lane."""
        if self.report is None:
            return inf
        if is_crowded(self.report):
            return 0
        if self.full_at is None:
            return inf
        is_full_kv = self.report.kv_use is not None and self.report.kv_use >= FULL_KV
        queue = 1 if is_full_kv else max(LONG_QUEUE, -(-self.full_at // RUNNING_PER_WAITING))
        return max(0, self.full_at + queue - self.calls)

    @property
    def calls(self) -> int:
        """The number of calls in the lane: those in the last report, adjusted for calls of this gateway that began or ended since then."""
        if self.report is None:
            return self.in_flight
        return max(self.in_flight, self.report.calls + self.in_flight - self.in_flight_then)

    def order(self) -> tuple[bool, int, int]:
        """Return a sort key that puts the best lane for a new session first."""
        return self.is_crowded, self.calls, self.sessions


def is_crowded(load: EngineLoad) -> bool:
    if load.kv_use is not None and load.kv_use >= FULL_KV and load.waiting:
        return True
    return load.waiting >= LONG_QUEUE and load.waiting * RUNNING_PER_WAITING >= load.running


def count_moves(load: EngineLoad, own_calls: int) -> int:
    """Return how many sessions a gateway may move out of a lane before the next report.

    This is the gateway's share of the waiting calls, rounded up. `own_calls` is the number of its calls in the lane.
    """
    if not load.calls or not own_calls:
        return 0
    return -(-load.waiting * min(own_calls, load.calls) // load.calls)


def should_move(home: LaneLoad, best: LaneLoad) -> bool:
    """Return whether a session should move from its lane `home` to `best`, the least loaded of the other lanes."""
    return home.is_crowded and home.moves_left > 0 and not best.is_crowded and 2 * best.calls <= home.calls


def is_saturated(lanes: Sequence[LaneLoad]) -> bool:
    """Return whether more calls would only lengthen the queues, because every lane is crowded. This is also true if there are no lanes."""
    return all(lane.is_crowded for lane in lanes)
