"""The store, read by nobody's code but this file's: a bug in the gateway's own reader cannot hide itself here.

Knows the schema of `store/sqlite.py` and its tables and the encoding of a node's facts, and nothing else of the gateway. Opens the
file read-only, one snapshot per session, whether a gateway serves the folder or not.
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

from turngate.errors import ConfigError, NotFound
from turngate.types import Ids, Json, Logprobs

SCHEMAS = (2, 3, 4)  # the fourth adds tables that are not read here
_BEFORE_EVENTS = 2  # and outcomes
DECODE_ERRORS = (msgspec.DecodeError, ValueError, TypeError, RecursionError)  # what damaged bytes make a decoder raise
_UNDELIVERED_XOR = 0x5EED  # the checksum of a turn that is marked as not delivered differs by this


class UnreadableSession(ConfigError):
    """A session is there, and cannot be read."""


class StoredCallSignals(msgspec.Struct, frozen=True, array_like=True):
    thread: str = ""
    parent: str = ""
    role: str = ""
    why: str = ""


class ContextFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a context besides its ids."""

    preamble: bytes
    meanings: bytes
    roles: str
    has_tools: bool
    cause: str | None = None
    dialect: str = "chat"
    signals: StoredCallSignals = StoredCallSignals()


class TurnFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a turn besides its ids and log-probabilities."""

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


class StoredPolicy(msgspec.Struct, frozen=True):
    roles: tuple[str, ...] = ("main", "subagent")
    biased: bool = False


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
    """What of a session's settings its trace has to agree with."""

    model: str = ""
    mode: str = "exact"
    sampling: dict[str, Json] = {}
    bias: str = "neutral"
    thinking: str = "keep"
    limits: StoredLimits = StoredLimits()
    policy: StoredPolicy = StoredPolicy()
    template_kwargs: dict[str, Json] = {}
    metadata: dict[str, Json] = {}
    signals: StoredSignals = StoredSignals()


class NodeRow(msgspec.Struct, frozen=True):
    """One row of the `nodes` table, as it is."""

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
        """What its checksum has to be."""
        value = 0
        place = f"{session}/{self.id}/{self.parent}/{self.kind}".encode()
        for blob in (place, self.ids, self.logprobs, self.info, self.messages):
            value = zlib.crc32(blob or b"\0", value)
        return value if self.delivered else value ^ _UNDELIVERED_XOR


# What the cells of a node have to be, and what stands in for one that is something else: SQLite keeps whatever it is given.
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
    """A node's row, and what is wrong with the kind of its cells."""
    damaged = [name for name, (kind, _) in _CELLS.items() if not isinstance(cells[name], kind)]
    row = NodeRow(**{**cells, **{name: _CELLS[name][1] for name in damaged}})
    wrong = ", ".join(f"`{name}` is stored as {_describe_type(cells[name])}" for name in damaged)
    return row, wrong and f"it is damaged on disk: {wrong}"


def _describe_type(value: object) -> str:
    names = {str: "text", bytes: "bytes", int: "a number", float: "a number with a fraction", NoneType: "nothing"}
    return names[type(value)]


class StoredPreamble(msgspec.Struct, frozen=True):
    tools: bytes
    kwargs: bytes


class StoredOutcome(msgspec.Struct, frozen=True):
    """A row of the `outcomes` table, whatever its cells are."""

    raw: object
    recorded: object


class StoredEvent(msgspec.Struct, frozen=True):
    """A row of the `events` table. `data` is whatever its cell is."""

    seq: int
    kind: object
    data: object


class RelatedRecords(msgspec.Struct, frozen=True):
    """What lies beside a session's own tables, read in the same moment."""

    outcome: StoredOutcome | None = None
    events: tuple[StoredEvent, ...] | None = None  # of its id, the oldest first; None: this folder stores none
    pruned: int = 0  # the number of the newest event that was removed for its age
    version: int | None = 0  # of the policy: the highest that ever was in force here; None: it cannot be read


class StoredContext:
    """A context whose way to the root is whole."""

    def __init__(self, row: NodeRow, parent: StoredTurn | None, info: ContextFacts) -> None:
        self.row, self.parent, self.info = row, parent, info
        self.id = row.id
        self.ids: Ids = np.frombuffer(row.ids, np.int32)
        self.children: list[StoredTurn] = []
        self.root: StoredContext = self if parent is None else parent.root
        self.length: int = (0 if parent is None else parent.length) + len(self.ids)


