"""Property tests for feed numbering: each rollout is delivered once, and numbered deliveries never change."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import MEMORY_FOLDER
from turngate.store.events import NewEvent, new_event
from turngate.store.outcomes import OutcomeClass, RecordedOutcome
from turngate.store.store import Store
from turngate.trace.session import SessionConfig

SESSIONS = 8
FEEDS = {"pairs": (2, ""), "threes": (3, "a"), "ones": (1, "b"), "late": (2, "")}
KINDS: list[OutcomeClass] = ["graded", "graded", "invalid task", "infrastructure fault"]
outcomes = st.tuples(
    st.just("record"), st.integers(1, SESSIONS), st.sampled_from(KINDS), st.sampled_from(["", "a", "ab", "b"])
)
closes = st.tuples(st.just("close"), st.sampled_from(["a", "ab", "b", "c"]))
deletes = st.tuples(st.just("delete"), st.integers(1, SESSIONS))
opens = st.tuples(st.just("late"))
fills = st.tuples(st.just("fill"))
Seen = dict[str, dict[int, list[tuple[int, str, str]]]]


def numbered(store: Store) -> Seen:
    """Rollouts with their outcomes, by feed and number."""
    found: Seen = {}
    for feed in store.feeds.listing():
        found[feed.name] = {
            number: [(m.session, m.group, m.outcome.kind) for m in store.feeds.members(feed.key, number)]
            for number in range(1, feed.newest + 1)
        }
    return found


class Model:
    """Reference model of a feed: waiting rollouts and numbered deliveries."""

    def __init__(self, n: int, prefix: str) -> None:
        self.n, self.prefix = n, prefix
        self.waiting: dict[int, tuple[str, str]] = {}  # by session: group and kind, in the order of recording
        self.done: dict[int, list[tuple[int, str, str]]] = {}

    def record(self, session: int, kind: str, group: str) -> None:
        if any(session == member for members in self.done.values() for member, _, _ in members):
            return
        self.waiting.pop(session, None)
        if kind == "infrastructure fault" or not group.startswith(self.prefix):
            return
        self.waiting[session] = (group, kind)
        if not group or sum(g == group for g, _ in self.waiting.values()) >= self.n:
            self.close(group)

    def close(self, group: str) -> None:
        members = [(session, g, kind) for session, (g, kind) in self.waiting.items() if g == group]
        if members:
            self.done[len(self.done) + 1] = members
            for session, _, _ in members:
                del self.waiting[session]


class LateModel(Model):
    """A feed opened late: filled with existing outcomes, then with those recorded during the fill.

    `when` has the step at which each outcome was recorded, and `closings` the groups that were closed before, with their steps.
    """

    def __init__(
        self,
        n: int,
        prefix: str,
        there: dict[int, tuple[str, str]],
        when: dict[int, int],
        closings: list[tuple[int, str]],
    ) -> None:
        super().__init__(n, prefix)
        self.when = when
        self.closings = list(closings)
        self.is_closing_done = False
        self.there = there
        self.rows = list(there)
        self.later: list[tuple[int | None, str, str]] = []
        self.filling = True

    def record(self, session: int, kind: str, group: str) -> None:
        if not self.filling:
            super().record(session, kind, group)
            return
        self.later.append((session, kind, group))
        if not self.is_closing_done:  # until then, a fill skips the outcome at its old place
            self.rows = [*(row for row in self.rows if row != session), session]

    def close(self, group: str) -> None:
        if self.filling:
            self.later.append((None, "", group))
        else:
            super().close(group)

    def fill(self) -> None:
        if self.rows:
            session = self.rows.pop(0)
            if not any(session == known for known, _, _ in self.later):
                kind, group = self.there[session]
                closings = self._closings_after_waiting(group)
                if group and any(step < self.when[session] for step in closings):
                    self._now(lambda: Model.close(self, group))
                self._now(lambda: Model.record(self, session, kind, group))
            return
        if not self.is_closing_done:
            self.is_closing_done = True
            groups = {group for group, _ in self.waiting.values()}
            due = sorted((min(steps), group) for group in groups if (steps := self._closings_after_waiting(group)))
            for _, group in due:
                self._now(lambda group=group: Model.close(self, group))  # type: ignore[misc]
        if self.later:
            known, kind, group = self.later.pop(0)
            self._now(lambda: Model.close(self, group) if known is None else Model.record(self, known, kind, group))
        else:
            self.filling = False

    def _closings_after_waiting(self, group: str) -> list[int]:
        """Return when a group was closed after the last of its waiting rollouts."""
        last = max((self.when[s] for s, (g, _) in self.waiting.items() if g == group and s in self.when), default=None)
        return [] if last is None else [step for step, name in self.closings if name == group and step >= last]

    def _now(self, work: Callable[[], None]) -> None:
        self.filling = False
        work()
        self.filling = True


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(outcomes, outcomes, outcomes, closes, deletes, opens, fills, fills), max_size=50))
def test_feed_matches_reference_model(steps: list[tuple[Any, ...]]) -> None:
    models = {name: Model(*choices) for name, choices in FEEDS.items() if name != "late"}
    late: LateModel | None = None
    recorded: dict[int, tuple[str, str]] = {}  # current outcomes, in recording order
    when: dict[int, int] = {}
    closings: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        store = Store(Path(folder))
        try:
            for name, (n, prefix) in FEEDS.items():
                if name != "late":
                    store.feeds.open(name, b"{}", n, prefix, from_start=False)
            for number in range(SESSIONS):
                store.add_session(f"s{number}", f"{number}".encode(), SessionConfig(), 0.0)
            for number, step in enumerate(steps):
                before = numbered(store)
                match step:
                    case ("record", session, kind, group) if store.find_key(session) is not None:
                        outcome = RecordedOutcome(kind=kind, group=group, reward=1.0 if kind == "graded" else None)
                        changed = recorded.get(session) != (kind, group)
                        store.outcomes.put(
                            session,
                            outcome.encode(),
                            new_event(store.find_key(session).id, "outcome", {}),
                            replace=True,
                        )
                        if changed:
                            recorded.pop(session, None)
                            recorded[session] = (kind, group)
                            when[session] = number
                            for model in models.values():
                                model.record(session, kind, group)
                    case ("close", group):
                        store.feeds.close_group(group)
                        closings.append((number, group))
                        for model in models.values():
                            model.close(group)
                    case ("delete", session):
                        store.delete_session(session)
                        recorded.pop(session, None)
                        when.pop(session, None)
                        if late is not None:
                            late.rows = [row for row in late.rows if row != session]
                    case ("late",) if late is None:
                        models["late"] = late = LateModel(*FEEDS["late"], dict(recorded), when, closings)
                        store.feeds.open("late", b"{}", *FEEDS["late"], from_start=True)
                    case ("fill",) if late is not None:
                        _fill(store, late)
                after = numbered(store)
                for name, deliveries in before.items():
                    assert {n: after[name][n] for n in deliveries} == deliveries  # numbered deliveries never change
            while late is not None and late.filling:
                _fill(store, late)
            assert numbered(store) == {name: models[name].done for name in feed_names(store)}
            for feed in store.feeds.listing():
                waiting = {w.group: w.rollouts for w in store.feeds.waiting(feed.key, 100)}
                groups = [group for group, _ in models[feed.name].waiting.values()]
                assert waiting == {group: groups.count(group) for group in groups}
        finally:
            store.close()


def _fill(store: Store, late: LateModel) -> None:
    feed = store.feeds.find("late")
    assert feed is not None and store.feeds.is_filling(feed.key) == late.filling
    store.feeds.fill(feed.key, 1)
    late.fill()


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_outcomes_recorded_during_fill_come_last(batch_size: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        store = Store(Path(folder))

        def record(session: int, group: str, when: float) -> None:
            outcome = RecordedOutcome(kind="graded", group=group, reward=1.0)
            store.outcomes.put(session, outcome.encode(), NewEvent(f"s{session}", "outcome", b"{}", when), replace=True)

        try:
            for number in range(1, 8):
                store.add_session(f"s{number}", f"{number}".encode(), SessionConfig(), 0.0)
            for session in (1, 2, 3):
                record(session, "a", 100.0 + session)
            feed = store.feeds.open("f", b"{}", 2, "", from_start=True).key
            store.feeds.fill(feed, 1)
            record(4, "a", 5.0)  # the clock was set back
            record(2, "b", 6.0)  # not filled yet
            record(1, "b", 7.0)  # already filled; numbered before this one applies
            assert store.feeds.close_group("b") == []
            record(5, "b", 300.0)
            while store.feeds.fill(feed, batch_size):
                record(6, "c", 8.0)  # recording the same outcome changes nothing
            assert not store.feeds.is_filling(feed)
            record(7, "b", 9.0)
            assert numbered(store)["f"] == {
                1: [(1, "a", "graded"), (3, "a", "graded")],
                2: [(2, "b", "graded")],
                3: [(5, "b", "graded"), (7, "b", "graded")],
            }
            assert [(w.group, w.rollouts) for w in store.feeds.waiting(feed, 10)] == [("a", 1), ("c", 1)]
        finally:
            store.close()


def feed_names(store: Store) -> list[str]:
    return [feed.name for feed in store.feeds.listing()]
