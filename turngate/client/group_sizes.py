"""Tell a trainer what its feed waits for, and warn it if the batch makes groups of a different size."""

from __future__ import annotations

import logging
from collections import deque

from turngate.store.feeds import IncompleteGroup

log = logging.getLogger("turngate")
_REPORT_S = 10.0  # waiting time until the first line about it
_FIRST_LOOK_S = 30.0  # waiting time until the incomplete groups are compared; doubled after each look
_MAX_GROUPS = 1000  # delivered groups that are remembered
_FIX = "set n to the --n of the batch"


class GroupSizeWatch:
    """Reports what a feed waits for, and warns if its groups have another size than `n`: if they do not grow, are closed with fewer
    rollouts, or are split into several deliveries."""

    def __init__(self, feed: str, n: int) -> None:
        self._feed = feed
        self._n = n
        self._delivered: deque[str] = deque(maxlen=_MAX_GROUPS)
        self._has_warned_of_split = False
        self._small_sizes: set[int] = set()  # sizes below n that were reported
        self._usual_s = 0.0  # the wait before the last delivery
        self._is_wait_reported = False
        self._next_look_s = _FIRST_LOOK_S
        self._last_seen: tuple[IncompleteGroup, ...] = ()

    def add_delivery(self, group: str, rollouts: int, waited_s: float = 0.0) -> None:
        """Warn once if the group was delivered before, and once for each size below `n`."""
        self._next_look_s, self._last_seen = _FIRST_LOOK_S, ()
        self._usual_s, self._is_wait_reported = waited_s, False
        if group and group in self._delivered and not self._has_warned_of_split:
            self._has_warned_of_split = True
            log.warning(
                "feed %s: group %s has more than %d rollouts and is split into several deliveries; %s",
                *(self._feed, group, self._n, _FIX),
            )
        elif group and rollouts < self._n and group not in self._delivered and rollouts not in self._small_sizes:
            self._small_sizes.add(rollouts)
            log.warning(
                "feed %s: group %s was closed with %d of %d rollouts; rollouts that failed because of the infrastructure are left out; "
                "if the batch makes smaller groups, %s",
                *(self._feed, group, rollouts, self._n, _FIX),
            )
        self._delivered.append(group)

    def is_look_due(self, waited_s: float) -> bool:
        """Return whether to read the incomplete groups, because no delivery has arrived for `waited_s` seconds."""
        return waited_s >= self.next_look_s

    @property
    def next_look_s(self) -> float:
        """The waiting time at which the next look is due."""
        if self._is_wait_reported:
            return self._next_look_s
        return max(_REPORT_S, 2 * self._usual_s)  # only a longer wait than usual is reported

    def add_incomplete(self, groups: tuple[IncompleteGroup, ...], waited_s: float) -> None:
        """Report the wait once. Later, warn if the incomplete groups are the same as at the last look."""
        if not self._is_wait_reported:
            self._report_wait(groups, waited_s)
            self._next_look_s = max(_FIRST_LOOK_S, 2 * waited_s)
            return
        self._next_look_s = 2 * waited_s
        if groups and groups == self._last_seen:
            log.warning(
                "feed %s: no delivery for %.0f s: %s; a group is delivered when it has %d, or when its batch closes it; if the batch "
                "makes smaller groups, %s",
                *(self._feed, waited_s, self._describe(groups), self._n, _FIX),
            )
        self._last_seen = groups

    def _report_wait(self, groups: tuple[IncompleteGroup, ...], waited_s: float) -> None:
        self._is_wait_reported = True
        log.warning(
            "feed %s: waiting for groups, no delivery for %.0f s: %s", self._feed, waited_s, self._describe(groups)
        )

    def _describe(self, groups: tuple[IncompleteGroup, ...]) -> str:
        if not groups:
            return (
                "every rollout that has ended is delivered; if no batch is running, start one, or choose another feed name to read "
                "the groups again"
            )
        more = f" (incomplete groups: {len(groups)})" if len(groups) > 1 else ""
        return f"group {groups[0].group} has {groups[0].rollouts} of {self._n} rollouts{more}"
