"""The shared store is pruned while cells ship to it: nothing returns, nothing is trained twice, and nothing waits long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cells.test_shipping import count, open_cell, ship
from tests.store.kit import add_session, event, finish_rollout, open_shared, put_outcome
from turngate.errors import Conflict
from turngate.gateway.cell.shipping import Shipper
from turngate.store import pruning
from turngate.store.pruning import load_archive, prune
from turngate.store.shared.shipments import ShipmentWriter
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.full]
LATER = 100.0


@pytest.fixture
def shared(postgres_url: str) -> Iterator[SharedStore]:
    store = open_shared(postgres_url)
    yield store
    store.close()


@pytest.fixture
def cell(tmp_path: Path, shared: SharedStore) -> Iterator[Store]:
    store = open_cell(tmp_path / "cell", shared, "a")
    yield store
    store.close()


def test_a_removed_session_does_not_return(cell: Store, shared: SharedStore) -> None:
    feed = shared.feeds.open("f", b"{}", 1, "", from_start=False)
    key = finish_rollout(cell, "s", "g")
    ship(cell, shared)
    row = shared.feeds.take_over("f")
    assert row is not None
    shared.feeds.hand_out(feed.key, row.reader, 1)
    shared.feeds.commit(feed.key, row.reader, 1)
    assert prune(shared, LATER).removed == 1
    assert (count(shared, "shipments"), count(shared, "removed_sessions")) == (0, 1)
    put_outcome(cell, key, "s", "g", reward=0.25)  # changes after it was removed there
    cell.events.add(event("s", "note"))
    other = finish_rollout(cell, "t", "g")
    assert ship(cell, shared) == 2
    assert (shared.find("s"), shared.find("t") is not None) == (None, True)
    assert [m.id for number in (1, 2) for m in shared.feeds.members(feed.key, number)] == ["s", "t"]
    assert cell.find("s") is not None and other  # the cell keeps its own copy


def test_a_cell_does_not_take_pruning_for_a_restore(cell: Store, shared: SharedStore) -> None:
    finish_rollout(cell, "s", "g")
    shipper = Shipper(cell.outbox, cell.open_reader, lambda: ShipmentWriter(shared))
    shipper.ship()
    shipper._check_history()
    assert prune(shared, LATER).removed == 1
    assert sum(shared.events.prune(time.time() + 1)) > 0  # also removes the event of the removal
    shipper._check_at = 0.0
    shipper._check_history()
    assert shared.restores.history() == "" and cell.outbox.find_due(time.time(), 10) == []
    assert ShipmentWriter(shared).find_missing([("s", 1), ("lost", 1)]) == {"lost"}


def test_a_new_session_with_the_id_of_a_removed_one_is_shipped(
    cell: Store, shared: SharedStore, tmp_path: Path
) -> None:
    finish_rollout(cell, "s", "g")
    ship(cell, shared)
    shared.delete_session(shared.find("s").key)
    other = open_cell(tmp_path / "b", shared, "b")
    finish_rollout(other, "s", "g")
    ship(other, shared)
    assert shared.find("s") is not None
    other.close()


def test_another_session_cannot_claim_a_pruned_attempt(cell: Store, shared: SharedStore, tmp_path: Path) -> None:
    key = add_session(cell, "s", rollout="r")
    cell.close_session(key, "sealed", "", 2.0)
    put_outcome(cell, key, "s", "g")
    ship(cell, shared)
    assert prune(shared, LATER).removed == 1
    other = open_cell(tmp_path / "b", shared, "b")
    key = add_session(other, "t", rollout="r")
    other.close_session(key, "sealed", "", 2.0)
    put_outcome(other, key, "t", "g")
    feed = shared.feeds.open("f", b"{}", 1, "", from_start=False)
    ship(other, shared)
    assert shared.feeds.find("f").newest == 0 and feed
    assert shared.attempts.find_exclusion(shared.find("t").key).startswith("superseded")
    other.close()


def test_only_one_process_prunes(shared: SharedStore, postgres_url: str) -> None:
    other = open_shared(postgres_url)
    with shared.retention.claim():
        with pytest.raises(Conflict, match="another process is pruning"), other.retention.claim():
            pass
        with shared.database.writing() as db:  # as if this process had died a minute ago
            db.execute("UPDATE settings SET value=split_part(value, ' ', 1) || ' 1.5' WHERE name='pruning'")
        with other.retention.claim():
            shared.retention._renewed = -100.0
            with pytest.raises(Conflict):
                shared.retention.renew_claim()
    with other.retention.claim():
        pass  # the claim ended with the block
    other.close()


def test_cells_ship_while_the_store_is_pruned(
    cell: Store, shared: SharedStore, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        finish_rollout(cell, f"old-{number}", f"g{number % 20}")
    ship(cell, shared)
    monkeypatch.setattr(pruning, "_FILE_SESSIONS", 20)
    pruner = open_shared(postgres_url)
    done: list[pruning.PruneResult] = []
    thread = threading.Thread(target=lambda: done.append(prune(pruner, LATER, tmp_path / "archive")))
    thread.start()
    shipped = 0
    while thread.is_alive() or not shipped:
        finish_rollout(cell, f"new-{shipped}", "", at=LATER + 1)
        assert ship(cell, shared) == 1
        shipped += 1
    thread.join()
    pruner.close()
    assert (done[0].removed, done[0].archived, len(done[0].files)) == (60, 60, 3)
    assert sorted(shared.ids(1000)) == sorted(f"new-{number}" for number in range(shipped))
    folder = Store(tmp_path / "loaded")
    assert load_archive(tmp_path / "archive", folder) == (60, 0)
    folder.close()
