"""Write shipments to the shared store. Each session is written with its trace, outcome, attempt, feed entries and events.

Shipments that are passed to `ShipmentWriter.write` together are written in one transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from turngate.errors import StoreError
from turngate.store.attempts import outcome_state, supersede_attempts
from turngate.store.binary_format import (
    COPY_HEADER,
    COPY_TRAILER,
    Row,
    encode_text,
    make_bytes_array,
    make_float_array,
    make_text_array,
)
from turngate.store.connection import Cursor, StoreConnection
from turngate.store.events import NewEvent
from turngate.store.feeds import make_entry
from turngate.store.outbox import OpenAttempt, ShippingPosition
from turngate.store.outcomes import decode_outcome
from turngate.store.shared.cells import lock_cells
from turngate.store.shared.failures import is_rejected_value
from turngate.store.shared.pipeline import PipelinedConnection
from turngate.store.shared.retention import FIND_REMOVED
from turngate.store.shared.store import SharedStore
from turngate.store.shipment import (
    NODE_COLUMNS,
    SESSION_COLUMNS,
    SESSION_TABLES,
    ConflictingShipment,
    RejectedShipment,
    Shipment,
    encode_traces,
)

log = logging.getLogger("turngate")
_TYPES = {  # columns that are not of type text
    **dict.fromkeys(("digest", "tools", "kwargs", "arguments", "reply", "request", "head", "tail"), "bytea"),
    **dict.fromkeys(("ids", "logprobs", "info", "messages", "data", "secret", "config", "outcome"), "bytea"),
    **dict.fromkeys(
        ("key", "newest", "session", "parent", "node", "delivered", "checksum", "call", "repeated", "seq", "bytes"),
        "int8",
    ),
    **dict.fromkeys(("called", "answered", "time", "opened", "closed", "recorded", "shipped"), "float8"),
}
_OWN_TYPES = {  # columns whose type depends on the table
    "nodes": {"id": "int8"},
    "side_data": {"first": "int8"},
    "refusals": {"status": "int8"},
    "replies": {"echo": "bytea"},
    "reply_echoes": {"echo": "bytea"},
}


_NEW_KEYS = "SELECT nextval(pg_get_serial_sequence('sessions', 'key')) FROM generate_series(1, ?)"
_FIND_KNOWN = (
    "SELECT id, key, secret, coalesce(cell, ''), coalesce(newest, 0), outcome FROM sessions"
    " LEFT JOIN shipments ON shipments.session=key LEFT JOIN outcomes ON outcomes.session=key WHERE id=ANY(?)"
    " FOR SHARE OF sessions"  # so that none of these sessions is removed meanwhile
)
_REPLACE_OUTCOME = (
    "INSERT INTO outcomes (session, recorded, outcome) VALUES (?,?,?) ON CONFLICT (session)"
    " DO UPDATE SET recorded=excluded.recorded, outcome=excluded.outcome"
)
_GIVEN_UP = "SELECT session FROM attempts WHERE session=ANY(?) AND state='superseded'"
_RIVALS = "SELECT rollout, attempt, state FROM attempts WHERE rollout=ANY(?) AND state<>'superseded'"
_INSERT_EVENTS = (
    "WITH counter AS (UPDATE event_counter SET newest=newest+? RETURNING newest)"
    " INSERT INTO events (seq, time, session, kind, data) SELECT newest-?+number, at, session, kind, data"
    " FROM counter, unnest(?::float8[], ?::text[], ?::text[], ?::bytea[]) WITH ORDINALITY"
    " AS new(at, session, kind, data, number)"
)


class _NamedSettings(msgspec.Struct, frozen=True):
    """The settings of a session that name its rollout and attempt."""

    rollout: str = ""
    attempt: int = 1


_settings = msgspec.json.Decoder(_NamedSettings)


class _Known(msgspec.Struct, frozen=True):
    """A session that the shared store already has."""

    key: int
    cell: str
    newest: int  # number of its newest event in the cell's store
    outcome: bytes | None

    def is_replaced_by(self, shipment: Shipment) -> bool:
        """Return whether a shipment has a newer outcome than the shared store.

        A different outcome is not always newer: the cell may be running on an old copy of its folder.
        """
        if shipment.outcome is None or shipment.outcome[1] == self.outcome:
            return False
        return self.outcome is None or any(event[2] == b"outcome" for event in shipment.events_after(self.newest))


class _Writing(msgspec.Struct, frozen=True):
    """The shipments that one transaction writes, and what the shared store already knows about their sessions."""

    shipments: Sequence[Shipment]
    known: dict[str, _Known]
    keys: dict[str, int]  # keys in the shared store, by session id
    lost: set[str]  # ids of lost cells

    @property
    def new(self) -> list[Shipment]:
        return [shipment for shipment in self.shipments if shipment.id not in self.known]

    @property
    def old(self) -> list[Shipment]:
        """The shipments of sessions that were shipped before."""
        return [shipment for shipment in self.shipments if shipment.id in self.known]

    def cell_of(self, shipment: Shipment) -> str:
        """Return the id of the cell that served a session. This is the cell that shipped it first, even if another cell ships it now."""
        known = self.known.get(shipment.id)
        return known.cell if known is not None and known.cell else shipment.cell

    def find_changed_outcomes(self) -> list[tuple[Shipment, bytes]]:
        """Return the shipments whose outcome is new to the shared store or newer than the one there, each with its outcome."""
        return [
            (shipment, shipment.outcome[1])
            for shipment in self.shipments
            if shipment.outcome is not None
            and (shipment.id not in self.known or self.known[shipment.id].is_replaced_by(shipment))
        ]


class ShipmentWriter:
    """Writes shipments. If a session is shipped again, only what may have changed is written, such as the outcome and later events."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._compression: str | None = None  # statement that chooses the compression; None: not determined yet

    def write(self, shipments: Sequence[Shipment]) -> None:
        """Write shipments in one transaction. If this fails, none of them is written.

        Raise `ConflictingShipment` or `RejectedShipment` if one of them can never be written.
        """
        if not shipments:
            return
        try:
            self._write(shipments)
        except StoreError as error:
            if is_rejected_value(error.__cause__):
                raise RejectedShipment(error.message) from error
            raise

    def _write(self, shipments: Sequence[Shipment]) -> None:
        if self._compression is None:
            self._compression = self._choose_compression()
        with self._store.database.pipelining(self._compression) as db:
            writing = self._start(db, shipments)
            if not writing.shipments:
                return
            self._copy_traces(db, writing)
            self._write_sessions(db, writing)
            for shipment in writing.shipments:
                if shipment.is_reshipped and shipment.id not in writing.known:
                    query = "INSERT INTO reshipped VALUES (?) ON CONFLICT DO NOTHING"
                    db.execute(query, (writing.keys[shipment.id],))
            attempts = _AttemptNames(db, writing)
            superseded = attempts.supersede(db)
            changed = writing.find_changed_outcomes()
            settle_attempts(db, [(s.id, s.session[5], outcome) for s, outcome in changed])
            entries = [
                make_entry(db, writing.keys[s.id], s.id, outcome, attempts.rollout_of(s))
                for s, outcome in changed
                if s.id not in superseded and s.session[5] != "cancelled"
            ]
            completed = self._store.feeds.enter(db, entries) if entries else []
            self._write_events(db, writing, completed)  # last: see `insert_event`

    def announce(self, attempts: Sequence[OpenAttempt]) -> set[str]:
        """Register open sessions as running attempts of their cell, so that the cell's lease protects them.

        Return the ids of the sessions whose attempts are superseded or replaced. Their outcomes would not count.
        """
        names = {a.session: _decode_name(a.config, a.session) for a in attempts}
        with self._store.database.pipelining() as db:
            rows = _register(db, [(*names[a.session], a.session, a.cell, a.opened) for a in attempts])
            given_up = db.execute(_GIVEN_UP, (list(names),))
            rivals = db.execute(_RIVALS, (sorted({rollout for rollout, _ in names.values()}),))
            owners = {(rollout, attempt): session for rollout, attempt, session, _ in rows.fetchall()}
            superseded = {session for (session,) in given_up.fetchall()}
            others = rivals.fetchall()
        for session, (rollout, attempt) in names.items():
            if owners[rollout, attempt] != session or _is_replaced(rollout, attempt, others):
                superseded.add(session)
        return superseded

    # ── after the store was restored from a backup ──────────────────────────────────────────────────────────────

    def find_history(self, position: ShippingPosition) -> str:
        """Return the name of the store's current history.

        If the cell knows this history, but the session that it shipped last is missing, record that the store was restored. This starts a
        new history, whose name is returned.
        """
        history = self._store.restores.history()
        if position.last is not None and position.history == history and self.find_missing([(position.last, 0)]):
            log.warning(
                "session %s, which this cell has shipped, is missing from the shared store, so the store was probably restored from a "
                "backup; the cell ships missing sessions again",
                position.last,
            )
            return self._store.restores.note(history)
        return history

    def find_missing(self, sessions: Sequence[tuple[str, int]]) -> set[str]:
        """Return the ids of the given sessions that are missing from the store, or whose newest event is missing there.

        Each session is given as its id and the number of its newest event. Sessions that were deleted from the shared store do not
        count as missing.
        """
        query = (
            "SELECT wanted.id FROM unnest(?::text[], ?::int8[]) AS wanted(id, newest) LEFT JOIN sessions ON sessions.id=wanted.id"
            " LEFT JOIN shipments ON shipments.session=sessions.key WHERE (sessions.key IS NULL OR shipments.newest<wanted.newest)"
            " AND NOT EXISTS (SELECT 1 FROM removed_sessions WHERE removed_sessions.id=wanted.id)"
            " AND NOT EXISTS (SELECT 1 FROM events WHERE events.session=wanted.id AND kind='deleted')"  # of older versions
        )
        columns = [list(column) for column in zip(*sessions, strict=True)]
        with self._store.database.reading() as db:
            return {session for (session,) in db.execute(query, columns).fetchall()}

    def _choose_compression(self) -> str:
        """Return SQL that makes PostgreSQL compress traces with lz4, or an empty string if the server does not support lz4.

        The default compression takes twice the CPU time for the same size.
        """
        query = "SELECT 1 FROM pg_settings WHERE name='default_toast_compression' AND 'lz4'=ANY(enumvals)"
        with self._store.database.reading() as db:
            is_known = db.execute(query).fetchone() is not None
        return "; SET LOCAL default_toast_compression='lz4'" if is_known else ""

    def _start(self, db: PipelinedConnection, shipments: Sequence[Shipment]) -> _Writing:
        """Find the sessions that the shared store already has, lock the cells of all shipments, and choose keys for the new sessions.

        Shipments of removed sessions, and shipments older than what the store has, are ignored.
        """
        secrets = {shipment.id: shipment.session[1] for shipment in shipments}
        found = db.execute(_FIND_KNOWN, (list(secrets),))
        removed = db.execute(FIND_REMOVED, (list(secrets),))  # after the locks, to see a removal that they waited for
        cells = lock_cells(db, {shipment.cell for shipment in shipments})
        numbers = db.execute(_NEW_KEYS, (len(shipments),))
        db.flush()
        gone = {name for name, secret in removed.fetchall() if secret == secrets[name]}
        if gone:
            log.warning(
                "ignoring shipped sessions that were already removed from the shared store (sessions: %d)", len(gone)
            )
        shipments = [shipment for shipment in shipments if shipment.id not in gone]
        known = {}
        for name, key, secret, cell, newest, outcome in found.fetchall():
            if secret != secrets[name]:
                raise ConflictingShipment(name)
            known[name] = _Known(key, cell, newest, outcome)
        old = {s.id for s in shipments if s.id in known and known[s.id].newest > s.newest_event}
        if old:
            log.warning(
                "ignoring shipped sessions that are out of date (sessions: %d, such as %s): the shared store has newer states; "
                "check whether their cell is running on an old copy of its folder",
                len(old),
                min(old),
            )
        shipments = [shipment for shipment in shipments if shipment.id not in old]
        states = dict(cells.fetchall())
        if earlier := {one.cell for one in known.values() if one.cell} - {shipment.cell for shipment in shipments}:
            states |= dict(lock_cells(db, earlier).fetchall())
        served = {shipment.cell for shipment in shipments} | earlier
        if unknown := served - states.keys():  # after the store was restored from a backup
            raise StoreError(
                f"cell {min(unknown)} is not registered in the shared store; its sessions are shipped once it is registered again"
            )
        lost = {cell for cell in served if states[cell] == "lost"}
        keys = {shipment.id: key for shipment, (key,) in zip(shipments, numbers.fetchall(), strict=False)}
        return _Writing(shipments, known, keys | {name: one.key for name, one in known.items()}, lost)

    # ── sessions and traces ─────────────────────────────────────────────────────────────────────────────────────

    def _copy_traces(self, db: PipelinedConnection, writing: _Writing) -> None:
        """Write the traces of new sessions."""
        if new := writing.new:
            rows = encode_traces(new, writing.keys)
            db.copy_encoded("nodes", ("session", *NODE_COLUMNS), chain((COPY_HEADER,), rows, (COPY_TRAILER,)))

    def _write_sessions(self, db: PipelinedConnection, writing: _Writing) -> None:
        """Write new sessions. For sessions that the shared store already has, update what may have changed."""
        new, keys, now = writing.new, writing.keys, time.time()
        _insert(db, "sessions", ("key", *SESSION_COLUMNS), [(keys[s.id], *s.session) for s in new])
        for table, names in SESSION_TABLES.items():
            _insert(db, table, ("session", *names), [(keys[s.id], *row) for s in new for row in s.others[table]])
        outcomes = [(keys[s.id], *s.outcome) for s in new if s.outcome is not None]
        _insert(db, "outcomes", ("session", "recorded", "outcome"), outcomes)
        noted = [(keys[s.id], s.cell, s.newest_event, now, s.size) for s in new]
        _insert(db, "shipments", ("session", "cell", "newest", "shipped", "bytes"), noted)
        for shipment in writing.old:
            key = keys[shipment.id]
            query = "UPDATE shipments SET newest=?, shipped=? WHERE session=?"
            db.execute(query, (shipment.newest_event, now, key))
            # Some tool calls may have been answered in the meantime.
            db.execute("DELETE FROM tool_calls WHERE session=?", (key,))
            columns = ("session", *SESSION_TABLES["tool_calls"])
            _insert(db, "tool_calls", columns, [(key, *row) for row in shipment.others["tool_calls"]])
            if shipment.outcome is not None and writing.known[shipment.id].is_replaced_by(shipment):
                db.execute(_REPLACE_OUTCOME, (key, *shipment.outcome))

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _write_events(self, db: PipelinedConnection, writing: _Writing, completed: Sequence[NewEvent]) -> None:
        """Write the shipped events that the shared store does not have, and then `completed`. Number all of them in this order."""
        sessions: list[bytes] = []
        times: list[float] = []
        kinds: list[bytes] = []
        data: list[bytes] = []
        for shipment in writing.shipments:
            before = writing.known.get(shipment.id)
            if events := shipment.events_after(0 if before is None else before.newest):
                _, at, kind, values = zip(*events, strict=True)
                sessions.append(encode_text(shipment.id) * len(events))
                times += at
                kinds += kind
                data += values
        for event in completed:
            sessions.append(encode_text(event.session))
            times.append(event.time)
            kinds.append(event.kind.encode())
            data.append(event.data)
        if count := len(data):
            names = {kind: encode_text(kind) for kind in set(kinds)}
            encoded_kinds = make_text_array([names[kind] for kind in kinds], count)
            arrays = (make_float_array(times), make_text_array(sessions, count), encoded_kinds)
            db.execute(_INSERT_EVENTS, (count, count, *arrays, make_bytes_array(data)))


