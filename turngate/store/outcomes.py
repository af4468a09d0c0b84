"""The outcomes table, and what an outcome is: how a rollout ended, written once by its runner."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from turngate.errors import BadRequest
from turngate.store.connection import Connect
from turngate.store.events import NewEvent, insert_event
from turngate.types import Json

OUTCOME_TABLES = """
CREATE TABLE IF NOT EXISTS outcomes (
    session INTEGER PRIMARY KEY,  -- its key
    recorded REAL NOT NULL,
    outcome BLOB NOT NULL         -- JSON of RecordedOutcome
);
"""
OutcomeClass = Literal["graded", "agent failed", "invalid task", "infrastructure fault"]
NO_REWARD: tuple[OutcomeClass, ...] = ("invalid task", "infrastructure fault")  # the agent's work was not graded
MAX_BYTES = 256 * 1024  # bytes of an outcome
DAMAGED_OUTCOME = "its outcome is damaged on disk"
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)  # what the decoder raises for damaged bytes


class RecordedOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rollout ended. `reward` is None where it is unknown, never 0."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    message: str = ""
    group: str = ""
    task: str = ""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 1
    data: Json = None  # the runner's own

    def event_data(self) -> dict[str, Json]:
        """The data of its event."""
        return {
            "kind": self.kind,
            "reward": self.reward,
            "resolved": self.resolved,
            "task": self.task,
            "group": self.group,
            "attempt": self.attempt,
        }

    def encode(self) -> bytes:
        """Validate it and encode it for the store: equal outcomes give equal bytes. Raises `BadRequest`."""
        if self.reward is not None and not math.isfinite(self.reward):
            raise BadRequest(f"reward: {self.reward} is not a finite number", param="reward")
        if self.reward is not None and self.kind in NO_REWARD:
            raise BadRequest(
                f"reward: an outcome of class {self.kind!r} has none, because the agent was not graded; send null",
                param="reward",
            )
        try:
            written = msgspec.json.encode(self, order="sorted")
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"data: cannot be written as JSON ({error})", param="data") from None
        if len(written) > MAX_BYTES:
            raise BadRequest(f"data: the outcome has {len(written)} bytes, the limit is {MAX_BYTES}", param="data")
        return written


class DamagedOutcome(msgspec.Struct, frozen=True):
    """Stands for an outcome that cannot be read from disk."""

    message: str = DAMAGED_OUTCOME


_decoder = msgspec.json.Decoder(RecordedOutcome)


def decode_outcome(stored: bytes) -> RecordedOutcome | DamagedOutcome:
    try:
        return _decoder.decode(stored)
    except _UNREADABLE:
        return DamagedOutcome()


class Outcomes:
    """The table. Calls `enter` for each outcome in the transaction that writes it, with the session's key and id."""

    def __init__(
        self,
        writing: Connect,
        reading: Connect,
        enter: Callable[[sqlite3.Connection, int, str, bytes], None],
        *,
        there: bool = True,
    ) -> None:
        self._writing = writing
        self._reading = reading
        self._enter = enter
        self._there = there  # False: the file is of an older version, without this table, and opened for reading

    def find(self, session: int) -> RecordedOutcome | DamagedOutcome | None:
        """The outcome of a session, by its key."""
        return self.read(session, session).get(session)

    def read(self, first: int, last: int) -> dict[int, RecordedOutcome | DamagedOutcome]:
        """The outcomes of the sessions with keys in a range. A damaged one does not hide the others."""
        if not self._there:
            return {}
        with self._reading() as db:
            query = "SELECT session, CAST(outcome AS BLOB) FROM outcomes WHERE session BETWEEN ? AND ?"
            rows = db.execute(query, (first, last)).fetchall()
        return {key: decode_outcome(stored) for key, stored in rows}

    def put(self, session: int, outcome: bytes, event: NewEvent, *, replace: bool) -> bytes | None:
        """Write an outcome, unless there is one and `replace` is not set. Returns the one before."""
        with self._writing() as db:
            row = db.execute("SELECT CAST(outcome AS BLOB) FROM outcomes WHERE session=?", (session,)).fetchone()
            before: bytes | None = None if row is None else row[0]
            if before is None or (replace and before != outcome):
                db.execute("INSERT OR REPLACE INTO outcomes VALUES (?,?,?)", (session, event.time, outcome))
                insert_event(db, event)
                self._enter(db, session, event.session, outcome)
            return before
