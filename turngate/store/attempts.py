"""The attempts table: every attempt at a rollout, its session, and whether its outcome counts.

    running ──► settled       its outcome counts: groups, feeds and exports include it; no further attempt can be opened
       │ ─────► failed        an infrastructure fault, or cancelled; a further attempt can be opened
       └──────► superseded    given up or replaced by a newer attempt, or its session was deleted; its outcome never counts

At most one attempt at a rollout is settled at any time. To ensure this, a transaction that changes an attempt writes to the attempt's row
before it reads the attempt's state. The write locks the row, so two concurrent transactions never act on the same state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from turngate.errors import Conflict, Gone
from turngate.store.columns import as_number
from turngate.store.connection import LOCK_FEEDS, Connect, StoreConnection
from turngate.store.events import insert_event, new_event
from turngate.store.outcomes import DamagedOutcome, RecordedOutcome, decode_outcome

ATTEMPT_TABLES = """
CREATE TABLE IF NOT EXISTS attempts (
    rollout TEXT NOT NULL,        -- name of the rollout; the session's id if it has no name
    attempt INTEGER NOT NULL,     -- 1, 2, …
    session TEXT NOT NULL,        -- id of its session; empty: never opened, or deleted
    cell TEXT NOT NULL DEFAULT '',  -- id of the cell that runs it; empty: this gateway
    state TEXT NOT NULL,          -- running, settled, failed or superseded
    started REAL NOT NULL,
    ended REAL,                   -- when it was settled, failed or superseded
    PRIMARY KEY (rollout, attempt)
);
CREATE INDEX IF NOT EXISTS attempts_of_a_session ON attempts (session);
CREATE UNIQUE INDEX IF NOT EXISTS attempts_settled ON attempts (rollout) WHERE state='settled';
"""
AttemptState = Literal["running", "settled", "failed", "superseded"]
_COLUMNS = "rollout, attempt, session, cell, state, started, ended"
_MAX_VALUES = 500  # per query
GIVEN_UP = "superseded: it was given up before its outcome was recorded"
_PRUNED = "has an outcome that counts, but its session was removed because of its age; do not run the rollout again"
OF_CANCELLED = "its session was cancelled before its outcome was recorded"
_SUPERSEDED = (
    "SELECT sessions.key, mine.attempt,"
    " (SELECT max(other.attempt) FROM attempts AS other WHERE other.rollout=mine.rollout)"
    " FROM sessions JOIN attempts AS mine ON mine.session=sessions.id"
    " WHERE mine.state='superseded'"
)
_CANCELLED = "SELECT key FROM sessions JOIN outcomes ON outcomes.session=sessions.key WHERE status='cancelled'"


class AttemptRow(msgspec.Struct, frozen=True):
    """One row of the attempts table."""

    rollout: str
    attempt: int
    session: str
    cell: str
    state: AttemptState
    started: float
    ended: float | None


class AttemptTable:
    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without this table

    def find(self, rollout: str, attempt: int) -> AttemptRow | None:
        return next(iter(self._select("rollout=? AND attempt=?", (rollout, attempt))), None)

    def list_attempts(self, rollout: str) -> list[AttemptRow]:
        """Return the attempts at a rollout, lowest number first."""
        return self._select("rollout=? ORDER BY attempt", (rollout,))

    def _select(self, where: str, values: Sequence[object]) -> list[AttemptRow]:
        if not self._has_tables:
            return []
        with self._reading() as db:
            return [AttemptRow(*row) for row in db.execute(f"SELECT {_COLUMNS} FROM attempts WHERE {where}", values)]

    def explain_exclusions(self, keys: Sequence[int]) -> dict[int, str]:
        """Return why the outcomes of superseded attempts and cancelled sessions do not count, by session key.

        Other sessions are omitted.
        """
        found: dict[int, str] = {}
        for start in range(0, len(keys), _MAX_VALUES):
            chunk = tuple(keys[start : start + _MAX_VALUES])
            found |= self._explain(f"key IN ({','.join('?' * len(chunk))})", chunk)
        return found

    def _explain(self, where: str, values: Sequence[object]) -> dict[int, str]:
        if not self._has_tables:
            return {}
        with self._reading() as db:
            cancelled = db.execute(f"{_CANCELLED} AND {where}", values).fetchall()
            superseded = db.execute(f"{_SUPERSEDED} AND {where}", values).fetchall()
        return {
            **{key: OF_CANCELLED for (key,) in cancelled},
            **{
                key: f"superseded by attempt {newest}" if as_number(newest) > as_number(attempt) else GIVEN_UP
                for key, attempt, newest in superseded
            },
        }

    def find_exclusion(self, session: int) -> str:
        """Return the reason from `explain_exclusions` for the session with this key, or an empty string."""
        return self.explain_exclusions([session]).get(session, "")

    def filter_superseded(self, sessions: Sequence[str]) -> list[str]:
        """Return the given session ids that belong to superseded attempts."""
        found: list[str] = []
        for start in range(0, len(sessions) if self._has_tables else 0, _MAX_VALUES):
            chunk = tuple(sessions[start : start + _MAX_VALUES])
            marks = ",".join("?" * len(chunk))
            query = f"SELECT DISTINCT session FROM attempts WHERE state='superseded' AND session IN ({marks})"
            with self._reading() as db:
                found += [session for (session,) in db.execute(query, chunk).fetchall()]
        return found

    def supersede(self, rollout: str, attempt: int, session: str) -> tuple[AttemptRow, RecordedOutcome | None]:
        """Give up an attempt, unless it already has an intact outcome. Return the attempt, and its outcome if there is one.

        `session` is the id that was chosen for the attempt's session. An attempt that was never opened is registered with this id. If a
        session with this id was opened without naming its rollout, that session's attempt is superseded too. If the returned attempt is
        `superseded`, its outcome does not count. Raise `Gone` if the attempt's outcome counts, but was removed together with its session.
        """
        now = time.time()
        with self._writing() as db:
            # If the row exists, this statement does not change it, but locks it.
            row = db.execute(
                f"INSERT INTO attempts ({_COLUMNS}) VALUES (?,?,?,?,?,?,?) ON CONFLICT (rollout, attempt)"
                f" DO UPDATE SET rollout=excluded.rollout RETURNING {_COLUMNS}",
                (rollout, attempt, session, "", "running", now, None),
            ).fetchone()
            before = AttemptRow(*row)
            if before.state == "settled" and not before.session:
                raise Gone(f"attempt {attempt} of rollout {rollout!r} {_PRUNED}")
            recorded, status = _read_outcome(db, before.session)
            if before.state == "superseded":
                return before, recorded
            if recorded is not None:
                state = outcome_state(recorded, status)
                db.execute(
                    "UPDATE attempts SET state=?, ended=? WHERE rollout=? AND attempt=? AND state='running'",
                    (state, now, rollout, attempt),
                )
                return msgspec.structs.replace(before, state=state), recorded
            sessions = (before.session, session)  # usually the same id twice
            which = "(rollout=? AND attempt=?) OR (session IN (?,?) AND session!='' AND state!='settled')"
            supersede_attempts(db, which, (rollout, attempt, *sessions))
            return msgspec.structs.replace(before, state="superseded", ended=now), None


def _read_outcome(db: StoreConnection, session: str) -> tuple[RecordedOutcome | None, str]:
    """Return a session's outcome and status, or (None, "") if it has no outcome. A damaged outcome is treated as missing."""
    query = (
        "SELECT CAST(outcome AS BLOB), status FROM sessions JOIN outcomes ON outcomes.session=sessions.key WHERE id=?"
    )
    row = db.execute(query, (session,)).fetchone()
    outcome = None if row is None else decode_outcome(row[0])
    return (outcome, row[1]) if isinstance(outcome, RecordedOutcome) else (None, "")


