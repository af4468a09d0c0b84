"""Read the store with independent code, so that a bug in the gateway's reader cannot hide itself.

This module depends only on the SQLite schema and on the encodings of session settings and node info. It opens the database read-only, and
reads each session in one snapshot, even while a gateway is serving the folder.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from turngate.common.session_id import resolve_session_id
from turngate.errors import ConfigError, NoRecordings, NotFound
from turngate.types import Ids, Json, Logprobs

SCHEMAS = (2, 3, 4, 5, 6, 7, 8, 9)  # versions 7 and 8 add only tables that are not read here
_BEFORE_EVENTS = 2  # the last schema without events and outcomes
_BEFORE_ATTEMPTS = 5  # the last schema without attempts
_BEFORE_REFUSALS = 4  # the last schema without refused calls and stored replies
_BEFORE_SIDE_DATA = 8  # the last schema without side data
DECODE_ERRORS = (msgspec.DecodeError, ValueError, TypeError, RecursionError)  # raised by decoders for damaged bytes
_UNDELIVERED_XOR = 0x5EED  # applied to the checksum of a turn that is marked as not delivered


class UnreadableSession(ConfigError):
    """A session, or the list of sessions, cannot be read."""


class StoredCallSignals(msgspec.Struct, frozen=True, array_like=True):
    thread: str = ""
    parent: str = ""
    role: str = ""
    why: str = ""
    source: str = ""


class ContextFacts(msgspec.Struct, frozen=True, array_like=True):
    """The decoded `info` column of a context node."""

    preamble: bytes
    meanings: bytes
    roles: str
    has_tools: bool
    cause: str | None = None
    dialect: str = "chat"
    signals: StoredCallSignals = StoredCallSignals()
    quotes: tuple[int, ...] | None = None
    detail: str = ""


class SideFacts(msgspec.Struct, frozen=True, array_like=True):
    """A range of tokens for which a turn stores side data, and the type and shape of each value.

    `first` is the index of the first token of the range. The reply starts at index 0, and prompt tokens have negative indices.
    """

    name: str
    first: int
    count: int
    dtype: str
    shape: tuple[int, ...]


class TurnFacts(msgspec.Struct, frozen=True, array_like=True):
    """The decoded `info` column of a turn."""

    meaning: bytes
    reasoning: bytes
    exact: bytes
    finish: str
    version_start: int
    version_end: int
    started: float
    ended: float
    biases: tuple[str, ...] = ()
    sampling: bytes = b""
    reasoning_open: bool = False
    cause: str | None = None
    idempotency_key: str = ""
    capture: str = "tokens"
    fault: str = ""
    engine: str = ""
    arguments: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    verbatim: bytes = b""
    excerpts: tuple[str, ...] = ()
    text_size: int = -1
    cached: int = -1
    version_runs: tuple[tuple[int, int], ...] = ()
    side: tuple[SideFacts, ...] = ()


class StoredPolicy(msgspec.Struct, frozen=True):
    roles: tuple[str, ...] = ("main", "subagent", "unknown")
    biased: bool = False
    refused: bool = False


class StoredRule(msgspec.Struct, frozen=True):
    role: str
    source: str
    match: str = "*"
    why: str = ""


class StoredSignals(msgspec.Struct, frozen=True):
    thread: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    rules: tuple[StoredRule, ...] = ()
    models: dict[str, str] = {}


class StoredLimits(msgspec.Struct, frozen=True):
    sampled_tokens: int | None = None


class StoredConfig(msgspec.Struct, frozen=True):
    """The settings of a session that its verification uses."""

    model: str = ""
    mode: str = "exact"
    sampling: dict[str, Json] = {}
    bias: str = "neutral"
    thinking: str = "keep"
    limits: StoredLimits = StoredLimits()
    policy: StoredPolicy = StoredPolicy()
    template_kwargs: dict[str, Json] = {}
    metadata: dict[str, Json] = {}
    rollout: str = ""
    attempt: int = 1
    signals: StoredSignals = StoredSignals()


class NodeRow(msgspec.Struct, frozen=True):
    """One row of the `nodes` table."""

    id: int
    parent: int | None
    kind: str
    ids: bytes
    logprobs: bytes | None
    info: bytes
    messages: bytes
    delivered: int
    checksum: int

    def compute_checksum(self, session: int) -> int:
        """Compute the checksum that an undamaged row has. `session` is the session's key."""
        value = 0
        place = f"{session}/{self.id}/{self.parent}/{self.kind}".encode()
        for blob in (place, self.ids, self.logprobs, self.info, self.messages):
            value = zlib.crc32(blob or b"\0", value)
        return value if self.delivered else value ^ _UNDELIVERED_XOR