class StoredTurn:
    """A turn, likewise."""

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
    """A session as it lies in the store, and as much of a tree as its rows make."""

    def __init__(
        self,
        known: dict[str, Any],
        rows: list[NodeRow],
        preambles: dict[bytes, StoredPreamble],
        damaged: dict[int, str],
        related: RelatedRecords,
    ) -> None:
        """`damaged`: nodes with cells that are not what they have to be."""
        self.key: int = known["key"]
        self.id: str = known["id"]
        self.opened: float = known["opened"]
        self.closed: float | None = known["closed"]
        self.status: str = known["status"]
        self.stop: str = known["stop"]
        self.vocabulary: str = known["vocabulary"]
        self.folder: str = known["folder"] or ""  # of the tokenizer
        self.renderer: str = known["renderer"] or ""  # what rendered with it, where that is recorded
        self.config_error = ""
        try:
            self.config = msgspec.json.decode(known["config"], type=StoredConfig)
        except DECODE_ERRORS as error:
            self.config, self.config_error = StoredConfig(), str(error)
        self.rows = rows
        self.preambles = preambles
        self.related = related
        self._damaged = damaged
        self.contexts: list[StoredContext] = []
        self.turns: list[StoredTurn] = []
        self.orphans: dict[int, str] = {}  # rows that are on no way from a root, and why
        self._build_tree()

    def _build_tree(self) -> None:
        """Rows in the order of their ids: a parent comes before its children, or it is none."""
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
            return f"its kind is {row.kind!r}"
        if len(row.ids) % 4:
            return f"its ids are {len(row.ids)} bytes, which is no number of ids"
        try:
            if row.kind == "context":
                context = msgspec.msgpack.decode(row.info, type=ContextFacts)
            else:
                turn = msgspec.msgpack.decode(row.info, type=TurnFacts)
        except DECODE_ERRORS as error:
            return f"its facts cannot be read: {error}"
        if row.parent is None:
            return StoredContext(row, None, context) if row.kind == "context" else "a turn hangs on nothing"
        if row.parent >= row.id:
            return f"its parent {row.parent} does not come before it"
        parent = nodes.get(row.parent)
        if parent is None:
            missing = "is on no way from a root itself" if row.parent in self.orphans else "does not exist"
            return f"its parent {row.parent} {missing}"
        if row.kind == "context":
            return (
                StoredContext(row, parent, context)
                if isinstance(parent, StoredTurn)
                else f"its parent {row.parent} is a context too"
            )
        return (
            StoredTurn(row, parent, turn)
            if isinstance(parent, StoredContext)
            else f"its parent {row.parent} is a turn too"
        )

    @property
    def nodes(self) -> list[StoredNode]:
        return sorted([*self.contexts, *self.turns], key=lambda node: node.id)

    @property
    def roots(self) -> list[StoredContext]:
        return [context for context in self.contexts if context.parent is None]

    @property
    def leaves(self) -> list[StoredTurn]:
        """Turns that no other turn follows."""
        return [turn for turn in self.turns if not any(context.children for context in turn.children)]


def path(node: StoredNode | None) -> list[StoredNode]:
    """From the root to `node`."""
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
_OUTCOME = "SELECT outcome, recorded FROM outcomes WHERE session=?"
_EVENTS = "SELECT seq, kind, data FROM events WHERE session=? ORDER BY seq"
_SETTING = "SELECT value FROM settings WHERE name=?"
_PROGRESS = "SELECT count(*), max(id), sum(delivered) FROM nodes WHERE session=?"


_NO_WAL = "; if it is a copy, was turngate.db-wal beside it copied too?"


