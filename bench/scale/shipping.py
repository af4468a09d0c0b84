"""Ship sessions of 50 turns to a real PostgreSQL, and measure the cost: `python -m bench.scale.shipping`.

Each shipper is a process with a store and an outbox, and ships with the code of a cell: it announces open sessions, reads ended ones from
SQLite, verifies them, writes them to the shared store, and removes them from the outbox. A store has a few sessions with random tokens,
which are shipped again and again under new names. Replacing the names is not part of the cost.

CPU time is read from the kernel's clock of each process, before and after the locks are taken. PostgreSQL runs with its default durability.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psycopg

from tests import postgres
from turngate.client.protocol import FeedConfig
from turngate.common.database_url import parse_database_url
from turngate.gateway.cell.shipping import Shipper
from turngate.store.events import new_event
from turngate.store.outbox import OpenAttempt
from turngate.store.outcomes import RecordedOutcome
from turngate.store.shared.pipeline import PipelinedConnection
from turngate.store.shared.shipments import ShipmentWriter
from turngate.store.shared.store import SharedStore
from turngate.store.shipment import Shipment, open_shipping_reader
from turngate.store.store import NewTurn, Store
from turngate.trace.session import SessionConfig
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo
from turngate.types import ID_DTYPE, LOGPROB_DTYPE

SESSIONS = 32  # of one store; a cell ships as many in one transaction
TURNS, STAGES = 50, 12
CONTEXT_IDS, SAMPLED_IDS = 600, 400
GROUP = 8  # rollouts of one group
SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "track_wal_io_timing": "on",
}
DATA = "BENCH_DATA"  # environment variable: the folder with the sessions
Row = tuple[Any, ...]


class Phases(msgspec.Struct):
    """The measurements of one shipper: CPU seconds of PostgreSQL's process and round trips, before and under the locks."""

    before_cpu_s: float = 0.0
    locked_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    before_trips: int = 0
    locked_trips: int = 0
    bytes: int = 0
    sessions: int = 0
    transactions: int = 0


class RoundTrips:
    """Counts round trips of pipelined connections, and notes when the first lock is taken."""

    def __init__(self) -> None:
        self.count = 0
        self.on_lock: Callable[[], None] = lambda: None
        self._is_locking = False
        execute, flush, copy = PipelinedConnection.execute, PipelinedConnection.flush, PipelinedConnection.copy_encoded

        def watched_execute(db: PipelinedConnection, sql: str, values: Sequence[Any] = ()) -> Any:
            if "FOR UPDATE" in sql or "UPDATE event_counter" in sql:
                self._is_locking = True
            return execute(db, sql, values)

        def watched_flush(db: PipelinedConnection) -> None:
            if self._is_locking:
                self.on_lock()
                self._is_locking = False
            self.count += bool(db._waiting)
            flush(db)

        def watched_copy(db: PipelinedConnection, *arguments: Any) -> None:
            copy(db, *arguments)
            self.count += 2

        PipelinedConnection.execute = watched_execute  # type: ignore[method-assign, assignment]
        PipelinedConnection.flush = watched_flush  # type: ignore[method-assign]
        PipelinedConnection.copy_encoded = watched_copy  # type: ignore[method-assign]


