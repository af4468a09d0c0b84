"""Feed tables: open a feed, close a group, and read the rollouts of incomplete groups and of each delivery.

A delivery gets its number in the transaction that completes its group. A complete group therefore always has a number, even after a crash.
All workers write to the same database, so numbers are unique. `gateway/deliveries.py` builds deliveries from these tables.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from turngate.store.attempts import find_rollout
from turngate.store.columns import as_name
from turngate.store.connection import FOR_UPDATE, LOCK_FEEDS, LOCK_FEEDS_TABLE, Connect, StoreConnection
from turngate.store.events import NewEvent, insert_event, new_event
from turngate.store.group_completion import FeedEntry, FeedGroups, NewEntry
from turngate.store.outcomes import DAMAGED_OUTCOME, DamagedOutcome, RecordedOutcome, decode_outcome
from turngate.types import Json

FEED_TABLES = """
CREATE TABLE IF NOT EXISTS feeds (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    config BLOB NOT NULL,         -- JSON of FeedConfig
    n INTEGER NOT NULL,           -- from config: rollouts in a complete group
    prefix TEXT NOT NULL,         -- from config: prefix of the group names that the feed accepts
    opened REAL NOT NULL,
    reader TEXT NOT NULL DEFAULT '',  -- token of the current reader; any other token is rejected
    newest INTEGER NOT NULL DEFAULT 0,     -- the last number assigned; 0: none
    handed INTEGER NOT NULL DEFAULT 0,     -- the highest number handed out
    committed INTEGER NOT NULL DEFAULT 0   -- the highest number the trainer has committed
);
CREATE TABLE IF NOT EXISTS rolled (
    place INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of recording
    feed INTEGER NOT NULL,        -- key of the feed
    session INTEGER NOT NULL,     -- key of the session, which may have been deleted since
    id TEXT NOT NULL,             -- id of the session
    team TEXT NOT NULL,           -- name of the group
    number INTEGER,               -- number of the delivery; NULL: the group is not complete
    outcome BLOB NOT NULL,        -- JSON of RecordedOutcome, unchanged once the number is assigned
    rollout TEXT NOT NULL DEFAULT '',  -- name of the rollout; empty: it has none
    UNIQUE (feed, session)        -- a rollout is in a feed at most once
);
CREATE UNIQUE INDEX IF NOT EXISTS rolled_rollouts ON rolled (feed, rollout) WHERE rollout!='';
CREATE INDEX IF NOT EXISTS rolled_waiting ON rolled (feed, team) WHERE number IS NULL;
CREATE INDEX IF NOT EXISTS rolled_delivered ON rolled (feed, number);
CREATE TABLE IF NOT EXISTS filling (  -- feeds to which earlier outcomes are still being added
    feed INTEGER PRIMARY KEY,     -- key of the feed
    recorded REAL NOT NULL,       -- time and session of the last outcome added so far
    session INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS later (    -- new outcomes for a feed that is being filled; added after the earlier ones
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    feed INTEGER NOT NULL,        -- key of the feed
    session INTEGER,              -- key of the session; NULL: a group was closed
    id TEXT NOT NULL,             -- id of the session, or name of the closed group
    outcome BLOB                  -- JSON of RecordedOutcome
);
CREATE TABLE IF NOT EXISTS closed_groups (  -- for feeds that are opened later
    team TEXT NOT NULL,           -- name of the group
    closed REAL NOT NULL,
    PRIMARY KEY (team, closed)
);
CREATE INDEX IF NOT EXISTS later_of_a_session ON later (feed, session);
CREATE INDEX IF NOT EXISTS outcomes_in_order ON outcomes (recorded, session);
"""
_REPORTS = "mismatch_reports:"  # prefix of the setting with a feed's latest reports: the result of each, by its id
_KEPT_REPORTS = 16  # a trainer sends reports one after another, and repeats only the latest ones
_SET_REPORTS = "INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value=excluded.value"
_ALL_ADDED = 1e308  # later than any outcome
_BEFORE_OPENING = "closed<(SELECT opened FROM feeds WHERE key=?)"  # groups closed after the opening are in `later`
_LAST_WAITING = (
    "(SELECT max(recorded) FROM rolled JOIN outcomes ON outcomes.session=rolled.session"
    " WHERE feed=? AND team=? AND number IS NULL)"
)
_FEED = "key, name, config, opened, reader, newest, handed, committed"
_OPEN = "key, name, n, prefix, newest"


class FeedRow(msgspec.Struct, frozen=True):
    """One row of the feeds table."""

    key: int
    name: str
    config: bytes
    opened: float
    reader: str
    newest: int
    handed: int
    committed: int


class _OpenFeed(msgspec.Struct, frozen=True):
    """The columns of a feed that are needed to add outcomes to it."""

    key: int
    name: str
    n: int
    prefix: str
    newest: int


class DeliveryMember(msgspec.Struct, frozen=True):
    """One rollout in a delivery."""

    session: int
    id: str
    group: str
    outcome: RecordedOutcome


class IncompleteGroup(msgspec.Struct, frozen=True):
    """An incomplete group, and how many rollouts it has so far."""

    group: str
    rollouts: int


class FeedLog:
    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without these tables

    # ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, name: str, config: bytes, n: int, prefix: str, *, from_start: bool) -> FeedRow:
        """Return the feed with this name. Create it if it does not exist.

        A feed created with `from_start` must then be filled with earlier outcomes (`fill`).
        """
        with self._writing() as db:
            # With this lock, every outcome is recorded either before the feed exists or with the feed visible, so none is missed.
            db.execute(LOCK_FEEDS_TABLE)
            if (existing := _find(db, name)) is not None:
                return existing
            row = (name, config, n, prefix, time.time())
            db.execute("INSERT INTO feeds (name, config, n, prefix, opened) VALUES (?,?,?,?,?)", row)
            created = _find(db, name)
            assert created is not None
            if from_start:
                db.execute("INSERT INTO filling VALUES (?, -1e308, 0)", (created.key,))
            return created

    def is_filling(self, feed: int) -> bool:
        with self._reading() as db:
            return db.execute("SELECT 1 FROM filling WHERE feed=?", (feed,)).fetchone() is not None

    def fill(self, feed: int, most: int) -> bool:
        """Add up to `most` outcomes to a feed that is being filled. Return whether there may be more.

        Outcomes recorded before the feed was created are added first, oldest first. Outcomes recorded since then follow. Each call is one
        transaction, so turns can be written between calls. The position is stored, so any process can continue after a crash. Deliveries
        get the same numbers as if all outcomes were added in one transaction.
        """
        with self._writing() as db:
            _lock_feed(db, feed)
            row = db.execute(
                "SELECT recorded, filling.session, name, n, prefix, newest FROM filling JOIN feeds ON key=feed WHERE feed=?",
                (feed,),
            ).fetchone()
            if row is None:
                return False
            recorded, session, *target = row
            # Outcomes recorded or replaced since the feed was created are in `later` and are skipped here, even if the clock was set
            # back. The outcomes of superseded attempts and cancelled sessions do not count.
            old = db.execute(
                "SELECT recorded, outcomes.session, id, CAST(outcome AS BLOB),"
                " EXISTS (SELECT 1 FROM later WHERE later.feed=? AND later.session=outcomes.session)"
                " OR status='cancelled'"
                " OR EXISTS (SELECT 1 FROM attempts WHERE attempts.session=sessions.id AND state='superseded')"
                " FROM outcomes JOIN sessions ON sessions.key=outcomes.session WHERE (recorded, outcomes.session)>(?, ?)"
                " ORDER BY recorded, outcomes.session LIMIT ?",
                (feed, recorded, session, most),
            ).fetchall()
            self._fill_earlier(db, _OpenFeed(feed, *target), old)
            if old:
                recorded, session = old[-1][:2]
                db.execute("UPDATE filling SET recorded=?, session=? WHERE feed=?", (recorded, session, feed))
                return True
            if recorded < _ALL_ADDED:  # the first call after all earlier outcomes were added
                _number_closed_groups(db, feed, target[0])
                db.execute("UPDATE filling SET recorded=? WHERE feed=?", (_ALL_ADDED, feed))
            new = db.execute(
                "SELECT place, session, id, CAST(outcome AS BLOB) FROM later WHERE feed=? ORDER BY place LIMIT ?",
                (feed, most),
            ).fetchall()
            for place, key, known_as, outcome in new:
                current = _OpenFeed(*db.execute(f"SELECT {_OPEN} FROM feeds WHERE key=?", (feed,)).fetchone())
                if key is not None:
                    entry = make_entry(db, key, known_as, outcome)
                    _insert_events(db, _add_entries(db, [current], [entry]))
                elif _has_waiting(db, feed, known_as):
                    _assign_number(db, feed, current.name, known_as)
                db.execute("DELETE FROM later WHERE place=?", (place,))
            if not new:
                db.execute("DELETE FROM filling WHERE feed=?", (feed,))
            return bool(new)

    def _fill_earlier(
        self, db: StoreConnection, feed: _OpenFeed, old: Sequence[tuple[float, int, str, bytes, bool]]
    ) -> None:
        """Add outcomes that were recorded before the feed was opened.

        If a group was closed between two of these outcomes, the outcomes that were waiting when it was closed become one delivery.
        """
        entries = [
            (at, make_entry(db, key, known_as, outcome))
            for at, key, known_as, outcome, is_skipped in old
            if not is_skipped
        ]
        groups = sorted({entry.group for _, entry in entries})
        query = f"SELECT 1 FROM closed_groups WHERE team IN ({_marks(groups)}) LIMIT 1"
        if not groups or db.execute(query, groups).fetchone() is None:
            _insert_events(db, _add_entries(db, [feed], [entry for _, entry in entries]))
            return
        for at, entry in entries:
            _number_closed_group(db, feed, entry.group, at)
            current = _OpenFeed(*db.execute(f"SELECT {_OPEN} FROM feeds WHERE key=?", (feed.key,)).fetchone())
            _insert_events(db, _add_entries(db, [current], [entry]))

    def find(self, name: str) -> FeedRow | None:
        with self._reading() as db:
            return _find(db, name) if self._has_tables else None

    def listing(self) -> list[FeedRow]:
        if not self._has_tables:
            return []
        with self._reading() as db:
            return [FeedRow(*row) for row in db.execute(f"SELECT {_FEED} FROM feeds ORDER BY key").fetchall()]

    def waiting(self, feed: int, limit: int) -> list[IncompleteGroup]:
        """Return up to `limit` incomplete groups of a feed, oldest first."""
        query = "SELECT team, count(*) FROM rolled WHERE feed=? AND number IS NULL GROUP BY team ORDER BY min(place) LIMIT ?"
        with self._reading() as db:
            return [IncompleteGroup(*row) for row in db.execute(query, (feed, limit)).fetchall()]

    def waiting_counts(self) -> dict[int, tuple[int, int]]:
        """Return the number of incomplete groups and the number of their rollouts, by feed key."""
        if not self._has_tables:
            return {}
        query = "SELECT feed, count(DISTINCT team), count(*) FROM rolled WHERE number IS NULL GROUP BY feed"
        with self._reading() as db:
            return {feed: (groups, rollouts) for feed, groups, rollouts in db.execute(query).fetchall()}

    def delete(self, feed: int) -> None:
        with self._writing() as db:
            _lock_feed(db, feed)
            for table in ("rolled", "filling", "later"):
                db.execute(f"DELETE FROM {table} WHERE feed=?", (feed,))
            db.execute("DELETE FROM settings WHERE name=?", (f"{_REPORTS}{feed}",))
            db.execute("DELETE FROM feeds WHERE key=?", (feed,))

    def add_report(self, feed: int, report: str, result: str, event: NewEvent) -> str | None:
        """Store the result of a trainer's mismatch report, and write the report's event. `report` is the report's id.

        Return None if the report is new. If a report with this id is already stored, write nothing and return the stored result. Only the
        latest reports of each feed (`_KEPT_REPORTS`) stay stored.
        """
        name = f"{_REPORTS}{feed}"
        with self._writing() as db:
            _lock_feed(db, feed)
            row = db.execute("SELECT value FROM settings WHERE name=?", (name,)).fetchone()
            results = {} if row is None else msgspec.json.decode(row[0], type=dict[str, str])
            if report in results:
                return results[report]
            kept = dict([*results.items(), (report, result)][-_KEPT_REPORTS:])
            db.execute(_SET_REPORTS, (name, msgspec.json.encode(kept).decode()))
            insert_event(db, event)
        return None

    # ── recording ───────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, db: StoreConnection, entries: Sequence[NewEntry]) -> list[NewEvent]:
        """Add outcomes to every feed that accepts their groups. This must run in the transaction that records or replaces the outcomes.

        A feed that is still being filled gets them later. Return the events that announce the newly completed groups. The caller must write
        these events.
        """
        db.execute(LOCK_FEEDS)
        query = f"SELECT {_OPEN}, filling.feed FROM feeds LEFT JOIN filling ON filling.feed=key ORDER BY key"
        feeds: list[_OpenFeed] = []
        for *feed, filling in db.execute(query).fetchall():
            if filling is None:
                feeds.append(_OpenFeed(*feed))
                continue
            for entry in entries:
                _postpone(db, filling, entry.session, entry.id, entry.outcome)
        return _add_entries(db, feeds, entries)

    def enter_outcome(self, db: StoreConnection, session: int, session_id: str, outcome: bytes) -> list[NewEvent]:
        """Like `enter`, for one outcome."""
        return self.enter(db, [make_entry(db, session, session_id, outcome)])

    def close_group(self, group: str) -> list[tuple[str, int]]:
        """Complete a group with the rollouts that it has. Return the name of each feed that delivers it, and the delivery's number.

        In a feed that is still being filled, the group becomes a delivery later.
        """
        closed = []
        with self._writing() as db:
            db.execute(LOCK_FEEDS).fetchall()
            db.execute("INSERT INTO closed_groups VALUES (?,?) ON CONFLICT DO NOTHING", (group, time.time()))
            for (key,) in db.execute("SELECT feed FROM filling").fetchall():
                _postpone(db, key, None, group, None)
            feeds = (
                "SELECT DISTINCT key, name FROM feeds JOIN rolled ON feed=key WHERE number IS NULL AND team=?"
                " AND key NOT IN (SELECT feed FROM filling) ORDER BY key"
            )
            for key, name in db.execute(feeds, (group,)).fetchall():
                closed.append((name, _assign_number(db, key, name, group)))
        return closed

    # ── delivering ──────────────────────────────────────────────────────────────────────────────────────────────

    def members(self, feed: int, number: int) -> list[DeliveryMember]:
        """Return the rollouts of a delivery, in the order in which they entered the feed."""
        query = "SELECT session, id, team, CAST(outcome AS BLOB) FROM rolled WHERE feed=? AND number=? ORDER BY place"
        with self._reading() as db:
            rows = db.execute(query, (feed, number)).fetchall()
        return [
            DeliveryMember(key, as_name(name), as_name(group), _decode_or_stand_in(outcome, as_name(group)))
            for key, name, group, outcome in rows
        ]

    def take_over(self, name: str) -> FeedRow | None:
        """Give a feed a new reader token, which locks out the previous reader. Return the feed, or None if it does not exist."""
        with self._writing() as db:
            db.execute("UPDATE feeds SET reader=? WHERE name=?", (secrets.token_hex(12), name))
            return _find(db, name)

    def hand_out(self, feed: int, reader: str, number: int) -> bool:
        """Record that a reader is being handed the deliveries up to `number`.

        Return False if another reader has taken over or the feed was deleted.
        """
        with self._writing() as db:
            query = "UPDATE feeds SET handed=CASE WHEN handed<? THEN ? ELSE handed END WHERE key=? AND reader=?"
            return db.execute(query, (number, number, feed, reader)).rowcount == 1

    def commit(self, feed: int, reader: str, number: int) -> FeedRow | None:
        """Commit the deliveries up to `number`, if they were handed out. Otherwise, the committed number does not change.

        Return the feed, or None if it was deleted or another reader has taken it over.
        """
        with self._writing() as db:
            query = (
                "UPDATE feeds SET committed=CASE WHEN ?<=handed AND ?>committed THEN ? ELSE committed END"
                " WHERE key=? AND reader=?"
            )
            if db.execute(query, (number, number, number, feed, reader)).rowcount != 1:
                return None
            return FeedRow(*db.execute(f"SELECT {_FEED} FROM feeds WHERE key=?", (feed,)).fetchone())


def _find(db: StoreConnection, name: str) -> FeedRow | None:
    row = db.execute(f"SELECT {_FEED} FROM feeds WHERE name=?", (name,)).fetchone()
    return None if row is None else FeedRow(*row)


def _lock_feed(db: StoreConnection, feed: int) -> None:
    db.execute(f"SELECT key FROM feeds WHERE key=? {FOR_UPDATE}", (feed,)).fetchall()


def make_entry(
    db: StoreConnection, session: int, session_id: str, outcome: bytes, rollout: str | None = None
) -> NewEntry:
    """Build the entry for an outcome. If `rollout` is None, look up the name of the session's rollout."""
    recorded = decode_outcome(outcome)
    is_fault = isinstance(recorded, RecordedOutcome) and recorded.kind == "infrastructure fault"
    # A damaged outcome is not skipped, because its group would then wait forever. It has no reward, so its rollout is never trained on.
    if isinstance(recorded, DamagedOutcome):
        recorded = _stand_in_outcome(*_read_metadata(db, session))
        outcome = msgspec.json.encode(recorded, order="sorted")
    name = find_rollout(db, session_id) if rollout is None else rollout
    return NewEntry(session, session_id, name, recorded.group, outcome, is_fault)


def _add_entries(db: StoreConnection, feeds: Sequence[_OpenFeed], entries: Sequence[NewEntry]) -> list[NewEvent]:
    """Add outcomes to feeds that the caller has locked. Return the events that announce the newly completed groups."""
    events: list[NewEvent] = []
    if not feeds or not entries:
        return events
    found = _find_entries(db, feeds, entries)
    for feed in feeds:
        groups = FeedGroups(feed.n, feed.prefix, feed.newest, found[feed.key])
        for entry in entries:
            groups.add(entry)
        _write_groups(db, feed.key, groups)
        if groups.newest > feed.newest:
            db.execute("UPDATE feeds SET newest=? WHERE key=?", (groups.newest, feed.key))
        events += [
            _delivery_event(feed.name, number, group, len(members)) for number, group, members in groups.completed
        ]
    return events


def _find_entries(
    db: StoreConnection, feeds: Sequence[_OpenFeed], entries: Sequence[NewEntry]
) -> dict[int, list[FeedEntry]]:
    """Return the existing entries that the new entries may affect, by feed key.

    These are the entries of the same incomplete groups, the same sessions and the same rollouts.
    """
    sessions = [entry.session for entry in entries]
    groups = sorted({entry.group for entry in entries})
    rollouts = sorted({entry.rollout for entry in entries if entry.rollout})
    which, values = "session IN (%s) OR (number IS NULL AND team IN (%s))", [*sessions, *groups]
    marks = [_marks(sessions), _marks(groups)]
    if rollouts:
        which += " OR (rollout!='' AND rollout IN (%s))"
        values += rollouts
        marks.append(_marks(rollouts))
    query = (
        f"SELECT feed, session, rollout, team, number, place FROM rolled WHERE feed IN ({_marks(feeds)})"
        f" AND ({which % tuple(marks)})"
    )
    found: dict[int, list[FeedEntry]] = {feed.key: [] for feed in feeds}
    # Sorted in Python, because with ORDER BY place SQLite might read the whole table by the index on `place`.
    for feed, *entry in sorted(db.execute(query, (*found, *values)).fetchall(), key=lambda row: row[-1]):
        found[feed].append(FeedEntry(*entry))
    return found


def _write_groups(db: StoreConnection, feed: int, groups: FeedGroups) -> None:
    if groups.removed:
        db.execute(f"DELETE FROM rolled WHERE place IN ({_marks(groups.removed)})", groups.removed)
    for number, _, members in groups.completed:
        if places := [entry.place for entry in members if entry.place]:
            db.execute(f"UPDATE rolled SET number=? WHERE place IN ({_marks(places)})", (number, *places))
    rows = [
        (feed, entry.session, entry.new.id, entry.group, entry.number, entry.new.outcome, entry.rollout)
        for entry in groups.added
        if entry.new is not None
    ]
    if rows:
        columns = "feed, session, id, team, number, outcome, rollout"
        marks = ",".join(["(?,?,?,?,?,?,?)"] * len(rows))
        db.execute(f"INSERT INTO rolled ({columns}) VALUES {marks}", [value for row in rows for value in row])


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _insert_events(db: StoreConnection, events: Sequence[NewEvent]) -> None:
    for event in events:
        insert_event(db, event)


def _number_closed_group(db: StoreConnection, feed: _OpenFeed, group: str, recorded: float) -> None:
    """Turn the waiting rollouts of a group into a delivery, if the group was closed after they were recorded and before `recorded`.

    `recorded` is the time of the group's next outcome.
    """
    query = f"SELECT 1 FROM closed_groups WHERE team=? AND closed<? AND {_BEFORE_OPENING} AND closed>={_LAST_WAITING}"
    if group and db.execute(query, (group, recorded, feed.key, feed.key, group)).fetchone() is not None:
        _assign_number(db, feed.key, feed.name, group)


def _number_closed_groups(db: StoreConnection, feed: int, name: str) -> None:
    """Turn the waiting rollouts of each closed group into a delivery, if the group was closed after they were recorded.

    The deliveries are numbered in the order in which the groups were closed.
    """
    query = (
        f"SELECT team, min(closed) FROM closed_groups WHERE {_BEFORE_OPENING} AND EXISTS"
        " (SELECT 1 FROM rolled WHERE rolled.feed=? AND rolled.team=closed_groups.team AND number IS NULL)"
        " AND closed>=(SELECT max(recorded) FROM rolled JOIN outcomes ON outcomes.session=rolled.session"
        " WHERE rolled.feed=? AND rolled.team=closed_groups.team AND number IS NULL) GROUP BY team ORDER BY 2, 1"
    )
    for team, _ in db.execute(query, (feed, feed, feed)).fetchall():
        _assign_number(db, feed, name, team)


def _has_waiting(db: StoreConnection, feed: int, group: str) -> bool:
    query = "SELECT 1 FROM rolled WHERE feed=? AND team=? AND number IS NULL LIMIT 1"
    return db.execute(query, (feed, group)).fetchone() is not None


def _postpone(db: StoreConnection, feed: int, session: int | None, known_as: str, outcome: bytes | None) -> None:
    db.execute("INSERT INTO later (feed, session, id, outcome) VALUES (?,?,?,?)", (feed, session, known_as, outcome))


def _assign_number(db: StoreConnection, feed: int, name: str, group: str) -> int:
    """Turn the waiting rollouts of a group into the feed's next delivery, and return the delivery's number."""
    (number,) = db.execute("UPDATE feeds SET newest=newest+1 WHERE key=? RETURNING newest", (feed,)).fetchone()
    query = "UPDATE rolled SET number=? WHERE feed=? AND team=? AND number IS NULL"
    count = db.execute(query, (number, feed, group)).rowcount
    insert_event(db, _delivery_event(name, number, group, count))
    return int(number)


def _delivery_event(feed: str, number: int, group: str, rollouts: int) -> NewEvent:
    return new_event("", "delivery", {"feed": feed, "number": number, "group": group, "rollouts": rollouts})


def _decode_or_stand_in(stored: bytes, group: str) -> RecordedOutcome:
    outcome = decode_outcome(stored)
    return _stand_in_outcome(group) if isinstance(outcome, DamagedOutcome) else outcome


def _stand_in_outcome(group: str, task: str = "") -> RecordedOutcome:
    """Build the outcome that is delivered in place of a damaged one."""
    return RecordedOutcome(kind="infrastructure fault", message=DAMAGED_OUTCOME, group=group, task=task)


def _read_metadata(db: StoreConnection, session: int) -> tuple[str, str]:
    """Read the group and the task of a damaged outcome from its session's settings.

    Each is empty if the settings do not contain it or are damaged.
    """
    row = db.execute("SELECT CAST(config AS BLOB) FROM sessions WHERE key=?", (session,)).fetchone()
    try:
        config: Json = None if row is None else msgspec.json.decode(row[0])
    except (msgspec.DecodeError, ValueError):
        config = None
    metadata: Json = config.get("metadata") if isinstance(config, dict) else None
    values = [metadata.get(name) if isinstance(metadata, dict) else None for name in ("group", "task")]
    group, task = (value if isinstance(value, str) else "" for value in values)
    return group, task
