"""Shipping: a cell's sessions reach the shared store exactly once, with everything recorded for them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.store.kit import add_session, event, finish_rollout, new_turn, open_shared, put_outcome, turn_with
from turngate.errors import Conflict
from turngate.gateway.cell.shipping import Shipper
from turngate.store.shared.shipments import ShipmentWriter
from turngate.store.shared.store import SharedStore
from turngate.store.shipment import SESSION_TABLES, ConflictingShipment, RejectedShipment, read_shipments
from turngate.store.store import Store
from turngate.trace.tree import Sampled
from turngate.types import SideArray

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.full]
LEASE_S = 30.0


@pytest.fixture
def shared(postgres_url: str) -> Iterator[SharedStore]:
    store = open_shared(postgres_url)
    yield store
    store.close()


@pytest.fixture
def cell(tmp_path: Path, shared: SharedStore) -> Iterator[Store]:
    with_cell = open_cell(tmp_path / "a", shared, "a")
    yield with_cell
    with_cell.close()


def open_cell(folder: Path, shared: SharedStore, cell: str) -> Store:
    store = Store(folder)
    shared.cells.register(cell, cell, "http://cell", LEASE_S)
    store.outbox.start(cell, ())
    return store


def ship(cell: Store, shared: SharedStore, *, crash: bool = False) -> int:
    """Ship all that is due in one transaction, and return the number of sessions."""
    rows = cell.outbox.find_due(time.time(), 100)
    ShipmentWriter(shared).write([shipment for _, shipment in read_shipments(cell, rows, 2**30).shipments])
    if not crash:
        cell.outbox.remove(rows)
    return len(rows)


def count(shared: SharedStore, table: str) -> int:
    with shared.database.reading() as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def end_lease(shared: SharedStore, cell: str) -> None:
    with shared.database.writing() as db:
        db.execute("UPDATE cells SET lease_until=0 WHERE id=?", (cell,))


def open_feed(store: Store, n: int) -> None:
    store.feeds.open("f", b"{}", n, "", from_start=False)


def test_a_shipped_session_is_the_same_session(cell: Store, shared: SharedStore) -> None:
    add_session(shared, "other")  # so that the keys differ
    key = finish_rollout(cell, "s", "g")
    cell.tool_calls.add(key, "s", "search", b"{}", "r1", b"[]", 10)
    cell.refusals.add(key, "s", 400, "no", b"digest")
    experts = SideArray("routed_experts", -3, np.arange(24, dtype=np.uint8).reshape(4, 2, 3))
    turn = turn_with(key, 1, experts, name="s")
    cell.commit([turn])
    cell.mark_undelivered(key, turn.sampled.id)
    assert ship(cell, shared) == 1
    here, there = cell.find("s"), shared.find("s")
    assert here is not None and there is not None
    assert msgspec.structs.replace(here, key=0) == msgspec.structs.replace(there, key=0)
    assert here.key != there.key
    loaded = shared.load(there)  # verifies the checksums
    assert [(n.id, n.ids.tolist()) for n in loaded.trace.nodes] == [
        (n.id, n.ids.tolist()) for n in cell.load(here).trace.nodes
    ]
    assert [n.delivered for n in loaded.trace.nodes if isinstance(n, Sampled)] == [True, False]
    [array] = shared.side_data.load(loaded)[turn.sampled.id]
    assert (array.name, array.first, array.values.tolist()) == ("routed_experts", -3, experts.values.tolist())
    assert shared.messages(there.key) == cell.messages(here.key)
    assert shared.preambles(there.key) == cell.preambles(here.key)
    assert shared.outcomes.find(there.key) == cell.outcomes.find(here.key)
    assert shared.tool_calls.page(there.key, 0, 10) == cell.tool_calls.page(here.key, 0, 10)
    assert shared.refusals.find(there.key) == cell.refusals.find(here.key)
    assert _kinds(shared, "s") == _kinds(cell, "s")
    assert cell.outbox.state().unshipped == 0
    for table in SESSION_TABLES:
        assert _rows(shared, table, there.key) == _rows(cell, table, here.key), table


def test_a_crash_between_commit_and_removal_ships_nothing_twice(cell: Store, shared: SharedStore) -> None:
    open_feed(shared, 2)
    finish_rollout(cell, "s1", "g")
    assert ship(cell, shared, crash=True) == 1
    finish_rollout(cell, "s2", "g")
    assert ship(cell, shared) == 2
    assert [member.id for member in shared.feeds.members(1, 1)] == ["s1", "s2"]
    assert (count(shared, "sessions"), count(shared, "rolled"), count(shared, "attempts")) == (2, 2, 2)
    assert _kinds(shared, "s1") == _kinds(cell, "s1")
    finish_rollout(cell, "s3", "h")
    assert ship(cell, shared) == 1


def test_a_replaced_outcome_is_shipped_again(cell: Store, shared: SharedStore) -> None:
    key = finish_rollout(cell, "s", "g")
    ship(cell, shared)
    put_outcome(cell, key, "s", "g", task="again")
    assert ship(cell, shared) == 1
    there = shared.find("s")
    assert there is not None
    outcome = shared.outcomes.find(there.key)
    assert outcome == cell.outcomes.find(key)
    assert _kinds(shared, "s").count("outcome") == 2


def test_an_old_copy_of_a_folder_does_not_bring_back_an_old_outcome(
    cell: Store, shared: SharedStore, tmp_path: Path
) -> None:
    key = finish_rollout(cell, "s", "g")
    with closing(sqlite3.connect(tmp_path / "a" / "turngate.db")) as source:
        (tmp_path / "copy").mkdir()
        with closing(sqlite3.connect(tmp_path / "copy" / "turngate.db")) as target:
            source.backup(target)
    put_outcome(cell, key, "s", "g", task="again")
    ship(cell, shared)
    there = shared.find("s")
    assert there is not None
    newest = shared.outcomes.find(there.key)
    old = Store(tmp_path / "copy")
    try:
        old.outbox.start("a", ())
        for _ in range(4):  # its newest event gets a higher number than that of the new outcome
            assert ship(old, shared) == 1 and shared.outcomes.find(there.key) == newest
            old.events.add(event("s", "stage"))
            with old.database.writing() as db:
                db.execute("UPDATE outbox SET due=0")
        put_outcome(old, key, "s", "g", task="third")
        ship(old, shared)
        assert shared.outcomes.find(there.key) == old.outcomes.find(key) != newest
    finally:
        old.close()


def test_a_change_while_a_session_is_shipped_is_shipped_too(cell: Store, shared: SharedStore) -> None:
    key = finish_rollout(cell, "s", "g")
    rows = cell.outbox.find_due(time.time(), 10)
    ((_, read),) = read_shipments(cell, rows, 2**30).shipments
    put_outcome(cell, key, "s", "g", task="meanwhile")
    ShipmentWriter(shared).write([read])
    cell.outbox.remove(rows)
    assert cell.outbox.state().unshipped == 1
    assert ship(cell, shared) == 1


def test_events_after_the_outcome_are_shipped_later(cell: Store, shared: SharedStore) -> None:
    finish_rollout(cell, "s", "g")
    ship(cell, shared)
    cell.events.add(event("s", "stage"))
    assert ship(cell, shared) == 0  # collected for a moment
    with cell.database.writing() as db:
        db.execute("UPDATE outbox SET due=0")
    assert ship(cell, shared) == 1
    assert _kinds(shared, "s")[-1] == "stage"


def test_a_session_without_an_outcome_is_shipped_after_an_hour(cell: Store, shared: SharedStore) -> None:
    ended = time.time() - 3500
    key = add_session(cell, "s")
    assert ship(cell, shared) == 0
    cell.close_session(key, "sealed", "", ended)
    assert ship(cell, shared) == 0
    assert [row.session for row in cell.outbox.find_due(ended + 3601, 10)] == [key]
    with cell.database.writing() as db:
        db.execute("UPDATE outbox SET due=0")
    assert ship(cell, shared) == 1
    assert shared.find("s") is not None
    put_outcome(cell, key, "s", "g")  # it was not abandoned after all
    open_feed(shared, 1)
    assert ship(cell, shared) == 1
    assert [member.id for member in shared.feeds.members(1, 1)] == ["s"]


def test_a_damaged_session_stays_and_says_why(cell: Store, shared: SharedStore) -> None:
    key = finish_rollout(cell, "s", "g")
    with cell.database.writing() as db:
        db.execute("UPDATE nodes SET ids=? WHERE session=?", (b"\1\0\0\0", key))
    finish_rollout(cell, "t", "g")
    rows = cell.outbox.find_due(time.time(), 10)
    batch = read_shipments(cell, rows, 2**30)
    row = rows[0]
    assert batch.damaged == [(row, "session s: node 1 is damaged on disk")]
    assert [shipment.id for _, shipment in batch.shipments] == ["t"]
    cell.outbox.remove(rows[1:])
    cell.outbox.mark_failed(row, "damaged")
    assert cell.outbox.find_due(time.time(), 10) == []
    assert cell.outbox.state().failed == 1
    assert cell.outbox.failures() == [("s", "damaged")]
    with pytest.raises(Conflict, match="shipping it failed: damaged"):
        cell.outbox.require_shipped(key, "s")


@pytest.mark.parametrize("column", ["ids", "logprobs", "info", "messages"])
def test_a_value_of_the_wrong_type_does_not_stop_shipping(cell: Store, shared: SharedStore, column: str) -> None:
    key = finish_rollout(cell, "s", "g")
    with cell.database.writing() as db:
        db.execute(f"UPDATE nodes SET {column}='text' WHERE session=?", (key,))
    finish_rollout(cell, "t", "g")
    batch = read_shipments(cell, cell.outbox.find_due(time.time(), 10), 2**30)
    ((_, reason),) = batch.damaged
    assert reason.startswith("session s: node ") and reason.endswith("a value has the wrong type")
    assert [shipment.id for _, shipment in batch.shipments] == ["t"]


@pytest.mark.parametrize("change", ["kind='context'", "kind='other'", "kind=x'ff'", "delivered=0", "delivered=3"])
def test_a_change_of_any_column_is_damage(cell: Store, shared: SharedStore, change: str) -> None:
    key = finish_rollout(cell, "s", "g")
    with cell.database.writing() as db:
        db.execute(f"UPDATE nodes SET {change} WHERE session=? AND kind='sampled'", (key,))
    batch = read_shipments(cell, cell.outbox.find_due(time.time(), 10), 2**30)
    assert not batch.shipments and batch.damaged[0][1].endswith("is damaged on disk")


def test_a_damaged_kind_of_event_is_rejected(cell: Store, shared: SharedStore) -> None:
    finish_rollout(cell, "s", "g")
    with cell.database.writing() as db:
        db.execute("UPDATE events SET kind=CAST(x'ff' AS TEXT) WHERE session='s' AND kind='outcome'")
    with pytest.raises(RejectedShipment):
        ship(cell, shared)
    assert shared.find("s") is None


def test_another_session_with_the_same_id_is_refused(cell: Store, shared: SharedStore, tmp_path: Path) -> None:
    other = open_cell(tmp_path / "b", shared, "b")
    finish_rollout(cell, "s", "g")
    finish_rollout(other, "s", "g")
    ship(cell, shared)
    with pytest.raises(ConflictingShipment, match="must be unique across all cells"):
        ship(other, shared)
    assert other.outbox.state().unshipped == 1
    other.close()


@pytest.mark.parametrize("group", ["a\0b", "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))], ids=["null", "too long"])
def test_a_value_that_postgres_rejects_does_not_stop_the_other_sessions(
    cell: Store, shared: SharedStore, group: str
) -> None:
    open_feed(shared, 2)
    finish_rollout(cell, "s1", "g")
    finish_rollout(cell, "rejected", group)
    finish_rollout(cell, "s2", "g")
    shipper = Shipper(cell.outbox, cell.open_reader, lambda: ShipmentWriter(shared))
    while shipper.ship():
        pass
    shipper.stop(0)
    assert [member.id for member in shared.feeds.members(1, 1)] == ["s1", "s2"]
    assert shared.find("rejected") is None
    ((session, reason),) = cell.outbox.failures()
    assert session == "rejected" and reason.startswith("session rejected: cannot write to the shared store: ")


def test_an_unshipped_session_cannot_be_deleted_and_its_events_are_kept(cell: Store, shared: SharedStore) -> None:
    key = finish_rollout(cell, "s", "g")
    with pytest.raises(Conflict, match="not in the shared store yet"):
        cell.outbox.require_shipped(key, "s")
    cell.events.add(event("", "note"))
    assert sum(cell.events.prune(time.time() + 1)) == 1
    assert len(_kinds(cell, "s")) == 4
    ship(cell, shared)
    cell.outbox.require_shipped(key, "s")
    assert sum(cell.events.prune(time.time() + 1)) == 4


# ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def finish_attempt(store: Store, name: str, attempt: int, *, rollout: str = "r", **outcome: Any) -> int:
    key = add_session(store, name, rollout=rollout, attempt=attempt)
    store.close_session(key, "sealed", "", 1.0)
    put_outcome(store, key, name, "g", **outcome)
    return key


def delivered(shared: SharedStore) -> list[str]:
    feed = shared.feeds.find("f")
    assert feed is not None
    return [m.id for number in range(1, feed.newest + 1) for m in shared.feeds.members(feed.key, number)]


def states(shared: SharedStore, rollout: str = "r") -> dict[str, str]:
    return {row.session: row.state for row in shared.attempts.list_attempts(rollout)}


@pytest.mark.parametrize("first", ["a", "b"])
def test_only_one_attempt_counts_whatever_is_shipped_first(
    cell: Store, shared: SharedStore, tmp_path: Path, first: str
) -> None:
    open_feed(shared, 1)
    other = open_cell(tmp_path / "b", shared, "b")
    finish_attempt(cell, "s1", 1)
    finish_attempt(other, "s2", 2)
    for store in (cell, other) if first == "a" else (other, cell):
        ship(store, shared)
    winner, loser = ("s1", "s2") if first == "a" else ("s2", "s1")
    assert delivered(shared) == [winner]
    assert states(shared) == {winner: "settled", loser: "superseded"}
    assert shared.find(loser) is not None
    other.close()


def test_two_sessions_of_one_attempt_count_once(cell: Store, shared: SharedStore, tmp_path: Path) -> None:
    open_feed(shared, 1)
    other = open_cell(tmp_path / "b", shared, "b")
    finish_attempt(cell, "s1", 1)
    finish_attempt(other, "t1", 1)
    ship(cell, shared)
    ship(other, shared)
    assert delivered(shared) == ["s1"]
    assert shared.attempts.filter_superseded(["s1", "t1"]) == ["t1"]
    other.close()


def test_outcomes_of_a_lost_cell_do_not_count(cell: Store, shared: SharedStore) -> None:
    open_feed(shared, 1)
    finish_attempt(cell, "early", 1)
    ship(cell, shared)
    assert not shared.cells.take_over("a")  # its lease lasts
    finish_rollout(cell, "late", "g")
    end_lease(shared, "a")
    assert shared.cells.take_over("a")
    assert shared.cells.take_over("a")  # again
    assert not shared.cells.renew("a")
    ship(cell, shared)
    assert delivered(shared) == ["early"]
    assert shared.attempts.filter_superseded(["early", "late"]) == ["late"]
    # A later outcome of the lost cell's session does not count either, whatever id ships it.
    cell.outbox.start("a2", ())
    shared.cells.register("a2", "a", "http://cell", LEASE_S, ["a"])
    late = cell.find("late")
    assert late is not None
    put_outcome(cell, late.key, "late", "g", task="replaced")
    ship(cell, shared)
    assert delivered(shared) == ["early"]


def test_a_restarted_cell_keeps_the_attempts_of_its_previous_id(cell: Store, shared: SharedStore) -> None:
    open_feed(shared, 1)
    key = add_session(cell, "s", rollout="r", attempt=1)
    adopted = shared.cells.register("a2", "a", "http://cell", LEASE_S, cell.outbox.cells())
    assert adopted == ["a"]
    cell.outbox.start("a2", adopted)
    assert cell.outbox.find_foreign("a2") == []
    assert not shared.cells.renew("a")
    cell.close_session(key, "sealed", "", 1.0)
    put_outcome(cell, key, "s", "g")
    ship(cell, shared)
    assert delivered(shared) == ["s"]


def test_an_attempt_cannot_be_superseded_while_the_lease_of_its_cell_lasts(cell: Store, shared: SharedStore) -> None:
    add_session(cell, "s", rollout="r", attempt=1)
    opened = cell.outbox.find_unannounced(10)
    ShipmentWriter(shared).announce(opened)
    cell.outbox.mark_announced(opened)
    assert cell.outbox.find_unannounced(10) == []
    assert states(shared) == {"s": "running"}
    with pytest.raises(Conflict, match="runs on cell a, whose lease lasts"):
        shared.attempts.supersede("r", 1, "s")
    assert states(shared) == {"s": "running"}
    key = add_session(cell, "t", rollout="q", attempt=1)
    ShipmentWriter(shared).announce(cell.outbox.find_unannounced(10))
    cell.close_session(key, "cancelled", "cancelled", time.time())
    assert ship(cell, shared) == 1
    assert shared.attempts.supersede("q", 1, "t")[0].state == "superseded"  # it runs no more
    add_session(cell, "u", rollout="other", attempt=1)
    ShipmentWriter(shared).announce(cell.outbox.find_unannounced(10))
    end_lease(shared, "a")
    row, outcome = shared.attempts.supersede("r", 1, "s")
    assert (row.state, outcome) == ("superseded", None)
    assert shared.cells.list_cells("lost")[0].id == "a"  # the cell is taken over with all its attempts
    assert states(shared, "other") == {"u": "superseded"}


def test_a_restarted_cell_ships_ended_sessions_so_that_they_can_run_again(cell: Store, shared: SharedStore) -> None:
    key = add_session(cell, "s", rollout="r", attempt=1)
    ShipmentWriter(shared).announce(cell.outbox.find_unannounced(10))
    cell.close_session(key, "sealed", "", time.time())  # its runner was killed before it recorded the outcome
    shared.cells.register("b", "a", "http://cell", LEASE_S, ["a"])
    with pytest.raises(Conflict, match="whose lease lasts"):
        shared.attempts.supersede("r", 1, "s")
    cell.outbox.start("b", ["a"])
    assert ship(cell, shared) == 1
    assert shared.attempts.supersede("r", 1, "s")[0].state == "superseded"


def test_an_attempt_of_a_stopped_cell_is_superseded_alone(cell: Store, shared: SharedStore) -> None:
    for name in ("s", "t"):
        add_session(cell, name, rollout=name, attempt=1)
    ShipmentWriter(shared).announce(cell.outbox.find_unannounced(10))
    shared.cells.end("a")
    assert shared.attempts.supersede("s", 1, "s")[0].state == "superseded"
    assert states(shared, "s") == {"s": "superseded"}
    assert states(shared, "t") == {"t": "running"}  # the cell continues it when it starts again


def test_announcing_says_which_attempts_are_superseded(cell: Store, shared: SharedStore, tmp_path: Path) -> None:
    other = open_cell(tmp_path / "b", shared, "b")
    shared.attempts.supersede("given-up", 1, "")
    add_session(other, "o1", rollout="taken", attempt=1)
    add_session(other, "o2", rollout="replaced", attempt=2)
    finish_attempt(other, "o3", 1, rollout="done")
    ship(other, shared)
    assert ShipmentWriter(shared).announce(other.outbox.find_unannounced(10)) == set()
    for rollout, attempt in {"given-up": 1, "taken": 1, "replaced": 1, "done": 2, "new": 1}.items():
        add_session(cell, f"s-{rollout}", rollout=rollout, attempt=attempt)
    add_session(cell, "unnamed")
    opened = cell.outbox.find_unannounced(10)
    superseded = ShipmentWriter(shared).announce(opened)
    assert superseded == {"s-given-up", "s-taken", "s-replaced", "s-done"}
    cell.outbox.mark_announced(opened, superseded)
    assert set(cell.attempts.filter_superseded([one.session for one in opened])) == superseded
    assert ShipmentWriter(shared).announce(opened) == superseded  # again
    other.close()


def _kinds(store: Store, session: str) -> list[str]:
    return [found.kind for found in store.events.page(session, 0, 100)]


def _rows(store: Store, table: str, key: int) -> list[Any]:
    names = SESSION_TABLES[table]
    with store.database.reading() as db:
        rows = db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE session=? ORDER BY 1", (key,)).fetchall()
    return [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in rows]


def test_shipped_sessions_are_measured(cell: Store, shared: SharedStore) -> None:
    key = add_session(cell, "s")
    cell.commit([new_turn(key, number, "s") for number in range(3)])
    cell.close_session(key, "sealed", "", 1.0)
    put_outcome(cell, key, "s", "g")
    ship(cell, shared)
    with shared.database.reading() as db:
        (rows,) = db.execute("SELECT sum(length(ids)+length(info)+length(messages)) FROM nodes").fetchone()
    assert rows < shared.quotas.measure("default") < 10 * rows
    with shared.database.writing() as db:  # as in a store of an older version
        db.execute("ALTER TABLE shipments DROP COLUMN bytes")
        db.execute("UPDATE turngate_version SET version=7")
        db.execute("DROP TABLE removed_sessions")
    upgraded = SharedStore(shared.url)
    assert rows <= upgraded.quotas.measure("default") < 10 * rows
    row = upgraded.find("s")
    assert row is not None
    upgraded.delete_session(row.key)
    assert upgraded.quotas.measure("default") == 0
    upgraded.close()


def test_sessions_of_a_project_are_shipped_to_its_own_tables(tmp_path: Path, shared: SharedStore) -> None:
    project = open_shared(shared.url.locate_project("alpha"))
    cell = open_cell(tmp_path / "cell", shared, "a")
    try:
        open_feed(project, 1)
        cell.outbox.start("a", ())
        add_session(cell, "open")
        ShipmentWriter(project).announce(cell.outbox.find_unannounced(10))
        finish_rollout(cell, "s", "g")
        assert ship(cell, project) == 1
        assert [row.id for row in project.sessions()] == ["s"] and delivered(project) == ["s"]
        assert (count(project, "attempts"), count(shared, "attempts")) == (2, 0)
        assert (count(shared, "sessions"), count(shared, "nodes"), count(shared, "events")) == (0, 0, 0)
    finally:
        cell.close()
        project.close()
