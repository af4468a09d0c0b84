"""Write shipments to the shared store: each session once, with its outcome, attempt and feeds, in one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from turngate.store.attempts import outcome_state, supersede_attempts
from turngate.store.connection import LOCK_FEEDS, StoreConnection
from turngate.store.outbox import OpenAttempt
from turngate.store.outcomes import decode_outcome
from turngate.store.shared.cells import find_lost
from turngate.store.shared.copy_format import encode_events, encode_nodes
from turngate.store.shared.database import SharedConnection
from turngate.store.shared.store import SharedStore
from turngate.store.shipment import (
    NODE_COLUMNS,
    SESSION_COLUMNS,
    SESSION_TABLES,
    ConflictingShipment,
    Row,
    Shipment,
    ShippedEvent,
)

_TYPES = {  # columns that are not of type text
    **dict.fromkeys(("digest", "tools", "kwargs", "arguments", "reply", "request", "head", "tail"), "bytea"),
    **dict.fromkeys(("ids", "logprobs", "info", "messages", "data", "secret", "config", "outcome"), "bytea"),
    **dict.fromkeys(
        ("key", "newest", "session", "parent", "node", "delivered", "checksum", "call", "repeated", "seq"), "int8"
    ),
    **dict.fromkeys(("called", "answered", "time", "opened", "closed", "recorded", "shipped"), "float8"),
}
_OWN_TYPES = {  # columns whose type depends on the table
    "nodes": {"id": "int8"},
    "refusals": {"status": "int8"},
    "replies": {"echo": "bytea"},
    "reply_echoes": {"echo": "bytea"},
}


_NEW_KEYS = "SELECT nextval(pg_get_serial_sequence('sessions', 'key')) FROM generate_series(1, ?)"


class _NamedSettings(msgspec.Struct, frozen=True):
    """The session settings that name its rollout and attempt."""

    rollout: str = ""
    attempt: int = 1


_settings = msgspec.json.Decoder(_NamedSettings)


class _Known(msgspec.Struct, frozen=True):
    """A session that the shared store already has."""

    key: int
    cell: str
    newest: int  # number of its newest event


class ShipmentWriter:
    """Writes shipments. Writing one again adds only what is new, such as a replaced outcome or later events."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    def write(self, shipments: Sequence[Shipment]) -> None:
        """Write sessions in one transaction. If it raises an error, none of them was written."""
        if not shipments:
            return
        with self._store.database.writing() as db:
            assert isinstance(db, SharedConnection)
            known = self._find_known(db, shipments)
            cells = {shipment.id: _cell_of(shipment, known.get(shipment.id)) for shipment in shipments}
            lost = find_lost(db, cells.values())
            keys = self._write_sessions(db, shipments, known)
            changed = self._find_changed_outcomes(db, shipments, keys, known)
            self._write_outcomes(db, changed, keys, known)
            self._write_attempts(db, shipments, cells, lost)
            counting = settle_attempts(db, [(s.id, s.session[5], outcome) for s, outcome in changed])
            if counting:
                db.execute(LOCK_FEEDS).fetchall()  # before any event: see `insert_event`
            self._write_events(db, shipments, known)
            for shipment, outcome in changed:
                if shipment.id in counting:
                    self._store.feeds.enter(db, keys[shipment.id], shipment.id, outcome)
            self._note_shipments(db, shipments, keys, known)

    def announce(self, attempts: Sequence[OpenAttempt]) -> None:
        """Register open sessions as attempts of their cell, so that they are protected by its lease."""
        with self._store.database.writing() as db:
            _register(
                db,
                [(*_decode_name(a.config, a.session), a.session, a.cell, a.opened) for a in attempts],
            )

    def _find_known(self, db: StoreConnection, shipments: Sequence[Shipment]) -> dict[str, _Known]:
        """Return the sessions that the shared store already has, by id."""
        query = (
            "SELECT id, key, secret, coalesce(cell, ''), coalesce(newest, 0) FROM sessions"
            " LEFT JOIN shipments ON shipments.session=key WHERE id=ANY(?)"
        )
        secrets = {shipment.id: shipment.session[1] for shipment in shipments}
        known = {}
        for name, key, secret, cell, newest in db.execute(query, (list(secrets),)).fetchall():
            if bytes(secret) != secrets[name]:
                raise ConflictingShipment(name)
            known[name] = _Known(key, cell, newest)
        return known

    # ── what never changes ──────────────────────────────────────────────────────────────────────────────────────

    def _write_sessions(
        self, db: SharedConnection, shipments: Sequence[Shipment], known: dict[str, _Known]
    ) -> dict[str, int]:
        """Write the sessions that are new, with their traces. Return the keys of all."""
        keys = {name: found.key for name, found in known.items()}
        new = [shipment for shipment in shipments if shipment.id not in known]
        numbers = db.execute(_NEW_KEYS, (len(new),)).fetchall()
        keys |= {shipment.id: key for shipment, (key,) in zip(new, numbers, strict=True)}
        self._copy(db, "sessions", ("key", *SESSION_COLUMNS), [(keys[s.id], *s.session) for s in new])
        nodes = [row for shipment in new for row in shipment.rekey_nodes(keys[shipment.id])]
        if nodes:
            db.copy_encoded("nodes", ("session", *NODE_COLUMNS), encode_nodes(nodes))
        for table, names in SESSION_TABLES.items():
            rows = [(keys[s.id], *row) for s in new for row in s.others[table]]
            self._copy(db, table, ("session", *names), rows)
        for shipment in shipments:
            if shipment.id in known:
                self._rewrite_tool_calls(db, keys[shipment.id], shipment)
        return keys

    def _rewrite_tool_calls(self, db: SharedConnection, key: int, shipment: Shipment) -> None:
        """Replace the tool calls of a session that was shipped before, since some may have been answered in the meantime."""
        db.execute("DELETE FROM tool_calls WHERE session=?", (key,))
        rows = [(key, *row) for row in shipment.others["tool_calls"]]
        self._copy(db, "tool_calls", ("session", *SESSION_TABLES["tool_calls"]), rows)

    def _copy(self, db: SharedConnection, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        if not rows:
            return
        types = [_OWN_TYPES.get(table, {}).get(name) or _TYPES.get(name, "text") for name in columns]
        db.copy_rows(table, columns, types, rows)

    # ── what decides whether the outcome counts ─────────────────────────────────────────────────────────────────

    def _write_attempts(
        self, db: StoreConnection, shipments: Sequence[Shipment], cells: dict[str, str], lost: set[str]
    ) -> None:
        """Register the sessions as attempts. They are superseded if their cell was lost or another attempt has replaced them."""
        names = {shipment.id: _name_attempt(shipment) for shipment in shipments}
        registered = _register(db, [(*names[s.id], s.id, cells[s.id], s.session[3]) for s in shipments])
        decided = []
        for shipment in shipments:
            session, state = registered[names[shipment.id]]
            if session != shipment.id:  # the attempt belongs to another session
                own = (shipment.id, names[shipment.id][1], shipment.id, cells[shipment.id], shipment.session[3])
                _register(db, [own])
                decided.append((shipment, True))
            elif state not in ("settled", "superseded"):
                decided.append((shipment, cells[shipment.id] in lost))
        named = sorted({rollout for name, (rollout, _) in names.items() if rollout != name})
        query = "SELECT rollout, attempt, state FROM attempts WHERE rollout=ANY(?) AND state<>'superseded'"
        others = db.execute(query, (named,)).fetchall() if named else []
        for shipment, is_superseded in decided:
            rollout, attempt = names[shipment.id]
            rivals = [(other, state) for name, other, state in others if name == rollout and other != attempt]
            if is_superseded or any(other > attempt or state == "settled" for other, state in rivals):
                supersede_attempts(db, "session=?", (shipment.id,))
            elif rivals:
                supersede_attempts(db, "rollout=? AND attempt<? AND state<>'settled'", (rollout, attempt))

    def _find_changed_outcomes(
        self, db: StoreConnection, shipments: Sequence[Shipment], keys: dict[str, int], known: dict[str, _Known]
    ) -> list[tuple[Shipment, bytes]]:
        """Return the sessions with outcomes that the shared store does not have, and these outcomes."""
        old = [keys[shipment.id] for shipment in shipments if shipment.id in known]
        query = "SELECT session, CAST(outcome AS BLOB) FROM outcomes WHERE session=ANY(?)"
        rows = db.execute(query, (old,)).fetchall() if old else []
        present = {key: bytes(outcome) for key, outcome in rows}
        return [
            (shipment, shipment.outcome[1])
            for shipment in shipments
            if shipment.outcome is not None and present.get(keys[shipment.id]) != shipment.outcome[1]
        ]

    def _write_outcomes(
        self,
        db: SharedConnection,
        changed: Sequence[tuple[Shipment, bytes]],
        keys: dict[str, int],
        known: dict[str, _Known],
    ) -> None:
        new = [s for s, _ in changed if s.id not in known]
        self._copy(
            db,
            "outcomes",
            ("session", "recorded", "outcome"),
            [(keys[s.id], *s.outcome) for s in new if s.outcome is not None],
        )
        for shipment, _ in changed:
            if shipment.id in known and shipment.outcome is not None:
                db.execute(
                    "INSERT INTO outcomes (session, recorded, outcome) VALUES (?,?,?) ON CONFLICT (session)"
                    " DO UPDATE SET recorded=excluded.recorded, outcome=excluded.outcome",
                    (keys[shipment.id], *shipment.outcome),
                )

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _write_events(self, db: SharedConnection, shipments: Sequence[Shipment], known: dict[str, _Known]) -> None:
        """Write the events that the shared store does not have. They keep their order and get numbers of the shared store."""
        new: list[tuple[str, ShippedEvent]] = []
        for shipment in shipments:
            before = known.get(shipment.id)
            events = shipment.events_after(0 if before is None else before.newest)
            new += [(shipment.id, event) for event in events]
        if not new:
            return
        query = "UPDATE event_counter SET newest=newest+? RETURNING newest"
        row = db.execute(query, (len(new),)).fetchone()
        assert row is not None
        first = row[0] - len(new) + 1
        rows = [(seq, e.time, name, e.kind, e.data) for seq, (name, e) in enumerate(new, first)]
        db.copy_encoded("events", ("seq", "time", "session", "kind", "data"), encode_events(rows))

    def _note_shipments(
        self, db: SharedConnection, shipments: Sequence[Shipment], keys: dict[str, int], known: dict[str, _Known]
    ) -> None:
        now = time.time()
        new = []
        for shipment in shipments:
            newest = shipment.events[-1].seq if shipment.events else 0
            if shipment.id in known:
                query = "UPDATE shipments SET newest=?, shipped=? WHERE session=?"
                db.execute(query, (newest, now, keys[shipment.id]))
            else:
                new.append((keys[shipment.id], shipment.cell, newest, now))
        self._copy(db, "shipments", ("session", "cell", "newest", "shipped"), new)


def _cell_of(shipment: Shipment, known: _Known | None) -> str:
    """Return the cell that served a session: the first one that shipped it, even if another id ships it now."""
    return known.cell if known is not None and known.cell else shipment.cell


def _name_attempt(shipment: Shipment) -> tuple[str, int]:
    return _decode_name(shipment.session[2], shipment.id)


def _decode_name(config: bytes, session: str) -> tuple[str, int]:
    """Return the rollout and attempt of a session with these settings."""
    try:
        settings = _settings.decode(config)
    except (msgspec.DecodeError, UnicodeDecodeError):
        settings = _NamedSettings()  # damaged settings
    return settings.rollout or session, settings.attempt


def _register(
    db: StoreConnection, attempts: Sequence[tuple[str, int, str, str, float]]
) -> dict[tuple[str, int], tuple[str, str]]:
    """Register new attempts, given as rollout, attempt, session, cell and start. Return the session and state of each."""
    unique = {row[:2]: row for row in sorted(attempts, reverse=True)}
    columns = [list(column) for column in zip(*sorted(unique.values()), strict=True)]
    rows = db.execute(
        "INSERT INTO attempts (rollout, attempt, session, cell, started, state)"
        " SELECT *, 'running' FROM unnest(?::text[], ?::int8[], ?::text[], ?::text[], ?::float8[])"
        " ON CONFLICT (rollout, attempt) DO UPDATE SET"
        " session=CASE WHEN attempts.session='' THEN excluded.session ELSE attempts.session END"
        " RETURNING rollout, attempt, session, state",
        columns,
    ).fetchall()
    return {(rollout, attempt): (session, state) for rollout, attempt, session, state in rows}


def settle_attempts(db: StoreConnection, outcomes: Sequence[tuple[str, str, bytes]]) -> set[str]:
    """Like `settle_attempt`, for many sessions, given as id, status and outcome. Return those whose outcomes count."""
    if not outcomes:
        return set()
    states = [outcome_state(decode_outcome(outcome), status) for _, status, outcome in outcomes]
    rows = db.execute(
        "UPDATE attempts SET state=new.state, ended=? FROM unnest(?::text[], ?::text[]) AS new(session, state)"
        " WHERE attempts.session=new.session AND attempts.state<>'superseded' RETURNING attempts.session",
        (time.time(), [session for session, _, _ in outcomes], states),
    ).fetchall()
    cancelled = {session for session, status, _ in outcomes if status == "cancelled"}
    return {session for (session,) in rows} - cancelled


def copy_settings(store: SharedStore, settings: dict[str, Any]) -> None:
    """Add the cell's tokenizers to the shared store."""
    with store.database.writing() as db:
        for name, value in sorted(settings.items()):
            db.execute("INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO NOTHING", (name, value))