class RenamingTarget:
    """Gives sessions, rollouts and groups new names on their way to the shared store."""

    def __init__(self, target: ShipmentWriter, prefix: str) -> None:
        self._target = target
        self._prefix = prefix
        self.round = 0
        self.bytes = 0
        self.cpu_s = 0.0  # spent on renaming

    def announce(self, attempts: Sequence[OpenAttempt]) -> set[str]:
        began = time.process_time()
        renamed = [
            msgspec.structs.replace(a, session=self._name(a.session), config=self._rename(a.config)) for a in attempts
        ]
        self.cpu_s += time.process_time() - began
        superseded = self._target.announce(renamed)
        return {attempt.session for attempt in attempts if self._name(attempt.session) in superseded}

    def write(self, shipments: Sequence[Shipment]) -> None:
        began = time.process_time()
        renamed = []
        for shipment in shipments:
            name = self._name(shipment.id)
            session = (name, name.encode(), self._rename(shipment.session[2]), *shipment.session[3:])
            assert shipment.outcome is not None
            outcome = (shipment.outcome[0], self._rename(shipment.outcome[1]))
            renamed.append(msgspec.structs.replace(shipment, id=name, session=session, outcome=outcome))
        self.bytes += sum(shipment.trace.size for shipment in shipments)
        self.cpu_s += time.process_time() - began
        self._target.write(renamed)

    def _name(self, session: str) -> str:
        return f"{self._prefix}-{self.round}-{session}"

    def _rename(self, text: bytes) -> bytes:
        return text.replace(b"NAME", f"{self._prefix}-{self.round}".encode())


class BenchShipper:
    """One cell's shipping, with a copy of the store in `data`."""

    def __init__(self, url: str, name: str, data: Path) -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory(prefix="turngate-bench-")
        shutil.copytree(data, self._folder.name, dirs_exist_ok=True)
        self._local = Store(Path(self._folder.name))
        self._shared = SharedStore(parse_database_url(url))
        self._shared.cells.register(name, name, "http://127.0.0.1", 3600.0)
        self._local.outbox.start(name, ())
        self._target = RenamingTarget(ShipmentWriter(self._shared), name)
        self._shipper = Shipper(self._local.outbox, partial(open_shipping_reader, self._local), lambda: self._target)
        self._next = itertools.cycle(range(1, SESSIONS + 1))  # keys
        db = self._shared.database._writer
        assert db is not None
        self._trips = RoundTrips()
        self.server_pid = db.info.backend_pid
        self._server = cpu_clock(self.server_pid)
        self.phases = Phases()

    def ship(self, count: int) -> None:
        """Announce sessions, then ship them in one transaction."""
        phases, locks = self.phases, []
        keys = [next(self._next) for _ in range(count)]
        self._target.round += keys[0] <= count
        self._add_open(keys)
        self._trips.count = 0
        self._trips.on_lock = lambda: locks.append((self._server(), self._trips.count))
        renaming, server = self._target.cpu_s, self._server()
        client = time.process_time()
        self._shipper.announce()
        client = time.process_time() - client
        self._make_due(keys)
        began = time.process_time()
        shipped = self._shipper.ship()
        client += time.process_time() - began
        assert shipped == count
        phases.client_cpu_s += client - (self._target.cpu_s - renaming)
        at, trips = locks[0]
        phases.before_trips += trips
        phases.locked_trips += self._trips.count - trips
        phases.before_cpu_s += at - server
        phases.locked_cpu_s += self._server() - at
        phases.bytes = self._target.bytes
        phases.sessions += count
        phases.transactions += 1

    def _add_open(self, keys: list[int]) -> None:
        with self._local.database.writing() as db:
            for key in keys:
                self._local.outbox.add_open(db, key)

    def _make_due(self, keys: list[int]) -> None:
        with self._local.database.writing() as db:
            for key in keys:
                db.execute("UPDATE outbox SET due=1, revision=revision+1 WHERE session=?", (key,))

    def renew(self) -> None:
        self._shared.cells.renew(self._name)

    def server_cpu_s(self) -> float:
        return self._server()

    def close(self) -> None:
        self._shared.close()
        self._local.close()
        self._folder.cleanup()


def add_sessions(folder: Path) -> None:
    """Create a store with ended sessions of 50 turns."""
    folder.mkdir(parents=True)
    store, rng = Store(folder), random.Random(1)
    try:
        for number in range(SESSIONS):
            _add_session(store, f"session-{number:02}", f"NAME-group-{number // GROUP}", rng)
    finally:
        store.close()


