"""Several connections write to the shared store at once: groups complete exactly once, and events are numbered in commit order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.store.kit import add_session, event, finish_rollout, open_shared, put_outcome
from turngate.store.store import Store

pytestmark = pytest.mark.needs("postgres")


def run_writers(url: str, count: int, write: Callable[[Store, int], None]) -> None:
    """Run `write` in threads that start together, each with its own connection and number."""
    start = threading.Barrier(count)

    def work(number: int) -> None:
        store = open_shared(url)
        try:
            start.wait(30)
            write(store, number)
        finally:
            store.close()

    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(work, number) for number in range(count)]:
            done.result()


@pytest.mark.real
@pytest.mark.promise(3)
def test_concurrent_outcomes_complete_each_group_exactly_once(postgres_url: str) -> None:
    """Eight machines record the outcomes of 20 groups of 8, in different orders, while the feed is opened and filled."""
    store = open_shared(postgres_url)

    def record(other: Store, number: int) -> None:
        for n in range(20):
            group = (n + 3 * number) % 20
            finish_rollout(other, f"r{number}-{group}", f"g{group}", at=float(n))
            if number == 0 and n == 5:
                feed = other.feeds.open("late", b"{}", 8, "", from_start=True)
                while other.feeds.fill(feed.key, 3):
                    pass

    store.feeds.open("early", b"{}", 8, "", from_start=False)
    run_writers(postgres_url, 8, record)
    for name in ("early", "late"):
        feed = store.feeds.find(name)
        assert feed is not None and feed.newest == 20 and store.feeds.waiting(feed.key, 9) == []
        members = [store.feeds.members(feed.key, number) for number in range(1, 21)]
        assert all(len({member.group for member in delivery}) == 1 for delivery in members)
        assert Counter(len(delivery) for delivery in members) == {8: 20}
        assert len({member.id for delivery in members for member in delivery}) == 160
    announced = [one.data["feed"] for one in store.events.page("", 0, 10_000) if one.kind == "delivery"]
    assert Counter(announced) == {"early": 20, "late": 20}
    store.close()


@pytest.mark.full
def test_reader_never_misses_an_event(postgres_url: str) -> None:
    """A reader that asks for what follows the last number it saw gets every event, although transactions overlap."""
    store = open_shared(postgres_url)
    seen: list[int] = []
    finished = threading.Event()

    def follow() -> None:
        while True:
            is_last = finished.is_set()
            seen.extend(one.seq for one in store.events.page("", seen[-1] if seen else 0, 7))
            if is_last and len(seen) >= store.events.newest():
                return

    reader = threading.Thread(target=follow)
    reader.start()

    def write(other: Store, number: int) -> None:
        for n in range(60):
            with other._writing() as db:
                db.execute("INSERT INTO settings VALUES (?,?)", (f"{number}-{n}", "x" * 500 * (number % 4)))
                db.execute("INSERT INTO events (time, session, kind, data) VALUES (?,?,?,?)", (1.0, "", "n", b"{}"))
                db.execute("SELECT pg_sleep(0.001)")

    run_writers(postgres_url, 6, write)
    finished.set()
    reader.join(30)
    assert seen == list(range(1, 361))
    store.close()


@pytest.mark.full
def test_one_of_two_outcomes_is_kept(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    feed = store.feeds.open("f", b"{}", 1, "", from_start=False)
    keys = [add_session(store, f"s{n}") for n in range(20)]
    replaced: list[bytes | None] = []

    def write(other: Store, number: int) -> None:
        for n, key in enumerate(keys):
            replaced.append(put_outcome(other, key, f"s{n}", "g", message=str(number % 1)))

    run_writers(postgres_url, 4, write)
    assert Counter(before is None for before in replaced) == {True: 20, False: 60}
    row = store.feeds.find("f")
    assert row is not None and row.newest == 20 and len(store.feeds.members(feed.key, 20)) == 1
    store.close()


@pytest.mark.full
def test_setting_counts_every_concurrent_change(postgres_url: str) -> None:
    def increase(other: Store, _: int) -> None:
        for _ in range(25):
            other.change_setting("count", lambda old: str(int(old or 0) + 1))

    run_writers(postgres_url, 4, increase)
    store = open_shared(postgres_url)
    assert store.setting("count") == "100"
    store.close()


@pytest.mark.full
def test_processes_that_start_together_create_the_tables_once(postgres_url: str) -> None:
    with ThreadPoolExecutor(6) as threads:
        opened = list(threads.map(lambda _: open_shared(postgres_url), range(6)))
    assert [store.events.add(event("", "note")) for store in opened] == [1, 2, 3, 4, 5, 6]
    for store in opened:
        store.close()


@pytest.mark.full
def test_attempt_is_either_adopted_or_superseded(postgres_url: str) -> None:
    """For each rollout, one machine records the outcome of attempt 1 while another gives it up and runs attempt 2."""
    store = open_shared(postgres_url)
    feed = store.feeds.open("train", b"{}", 1000, "", from_start=False)
    count = 40
    for n in range(count):
        store.close_session(add_session(store, f"a{n}", rollout=f"r{n}"), "sealed", "", 2.0)
    adopted: list[int] = []

    def write(other: Store, number: int) -> None:
        for n in range(count):
            if number == 0:
                row = other.find(f"a{n}")
                assert row is not None
                put_outcome(other, row.key, f"a{n}", "g")
                continue
            attempt, outcome = other.attempts.supersede(f"r{n}", 1, f"a{n}")
            assert (attempt.state == "settled") == (outcome is not None)
            if outcome is not None:
                adopted.append(n)
                continue
            key = add_session(other, f"b{n}", rollout=f"r{n}", attempt=2)
            other.close_session(key, "sealed", "", 2.0)
            put_outcome(other, key, f"b{n}", "g", attempt=2)

    run_writers(postgres_url, 2, write)
    [(_, waiting)] = [(group.group, group.rollouts) for group in store.feeds.waiting(feed.key, 10)]
    assert waiting == count
    for n in range(count):
        states = [row.state for row in store.attempts.list_attempts(f"r{n}")]
        assert states == (["settled"] if n in adopted else ["superseded", "settled"])
    store.close()
