"""Warn a trainer whose feed expects a different group size than the batch makes."""

from __future__ import annotations

import logging
from collections import deque

from turngate.store.feeds import IncompleteGroup

log = logging.getLogger("turngate")
_FIRST_LOOK_S = 30.0  # waiting time until the incomplete groups are read; doubled after each look
_MAX_GROUPS = 1000  # delivered groups that are remembered
_FIX = "set n to the --n of the batch"


class GroupSizeWatch:
    """Warns if a feed waits for rollouts that do not come, or splits a group into several deliveries."""

    def __init__(self, feed: str, n: int) -> None:
        self._feed = feed
        self._n = n
        self._delivered: deque[str] = deque(maxlen=_MAX_GROUPS)
        self._has_warned_of_split = False
        self._next_look_s = _FIRST_LOOK_S
        self._last_seen: tuple[IncompleteGroup, ...] = ()

    def add_delivery(self, group: str) -> None:
        """Warn once if the group was delivered before."""
        self._next_look_s, self._last_seen = _FIRST_LOOK_S, ()
        if group and group in self._delivered and not self._has_warned_of_split:
            self._has_warned_of_split = True
            log.warning(
                "feed %s: group %s has more than %d rollouts and is split into several deliveries; %s",
                *(self._feed, group, self._n, _FIX),
            )
        self._delivered.append(group)

    def is_look_due(self, waited_s: float) -> bool:
        """Return whether to read the incomplete groups, because no delivery has arrived for `waited_s` seconds."""
        return waited_s >= self._next_look_s

    def add_incomplete(self, groups: tuple[IncompleteGroup, ...], waited_s: float) -> None:
        """Warn if the incomplete groups are the same as at the last look."""
        self._next_look_s = 2 * waited_s
        if groups and groups == self._last_seen:
            more = f" (incomplete groups: {len(groups)})" if len(groups) > 1 else ""
            log.warning(
                "feed %s: no delivery for %.0f s: group %s has %d of %d rollouts%s; a group is delivered when it has %d, or when its "
                "batch closes it; if the batch makes smaller groups, %s",
                *(self._feed, waited_s, groups[0].group, groups[0].rollouts, self._n, more, self._n, _FIX),
            )
        self._last_seen = groups
