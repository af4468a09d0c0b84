"""The tables behind the lists of rollouts and groups. `rollout_list.py` writes them, and `rollout_pages.py` reads them."""

from __future__ import annotations

LIST_TABLES = """
CREATE TABLE rollout_list (
    id TEXT COLLATE "C" PRIMARY KEY,
    key BIGINT NOT NULL,
    name TEXT NOT NULL,
    team TEXT COLLATE "C" NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    task_kind TEXT COLLATE "C" NOT NULL DEFAULT '',
    batch TEXT NOT NULL,
    agent TEXT COLLATE "C" NOT NULL,
    agent_version TEXT NOT NULL,
    model TEXT COLLATE "C" NOT NULL,
    mode TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    status TEXT NOT NULL,
    stage TEXT NOT NULL,
    class TEXT COLLATE "C" NOT NULL,
    reward DOUBLE PRECISION,
    resolved BOOLEAN,
    stop TEXT NOT NULL,
    message TEXT NOT NULL,
    warning TEXT NOT NULL,
    excluded TEXT NOT NULL,
    opened DOUBLE PRECISION NOT NULL,
    closed DOUBLE PRECISION,
    seen DOUBLE PRECISION NOT NULL,
    turns BIGINT NOT NULL,
    sampled_tokens BIGINT NOT NULL,
    version_start BIGINT,
    version_end BIGINT,
    recorded DOUBLE PRECISION,
    usable_reward DOUBLE PRECISION,
    damage TEXT NOT NULL,
    failure TEXT NOT NULL,
    failure_text TEXT NOT NULL,
    search_text TEXT NOT NULL
);
CREATE INDEX rollout_list_opened ON rollout_list (opened, id);
CREATE INDEX rollout_list_seen ON rollout_list (seen, id);
CREATE INDEX rollout_list_turns ON rollout_list (turns, id);
CREATE INDEX rollout_list_tokens ON rollout_list (sampled_tokens, id);
CREATE INDEX rollout_list_reward ON rollout_list (reward, id);
CREATE INDEX rollout_list_reward_down ON rollout_list (reward DESC NULLS LAST, id DESC);
CREATE INDEX rollout_list_version ON rollout_list (version_start, id);
CREATE INDEX rollout_list_version_down ON rollout_list (version_start DESC NULLS LAST, id DESC);
CREATE INDEX rollout_list_closed ON rollout_list (closed, id);
CREATE INDEX rollout_list_closed_down ON rollout_list (closed DESC NULLS LAST, id DESC);
CREATE INDEX rollout_list_task ON rollout_list ((nullif(task, '')), id);
CREATE INDEX rollout_list_task_down ON rollout_list ((nullif(task, '')) DESC NULLS LAST, id DESC);
CREATE INDEX rollout_list_tasks ON rollout_list (task, opened, id);
CREATE INDEX rollout_list_classes ON rollout_list (class, opened, id);
CREATE INDEX rollout_list_teams ON rollout_list (team, opened);
CREATE INDEX rollout_list_names ON rollout_list (name, attempt) WHERE name<>'';
CREATE INDEX rollout_list_silent ON rollout_list (seen) WHERE status IN ('starting', 'finishing');
CREATE INDEX rollout_list_failures ON rollout_list (failure, failure_text, opened) WHERE failure<>'';
CREATE INDEX rollout_list_rewards ON rollout_list (recorded) INCLUDE (usable_reward, version_start) WHERE recorded IS NOT NULL;
CREATE TABLE group_list (
    team TEXT COLLATE "C" PRIMARY KEY,
    task TEXT COLLATE "C" NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    rollouts BIGINT NOT NULL,
    running BIGINT NOT NULL,
    mean_reward DOUBLE PRECISION,
    pass_at_1 DOUBLE PRECISION,
    opened DOUBLE PRECISION NOT NULL,
    latest DOUBLE PRECISION NOT NULL,
    search_text TEXT NOT NULL,
    summary BYTEA NOT NULL
);
CREATE INDEX group_list_latest ON group_list (latest, team);
CREATE TABLE rollout_counts (
    field TEXT NOT NULL,
    value TEXT COLLATE "C" NOT NULL,
    rollouts BIGINT NOT NULL,
    PRIMARY KEY (field, value)
);
CREATE TABLE delivery_list (
    seq BIGINT PRIMARY KEY,
    feed TEXT NOT NULL,
    number BIGINT NOT NULL,
    team TEXT COLLATE "C" NOT NULL,
    rollouts BIGINT NOT NULL,
    at DOUBLE PRECISION NOT NULL
);
CREATE INDEX delivery_list_teams ON delivery_list (team);
CREATE TABLE version_list (
    version BIGINT PRIMARY KEY,
    at DOUBLE PRECISION NOT NULL
);
CREATE TABLE rollout_list_state (
    newest BIGINT NOT NULL,
    filled BIGINT
);
INSERT INTO rollout_list_state SELECT newest, 0 FROM event_counter;
"""
