"""The shared store is restored from an old backup: cells ship what it lost, and nothing is trained twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.cells.test_shipping import open_cell, ship
from tests.postgres import PostgresServer, start_postgres
from tests.store.kit import add_session, finish_rollout, open_shared
from turngate.client.protocol import DeliveryPage, FeedConfig, WireDelivery
from turngate.config import MismatchLimits
from turngate.errors import Conflict, StoreError
from turngate.gateway.cell.shipping import Shipper
from turngate.gateway.events import Events
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.store.restores import RESHIPPED
from turngate.store.shared.shipments import ShipmentWriter
from turngate.store.store import Store
from turngate.telemetry.metrics import Metrics

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.full]
Restore = Callable[[], None]


def dump(server: PostgresServer, name: str) -> Restore:
    """Back up a database with pg_dump."""
    file = str(server.folder / "backup.dump")
    server.run("pg_dump", "-Fc", "-f", file, "-d", server.url(name))

    def restore() -> None:
        server.query(f"DROP DATABASE {name} WITH (FORCE)")
        server.query(f"CREATE DATABASE {name}")
        server.run("pg_restore", "-d", server.url(name), file)

    return restore


def copy_files(server: PostgresServer, name: str) -> Restore:
    """Back up the whole server with pg_basebackup."""
    copy = server.folder / "copy"
    server.run(
        "pg_basebackup", "-D", str(copy), "-h", "127.0.0.1", "-p", str(server.port), "-U", "turngate", "-c", "fast"
    )

    def restore() -> None:
        server.stop()
        shutil.rmtree(server.folder / "data")
        copy.rename(server.folder / "data")
        server.start()

    return restore


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with start_postgres() as started:
        yield started


async def read(feeds: Feeds, reader: str, after: int) -> list[WireDelivery]:
    page = msgspec.msgpack.decode(await feeds.page("f", reader, after=after, limit=10), type=DeliveryPage)
    return [msgspec.msgpack.decode(raw, type=WireDelivery) for raw in page.deliveries]


@pytest.mark.parametrize("back_up", [dump, copy_files])
async def test_nothing_is_trained_twice_after_a_restore(
    server: PostgresServer, tmp_path: Path, back_up: Callable[[PostgresServer, str], Restore]
) -> None:
    url = server.create_database()
    shared = open_shared(url)
    cell = open_cell(tmp_path / "a", shared, "a")
    events = Events(shared, shared=True)
    feeds = Feeds(shared, events, Fence(0, "m"), Metrics(), MismatchLimits())
    try:
        await feeds.open("f", FeedConfig(n=2))
        view, reader = feeds.take_over("f")
        shipper = Shipper(cell.outbox, cell.open_reader, lambda: ShipmentWriter(shared))
        shipper._check_history()
        for name in ("s1", "s2"):
            finish_rollout(cell, name, "g1")
        ship(cell, shared)
        assert [delivery.number for delivery in await read(feeds, reader, 0)] == [1]
        restore = back_up(server, url.rsplit("/", 1)[1])
        # After the backup: the trainer commits, and the next group is delivered and trained.
        feeds.commit("f", reader, 1)
        for name in ("s3", "s4"):
            finish_rollout(cell, name, "g2")
        ship(cell, shared)
        [second] = await read(feeds, reader, 1)
        assert second.number == 2 and all(not rollout.excluded for rollout in second.rollouts)
        feeds.commit("f", reader, 2)
        cursor = events.newest()
        restore()
        # A reader whose position is newer than the store gets an error that says what to do.
        with pytest.raises(Conflict, match=r"'after' is 2, but the newest delivery of feed 'f' is 1.*mark-restored"):
            await read(feeds, reader, 2)
        # A follower of events whose cursor is newer than the store starts over.
        async for page in events.follow(after=cursor, wait=False):
            assert page[0].seq == 1
            break
        # The cell notices, and ships again what is missing.
        shipper._check_at = 0.0
        shipper._check_history()
        assert {row.session for row in cell.outbox.find_due(1e12, 10)} == {3, 4}
        assert ship(cell, shared) == 2
        shipper._check_at = 0.0
        shipper._check_history()
        assert ship(cell, shared) == 0
        await check_feed(feeds, reader, view.mark)
    finally:
        feeds.close()
        cell.close()
        shared.close()


async def check_feed(feeds: Feeds, old_reader: str, old_mark: str) -> None:
    with pytest.raises(Conflict, match="restored from a backup; open the feed again"):
        await read(feeds, old_reader, 1)
    with pytest.raises(
        Conflict,
        match=r"newest delivery is now 2, and the last committed one is 0.*'after' set to the delivery number in your checkpoint",
    ):
        feeds.take_over("f")
    with pytest.raises(
        Conflict, match=r"checkpoint is at delivery 2, but only numbers up to 1 still refer.*Continue with after=1"
    ):
        feeds.take_over("f", 2, old_mark)
    view, reader = feeds.take_over("f", 1, old_mark)
    assert view.mark != old_mark and view.newest == 2
    [again] = await read(feeds, reader, 1)
    assert [(rollout.session, rollout.excluded, rollout.rows) for rollout in again.rollouts] == [
        ("s3", RESHIPPED, ()),
        ("s4", RESHIPPED, ()),
    ]
    feeds.commit("f", reader, 2)
    feeds.take_over("f")  # its commits are known again


def test_a_cell_that_the_restored_store_does_not_know_registers_again(server: PostgresServer, tmp_path: Path) -> None:
    url = server.create_database()
    shared = open_shared(url)
    shared.close()
    restore = dump(server, url.rsplit("/", 1)[1])
    shared = open_shared(url)
    cell = open_cell(tmp_path / "a", shared, "a")
    add_session(cell, "open", rollout="r")
    finish_rollout(cell, "s1", "g1")
    shared.close()
    restore()
    shared = open_shared(url)
    with pytest.raises(StoreError, match="cell a is not registered in the shared store"):
        ship(cell, shared)
    assert not shared.cells.renew("a")
    adopted = shared.cells.register("b", "a", "http://cell", 30.0, cell.outbox.cells())
    cell.outbox.start("b", adopted)
    assert adopted == ["a"] and not cell.outbox.find_foreign("b")  # its open session continues
    assert ship(cell, shared) == 1
    row = shared.attempts.find("s1", 1)
    assert row is not None and row.state == "settled"
    cell.close()
    shared.close()


def test_a_restored_folder_is_marked_by_hand(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.feeds.open("f", b"{}", 1, "", from_start=False)
    finish_rollout(store, "s1", "g")
    history = store.restores.note("")
    assert history and store.restores.note("") == history  # another process noted it
    assert store.restores.last_number(1, "") == 1 and store.restores.is_unconfirmed(1)
    finish_rollout(store, "s2", "g")
    newer = store.restores.note(history)
    assert store.restores.last_number(1, "") == 1 and store.restores.last_number(1, history) == 2
    assert newer != history and store.restores.last_number(1, "unknown") is None
    store.close()
