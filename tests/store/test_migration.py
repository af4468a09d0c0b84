"""Test opening data folders written by older versions.

`samples/schema-2.db` predates stored events: an open session with one turn and an ended one with two.
`samples/schema-3.db` predates feeds: two ended sessions with an outcome and an open one with one turn.
`samples/schema-5.db` predates attempts, which were only in the metadata: two attempts at `g.0` in the same delivery, the first of two
attempts at `h.0` waiting in the feed while the second is open, an infrastructure fault and its retry, and a session without a name.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit import gateway, say, user
from turngate.cli.show import load_from_store
from turngate.config import MismatchLimits
from turngate.errors import NotFound
from turngate.gateway.events import Events
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.gateway.loading import TimeSlicer, TraceLoader
from turngate.gateway.sessions import Sessions
from turngate.store.schema import SCHEMA_VERSION
from turngate.store.store import Store
from turngate.telemetry.metrics import Metrics
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import SessionViews, open_row_source
from turngate.views.session_directory import SessionDirectory

SAMPLE = Path(__file__).parent / "samples" / "schema-2.db"
OPEN_SESSION_KEY = "tg-2119ifRYfGGw25JbkjWSkJziSmVMrVwubEuNkGzAOWjyuRw"  # of the open session
OPEN_SESSION_KEY_3 = "tg-2119rUxyvOqFGKB85YapUIkjhBIfXt287xWbX_Dj5ejFOEc"  # of the open session in schema-3.db


@pytest.fixture
def data(tmp_path: Path) -> Path:
    shutil.copy(SAMPLE, tmp_path / "turngate.db")
    return tmp_path


@pytest.fixture
def data_before_feeds(tmp_path: Path) -> Path:
    shutil.copy(SAMPLE.with_name("schema-3.db"), tmp_path / "turngate.db")
    return tmp_path


def schema_version(data: Path) -> int:
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def read_recorded_tables(data: Path) -> dict[str, list[object]]:
    """Read the tables that the older version wrote."""
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        tables = ("sessions", "nodes", "preambles")
        return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}


async def test_migration_keeps_data_and_sessions_continue(data: Path) -> None:
    before = read_recorded_tables(data)
    assert schema_version(data) == 2 and len(before["nodes"]) == 6
    async with gateway([say("Third.")], data=data) as g:
        assert read_recorded_tables(data) == before
        assert schema_version(data) == SCHEMA_VERSION == 9
        assert (await g.show("ended"))["turns"] == 2 and (await g.show("ended"))["outcome"] is None
        reply = await g.ask(OPEN_SESSION_KEY, [user("Hi"), {"role": "assistant", "content": "Hello."}, user("Go on")])
        assert reply.content == "Third."
        [row] = await g.samples("still-open")
        assert len(row["spans"]) == 2  # the history was recognized
        assert (await g.admin.put("/admin/sessions/ended/outcome", json={"kind": "graded", "reward": 1})).is_success
        assert [(e.session, e.kind) for e in g.app.events.page()] == [("still-open", "turn"), ("ended", "outcome")]
        await g.seal("still-open")
    with SessionReader(data) as folder, open_row_source(data) as rows:
        for session in ("still-open", "ended"):
            assert verify(folder, session, VerifyOptions(rows=rows, renderers=Renderers())).ok


async def test_old_event_cursor_precedes_new_events(data: Path) -> None:
    """Old cursors were millisecond timestamps of the gateway start, one per worker."""
    async with gateway(data=data) as g:
        session = await g.open()
        for cursor in ("1763208812000", "1763208812000.1763208812007"):
            response = await g.admin.get(f"/admin/events?after={cursor}&wait=0")
            assert response.text.count("data: ") == 1 and session.id in response.text


def test_migration_is_idempotent_after_interruption(data: Path) -> None:
    Store(data).close()
    store = Store(data)
    first = Events(store).add("", "note", {})
    store.close()
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        db.execute("PRAGMA user_version=2")  # as if killed before the last step
    store = Store(data)
    events = Events(store)
    assert [e.seq for e in events.page()] == [first] and events.add("", "note", {}) == first + 1
    store.close()


async def test_read_only_access_does_not_migrate(data: Path) -> None:
    before = (data / "turngate.db").read_bytes()
    view, _ = load_from_store(data, "ended")
    assert view.summary.turns == 2 and view.summary.outcome is None
    store = Store.reading(data)
    views = SessionViews(store)
    directory = SessionDirectory(store, Sessions(store, Events(store)), views, TraceLoader(store, TimeSlicer()))
    assert [row.id for row in await directory.list_sessions()] == ["ended", "still-open"]
    views.close()
    store.close()
    with SessionReader(data) as folder:
        assert folder.session_ids() == ["ended", "still-open"]
    assert (data / "turngate.db").read_bytes() == before and schema_version(data) == 2


def test_new_folder_numbers_events_from_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert [Events(store).add("", "note", {}) for _ in range(2)] == [1, 2]
    store.close()


async def test_feed_delivers_outcomes_recorded_before_feeds(data_before_feeds: Path) -> None:
    before = read_recorded_tables(data_before_feeds)
    assert schema_version(data_before_feeds) == 3 and len(before["sessions"]) == 3
    async with gateway([say("Second.")], data=data_before_feeds) as g:
        assert schema_version(data_before_feeds) == SCHEMA_VERSION and read_recorded_tables(data_before_feeds) == before
        assert (await g.show("ended-1"))["outcome"]["reward"] == 1.0
        reply = await g.ask(OPEN_SESSION_KEY_3, [user("Hi"), {"role": "assistant", "content": "Hello."}, user("Go on")])
        assert reply.content == "Second."
        opened = await g.admin.put("/admin/feeds/f", json={"n": 2, "from_start": True})
        assert opened.json()["newest"] == 1  # its two outcomes form a group
    async with gateway(data=data_before_feeds) as g:
        assert (await g.admin.get("/admin/feeds/f")).json()["newest"] == 1


async def test_read_only_access_does_not_add_feeds(data_before_feeds: Path) -> None:
    content = (data_before_feeds / "turngate.db").read_bytes()
    store = Store.reading(data_before_feeds)
    events = Events(store)
    feeds = Feeds(store, events, Fence(0), Metrics(), MismatchLimits())
    sessions, views = Sessions(store, events), SessionViews(store)
    directory = SessionDirectory(store, sessions, views, TraceLoader(store, TimeSlicer()))
    assert feeds.list_feeds() == [] and (await directory.list_sessions())[0].id == "still-open"
    assert directory.describe(await sessions.find("ended-1")).outcome is not None
    with pytest.raises(NotFound):
        feeds.show("f")
    views.close()
    store.close()
    with SessionReader(data_before_feeds) as folder:
        assert folder.session_ids() == ["still-open", "ended-1", "ended-0"]
    assert (data_before_feeds / "turngate.db").read_bytes() == content and schema_version(data_before_feeds) == 3


@pytest.fixture
def data_before_attempts(tmp_path: Path) -> Path:
    shutil.copy(SAMPLE.with_name("schema-5.db"), tmp_path / "turngate.db")
    return tmp_path


def read_feed(data: Path) -> list[tuple[str, int | None]]:
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        return db.execute("SELECT id, number FROM rolled ORDER BY place").fetchall()


def test_attempts_in_metadata_are_registered(data_before_attempts: Path) -> None:
    data = data_before_attempts
    before, feed = read_recorded_tables(data), read_feed(data)
    for _ in range(2):  # the second time as if killed before the last step
        store = Store(data)
        attempts = {
            (row.rollout, row.attempt): (row.session, row.state)
            for rollout in ("g.0", "h.0", "i.0", "unnamed")
            for row in store.attempts.list_attempts(rollout)
        }
        store.close()
        assert attempts == {
            ("g.0", 1): ("delivered-1", "superseded"),
            ("g.0", 2): ("delivered-2", "settled"),
            ("h.0", 1): ("waiting-1", "superseded"),
            ("h.0", 2): ("waiting-2", "running"),
            ("i.0", 1): ("fault-1", "superseded"),
            ("i.0", 2): ("last-2", "settled"),
        }
        assert read_recorded_tables(data) == before
        # A delivery never changes, but the superseded attempt no longer waits for its group.
        assert read_feed(data) == [member for member in feed if member != ("waiting-1", None)]
        with closing(sqlite3.connect(data / "turngate.db")) as db:
            db.execute("PRAGMA user_version=5")
            db.commit()
    Store(data).close()
    with SessionReader(data) as folder, open_row_source(data) as rows:
        for session in folder.session_ids():
            assert verify(folder, session, VerifyOptions(rows=rows, renderers=Renderers())).ok, session


def test_read_only_access_does_not_add_attempts(data_before_attempts: Path) -> None:
    content = (data_before_attempts / "turngate.db").read_bytes()
    store = Store.reading(data_before_attempts)
    assert store.attempts.list_attempts("g.0") == [] and store.attempts.explain_exclusions(range(100)) == {}
    feed = store.feeds.find("train")
    assert feed is not None
    assert [member.id for member in store.feeds.members(feed.key, 1)] == ["delivered-1", "delivered-2"]
    store.close()
    with SessionReader(data_before_attempts) as folder:
        assert len(folder.session_ids()) == 7
    assert (data_before_attempts / "turngate.db").read_bytes() == content and schema_version(data_before_attempts) == 5
