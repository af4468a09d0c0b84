"""Totals of events, kept up to date by triggers, so that listings need not read millions of events.

A trigger changes the totals only after its transaction has locked the event counter, so triggers cannot deadlock.
"""

from __future__ import annotations

BUCKET_SECONDS = 10  # length of the intervals in `bucket_totals`; the page uses the same

# An aborted turn has tokens but does not count as a turn. Damaged data counts as 0.
TURNS = "count(*) FILTER (WHERE kind='turn' AND json IS NOT NULL AND coalesce(json->>'finish', '')!='abort')"
TOKENS = "CAST(sum(coalesce(CAST(json->>'sampled_tokens' AS BIGINT), 0)) AS BIGINT)"
_BY_SESSION = (
    f"SELECT session, max(seq), (array_agg(time ORDER BY seq DESC))[1], {TURNS}, {TOKENS}, count(*) FILTER (WHERE kind='stage')"
    " FROM (SELECT *, CASE WHEN kind='turn' THEN event_json(data) END AS json FROM {source} WHERE {where}) AS read"
    " GROUP BY session ORDER BY session"
)
_BY_BUCKET = (
    f"SELECT CAST(trunc(time/{BUCKET_SECONDS}) AS BIGINT), {TURNS}, {TOKENS}, count(*) FILTER (WHERE kind='outcome')"
    " FROM (SELECT *, CASE WHEN kind='turn' THEN event_json(data) END AS json FROM {source}"
    " WHERE kind IN ('turn', 'outcome')) AS read GROUP BY 1 ORDER BY 1"
)
_ADDED_BY_SESSION = _BY_SESSION.format(source="added", where="session!=''")
_LEFT_BY_SESSION = _BY_SESSION.format(
    source="events", where="session IN (SELECT DISTINCT session FROM removed WHERE session!='')"
)

TOTAL_TABLES = f"""
CREATE TABLE session_totals (
    session TEXT PRIMARY KEY,
    newest BIGINT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    turns BIGINT NOT NULL,
    sampled_tokens BIGINT NOT NULL,
    stages BIGINT NOT NULL
);
CREATE TABLE bucket_totals (
    number BIGINT PRIMARY KEY,
    turns BIGINT NOT NULL,
    sampled_tokens BIGINT NOT NULL,
    outcomes BIGINT NOT NULL
);
CREATE INDEX events_stages ON events (session, seq) WHERE kind='stage';
CREATE INDEX events_deleted ON events (session) WHERE kind='deleted';
CREATE FUNCTION add_to_totals() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO session_totals AS total {_ADDED_BY_SESSION}
    ON CONFLICT (session) DO UPDATE SET
        at=CASE WHEN excluded.newest>total.newest THEN excluded.at ELSE total.at END,
        newest=greatest(total.newest, excluded.newest), turns=total.turns+excluded.turns,
        sampled_tokens=total.sampled_tokens+excluded.sampled_tokens, stages=total.stages+excluded.stages;
    INSERT INTO bucket_totals AS total {_BY_BUCKET.format(source="added")}
    ON CONFLICT (number) DO UPDATE SET
        turns=total.turns+excluded.turns, sampled_tokens=total.sampled_tokens+excluded.sampled_tokens,
        outcomes=total.outcomes+excluded.outcomes;
    RETURN NULL;
END $$;
CREATE FUNCTION remove_from_totals() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM newest FROM event_counter FOR UPDATE;
    DELETE FROM session_totals WHERE session IN (SELECT DISTINCT session FROM removed);
    INSERT INTO session_totals {_LEFT_BY_SESSION};
    UPDATE bucket_totals AS total SET
        turns=total.turns-gone.turns, sampled_tokens=total.sampled_tokens-gone.tokens, outcomes=total.outcomes-gone.outcomes
    FROM ({_BY_BUCKET.format(source="removed")}) AS gone(number, turns, tokens, outcomes) WHERE total.number=gone.number;
    DELETE FROM bucket_totals WHERE turns=0 AND sampled_tokens=0 AND outcomes=0;
    RETURN NULL;
END $$;
CREATE TRIGGER events_added AFTER INSERT ON events REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION add_to_totals();
CREATE TRIGGER events_removed AFTER DELETE ON events REFERENCING OLD TABLE AS removed
    FOR EACH STATEMENT EXECUTE FUNCTION remove_from_totals();
"""
FILL_TOTALS = f"""
INSERT INTO session_totals {_BY_SESSION.format(source="events", where="session!=''")};
INSERT INTO bucket_totals {_BY_BUCKET.format(source="events")};
"""
