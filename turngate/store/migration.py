"""Upgrade a SQLite file written by an older version. Each step can be repeated after an interruption."""

from __future__ import annotations

import sqlite3
from typing import Annotated

import msgspec

from turngate.store.attempts import AttemptState, outcome_state, supersede_attempts
from turngate.store.outcomes import RecordedOutcome, decode_outcome
from turngate.store.schema import BEFORE_ATTEMPTS, BEFORE_FEEDS
from turngate.trace.session import MAX_ATTEMPT


class _NamedAttempt(msgspec.Struct, frozen=True):
    """The metadata in which runners named the rollout and attempt of a session before schema version 6."""

    rollout: Annotated[str, msgspec.Meta(min_length=1)]
    attempt: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPT)]


class _OldConfig(msgspec.Struct, frozen=True):
    metadata: _NamedAttempt


_decoder = msgspec.json.Decoder(_OldConfig)


def prepare_upgrade(db: sqlite3.Connection, version: int) -> None:
    """Add the columns that existing tables lack. This runs before missing tables and indexes are created."""
    if BEFORE_FEEDS < version <= BEFORE_ATTEMPTS:
        columns = [name for _, name, *_ in db.execute("PRAGMA table_info(rolled)").fetchall()]
        if "rollout" not in columns:
            db.execute("ALTER TABLE rolled ADD COLUMN rollout TEXT NOT NULL DEFAULT ''")


def finish_upgrade(db: sqlite3.Connection, version: int) -> None:
    """Fill the attempts table from the sessions' metadata, and remove cancelled sessions from incomplete groups.

    This changes only files from before schema version 6, which introduced attempts.
    """
    if 0 < version <= BEFORE_ATTEMPTS:
        db.execute("BEGIN IMMEDIATE")
        try:
            _register_named_attempts(db)
            # Since schema version 6, the outcome of a cancelled session does not count.
            cancelled = "SELECT key FROM sessions WHERE status='cancelled'"
            db.execute(f"DELETE FROM rolled WHERE number IS NULL AND session IN ({cancelled})")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise


def _register_named_attempts(db: sqlite3.Connection) -> None:
    """Register the attempts that sessions name in their metadata. Only the last attempt at each rollout counts."""
    query = (
        "SELECT id, CAST(config AS BLOB), status, opened, recorded, CAST(outcome AS BLOB)"
        " FROM sessions LEFT JOIN outcomes ON outcomes.session=sessions.key ORDER BY key"
    )
    named: dict[tuple[str, int], tuple[str, AttemptState, float, float | None]] = {}
    for session, config, status, opened, recorded, outcome in db.execute(query).fetchall():
        try:
            name = _decoder.decode(config).metadata
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # the session names no rollout, or its settings are damaged
        known = None if outcome is None else decode_outcome(outcome)
        state = outcome_state(known, status) if isinstance(known, RecordedOutcome) else "running"
        named.setdefault((name.rollout, name.attempt), (session, state, opened, recorded))
    last: dict[str, int] = {}
    for rollout, attempt in named:
        last[rollout] = max(attempt, last.get(rollout, 0))
    for (rollout, attempt), (session, state, opened, recorded) in named.items():
        is_last = attempt == last[rollout]
        db.execute(
            "INSERT INTO attempts (rollout, attempt, session, state, started, ended) VALUES (?,?,?,?,?,?)"
            " ON CONFLICT DO NOTHING",
            (rollout, attempt, session, state if is_last else "running", opened, recorded),
        )
    for rollout, attempt in last.items():
        supersede_attempts(db, "rollout=? AND attempt<?", (rollout, attempt))
