"""A real PostgreSQL server in a folder of its own, on a free port, run by an unprivileged user.

Tests use the fixture `postgres_url`, an empty database on one server per process, or `cut_off_proxy`, the same behind a proxy that can cut
it off. A test that kills, stops or restores a server starts its own with `start_postgres`.
"""

from __future__ import annotations

import itertools
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.needs import require, uses
from tests.ports import free_port
from tests.speed import scaled
from tools import base_image, parts

USER = "turngate"  # the database role
START_S = 30.0
# A killed server loses nothing without fsync, because the kernel keeps what it wrote.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "shared_buffers": "32MB",
}


class PostgresServer:
    """A PostgreSQL server that tests can stop, kill and start again. It keeps its port and its data."""

    def __init__(self, folder: Path, programs: Path, account: dict[str, Any]) -> None:
        self.folder, self.programs, self.port = folder, programs, free_port()
        self._account = account  # of the unprivileged user, as options of Popen
        self._process: subprocess.Popen[bytes] | None = None
        self._count = itertools.count(1)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"test_{next(self._count)}"
        self.query(f"CREATE DATABASE {name}")
        return self.url(name)

    def query(self, sql: str, database: str = "postgres") -> str:
        """Run SQL with psql and return its output, one line for each row, with values separated by `|`."""
        return self.run("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", self.url(database), "-c", sql)

    def run(self, program: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs, such as pg_dump, as the server's user, and return its output."""
        done = subprocess.run(
            [self.programs / program, *arguments], cwd=self.folder, capture_output=True, text=True, **self._account
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout.strip()

    def initialize(self) -> None:
        """Create the data folder. Connections from this machine need no password."""
        self.run("initdb", "-D", str(self.folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        """Start the server and wait until it answers. The children of a killed one may still hold its memory: try again."""
        command = [str(self.programs / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        command += ["-k", str(self.folder)]
        for name, value in SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        deadline = time.monotonic() + scaled(START_S)
        with (self.folder / "log").open("ab") as log:
            while not self._answers():
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                if self._process is None or self._process.poll() is not None:
                    self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._account)
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server in order: end its connections, write everything."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End the server at once, as a power cut would. Its children notice and end too."""
        self._end(signal.SIGKILL)

    def _answers(self) -> bool:
        ready = [self.programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, cwd=self.folder, check=False).returncode == 0

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=scaled(START_S))
            self._process = None


@uses("postgres")
@contextmanager
def start_postgres() -> Iterator[PostgresServer]:
    """Start a new server, and stop and delete it at the end."""
    require("postgres")
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    account: dict[str, Any] = {}
    programs = parts.cache() / "postgres" / "bin"
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        account = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        os.chown(folder, user.pw_uid, user.pw_gid)
        programs = base_image.postgres_programs() or programs
    server = PostgresServer(folder, programs, account)
    try:
        server.initialize()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


class CutOffProxy:
    """A TCP proxy to PostgreSQL. While it is cut, bytes vanish and connections hang, as if a cable were unplugged."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url).port or 5432
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.replace(f":{self._target}/", f":{self._listener.getsockname()[1]}/")
        self._open = threading.Event()
        self._open.set()
        self._stopping = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._stopping = True
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping:
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            with suppress(OSError):
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._open.wait()
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far:
            other = {near: far, far: near}
            while not self._stopping:
                ready = select.select([near, far], [], [], 0.1)[0]
                self._open.wait()
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    other[source].sendall(data)
