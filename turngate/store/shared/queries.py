"""Queries for lists and statistics of rollouts in the shared store. Where possible, they use the totals in `totals.py`."""

from __future__ import annotations

from turngate.store.queries import EventTotals, RolloutQueries, TimeBucket
from turngate.store.shared.totals import BUCKET_SECONDS, TOKENS, TURNS


class SharedQueries(RolloutQueries):
    def sum_events(self) -> list[EventTotals]:
        query = "SELECT session, newest, at, turns, sampled_tokens, stages FROM session_totals"
        with self._reading() as db:
            return [EventTotals(*row) for row in db.execute(query).fetchall()]

    def bucket_events(self, seconds: float) -> list[TimeBucket]:
        query = "SELECT number, turns, sampled_tokens, outcomes FROM bucket_totals"
        values: tuple[float, ...] = ()
        if seconds != BUCKET_SECONDS:
            query, values = _BUCKETS, (float(seconds),)
        with self._reading() as db:
            return [TimeBucket(*row) for row in db.execute(query, values).fetchall()]


_BUCKETS = (
    f"SELECT CAST(trunc(time/?) AS BIGINT), {TURNS}, {TOKENS}, count(*) FILTER (WHERE kind='outcome')"
    " FROM (SELECT *, CASE WHEN kind='turn' THEN event_json(data) END AS json FROM events"
    " WHERE kind IN ('turn', 'outcome')) AS read GROUP BY 1"
)
