"""The SQLite file of the store: connections, transactions, locks between workers, and checkpoints."""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from turngate.common.sharding import SINGLE_SHARD, Shard
from turngate.errors import ConfigError, NoRecordings, StoreError
from turngate.store.audit import SQLITE_AUDIT_GUARD
from turngate.store.columns import decode_text
from turngate.store.connection import Durability
from turngate.store.lock import lock_folder
from turngate.store.migration import finish_upgrade, prepare_upgrade
from turngate.store.schema import BEFORE_EVENTS, READABLE_VERSIONS, SCHEMA, SCHEMA_VERSION

log = logging.getLogger("turngate")


class SqliteDatabase:
    """One SQLite file, with one connection for writing and one for each thread that reads.

    A file that was opened with `open_for_reading` has a single connection. Transactions are short and block the calling thread.
    """

    durability: Durability
    _readers: _Readers | None

    def __init__(self, folder: Path, durability: Durability = "process", shard: Shard = SINGLE_SHARD) -> None:
        self.path = folder / "turngate.db"
        self.durability = durability
        self.version = SCHEMA_VERSION
        # If several workers share the folder, the front process (their parent) has locked it, and each worker locks only its own writes.
        shared = shard.workers > 1
        self._lock_file: IO[bytes] | None = open(folder / "writing", "wb") if shared else lock_folder(folder)  # noqa: SIM115
        self._shared = shared
        try:
            self._db = _connect(self.path)
            try:
                self._lock()
                try:
                    self._prepare()
                finally:
                    self._unlock()
            except BaseException:
                self._db.close()
                raise
        except BaseException as error:
            self._lock_file.close()
            if not isinstance(error, sqlite3.DatabaseError | OSError):
                raise
            raise ConfigError(
                f"data: {self.path} cannot be used ({error}); check the disk and the file's permissions, or restore the file from a backup",
                param="data",
            ) from None
        self._readers = _Readers(self.path)
        self._mutex = threading.Lock()  # the journal writes from a thread when durability is `disk`
        self._stopping = threading.Event()
        self._checkpoints: threading.Thread | None = None
        if shard.number == 0:  # the first worker runs the checkpoints of all workers
            self._checkpoints = threading.Thread(target=self._run_checkpoints, name="turngate-checkpoint", daemon=True)
            self._checkpoints.start()

    @classmethod
    def open_for_reading(cls, folder: Path) -> SqliteDatabase:
        """Open the database in a folder read-only. Another process may be writing to it."""
        database = cls.__new__(cls)
        database._connect_for_reading(folder)
        return database

    def _connect_for_reading(self, folder: Path) -> None:
        path = folder / "turngate.db"
        if not path.is_file():
            raise NoRecordings.in_folder(folder)
        self.path = path
        self.durability = "process"
        try:
            self._db = _connect(path)
            try:
                self._db.execute("PRAGMA query_only=ON")
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
            except BaseException:
                self._db.close()
                raise
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"data: {path} cannot be read ({error}); check the disk and the file's permissions, or restore the file from a backup",
                param="data",
            ) from None
        if version not in READABLE_VERSIONS:
            self._db.close()
            raise ConfigError(
                f"data: {path} has schema version {version}, but this version of Turngate supports versions "
                f"{READABLE_VERSIONS[0]} to {SCHEMA_VERSION}; use the turngate version that wrote it",
                param="data",
            )
        self._readers = None  # None: only one thread uses this database
        self._mutex = threading.Lock()
        self._checkpoints = None
        self._lock_file = None
        self._shared = False
        self.version = int(version)

    def _prepare(self) -> None:
        self.path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'FULL' if self.durability == 'disk' else 'NORMAL'}")
        # Checkpoints sync the file, so a separate thread runs them and turns do not wait.
        self._db.execute("PRAGMA wal_autocheckpoint=0")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, *READABLE_VERSIONS):
            raise ConfigError(
                f"data: {self.path} has schema version {version}, but this version of Turngate supports versions "
                f"{READABLE_VERSIONS[0]} to {SCHEMA_VERSION}; use the turngate version that wrote it",
                param="data",
            )
        prepare_upgrade(self._db, version)
        # One transaction: otherwise SQLite commits after each statement, and with durability `disk` it also syncs.
        self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {SQLITE_AUDIT_GUARD} COMMIT")
        if version == BEFORE_EVENTS:
            # Older versions numbered events from their start time in milliseconds. New numbers must be higher than those.
            self._db.execute(
                "INSERT INTO sqlite_sequence SELECT 'events', ? WHERE NOT EXISTS"
                " (SELECT 1 FROM sqlite_sequence WHERE name='events')",
                (int(time.time() * 1000),),
            )
        finish_upgrade(self._db, version)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        if self._checkpoints is not None:
            self._stopping.set()
            self._checkpoints.join()
        with self._mutex:
            self._db.close()
        if self._readers is not None:
            self._readers.close()
        if self._lock_file is not None:
            self._lock_file.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads inside the block see the same data.

        Use this only on a store from `Store.open_reader`, because nothing else uses its connection.
        """
        with self.reading() as db:
            db.execute("BEGIN")
            try:
                yield
            finally:
                db.execute("ROLLBACK")

    def writing(self) -> _Transaction:
        return _Transaction(self)

    def begin(self) -> sqlite3.Connection:
        self._mutex.acquire()
        try:
            # Without this lock, SQLite would poll until another worker's transaction ends, which starves some workers.
            self._lock()
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except BaseException:
                self._unlock()
                raise
        except BaseException:
            self._mutex.release()
            raise
        return self._db

    def end(self, *, keep: bool) -> None:
        try:
            if keep:
                self._db.execute("COMMIT")
        except BaseException:
            keep = False
            raise
        finally:
            if not keep:
                self._roll_back()
            self._unlock()
            self._mutex.release()

    def _lock(self) -> None:
        if self._shared and self._lock_file is not None:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)

    def _unlock(self) -> None:
        if self._shared and self._lock_file is not None:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _roll_back(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as error:  # the caller needs the original error
            log.warning("could not roll back a transaction: %s", error)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._db if self._readers is None else self._readers.get()
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot read the store ({error}); check the disk and the permissions of the data folder"
            ) from error

    def newest_event(self) -> int:
        with self.reading() as db:
            row = db.execute("SELECT seq FROM sqlite_sequence WHERE name='events'").fetchone()
        return 0 if row is None else int(row[0])

    def used_bytes(self) -> int:
        """Return the size of the pages that are in use. Free pages are not included, because new data will reuse them."""
        with self.reading() as db:
            count, free, size = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
            )
        return int((count - free) * size)

    def change_count(self) -> int:
        with self.reading() as db:
            (version,) = db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _run_checkpoints(self) -> None:
        """Periodically move the write-ahead log into the database, over a separate connection."""
        db = sqlite3.connect(self.path, isolation_level=None, timeout=1)
        wal = self.path.with_name(self.path.name + "-wal")
        while not self._stopping.wait(1.0):
            try:
                if wal.exists() and wal.stat().st_size > 4_000_000:
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except (sqlite3.Error, OSError):
                continue  # the log keeps growing until the next attempt; failed writes are reported by the writer
        db.close()


class _Connection(sqlite3.Connection):
    """A SQLite connection that supports weak references, unlike its base class."""


def _connect(path: Path) -> _Connection:
    """Open a connection that any thread may use. It does not begin transactions by itself."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10, factory=_Connection)
    db.text_factory = decode_text
    return db


