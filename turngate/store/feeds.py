"""The tables of feeds: the feeds, the rollouts that wait for the rest of their group, and the rollouts of each delivery.

A delivery gets its number in the transaction that records the last outcome of its group. So a complete group always has a number, even
after a crash, and all workers write to one file, so no number is given twice. `gateway/deliveries.py` builds deliveries from these tables.
"""

from __future__ import annotations

import secrets
import sqlite3
import time

import msgspec

from turngate.store.connection import Connect
from turngate.store.events import insert_event, new_event
from turngate.store.outcomes import DAMAGED_OUTCOME, DamagedOutcome, RecordedOutcome, decode_outcome
from turngate.types import Json

FEED_TABLES = """
CREATE TABLE IF NOT EXISTS feeds (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    config BLOB NOT NULL,         -- JSON of FeedConfig
    n INTEGER NOT NULL,           -- of it: rollouts that make a group complete
    prefix TEXT NOT NULL,         -- of it: of the groups that it takes
    opened REAL NOT NULL,
    reader TEXT NOT NULL DEFAULT '',  -- the token of its reader; a reader with another token was replaced
    newest INTEGER NOT NULL DEFAULT 0,     -- the last number given; 0: none
    handed INTEGER NOT NULL DEFAULT 0,     -- the highest that was handed out
    committed INTEGER NOT NULL DEFAULT 0   -- the highest that its trainer is done with
);
CREATE TABLE IF NOT EXISTS rolled (
    place INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which they were recorded
    feed INTEGER NOT NULL,        -- its key
    session INTEGER NOT NULL,     -- its key; the session itself may be deleted since
    id TEXT NOT NULL,             -- its id
    team TEXT NOT NULL,           -- the name of its group
    number INTEGER,               -- of its delivery; NULL: its group is not complete
    outcome BLOB NOT NULL,        -- JSON of RecordedOutcome, as it was when the number was given
    UNIQUE (feed, session)        -- no rollout is in a feed twice
);
CREATE INDEX IF NOT EXISTS rolled_waiting ON rolled (feed, team) WHERE number IS NULL;
CREATE INDEX IF NOT EXISTS rolled_delivered ON rolled (feed, number);
CREATE TABLE IF NOT EXISTS filling (  -- feeds that do not have all yet of what was recorded before they were opened
    feed INTEGER PRIMARY KEY,     -- its key
    recorded REAL NOT NULL,       -- of the last outcome that they have: when it was recorded, and of which session it is
    session INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS later (    -- what came to such a feed meanwhile, and is entered after all that
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    feed INTEGER NOT NULL,        -- its key
    session INTEGER,              -- its key; NULL: a group was closed
    id TEXT NOT NULL,             -- its id, or the name of that group
    outcome BLOB                  -- JSON of RecordedOutcome
);
CREATE INDEX IF NOT EXISTS later_of_a_session ON later (feed, session);
CREATE INDEX IF NOT EXISTS outcomes_in_order ON outcomes (recorded, session);
"""
_FEED = "key, name, config, opened, reader, newest, handed, committed"


class FeedRow(msgspec.Struct, frozen=True):
    """The state of a feed."""

    key: int
    name: str
    config: bytes
    opened: float
    reader: str
    newest: int
    handed: int
    committed: int


class DeliveryMember(msgspec.Struct, frozen=True):
    """One rollout of a delivery."""

    session: int
    id: str
    group: str
    outcome: RecordedOutcome


class IncompleteGroup(msgspec.Struct, frozen=True):
    """A group that is not complete."""

    group: str
    rollouts: int


