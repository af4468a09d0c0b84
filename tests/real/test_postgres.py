"""The PostgreSQL server of the tests: every test has its own database, and a killed server keeps what was committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgres import PostgresServer, start_postgres

pytestmark = pytest.mark.needs("postgres")


@pytest.mark.real
def test_each_test_has_its_own_database(postgres_server: PostgresServer, postgres_url: str) -> None:
    import psycopg

    other = postgres_server.create_database()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE only_here (value int)")
    with psycopg.connect(other) as connection:
        assert connection.execute("SELECT to_regclass('only_here')").fetchone() == (None,)


@pytest.mark.full
def test_killed_server_keeps_commits_and_leaves_nothing_behind() -> None:
    with start_postgres() as server:
        server.query("CREATE TABLE kept AS SELECT 1 AS value")
        server.kill()
        server.start()
        assert server.query("SELECT value FROM kept") == "1"
        folder, pid = server.folder, server.pid
    assert not folder.exists() and not Path(f"/proc/{pid}").exists()
