"""Decide how outcomes change and complete the groups of one feed. No I/O.

Outcomes are added one after another. The result is the same whether they are added in one transaction or in several.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class NewEntry(msgspec.Struct, frozen=True):
    """An outcome for the feeds to process."""

    session: int  # key of the session
    id: str  # id of the session
    rollout: str  # name of the rollout; empty: it has none
    group: str
    outcome: bytes  # JSON of RecordedOutcome
    is_fault: bool  # an infrastructure fault is not added, but removes the rollout's earlier outcome


class FeedEntry(msgspec.Struct, eq=False):
    """A rollout in a feed: a row of the table `rolled`, or a row that will be written to it."""

    session: int
    rollout: str
    group: str
    number: int | None  # number of the delivery; None: the group is not complete
    place: int = 0  # key of the row; 0: not written yet
    new: NewEntry | None = None


class FeedGroups:
    """The entries of a feed that new outcomes may affect, and the changes that the outcomes make.

    `entries` must include all entries of the incomplete groups that get new outcomes, and all entries that have the session or the rollout
    of a new outcome.
    """

    def __init__(self, n: int, prefix: str, newest: int, entries: Iterable[FeedEntry]) -> None:
        self._n = n
        self._prefix = prefix
        self._waiting: dict[str, list[FeedEntry]] = {}  # by group
        self._by_session: dict[int, FeedEntry] = {}
        self._by_rollout: dict[str, FeedEntry] = {}
        self._added: dict[int, FeedEntry] = {}  # by session
        self.newest = newest
        self.removed: list[int] = []  # places of the rows to delete
        self.completed: list[tuple[int, str, list[FeedEntry]]] = []  # number, group and entries of each new delivery
        for entry in entries:
            self._keep(entry)

    @property
    def added(self) -> list[FeedEntry]:
        """The entries to write, in the order in which they were added."""
        return list(self._added.values())

    def add(self, new: NewEntry) -> None:
        """Process an outcome. If it completes its group, assign the group a delivery number."""
        # An entry of the same session or rollout is replaced while its group is incomplete. Once it has a number, it never changes.
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
        if len(self._waiting[new.group]) >= self._n or not new.group:  # a rollout without a group is a group by itself
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
        """Remove an entry that has no delivery number."""
        if entry not in self._waiting[entry.group]:
            return  # already removed: it was found by its session and by its rollout
        self._waiting[entry.group].remove(entry)
        self._by_session.pop(entry.session, None)
        self._by_rollout.pop(entry.rollout, None)
        self._added.pop(entry.session, None)
        if entry.place:
            self.removed.append(entry.place)
