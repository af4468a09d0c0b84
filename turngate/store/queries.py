"""Queries for lists and statistics of rollouts. They do not load traces.

They read only tables that are written anyway, so they add no cost to a turn. The database sums up the events, so other Python threads can
run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from turngate.store.columns import as_blob, as_name, as_number, as_text
from turngate.store.connection import Connect
from turngate.trace.tree import SampledInfo

_MAX_VALUES = 500  # per query
_SESSION = "key, id, CAST(config AS BLOB), opened, closed, status, stop"
_info = msgspec.msgpack.Decoder(SampledInfo)
# Data is JSON stored as a blob, which SQLite's JSON functions do not accept without a cast. Damaged data counts as 0.
_A_TURN = "kind='turn' AND json_valid(CAST(data AS TEXT))"
_TOKENS = f"CASE WHEN {_A_TURN} THEN coalesce(json_extract(CAST(data AS TEXT), '$.sampled_tokens'), 0) ELSE 0 END"
_TURNS = f"CASE WHEN {_A_TURN} THEN coalesce(json_extract(CAST(data AS TEXT), '$.finish'), '')!='abort' ELSE 0 END"


class RawSession(msgspec.Struct, frozen=True):
    key: int
    id: str
    config: bytes  # JSON
    opened: float
    closed: float | None
    status: str
    stop: str
    damaged: bool = False  # a column has a value of the wrong type, which a default replaces here


class EventTotals(msgspec.Struct, frozen=True):
    """Totals of the events of one session or one batch."""

    session: str
    newest: int  # number of the last event
    at: float  # time of the last event
    turns: int
    sampled_tokens: int
    stages: int


class RawEvent(msgspec.Struct, frozen=True):
    """One event, with its data still encoded as JSON."""

    seq: int
    time: float
    session: str
    kind: str
    data: bytes


class TurnTotals(msgspec.Struct, frozen=True):
    """Totals of the turns of one session."""

    turns: int
    sampled_tokens: int
    version_start: int | None
    version_end: int | None


class TimeBucket(msgspec.Struct, frozen=True):
    """Turns, tokens and outcomes in one time interval. All intervals have the same length."""

    number: int  # index of the interval; interval 0 starts at the Unix epoch
    turns: int
    sampled_tokens: int
    outcomes: int


class RolloutQueries:
    def __init__(self, reading: Connect) -> None:
        self._reading = reading

    def sessions(self, after: int, limit: int) -> list[RawSession]:
        """Return up to `limit` sessions with keys above `after`, oldest first."""
        return self._sessions("key>? ORDER BY key LIMIT ?", (after, limit))

    def find_sessions(self, ids: Sequence[str]) -> list[RawSession]:
        found: list[RawSession] = []
        for chunk in _chunks(ids):
            found += self._sessions(f"id IN ({_placeholders(chunk)})", chunk)
        return found

    def _sessions(self, where: str, values: Sequence[object]) -> list[RawSession]:
        with self._reading() as db:
            rows = db.execute(f"SELECT {_SESSION} FROM sessions WHERE {where}", values).fetchall()
        return [_read_session(*row) for row in rows]

    def outcomes(self, keys: Sequence[int]) -> dict[int, tuple[float, bytes]]:
        """Return the recording time and the JSON of each session's outcome, by session key."""
        found: dict[int, tuple[float, bytes]] = {}
        with self._reading() as db:
            for chunk in _chunks(keys):
                query = f"SELECT session, recorded, CAST(outcome AS BLOB) FROM outcomes WHERE session IN ({_placeholders(chunk)})"
                found |= {key: (as_number(at), as_blob(one)) for key, at, one in db.execute(query, chunk).fetchall()}
        return found

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────

    def oldest(self) -> float | None:
        """Return the time of the oldest event, or None if there are no events."""
        with self._reading() as db:
            row = db.execute("SELECT time FROM events ORDER BY seq LIMIT 1").fetchone()
        return None if row is None else as_number(row[0])

    def sum_events(self) -> list[EventTotals]:
        """Return the event totals of each session and each batch."""
        # SQLite guarantees that with a single max(), `time` is taken from the row with the highest number.
        query = (
            f"SELECT session, max(seq), time, sum({_TURNS}),"
            f" sum({_TOKENS}), sum(kind='stage')"
            " FROM events WHERE session!='' GROUP BY session"
        )
        with self._reading() as db:
            return [
                EventTotals(as_name(of), newest, as_number(at), *sums)
                for of, newest, at, *sums in db.execute(query).fetchall()
            ]

    def last_stages(self) -> list[RawEvent]:
        """Return the last stage event of each session."""
        return self._facts("seq IN (SELECT max(seq) FROM events WHERE kind='stage' AND session!='' GROUP BY session)")

    def first_stage(self, session: str) -> RawEvent | None:
        return next(iter(self._facts("session=? AND kind='stage' ORDER BY seq LIMIT 1", values=(session,))), None)

    def stages(self, session: str) -> list[RawEvent]:
        return self._facts("session=? AND kind='stage' ORDER BY seq LIMIT 500", values=(session,))

    def list_gateway_events(self, kinds: Sequence[str]) -> list[RawEvent]:
        """Return the events of these kinds that belong to no session, oldest first."""
        return self._facts(f"session='' AND kind IN ({_placeholders(kinds)}) ORDER BY seq", values=kinds)

    def last_gateway_events(self, kind: str, limit: int) -> list[RawEvent]:
        """Return the newest `limit` events of a kind that belong to no session, oldest first."""
        return self._facts("session='' AND kind=? ORDER BY seq DESC LIMIT ?", values=(kind, limit))[::-1]

    def list_deleted(self) -> list[str]:
        """Return the ids of deleted sessions. A new session may reuse such an id."""
        with self._reading() as db:
            query = "SELECT DISTINCT session FROM events WHERE kind='deleted'"
            return [as_name(session) for (session,) in db.execute(query)]

    def has_opened_event(self, session: str) -> bool:
        """Return whether the event that announces a session's opening still exists."""
        with self._reading() as db:
            query = "SELECT 1 FROM events WHERE session=? AND kind='opened' LIMIT 1"
            return db.execute(query, (session,)).fetchone() is not None

    def list_events_after(self, after: int, limit: int) -> list[RawEvent]:
        return self._facts("seq>? ORDER BY seq LIMIT ?", values=(after, limit))

    def list_changed(self, after: int, limit: int) -> list[str]:
        """Return the ids of the sessions, and the names (`batch:ID`) of the batches, that have events numbered above `after`.

        At most `limit` + 1 values are returned: the extra one shows that there are more than `limit`. Only the first 20,000 of these events
        are read.
        """
        query = (
            "SELECT DISTINCT session FROM"
            " (SELECT session FROM events WHERE seq>? AND session!='' ORDER BY seq LIMIT 20000) AS recent LIMIT ?"
        )
        with self._reading() as db:
            return [as_name(session) for (session,) in db.execute(query, (after, limit + 1)).fetchall()]

    def _facts(self, where: str, values: Sequence[object] = ()) -> list[RawEvent]:
        with self._reading() as db:
            rows = db.execute(
                f"SELECT seq, time, session, kind, CAST(data AS BLOB) FROM events WHERE {where}", values
            ).fetchall()
        return [RawEvent(n, as_number(at), as_name(of), as_text(kind), as_blob(data)) for n, at, of, kind, data in rows]

    def bucket_events(self, seconds: float) -> list[TimeBucket]:
        """Count turns, sampled tokens and outcomes per interval of `seconds` seconds. Empty intervals are omitted."""
        query = (
            f"SELECT CAST(time/? AS INTEGER), sum({_TURNS}),"
            f" sum({_TOKENS}), sum(kind='outcome')"
            " FROM events WHERE kind IN ('turn', 'outcome') GROUP BY 1"
        )
        with self._reading() as db:
            return [TimeBucket(*row) for row in db.execute(query, (seconds,)).fetchall()]

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────

    def count_turns(self, key: int) -> TurnTotals:
        """Read a session's totals and policy versions from its nodes. This is needed if the session's first events were pruned."""
        turns = tokens = 0
        first: int | None = None
        last: int | None = None
        with self._reading() as db:
            query = "SELECT length(ids)/4, CAST(info AS BLOB) FROM nodes WHERE session=? AND kind='sampled' ORDER BY id"
            for size, packed in db.execute(query, (key,)).fetchall():
                tokens += size
                info = _decode_info(packed)
                if info is None:
                    continue
                turns += info.finish != "abort"
                first = info.version_start if first is None else first
                last = info.version_end
        return TurnTotals(turns, tokens, first, last)

    def versions(self, key: int) -> tuple[int, int] | None:
        """Return the policy versions at the start of the first turn and at the end of the last turn.

        Return None if the session has no turns, or if the first or the last turn is damaged.
        """
        query = "SELECT CAST(info AS BLOB) FROM nodes WHERE session=? AND kind='sampled' ORDER BY id {} LIMIT 1"
        with self._reading() as db:
            first = db.execute(query.format(""), (key,)).fetchone()
            if first is None:
                return None
            last = db.execute(query.format("DESC"), (key,)).fetchone()
        first_info, last_info = _decode_info(first[0]), _decode_info(last[0])
        return None if first_info is None or last_info is None else (first_info.version_start, last_info.version_end)

    def state(self, key: int) -> tuple[int, int, int]:
        """Return a value that changes whenever the session's trace changes."""
        query = "SELECT count(*), coalesce(max(id), 0), count(*) FILTER (WHERE delivered<>0) FROM nodes WHERE session=?"
        with self._reading() as db:
            count, newest, delivered = db.execute(query, (key,)).fetchone()
        return count, newest, delivered


def _read_session(
    key: int, session: object, config: object, opened: object, closed: object, status: object, stop: object
) -> RawSession:
    end = None if closed is None else as_number(closed)
    name, values = as_name(session), (as_number(opened), end, as_text(status), as_text(stop))
    damaged = (name, *values) != (session, opened, closed, status, stop)
    return RawSession(key, name, as_blob(config), *values, damaged=damaged)


def _decode_info(packed: bytes) -> SampledInfo | None:
    """Decode the info of a turn. Return None if it is damaged, so that a listing can skip the turn."""
    try:
        return _info.decode(as_blob(packed))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _chunks(values: Sequence[object]) -> Iterator[tuple[object, ...]]:
    for start in range(0, len(values), _MAX_VALUES):
        yield tuple(values[start : start + _MAX_VALUES])


def _placeholders(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))
