"""A cache of the scores that a teacher model gave to recorded turns, in a separate SQLite file.

Scores can be computed again, so they are not kept in the store. Exports that compute scores therefore only read the store, and never
compete with a gateway for the store's lock. A turn is identified by its own ids and those of its context, so a turn that several rows share
has one entry. In the default cache file, an entry is removed with the session that it belongs to.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from turngate.common.database_url import is_database_url, parse_database_url
from turngate.errors import ConfigError, StoreError
from turngate.store.shared.store import SharedStore
from turngate.store.sqlite import SqliteDatabase
from turngate.store.store import Store
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Ids, Logprobs

log = logging.getLogger("turngate")
CACHE_FILE = "teacher-scores.db"
_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS scores (
    model TEXT NOT NULL,
    version TEXT NOT NULL,
    top_k INTEGER NOT NULL,
    turn BLOB NOT NULL,           -- digest of the turn's ids and context
    session TEXT NOT NULL,
    logprobs BLOB NOT NULL,       -- float32, little-endian
    top_ids BLOB NOT NULL,        -- int32, little-endian: tokens × k
    top_logprobs BLOB NOT NULL,   -- float32, little-endian: tokens × k
    checksum INTEGER NOT NULL,
    PRIMARY KEY (model, version, top_k, turn)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS scores_by_session ON scores (session);
"""
_BUSY_S = 10.0
_REMOVE_BUSY_S = 1.0  # a gateway may be waiting


class ScoreCacheFailed(StoreError):
    """The file of a score cache cannot be read or written, for example because it is damaged."""


class ScoreKey(msgspec.Struct, frozen=True):
    """The teacher that computed the scores, and the number of most likely tokens scored at each position."""

    model: str
    version: str
    top_k: int


class CachedScores(msgspec.Struct, frozen=True, eq=False):
    """The scores of one turn."""

    logprobs: Logprobs
    top_ids: Ids  # tokens × k
    top_logprobs: Logprobs  # tokens × k


