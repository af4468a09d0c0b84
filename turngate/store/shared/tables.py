"""The tables of the shared store, and their migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turngate.errors import ConfigError
from turngate.store.audit import POSTGRES_AUDIT_GUARD
from turngate.store.projects import DELETED
from turngate.store.schema import SCHEMA
from turngate.store.shared.cells import CELL_TABLES, SHIPMENT_TABLES
from turngate.store.shared.engines import ENGINE_TABLES
from turngate.store.shared.fence import FENCE_TABLES
from turngate.store.shared.list_tables import LIST_TABLES
from turngate.store.shared.retention import REMOVED_TABLES
from turngate.store.shared.totals import FILL_TOTALS, TOTAL_TABLES
from turngate.store.shared.translation import translate_tables

if TYPE_CHECKING:
    from psycopg import Connection

SHARED_VERSION = 12
_MIGRATION_LOCK = 7_466_721_083  # any constant: the advisory lock that lets only one process migrate at a time
# A transaction that numbers an event holds the counter's row until it commits, so the order of numbers is the order of commits.
_EVENT_NUMBERS = """
CREATE TABLE event_counter (newest BIGINT NOT NULL);
INSERT INTO event_counter VALUES (0);
CREATE FUNCTION next_event() RETURNS BIGINT LANGUAGE sql VOLATILE AS
    'UPDATE event_counter SET newest=newest+1 RETURNING newest';
ALTER TABLE events ALTER seq DROP IDENTITY;
ALTER TABLE events ALTER seq SET DEFAULT next_event();
"""
# The data of an event is JSON. Damaged data becomes NULL, so it does not make the query fail.
_EVENT_JSON = """
CREATE FUNCTION event_json(data BYTEA) RETURNS JSON LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN convert_from(data, 'UTF8')::json;
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;
"""
_MEASURE_SESSIONS = """
DO $$ BEGIN
    IF to_regclass('shipments') IS NOT NULL THEN
        ALTER TABLE shipments ADD COLUMN IF NOT EXISTS bytes BIGINT NOT NULL DEFAULT 0;
        UPDATE shipments SET bytes=measured.size FROM (
            SELECT session, sum(pg_column_size(ids)+coalesce(pg_column_size(logprobs), 0)+pg_column_size(info)
                +pg_column_size(messages)) AS size FROM nodes GROUP BY session) AS measured
        WHERE measured.session=shipments.session;
    END IF;
END $$;
"""
# The statements that migrate a store to the next version, by its current version. New tables need no statements.
_MIGRATIONS = {
    1: TOTAL_TABLES + FILL_TOTALS,  # version 1 summed up the events in every query
    2: "ALTER TABLE IF EXISTS fence_followers ADD COLUMN IF NOT EXISTS busy TEXT NOT NULL DEFAULT '';",
    3: "",  # lacks the tables for projects, keys and the audit log
    4: LIST_TABLES,  # version 4 listed rollouts from memory; the gateway fills the new tables while it runs
    5: "",  # lacks the table for quotas
    6: "",  # lacks the tables for restored stores and closed groups
    7: "",  # lacks the table for removed sessions
    8: _MEASURE_SESSIONS,  # lacks the sizes of sessions
    9: "",  # lacks the table for side data
    10: "ALTER TABLE IF EXISTS fence_followers ADD COLUMN IF NOT EXISTS calls TEXT NOT NULL DEFAULT '';",
    11: """ALTER TABLE rollout_list ADD COLUMN IF NOT EXISTS task_kind TEXT COLLATE "C" NOT NULL DEFAULT '';""",
}


def prepare(db: Connection, where: str, schema: str = "") -> None:
    """Create the tables, or migrate those of an older version. Only one process at a time does so; others wait.

    `schema` is a project's schema, or empty for the main store. A project's schema has its own tables, except that `cells` is a view of the
    table in the main store, and that the tables of the fence and the engines exist only in the main store.
    """
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
        _prepare_tables(db, where, CELL_TABLES + FENCE_TABLES + ENGINE_TABLES)
        if schema:
            _refuse_deleted(db, schema)
            row = db.execute("SELECT current_schema()").fetchone()
            assert row is not None, "the current schema has the tables of the main store"
            cells = f'CREATE OR REPLACE VIEW cells AS SELECT * FROM "{row[0]}".cells;'
            db.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'.encode())
            db.execute(use_schema(schema).encode())
            _prepare_tables(db, where, cells)


def _refuse_deleted(db: Connection, schema: str) -> None:
    """Raise `ConfigError` if the project was deleted.

    Without this check, a gateway that does not yet know about the deletion could create the project's tables again.
    """
    project = schema.removeprefix("project_")
    if db.execute("SELECT 1 FROM settings WHERE name=%s", (f"{DELETED}{project}",)).fetchone() is not None:
        raise ConfigError(f"data: project {project!r} was deleted; use a different project", param="data")


def _prepare_tables(db: Connection, where: str, own_tables: str) -> None:
    """Create or migrate the tables of the current schema. `own_tables` is SQL that creates the tables that differ between schemas."""
    version = read_version(db)
    check_version(version, where)
    if version == SHARED_VERSION:
        return
    if not version:
        _require_empty(db, where)
        db.execute("CREATE TABLE turngate_version (version INTEGER NOT NULL)")
        db.execute("INSERT INTO turngate_version VALUES (0)")
    for step in range(version or SHARED_VERSION, SHARED_VERSION):
        if _MIGRATIONS[step]:
            db.execute(_MIGRATIONS[step].encode())
    db.execute(translate_tables(SCHEMA + own_tables + SHIPMENT_TABLES + REMOVED_TABLES).encode())
    db.execute(POSTGRES_AUDIT_GUARD.encode())
    if not version:
        db.execute((_EVENT_NUMBERS + _EVENT_JSON + TOTAL_TABLES + LIST_TABLES).encode())
    db.execute("UPDATE turngate_version SET version=%s", (SHARED_VERSION,))


def use_schema(schema: str) -> str:
    """Return SQL that makes a transaction use only the tables of a schema. Names of schemas need no escaping."""
    return f'SET LOCAL search_path TO "{schema}"'


def read_version(db: Connection) -> int:
    """Return the version of the tables, or 0 if there are none."""
    row = db.execute("SELECT to_regclass('turngate_version')::text").fetchone()
    if row is None or row[0] is None:
        return 0
    found = db.execute("SELECT version FROM turngate_version").fetchone()
    return 0 if found is None else int(found[0])


def check_version(version: int, where: str) -> None:
    if version > SHARED_VERSION:
        raise ConfigError(
            f"data: the shared store {where} has schema version {version}, but this version of Turngate supports versions only up to "
            f"{SHARED_VERSION}; use the version of Turngate that wrote it, or a newer one",
            param="data",
        )


def _require_empty(db: Connection, where: str) -> None:
    row = db.execute("SELECT to_regclass('sessions')::text, to_regclass('events')::text").fetchone()
    if row is not None and any(row):
        raise ConfigError(
            f"data: {where} contains another program's tables; create an empty database for the shared store",
            param="data",
        )
