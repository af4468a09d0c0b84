"""Serving under a lease, in one process with a clock of its own: the file, the fence, the keeper and the shipper."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.store.kit import add_session, event, finish_rollout, put_outcome
from turngate.common.sharding import Shard
from turngate.config import ServeConfig
from turngate.errors import Busy, LeaseLapsed, StoreError
from turngate.gateway.cell import shipping
from turngate.gateway.cell.api_keys import KeyFollower
from turngate.gateway.cell.cell import Cell
from turngate.gateway.cell.lease_file import LeaseFile, create_lease_file
from turngate.gateway.cell.lease_keeper import CellName, LeaseKeeper
from turngate.gateway.cell.serving import LeasedFence, ServingGuard, ServingPermit
from turngate.gateway.cell.shipping import Shipper
from turngate.store.outbox import OpenAttempt, ShippingPosition
from turngate.store.shipment import ConflictingShipment, Shipment
from turngate.store.store import Store


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_permit(folder: Path, clock: Clock) -> tuple[LeaseFile, ServingPermit]:
    create_lease_file(folder)
    file = LeaseFile(folder)
    permit = ServingPermit(LeaseFile(folder), clock)  # another mapping, as another process has
    permit.accept_id(file.term)
    return file, permit


def test_a_worker_sees_what_the_keeper_writes(tmp_path: Path) -> None:
    clock = Clock()
    file, permit = new_permit(tmp_path, clock)
    assert not permit.is_held
    file.write(130.0, registered=True)
    assert permit.is_held and permit.seconds_left == 30.0
    clock.now = 130.0  # without any message: the clock alone ends it
    assert not permit.is_held and permit.seconds_left == 0.0
    with pytest.raises(LeaseLapsed) as lapsed:
        permit.require()
    assert (lapsed.value.status, lapsed.value.retry_safe) == (503, True)


def test_a_worker_does_not_serve_a_new_id_before_it_has_stopped_the_old_one(tmp_path: Path) -> None:
    file, permit = new_permit(tmp_path, Clock())
    file.write(130.0, registered=True)
    old = file.cell
    file.start_over("b" * 32)
    assert file.deadline == -math.inf and not file.registered
    file.write(130.0, registered=True)
    assert not permit.is_held and permit.has_new_id
    assert permit.cell == "b" * 32 != old
    permit.accept_id(permit.term)
    assert permit.is_held


async def test_calls_wait_for_the_lease_and_for_the_fence(tmp_path: Path) -> None:
    file, permit = new_permit(tmp_path, Clock())
    fence = LeasedFence(permit)
    assert not fence.admits and not fence.paused  # a weight update does not take the lapse for its own pause
    call = asyncio.create_task(fence.enter())
    await asyncio.sleep(0)
    await fence.pause()
    file.write(130.0, registered=True)
    permit.wake()
    await asyncio.sleep(0)
    assert not call.done()
    fence.resume()
    await asyncio.wait_for(call, 5)
    assert fence.in_flight == 1
    await asyncio.wait_for(fence.enter(), 5)


def test_a_full_outbox_refuses_new_sessions(tmp_path: Path) -> None:
    file, permit = new_permit(tmp_path, Clock())
    file.write(130.0, registered=True)
    store = open_cell(tmp_path)
    ServingGuard(permit, max_unshipped=1).require_room(store.outbox)
    finish_rollout(store, "s", "g")
    guard = ServingGuard(permit, max_unshipped=1)
    with pytest.raises(
        Busy, match=r"too many ended sessions of this project .* not in the shared store yet \(1; max_unshipped is 1\)"
    ):
        guard.require_room(store.outbox)
    other = open_cell(tmp_path / "projects" / "other")
    guard.require_room(other.outbox)  # one project does not fill the outbox of another
    other.close()
    store.close()


async def test_worker_retries_until_it_can_read_the_outbox_after_the_lease_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, permit = new_permit(tmp_path, Clock())
    file.write(130.0, registered=True)
    store = open_cell(tmp_path)
    guard = ServingGuard(permit, max_unshipped=1)
    guard.add(store.outbox, None)  # type: ignore[arg-type]  # the outbox has no sessions to cancel
    watching = asyncio.create_task(guard.run())
    with store.database.writing() as db:
        db.execute("ALTER TABLE outbox RENAME TO away")
    file.start_over("b" * 32)
    file.write(130.0, registered=True)
    call = asyncio.create_task(permit.wait())
    await asyncio.sleep(0.5)
    assert not watching.done() and not call.done()
    (warning,) = caplog.messages
    assert "cannot switch this cell to its new id" in warning and "outbox" in warning
    with store.database.writing() as db:
        db.execute("ALTER TABLE away RENAME TO outbox")
    await asyncio.wait_for(call, 10)
    watching.cancel()
    await asyncio.wait([watching])
    store.close()


async def test_worker_keeps_watching_the_lease_although_calls_cannot_be_aborted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file, permit = new_permit(tmp_path, clock)
    file.write(130.0, registered=True)
    store, aborted = open_cell(tmp_path), []

    class Sessions:
        async def interrupt_calls(self) -> None:
            aborted.append(self)
            if len(aborted) == 1:
                raise OSError(5, "Input/output error")

    guard = ServingGuard(permit, max_unshipped=1)
    for _ in range(2):
        guard.add(store.outbox, Sessions())  # type: ignore[arg-type]
    await guard.interrupt_calls()
    assert len(aborted) == 2  # the second project, too
    assert "could not abort all calls in flight" in caplog.text
    store.close()


async def test_cell_takes_every_step_of_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_cell(tmp_path)
    config = ServeConfig(data=str(tmp_path), shared="postgresql://nobody@127.0.0.1:1/turngate")
    cell = Cell(config, store, Shard(0, 1))
    file = LeaseFile(tmp_path)
    file.write(130.0, registered=True)

    def fail(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(KeyFollower, "stop", fail)
    monkeypatch.setattr(Shipper, "stop", fail)
    with pytest.raises(StoreError, match="the disk is full"):
        await cell.stop()
    assert file.deadline == -math.inf  # the lease is given up
    store.close()


def open_cell(folder: Path) -> Store:
    store = Store(folder)
    store.outbox.start("a", ())
    return store


# ── the keeper ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Registry:
    """The shared store's part, which fails or has taken the lease over if told so."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.ended: list[str] = []
        self.is_away = self.is_lost = False

    def register(self, cell: str, name: str, url: str, ttl_s: float, previous: Iterable[str] = ()) -> list[str]:
        self._answer()
        self.registered.append(cell)
        return []

    def renew(self, cell: str) -> bool:
        self._answer()
        lost, self.is_lost = self.is_lost, False
        return not lost

    def end(self, cell: str) -> None:
        self.ended.append(cell)

    def _answer(self) -> None:
        if self.is_away:
            raise StoreError("away")


