"""Report what a feed is waiting for, and warn if the batch's groups have a different size than the feed expects."""

from __future__ import annotations

import logging
from collections import deque

from turngate.store.feeds import IncompleteGroup

log = logging.getLogger("turngate")
_REPORT_S = 10.0  # waiting time after which the wait is first reported
_FIRST_LOOK_S = 30.0  # waiting time until the incomplete groups are first checked again; doubled after each check
_MAX_GROUPS = 1000  # delivered groups that are remembered
_FIX = "open a feed with another name and set its n to the batch's --n"


class GroupSizeWatch:
    """Reports what a feed is waiting for, and warns if its groups do not have `n` rollouts.

    It warns if incomplete groups stop growing, if groups are closed with fewer rollouts, or if groups are split into several deliveries.
    """

    def __init__(self, feed: str, n: int) -> None:
        self._feed = feed
        self._n = n
        self._delivered: deque[str] = deque(maxlen=_MAX_GROUPS)
        self._has_warned_of_split = False
        self._small_sizes: set[int] = set()  # sizes below n for which a warning was logged
        self._usual_s = 0.0  # the wait before the last delivery
        self._is_wait_reported = False
        self._next_look_s = _FIRST_LOOK_S
        self._last_seen: tuple[IncompleteGroup, ...] = ()

    def add_delivery(self, group: str, rollouts: int, waited_s: float = 0.0) -> None:
        """Record a delivery. Warn once if a group is delivered twice, and once for each group size below `n`."""
        self._next_look_s, self._last_seen = _FIRST_LOOK_S, ()
        self._usual_s, self._is_wait_reported = waited_s, False
        if group and group in self._delivered and not self._has_warned_of_split:
            self._has_warned_of_split = True
            log.warning(
                "feed %s: group %s is split into several deliveries; if the batch's groups are larger than %d, %s",
                *(self._feed, group, self._n, _FIX),
            )
        elif group and rollouts < self._n and group not in self._delivered and rollouts not in self._small_sizes:
            self._small_sizes.add(rollouts)
            log.warning(
                "feed %s: group %s was closed with %d of %d rollouts; rollouts that failed because of the infrastructure are left out; "
                "if the batch's groups have fewer than %d rollouts, %s",
                *(self._feed, group, rollouts, self._n, self._n, _FIX),
            )
        self._delivered.append(group)

    def is_look_due(self, waited_s: float) -> bool:
        """Return whether to check the incomplete groups now. `waited_s` is the time spent waiting since the last delivery."""
        return waited_s >= self.next_look_s

    @property
    def next_look_s(self) -> float:
        """The waiting time in seconds after which the incomplete groups are next checked."""
        if self._is_wait_reported:
            return self._next_look_s
        return max(_REPORT_S, 2 * self._usual_s)  # only a longer wait than usual is reported

    def add_incomplete(self, groups: tuple[IncompleteGroup, ...], waited_s: float) -> None:
        """Report a wait at its first check. From the third check on, warn if the incomplete groups have not changed."""
        if not self._is_wait_reported:
            self._report_wait(groups, waited_s)
            self._next_look_s = max(_FIRST_LOOK_S, 2 * waited_s)
            return
        self._next_look_s = 2 * waited_s
        if groups and groups == self._last_seen:
            log.warning(
                "feed %s: still waiting for a group after %.0f s: %s; a group is delivered when it has %d rollouts, or when its batch "
                "closes it; if the batch's groups are smaller, %s",
                *(self._feed, waited_s, self._describe(groups), self._n, _FIX),
            )
        self._last_seen = groups

    def _report_wait(self, groups: tuple[IncompleteGroup, ...], waited_s: float) -> None:
        self._is_wait_reported = True
        log.warning("feed %s: still waiting for a group after %.0f s: %s", self._feed, waited_s, self._describe(groups))

    def _describe(self, groups: tuple[IncompleteGroup, ...]) -> str:
        if not groups:
            return (
                "there are no undelivered rollouts; if no batch is running, start one, or read earlier groups again by opening a feed with "
                "another name and from_start=True"
            )
        more = f" (incomplete groups: {len(groups)})" if len(groups) > 1 else ""
        return f"group {groups[0].group} has {groups[0].rollouts} of {self._n} rollouts{more}"
