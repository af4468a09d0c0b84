"""The store: sessions and their traces. The nodes of a turn are written in one transaction.

Each node has a checksum, so a damaged trace is detected and never trained on. `docs/decisions/0003-durability.md` gives the cost of each
durability setting.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from turngate.common.sharding import SINGLE_SHARD, Shard
from turngate.errors import StoreError
from turngate.store.attempts import AttemptTable, register_attempt, release_attempt, settle_attempt
from turngate.store.audit import AuditTable
from turngate.store.checksums import UNDELIVERED, node_checksum
from turngate.store.columns import as_name, as_number, as_text
from turngate.store.connection import FOR_UPDATE, LOCK_FEEDS, Database, Durability, StoreConnection
from turngate.store.events import EventTable, NewEvent, insert_optional_event
from turngate.store.feeds import FeedLog
from turngate.store.outbox import OutboxTable
from turngate.store.outcomes import DAMAGED_OUTCOME, DamagedOutcome, Outcomes
from turngate.store.projects import ProjectTable
from turngate.store.queries import RolloutQueries
from turngate.store.quotas import QuotaTable
from turngate.store.refusals import Refusals
from turngate.store.replies import ReplyTable
from turngate.store.restores import RestoreLog
from turngate.store.retention import Retention
from turngate.store.schema import (
    BEFORE_ATTEMPTS,
    BEFORE_EVENTS,
    BEFORE_FEEDS,
    BEFORE_PROJECTS,
    BEFORE_REFUSALS,
    BEFORE_RESTORES,
    BEFORE_SIDE_DATA,
)
from turngate.store.side_data import SideDataTable
from turngate.store.sqlite import SqliteDatabase
from turngate.store.tool_calls import ToolCalls
from turngate.trace.session import Session, SessionConfig, Status
from turngate.trace.tree import Context, ContextInfo, Node, RefusedCalls, Sampled, SampledInfo
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, SideArray

T = TypeVar("T")

log = logging.getLogger("turngate")
_context_info = msgspec.msgpack.Decoder(ContextInfo)
_sampled_info = msgspec.msgpack.Decoder(SampledInfo)
_encode_info = msgspec.msgpack.Encoder().encode
_DAMAGED_SETTINGS = "its settings are damaged on disk"
_DAMAGED_ROW = "its session record is damaged on disk"
_FIRST_ID = -(2**63)  # a damaged id may be negative
# id, parent, kind, ids, log-probabilities, info, messages, delivered, checksum
_NodeRow = tuple[int, int | None, str, bytes, bytes | None, bytes, bytes, int, int]


class SessionRow(msgspec.Struct, frozen=True):
    """One row of the sessions table. It does not include the trace."""

    key: int
    id: str
    config: SessionConfig
    opened: float
    closed: float | None
    status: Status
    stop: str
    vocabulary: str
    damaged: str = ""  # which part cannot be read; set only in listings, because loading such a session fails


class _SessionColumns(msgspec.Struct, frozen=True, array_like=True):
    """The columns of a `SessionRow` besides its key, id and settings. They are validated, since SQLite stores any type in any column."""

    opened: float
    closed: float | None
    status: Status
    stop: str
    vocabulary: str


class NewTurn(msgspec.Struct, frozen=True):
    """The nodes and data that one turn adds to a trace. `context` is None if the context is already stored."""

    session: int
    context: Context | None
    context_messages: bytes  # a JSON list
    sampled: Sampled
    message: bytes  # JSON
    preamble: tuple[bytes, bytes, bytes] | None = None  # digest, tools, kwargs; None if already stored
    event: NewEvent | None = None  # the event that announces this turn
    side: tuple[SideArray, ...] = ()


class SessionLoading:
    """A session that is being loaded. Its nodes are added one by one, in the order of their ids."""

    def __init__(self, row: SessionRow, refused: RefusedCalls | None) -> None:
        self.session = session = Session(row.id, row.key, row.config, row.opened)
        session.status, session.stop = row.status, row.stop
        session.truncated = row.stop == "context_tokens"
        session.vocabulary = row.vocabulary
        session.trace.refused = refused
        self.next_id = _FIRST_ID  # the lowest id that the next node may have
        self.fetched: deque[_NodeRow] = deque()  # nodes that were read from the store, but not added yet
        self._by_id: dict[int, Node] = {}

    def add(self, row: _NodeRow) -> None:
        """Add the next node. Raise `StoreError` if it is damaged."""
        session, trace = self.session, self.session.trace
        node_id, parent_id, kind, ids, logprobs, info, messages, delivered, checksum = row
        fields = (node_id, parent_id, kind, ids, logprobs, info, messages)
        if not _is_intact(session.key, fields, delivered, checksum):
            raise StoreError(f"session {session.id}: node {node_id} is damaged on disk; the trace cannot be used")
        parent = None if parent_id is None else self._by_id.get(parent_id)
        tokens = np.frombuffer(ids, ID_DTYPE)
        if kind == "context" and (parent is None) == (parent_id is None) and not isinstance(parent, Context):
            context = Context(node_id, parent, tokens, _decode_info(_context_info, info, session.id, node_id))
            trace.add_context(context)
            self._by_id[node_id] = context
        elif kind == "sampled" and isinstance(parent, Context):
            scores = None if logprobs is None else np.frombuffer(logprobs, LOGPROB_DTYPE)
            sampled = Sampled(node_id, parent, tokens, scores, _decode_info(_sampled_info, info, session.id, node_id))
            sampled.delivered = bool(delivered)
            trace.add_sampled(sampled)
            session.count_turn(sampled)
            session.last_used = max(session.last_used, sampled.info.ended)
            self._by_id[node_id] = sampled
        else:
            problem = _explain_misplaced(parent_id, kind)
            raise StoreError(f"session {session.id}: node {node_id} {problem}; the trace cannot be used")
        self.next_id = node_id + 1


class Store:
    """A store of sessions, their traces, and settings.

    Methods block the calling thread. Each method that writes uses one transaction, except `probe` and, for turns with side data, `commit`.
    """

    def __init__(self, folder: Path, durability: Durability = "process", shard: Shard = SINGLE_SHARD) -> None:
        self._use(SqliteDatabase(folder, durability, shard))

    @classmethod
    def reading(cls, folder: Path) -> Store:
        """Open the store in a folder read-only. Another process may be writing to it."""
        store = cls.__new__(cls)
        store._use(SqliteDatabase.open_for_reading(folder))
        return store

    def open_reader(self) -> Store:
        """Open the same store read-only, over a new connection."""
        assert isinstance(self.database, SqliteDatabase)
        return Store.reading(self.database.path.parent)

    def _use(self, database: Database) -> None:
        self.database = database
        self.durability = database.durability
        self._writing, self._reading, self.snapshot, self.close = (
            database.writing,
            database.reading,
            database.snapshot,
            database.close,
        )
        self._add_tables(database.version)

    def _add_tables(self, version: int) -> None:
        self.outbox = OutboxTable(self._writing, self._reading, has_tables=version > BEFORE_ATTEMPTS)
        self.events = EventTable(self.database, self.outbox.add_event)
        self.feeds = FeedLog(self._writing, self._reading, has_tables=version > BEFORE_FEEDS)
        self.outcomes = Outcomes(
            self._writing,
            self._reading,
            self._settle_outcome,
            self.feeds.enter_outcome,
            has_tables=version > BEFORE_EVENTS,
        )
        self.attempts = AttemptTable(self._writing, self._reading, has_tables=version > BEFORE_ATTEMPTS)
        self.tool_calls = ToolCalls(self._writing, self._reading)
        self.replies = ReplyTable(self._writing, self._reading)
        self.refusals = Refusals(self._writing, self._reading, has_tables=version > BEFORE_REFUSALS)
        self.side_data = SideDataTable(self._writing, self._reading, has_tables=version > BEFORE_SIDE_DATA)
        self.queries = RolloutQueries(self._reading)
        self.restores = RestoreLog(self._writing, self._reading)
        self.retention = Retention(self._writing, self._reading, has_tables=version > BEFORE_RESTORES)
        self.projects = ProjectTable(self._writing, self._reading, has_tables=version > BEFORE_PROJECTS)
        self.quotas = QuotaTable(self._writing, self._reading)
        self.audit = AuditTable(self._writing, self._reading, has_tables=version > BEFORE_PROJECTS)

    def add_session(
        self,
        session_id: str,
        secret: bytes,
        config: SessionConfig,
        opened: float,
        vocabulary: str = "",
        event: NewEvent | None = None,
    ) -> int:
        """Add a session and its attempt, and return the session's key.

        Raise `KeyError` if the id is taken, or `Conflict` if the attempt cannot be registered.
        """
        row = (session_id, secret, msgspec.json.encode(config), opened, "open", vocabulary)
        with self._writing() as db:
            added = db.execute(
                "INSERT INTO sessions (id, secret, config, opened, status, vocabulary) VALUES (?,?,?,?,?,?)"
                " ON CONFLICT DO NOTHING RETURNING key",
                row,
            ).fetchone()
            if added is None:
                raise KeyError(session_id)
            register_attempt(db, config.rollout or session_id, config.attempt, session_id, opened, self.outbox.cell)
            self.outbox.add_open(db, added[0])
            insert_optional_event(db, event)
            return int(added[0])

    def close_session(self, key: int, status: Status, stop: str, closed: float, event: NewEvent | None = None) -> None:
        with self._writing() as db:
            db.execute("UPDATE sessions SET status=?, stop=?, closed=? WHERE key=?", (status, stop, closed, key))
            self.outbox.add_ended(db, key, closed, cancelled=status == "cancelled")
            insert_optional_event(db, event)

    def note_stop(self, key: int, stop: str) -> None:
        """Record which limit a session has reached. The session stays open."""
        with self._writing() as db:
            db.execute("UPDATE sessions SET stop=? WHERE key=?", (stop, key))

    def delete_session(self, key: int, event: NewEvent | None = None) -> None:
        """Delete a session with its recorded data and events. `event` announces the deletion."""
        with self._writing() as db:
            sessions = db.execute(f"SELECT id FROM sessions WHERE key=? {FOR_UPDATE}", (key,)).fetchall()
            for (session_id,) in sessions:
                release_attempt(db, session_id)
            self.retention.delete_rows(db, [key])
            insert_optional_event(db, event)

    def _settle_outcome(self, db: StoreConnection, session_id: str, outcome: bytes) -> bool:
        """Settle the attempt of a session whose outcome is being written, and make the session due for shipping.

        Return whether the feeds must process the outcome. If so, lock the feeds.
        """
        self.outbox.add_outcome(db, session_id)
        counts = settle_attempt(db, session_id, outcome)
        if counts:
            db.execute(LOCK_FEEDS).fetchall()
        return counts

    def find(self, session_id: str) -> SessionRow | None:
        return next(self._rows("WHERE id=?", (session_id,)), None)

    def find_key(self, key: int) -> SessionRow | None:
        """Return the session with this key, or None. Unlike ids, keys are never reused after a session is deleted."""
        return next(self._rows("WHERE key=?", (key,)), None)

    def find_secret(self, secret: bytes) -> SessionRow | None:
        return next(self._rows("WHERE secret=?", (secret,)), None)

    def sessions(self, *, status: str | None = None, before: int | None = None, limit: int = 100) -> list[SessionRow]:
        """Return up to `limit` sessions, newest first. Damaged sessions are included and marked.

        If `status` is set, return only sessions with this status. If `before` is set, return only sessions with lower keys.
        """
        wheres, values = ["key < ?"], [before if before is not None else 2**62]
        parameters: list[object] = list(values)
        if status is not None:
            wheres.append("status = ?")
            parameters.append(status)
        where = f"WHERE {' AND '.join(wheres)} ORDER BY key DESC LIMIT ?"
        rows = list(self._rows(where, (*parameters, limit), marked=True))
        outcomes = self.outcomes.read([row.key for row in rows])
        damaged = {key for key, outcome in outcomes.items() if isinstance(outcome, DamagedOutcome)}
        return [
            msgspec.structs.replace(row, damaged=row.damaged or DAMAGED_OUTCOME) if row.key in damaged else row
            for row in rows
        ]

    def ids(self, limit: int = sys.maxsize) -> list[str]:
        """Return the ids of the newest `limit` sessions, newest first, or of all sessions. Damaged sessions are included."""
        with self._reading() as db:
            rows = db.execute("SELECT id FROM sessions ORDER BY key DESC LIMIT ?", (limit,)).fetchall()
        return [as_name(session) for (session,) in rows]

    def open_sessions(self) -> list[tuple[str, bytes, float]]:
        """Return the id, secret digest and opening time of each open session."""
        with self._reading() as db:
            rows = db.execute("SELECT id, secret, opened FROM sessions WHERE status='open'").fetchall()
        return [(as_name(session), secret, as_number(opened)) for session, secret, opened in rows]

    def _rows(self, where: str, values: Sequence[object], *, marked: bool = False) -> Iterator[SessionRow]:
        """Read session rows. If a row is damaged, raise `StoreError`, or mark the row if `marked` is set."""
        columns = "key, id, CAST(config AS BLOB), opened, closed, status, stop, vocabulary"
        with self._reading() as db:
            rows = db.execute(f"SELECT {columns} FROM sessions {where}", values).fetchall()
        for key, session_id, config, *rest in rows:
            row, damaged = _read_session_row(key, session_id, config, rest)
            if damaged and not marked:
                raise StoreError(f"session {row.id}: {damaged}")
            yield row

    def commit(self, turns: Sequence[NewTurn]) -> None:
        """Write turns in one transaction. Their side data is written first, in separate transactions."""
        for turn in turns:
            if turn.side:
                self.side_data.write(turn.session, turn.sampled.id, turn.side)
        with self._writing() as db:
            for turn in turns:
                if turn.preamble is not None:
                    db.execute(_INSERT_PREAMBLE, (turn.session, *turn.preamble))
                if turn.context is not None:  # a repeated call may already have stored it
                    row = _node_row(turn.session, turn.context, turn.context_messages)
                    db.execute(_INSERT_CONTEXT, row)
                row = _node_row(turn.session, turn.sampled, turn.message)
                if db.execute(_INSERT_SAMPLED, (*row, turn.session)).rowcount != 1:
                    raise StoreError("cannot record the turn: its session was deleted")
                insert_optional_event(db, turn.event)

    def mark_undelivered(self, session: int, node: int) -> None:
        with self._writing() as db:
            # SQLite has no XOR operator; (a | b) - (a & b) is equivalent.
            db.execute(
                "UPDATE nodes SET delivered=0, checksum=(checksum | ?) - (checksum & ?)"
                " WHERE session=? AND id=? AND delivered=1",
                (UNDELIVERED, UNDELIVERED, session, node),
            )

    def load(self, row: SessionRow) -> Session:
        """Load a session with its whole trace. Raise `StoreError` if the trace is damaged."""
        loading = SessionLoading(row, self.refusals.find(row.key))
        with self._reading() as db, closing(db.execute(_SELECT_NODES, (row.key, loading.next_id, _ALL))) as nodes:
            for node in nodes:
                loading.add(node)
        return loading.session

    def continue_loading(self, loading: SessionLoading, seconds: float) -> bool:
        """Load more nodes of a session for about `seconds` of CPU time, but at least one node if any are left.

        Return True if none are left, and False if there may be more. Raise `StoreError` if the trace is damaged.
        """
        end = time.thread_time() + seconds
        while True:
            if not loading.fetched:
                with self._reading() as db:
                    query = db.execute(_SELECT_NODES, (loading.session.key, loading.next_id, _NODES_PER_QUERY))
                    loading.fetched.extend(query.fetchall())
                if not loading.fetched:
                    return True
            loading.add(loading.fetched.popleft())
            if time.thread_time() > end:
                return False

    def messages(self, session: int) -> dict[int, bytes]:
        """Return the messages of each node as JSON: a list for a context, one message for a sampled node."""
        with self._reading() as db:
            return dict(db.execute("SELECT id, messages FROM nodes WHERE session=?", (session,)).fetchall())

    def shapes(self, first: int, last: int) -> dict[int, tuple[int, int]]:
        """Return the numbers of turns and roots of each session, by key, for keys from `first` through `last`.

        Sessions without nodes are omitted.
        """
        query = (
            "SELECT session, count(*) FILTER (WHERE kind='sampled'), count(*) FILTER (WHERE parent IS NULL)"
            " FROM nodes WHERE session BETWEEN ? AND ? GROUP BY session"
        )
        with self._reading() as db:
            return {session: (turns, roots) for session, turns, roots in db.execute(query, (first, last)).fetchall()}

    def preambles(self, session: int) -> dict[bytes, tuple[bytes, bytes]]:
        with self._reading() as db:
            rows = db.execute(
                "SELECT digest, CAST(tools AS BLOB), CAST(kwargs AS BLOB) FROM preambles WHERE session=?", (session,)
            ).fetchall()
        return {digest: (tools, kwargs) for digest, tools, kwargs in rows}

    def setting(self, name: str) -> str | None:
        with self._reading() as db:
            row = db.execute("SELECT value FROM settings WHERE name=?", (name,)).fetchone()
        return None if row is None else row[0]

    def settings_with(self, prefixes: tuple[str, ...]) -> dict[str, str]:
        """Return the settings with names that start with one of these prefixes."""
        with self._reading() as db:
            rows = db.execute("SELECT name, value FROM settings").fetchall()
        return {name: value for name, value in rows if as_text(name).startswith(prefixes)}

    def set_setting(self, name: str, value: str, event: NewEvent | None = None) -> None:
        self.set_settings({name: value}, event)

    def set_settings(self, values: Mapping[str, str], event: NewEvent | None = None) -> None:
        """Write several settings in one transaction."""
        with self._writing() as db:
            for setting in values.items():
                db.execute(_SET_SETTING, setting)
            insert_optional_event(db, event)

    def change_setting(self, name: str, change: Callable[[str | None], str]) -> None:
        """Replace a setting's value with `change(old value)` in one transaction, so that no concurrent change is lost."""
        with self._writing() as db:
            # A setting that does not exist cannot be locked, so it is added first.
            is_new = db.execute("INSERT INTO settings VALUES (?,'') ON CONFLICT DO NOTHING", (name,)).rowcount == 1
            (old,) = db.execute(f"SELECT value FROM settings WHERE name=? {FOR_UPDATE}", (name,)).fetchone()
            db.execute(_SET_SETTING, (name, change(None if is_new else old)))

    def probe(self) -> None:
        """Raise `StoreError` if the store cannot be written to. To find out, write as much data as a large turn has."""
        self.set_setting("probe", "x" * 256_000)
        self.set_setting("probe", "ok")


