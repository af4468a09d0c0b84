"""A shipment: one ended session as data, on its way from a cell's store to the shared store.

A node's checksum covers its session's key, and the shared store assigns a new key. Checksums are therefore verified when a session is read
from the cell's store, and recomputed for the new key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import msgspec

from turngate.errors import StoreError
from turngate.store.binary_format import Row, encode_nodes
from turngate.store.checksums import UNDELIVERED, crc32, join_fields, key_difference, rekey_checksums
from turngate.store.outbox import UnshippedSession
from turngate.store.store import Store

_SESSION = "id, secret, CAST(config AS BLOB), opened, closed, status, vocabulary, stop"
# The tables with rows that belong to a session, each with its columns except the session's key.
SESSION_TABLES = {
    "preambles": ("digest", "tools", "kwargs"),
    "tool_calls": ("call", "tool", "repeat", "called", "answered", "answered_by", "arguments", "reply"),
    "refusals": ("call", "status", "message", "request", "repeated"),
    "replies": ("id", "node", "head", "echo", "tail", "tools"),
    "reply_echoes": ("digest", "echo"),
    "side_data": ("node", "name", "first", "dtype", "shape", "data", "checksum"),
}
_SIDE_DATA = (
    f"SELECT {', '.join(SESSION_TABLES['side_data'])} FROM side_data WHERE session=? ORDER BY node, name, first"
)
NODE_COLUMNS = ("id", "parent", "kind", "ids", "logprobs", "info", "messages", "delivered", "checksum")
# Python decodes each text value with a function call, so the two large queries return no text.
_NODES = (
    "SELECT id, parent, kind IS 'sampled', ids, logprobs, info, messages, delivered, checksum FROM nodes"
    " WHERE session=? ORDER BY id"
)
_KINDS = ("context", "sampled")
# One query for all sessions. With CROSS JOIN, SQLite reads the sessions first, and then the events of each.
_EVENTS = (
    "SELECT key, seq, time, CAST(kind AS BLOB), data FROM sessions CROSS JOIN events ON events.session=sessions.id"
    " WHERE key IN (%s)"
)


class ConflictingShipment(StoreError):
    """The shared store has a different session with the same id as a shipped session."""

    def __init__(self, session: str) -> None:
        super().__init__(
            f"session {session}: the shared store already has another session with this id; "
            "session ids must be unique across all cells"
        )
        self.session = session


class RejectedShipment(StoreError):
    """PostgreSQL has rejected a value in one of the shipped sessions. Retrying does not help."""


class VerifiedTrace(msgspec.Struct, frozen=True):
    """The nodes of a session, as stored in a cell. Their checksums are correct."""

    nodes: list[Row] = []  # the columns `NODE_COLUMNS`, with the kind as 1 (sampled) or 0 (context)
    sizes: list[int] = []  # number of bytes after the session's key that each checksum covers

    @property
    def size(self) -> int:
        """The size of the nodes in bytes."""
        return sum(self.sizes)


class Shipment(msgspec.Struct, frozen=True):
    """A session with everything recorded for it, as read from a cell's store."""

    id: str
    key: int  # key of the session in the cell's store
    cell: str
    session: Row  # the columns of `SESSION_COLUMNS`
    trace: VerifiedTrace
    others: dict[str, list[Row]]  # rows of `SESSION_TABLES`, by table
    events: list[Row]  # number in the cell's store, time, kind as UTF-8, and data
    outcome: tuple[float, bytes] | None  # when it was recorded, and its JSON
    is_reshipped: bool = False  # the shared store had the session and lost it when it was restored from a backup

    @property
    def newest_event(self) -> int:
        """The number of the session's last event in the cell's store, or 0 if it has no events."""
        return self.events[-1][0] if self.events else 0

    @property
    def size(self) -> int:
        """The approximate size of the session's rows in bytes."""
        rows = chain.from_iterable(chain.from_iterable(self.others.values()))
        others = sum(len(cell) for cell in rows if isinstance(cell, (bytes, str)))
        return self.trace.size + sum([len(event[3]) for event in self.events]) + others

    def events_after(self, seq: int) -> list[Row]:
        return [event for event in self.events if event[0] > seq] if seq else self.events


SESSION_COLUMNS = ("id", "secret", "config", "opened", "closed", "status", "vocabulary", "stop")


class ShipmentBatch(msgspec.Struct):
    """The result of reading sessions from the outbox: the shipments, and the sessions that no longer exist or are damaged."""

    shipments: list[tuple[UnshippedSession, Shipment]] = []
    deleted: list[UnshippedSession] = []
    damaged: list[tuple[UnshippedSession, str]] = []  # with the reason


