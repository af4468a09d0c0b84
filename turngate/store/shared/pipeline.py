"""A connection that sends several statements together, without waiting for the result of each.

It uses libpq's pipeline mode directly, because psycopg's cursors would take more CPU time than the statements themselves. When a caller
asks for a result, all pending results are read.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from turngate.store.binary_format import encode_value
from turngate.store.shared.translation import number_values

if TYPE_CHECKING:
    import psycopg
    from psycopg.pq.abc import PGresult

_CHUNK = 1 << 20  # bytes passed to libpq at a time
_BINARY = 1


class PipelinedCursor:
    """The result of a statement. It is read when it is first needed, or earlier with another result."""

    __slots__ = ("_connection", "_rows", "rowcount_or_none")

    def __init__(self, connection: PipelinedConnection) -> None:
        self._connection = connection
        self._rows: list[tuple[Any, ...]] = []
        self.rowcount_or_none: int | None = None  # None: no result yet

    def set_result(self, rows: list[tuple[Any, ...]], count: int) -> None:
        self._rows, self.rowcount_or_none = rows, count

    @property
    def rowcount(self) -> int:
        self._wait()
        return self.rowcount_or_none or 0

    def fetchone(self) -> Any:
        self._wait()
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        self._wait()
        rows, self._rows = self._rows, []
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def close(self) -> None:
        """Drop the rows that have not been read."""
        self.fetchall()

    def _wait(self) -> None:
        if self.rowcount_or_none is None:
            self._connection.flush()


class PipelinedConnection:
    """One transaction over a psycopg connection, committed by `finish`. Nothing else may use the connection until then."""

    def __init__(self, db: psycopg.Connection, begin: str) -> None:
        from psycopg import errors, pq
        from psycopg.adapt import Transformer

        self._libpq = db.pgconn
        self._loader = Transformer(db)
        self._make_error = errors.error_from_result
        self._status = pq.ExecStatus
        self._waiting: list[PipelinedCursor] = []  # cursors that have no result yet
        self._poll = select.poll()
        for statement in begin.split("; "):
            self.execute(statement)

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> PipelinedCursor:
        if not self._waiting:
            self._libpq.enter_pipeline_mode()
        encoded = [encode_value(value) for value in values]
        self._libpq.send_query_params(
            number_values(sql),
            [data for data, _ in encoded],
            [oid for _, oid in encoded],
            [_BINARY] * len(encoded),
            _BINARY,
        )
        cursor = PipelinedCursor(self)
        self._waiting.append(cursor)
        return cursor

    def insert_rows(
        self, table: str, columns: Sequence[str], types: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Insert rows with a single statement. `types` are the PostgreSQL types of the columns."""
        if rows:
            arrays = ", ".join(f"?::{name}[]" for name in types)
            query = f"INSERT INTO {table} ({', '.join(columns)}) SELECT * FROM unnest({arrays})"
            self.execute(query, [list(column) for column in zip(*rows, strict=True)])

    def copy_encoded(self, table: str, columns: Sequence[str], data: Iterable[bytes | bytearray]) -> None:
        """Use COPY to insert rows that are already encoded in PostgreSQL's binary format (`binary_format.py`)."""
        self.flush()
        libpq = self._libpq
        libpq.send_query(f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)".encode())
        self._check(self._read_result())
        for part in data:
            for start in range(0, len(part), _CHUNK):
                chunk = part if len(part) <= _CHUNK else part[start : start + _CHUNK]
                while not libpq.put_copy_data(chunk):
                    self._wait(select.POLLOUT)
        while not libpq.put_copy_end():
            self._wait(select.POLLOUT)
        while (result := self._read_result()) is not None:
            self._check(result)

    def flush(self) -> None:
        """Send all statements so far, and read their results. Raise the first error."""
        if not self._waiting:
            return
        cursors, self._waiting = self._waiting, []
        libpq, failed = self._libpq, None
        libpq.pipeline_sync()
        for cursor in cursors:
            while (result := self._read_result()) is not None:
                if result.status in (self._status.FATAL_ERROR, self._status.PIPELINE_ABORTED):
                    failed = failed or result
                else:
                    cursor.set_result(self._load_rows(result), result.command_tuples or 0)
        self._read_result()  # the result of `pipeline_sync`
        libpq.exit_pipeline_mode()
        if failed is not None:
            raise self._make_error(failed)

    def _load_rows(self, result: PGresult) -> list[tuple[Any, ...]]:
        if not result.ntuples:
            return []
        self._loader.set_pgresult(result)
        return self._loader.load_rows(0, result.ntuples, tuple)

    def finish(self) -> None:
        """Commit the transaction."""
        self.execute("COMMIT")
        self.flush()

    def _check(self, result: PGresult | None) -> None:
        if result is not None and result.status == self._status.FATAL_ERROR:
            while self._read_result() is not None:
                pass
            raise self._make_error(result)

    def _read_result(self) -> PGresult | None:
        """Return the next result of the current statement, or None after its last one."""
        libpq = self._libpq
        while libpq.flush():
            self._wait(select.POLLIN | select.POLLOUT)
        while libpq.is_busy():
            self._wait(select.POLLIN)
        return libpq.get_result()

    def _wait(self, events: int) -> None:
        """Wait for one of these poll events on the socket, and read the data that has arrived."""
        self._poll.register(self._libpq.socket, events)
        ready = self._poll.poll()
        if ready and ready[0][1] & ~select.POLLOUT:
            self._libpq.consume_input()
        if events & select.POLLOUT:
            self._libpq.flush()