# The types that a node's columns must have, and the value that replaces one of a different type, since SQLite stores any type.
_CELLS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "parent": ((int, NoneType), None),
    "kind": (str, ""),
    "ids": (bytes, b""),
    "logprobs": ((bytes, NoneType), None),
    "info": (bytes, b""),
    "messages": (bytes, b""),
    "delivered": (int, 1),
    "checksum": (int, -1),
}


def _parse_row(cells: dict[str, Any]) -> tuple[NodeRow, str]:
    """Parse the row of a node. Also return a description of the values that have the wrong type, or "" if none has."""
    damaged = [name for name, (kind, _) in _CELLS.items() if not isinstance(cells[name], kind)]
    row = NodeRow(**{**cells, **{name: _CELLS[name][1] for name in damaged}})
    wrong = ", ".join(f"`{name}` is stored as {_describe_type(cells[name])}" for name in damaged)
    return row, wrong and f"it is damaged on disk: {wrong}"


def _describe_type(value: object) -> str:
    names = {str: "text", bytes: "bytes", int: "an integer", float: "a floating-point number", NoneType: "NULL"}
    return names[type(value)]


class StoredPreamble(msgspec.Struct, frozen=True):
    tools: bytes
    kwargs: bytes


class StoredOutcome(msgspec.Struct, frozen=True):
    """A row of the `outcomes` table. Its values may have any type."""

    raw: object
    recorded: object


class StoredReplyRow(msgspec.Struct, frozen=True):
    """A row of the `replies` table. Its values may have any type."""

    id: object
    node: object
    head: object
    tail: object


class StoredRefusal(msgspec.Struct, frozen=True):
    """A row of the `refusals` table. Its values may have any type."""

    call: object
    status: object
    message: object
    repeated: object


class StoredAttempt(msgspec.Struct, frozen=True):
    """A row of the `attempts` table. Its values may have any type."""

    rollout: object
    attempt: object
    state: object
    others_settled: int  # other attempts at the same rollout that count


class StoredEvent(msgspec.Struct, frozen=True):
    """A row of the `events` table. `kind` and `data` may have any type."""

    seq: int
    kind: object
    data: object


class StoredSideData(msgspec.Struct, frozen=True):
    """A row of the `side_data` table. Its values may have any type."""

    node: object
    name: object
    first: object
    dtype: object
    shape: object
    data: object
    checksum: object


class RelatedRecords(msgspec.Struct, frozen=True):
    """Records that belong to a session but not to its trace, and two settings of the store. All are read in one snapshot with the trace."""

    outcome: StoredOutcome | None = None
    refused: tuple[StoredRefusal, ...] = ()
    replies: tuple[StoredReplyRow, ...] = ()
    side: tuple[StoredSideData, ...] = ()
    attempts: tuple[StoredAttempt, ...] | None = None  # None: not stored in this folder
    deliveries: tuple[int | None, ...] = ()  # delivery number in each feed; None: the feed waits for its group
    events: tuple[StoredEvent, ...] | None = None  # by session id, oldest first; None: not stored in this folder
    pruned: int = 0  # `seq` of the newest event that was pruned
    version: int | None = 0  # the highest policy version that was ever active here; None: unreadable


class StoredContext:
    """A context node whose path to the root is complete."""

    def __init__(self, row: NodeRow, parent: StoredTurn | None, info: ContextFacts) -> None:
        self.row, self.parent, self.info = row, parent, info
        self.id = row.id
        self.ids: Ids = np.frombuffer(row.ids, np.int32)
        self.children: list[StoredTurn] = []
        self.root: StoredContext = self if parent is None else parent.root
        self.length: int = (0 if parent is None else parent.length) + len(self.ids)


class StoredTurn:
    """A sampled node whose path to the root is complete."""

    def __init__(self, row: NodeRow, parent: StoredContext, info: TurnFacts) -> None:
        self.row, self.parent, self.info = row, parent, info
        self.id = row.id
        self.ids: Ids = np.frombuffer(row.ids, np.int32)
        whole = row.logprobs is not None and len(row.logprobs) % 4 == 0
        self.logprobs: Logprobs | None = np.frombuffer(row.logprobs or b"", np.float32) if whole else None
        self.delivered = bool(row.delivered)
        self.children: list[StoredContext] = []
        self.root: StoredContext = parent.root
        self.length: int = parent.length + len(self.ids)


