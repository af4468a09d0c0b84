"""The rule that chooses a lane for a session's call, and decides when a lane is crowded.

- A session stays in its lane, where its prefix is cached, unless that lane is *crowded*.
- A lane is crowded if its KV cache is at least 90 % full and a call is waiting for it, or if its queue is long: at least 4 calls
  are waiting, and at least one for every 4 that are running.
- A session leaves a crowded lane only for one that is not crowded and has at most half as many calls, because the new lane must compute
  the whole prefix again. Between two reports, a gateway moves at most its own share of the waiting calls.
- A new session goes to a lane that is not crowded, if there is one. Among these, it goes to the one with the fewest calls, then with the
  fewest sessions of this gateway.

All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    is_crowded: bool = False

    def update(self, report: EngineLoad | None) -> None:
        """Store a new report."""
        self.report = report
        self.in_flight_then = self.in_flight
        self.is_crowded = report is not None and is_crowded(report)
        self.moves_left = count_moves(report, self.in_flight) if report is not None else 0

    @property
    def calls(self) -> int:
        """The calls in the lane: all calls in the last report, plus this gateway's calls since then."""
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
    """Return whether every lane is crowded, so that more calls would only wait longer. This is also true if there are no lanes."""
    return all(lane.is_crowded for lane in lanes)
