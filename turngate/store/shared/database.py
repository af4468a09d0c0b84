"""The shared store's database: connections to PostgreSQL, transactions, and readable errors.

No statements are prepared on the server and no state is kept in a database session, so the store works behind PgBouncer in transaction
mode.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from turngate.common.database_url import ENCODE_HINT, DatabaseUrl
from turngate.errors import ConfigError, NoRecordings, StoreError
from turngate.store.connection import Durability
from turngate.store.schema import SCHEMA_VERSION
from turngate.store.shared import tables
from turngate.store.shared.answer_limit import AnswerLimit
from turngate.store.shared.failures import describe_error
from turngate.store.shared.pipeline import PipelinedConnection
from turngate.store.shared.translation import translate_statement

if TYPE_CHECKING:
    import psycopg

_LOCK_S = 20  # time to wait for a lock
_BEGIN = "BEGIN; SET LOCAL lock_timeout='{}s'; SET LOCAL idle_in_transaction_session_timeout='60s'"
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


def import_psycopg() -> Any:
    try:
        import psycopg
    except ImportError:
        raise ConfigError(
            "data: a PostgreSQL store needs the extra `postgres`; run `pip install 'turngate[postgres]'`", param="data"
        ) from None
    return psycopg


def _copy_statement(table: str, columns: Sequence[str]) -> bytes:
    return f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)".encode()


class SharedConnection:
    """A connection to PostgreSQL that translates the store's SQL."""

    __slots__ = ("_cursors",)

    def __init__(self, db: psycopg.Connection) -> None:
        self._cursors = db.cursor

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> psycopg.Cursor:
        return self._cursors(binary=True).execute(translate_statement(sql).encode(), values)

    def copy_rows(
        self, table: str, columns: Sequence[str], types: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Insert many rows with COPY, which costs far less than one INSERT statement per row."""
        with self._cursors() as cursor, cursor.copy(_copy_statement(table, columns)) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)


class _ReadConnection:
    """A connection for reading. After an interruption, it reconnects and repeats the read, except inside a snapshot."""

    __slots__ = ("_database",)

    def __init__(self, database: SharedDatabase) -> None:
        self._database = database

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> psycopg.Cursor:
        return self._database.execute_read(sql, values)


class SharedDatabase:
    """A PostgreSQL database, with one connection for writing and one for reading. Both reconnect after an interruption."""

    durability: Durability = "disk"  # PostgreSQL syncs every commit
    version = SCHEMA_VERSION

    def __init__(self, url: DatabaseUrl, *, read_only: bool = False, answer_s: float | None = None) -> None:
        """Connect to the database. Unless `read_only` is set, create or upgrade its tables.

        After that, a statement that takes longer than `answer_s` seconds fails. None means no limit.
        """
        self.url = url
        lock_s = _LOCK_S if answer_s is None else max(1, round(answer_s * 0.8))
        begin = _BEGIN.format(lock_s)
        # Each transaction chooses the schema again, since PgBouncer may give it another connection.
        self._use_schema = tables.use_schema(url.schema) if url.schema else ""
        self._begin_write = f"{begin}; {self._use_schema}" if url.schema else begin
        self._psycopg = import_psycopg()
        self._read_only = read_only
        self._writer: psycopg.Connection | None = None
        self._reader: psycopg.Connection | None = None
        self._mutex = threading.RLock()
        self._reader_mutex = threading.RLock()
        self._in_snapshot = False
        self._closed = False
        # Without read_only, the limit is set later, because upgrading the tables can take a long time.
        self._limit = AnswerLimit(answer_s, url.name) if read_only and answer_s is not None else None
        self.others: weakref.WeakSet[SharedDatabase] = weakref.WeakSet()  # databases that `interrupt` interrupts too
        try:
            self._open()
        except self._psycopg.Error as error:
            self.close()
            raise ConfigError(f"data: {self._describe(error)}", param="data") from None
        except BaseException:
            self.close()
            raise
        if answer_s is not None and self._limit is None:
            self._disconnect()
            self._limit = AnswerLimit(answer_s, url.name)

    def _open(self) -> None:
        if not self._read_only:
            tables.prepare(self._require_writer(), self.url.name, self.url.schema)
            return
        with (db := self._require_reader()).transaction():
            if self._use_schema:
                db.execute(self._use_schema.encode())
            version = tables.read_version(db)
        tables.check_version(version, self.url.name)
        if version != tables.SHARED_VERSION:
            found = f"has version {version}" if version else "has no tables"
            # A project's store cannot be served alone.
            main = self.url.name.removesuffix(f"/projects/{self.url.project}")
            problem = ConfigError if version else NoRecordings
            raise problem(
                f"data: the shared store {self.url.name} {found}; "
                f"start `turngate serve --data {main}` once to create or upgrade its tables",
                param="data",
            )

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        for db in (self._writer, self._reader):
            if db is not None:
                db.close()
        self._writer = self._reader = None

    def interrupt(self) -> None:
        """Abort all statements that other threads are running, and refuse any further use."""
        for other in list(self.others):
            other.interrupt()
        self._closed = True
        for db in (self._writer, self._reader):
            # Closing a connection would not wake the thread that is waiting for it.
            with suppress(OSError, self._psycopg.Error):
                if db is not None:
                    with socket.socket(fileno=os.dup(db.fileno())) as connection:
                        connection.shutdown(socket.SHUT_RDWR)

    # ── transactions ────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def writing(self) -> Iterator[SharedConnection]:
        with self._handling_errors():
            db = self._begin()
            yield SharedConnection(db)
            db.execute("COMMIT")

    @contextmanager
    def pipelining(self, settings: str = "") -> Iterator[PipelinedConnection]:
        """Like `writing`, but statements are sent together. The statements in `settings` are run first.

        An interrupted connection is noticed only when the first result is read. The block then fails, and the next block reconnects.
        """
        with self._handling_errors():
            db = PipelinedConnection(self._require_writer(), self._begin_write + settings)
            yield db
            db.finish()

    @contextmanager
    def _handling_errors(self) -> Iterator[None]:
        """Let only one thread write at a time. If the block fails, roll back, and turn PostgreSQL errors into `StoreError`."""
        if self._read_only:
            raise StoreError("cannot write to the shared store: it was opened read-only")
        with self._mutex:
            try:
                yield
            except self._psycopg.Error as error:
                self._roll_back()
                if isinstance(error, self._psycopg.errors.ReadOnlySqlTransaction) and self._writer is not None:
                    self._writer.close()  # it stays read-only, but a new connection may reach a writable server
                raise StoreError(f"cannot write to the shared store: {self._describe(error)}") from error
            except BaseException:
                self._roll_back()
                raise

    @contextmanager
    def reading(self) -> Iterator[_ReadConnection]:
        with self._reader_mutex:
            try:
                yield _ReadConnection(self)
            except self._psycopg.Error as error:
                raise StoreError(f"cannot read the shared store: {self._describe(error)}") from error

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        with self._reader_mutex, self.reading() as db:
            db.execute(_SNAPSHOT)
            self._in_snapshot = True
            try:
                if self._use_schema:
                    db.execute(self._use_schema)
                yield
            finally:
                self._in_snapshot = False
                if self._reader is not None and not self._reader.closed:
                    db.execute("ROLLBACK")

    def newest_event(self) -> int:
        with self.reading() as db:
            row = db.execute("SELECT newest FROM event_counter").fetchone()
        return 0 if row is None else int(row[0])

    def used_bytes(self) -> int:
        with self.reading() as db:
            row = db.execute("SELECT coalesce(sum(bytes), 0)::int8 FROM shipments").fetchone()
        return 0 if row is None else int(row[0])

    def change_count(self) -> int:
        return self.newest_event()

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> psycopg.Connection:
        """Begin a transaction. Reconnect first if the connection was interrupted."""
        db = self._require_writer()
        try:
            db.execute(self._begin_write.encode())
        except self._psycopg.OperationalError:
            if not db.closed:
                raise
            db = self._require_writer()
            db.execute(self._begin_write.encode())
        return db

    def _roll_back(self) -> None:
        """Roll back the transaction. If that fails, close the connection, so that PostgreSQL rolls back."""
        db = self._writer
        if db is None or db.closed:
            return
        try:
            db.execute("ROLLBACK")
        except self._psycopg.Error:
            db.close()

    def execute_read(self, sql: str, values: Sequence[Any]) -> psycopg.Cursor:
        """Run a read. If the connection was interrupted, reconnect and repeat the read.

        Inside a snapshot, this raises an error instead, because the repeated read would not see the same data.
        """
        db = self._require_reader()
        try:
            return self._read(db, sql, values)
        except self._psycopg.OperationalError:
            if self._in_snapshot or not db.closed:
                raise
            return self._read(self._require_reader(), sql, values)

    def _read(self, db: psycopg.Connection, sql: str, values: Sequence[Any]) -> psycopg.Cursor:
        """Run a read. For a project's store, the read needs a transaction, because the schema must be chosen first."""
        if not self._use_schema or sql.startswith(("BEGIN", "ROLLBACK")) or self._in_snapshot:
            return SharedConnection(db).execute(sql, values)
        db.execute(f"BEGIN READ ONLY; {self._use_schema}".encode())
        try:
            return SharedConnection(db).execute(sql, values)
        finally:
            if not db.closed:
                db.execute("ROLLBACK")  # the transaction has written nothing

    def _require_writer(self) -> psycopg.Connection:
        if self._writer is None or self._writer.closed:
            self._writer = self._connect()
        return self._writer

    def _require_reader(self) -> psycopg.Connection:
        if self._reader is None or self._reader.closed:
            if self._in_snapshot:
                raise StoreError("the connection to the shared store was interrupted; try again")
            self._reader = self._connect()
        return self._reader

    def _connect(self) -> psycopg.Connection:
        if self._closed:
            raise StoreError("the shared store is closed: the gateway is stopping, or the project was deleted")
        limit = self._limit
        connect = self._psycopg.connect if limit is None else partial(limit.connect, self._psycopg)
        try:
            db: psycopg.Connection = connect(
                self.url.value,
                autocommit=True,
                prepare_threshold=None,
                connect_timeout=10,
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=30_000,
                fallback_application_name="turngate",
            )
        except self._psycopg.ProgrammingError:  # libpq cannot parse the address; its message may quote the password
            raise ConfigError(
                f"data: the address of the shared store {self.url.name} is not valid; {ENCODE_HINT}, and use only libpq parameters in the "
                "query string",
                param="data",
            ) from None
        encoding = db.info.parameter_status("server_encoding")
        if encoding not in (None, "UTF8"):
            db.close()
            raise ConfigError(
                f"data: the encoding of {self.url.name} is {encoding}, which cannot store all characters; create a database with "
                "`createdb -E UTF8 -T template0 NAME`",
                param="data",
            )
        return db

    def _describe(self, error: psycopg.Error) -> str:
        return describe_error(error, self.url.name)