StoredNode = StoredContext | StoredTurn


class StoredSession:
    """A session as stored, with the part of its tree that can be built from its rows."""

    def __init__(
        self,
        record: dict[str, Any],
        rows: list[NodeRow],
        preambles: dict[bytes, StoredPreamble],
        damaged: dict[int, str],
        related: RelatedRecords,
    ) -> None:
        """Build the session's tree. `damaged` describes the values of the wrong type in the rows of nodes, by node id."""
        self.key: int = record["key"]
        self.id: str = record["id"]
        self.opened: float = record["opened"]
        self.closed: float | None = record["closed"]
        self.status: str = record["status"]
        self.stop: str = record["stop"]
        self.vocabulary: str = record["vocabulary"]
        self.folder: str = record["folder"] or ""  # folder of the tokenizer
        self.renderer: str = record["renderer"] or ""  # the renderer that used the tokenizer, if recorded
        self.config_error = ""
        try:
            self.config = msgspec.json.decode(record["config"], type=StoredConfig)
        except DECODE_ERRORS as error:
            self.config, self.config_error = StoredConfig(), str(error)
        self.rows = rows
        self.preambles = preambles
        self.related = related
        self._damaged = damaged
        self.contexts: list[StoredContext] = []
        self.turns: list[StoredTurn] = []
        self.orphans: dict[int, str] = {}  # rows that cannot be reached from a root, and why
        self._build_tree()

    def _build_tree(self) -> None:
        """Build the tree from the rows. They are ordered by id, so a valid parent comes before its children."""
        nodes: dict[int, StoredNode] = {}
        for row in self.rows:
            node = self._build_node(row, nodes)
            if isinstance(node, str):
                self.orphans[row.id] = node
                continue
            nodes[row.id] = node
            if isinstance(node, StoredContext):
                self.contexts.append(node)
                if node.parent is not None:
                    node.parent.children.append(node)
            else:
                self.turns.append(node)
                node.parent.children.append(node)

    def _build_node(self, row: NodeRow, nodes: dict[int, StoredNode]) -> StoredNode | str:
        if row.id in self._damaged:
            return self._damaged[row.id]
        if row.kind not in ("context", "sampled"):
            return f"its kind is {row.kind!r}, which is neither 'context' nor 'sampled'"
        if len(row.ids) % 4:
            return f"its ids have {len(row.ids)} bytes, which is not a multiple of 4"
        try:
            if row.kind == "context":
                context = msgspec.msgpack.decode(row.info, type=ContextFacts)
            else:
                turn = msgspec.msgpack.decode(row.info, type=TurnFacts)
        except DECODE_ERRORS as error:
            return f"its info cannot be read: {error}"
        if row.parent is None:
            return StoredContext(row, None, context) if row.kind == "context" else "it is a turn without a parent"
        if row.parent >= row.id:
            return f"its parent {row.parent} does not precede it"
        parent = nodes.get(row.parent)
        if parent is None:
            missing = "is itself not reachable from a root" if row.parent in self.orphans else "does not exist"
            return f"its parent {row.parent} {missing}"
        if row.kind == "context":
            return (
                StoredContext(row, parent, context)
                if isinstance(parent, StoredTurn)
                else f"its parent {row.parent} is also a context"
            )
        return (
            StoredTurn(row, parent, turn)
            if isinstance(parent, StoredContext)
            else f"its parent {row.parent} is also a turn"
        )

    @property
    def nodes(self) -> list[StoredNode]:
        return sorted([*self.contexts, *self.turns], key=lambda node: node.id)

    @property
    def roots(self) -> list[StoredContext]:
        return [context for context in self.contexts if context.parent is None]

    @property
    def leaves(self) -> list[StoredTurn]:
        """The turns that no other turn follows."""
        return [turn for turn in self.turns if not any(context.children for context in turn.children)]