# ── in the caller's transaction ─────────────────────────────────────────────────────────────────────────────────────


def register_attempt(
    db: StoreConnection, rollout: str, attempt: int, session: str, started: float, cell: str = ""
) -> None:
    """Register an attempt when its session is opened, and supersede earlier attempts.

    Raise `Conflict` if the attempt was superseded or was already opened, if the session's id belongs to a superseded attempt, or if the
    rollout already has an outcome that counts.
    """
    query = "SELECT rollout, attempt FROM attempts WHERE session=? AND state='superseded'"
    if (dead := db.execute(query, (session,)).fetchone()) is not None:
        raise Conflict(
            f"session {session!r} belongs to superseded attempt {dead[1]} of rollout {dead[0]!r}; choose a different session id",
            param="id",
        )
    added = db.execute(
        f"INSERT INTO attempts ({_COLUMNS}) VALUES (?,?,?,?,?,?,?) ON CONFLICT (rollout, attempt) DO NOTHING",
        (rollout, attempt, session, cell, "running", started, None),
    ).rowcount
    which = f"attempt {attempt} of rollout {rollout!r}"
    if not added:
        query = "SELECT session, state FROM attempts WHERE rollout=? AND attempt=?"
        known_as, state = db.execute(query, (rollout, attempt)).fetchone()
        newest = db.execute("SELECT MAX(attempt) FROM attempts WHERE rollout=?", (rollout,)).fetchone()[0]
        advice = f"open attempt {newest + 1}, unless the rollout has an outcome that counts"
        if state == "superseded":
            raise Conflict(f"{which} was superseded; {advice}", param="attempt")
        if state == "settled" and not known_as:
            raise Conflict(f"{which} {_PRUNED}", param="attempt")
        taken = f"already has session {known_as!r}" if known_as else "has failed, and its session was removed"
        raise Conflict(f"{which} {taken}; {advice}", param="attempt")
    supersede_attempts(db, "rollout=? AND attempt<? AND state!='settled'", (rollout, attempt))
    query = (
        "SELECT attempt, state FROM attempts WHERE rollout=? AND (attempt>? OR state='settled') ORDER BY attempt DESC"
    )
    for other, state in db.execute(query, (rollout, attempt)).fetchall():
        if state == "settled":
            raise Conflict(
                f"rollout {rollout!r} already has an outcome, recorded by attempt {other}; do not run it again",
                param="attempt",
            )
        raise Conflict(f"{which} was superseded by attempt {other}; open attempt {other + 1}", param="attempt")


