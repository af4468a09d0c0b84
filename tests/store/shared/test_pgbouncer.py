"""The shared store behind PgBouncer in transaction mode, where a connection changes its server between transactions."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.ports import free_port
from tests.postgres import USER, PostgresServer
from tests.speed import scaled
from tests.store.kit import event, finish_rollout, open_shared
from tests.store.shared.test_concurrency import run_writers
from turngate.store.store import Store


@contextmanager
def start_pgbouncer(server: PostgresServer, folder: Path) -> Iterator[int]:
    """Run PgBouncer with two server connections, and yield its port."""
    port = free_port()
    (folder / "users").write_text(f'"{USER}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"auth_type = trust\nauth_file = {folder}/users\npool_mode = transaction\ndefault_pool_size = 2\nunix_socket_dir =\n"
    )
    options = {}
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        for path in (folder, *folder.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    process = subprocess.Popen([program, "-q", str(folder / "pgbouncer.ini")], stderr=subprocess.PIPE, **options)
    try:
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.real
@pytest.mark.needs("postgres", "pgbouncer")
def test_store_works_behind_pgbouncer(postgres_server: PostgresServer, postgres_url: str) -> None:
    """More connections than servers: groups complete once, events keep their order, snapshots stay whole."""
    folder = postgres_server.folder / "pgbouncer"
    folder.mkdir(mode=0o755)
    with start_pgbouncer(postgres_server, folder) as port:
        url = f"postgresql://{USER}@127.0.0.1:{port}/{postgres_url.rpartition('/')[2]}"
        deadline = time.monotonic() + scaled(20)
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        store = open_shared(url)
        reader = store.open_reader()
        feed = store.feeds.open("f", b"{}", 4, "", from_start=False)

        def record(other: Store, number: int) -> None:
            for n in range(10):
                finish_rollout(other, f"r{number}-{n}", f"g{n}")

        run_writers(url, 4, record)
        row = store.feeds.find("f")
        assert row is not None and row.newest == 10 and store.feeds.waiting(feed.key, 9) == []
        with reader.snapshot():
            before = reader.events.newest()
            store.events.add(event("", "note"))
            assert reader.events.newest() == before
        assert reader.events.newest() == before + 1
        store.close()
        reader.close()