class _AttemptNames:
    """The attempts of shipped sessions.

    An attempt that is not settled yet is superseded if its cell was lost, or if another session or attempt has replaced it.
    """

    def __init__(self, db: PipelinedConnection, writing: _Writing) -> None:
        """Register the attempts of the shipments."""
        self._writing = writing
        self._names = {shipment.id: _name_attempt(shipment) for shipment in writing.shipments}
        sessions = list(self._names)
        self._registered = _register(
            db, [(*self._names[s.id], s.id, writing.cell_of(s), s.session[3]) for s in writing.shipments]
        )
        self._given_up = db.execute(_GIVEN_UP, (sessions,))
        named = sorted({rollout for name, (rollout, _) in self._names.items() if rollout != name})
        self._others = db.execute(_RIVALS, (named,)) if named else None

    def rollout_of(self, shipment: Shipment) -> str:
        """Return the name of a session's rollout, or an empty string if the rollout has no name."""
        rollout = self._names[shipment.id][0]
        return "" if rollout == shipment.id else rollout

    def supersede(self, db: PipelinedConnection) -> set[str]:
        """Supersede the attempts that were lost or replaced. Return the ids of all shipped sessions with superseded attempts."""
        registered = {(rollout, attempt): found for rollout, attempt, *found in self._registered.fetchall()}
        superseded = {session for (session,) in self._given_up.fetchall()}
        others = self._others.fetchall() if self._others is not None else []
        for shipment in self._writing.shipments:
            rollout, attempt = self._names[shipment.id]
            session, state = registered[rollout, attempt]
            cell = self._writing.cell_of(shipment)
            is_lost = cell in self._writing.lost or shipment.id in superseded
            if session != shipment.id:  # the attempt belongs to another session
                _register(db, [(shipment.id, attempt, shipment.id, cell, shipment.session[3])])
                is_lost = True
            elif state in ("settled", "superseded"):
                if state == "superseded":
                    superseded.add(shipment.id)
                continue
            if is_lost or _is_replaced(rollout, attempt, others):
                supersede_attempts(db, "session=?", (shipment.id,))
                superseded.add(shipment.id)
            elif any(name == rollout and other != attempt for name, other, _ in others):
                supersede_attempts(db, "rollout=? AND attempt<? AND state<>'settled'", (rollout, attempt))
        return superseded