def _add_session(store: Store, name: str, group: str, rng: random.Random) -> None:
    rollout = f"NAME.{name}"
    config = SessionConfig(model="bench", rollout=rollout, attempt=1, metadata={"task": "bench", "group": group})
    opened = new_event(name, "opened", {"mode": "exact", "model": "bench"})
    key = store.add_session(name, name.encode(), config, 1.0, "vocabulary", opened)
    for number in range(STAGES):
        store.events.add(new_event(name, "stage", {"stage": f"stage-{number}", "rollout": rollout, "attempt": 1}))
    parent: Sampled | None = None
    for number in range(TURNS):
        turn = _make_turn(key, name, number, parent, rng)
        store.commit([turn])
        parent = turn.sampled
    store.close_session(key, "sealed", "", 2.0, new_event(name, "sealed", {"stop": "", "turns": TURNS}))
    outcome = RecordedOutcome(kind="graded", reward=rng.random(), group=group, task="bench", data={"seconds": 600.0})
    store.outcomes.put(key, outcome.encode(), new_event(name, "outcome", outcome.event_data()), replace=False)


def _make_turn(key: int, name: str, number: int, parent: Sampled | None, rng: random.Random) -> NewTurn:
    """Return a turn with random ids and log-probabilities, which compress badly."""
    text = " ".join(rng.choice(("def", "value", "return", "self", "import")) + str(rng.random()) for _ in range(80))
    ids = np.array([rng.randrange(150_000) for _ in range(CONTEXT_IDS)], ID_DTYPE)
    context = Context(2 * number, parent, ids, ContextInfo(b"p" * 16, rng.randbytes(16), "t", True))
    ids = np.array([rng.randrange(150_000) for _ in range(SAMPLED_IDS)], ID_DTYPE)
    scores = np.array([-rng.expovariate(3) for _ in range(SAMPLED_IDS)], LOGPROB_DTYPE)
    info = SampledInfo(
        rng.randbytes(16), rng.randbytes(16), rng.randbytes(16), "tool_calls", 1, 1, 1.0, 2.0, excerpts=(text[:100],)
    )
    sampled = Sampled(2 * number + 1, context, ids, scores, info)
    asked = msgspec.json.encode([{"role": "tool", "tool_call_id": f"call-{number}", "content": text}])
    said = msgspec.json.encode({"role": "assistant", "content": text[:800]})
    data = {"node": sampled.id, "finish": "tool_calls", "prompt_tokens": 1000 * number, "sampled_tokens": SAMPLED_IDS}
    event = new_event(name, "turn", {**data, "excerpt": text[:200], "version": 1})
    preamble = (b"p" * 16, b"[]", b"{}") if number == 0 else None
    return NewTurn(key, context, asked, sampled, said, preamble, event)


def cpu_clock(pid: int) -> Callable[[], float]:
    """Return a clock of the user and system time of a process."""
    clock = (~pid << 3) | 2  # the clock id that clock_getcpuclockid(3) returns
    return lambda: time.clock_gettime(clock)