class StoreReader:
    """A data folder, to be looked at."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        file = folder / "turngate.db"
        if not file.is_file():
            raise ConfigError(f"data: there is no {file}; give the --data folder of a gateway", param="data")
        self._db = _open_database(file)
        self._db.row_factory = sqlite3.Row
        self._db.text_factory = _decode_text
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in SCHEMAS:
            self._db.close()
            hint = "" if version else _NO_WAL
            raise ConfigError(
                f"data: {file} has schema {version}, this version knows {SCHEMAS[-1]}{hint}", param="data"
            )
        self._keeps_events = version > _BEFORE_EVENTS

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session_ids(self, *, sealed: bool = False) -> list[str]:
        """Ids, the newest first."""
        where = " WHERE status != 'open'" if sealed else ""
        found = self._db.execute(f"SELECT id FROM sessions{where} ORDER BY key DESC")
        return [str(row[0]) for row in found]  # one that is no text finds no session, which is told then

    def resolve_id(self, wanted: str) -> str:
        """A session by its id, by the beginning of it, or `last`."""
        known = self.session_ids()
        if not known:
            raise NotFound("session: none has been recorded here")
        if wanted == "last":
            return known[0]
        fitting = [wanted] if wanted in known else [session for session in known if session.startswith(wanted)]
        if len(fitting) != 1:
            wrong = f"is the beginning of {len(fitting)} ids; give more of it" if fitting else "is not recorded here"
            raise NotFound(f"session: {wanted!r} {wrong}; the newest is {known[0]}")
        return fitting[0]

    def read_session(self, session_id: str) -> StoredSession:
        with self._snapshot():
            known = self._db.execute(f"{_SESSIONS} WHERE id=?", (session_id,)).fetchone()
            if known is None:
                raise NotFound(f"session: there is no {session_id!r} here")
            nodes = self._db.execute(_NODES, (known["key"],)).fetchall()
            stored = self._db.execute(_PREAMBLES, (known["key"],)).fetchall()
            related = self._read_related(known["key"], session_id)
        if not all(isinstance(node["id"], int) for node in nodes):
            raise UnreadableSession(f"session: {session_id} is damaged on disk: the number of a node is none")
        rows = [_parse_row(dict(node)) for node in nodes]
        # Those that are no bytes are missed where a context refers to them.
        preambles = {
            cells[0]: StoredPreamble(*cells[1:]) for cells in stored if all(isinstance(c, bytes) for c in cells)
        }
        damaged = {row.id: wrong for row, wrong in rows if wrong}
        return StoredSession(_check_session_cells(dict(known)), [row for row, _ in rows], preambles, damaged, related)

    def _read_related(self, key: int, session_id: str) -> RelatedRecords:
        version = self._read_number("policy_version")
        if not self._keeps_events:
            return RelatedRecords(version=version)
        ended = self._db.execute(_OUTCOME, (key,)).fetchone()
        told = self._db.execute(_EVENTS, (session_id,)).fetchall()
        return RelatedRecords(
            outcome=None if ended is None else StoredOutcome(*ended),
            events=tuple(StoredEvent(*cells) for cells in told),
            pruned=self._read_number("events_pruned") or 0,
            version=version,
        )

    def _read_number(self, setting: str) -> int | None:
        """0 where it was never set, None where it is no number."""
        row = self._db.execute(_SETTING, (setting,)).fetchone()
        try:
            return 0 if row is None else int(row[0])
        except (TypeError, ValueError):
            return None

    def has_changed(self, session: StoredSession) -> bool:
        """Whether something was recorded since it was read."""
        state = self._db.execute(_PROGRESS, (session.key,)).fetchone()
        rows = session.rows
        return tuple(state) != (
            len(rows),
            rows[-1].id if rows else None,
            sum(r.delivered for r in rows) if rows else None,
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
    """Text of the store, however damaged: what is none shows its bytes."""
    return raw.decode("utf-8", "backslashreplace")


def _check_session_cells(known: dict[str, Any]) -> dict[str, Any]:
    """A session's own row, if its cells are of the kinds that they have to be."""
    for name in ("status", "stop", "vocabulary"):
        if not isinstance(known[name], str):
            raise UnreadableSession(f"session: {known['id']} is damaged on disk: `{name}` is no text")
    times = isinstance(known["opened"], float) and isinstance(known["closed"], (float, NoneType))
    if not times:
        raise UnreadableSession(f"session: {known['id']} is damaged on disk: it was opened or closed at no time")
    return {**known, **{name: known[name] if isinstance(known[name], str) else "" for name in ("folder", "renderer")}}


def _open_database(file: Path) -> sqlite3.Connection:
    """Read-only; as it lies there where not even a lock can be written beside it."""
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
        return db
    hint = _NO_WAL if "no such table" in str(last) else ""
    raise ConfigError(f"data: {file} cannot be read ({last}){hint}", param="data")