_SELECT_NODES = (
    "SELECT id, parent, kind, CAST(ids AS BLOB), CAST(logprobs AS BLOB), CAST(info AS BLOB), CAST(messages AS BLOB), delivered, checksum"
    " FROM nodes WHERE session=? AND id>=? ORDER BY id LIMIT ?"
)
_ALL = 2**62
# PostgreSQL's driver fetches all rows of a query at once, so `continue_loading` must not ask for the whole rest of a long trace.
_NODES_PER_QUERY = 16
_INTO_NODES = "INTO nodes (session, id, parent, kind, ids, logprobs, info, messages, checksum)"
_INSERT_CONTEXT = f"INSERT {_INTO_NODES} VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT DO NOTHING"
# Inserts only if the session exists. A separate query for this check would double the cost.
_INSERT_SAMPLED = f"INSERT {_INTO_NODES} SELECT ?,?,?,?,?,?,?,?,? WHERE EXISTS (SELECT 1 FROM sessions WHERE key=?)"
_INSERT_PREAMBLE = "INSERT INTO preambles VALUES (?,?,?,?) ON CONFLICT DO NOTHING"
_SET_SETTING = "INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value=excluded.value"


def _node_row(session: int, node: Node, messages: bytes) -> tuple[object, ...]:
    ids = node.ids.tobytes()
    info = _encode_info(node.info)
    sampled = isinstance(node, Sampled)
    logprobs = node.logprobs.tobytes() if isinstance(node, Sampled) and node.logprobs is not None else None
    parent = None if node.parent is None else node.parent.id
    kind = "sampled" if sampled else "context"
    return (
        session,
        node.id,
        parent,
        kind,
        ids,
        logprobs,
        info,
        messages,
        node_checksum(session, node.id, parent, kind, ids, logprobs, info, messages),
    )


