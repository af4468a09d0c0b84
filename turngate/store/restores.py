"""Record that a store was restored from a backup, so that no session is trained on twice.

Each restore starts a new *history* of the store, with a random name. A delivery number from an earlier history means the same delivery only
up to the newest number in the backup. Sessions that a cell ships again may already have been trained on. Feeds therefore deliver them
without rows, and say why.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from turngate.store.connection import FOR_UPDATE, LOCK_FEEDS, Connect
from turngate.store.events import insert_event, new_event

RESTORE_TABLES = """
CREATE TABLE IF NOT EXISTS feed_histories (
    feed INTEGER NOT NULL,        -- key of the feed
    history TEXT NOT NULL,        -- an earlier history of the store
    last INTEGER NOT NULL,        -- numbers up to this one mean the same as in that history
    PRIMARY KEY (feed, history)
);
CREATE TABLE IF NOT EXISTS unconfirmed_feeds (  -- feeds whose last commits may be missing in the backup
    feed INTEGER PRIMARY KEY
);
CREATE TABLE IF NOT EXISTS reshipped (  -- in a cell: to be shipped again; in the shared store: was shipped again
    session INTEGER PRIMARY KEY   -- key of the session
);
"""
_HISTORY = "history"  # name of the setting
RESHIPPED = (
    "it was shipped again after the shared store was restored from a backup, so it may have been trained on before"
)
_MAX_VALUES = 500  # per query


class RestoreLog:
    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def history(self) -> str:
        """Return the name of the store's current history, or an empty string if the store was never restored."""
        with self._reading() as db:
            row = db.execute("SELECT value FROM settings WHERE name=?", (_HISTORY,)).fetchone()
        return "" if row is None else str(row[0])

    def note(self, known: str) -> str:
        """Record that the store was restored, which starts a new history. Return the name of the current history.

        If the current history is not `known`, another process has already recorded the restore, and nothing changes. Otherwise, all feeds
        lose their readers. Each trainer must then reopen its feed at the position of its checkpoint.
        """
        new = secrets.token_hex(4)
        with self._writing() as db:
            db.execute(LOCK_FEEDS).fetchall()
            db.execute("INSERT INTO settings VALUES (?,'') ON CONFLICT DO NOTHING", (_HISTORY,))
            (current,) = db.execute(f"SELECT value FROM settings WHERE name=? {FOR_UPDATE}", (_HISTORY,)).fetchone()
            if current != known:
                return str(current)
            db.execute("UPDATE settings SET value=? WHERE name=?", (new, _HISTORY))
            newest = "(SELECT newest FROM feeds WHERE key=feed)"
            db.execute(f"UPDATE feed_histories SET last={newest} WHERE last>{newest}")
            db.execute("INSERT INTO feed_histories SELECT key, ?, newest FROM feeds", (current,))
            db.execute(
                "INSERT INTO unconfirmed_feeds SELECT key FROM feeds WHERE newest>committed ON CONFLICT DO NOTHING"
            )
            db.execute("UPDATE feeds SET reader=''")
            insert_event(db, new_event("", "restored", {"history": new}))
        return new

    def last_number(self, feed: int, history: str) -> int | None:
        """Return the last delivery number that means the same now as in an earlier history, or None if that history is unknown."""
        query = "SELECT last FROM feed_histories WHERE feed=? AND history=?"
        with self._reading() as db:
            row = db.execute(query, (feed, history)).fetchone()
        return None if row is None else int(row[0])

    def is_unconfirmed(self, feed: int) -> bool:
        """Return whether a restore may have lost commits of the feed."""
        with self._reading() as db:
            return db.execute("SELECT 1 FROM unconfirmed_feeds WHERE feed=?", (feed,)).fetchone() is not None

    def confirm(self, feed: int) -> None:
        """Record that a trainer has reopened the feed at the position of its checkpoint, so lost commits no longer matter."""
        with self._writing() as db:
            db.execute("DELETE FROM unconfirmed_feeds WHERE feed=?", (feed,))

    def filter_reshipped(self, sessions: Sequence[int]) -> set[int]:
        """Return the given keys whose sessions were shipped again after a restore."""
        found: set[int] = set()
        with self._reading() as db:
            for start in range(0, len(sessions), _MAX_VALUES):
                chunk = tuple(sessions[start : start + _MAX_VALUES])
                marks = ",".join("?" * len(chunk))
                rows = db.execute(f"SELECT session FROM reshipped WHERE session IN ({marks})", chunk).fetchall()
                found |= {key for (key,) in rows}
        return found
