"""The lists of the shared store show the same as lists that are computed from all sessions and events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tests.postgres import PostgresServer
from tests.store.kit import add_session, event, new_turn, open_shared, put_outcome
from turngate.errors import BadRequest, NotFound
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store
from turngate.types import Json
from turngate.views.filters import GROUP_SORT_KEYS, SORT_KEYS, RolloutQuery
from turngate.views.overview import Overview
from turngate.views.shared_index import ListUpdater
from turngate.views.shared_overview import SharedOverview

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.full]
START = time.time() - 10_000
_TO_VERSION_4 = """
DROP TABLE rollout_list, group_list, rollout_counts, delivery_list, version_list, rollout_list_state;
UPDATE turngate_version SET version=4;
"""


def record(store: Store) -> None:
    """Record rollouts of every kind: graded, failed, cancelled, superseded, open, damaged, without a session, deleted."""
    store.feeds.open("f", b"{}", 3, "g", from_start=False)
    for n in range(12):
        at, name = START + 60.0 * n, f"s{n}"
        metadata: dict[str, Json] = {"agent": f"agent{n % 2}", "task": f"t{n % 4}", "group": f"g{n % 3}", "batch": "b"}
        metadata["task_kind"] = ("rename", "delete\0", None)[n % 3]
        key = add_session(store, name, at, model=f"m{n % 2}", metadata=metadata, rollout=f"r{n}")
        store.commit(
            [
                new_turn(key, turn, name, at + turn, "abort" if turn == 3 else "stop")
                for turn in range(n // 4, n + n // 4)
            ]
        )
        store.events.add(event(name, "stage", at + 20, stage="agent"))
        if n == 11:
            continue
        status = "cancelled" if n == 10 else "sealed"
        store.close_session(key, status, "max_turns" if n == 9 else "", at + 30, event(name, status, at + 30))
        if n in (8, 10):
            continue
        kind = "agent failed" if n % 5 == 4 else "graded"
        reward = None if kind != "graded" else float(n % 3) if n != 6 else 1e30
        message = "" if kind == "graded" else f"exit status {n}\0"
        put_outcome(
            store, key, name, f"g{n % 3}", at=at + 40, task=f"t{n % 4}", kind=kind, reward=reward, message=message
        )
        store.events.add(event("", "fence", at + 41, version=n // 3))
    with store.database.writing() as db:
        db.execute("UPDATE outcomes SET outcome=? WHERE session=(SELECT key FROM sessions WHERE id='s7')", (b"{",))
    for at, name, stage in ((START - 2, "new", "sandbox"), (START - 1, "gone", "done")):
        store.events.add(event(name, "stage", at, stage="sandbox", rollout=name, group="g9", task="t1", agent="a"))
        store.events.add(event(name, "stage", START + 9, stage=stage, status="failed", message="no disk"))
    store.events.add(event("lost", "stage", START - 3, stage="done", status="cancelled", rollout="lost", group="g9"))
    old = store.find("s0")
    assert old is not None
    store.delete_session(old.key, event("s0", "deleted", START + 900))
    store.events.add(event("s0", "stage", START + 901, stage="done"))
    store.events.add(event("", "mismatch", START + 902, feed="f", number=1, version=99, lags=[], alarms=[]))


@contextmanager
def open_both(url: str) -> Iterator[tuple[SharedStore, Overview, SharedOverview]]:
    store, shown = open_shared(url, read_only=True), SharedOverview()
    try:
        yield store, Overview(), shown
    finally:
        shown.close()
        store.close()


def plain(value: Any) -> Any:
    """Return a view as JSON, without what depends on the moment, and with rounded means."""
    content = msgspec.json.decode(msgspec.json.encode(value))

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            dropped = ("now", "seconds", "incomplete", "behind") if "cursor" in part or "id" in part else ()
            return {name: clean(one) for name, one in part.items() if name not in dropped}
        if isinstance(part, list):
            return [clean(one) for one in part]
        if isinstance(part, str):
            return part.replace("\0", "\ufffd")  # PostgreSQL's text cannot contain null characters
        return round(part, 6) if isinstance(part, float) else part

    return clean(content)


def check_equal(found: Any, expected: Any, about: object) -> None:
    found, expected = plain(found), plain(expected)
    different = {key: (found[key], expected[key]) for key in expected if found.get(key) != expected[key]}
    for key, (one, other) in different.items():
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            different[key] = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
    assert not different, about
    assert found.keys() == expected.keys()


def compare(url: str, improved: str | None = "t2") -> None:
    """Compare everything that the lists show. `improved` is the task whose rewards rose most."""
    with open_both(url) as (store, expected, found):
        while not found.update(store):
            pass
        check_equal(found.sums(store), expected.sums(store), "")
        for query in rollout_queries():
            check_equal(found.rollouts(store, query), expected.rollouts(store, query), query)
        for sort, descending in itertools.product(GROUP_SORT_KEYS, ("", "-")):
            query = RolloutQuery(sort=descending + sort)
            check_equal(found.groups(store, query), expected.groups(store, query), query)
        for name in ("g0", "g1", "g2", "g9"):
            check_equal(found.group(store, name, {}), expected.group(store, name, {}), "")
            assert sorted(found.list_graded(store, name)) == sorted(expected.list_graded(store, name))
        for prefix in ("", "g1", "nothing"):
            failures = [plain(one.failures(store, prefix))["classes"] for one in (found, expected)]
            for classes in failures:  # equally frequent classes are in no particular order
                classes.sort(key=lambda one: one["class"])
            assert failures[0] == failures[1]
            trends = [one.training(store, prefix, 20) for one in (found, expected)]
            if prefix == "nothing":  # there is no first rollout, so it is now, and the only interval is that of now
                assert abs(trends[0].pop("first") - trends[1].pop("first")) < 60
                assert len(trends[0].pop("throughput")) == len(trends[1].pop("throughput")) == 1
            check_equal(*trends, prefix)
            assert [report["version"] for report in trends[0]["mismatch"]["newest"]] == [99]
            if not prefix:
                example = trends[0]["improvement"]["example"]
                assert (None if example is None else example["task"]) == improved
            assert found.choose_entropy_rollouts(store, prefix) == expected.choose_entropy_rollouts(store, prefix)
        for row in expected.rollouts(store, RolloutQuery(limit=500))["rollouts"]:
            assert plain(found.rollout(store, row.id)) == plain(expected.rollout(store, row.id))
            assert found.check_retry(store, row.id)[1] == expected.check_retry(store, row.id)[1]
            assert found.damage(store, row.id) == expected.damage(store, row.id)
        changes, wanted = plain(found.list_changes(store, 5)), plain(expected.list_changes(store, 5))
        for one in (changes, wanted):
            one["rollouts"].sort(key=lambda row: row["id"])
            one["gone"].sort()
        assert changes == wanted


def rollout_queries() -> Iterator[RolloutQuery]:
    for sort, descending in itertools.product(SORT_KEYS, ("", "-")):
        if sort != "seconds":  # a running rollout's duration grows
            yield RolloutQuery(sort=descending + sort)
            yield RolloutQuery(sort=descending + sort, offset=3, limit=4)
    for fields in (
        {"status": ("done",)},
        {"status": ("running", "cancelled")},
        {"kind": ("none",)},
        {"kind": ("graded",), "task": ("t1", "t2")},
        {"group": ("g1",)},
        {"agent": ("agent1",), "model": ("m1",), "mode": ("exact",)},
        {"task": ("unknown",)},
        {"text": "exit status"},
        {"text": "s1", "agent": ("agent1",)},
    ):
        yield RolloutQuery(**fields)  # type: ignore[arg-type]


def test_lists_equal_those_from_all_events(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    record(store)
    compare(postgres_url)
    # Changes after the lists were filled.
    row = store.find("s11")
    assert row is not None
    store.close_session(row.key, "sealed", "", START + 1000, event("s11", "sealed", START + 1000))
    put_outcome(store, row.key, "s11", "g7", at=START + 1001, task="t9")
    key = add_session(store, "s12", START + 1002, metadata={"group": "g7"}, rollout="r8", attempt=2)
    store.commit([new_turn(key, 0, "s12", START + 1003)])
    store.attempts.supersede("r10", 1, "s10")
    store.close()
    compare(postgres_url, improved=None)


def test_names_too_long_for_an_index_are_cut(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    long = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))
    key = add_session(store, "s", model=long, metadata={"agent": long, "group": long, "task": long})
    put_outcome(store, key, "s", long, task=long)
    assert ListUpdater(store).update(1.0)
    with store.database.reading() as db:
        row = db.execute("SELECT team, task, agent, model FROM rollout_list").fetchone()
    assert row == (long[:500],) * 4
    store.close()


def test_silent_runner_is_done_after_an_hour(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    store.events.add(event("r", "stage", time.time() - 3590, stage="sandbox"))
    updater = ListUpdater(store)
    assert updater.update(1.0)
    assert store.rollout_pages.counts()["status"] == {"starting": 1}
    with store.database.writing() as db:
        db.execute("UPDATE events SET time=time-20")
        db.execute("UPDATE session_totals SET at=at-20")
        db.execute("UPDATE rollout_list SET seen=seen-20")
    assert updater.update(1.0)
    assert store.rollout_pages.counts()["status"] == {"done": 1}
    store.close()


def test_lists_of_an_older_store_are_filled(postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database()
    store = open_shared(url)
    record(store)
    store.close()
    postgres_server.query(_TO_VERSION_4, url.rsplit("/", 1)[1])
    open_shared(url).close()
    compare(url)


def test_lists_are_filled_again_if_unread_events_were_pruned(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    record(store)
    updater = ListUpdater(store)
    updater.update(5.0)
    add_session(store, "late", START + 2000)
    assert sum(store.events.prune(START + 5000)) > 0
    assert updater.update(5.0)
    assert [row.id for row in store.rollout_pages.find(["late"])] == ["late"]
    assert store.rollout_pages.find(["s5"])[0].turns == 4  # counted from the trace; one of its five turns was aborted
    store.close()


def test_only_one_process_updates_the_lists(postgres_url: str) -> None:
    store, other = open_shared(postgres_url), open_shared(postgres_url)
    record(store)
    with other.database.writing() as db:
        db.execute("SELECT newest FROM rollout_list_state FOR UPDATE").fetchall()
        assert not ListUpdater(store).update(5.0)
    assert ListUpdater(store).update(5.0)
    store.close()
    other.close()


def test_unknown_names_are_explained(postgres_url: str) -> None:
    open_shared(postgres_url).close()
    with open_both(postgres_url) as (store, _, found):
        with pytest.raises(BadRequest, match="'sort' must be one of opened"):
            found.rollouts(store, RolloutQuery(sort="secret"))
        with pytest.raises(NotFound, match="unknown rollout"):
            found.rollout(store, "nothing")
        with pytest.raises(NotFound, match="unknown group"):
            found.group(store, "", {})