def server_pids(server: postgres.PostgresServer) -> list[int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text(encoding="utf-8")
    return [server.pid, *map(int, children.split())]


def server_cpu_s(server: postgres.PostgresServer) -> float:
    """Return the CPU time so far of all running processes of PostgreSQL."""
    total = 0.0
    for pid in server_pids(server):
        with suppress(OSError):  # a worker of autovacuum, which has just ended
            total += cpu_clock(pid)()
    return total


@contextmanager
def start_server() -> Iterator[tuple[postgres.PostgresServer, str]]:
    """Start a PostgreSQL server with its default durability, and create the tables."""
    postgres.SETTINGS.update(SETTINGS)  # the tests' server trades durability for speed
    with postgres.start_postgres() as server, tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder:
        url = server.create_database()
        shared = SharedStore(parse_database_url(url))
        shared.feeds.open("bench", msgspec.json.encode(FeedConfig(n=GROUP)), GROUP, "", from_start=False)
        shared.close()
        server.query("CHECKPOINT")
        os.environ[DATA] = f"{folder}/data"
        add_sessions(Path(os.environ[DATA]))
        yield server, url


class Run(msgspec.Struct, frozen=True):
    """The results of running several shippers at the same time."""

    shippers: int
    per_transaction: int
    seconds: float
    phases: Phases  # of all together
    server_cpu_s: float
    wal_bytes: float
    flush_s: float
    other_cores: float  # in use by other programs meanwhile

    @property
    def sessions_per_s(self) -> float:
        return self.phases.sessions / self.seconds


def measure_run(server: postgres.PostgresServer, url: str, shippers: int, per_transaction: int, seconds: float) -> Run:
    """Run shippers, each in its own process, and let them ship as fast as they can for some seconds, at least once each."""
    command = [sys.executable, "-m", "bench.scale.shipping", "--worker", url, str(per_transaction), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen([*command, os.urandom(4).hex()], **pipes) for _ in range(shippers)]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()  # it is connected
    begin = time.time() + 0.2
    for process in started:
        assert process.stdin is not None
        process.stdin.write(f"{begin}\n".encode())
        process.stdin.flush()
    with psycopg.connect(url, autocommit=True) as db:
        time.sleep(max(0.0, begin - time.time()))
        before, was_busy = _read_wal(db), _busy_s()
        cpu = server_cpu_s(server)
        outputs = [process.stdout.readline() for process in started if process.stdout is not None]
        took = time.time() - begin
        cpu, busy = server_cpu_s(server) - cpu, _busy_s() - was_busy
        after = _read_wal(db)
    for process in started:
        process.communicate()  # closes its input, so that it ends
    if any(process.returncode for process in started):
        raise SystemExit("bench: a shipper failed, so there are no numbers")
    each = [msgspec.json.decode(output, type=Phases) for output in outputs]
    total = Phases(*(sum(getattr(one, name) for one in each) for name in Phases.__struct_fields__))
    flushes = max(1, after[1] - before[1])
    others = max(0.0, busy - cpu - total.client_cpu_s) / took
    flush_s = (after[2] - before[2]) / 1000 / flushes
    return Run(shippers, per_transaction, took, total, cpu, after[0] - before[0], flush_s, others)


def _read_wal(db: psycopg.Connection[Row]) -> tuple[float, int, float]:
    row = db.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn, wal_sync, wal_sync_time FROM pg_stat_wal").fetchone()
    assert row is not None
    return float(row[0]), int(row[1]), float(row[2])


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, soft, steal = map(int, fields)
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _work(url: str, per_transaction: int, seconds: float, name: str) -> None:
    shipper = BenchShipper(url, name, Path(os.environ[DATA]))
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    time.sleep(max(0.0, begin - time.time()))
    shipper.ship(per_transaction)
    while time.time() < begin + seconds:
        shipper.ship(per_transaction)
    print(msgspec.json.encode(shipper.phases).decode(), flush=True)
    sys.stdin.read()  # PostgreSQL's process must not end before its CPU time is read
    shipper.close()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        url, count, seconds, name = sys.argv[2:]
        _work(url, int(count), float(seconds), name)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("shippers  per transaction  sessions/s  client CPU ms  PostgreSQL CPU ms  WAL KB  other cores")
    with start_server() as (server, url):
        for shippers, count in ((1, 1), (1, 16), (1, 32), (2, 32), (4, 32)):
            runs = [measure_run(server, url, shippers, count, args.seconds) for _ in range(args.repeats)]
            best = max(runs, key=lambda run: run.sessions_per_s)
            client = statistics.median(run.phases.client_cpu_s / run.phases.sessions for run in runs)
            cpu = statistics.median(run.server_cpu_s / run.phases.sessions for run in runs)
            wal = best.wal_bytes / best.phases.sessions / 1000
            cells = f"{shippers:8}{count:17}{best.sessions_per_s:12.0f}{client * 1000:15.2f}{cpu * 1000:19.2f}"
            print(f"{cells}{wal:8.0f}{best.other_cores:13.1f}")


if __name__ == "__main__":
    main()