def settle_attempt(db: StoreConnection, session: str, outcome: bytes) -> bool:
    """Update the state of a session's attempt after its outcome was recorded.

    Return False if feeds must ignore the outcome, because the attempt was superseded or the session was cancelled.
    """
    (status,) = db.execute("SELECT status FROM sessions WHERE id=?", (session,)).fetchone()
    state = outcome_state(decode_outcome(outcome), status)
    db.execute(
        "UPDATE attempts SET state=?, ended=? WHERE session=? AND state!='superseded'", (state, time.time(), session)
    )
    superseded = "SELECT 1 FROM attempts WHERE session=? AND state='superseded' LIMIT 1"
    return status != "cancelled" and db.execute(superseded, (session,)).fetchone() is None


def release_attempt(db: StoreConnection, session: str) -> None:
    """Detach an attempt from its session, which is being deleted.

    The session's id can then be reused. An attempt at a named rollout is superseded and stays registered, so its number cannot be
    used again.
    """
    supersede_attempts(db, "session=? AND rollout!=session", (session,))
    db.execute("DELETE FROM attempts WHERE session=? AND rollout=session", (session,))
    db.execute("UPDATE attempts SET session='' WHERE session=?", (session,))


def find_rollout(db: StoreConnection, session: str) -> str:
    """Return the name of a session's rollout, or an empty string if the rollout has no name."""
    row = db.execute("SELECT rollout FROM attempts WHERE session=? AND rollout!=session", (session,)).fetchone()
    return "" if row is None else row[0]


def supersede_attempts(db: StoreConnection, where: str, values: Sequence[object]) -> None:
    """Supersede the attempts that match the SQL condition `where`.

    Each of their sessions is removed from incomplete groups and gets a `superseded` event.
    """
    query = (
        f"UPDATE attempts SET state='superseded', ended=? WHERE ({where}) AND state!='superseded'"
        " RETURNING rollout, attempt, session"
    )
    for rollout, attempt, session in db.execute(query, (time.time(), *values)).fetchall():
        if session:
            db.execute(LOCK_FEEDS).fetchall()
            db.execute("DELETE FROM rolled WHERE id=? AND number IS NULL", (session,))
            insert_event(db, new_event(session, "superseded", {"rollout": rollout, "attempt": attempt}))


def outcome_state(outcome: RecordedOutcome | DamagedOutcome, status: str) -> AttemptState:
    """Return the state of an attempt with this outcome, in a session with this status."""
    is_fault = isinstance(outcome, RecordedOutcome) and outcome.kind == "infrastructure fault"
    return "failed" if is_fault or status == "cancelled" else "settled"
