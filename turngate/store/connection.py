"""The interface between the store and its database. `sqlite.py` implements it with SQLite, and `shared/` with PostgreSQL.

The table modules use the same SQL for both: `?` for values, `ON CONFLICT`, `RETURNING`, and the lock comments below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

Durability = Literal["process", "disk"]

# The locks last until the end of the transaction. They are comments to SQLite, where only one transaction writes at a time.
# To prevent deadlocks, transactions lock sessions first, then attempts, then feeds, and write events last.
FOR_UPDATE = "/* FOR UPDATE */"  # after a SELECT: lock its rows
# Makes outcomes enter the feeds one after the other, so that a group is completed exactly once.
LOCK_FEEDS = f"SELECT key FROM feeds ORDER BY key {FOR_UPDATE}"
LOCK_FEEDS_TABLE = (
    "/* LOCK TABLE feeds IN EXCLUSIVE MODE */"  # wait for all transactions that have locked feeds, and block new ones
)
LOCK_AUDIT = "/* LOCK TABLE audit IN EXCLUSIVE MODE */"  # so that entries are numbered in commit order


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None: ...


class StoreConnection(Protocol):
    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor: ...


Connect = Callable[[], AbstractContextManager[StoreConnection]]


class Database(Protocol):
    """A database that holds the store's tables."""

    durability: Durability

    @property
    def version(self) -> int:
        """The version of the tables (`schema.py`). It can be older than `SCHEMA_VERSION` only if the database is read-only."""

    def writing(self) -> AbstractContextManager[StoreConnection]:
        """Run a write transaction. It is rolled back if the block raises an exception."""

    def reading(self) -> AbstractContextManager[StoreConnection]:
        """Provide a connection for reads. Outside a `snapshot`, each read sees the newest data."""

    def snapshot(self) -> AbstractContextManager[None]:
        """Make all reads inside the block see the same data.

        Use this only on a store from `Store.open_reader`, because nothing else uses its connection.
        """

    def newest_event(self) -> int:
        """Return the highest event number ever assigned, even if that event was removed."""

    def change_count(self) -> int:
        """Return a number that changes whenever another process writes events. Compare it only with numbers from the same thread."""

    def used_bytes(self) -> int:
        """Return how many bytes the stored data takes up."""

    def close(self) -> None: ...