def digest_turns(ids: Ids, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return a digest for each turn of a row. `spans` has the start and end of each turn, and must be sorted.

    Each digest covers all ids up to the turn's end, and the turn's length.
    """
    digests, known, at = [], hashlib.blake2b(digest_size=16), 0
    data = np.ascontiguousarray(ids, np.dtype(ID_DTYPE).newbyteorder("<"))
    for start, end in spans:
        known.update(data[at:end].tobytes())
        at = end
        turn = known.copy()
        turn.update((end - start).to_bytes(8, "little"))
        digests.append(turn.digest())
    return digests


class ScoreCache:
    """A score cache in one file, or in memory if `path` is None. Threads can share it."""

    def __init__(self, path: Path | None, *, busy_s: float = _BUSY_S) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(
                ":memory:" if path is None else path, timeout=busy_s, check_same_thread=False, isolation_level=None
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"teacher_cache: {path} cannot be used ({error}); pass another file as --teacher-cache, or delete this one if it is a "
                "damaged or incompatible cache",
                param="teacher_cache",
            ) from None

    def _prepare(self) -> None:
        """Check that the file is a score cache or new, and create the tables."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(
                f"it has version {version}, but this version of Turngate supports version {_VERSION}"
            )
        tables = self._db.execute(
            "SELECT DISTINCT tbl_name FROM sqlite_master WHERE tbl_name NOT LIKE 'sqlite%'"
        ).fetchall()
        if tables not in ([], [("scores",)]):
            raise sqlite3.DatabaseError("it is another database, not a score cache")
        if self._path is not None:  # only now, so that a file that is not a cache stays unchanged
            self._path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_TABLES)
        self._db.execute(f"PRAGMA user_version={_VERSION}")

    def close(self) -> None:
        self._db.close()

    def read(self, key: ScoreKey, turn: bytes) -> CachedScores | None:
        """Return the scores of a turn, or None if there are none or they do not match their checksum."""
        with self._lock, self._errors("read from"):
            row = self._db.execute(
                "SELECT logprobs, top_ids, top_logprobs, checksum FROM scores"
                " WHERE model=? AND version=? AND top_k=? AND turn=?",
                (key.model, key.version, key.top_k, turn),
            ).fetchone()
        if row is None:
            return None
        *blobs, checksum = row
        if not all(isinstance(blob, bytes) for blob in blobs) or checksum != _checksum(key, turn, blobs):
            return None
        logprobs, top_ids, top_logprobs = blobs
        shape = (-1, key.top_k) if key.top_k else (len(logprobs) // 4, 0)
        return CachedScores(
            np.frombuffer(logprobs, "<f4").astype(LOGPROB_DTYPE),
            np.frombuffer(top_ids, "<i4").astype(ID_DTYPE).reshape(shape),
            np.frombuffer(top_logprobs, "<f4").astype(LOGPROB_DTYPE).reshape(shape),
        )

    def write(self, key: ScoreKey, session: str, scores: Iterable[tuple[bytes, CachedScores]]) -> None:
        """Write the scores of turns in one transaction. Existing scores of these turns are replaced, because they may be damaged."""
        rows = []
        for turn, found in scores:
            arrays = ((found.logprobs, "<f4"), (found.top_ids, "<i4"), (found.top_logprobs, "<f4"))
            blobs = [np.ascontiguousarray(values, dtype).tobytes() for values, dtype in arrays]
            rows.append((key.model, key.version, key.top_k, turn, session, *blobs, _checksum(key, turn, blobs)))
        with self._lock, self._errors("written to"):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT OR REPLACE INTO scores VALUES (?,?,?,?,?,?,?,?,?)", rows)
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def sessions(self) -> list[str]:
        """Return the ids of all sessions with scores."""
        with self._lock, self._errors("read from"):
            return [name for (name,) in self._db.execute("SELECT DISTINCT session FROM scores").fetchall()]

    def remove(self, sessions: Iterable[str]) -> None:
        """Remove the scores of the sessions with these ids."""
        rows = [(session,) for session in sessions]
        with self._lock, self._errors("removed from"):
            self._db.executemany("DELETE FROM scores WHERE session=?", rows)

    @contextmanager
    def _errors(self, failed: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ScoreCacheFailed(
                f"the teacher's scores cannot be {failed} {self._path} ({error}); check the disk and the file's permissions, pass another "
                "file as --teacher-cache, or delete this one if it is damaged: its scores are then computed again"
            ) from None


def _checksum(key: ScoreKey, turn: bytes, blobs: Sequence[bytes]) -> int:
    label = f"{key.model}/{key.version}/{key.top_k}/".encode()
    return zlib.crc32(b"".join(blobs), zlib.crc32(turn, zlib.crc32(label)))


def locate_cache(data: str | Path) -> Path:
    """Return the default cache file for a data folder or a shared store."""
    folder = parse_database_url(str(data)).folder if is_database_url(str(data)) else Path(data)
    return folder / CACHE_FILE


def locate_store_cache(store: Store) -> Path:
    """Return the default cache file for an open store."""
    if isinstance(store, SharedStore):
        return store.url.folder / CACHE_FILE
    assert isinstance(store.database, SqliteDatabase), "only a shared store uses another database"
    return store.database.path.parent / CACHE_FILE


def remove_orphans(store: Store, path: Path) -> None:
    """Remove the scores of sessions that the store no longer has."""
    with store.database.reading() as db:
        known = "SELECT 1 FROM sessions WHERE id=?"
        _remove(path, lambda session: db.execute(known, (session,)).fetchone() is None)


def remove_scores(path: Path, session: str) -> None:
    """Remove the scores of a deleted session."""
    _remove(path, lambda found: found == session)


def _remove(path: Path, is_removed: Callable[[str], bool]) -> None:
    """Remove the scores of sessions for which `is_removed` is true. If the cache is locked or damaged, only log a warning.

    If it was only locked, a later `remove_orphans` removes these scores.
    """
    if not path.is_file():
        return
    try:
        cache = ScoreCache(path, busy_s=_REMOVE_BUSY_S)
        try:
            cache.remove(session for session in cache.sessions() if is_removed(session))
        finally:
            cache.close()
    except (ConfigError, ScoreCacheFailed) as error:
        log.warning("the scores of deleted sessions could not be removed from %s: %s", path, error)
