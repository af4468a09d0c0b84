"""Read a shared store in PostgreSQL with code that is independent of `turngate/store`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turngate.common.database_url import ENCODE_HINT, is_database_url, parse_database_url
from turngate.errors import ConfigError
from turngate.verify.store_reader import SessionReader, UnreadableSession

SHARED_SCHEMAS = tuple(range(1, 13))  # versions 2 to 9, 11 and 12 add only data that is not read here
_BEFORE_SIDE_DATA = 9  # the last version without side data


def open_session_reader(data: str | Path) -> SessionReader:
    """Open a reader for a data folder, or for a shared store if `data` is an address such as `postgresql://…`."""
    return SharedSessionReader(str(data)) if is_database_url(str(data)) else SessionReader(Path(data))


class SharedSessionReader(SessionReader):
    """Reads the sessions in a shared store."""

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "data: a PostgreSQL store needs the extra `postgres`; run `pip install 'turngate[postgres]'`",
                param="data",
            ) from None
        address = parse_database_url(url)
        self._name = address.name
        self.path = address.folder
        self._error: type[Exception] = psycopg.Error
        try:
            connection = psycopg.connect(address.value, autocommit=True, prepare_threshold=None, connect_timeout=10)
        except psycopg.ProgrammingError:  # libpq cannot parse the address; its message may quote the password
            raise ConfigError(
                f"data: the address of the shared store {self._name} is not valid; {ENCODE_HINT}, and use only libpq parameters in the "
                "query string",
                param="data",
            ) from None
        except psycopg.Error as error:
            raise ConfigError(
                f"data: cannot connect to {self._name} ({_one_line(error)}); check the address, and that PostgreSQL "
                "accepts connections there",
                param="data",
            ) from None
        self._db: Any = _PostgresRows(connection, address.schema)
        try:
            version = self._check_version()
        except BaseException:
            connection.close()
            raise
        self._has_events = self._has_refusals = self._has_attempts = True
        self._has_side_data = version > _BEFORE_SIDE_DATA

    def _check_version(self) -> int:
        try:
            (version,) = self._db.execute("SELECT version FROM turngate_version").fetchone()
        except self._error as error:
            raise ConfigError(
                f"data: {self._name} cannot be read as a Turngate shared store ({_one_line(error)})", param="data"
            ) from None
        if version not in SHARED_SCHEMAS:
            raise ConfigError(
                f"data: {self._name} has schema version {version}, but this version of Turngate supports versions "
                f"{SHARED_SCHEMAS[0]} to {SHARED_SCHEMAS[-1]}; use the turngate version that wrote it",
                param="data",
            )
        return int(version)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield
        except self._error as error:
            raise UnreadableSession(f"data: {self._name} cannot be read ({_one_line(error)})", param="data") from None
        finally:
            self._db.end()


class _NamedRow(tuple[Any, ...]):
    """A row whose values can be accessed by index or by column name."""

    names: tuple[str, ...]

    def keys(self) -> tuple[str, ...]:
        return self.names

    def __getitem__(self, which: Any) -> Any:
        return super().__getitem__(self.names.index(which) if isinstance(which, str) else which)


def _name_columns(cursor: Any) -> Any:
    columns = tuple(column.name for column in cursor.description or ())
    return type("_Row", (_NamedRow,), {"names": columns})


class _PostgresRows:
    """A connection that accepts `?` as a placeholder and returns named rows.

    `schema` is a project's schema. If it is empty, the user's default schema is used.
    """

    def __init__(self, connection: Any, schema: str = "") -> None:
        self._connection = connection
        self._schema = schema
        self._is_reading = False  # inside a transaction

    def execute(self, sql: str, values: Sequence[object] = ()) -> Any:
        if sql.startswith("BEGIN"):
            self._is_reading = True
            return self._connection.execute(sql + self._use_schema())
        if self._is_reading or not self._schema:
            return self._read(sql, values)
        with self._connection.transaction():
            self._connection.execute(self._use_schema().lstrip("; "))
            return self._read(sql, values)

    def _use_schema(self) -> str:
        return f'; SET LOCAL search_path TO "{self._schema}"' if self._schema else ""

    def _read(self, sql: str, values: Sequence[object]) -> Any:
        return self._connection.cursor(row_factory=_name_columns).execute(sql.replace("?", "%s"), values)

    def end(self) -> None:
        self._is_reading = False
        if not self._connection.closed:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