def path(node: StoredNode | None) -> list[StoredNode]:
    """Return the nodes from the root to `node`."""
    nodes: list[StoredNode] = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def path_ids(node: StoredNode | None) -> Ids:
    parts = [n.ids for n in path(node)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


_SESSIONS = (
    "SELECT key, id, opened, closed, status, stop, vocabulary, config,"
    " (SELECT value FROM settings WHERE name = 'tokenizer:' || vocabulary) AS folder,"
    " (SELECT value FROM settings WHERE name = 'renderer:' || vocabulary) AS renderer FROM sessions"
)
_NODES = (
    "SELECT id, parent, kind, ids, logprobs, info, messages, delivered, checksum FROM nodes WHERE session=? ORDER BY id"
)
_PREAMBLES = "SELECT digest, tools, kwargs FROM preambles WHERE session=?"
_REFUSALS = "SELECT call, status, message, repeated FROM refusals WHERE session=? ORDER BY call"
_REPLIES = "SELECT id, node, head, tail FROM replies WHERE session=? ORDER BY node"
_ATTEMPTS = (
    "SELECT rollout, attempt, state, (SELECT count(*) FROM attempts AS other WHERE other.rollout=mine.rollout"
    " AND other.attempt!=mine.attempt AND other.state='settled') FROM attempts AS mine WHERE session=?"
)
_SIDE_DATA = (
    "SELECT node, name, first, dtype, shape, data, checksum FROM side_data WHERE session=? ORDER BY node, name, first"
)
_DELIVERIES = "SELECT number FROM rolled WHERE session=?"
_OUTCOME = "SELECT outcome, recorded FROM outcomes WHERE session=?"
_EVENTS = "SELECT seq, kind, data FROM events WHERE session=? ORDER BY seq"
_SETTING = "SELECT value FROM settings WHERE name=?"
_PROGRESS = "SELECT count(*), max(id), sum(CASE WHEN delivered=0 THEN 0 ELSE 1 END) FROM nodes WHERE session=?"


_NO_WAL = "; if this file is a copy, also copy turngate.db-wal from the original folder"


class SessionReader:
    """Reads the sessions in a data folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        file = folder / "turngate.db"
        if not file.is_file():
            raise NoRecordings.in_folder(folder)
        self._db = _open_database(file)
        self._db.row_factory = sqlite3.Row
        self._db.text_factory = _decode_text
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in SCHEMAS:
            self._db.close()
            hint = "; use the turngate version that wrote it" if version else _NO_WAL
            raise ConfigError(
                f"data: {file} has schema version {version}, but this version of Turngate supports versions "
                f"{SCHEMAS[0]} to {SCHEMAS[-1]}{hint}",
                param="data",
            )
        self._has_events = version > _BEFORE_EVENTS
        self._has_refusals = version > _BEFORE_REFUSALS
        self._has_attempts = version > _BEFORE_ATTEMPTS
        self._has_side_data = version > _BEFORE_SIDE_DATA

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> SessionReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session_ids(self, *, sealed: bool = False) -> list[str]:
        """Return the ids of all sessions, newest first. With `sealed`, open sessions are omitted."""
        where = " WHERE status != 'open'" if sealed else ""
        with self._snapshot():
            found = self._db.execute(f"SELECT id FROM sessions{where} ORDER BY key DESC").fetchall()
        return [str(row[0]) for row in found]  # an id that is not text matches no session, which is reported later

    def resolve_id(self, wanted: str) -> str:
        """Return the id of a session, given the id, a prefix of it, or `last`."""
        return resolve_session_id(wanted, self.session_ids())

    def read_session(self, session_id: str) -> StoredSession:
        with self._snapshot():
            record = self._db.execute(f"{_SESSIONS} WHERE id=?", (session_id,)).fetchone()
            if record is None:
                raise NotFound(f"session {session_id!r} does not exist")
            nodes = self._db.execute(_NODES, (record["key"],)).fetchall()
            stored = self._db.execute(_PREAMBLES, (record["key"],)).fetchall()
            related = self._read_related(record["key"], session_id)
        if not all(isinstance(node["id"], int) for node in nodes):
            raise UnreadableSession(f"session {session_id} is damaged on disk: the id of a node is not a number")
        rows = [_parse_row(dict(node)) for node in nodes]
        # Preambles that are not bytes are reported as missing by the contexts that refer to them.
        preambles = {
            cells[0]: StoredPreamble(*cells[1:]) for cells in stored if all(isinstance(c, bytes) for c in cells)
        }
        damaged = {row.id: wrong for row, wrong in rows if wrong}
        return StoredSession(_check_session_cells(dict(record)), [row for row, _ in rows], preambles, damaged, related)

    def _read_related(self, key: int, session_id: str) -> RelatedRecords:
        version = self._read_number("policy_version")
        if not self._has_events:
            return RelatedRecords(version=version)
        outcome = self._db.execute(_OUTCOME, (key,)).fetchone()
        refused = self._db.execute(_REFUSALS, (key,)).fetchall() if self._has_refusals else ()
        replies = self._db.execute(_REPLIES, (key,)).fetchall() if self._has_refusals else ()
        attempts = self._db.execute(_ATTEMPTS, (session_id,)).fetchall() if self._has_attempts else None
        deliveries = self._db.execute(_DELIVERIES, (key,)).fetchall() if self._has_attempts else ()
        side = self._db.execute(_SIDE_DATA, (key,)).fetchall() if self._has_side_data else ()
        events = self._db.execute(_EVENTS, (session_id,)).fetchall()
        return RelatedRecords(
            outcome=None if outcome is None else StoredOutcome(*outcome),
            refused=tuple(StoredRefusal(*cells) for cells in refused),
            replies=tuple(StoredReplyRow(*cells) for cells in replies),
            side=tuple(StoredSideData(*cells) for cells in side),
            attempts=None if attempts is None else tuple(StoredAttempt(*cells) for cells in attempts),
            deliveries=tuple(number for (number,) in deliveries),
            events=tuple(StoredEvent(*cells) for cells in events),
            pruned=self._read_number("events_pruned") or 0,
            version=version,
        )

    def _read_number(self, setting: str) -> int | None:
        """Return a numeric setting, 0 if it was never set, or None if its value is not a number."""
        row = self._db.execute(_SETTING, (setting,)).fetchone()
        try:
            return 0 if row is None else int(row[0])
        except (TypeError, ValueError):
            return None

    def has_changed(self, session: StoredSession) -> bool:
        """Return whether the session's nodes have changed since it was read."""
        state = self._db.execute(_PROGRESS, (session.key,)).fetchone()
        rows = session.rows
        return tuple(state) != (
            len(rows),
            rows[-1].id if rows else None,
            sum(r.delivered != 0 for r in rows) if rows else None,
        )

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN")
            yield
        except sqlite3.DatabaseError as error:
            raise UnreadableSession(f"data: {self.path} cannot be read ({error})", param="data") from None
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def _decode_text(raw: bytes) -> str:
    """Decode stored text. Invalid bytes are escaped."""
    return raw.decode("utf-8", "backslashreplace")


def _check_session_cells(record: dict[str, Any]) -> dict[str, Any]:
    """Return a session's row. Raise `UnreadableSession` if its status, stop reason, vocabulary or times have the wrong type.

    A tokenizer folder or renderer that is not text is replaced by "".
    """
    for name in ("status", "stop", "vocabulary"):
        if not isinstance(record[name], str):
            raise UnreadableSession(f"session {record['id']} is damaged on disk: `{name}` is not text")
    times = isinstance(record["opened"], float) and isinstance(record["closed"], (float, NoneType))
    if not times:
        raise UnreadableSession(
            f"session {record['id']} is damaged on disk: the time when it was opened or closed is not a number"
        )
    return {
        **record,
        **{name: record[name] if isinstance(record[name], str) else "" for name in ("folder", "renderer")},
    }


def _open_database(file: Path) -> sqlite3.Connection:
    """Open the database read-only.

    If that fails, for example because SQLite cannot create files in a read-only folder, open the database as immutable.
    """
    for how in ("mode=ro", "mode=ro&immutable=1"):
        db = sqlite3.connect(f"file:{quote(str(file))}?{how}", uri=True, isolation_level=None, timeout=10)
        try:
            db.execute("SELECT 1 FROM sessions LIMIT 1")
        except sqlite3.OperationalError as error:
            db.close()
            last: sqlite3.Error = error
            continue
        except sqlite3.DatabaseError as error:
            db.close()
            raise ConfigError(f"data: {file} cannot be read ({error})", param="data") from None
        except UnicodeDecodeError:  # SQLite's error message contains damaged text
            db.close()
            raise ConfigError(f"data: {file} cannot be read (its schema is damaged)", param="data") from None
        return db
    hint = _NO_WAL if "no such table" in str(last) else ""
    raise ConfigError(f"data: {file} cannot be read ({last}){hint}", param="data")
