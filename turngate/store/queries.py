"""What is read of many rollouts at once, without reading a trace. Called by `overview.py`, in a thread of its own.

Everything here is a query over tables that others write; there is no table of its own, so that no turn pays for a list that nobody
looks at. Sums are made by SQLite, which lets the interpreter go on meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from turngate.trace.tree import SampledInfo

Connected = Callable[[], AbstractContextManager[sqlite3.Connection]]
_MANY = 500  # values that one query is given
_SESSION = "key, id, config, opened, closed, status, stop"
_info = msgspec.msgpack.Decoder(SampledInfo)
# Data is JSON kept as a blob, which SQLite's own functions take for something else. What is damaged on disk counts for nothing, rather
# than end the query.
_A_TURN = "kind='turn' AND json_valid(CAST(data AS TEXT))"
_TOKENS = f"CASE WHEN {_A_TURN} THEN coalesce(json_extract(CAST(data AS TEXT), '$.sampled_tokens'), 0) ELSE 0 END"
_TURNS = f"CASE WHEN {_A_TURN} THEN coalesce(json_extract(CAST(data AS TEXT), '$.finish'), '')!='abort' ELSE 0 END"


class SurveyedSession(msgspec.Struct, frozen=True):
    key: int
    id: str
    config: bytes  # JSON
    opened: float
    closed: float | None
    status: str
    stop: str


class Heard(msgspec.Struct, frozen=True):
    """What the stream of events comes to for one session."""

    session: str
    newest: int  # the number of its last event
    at: float  # when that was
    turns: int
    sampled_tokens: int
    stages: int


class Fact(msgspec.Struct, frozen=True):
    """One event, its data not read yet."""

    seq: int
    time: float
    session: str
    kind: str
    data: bytes


class Counted(msgspec.Struct, frozen=True):
    """What a session's turns come to."""

    turns: int
    sampled_tokens: int
    version_start: int | None
    version_end: int | None


class Moment(msgspec.Struct, frozen=True):
    """What happened in one of equal spans of time."""

    number: int  # of the span, counted from 1970
    turns: int
    sampled_tokens: int
    outcomes: int