def _is_replaced(rollout: str, attempt: int, others: Sequence[tuple[str, int, str]]) -> bool:
    """Return whether `others`, none of which is superseded, includes a later or a settled attempt at the same rollout."""
    return any(
        name == rollout and other != attempt and (other > attempt or state == "settled")
        for name, other, state in others
    )


def _types(table: str, columns: Sequence[str]) -> list[str]:
    return [_OWN_TYPES.get(table, {}).get(name) or _TYPES.get(name, "text") for name in columns]


def _insert(db: PipelinedConnection, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    db.insert_rows(table, columns, _types(table, columns), rows)


def _name_attempt(shipment: Shipment) -> tuple[str, int]:
    return _decode_name(shipment.session[2], shipment.id)


def _decode_name(config: bytes, session: str) -> tuple[str, int]:
    """Return the rollout and attempt of a session from its settings. An unnamed rollout has the session's id as its name."""
    try:
        settings = _settings.decode(config)
    except (msgspec.DecodeError, UnicodeDecodeError):
        settings = _NamedSettings()  # damaged settings
    return settings.rollout or session, settings.attempt


def _register(db: StoreConnection, attempts: Sequence[tuple[str, int, str, str, float]]) -> Cursor:
    """Register attempts, given as rollout, attempt, session, cell and start time, unless they are registered already.

    Return a cursor over the rollout, attempt, session and state of each.
    """
    unique = {row[:2]: row for row in sorted(attempts, reverse=True)}
    columns = [list(column) for column in zip(*sorted(unique.values()), strict=True)]
    return db.execute(
        "INSERT INTO attempts (rollout, attempt, session, cell, started, state)"
        " SELECT *, 'running' FROM unnest(?::text[], ?::int8[], ?::text[], ?::text[], ?::float8[])"
        " ON CONFLICT (rollout, attempt) DO UPDATE SET"
        " session=CASE WHEN attempts.session='' AND attempts.state<>'settled' THEN excluded.session ELSE attempts.session END"
        " RETURNING rollout, attempt, session, state",
        columns,
    )


def settle_attempts(db: StoreConnection, outcomes: Sequence[tuple[str, str, bytes]]) -> None:
    """Update the attempts of many sessions, as `settle_attempt` does for one. Each session is given as id, status and outcome."""
    if not outcomes:
        return
    states = [outcome_state(decode_outcome(outcome), status) for _, status, outcome in outcomes]
    db.execute(
        "UPDATE attempts SET state=new.state, ended=? FROM unnest(?::text[], ?::text[]) AS new(session, state)"
        " WHERE attempts.session=new.session AND attempts.state<>'superseded'",
        (time.time(), [session for session, _, _ in outcomes], states),
    )


def copy_settings(store: SharedStore, settings: dict[str, Any]) -> None:
    """Copy the settings that name tokenizers and renderers from a cell to the shared store. Existing settings are kept."""
    with store.database.writing() as db:
        for name, value in sorted(settings.items()):
            db.execute("INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO NOTHING", (name, value))