def _is_intact(
    session: int,
    fields: tuple[int, int | None, str, bytes, bytes | None, bytes, bytes],
    delivered: int,
    checksum: int,
) -> bool:
    """Return whether a stored node matches its checksum."""
    _, _, _, ids, logprobs, info, messages = fields
    blobs = (ids, b"" if logprobs is None else logprobs, info, messages)
    if delivered not in (0, 1) or not all(isinstance(blob, bytes) for blob in blobs):
        return False
    written = node_checksum(session, *fields)
    return checksum == (written if delivered else written ^ UNDELIVERED)


def _explain_misplaced(parent: int | None, kind: str) -> str:
    if kind not in ("context", "sampled"):
        return f"has the unknown kind {kind!r}"
    if parent is None:
        return "has no parent, but a sampled node needs a parent"
    return f"is not a valid child of node {parent}"


def _read_session_row(key: int, session_id: object, config: bytes, rest: Sequence[object]) -> tuple[SessionRow, str]:
    """Build a session's row from its columns. Also return what is damaged, or an empty string. Defaults replace damaged values."""
    settings, columns = SessionConfig(), _SessionColumns(0.0, None, "sealed", "", "")
    damaged = "" if isinstance(session_id, str) else _DAMAGED_ROW
    try:
        columns = msgspec.convert(rest, _SessionColumns)
    except msgspec.ValidationError:
        damaged = _DAMAGED_ROW
    try:
        settings = msgspec.json.decode(config, type=SessionConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        damaged = f"{_DAMAGED_SETTINGS} ({error})"
    more = msgspec.structs.asdict(columns)
    row = SessionRow(key=key, id=as_name(session_id), config=settings, **more, damaged=damaged.partition(" (")[0])
    return row, damaged


def _decode_info(decoder: msgspec.msgpack.Decoder[T], info: bytes, session: str, node: int) -> T:
    try:
        return decoder.decode(info)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"session {session}: node {node} cannot be decoded ({error}); the trace cannot be used"
        ) from None