class Survey:
    def __init__(self, reading: Connected) -> None:
        self._reading = reading

    def sessions(self, after: int, limit: int) -> list[SurveyedSession]:
        """Oldest first, those past a key."""
        return self._sessions("key>? ORDER BY key LIMIT ?", (after, limit))

    def named(self, ids: Sequence[str]) -> list[SurveyedSession]:
        found: list[SurveyedSession] = []
        for some in _parts(ids):
            found += self._sessions(f"id IN ({_marks(some)})", some)
        return found

    def _sessions(self, where: str, values: Sequence[object]) -> list[SurveyedSession]:
        with self._reading() as db:
            rows = db.execute(f"SELECT {_SESSION} FROM sessions WHERE {where}", values).fetchall()
        return [SurveyedSession(*row) for row in rows]

    def outcomes(self, keys: Sequence[int]) -> dict[int, tuple[float, bytes]]:
        """When each was recorded, and what it is."""
        found: dict[int, tuple[float, bytes]] = {}
        with self._reading() as db:
            for some in _parts(keys):
                query = f"SELECT session, recorded, outcome FROM outcomes WHERE session IN ({_marks(some)})"
                found |= {key: (at, outcome) for key, at, outcome in db.execute(query, some).fetchall()}
        return found

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────

    def oldest(self) -> float | None:
        """When the first event was that is still there."""
        with self._reading() as db:
            row = db.execute("SELECT time FROM events ORDER BY seq LIMIT 1").fetchone()
        return None if row is None else row[0]

    def heard(self) -> list[Heard]:
        """Of every session that anything was told of."""
        # The time is that of the row with the highest number: SQLite promises so for a single max().
        query = (
            f"SELECT session, max(seq), time, sum({_TURNS}),"
            f" sum({_TOKENS}), sum(kind='stage')"
            " FROM events WHERE session!='' GROUP BY session"
        )
        with self._reading() as db:
            return [Heard(*row) for row in db.execute(query).fetchall()]

    def last_stages(self) -> list[Fact]:
        """Of every session, the stage that was told last."""
        return self._facts("kind='stage' AND session!='' GROUP BY session", ", max(seq)")

    def first_stage(self, session: str) -> Fact | None:
        return next(iter(self._facts("session=? AND kind='stage' ORDER BY seq LIMIT 1", values=(session,))), None)

    def stages(self, session: str) -> list[Fact]:
        return self._facts("session=? AND kind='stage' ORDER BY seq LIMIT 500", values=(session,))

    def of_kinds(self, kinds: Sequence[str]) -> list[Fact]:
        """Those of the gateway itself, oldest first."""
        return self._facts(f"session='' AND kind IN ({_marks(kinds)}) ORDER BY seq", values=kinds)

    def deleted(self) -> list[str]:
        """Ids whose session was deleted; one of them may have been taken again."""
        with self._reading() as db:
            return [session for (session,) in db.execute("SELECT DISTINCT session FROM events WHERE kind='deleted'")]

    def was_told_of(self, session: str) -> bool:
        """Whether its events go back to its opening."""
        with self._reading() as db:
            query = "SELECT 1 FROM events WHERE session=? AND kind='opened' LIMIT 1"
            return db.execute(query, (session,)).fetchone() is not None

    def past(self, after: int, limit: int) -> list[Fact]:
        return self._facts("seq>? ORDER BY seq LIMIT ?", values=(after, limit))

    def touched(self, after: int, limit: int) -> list[str]:
        """The sessions of the events past a number, each once; as many as there are, or one more than `limit`."""
        query = "SELECT DISTINCT session FROM (SELECT session FROM events WHERE seq>? AND session!='' ORDER BY seq LIMIT 20000) LIMIT ?"
        with self._reading() as db:
            return [session for (session,) in db.execute(query, (after, limit + 1)).fetchall()]

    def _facts(self, where: str, more: str = "", values: Sequence[object] = ()) -> list[Fact]:
        with self._reading() as db:
            rows = db.execute(
                f"SELECT seq, time, session, kind, data{more} FROM events WHERE {where}", values
            ).fetchall()
        return [Fact(*row[:5]) for row in rows]

    def moments(self, seconds: float) -> list[Moment]:
        """Turns and outcomes by time, as far as events go back."""
        query = (
            f"SELECT CAST(time/? AS INTEGER), sum({_TURNS}),"
            f" sum({_TOKENS}), sum(kind='outcome')"
            " FROM events WHERE kind IN ('turn', 'outcome') GROUP BY 1"
        )
        with self._reading() as db:
            return [Moment(*row) for row in db.execute(query, (seconds,)).fetchall()]

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────

    def counted(self, key: int) -> Counted:
        """From the nodes themselves: for sessions whose events are gone."""
        turns = tokens = 0
        first: int | None = None
        last: int | None = None
        with self._reading() as db:
            query = "SELECT length(ids)/4, info FROM nodes WHERE session=? AND kind='sampled' ORDER BY id"
            for size, packed in db.execute(query, (key,)).fetchall():
                tokens += size
                info = _read(packed)
                if info is None:
                    continue
                turns += info.finish != "abort"
                first = info.version_start if first is None else first
                last = info.version_end
        return Counted(turns, tokens, first, last)

    def versions(self, key: int) -> tuple[int, int] | None:
        """Of the policy, at the first and the last turn: they never fall. None: nothing was sampled, or it is damaged."""
        query = "SELECT info FROM nodes WHERE session=? AND kind='sampled' ORDER BY id {} LIMIT 1"
        with self._reading() as db:
            first = db.execute(query.format(""), (key,)).fetchone()
            if first is None:
                return None
            last = db.execute(query.format("DESC"), (key,)).fetchone()
        begun, ended = _read(first[0]), _read(last[0])
        return None if begun is None or ended is None else (begun.version_start, ended.version_end)

    def state(self, key: int) -> tuple[int, int, int]:
        """Another one than before: something was added to a session's trace, or marked in it."""
        query = "SELECT count(*), coalesce(max(id), 0), coalesce(sum(delivered), 0) FROM nodes WHERE session=?"
        with self._reading() as db:
            count, newest, delivered = db.execute(query, (key,)).fetchone()
        return count, newest, delivered


def _read(packed: bytes) -> SampledInfo | None:
    """None: damaged on disk. Whoever reads the trace is told; a list goes on."""
    try:
        return _info.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _parts(values: Sequence[object]) -> Iterator[tuple[object, ...]]:
    for start in range(0, len(values), _MANY):
        yield tuple(values[start : start + _MANY])


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))