class _Readers:
    """One read connection per thread, so that reads do not wait for writes to be synced.

    Threads cannot share a connection: while one thread has an open query, the others would not see data written since that query began.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = threading.local()
        # Weak, so that the connection of a thread is closed when the thread ends.
        self._all: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._closed = False

    def get(self) -> sqlite3.Connection:
        reader: _Connection | None = getattr(self._own, "reader", None)
        if reader is None:
            if self._closed:
                raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
            self._own.reader = reader = _connect(self._path)
            self._all.add(reader)
        return reader

    def close(self) -> None:
        self._closed = True
        for reader in list(self._all):
            reader.close()


class _Transaction:
    """A context manager for one write transaction.

    It is a class because every turn uses it, and a generator would be several times slower.
    """

    __slots__ = ("_store",)

    def __init__(self, store: SqliteDatabase) -> None:
        self._store = store

    def __enter__(self) -> sqlite3.Connection:
        try:
            return self._store.begin()
        except sqlite3.Error as error:
            raise _write_error(error) from error

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._store.end(keep=error is None)
        except sqlite3.Error as end_error:
            raise _write_error(end_error) from end_error
        if isinstance(error, sqlite3.Error):
            raise _write_error(error) from error


def _write_error(error: sqlite3.Error) -> StoreError:
    return StoreError(
        f"cannot write to the store ({error}); check the disk and the permissions of the data folder (a turn that cannot be recorded is "
        "not delivered)"
    )
