"""A session with all its recorded data, in a form that does not depend on a particular store.

`read_session` reads a session from one store, and `write_session` adds it to another. Keys, event numbers and node checksums are omitted,
because they are meaningful only within one store. Node checksums are verified when a session is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from turngate.errors import StoreError
from turngate.store.attempts import AttemptRow
from turngate.store.checksums import UNDELIVERED, node_checksum
from turngate.store.connection import StoreConnection
from turngate.store.shipment import NODE_COLUMNS, SESSION_COLUMNS, SESSION_TABLES
from turngate.store.store import Store

Row = tuple[Any, ...]
ARCHIVED_TABLES = {**SESSION_TABLES, "events": ("time", "kind", "data")}  # the columns of each table
ARCHIVED_NODE = NODE_COLUMNS[:-1]  # without the checksum
_ATTEMPT = AttemptRow.__struct_fields__
_SESSION = ", ".join("CAST(config AS BLOB)" if name == "config" else name for name in SESSION_COLUMNS)


class ArchivedSession(msgspec.Struct, frozen=True):
    """A session as rows of the store's tables. The columns are listed in `SESSION_COLUMNS`, `ARCHIVED_NODE` and `ARCHIVED_TABLES`."""

    session: Row
    nodes: list[Row]
    # By table. An empty `side_data` is omitted, so that digests from before this table existed still match.
    tables: dict[str, list[Row]]
    attempts: list[AttemptRow]
    outcome: tuple[float, bytes] | None  # when it was recorded, and its JSON

    @property
    def id(self) -> str:
        return str(self.session[0])

    @property
    def secret(self) -> bytes:
        return bytes(self.session[1])

    @property
    def size(self) -> int:
        """The approximate size of the session in bytes."""
        rows = (*self.nodes, *(row for table in self.tables.values() for row in table))
        return sum(50 + sum(len(cell) for cell in row if isinstance(cell, (bytes, str))) for row in rows)

    def compute_digest(self) -> bytes:
        """Return a digest of the whole session. It is the same in every store that has the session."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="sorted")).digest()


def read_session(db: StoreConnection, key: int) -> ArchivedSession:
    """Read a session with everything recorded for it. This must run inside a snapshot.

    Raise `StoreError` if the session was deleted, or if a node does not match its checksum.
    """
    session = db.execute(f"SELECT {_SESSION} FROM sessions WHERE key=?", (key,)).fetchone()
    if session is None:
        raise StoreError("the session was deleted")
    nodes = db.execute(f"SELECT {', '.join(NODE_COLUMNS)} FROM nodes WHERE session=? ORDER BY id", (key,)).fetchall()
    for *cells, delivered, checksum in nodes:
        try:
            expected = node_checksum(key, *cells)
        except TypeError:  # SQLite stores a value of any type in any column
            raise StoreError(f"node {cells[0]} is damaged on disk: a value has the wrong type") from None
        if delivered not in (0, 1) or checksum != (expected if delivered else expected ^ UNDELIVERED):
            raise StoreError(f"node {cells[0]} is damaged on disk")
    tables = {
        table: db.execute(
            f"SELECT {', '.join(names)} FROM {table} WHERE session=? ORDER BY {', '.join(names[:3])}", (key,)
        ).fetchall()
        for table, names in SESSION_TABLES.items()
    }
    if not tables["side_data"]:
        del tables["side_data"]
    events = "SELECT time, kind, data FROM events WHERE session=? ORDER BY seq"
    attempts = f"SELECT {', '.join(_ATTEMPT)} FROM attempts WHERE session=? ORDER BY rollout, attempt"
    return ArchivedSession(
        tuple(session),
        [tuple(row[:-1]) for row in nodes],
        {name: [tuple(row) for row in rows] for name, rows in tables.items()}
        | {"events": [tuple(row) for row in db.execute(events, (session[0],)).fetchall()]},
        [AttemptRow(*row) for row in db.execute(attempts, (session[0],)).fetchall()],
        db.execute("SELECT recorded, CAST(outcome AS BLOB) FROM outcomes WHERE session=?", (key,)).fetchone(),
    )


def write_session(store: Store, archived: ArchivedSession) -> bool:
    """Add a session to a store. Return False if the store already has it.

    The session is not added to any feed. Raise `StoreError` if the store has a different session with the same id.
    """
    with store.database.writing() as db:
        query = "SELECT CAST(secret AS BLOB) FROM sessions WHERE id=?"
        if (known := db.execute(query, (archived.id,)).fetchone()) is not None:
            if bytes(known[0]) != archived.secret:
                raise StoreError(
                    f"session {archived.id}: the store already has another session with this id; load the archive into a "
                    "different --data folder"
                )
            return False
        marks = ",".join("?" * len(SESSION_COLUMNS))
        columns = ", ".join(SESSION_COLUMNS)
        query = f"INSERT INTO sessions ({columns}) VALUES ({marks}) RETURNING key"
        (key,) = db.execute(query, archived.session).fetchone()
        for *cells, delivered in archived.nodes:
            checksum = node_checksum(key, *cells) ^ (0 if delivered else UNDELIVERED)
            _insert(db, "nodes", ("session", *NODE_COLUMNS), (key, *cells, delivered, checksum))
        for table, names in SESSION_TABLES.items():
            for row in archived.tables.get(table, ()):
                _insert(db, table, ("session", *names), (key, *row))
        if archived.outcome is not None:
            _insert(db, "outcomes", ("session", "recorded", "outcome"), (key, *archived.outcome))
        for attempt in archived.attempts:
            _insert(db, "attempts", _ATTEMPT, msgspec.structs.astuple(attempt))
        for row in archived.tables["events"]:
            _insert(db, "events", ("session", *ARCHIVED_TABLES["events"]), (archived.id, *row))
    return True


def _insert(db: StoreConnection, table: str, columns: Sequence[str], row: Sequence[Any]) -> None:
    marks = ",".join("?" * len(columns))
    db.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) ON CONFLICT DO NOTHING", row)


def tokenizer_settings(store: Store) -> Mapping[str, str]:
    """Return the settings that name the tokenizers and renderers of a store's sessions."""
    return store.settings_with(("tokenizer:", "renderer:"))