class FeedLog:
    def __init__(self, writing: Connect, reading: Connect, *, there: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._there = there  # False: the file is of an older version, without these tables, and opened for reading

    # ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, name: str, config: bytes, n: int, prefix: str, *, from_start: bool) -> FeedRow:
        """Find the feed of that name, or create it. `from_start`: it has to be filled (`fill`) with what was recorded before."""
        with self._writing() as db:
            if (known := _find(db, name)) is not None:
                return known
            row = (name, config, n, prefix, time.time())
            db.execute("INSERT INTO feeds (name, config, n, prefix, opened) VALUES (?,?,?,?,?)", row)
            made = _find(db, name)
            assert made is not None
            if from_start:
                db.execute("INSERT INTO filling VALUES (?, -1e308, 0)", (made.key,))
            return made

    def is_filling(self, feed: int) -> bool:
        with self._reading() as db:
            return db.execute("SELECT 1 FROM filling WHERE feed=?", (feed,)).fetchone() is not None

    def fill(self, feed: int, most: int) -> bool:
        """Enter some of the outcomes from before a feed was opened, oldest first, then those that came during the filling. Returns whether
        there are more.

        Each step is one transaction, so that turns are written in between. The store has the position: any process can continue after a
        crash, and the numbers are the same as if all outcomes had been entered at once.
        """
        with self._writing() as db:
            row = db.execute(
                "SELECT recorded, filling.session, name, n, prefix FROM filling JOIN feeds ON key=feed WHERE feed=?",
                (feed,),
            ).fetchone()
            if row is None:
                return False
            recorded, session, name, n, prefix = row
            whose = (feed, name, n, prefix)
            # An outcome that was recorded or replaced since comes after the old ones, whatever the clock says.
            old = db.execute(
                "SELECT recorded, session, id, CAST(outcome AS BLOB),"
                " EXISTS (SELECT 1 FROM later WHERE later.feed=?1 AND later.session=outcomes.session)"
                " FROM outcomes JOIN sessions ON sessions.key=session WHERE (recorded, session)>(?2, ?3)"
                " ORDER BY recorded, session LIMIT ?4",
                (feed, recorded, session, most),
            ).fetchall()
            for _, key, session_id, outcome, is_later in old:
                if not is_later:
                    _add_rollout(db, whose, key, session_id, outcome)
            if old:
                recorded, session = old[-1][:2]
                db.execute("UPDATE filling SET recorded=?, session=? WHERE feed=?", (recorded, session, feed))
                return True
            new = db.execute(
                "SELECT place, session, id, CAST(outcome AS BLOB) FROM later WHERE feed=? ORDER BY place LIMIT ?",
                (feed, most),
            ).fetchall()
            for place, key, known_as, outcome in new:
                if key is not None:
                    _add_rollout(db, whose, key, known_as, outcome)
                elif _has_waiting(db, feed, known_as):
                    _assign_number(db, feed, name, known_as)
                db.execute("DELETE FROM later WHERE place=?", (place,))
            if not new:
                db.execute("DELETE FROM filling WHERE feed=?", (feed,))
            return bool(new)

    def find(self, name: str) -> FeedRow | None:
        with self._reading() as db:
            return _find(db, name) if self._there else None

    def listing(self) -> list[FeedRow]:
        if not self._there:
            return []
        with self._reading() as db:
            return [FeedRow(*row) for row in db.execute(f"SELECT {_FEED} FROM feeds ORDER BY key").fetchall()]

    def waiting(self, feed: int, limit: int) -> list[IncompleteGroup]:
        """Incomplete groups, the oldest first."""
        query = "SELECT team, count(*) FROM rolled WHERE feed=? AND number IS NULL GROUP BY team ORDER BY min(place) LIMIT ?"
        with self._reading() as db:
            return [IncompleteGroup(*row) for row in db.execute(query, (feed, limit)).fetchall()]

    def waiting_counts(self) -> dict[int, tuple[int, int]]:
        """By feed, the number of incomplete groups and of their rollouts."""
        if not self._there:
            return {}
        query = "SELECT feed, count(DISTINCT team), count(*) FROM rolled WHERE number IS NULL GROUP BY feed"
        with self._reading() as db:
            return {feed: (groups, rollouts) for feed, groups, rollouts in db.execute(query).fetchall()}

    def delete(self, feed: int) -> None:
        with self._writing() as db:
            for table in ("rolled", "filling", "later"):
                db.execute(f"DELETE FROM {table} WHERE feed=?", (feed,))
            db.execute("DELETE FROM feeds WHERE key=?", (feed,))

    # ── what comes in ───────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, db: sqlite3.Connection, session: int, session_id: str, outcome: bytes) -> None:
        """Enter an outcome into every feed that takes its group, in the transaction that records or replaces it."""
        feeds = "SELECT key, name, n, prefix, filling.feed FROM feeds LEFT JOIN filling ON filling.feed=key"
        for key, name, n, prefix, is_filling in db.execute(feeds).fetchall():
            if is_filling is None:
                _add_rollout(db, (key, name, n, prefix), session, session_id, outcome)
            else:
                _postpone(db, key, session, session_id, outcome)

    def close_group(self, group: str) -> list[tuple[str, int]]:
        """Make a group complete as it is. Returns the names of the feeds and its numbers there. In a feed that is still being filled, the
        group gets its number later."""
        closed = []
        with self._writing() as db:
            for (key,) in db.execute("SELECT feed FROM filling").fetchall():
                _postpone(db, key, None, group, None)
            feeds = (
                "SELECT DISTINCT key, name FROM feeds JOIN rolled ON feed=key WHERE number IS NULL AND team=?"
                " AND key NOT IN (SELECT feed FROM filling)"
            )
            for key, name in db.execute(feeds, (group,)).fetchall():
                closed.append((name, _assign_number(db, key, name, group)))
        return closed

    # ── what goes out ───────────────────────────────────────────────────────────────────────────────────────────

    def members(self, feed: int, number: int) -> list[DeliveryMember]:
        """The rollouts of a delivery, in the order of recording."""
        query = "SELECT session, id, team, CAST(outcome AS BLOB) FROM rolled WHERE feed=? AND number=? ORDER BY place"
        with self._reading() as db:
            rows = db.execute(query, (feed, number)).fetchall()
        return [
            DeliveryMember(key, name, group, _decode_or_stand_in(outcome, group)) for key, name, group, outcome in rows
        ]

    def take_over(self, name: str) -> FeedRow | None:
        """Give the feed a new reader with a new token. None if there is no such feed."""
        with self._writing() as db:
            db.execute("UPDATE feeds SET reader=? WHERE name=?", (secrets.token_hex(12), name))
            return _find(db, name)

    def hand_out(self, feed: int, reader: str, number: int) -> bool:
        """Record that deliveries up to a number are handed to a reader. False if it is no longer the reader."""
        with self._writing() as db:
            query = "UPDATE feeds SET handed=max(handed, ?) WHERE key=? AND reader=?"
            return db.execute(query, (number, feed, reader)).rowcount == 1

    def commit(self, feed: int, reader: str, number: int) -> FeedRow | None:
        """Commit up to a number, if that was handed out, to this reader or an earlier one.

        Returns the feed; None if it has another reader or was deleted.
        """
        with self._writing() as db:
            query = "UPDATE feeds SET committed=max(committed, iif(?1<=handed, ?1, 0)) WHERE key=?2 AND reader=?3"
            if db.execute(query, (number, feed, reader)).rowcount != 1:
                return None
            return FeedRow(*db.execute(f"SELECT {_FEED} FROM feeds WHERE key=?", (feed,)).fetchone())


def _find(db: sqlite3.Connection, name: str) -> FeedRow | None:
    row = db.execute(f"SELECT {_FEED} FROM feeds WHERE name=?", (name,)).fetchone()
    return None if row is None else FeedRow(*row)


def _add_rollout(
    db: sqlite3.Connection, feed: tuple[int, str, int, str], session: int, session_id: str, outcome: bytes
) -> None:
    """Add a rollout to a feed. If that completes its group, the group gets a number."""
    key, name, n, prefix = feed
    recorded = decode_outcome(outcome)
    faulty = isinstance(recorded, RecordedOutcome) and recorded.kind == "infrastructure fault"
    # Without a damaged one its group would wait forever: it is entered without a reward, and so never trained.
    if isinstance(recorded, DamagedOutcome):
        recorded = _stand_in_outcome(*_read_metadata(db, session))
        outcome = msgspec.json.encode(recorded, order="sorted")
    # A rollout that is already in the feed is replaced while it waits, and never changes once it has a number.
    db.execute("DELETE FROM rolled WHERE feed=? AND session=? AND number IS NULL", (key, session))
    if faulty or not recorded.group.startswith(prefix):
        return
    added = db.execute(
        "INSERT OR IGNORE INTO rolled (feed, session, id, team, outcome) VALUES (?,?,?,?,?)",
        (key, session, session_id, recorded.group, outcome),
    ).rowcount
    if not added:
        return
    query = "SELECT count(*) FROM rolled WHERE feed=? AND team=? AND number IS NULL"
    (waiting,) = db.execute(query, (key, recorded.group)).fetchone()
    if waiting >= n or not recorded.group:  # a rollout without a group is a group of its own
        _assign_number(db, key, name, recorded.group)


def _has_waiting(db: sqlite3.Connection, feed: int, group: str) -> bool:
    query = "SELECT 1 FROM rolled WHERE feed=? AND team=? AND number IS NULL LIMIT 1"
    return db.execute(query, (feed, group)).fetchone() is not None


def _postpone(db: sqlite3.Connection, feed: int, session: int | None, known_as: str, outcome: bytes | None) -> None:
    db.execute("INSERT INTO later (feed, session, id, outcome) VALUES (?,?,?,?)", (feed, session, known_as, outcome))


def _assign_number(db: sqlite3.Connection, feed: int, name: str, group: str) -> int:
    """Give the next number to the waiting rollouts of a group."""
    db.execute("UPDATE feeds SET newest=newest+1 WHERE key=?", (feed,))
    (number,) = db.execute("SELECT newest FROM feeds WHERE key=?", (feed,)).fetchone()
    query = "UPDATE rolled SET number=? WHERE feed=? AND team=? AND number IS NULL"
    count = db.execute(query, (number, feed, group)).rowcount
    insert_event(db, new_event("", "delivery", {"feed": name, "number": number, "group": group, "rollouts": count}))
    return int(number)


def _decode_or_stand_in(stored: bytes, group: str) -> RecordedOutcome:
    outcome = decode_outcome(stored)
    return _stand_in_outcome(group) if isinstance(outcome, DamagedOutcome) else outcome


def _stand_in_outcome(group: str, task: str = "") -> RecordedOutcome:
    """Build the outcome that stands for a damaged one."""
    return RecordedOutcome(kind="infrastructure fault", message=DAMAGED_OUTCOME, group=group, task=task)


def _read_metadata(db: sqlite3.Connection, session: int) -> tuple[str, str]:
    """Read the group and the task that a session was opened with. Empty if its settings are damaged, too."""
    row = db.execute("SELECT CAST(config AS BLOB) FROM sessions WHERE key=?", (session,)).fetchone()
    try:
        config: Json = None if row is None else msgspec.json.decode(row[0])
    except (msgspec.DecodeError, ValueError):
        config = None
    metadata: Json = config.get("metadata") if isinstance(config, dict) else None
    values = [metadata.get(name) if isinstance(metadata, dict) else None for name in ("group", "task")]
    group, task = (value if isinstance(value, str) else "" for value in values)
    return group, task
