"""Test the attempts table as conversations, on both databases: what happens to the attempts at one rollout, and which outcome counts."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.errors import Conflict
from turngate.store.events import new_event
from turngate.store.outcomes import OutcomeClass, RecordedOutcome
from turngate.store.store import Store
from turngate.trace.session import SessionConfig, Status

OPEN, GIVE_UP, GRADED, FAULT, CANCEL = "open", "give up", "graded", "infrastructure fault", "cancel"
UNLESS = ", unless the rollout has an outcome that counts"


class AttemptStore:
    """A store with one rollout. The session of attempt n has the id `s<n>`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        store.feeds.open("train", b"{}", 100, "", from_start=False)

    def do(self, verb: str, attempt: int) -> None:
        session = f"s{attempt}"
        match verb:
            case "open":
                config = SessionConfig(rollout="r", attempt=attempt)
                self.store.add_session(session, session.encode(), config, float(attempt))
            case "give up":
                self.store.attempts.supersede("r", attempt, session)
            case "cancel":
                self._close(session, "cancelled")
            case "graded" | "infrastructure fault":
                self._close(session, "sealed")
                self.record(session, verb)  # type: ignore[arg-type]

    def record(self, session: str, kind: OutcomeClass, *, replace: bool = False) -> None:
        row = self.store.find(session)
        assert row is not None
        outcome = RecordedOutcome(kind=kind, reward=1.0 if kind == "graded" else None, group="g")
        self.store.outcomes.put(row.key, outcome.encode(), new_event(session, "outcome", {}), replace=replace)

    def _close(self, session: str, status: Status) -> None:
        row = self.store.find(session)
        assert row is not None
        if row.status == "open":
            self.store.close_session(row.key, status, "", 9.0)

    @property
    def states(self) -> dict[int, str]:
        return {row.attempt: row.state for row in self.store.attempts.list_attempts("r")}

    @property
    def in_feed(self) -> int:
        feed = self.store.feeds.find("train")
        assert feed is not None
        return sum(group.rollouts for group in self.store.feeds.waiting(feed.key, 10))


@pytest.fixture
def attempts(store: Store) -> AttemptStore:
    return AttemptStore(store)


@pytest.mark.parametrize(
    ("steps", "states", "in_feed"),
    [
        pytest.param([(OPEN, 1), (GRADED, 1)], {1: "settled"}, 1, id="one attempt"),
        pytest.param([(OPEN, 1), (FAULT, 1)], {1: "failed"}, 0, id="a fault does not count"),
        pytest.param([(OPEN, 1), (FAULT, 1), (OPEN, 2), (GRADED, 2)], {1: "superseded", 2: "settled"}, 1, id="retry"),
        pytest.param(
            [(OPEN, 1), (OPEN, 2), (GRADED, 2), (GRADED, 1)], {1: "superseded", 2: "settled"}, 1, id="the first is late"
        ),
        pytest.param(
            [(OPEN, 1), (OPEN, 2), (GRADED, 1), (GRADED, 2)],
            {1: "superseded", 2: "settled"},
            1,
            id="the first is early",
        ),
        pytest.param([(OPEN, 1), (GIVE_UP, 1), (GRADED, 1)], {1: "superseded"}, 0, id="given up, then graded"),
        pytest.param([(OPEN, 1), (GRADED, 1), (GIVE_UP, 1)], {1: "settled"}, 1, id="graded, then given up"),
        pytest.param([(OPEN, 1), (FAULT, 1), (GIVE_UP, 1)], {1: "failed"}, 0, id="fault, then given up"),
        pytest.param([(GIVE_UP, 1), (OPEN, 2)], {1: "superseded", 2: "running"}, 0, id="given up before it was opened"),
        pytest.param([(OPEN, 1), (CANCEL, 1), (GRADED, 1)], {1: "failed"}, 0, id="cancelled, then graded"),
        pytest.param(
            [(OPEN, 1), (CANCEL, 1), (GRADED, 1), (OPEN, 2), (GRADED, 2)],
            {1: "superseded", 2: "settled"},
            1,
            id="a cancelled attempt can be retried",
        ),
        pytest.param(
            [(OPEN, 1), (OPEN, 5), (GIVE_UP, 3)], {1: "superseded", 3: "superseded", 5: "running"}, 0, id="gaps"
        ),
    ],
)
def test_at_most_one_attempt_counts(
    steps: list[tuple[str, int]], states: dict[int, str], in_feed: int, attempts: AttemptStore
) -> None:
    for verb, attempt in steps:
        attempts.do(verb, attempt)
    assert (attempts.states, attempts.in_feed) == (states, in_feed)