def test_the_keeper_renews_loses_and_starts_over(tmp_path: Path) -> None:
    create_lease_file(tmp_path)
    file, store, registry = LeaseFile(tmp_path), Store(tmp_path), Registry()
    keeper = LeaseKeeper(file, 1.0, store.outbox, lambda: registry)
    keeper.start(CellName("a", ""))
    first = file.cell
    assert file.registered and registry.registered == [first] and store.outbox.cell == first
    try:
        deadline = file.deadline
        _wait(lambda: file.deadline > deadline)
        registry.is_away = True
        time.sleep(0.2)
        deadline = file.deadline
        time.sleep(0.5)
        assert file.deadline == deadline  # failed renewals do not extend it
        registry.is_away, registry.is_lost = False, True
        _wait(lambda: len(registry.registered) == 2)
        _wait(lambda: file.registered)
        assert file.cell == registry.registered[1] != first
        assert store.outbox.cell == file.cell
    finally:
        keeper.stop()
        store.close()
    assert registry.ended == [file.cell]
    assert file.deadline == -math.inf


def test_a_cell_does_not_start_without_the_shared_store(tmp_path: Path) -> None:
    create_lease_file(tmp_path)
    store, registry = Store(tmp_path), Registry()
    registry.is_away = True
    keeper = LeaseKeeper(LeaseFile(tmp_path), 1.0, store.outbox, lambda: registry)
    with pytest.raises(StoreError, match="away"):
        keeper.start(CellName("a", ""))
    store.close()


