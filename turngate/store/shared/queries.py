"""Queries over many rollouts that PostgreSQL answers in its own SQL."""

from __future__ import annotations

from turngate.store.queries import EventTotals, RolloutQueries, TimeBucket

# As in SQLite's queries: damaged data counts as 0, an aborted turn has tokens but does not count as a turn.
_TURNS = "coalesce(kind='turn' AND coalesce(event_json(data)->>'finish', '')!='abort' AND event_json(data) IS NOT NULL, false)"
_TOKENS = "CASE WHEN kind='turn' THEN coalesce(CAST(event_json(data)->>'sampled_tokens' AS BIGINT), 0) ELSE 0 END"


class SharedQueries(RolloutQueries):
    def sum_events(self) -> list[EventTotals]:
        query = (
            f"SELECT session, max(seq), (array_agg(time ORDER BY seq DESC))[1], count(*) FILTER (WHERE {_TURNS}),"
            f" CAST(sum({_TOKENS}) AS BIGINT), count(*) FILTER (WHERE kind='stage')"
            " FROM events WHERE session!='' GROUP BY session"
        )
        with self._reading() as db:
            return [EventTotals(*row) for row in db.execute(query).fetchall()]

    def bucket_events(self, seconds: float) -> list[TimeBucket]:
        query = (
            f"SELECT CAST(trunc(time/?) AS BIGINT), count(*) FILTER (WHERE {_TURNS}),"
            f" CAST(sum({_TOKENS}) AS BIGINT), count(*) FILTER (WHERE kind='outcome')"
            " FROM events WHERE kind IN ('turn', 'outcome') GROUP BY 1"
        )
        with self._reading() as db:
            return [TimeBucket(*row) for row in db.execute(query, (float(seconds),)).fetchall()]