@pytest.mark.parametrize(
    ("steps", "attempt", "error"),
    [
        ([(OPEN, 1)], 1, "attempt 1 of rollout 'r' already has session 's1'; open attempt 2" + UNLESS),
        ([(GIVE_UP, 1)], 1, "attempt 1 of rollout 'r' was superseded; open attempt 2" + UNLESS),
        ([(OPEN, 1), (OPEN, 5), (GIVE_UP, 3)], 3, "attempt 3 of rollout 'r' was superseded; open attempt 6" + UNLESS),
        ([(OPEN, 1), (OPEN, 5)], 1, "attempt 1 of rollout 'r' was superseded; open attempt 6" + UNLESS),
        ([(OPEN, 2)], 1, "attempt 1 of rollout 'r' was superseded by attempt 2; open attempt 3"),
        ([(OPEN, 1), (GRADED, 1)], 2, "rollout 'r' already has an outcome, recorded by attempt 1; do not run it again"),
    ],
)
def test_opening_is_refused(steps: list[tuple[str, int]], attempt: int, error: str, attempts: AttemptStore) -> None:
    for verb, number in steps:
        attempts.do(verb, number)
    before = attempts.states
    with pytest.raises(Conflict) as refused:
        attempts.store.add_session("other", b"x", SessionConfig(rollout="r", attempt=attempt), 1.0)
    assert (refused.value.message, refused.value.param) == (error, "attempt")
    assert attempts.states == before and attempts.store.find("other") is None  # nothing is written


def test_superseding_returns_the_outcome_once_it_exists(attempts: AttemptStore) -> None:
    attempts.do(OPEN, 1)
    attempts.do(GRADED, 1)
    row, outcome = attempts.store.attempts.supersede("r", 1, "")
    assert row.state == "settled" and outcome is not None and outcome.reward == 1.0
    row, outcome = attempts.store.attempts.supersede("other", 1, "")
    assert (row.state, row.session, outcome) == ("superseded", "", None)


def test_replaced_outcome_of_a_superseded_attempt_does_not_count(attempts: AttemptStore) -> None:
    for verb, attempt in [(OPEN, 1), (FAULT, 1), (OPEN, 2), (GRADED, 2)]:
        attempts.do(verb, attempt)
    attempts.record("s1", "graded", replace=True)
    assert attempts.in_feed == 1 and attempts.states == {1: "superseded", 2: "settled"}


def test_session_without_a_name_is_its_own_rollout(attempts: AttemptStore) -> None:
    store = attempts.store
    key = store.add_session("own", b"k", SessionConfig(), 1.0)
    [row] = store.attempts.list_attempts("own")
    assert (row.attempt, row.session, row.state) == (1, "own", "running")
    store.delete_session(key)
    store.add_session("own", b"k2", SessionConfig(), 2.0)  # a deleted session's id can be reused
    assert store.attempts.supersede("own", 1, "")[0].state == "superseded"
    assert store.attempts.filter_superseded(["own", "s1"]) == ["own"]


def test_deleting_a_session_does_not_free_its_attempt(attempts: AttemptStore) -> None:
    attempts.do(OPEN, 1)
    attempts.do(GRADED, 1)
    row = attempts.store.find("s1")
    assert row is not None
    attempts.store.delete_session(row.key)
    assert attempts.states == {1: "superseded"}
    with pytest.raises(Conflict, match="was superseded; open attempt 2"):
        attempts.do(OPEN, 1)
    attempts.store.add_session("s1", b"again", SessionConfig(), 1.0)  # its id is free
    assert attempts.store.attempts.filter_superseded(["s1"]) == []
    attempts.do(OPEN, 2)
    attempts.do(GRADED, 2)
    assert attempts.in_feed == 1


def test_feed_has_each_rollout_once_even_if_its_session_was_deleted(attempts: AttemptStore) -> None:
    attempts.do(OPEN, 1)
    attempts.do(GRADED, 1)
    assert attempts.store.feeds.close_group("g") == [("train", 1)]
    row = attempts.store.find("s1")
    assert row is not None
    attempts.store.delete_session(row.key)
    attempts.do(OPEN, 2)
    attempts.do(GRADED, 2)
    assert attempts.in_feed == 0


def test_new_feed_starts_without_superseded_and_cancelled_outcomes(attempts: AttemptStore) -> None:
    for verb, attempt in [(OPEN, 1), (OPEN, 2), (GRADED, 1), (CANCEL, 2), (GRADED, 2), (OPEN, 3), (GRADED, 3)]:
        attempts.do(verb, attempt)
    feed = attempts.store.feeds.open("all", b"{}", 100, "", from_start=True)
    while attempts.store.feeds.fill(feed.key, 10):
        pass
    assert [group.rollouts for group in attempts.store.feeds.waiting(feed.key, 10)] == [1]
    assert attempts.store.attempts.explain_exclusions([1, 2, 3]) == {
        1: "superseded by attempt 3",
        2: "superseded by attempt 3",
    }


_STEPS = st.tuples(st.sampled_from([OPEN, GIVE_UP, GRADED, FAULT, CANCEL]), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS, max_size=14))
def test_no_order_of_events_makes_two_attempts_count(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        store = Store(Path(folder))
        attempts = AttemptStore(store)
        for verb, attempt in steps:
            if verb in (OPEN, GIVE_UP) or store.find(f"s{attempt}") is not None:
                with suppress(Conflict, KeyError):  # the attempt or the id is taken
                    attempts.do(verb, attempt)
            settled = [number for number, state in attempts.states.items() if state == "settled"]
            assert len(settled) == attempts.in_feed <= 1
        store.close()