# ── the shipper ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Target:
    """A shared store in memory."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.opened: list[str] = []
        self.failures = 0
        self.conflicts: set[str] = set()
        self.superseded: set[str] = set()
        self.history = ""

    def announce(self, attempts: Sequence[OpenAttempt]) -> set[str]:
        self.opened += [attempt.session for attempt in attempts]
        return self.superseded

    def find_history(self, position: ShippingPosition) -> str:
        return self.history

    def find_missing(self, sessions: Sequence[tuple[str, int]]) -> set[str]:
        return {session for session, _ in sessions if session not in self.sessions}

    def write(self, shipments: Sequence[Shipment]) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("away")
        for shipment in shipments:
            if shipment.id in self.conflicts:
                raise ConflictingShipment(shipment.id)
        self.sessions += [shipment.id for shipment in shipments]


def test_the_shipper_retries_and_sets_aside_what_cannot_be_shipped(tmp_path: Path) -> None:
    store, target = open_cell(tmp_path), Target()
    target.failures, target.conflicts = 2, {"s2"}
    finish_rollout(store, "s1", "g")
    finish_rollout(store, "s2", "g")
    damaged = finish_rollout(store, "s3", "g")
    with store.database.writing() as db:
        db.execute("UPDATE nodes SET info=? WHERE session=?", (b"", damaged))
    deleted = finish_rollout(store, "s4", "g")
    store.delete_session(deleted)
    add_session(store, "open")
    shipper = Shipper(store.outbox, store.open_reader, lambda: target)
    shipper.start()
    try:
        _wait(lambda: store.outbox.state().unshipped == 2)
        assert target.sessions == ["s1"] and target.opened == ["open"]
        assert [session for session, _ in store.outbox.failures()] == ["s2", "s3"]
        put_outcome(store, damaged, "s3", "g", task="new")  # a change lets it try again
        _wait(lambda: store.outbox.state().failed == 2)
        finish_rollout(store, "s5", "g")
        _wait(lambda: target.sessions == ["s1", "s5"] and store.outbox.state().unshipped == 2)
    finally:
        shipper.stop(0)
    store.outbox.start("a", ())  # as a restarted cell does
    assert len(store.outbox.find_due(time.time(), 10)) == 2
    store.close()


def test_shipper_stops_although_the_outbox_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shipping, "_IDLE_S", 60.0)  # its thread does not notice the failure itself
    store, target = open_cell(tmp_path), Target()
    finish_rollout(store, "s1", "g")
    shipper = Shipper(store.outbox, store.open_reader, lambda: target)
    shipper.start()
    _wait(lambda: target.sessions == ["s1"] and not store.outbox.state().unshipped)
    time.sleep(0.2)
    with store.database.writing() as db:
        db.execute("ALTER TABLE outbox RENAME TO away")
    shipper.stop(5)
    assert not any(thread.name == "turngate-shipping" for thread in threading.enumerate())
    assert "cannot ship the last sessions" in caplog.text
    store.close()


def test_a_session_is_shipped_after_the_clock_was_set_back(tmp_path: Path) -> None:
    store = open_cell(tmp_path)
    key = finish_rollout(store, "s", "g")
    assert [row.session for row in store.outbox.find_due(time.time() - 86400, 10)] == [key]
    store.close()


def test_a_full_disk_refuses_the_outcome_and_keeps_the_outbox(tmp_path: Path) -> None:
    store, target = open_cell(tmp_path), Target()
    done = finish_rollout(store, "done", "g")
    key = add_session(store, "s")
    store.close_session(key, "sealed", "", time.time())
    with sqlite3.connect(tmp_path / "turngate.db") as db:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
    with store.database.writing() as writer:
        writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match="full"):
        for number in range(1000):  # until the last page is full
            put_outcome(store, key, "s", "g", message=f"{number}" + "x" * 10_000)
    (row,) = [row for row in store.outbox.find_due(time.time() + 1e6, 10) if row.session == key]
    assert row.revision >= 1
    shipper = Shipper(store.outbox, store.open_reader, lambda: target)
    assert shipper.ship()  # shipping reads, and frees space
    assert "done" in target.sessions
    with store.database.writing() as writer:
        writer.execute("PRAGMA max_page_count=1000000")
    put_outcome(store, key, "s", "g")
    assert [row.session for row in store.outbox.find_due(time.time(), 10)] == [key]
    assert done != key
    store.close()


def test_a_gateway_that_is_no_cell_has_no_outbox(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = finish_rollout(store, "s", "g")
    store.events.add(event("s", "stage"))
    assert store.outbox.state().unshipped == 0
    store.outbox.require_shipped(key, "s")
    store.close()


def _wait(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_shipper_ships_again_what_a_restored_store_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "_CHECK_S", 0.0)
    store, target = open_cell(tmp_path), Target()
    finish_rollout(store, "s1", "g")
    finish_rollout(store, "s2", "g")
    add_session(store, "open")
    shipper = Shipper(store.outbox, store.open_reader, lambda: target)
    shipper.start()
    try:
        _wait(lambda: target.sessions == ["s1", "s2"])
        target.sessions.remove("s2")
        target.history = "restored"
        _wait(lambda: target.sessions == ["s1", "s2"] and target.opened == ["open", "open"])
    finally:
        shipper.stop(0)
        store.close()
