"""Decide how outcomes change the groups of one feed. No I/O.

Outcomes are added one after the other. The result is the same whether they are added in one transaction or in several.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class NewEntry(msgspec.Struct, frozen=True):
    """An outcome that is added to the feeds."""

    session: int  # key of the session
    id: str  # of the session
    rollout: str  # name of the rollout; empty: it has none
    group: str
    outcome: bytes  # JSON of RecordedOutcome
    is_fault: bool  # an infrastructure fault removes an earlier outcome of the rollout, and is not added itself


class FeedEntry(msgspec.Struct, eq=False):
    """One row of `rolled`, or one that will be written."""

    session: int
    rollout: str
    group: str
    number: int | None  # of the delivery; None: the group is not complete
    place: int = 0  # 0: not written yet
    new: NewEntry | None = None


class FeedGroups:
    """The entries of a feed that new ones may affect, and the changes so far.

    `entries` has at least the entries of incomplete groups that are added to, and those of the same sessions and rollouts.
    """

    def __init__(self, n: int, prefix: str, newest: int, entries: Iterable[FeedEntry]) -> None:
        self._n = n
        self._prefix = prefix
        self._waiting: dict[str, list[FeedEntry]] = {}  # by group
        self._by_session: dict[int, FeedEntry] = {}
        self._by_rollout: dict[str, FeedEntry] = {}
        self._added: dict[int, FeedEntry] = {}  # by session
        self.newest = newest
        self.removed: list[int] = []  # places
        self.completed: list[tuple[int, str, list[FeedEntry]]] = []  # number, group and entries of each new delivery
        for entry in entries:
            self._keep(entry)

    @property
    def added(self) -> list[FeedEntry]:
        """The entries to write, first to last."""
        return list(self._added.values())

    def add(self, new: NewEntry) -> None:
        """Add a rollout. If this completes its group, assign the group a number."""
        # A rollout that is already in the feed is replaced while its group is incomplete. Once it has a number, it never changes.
        is_delivered = False
        for old in (self._by_session.get(new.session), self._by_rollout.get(new.rollout)):
            if old is not None and old.number is None:
                self._remove(old)
            is_delivered |= old is not None and old.number is not None
        if new.is_fault or is_delivered or not new.group.startswith(self._prefix):
            return
        entry = FeedEntry(new.session, new.rollout, new.group, None, new=new)
        self._keep(entry)
        self._added[new.session] = entry
        if len(self._waiting[new.group]) >= self._n or not new.group:  # a rollout without a group forms its own group
            self._complete(new.group)

    def _complete(self, group: str) -> None:
        self.newest += 1
        members = self._waiting.pop(group)
        for member in members:
            member.number = self.newest
        self.completed.append((self.newest, group, members))

    def _keep(self, entry: FeedEntry) -> None:
        self._by_session[entry.session] = entry
        if entry.rollout:
            self._by_rollout[entry.rollout] = entry
        if entry.number is None:
            self._waiting.setdefault(entry.group, []).append(entry)

    def _remove(self, entry: FeedEntry) -> None:
        """Remove an entry without a number."""
        if entry not in self._waiting[entry.group]:
            return  # the same entry by session and by rollout
        self._waiting[entry.group].remove(entry)
        self._by_session.pop(entry.session, None)
        self._by_rollout.pop(entry.rollout, None)
        self._added.pop(entry.session, None)
        if entry.place:
            self.removed.append(entry.place)
