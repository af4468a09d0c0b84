"""A data folder of the version before events were stored, or before there were feeds, is taken over as it is, and goes on.

`samples/schema-2.db` was written before events were stored: a session that is open after one turn, and one that has ended after two.
`samples/schema-3.db` was written before there were feeds: two that have ended and have an outcome, and one that is open after one turn.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit import gateway, say, user
from turngate.cli.show import load_from_folder
from turngate.errors import NotFound
from turngate.gateway.events import Events
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.gateway.sessions import Sessions
from turngate.store.sqlite import SCHEMA_VERSION, Store
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import SessionViews
from turngate.views.session_directory import SessionDirectory
from turngate.views.verdict import open_row_source

SAMPLE = Path(__file__).parent / "samples" / "schema-2.db"
KEY = "tg-2119ifRYfGGw25JbkjWSkJziSmVMrVwubEuNkGzAOWjyuRw"  # of its open session, and of nothing else
OPEN_3 = "tg-2119rUxyvOqFGKB85YapUIkjhBIfXt287xWbX_Dj5ejFOEc"  # likewise, of the other sample


@pytest.fixture
def data(tmp_path: Path) -> Path:
    shutil.copy(SAMPLE, tmp_path / "turngate.db")
    return tmp_path


@pytest.fixture
def before_feeds(tmp_path: Path) -> Path:
    shutil.copy(SAMPLE.with_name("schema-3.db"), tmp_path / "turngate.db")
    return tmp_path


def schema(data: Path) -> int:
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def everything(data: Path) -> dict[str, list[object]]:
    """What the older version had recorded."""
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        tables = ("sessions", "nodes", "preambles")
        return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}


async def test_sessions_go_on_and_everything_is_as_it_was(data: Path) -> None:
    before = everything(data)
    assert schema(data) == 2 and len(before["nodes"]) == 6
    async with gateway([say("Third.")], data=data) as g:
        assert everything(data) == before
        assert schema(data) == SCHEMA_VERSION == 4
        assert (await g.show("ended"))["turns"] == 2 and (await g.show("ended"))["outcome"] is None
        said = await g.ask(KEY, [user("Hi"), {"role": "assistant", "content": "Hello."}, user("Go on")])
        assert said.content == "Third."
        [row] = await g.samples("still-open")
        assert len(row["spans"]) == 2  # it was recognised
        assert (await g.admin.put("/admin/sessions/ended/outcome", json={"kind": "graded", "reward": 1})).is_success
        assert [(e.session, e.kind) for e in g.app.events.page()] == [("still-open", "turn"), ("ended", "outcome")]
        await g.seal("still-open")
    with SessionReader(data) as folder, open_row_source(data) as rows:
        for session in ("still-open", "ended"):
            assert verify(folder, session, VerifyOptions(rows=rows, renderers=Renderers())).ok


async def test_a_cursor_of_before_is_behind_all_that_comes(data: Path) -> None:
    """Events were counted from the start of the gateway in milliseconds, with several workers once for each."""
    async with gateway(data=data) as g:
        session = await g.open()
        for cursor in ("1763208812000", "1763208812000.1763208812007"):
            told = await g.admin.get(f"/admin/events?after={cursor}&wait=0")
            assert told.text.count("data: ") == 1 and session.id in told.text


def test_opening_it_twice_and_an_interrupted_start(data: Path) -> None:
    Store(data).close()
    store = Store(data)
    first = Events(store).add("", "note", {})
    store.close()
    with closing(sqlite3.connect(data / "turngate.db")) as db:
        db.execute("PRAGMA user_version=2")  # as if the process had been killed before the last step
    store = Store(data)
    events = Events(store)
    assert [e.seq for e in events.page()] == [first] and events.add("", "note", {}) == first + 1
    store.close()


def test_it_is_looked_at_without_being_touched(data: Path) -> None:
    before = (data / "turngate.db").read_bytes()
    view, _ = load_from_folder(data, "ended")
    assert view.summary.turns == 2 and view.summary.outcome is None
    store = Store.reading(data)
    directory = SessionDirectory(store, Sessions(store, Events(store)), SessionViews(store))
    assert [row.id for row in directory.list_sessions()] == ["ended", "still-open"]
    store.close()
    with SessionReader(data) as folder:
        assert folder.session_ids() == ["ended", "still-open"]
    assert (data / "turngate.db").read_bytes() == before and schema(data) == 2


def test_a_new_folder_counts_from_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert [Events(store).add("", "note", {}) for _ in range(2)] == [1, 2]
    store.close()


async def test_what_was_recorded_before_there_were_feeds(before_feeds: Path) -> None:
    before = everything(before_feeds)
    assert schema(before_feeds) == 3 and len(before["sessions"]) == 3
    async with gateway([say("Second.")], data=before_feeds) as g:
        assert schema(before_feeds) == SCHEMA_VERSION and everything(before_feeds) == before
        assert (await g.show("ended-1"))["outcome"]["reward"] == 1.0
        said = await g.ask(OPEN_3, [user("Hi"), {"role": "assistant", "content": "Hello."}, user("Go on")])
        assert said.content == "Second."
        opened = await g.admin.put("/admin/feeds/f", json={"n": 2, "from_start": True})
        assert opened.json()["newest"] == 1  # its two outcomes are a group
    async with gateway(data=before_feeds) as g:
        assert (await g.admin.get("/admin/feeds/f")).json()["newest"] == 1


def test_a_folder_without_feeds_is_looked_at_without_being_touched(before_feeds: Path) -> None:
    content = (before_feeds / "turngate.db").read_bytes()
    store = Store.reading(before_feeds)
    events = Events(store)
    feeds, sessions, looks = Feeds(store, events, Fence(0)), Sessions(store, events), SessionViews(store)
    directory = SessionDirectory(store, sessions, looks)
    assert feeds.list_feeds() == [] and directory.list_sessions()[0].id == "still-open"
    assert directory.describe(sessions.find("ended-1")).outcome is not None
    with pytest.raises(NotFound):
        feeds.show("f")
    store.close()
    with SessionReader(before_feeds) as folder:
        assert folder.session_ids() == ["still-open", "ended-1", "ended-0"]
    assert (before_feeds / "turngate.db").read_bytes() == content and schema(before_feeds) == 3
