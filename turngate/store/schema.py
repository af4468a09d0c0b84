"""The schema version, and the tables for sessions, nodes, preambles and settings. Other modules define the tables that they use."""

from __future__ import annotations

from turngate.store.attempts import ATTEMPT_TABLES
from turngate.store.audit import AUDIT_TABLES
from turngate.store.events import EVENT_TABLES
from turngate.store.feeds import FEED_TABLES
from turngate.store.outbox import OUTBOX_TABLES
from turngate.store.outcomes import OUTCOME_TABLES
from turngate.store.projects import PROJECT_TABLES
from turngate.store.quotas import QUOTA_TABLES
from turngate.store.refusals import REFUSAL_TABLES
from turngate.store.replies import REPLY_TABLES
from turngate.store.restores import RESTORE_TABLES
from turngate.store.side_data import SIDE_DATA_TABLES
from turngate.store.tool_calls import TOOL_CALL_TABLES

SCHEMA_VERSION = 9
BEFORE_EVENTS = 2  # lacks the tables for events, outcomes, tool calls and feeds; opening it for writing adds them
BEFORE_FEEDS = 3  # lacks the tables for feeds
BEFORE_REFUSALS = 4  # lacks the tables for refused calls and stored replies
BEFORE_ATTEMPTS = 5  # lacks the table for attempts, and the names of rollouts in feeds
BEFORE_PROJECTS = 6  # lacks the tables for projects, keys and the audit log
BEFORE_RESTORES = 7  # lacks the tables for restored stores and closed groups
BEFORE_SIDE_DATA = 8  # lacks the table for side data
READABLE_VERSIONS = (
    BEFORE_EVENTS,
    BEFORE_FEEDS,
    BEFORE_REFUSALS,
    BEFORE_ATTEMPTS,
    BEFORE_PROJECTS,
    BEFORE_RESTORES,
    BEFORE_SIDE_DATA,
    SCHEMA_VERSION,
)
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    key INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused
    id TEXT NOT NULL UNIQUE,
    secret BLOB NOT NULL UNIQUE,  -- SHA-256; the secret itself is not stored
    config BLOB NOT NULL,         -- JSON
    opened REAL NOT NULL,
    closed REAL,
    status TEXT NOT NULL,
    vocabulary TEXT NOT NULL DEFAULT '',  -- digest of the tokenizer that its ids belong to
    stop TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS nodes (
    session INTEGER NOT NULL,
    id INTEGER NOT NULL,
    parent INTEGER,
    kind TEXT NOT NULL,           -- context or sampled
    ids BLOB NOT NULL,            -- int32, little-endian
    logprobs BLOB,                -- float32, little-endian
    info BLOB NOT NULL,           -- msgpack of ContextInfo or SampledInfo
    messages BLOB NOT NULL,       -- JSON: the messages that the node's tokens encode
    delivered INTEGER NOT NULL DEFAULT 1,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session, id)
);
CREATE TABLE IF NOT EXISTS preambles (
    session INTEGER NOT NULL,
    digest BLOB NOT NULL,
    tools BLOB NOT NULL,          -- JSON, as the agent sent it
    kwargs BLOB NOT NULL,         -- JSON
    PRIMARY KEY (session, digest)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
SCHEMA += (
    EVENT_TABLES + OUTCOME_TABLES + TOOL_CALL_TABLES + FEED_TABLES + REPLY_TABLES + REFUSAL_TABLES + ATTEMPT_TABLES
)
SCHEMA += OUTBOX_TABLES + PROJECT_TABLES + QUOTA_TABLES + AUDIT_TABLES + RESTORE_TABLES + SIDE_DATA_TABLES