def open_shipping_reader(store: Store) -> Store:
    """Open a cell's store for `read_shipments`.

    The reader's page cache is small: most pages are read only once, and a page cache that fits into the processor's cache is faster.
    """
    reader = store.open_reader()
    with reader.database.reading() as db:
        db.execute("PRAGMA cache_size=-128")  # KiB
    return reader


def read_shipments(store: Store, rows: Sequence[UnshippedSession], max_bytes: int) -> ShipmentBatch:
    """Read sessions and verify their traces. Stop once more than `max_bytes` of traces and side data have been read."""
    batch, size = ShipmentBatch(), 0
    keys = [row.session for row in rows]
    marks = ",".join("?" * len(keys))
    with store.snapshot(), store.database.reading() as db:
        sessions = dict(_split(db.execute(f"SELECT key, {_SESSION} FROM sessions WHERE key IN ({marks})", keys)))
        query = f"SELECT session, recorded, CAST(outcome AS BLOB) FROM outcomes WHERE session IN ({marks})"
        outcomes = dict(_split(db.execute(query, keys)))
        reshipped = {key for (key,) in db.execute(f"SELECT session FROM reshipped WHERE session IN ({marks})", keys)}
        others: dict[int, dict[str, list[Row]]] = {key: {table: [] for table in SESSION_TABLES} for key in keys}
        for table, names in SESSION_TABLES.items():
            if table == "side_data":
                continue  # it may be large, so it is read session by session
            query = f"SELECT session, {', '.join(names)} FROM {table} WHERE session IN ({marks}) ORDER BY session"
            for key, found in _split(db.execute(query, keys)):
                others[key][table].append(found)
        events: dict[int, list[Row]] = {key: [] for key in keys}
        for key, event in _split(db.execute(_EVENTS % marks, keys)):
            events[key].append(event)
        query = (
            f"SELECT key FROM sessions WHERE key IN ({marks}) AND EXISTS (SELECT 1 FROM side_data WHERE session=key)"
        )
        with_side_data = {key for (key,) in db.execute(query, keys)}
        for row in rows:
            if size > max_bytes:
                break
            if (session := sessions.get(row.session)) is None:
                batch.deleted.append(row)
                continue
            try:
                trace = _verify_trace(row.session, db.execute(_NODES, (row.session,)))
            except StoreError as error:
                batch.damaged.append((row, f"session {session[0]}: {error.message}"))
                continue
            if row.session in with_side_data:
                side = others[row.session]["side_data"] = db.execute(_SIDE_DATA, (row.session,)).fetchall()
                size += sum(len(piece[5]) for piece in side)
            shipment = Shipment(
                session[0],
                row.session,
                row.cell,
                session,
                trace,
                others[row.session],
                sorted(events[row.session]),
                outcomes.get(row.session),
                row.session in reshipped,
            )
            batch.shipments.append((row, shipment))
            size += trace.size
    return batch


def _split(rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
    """Split each row into its first column, the key, and the other columns."""
    return ((row[0], row[1:]) for row in rows)


def _verify_trace(key: int, nodes: Iterable[Row]) -> VerifiedTrace:
    """Verify the checksums of nodes. Raise `StoreError` if a node is damaged."""
    trace, before, crc = VerifiedTrace(), len(str(key)), crc32
    for row in nodes:
        node, parent, kind, ids, logprobs, info, messages, delivered, checksum = row
        try:
            # The checksum does not match if the stored kind is neither of the two.
            data = join_fields(key, node, parent, _KINDS[kind], ids, logprobs, info, messages)
        except TypeError:  # SQLite stores a value of any type in any column
            raise StoreError(f"node {node} is damaged on disk: a value has the wrong type") from None
        if checksum != (crc(data) if delivered == 1 else crc(data) ^ UNDELIVERED) or delivered not in (0, 1):
            raise StoreError(f"node {node} is damaged on disk")
        trace.nodes.append(row)
        trace.sizes.append(len(data) - before)
    return trace


def encode_traces(shipments: Sequence[Shipment], keys: Mapping[str, int]) -> Iterator[bytes]:
    """Encode the nodes of sessions for PostgreSQL's COPY. The sessions get new keys, so the nodes get new checksums.

    `keys` maps session ids to the new keys.
    """
    traces = [shipment.trace for shipment in shipments]
    differences = [key_difference(shipment.key, keys[shipment.id]) for shipment in shipments]
    checksums = iter(
        rekey_checksums(
            [node[-1] for trace in traces for node in trace.nodes],
            [size for trace in traces for size in trace.sizes],
            [d for d, trace in zip(differences, traces, strict=True) for _ in trace.sizes],
        )
    )
    for shipment, trace in zip(shipments, traces, strict=True):
        yield from encode_nodes(keys[shipment.id], trace.nodes, list(islice(checksums, len(trace.nodes))))
