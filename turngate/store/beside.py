"""What is kept beside the traces: what happened (events), how rollouts ended (outcomes), and the calls of host tools.

Each class is one table of the store's file and is reached through `Store`. An event that belongs to something else that is
written, a turn or the end of a session, is written in that one's transaction by `also`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import msgspec

from turngate.store.outcome import Recorded, read
from turngate.types import Json

# The number of an event grows in the order of the commits, for all workers together: who has read up to one has missed none.
TABLES = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given out twice
    time REAL NOT NULL,
    session TEXT NOT NULL,        -- its id, which may not be opened yet; empty: of the gateway
    kind TEXT NOT NULL,
    data BLOB NOT NULL            -- JSON
);
CREATE INDEX IF NOT EXISTS events_of_a_session ON events (session, seq);
CREATE TABLE IF NOT EXISTS outcomes (
    session INTEGER PRIMARY KEY,  -- its key
    recorded REAL NOT NULL,
    outcome BLOB NOT NULL         -- JSON of Recorded
);
CREATE TABLE IF NOT EXISTS tool_calls (
    session INTEGER NOT NULL,     -- its key
    call INTEGER NOT NULL,        -- 1, 2, … in the order in which they came
    tool TEXT NOT NULL,
    repeat TEXT NOT NULL,         -- the caller's own mark of this call, by which a repeated one is known; empty: none
    called REAL NOT NULL,
    answered REAL,
    answered_by TEXT NOT NULL DEFAULT '',
    arguments BLOB NOT NULL,      -- JSON
    reply BLOB,                   -- JSON; NULL: not answered
    PRIMARY KEY (session, call)
) WITHOUT ROWID;
"""
OF_A_KEY = ("outcomes", "tool_calls")  # what goes when a session goes
_EVENT = "INSERT INTO events (time, session, kind, data) VALUES (?,?,?,?)"
_PRUNED = 1000  # rows that one transaction looks at
_LAST_PRUNED = "events_pruned"  # settings: the number of the newest event that was removed
_NOTE_PRUNED = (
    "INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO UPDATE"
    " SET value=max(CAST(value AS INTEGER), CAST(excluded.value AS INTEGER))"
)
_WHOLE_CALL = "call, tool, arguments, called, repeat, reply, answered, answered_by"

Connected = Callable[[], AbstractContextManager[sqlite3.Connection]]
AnsweredBy = Literal["", "tool", "host", "time"]  # at once; by the host; by nobody in time


class Event(msgspec.Struct, frozen=True):
    seq: int
    time: float
    session: str
    kind: str
    data: dict[str, Json]


class NewEvent(msgspec.Struct, frozen=True):
    """Something that happened and is to be written; its number comes with the writing."""

    session: str
    kind: str
    data: bytes  # JSON
    time: float


class HostToolCall(msgspec.Struct, frozen=True):
    """One call of a host tool."""

    call: int
    tool: str
    arguments: msgspec.Raw
    called: float
    repeat: str
    reply: msgspec.Raw | None
    answered: float | None
    answered_by: AnsweredBy


def happened(session: str, kind: str, data: dict[str, Json]) -> NewEvent:
    return NewEvent(session, kind, msgspec.json.encode(data), time.time())


def insert_event(db: sqlite3.Connection, event: NewEvent) -> int:
    """Inside a transaction of the caller's."""
    written = db.execute(_EVENT, (event.time, event.session, event.kind, event.data)).lastrowid
    assert written is not None
    return written


def also(db: sqlite3.Connection, event: NewEvent | None) -> None:
    """The same, for what is not always told."""
    if event is not None:
        insert_event(db, event)


class EventLog:
    def __init__(self, writing: Connected, reading: Connected) -> None:
        self._writing = writing
        self._reading = reading

    def add(self, event: NewEvent) -> int:
        with self._writing() as db:
            return insert_event(db, event)

    def page(self, session: str, after: int, limit: int) -> list[Event]:
        """The oldest past `after`, of one session or (empty) of all."""
        only, values = ("session=? AND ", (session,)) if session else ("", ())
        query = f"SELECT seq, time, session, kind, data FROM events WHERE {only}seq>? ORDER BY seq LIMIT ?"
        with self._reading() as db:
            rows = db.execute(query, (*values, after, limit)).fetchall()
        return [Event(seq, when, of, kind, msgspec.json.decode(data)) for seq, when, of, kind, data in rows]

    def newest(self) -> int:
        """The highest number that was given out, whether that event is still there or not."""
        with self._reading() as db:
            row = db.execute("SELECT seq FROM sqlite_sequence WHERE name='events'").fetchone()
        return 0 if row is None else row[0]

    def knows(self, session: str) -> bool:
        """Whether anything was told of a session, other than that it is no more."""
        with self._reading() as db:
            query = "SELECT 1 FROM events WHERE session=? AND kind!='deleted' LIMIT 1"
            return db.execute(query, (session,)).fetchone() is not None

    def state(self) -> int:
        """Another number than before: somebody has written to the file."""
        with self._reading() as db:
            (version,) = db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def prune(self, before: float) -> int:
        """Remove what happened before a moment, the oldest first; how many that were. In steps, so that no turn waits long."""
        removed = 0
        which = "seq IN (SELECT seq FROM events ORDER BY seq LIMIT ?) AND time<?"
        while True:
            with self._writing() as db:
                (last,) = db.execute(f"SELECT max(seq) FROM events WHERE {which}", (_PRUNED, before)).fetchone()
                count = db.execute(f"DELETE FROM events WHERE {which}", (_PRUNED, before)).rowcount
                if last is not None:
                    db.execute(_NOTE_PRUNED, (_LAST_PRUNED, str(last)))
            removed += count
            if count < _PRUNED:
                return removed

    def pruned(self) -> int:
        """The highest number that was removed for its age; 0: none was. Who has not read that far has missed something."""
        with self._reading() as db:
            row = db.execute("SELECT value FROM settings WHERE name=?", (_LAST_PRUNED,)).fetchone()
        return 0 if row is None else int(row[0])


