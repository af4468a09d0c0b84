"""The events table: what happened to sessions and to the gateway, in commit order.

An event that describes another write, such as a turn or the end of a session, is inserted in the same transaction as that write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from turngate.store.columns import as_name, as_number
from turngate.store.connection import Database, StoreConnection
from turngate.types import Json

# Event numbers increase in commit order across all workers, so a reader that has read up to some number has missed no earlier event.
EVENT_TABLES = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused
    time REAL NOT NULL,
    session TEXT NOT NULL,        -- session id; the session might not be open yet; empty: an event of the gateway
    kind TEXT NOT NULL,
    data BLOB NOT NULL            -- JSON
);
CREATE INDEX IF NOT EXISTS events_of_a_session ON events (session, seq);
"""
_EVENT = "INSERT INTO events (time, session, kind, data) VALUES (?,?,?,?)"
_PRUNED = 250  # rows that one transaction examines
_LAST_PRUNED = "events_pruned"  # name of the setting with the number of the newest removed event
_NOTE_PRUNED = (
    "INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO UPDATE"
    " SET value=CASE WHEN CAST(settings.value AS BIGINT)>CAST(excluded.value AS BIGINT) THEN settings.value ELSE excluded.value END"
)

# Events of sessions that the shared store does not have yet are kept.
_SHIPPED = "session NOT IN (SELECT id FROM outbox JOIN sessions ON key=outbox.session)"


class GatewayEvent(msgspec.Struct, frozen=True):
    seq: int
    time: float
    session: str
    kind: str
    data: dict[str, Json]


_data = msgspec.json.Decoder(dict[str, Json])


class NewEvent(msgspec.Struct, frozen=True):
    """An event that has not been written yet. It gets its number when it is written."""

    session: str
    kind: str
    data: bytes  # JSON
    time: float


def new_event(session: str, kind: str, data: dict[str, Json]) -> NewEvent:
    return NewEvent(session, kind, msgspec.json.encode(data), time.time())


def insert_event(db: StoreConnection, event: NewEvent) -> None:
    """Insert an event in the caller's transaction. The transaction must already hold all other locks that it needs.

    In the shared store, this locks the event counter. Other transactions cannot number their events until the caller's transaction ends.
    """
    db.execute(_EVENT, (event.time, event.session, event.kind, event.data))


def insert_events(db: StoreConnection, events: Sequence[NewEvent]) -> None:
    """Insert several events with one statement. They are numbered in the given order. See `insert_event` about locks."""
    rows = ",".join(["(?,?,?,?)"] * len(events))
    values = [value for event in events for value in (event.time, event.session, event.kind, event.data)]
    db.execute(f"INSERT INTO events (time, session, kind, data) VALUES {rows}", values)


def insert_optional_event(db: StoreConnection, event: NewEvent | None) -> None:
    """Insert an event unless it is None."""
    if event is not None:
        insert_event(db, event)


class EventTable:
    def __init__(
        self, database: Database, on_add: Callable[[StoreConnection, str], None] = lambda db, session: None
    ) -> None:
        """`add` calls `on_add(db, session)` in the transaction that writes the event."""
        self._database = database
        self._writing = database.writing
        self._reading = database.reading
        self._on_add = on_add

    def add(self, event: NewEvent) -> int:
        """Write an event in its own transaction, and return its number."""
        with self._writing() as db:
            self._on_add(db, event.session)
            row = db.execute(f"{_EVENT} RETURNING seq", (event.time, event.session, event.kind, event.data)).fetchone()
            return int(row[0])

    def page(self, session: str, after: int, limit: int) -> list[GatewayEvent]:
        """Return up to `limit` events of a session with numbers above `after`, oldest first.

        If `session` is empty, return events of all sessions and of the gateway.
        """
        only, values = ("session=? AND ", (session,)) if session else ("", ())
        query = (
            f"SELECT seq, time, session, kind, CAST(data AS BLOB) FROM events WHERE {only}seq>? ORDER BY seq LIMIT ?"
        )
        with self._reading() as db:
            rows = db.execute(query, (*values, after, limit)).fetchall()
        return [_read_event(*row) for row in rows]

    def newest(self) -> int:
        """Return the highest event number ever assigned, even if that event was removed."""
        return self._database.newest_event()

    def knows(self, session: str) -> bool:
        """Return whether a session has any events except `deleted`."""
        with self._reading() as db:
            query = "SELECT 1 FROM events WHERE session=? AND kind!='deleted' LIMIT 1"
            return db.execute(query, (session,)).fetchone() is not None

    def state(self) -> int:
        """Return a number that changes whenever another process writes events. Compare it only with numbers from the same thread."""
        return self._database.change_count()

    def prune(self, before: float) -> Iterator[int]:
        """Remove events older than the time `before`, in short transactions. After each transaction, yield how many events it removed.

        Events of sessions that are waiting to be shipped to the shared store are kept.
        """
        after = 0
        while True:
            with self._writing() as db:
                last = _find_last_old(db, after, before)
                if last is None:
                    return
                removed = _remove_old(db, after, last, before)
            yield removed
            after = last

    def last_pruned(self) -> int:
        """Return the highest number of an event that `prune` removed, or 0.

        A reader that has not read up to this number may have missed events.
        """
        with self._reading() as db:
            row = db.execute("SELECT value FROM settings WHERE name=?", (_LAST_PRUNED,)).fetchone()
        return 0 if row is None else int(row[0])


def _find_last_old(db: StoreConnection, after: int, before: float) -> int | None:
    """Return the number of the last event older than the time `before`, or None if there is none.

    Only the first `_PRUNED` events with numbers above `after` are examined.
    """
    examined = "SELECT seq, time FROM events WHERE seq>? ORDER BY seq LIMIT ?"
    (last,) = db.execute(
        f"SELECT max(seq) FROM ({examined}) AS examined WHERE time<?", (after, _PRUNED, before)
    ).fetchone()
    return None if last is None else int(last)


def _remove_old(db: StoreConnection, after: int, last: int, before: float) -> int:
    """Remove old events numbered from `after` + 1 to `last`, except those of sessions in the outbox. Return how many were removed."""
    query = f"DELETE FROM events WHERE seq>? AND seq<=? AND time<? AND {_SHIPPED} RETURNING seq"
    removed = [seq for (seq,) in db.execute(query, (after, last, before)).fetchall()]
    if removed:
        db.execute(_NOTE_PRUNED, (_LAST_PRUNED, str(max(removed))))
    return len(removed)


def _read_event(seq: int, when: object, session: object, kind: object, data: object) -> GatewayEvent:
    """Build an event from its columns. If a column is damaged, the event says so, so that other events can still be read."""
    of, at, is_text = as_name(session), as_number(when), isinstance(kind, str)
    if is_text and (of, at) == (session, when) and isinstance(data, bytes | str):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return GatewayEvent(seq, at, of, str(kind), _data.decode(data))
    return GatewayEvent(seq, at, of, str(kind) if is_text else "damaged", {"damaged": "this event is damaged on disk"})
