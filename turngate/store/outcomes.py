"""The outcomes table. An outcome describes how a rollout ended, and is recorded by the rollout's runner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec

from turngate.errors import BadRequest, NotFound
from turngate.store.connection import FOR_UPDATE, Connect, StoreConnection
from turngate.store.events import NewEvent, insert_event
from turngate.trace.turn_rewards import TurnReward, check_turn_rewards
from turngate.types import Json

OUTCOME_TABLES = """
CREATE TABLE IF NOT EXISTS outcomes (
    session INTEGER PRIMARY KEY,  -- key of the session
    recorded REAL NOT NULL,
    outcome BLOB NOT NULL         -- JSON of RecordedOutcome
);
"""
OutcomeClass = Literal["graded", "agent failed", "invalid task", "infrastructure fault"]
NO_REWARD: tuple[OutcomeClass, ...] = ("invalid task", "infrastructure fault")  # the agent's work was not graded
MAX_BYTES = 256 * 1024  # of an outcome as JSON
DAMAGED_OUTCOME = "its outcome is damaged on disk"
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)  # what the decoder raises for damaged bytes


class RecordedOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rollout ended. An unknown `reward` is None, never 0."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    message: str = ""
    group: str = ""
    task: str = ""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 1
    data: Json = None  # the runner's own data
    # Unset: no turn rewards were given. Empty: no turn earned a reward. Not stored if unset, so that older outcomes keep their bytes.
    turn_rewards: tuple[TurnReward, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def failure(self) -> str:
        """The message of a failure that was not the agent's fault, or the kind of failure if there is no message.

        Empty if there was no such failure.
        """
        return self.message or self.kind if self.kind in NO_REWARD else ""

    def event_data(self) -> dict[str, Json]:
        """Return the data of the event that announces this outcome."""
        return {
            "kind": self.kind,
            "reward": self.reward,
            "resolved": self.resolved,
            "task": self.task,
            "group": self.group,
            "attempt": self.attempt,
        }

    def encode(self) -> bytes:
        """Validate the outcome and encode it for the store. Equal outcomes have equal bytes. Raise `BadRequest` if it is invalid."""
        if self.reward is not None and not math.isfinite(self.reward):
            raise BadRequest(f"reward must be a finite number or null, not {self.reward}", param="reward")
        if self.reward is not None and self.kind in NO_REWARD:
            raise BadRequest(
                f"reward must be null if kind is {self.kind!r}, because the agent's work was not graded",
                param="reward",
            )
        check_turn_rewards(self.turn_rewards or (), self.reward)
        try:
            written = msgspec.json.encode(self, order="sorted")
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"the outcome cannot be encoded as JSON ({error})", param="data") from None
        if len(written) > MAX_BYTES:
            raise BadRequest(
                f"the outcome is {len(written)} bytes long as JSON; the limit is {MAX_BYTES}; shorten 'message', 'data' or 'turn_rewards'",
                param="data",
            )
        return written


class DamagedOutcome(msgspec.Struct, frozen=True):
    """A placeholder for an outcome that cannot be read from disk."""

    message: str = DAMAGED_OUTCOME


_decoder = msgspec.json.Decoder(RecordedOutcome)
_MAX_VALUES = 500  # per query
_WRITE = (
    "INSERT INTO outcomes (session, recorded, outcome) VALUES (?,?,?)"
    " ON CONFLICT (session) DO UPDATE SET recorded=excluded.recorded, outcome=excluded.outcome"
)


def decode_outcome(stored: bytes) -> RecordedOutcome | DamagedOutcome:
    try:
        return _decoder.decode(stored)
    except _UNREADABLE:
        return DamagedOutcome()


class Outcomes:
    """The outcomes table.

    In its transaction, `put` calls `settle`, which updates the attempt and returns whether the feeds must process the outcome. If so, `put`
    also calls `enter`, which adds the outcome to the feeds and returns more events to write.
    """

    def __init__(
        self,
        writing: Connect,
        reading: Connect,
        settle: Callable[[StoreConnection, str, bytes], bool],
        enter: Callable[[StoreConnection, int, str, bytes], Sequence[NewEvent]],
        *,
        has_tables: bool = True,
    ) -> None:
        self._writing = writing
        self._reading = reading
        self._settle = settle
        self._enter = enter
        self._has_tables = has_tables  # False: a read-only file of an older version, without this table

    def find(self, session: int) -> RecordedOutcome | DamagedOutcome | None:
        """Return the outcome of a session, or None. `session` is the session's key."""
        return self.read([session]).get(session)

    def read(self, keys: Sequence[int]) -> dict[int, RecordedOutcome | DamagedOutcome]:
        """Return the outcomes of the sessions with these keys, by key. A damaged outcome becomes a `DamagedOutcome`."""
        found: dict[int, RecordedOutcome | DamagedOutcome] = {}
        for start in range(0, len(keys) if self._has_tables else 0, _MAX_VALUES):
            chunk = tuple(keys[start : start + _MAX_VALUES])
            query = (
                f"SELECT session, CAST(outcome AS BLOB) FROM outcomes WHERE session IN ({','.join('?' * len(chunk))})"
            )
            with self._reading() as db:
                found |= {key: decode_outcome(stored) for key, stored in db.execute(query, chunk).fetchall()}
        return found

    def put(self, session: int, outcome: bytes, event: NewEvent, *, replace: bool) -> bytes | None:
        """Write an outcome, and return the previous one, if any. Without `replace`, an existing outcome is kept.

        Raise `NotFound` if the session was deleted.
        """
        with self._writing() as db:
            if not db.execute(f"SELECT key FROM sessions WHERE key=? {FOR_UPDATE}", (session,)).fetchall():
                raise NotFound("cannot record the outcome: its session was deleted")
            row = db.execute("SELECT CAST(outcome AS BLOB) FROM outcomes WHERE session=?", (session,)).fetchone()
            before: bytes | None = None if row is None else row[0]
            if before is None or (replace and before != outcome):
                db.execute(_WRITE, (session, event.time, outcome))
                counts = self._settle(db, event.session, outcome)
                insert_event(db, event)
                if counts:
                    for completed in self._enter(db, session, event.session, outcome):
                        insert_event(db, completed)
            return before