class Outcomes:
    """`enter` is told of each that is written, in the same transaction: its session's key and id, and the outcome.

    One that is damaged on disk costs no other: `of` leaves it out, and `read` and `damaged` tell of it.
    """

    def __init__(
        self,
        writing: Connected,
        reading: Connected,
        enter: Callable[[sqlite3.Connection, int, str, bytes], None],
        *,
        there: bool = True,
    ) -> None:
        self._writing = writing
        self._reading = reading
        self._enter = enter
        self._there = there  # False: a folder of an older version, looked at and not touched

    def of(self, first: int, last: int) -> dict[int, bytes]:
        """Those of sessions with keys in a range, as JSON."""
        return {key: written for key, written in self._stored(first, last).items() if read(written) is not None}

    def read(self, first: int, last: int) -> dict[int, Recorded | None]:
        """The same, read. None: it is damaged on disk."""
        return {key: read(written) for key, written in self._stored(first, last).items()}

    def damaged(self, first: int, last: int) -> set[int]:
        """Keys of sessions whose outcome is damaged on disk."""
        return {key for key, recorded in self.read(first, last).items() if recorded is None}

    def _stored(self, first: int, last: int) -> dict[int, bytes]:
        if not self._there:
            return {}
        with self._reading() as db:
            query = "SELECT session, CAST(outcome AS BLOB) FROM outcomes WHERE session BETWEEN ? AND ?"
            return dict(db.execute(query, (first, last)).fetchall())

    def put(self, session: int, outcome: bytes, event: NewEvent, *, replace: bool) -> bytes | None:
        """Write it, unless there is one that must not be replaced. What was there before."""
        with self._writing() as db:
            row = db.execute("SELECT CAST(outcome AS BLOB) FROM outcomes WHERE session=?", (session,)).fetchone()
            before: bytes | None = None if row is None else row[0]
            if before is None or (replace and before != outcome):
                db.execute("INSERT OR REPLACE INTO outcomes VALUES (?,?,?)", (session, event.time, outcome))
                insert_event(db, event)
                self._enter(db, session, event.session, outcome)
            return before


class ToolCalls:
    def __init__(self, writing: Connected, reading: Connected) -> None:
        self._writing = writing
        self._reading = reading

    def add(
        self, session: int, name: str, tool: str, arguments: bytes, repeat: str, reply: bytes | None, most: int
    ) -> HostToolCall | None:
        """A new call, with its event; None: there are as many as there may be. `name`: the session's id."""
        with self._writing() as db:
            (count,) = db.execute("SELECT count(*) FROM tool_calls WHERE session=?", (session,)).fetchone()
            if count >= most:
                return None
            now = time.time()
            answered = None if reply is None else now
            by: AnsweredBy = "" if reply is None else "tool"
            db.execute(
                f"INSERT INTO tool_calls (session, {_WHOLE_CALL}) VALUES (?,?,?,?,?,?,?,?,?)",
                (session, count + 1, tool, arguments, now, repeat, reply, answered, by),
            )
            insert_event(db, happened(name, "tool", {"call": count + 1, "tool": tool}))
        return _call((count + 1, tool, arguments, now, repeat, reply, answered, by))

    def answer(self, session: int, name: str, call: HostToolCall, reply: bytes, by: AnsweredBy) -> None:
        with self._writing() as db:
            db.execute(
                "UPDATE tool_calls SET reply=?, answered=?, answered_by=? WHERE session=? AND call=?",
                (reply, time.time(), by, session, call.call),
            )
            insert_event(db, happened(name, "answered", {"call": call.call, "tool": call.tool, "by": by}))

    def page(self, session: int, after: int, limit: int) -> list[HostToolCall]:
        return self._select(session, "call>? ORDER BY call LIMIT ?", after, limit)

    def find(self, session: int, call: int) -> HostToolCall | None:
        return next(iter(self._select(session, "call=?", call)), None)

    def repeated(self, session: int, repeat: str) -> HostToolCall | None:
        """The call that its caller marked so."""
        return next(iter(self._select(session, "repeat=? LIMIT 1", repeat)), None)

    def _select(self, session: int, where: str, *values: object) -> list[HostToolCall]:
        with self._reading() as db:
            query = f"SELECT {_WHOLE_CALL} FROM tool_calls WHERE session=? AND {where}"
            return [_call(row) for row in db.execute(query, (session, *values)).fetchall()]


def _call(row: tuple[int, str, bytes, float, str, bytes | None, float | None, AnsweredBy]) -> HostToolCall:
    call, tool, arguments, called, repeat, reply, answered, by = row
    raw = None if reply is None else msgspec.Raw(reply)
    return HostToolCall(call, tool, msgspec.Raw(arguments), called, repeat, raw, answered, by)
