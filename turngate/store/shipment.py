"""One ended session as data, on its way from a cell's store to the shared store.

Checksums cover a session's key, and the shared store assigns a new key. So they are verified when the session is read, and computed again
for the new key.
"""

from __future__ import annotations

from typing import Any

import msgspec

from turngate.errors import StoreError
from turngate.store.checksums import UNDELIVERED, node_checksum
from turngate.store.outbox import UnshippedSession
from turngate.store.sqlite import Store

Row = tuple[Any, ...]
_SESSION = "id, secret, CAST(config AS BLOB), opened, closed, status, vocabulary, stop"
# The tables with rows of a session, and their columns after the session's key.
SESSION_TABLES = {
    "preambles": ("digest", "tools", "kwargs"),
    "tool_calls": ("call", "tool", "repeat", "called", "answered", "answered_by", "arguments", "reply"),
    "refusals": ("call", "status", "message", "request", "repeated"),
    "replies": ("id", "node", "head", "echo", "tail", "tools"),
    "reply_echoes": ("digest", "echo"),
}
NODE_COLUMNS = ("id", "parent", "kind", "ids", "logprobs", "info", "messages", "delivered", "checksum")


class ConflictingShipment(StoreError):
    """A session cannot be shipped, because the shared store has another one with the same id."""

    def __init__(self, session: str) -> None:
        super().__init__(
            f"session {session}: the shared store already has another session with this id; "
            "session ids must be unique across all cells"
        )
        self.session = session


class ShippedEvent(msgspec.Struct, frozen=True):
    """An event with its number in the cell's store."""

    seq: int
    time: float
    kind: str
    data: bytes


class Shipment(msgspec.Struct, frozen=True):
    """A session with everything recorded for it."""

    id: str
    cell: str
    session: Row  # the columns of `SESSION_COLUMNS`
    nodes: list[Row]
    others: dict[str, list[Row]]  # rows of `SESSION_TABLES`, by table
    events: list[ShippedEvent]
    outcome: tuple[float, bytes] | None  # when it was recorded, and its JSON

    @property
    def size(self) -> int:
        """Bytes of the trace, roughly."""
        return sum(len(node[3]) + len(node[4] or b"") + len(node[5]) + len(node[6]) for node in self.nodes)

    def rekey_nodes(self, key: int) -> list[Row]:
        """Return the rows of the nodes for a session with another key."""
        return [_rekey(key, node) for node in self.nodes]

    def events_after(self, seq: int) -> list[ShippedEvent]:
        return [event for event in self.events if event.seq > seq]


SESSION_COLUMNS = ("id", "secret", "config", "opened", "closed", "status", "vocabulary", "stop")


def read_shipment(store: Store, row: UnshippedSession) -> Shipment | None:
    """Read a session, or return None if it was deleted. Raise `StoreError` if its trace is damaged."""
    with store.database.reading() as db:
        session = db.execute(f"SELECT {_SESSION} FROM sessions WHERE key=?", (row.session,)).fetchone()
        if session is None:
            return None
        name = session[0]
        columns = ", ".join(NODE_COLUMNS)
        nodes = db.execute(f"SELECT {columns} FROM nodes WHERE session=? ORDER BY id", (row.session,)).fetchall()
        others = {
            table: db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE session=?", (row.session,)).fetchall()
            for table, names in SESSION_TABLES.items()
        }
        events = db.execute("SELECT seq, time, kind, data FROM events WHERE session=? ORDER BY seq", (name,)).fetchall()
        query = "SELECT recorded, CAST(outcome AS BLOB) FROM outcomes WHERE session=?"
        outcome = db.execute(query, (row.session,)).fetchone()
    for node in nodes:
        _check_node(name, row.session, node)
    return Shipment(name, row.cell, session, nodes, others, [ShippedEvent(*event) for event in events], outcome)


def _check_node(name: str, key: int, node: Row) -> None:
    node_id, parent, kind, ids, logprobs, info, messages, delivered, checksum = node
    written = node_checksum(key, node_id, parent, kind, ids, logprobs, info, messages)
    if delivered not in (0, 1) or checksum != (written if delivered else written ^ UNDELIVERED):
        raise StoreError(f"session {name}: node {node_id} is damaged on disk; it cannot be shipped")


def _rekey(key: int, node: Row) -> Row:
    written = node_checksum(key, *node[:7])
    return (key, *node[:8], written if node[7] else written ^ UNDELIVERED)
