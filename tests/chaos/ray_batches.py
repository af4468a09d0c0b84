"""Faults of a batch on a Ray cluster with a shared store: of a node, of its cell, and of the driver."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psycopg

from tests import needs
from tests.chaos.batch_runs import AGENT, BatchFault, BatchRun, N, run_batch_fault
from tests.chaos.control import detect_batch_plants
from tests.chaos.engine import MODEL, serve_engine
from tests.chaos.sites import Site
from tests.chaos.suite import Pace, Row, verify_store
from tests.cluster.batch_kit import find_processes, list_cells
from tests.cluster.ray_kit import LocalRay, ray_python, start_ray
from tests.crash.storm import Server
from tests.postgres import PostgresServer, start_postgres
from tests.verify.kit import Tampering
from tools.tier import descendants
from turngate.render import BUILTIN_TOKENIZER
from turngate.sandboxes.local import LocalBackend
from turngate.store.shared.translation import translate_statement

LEASE_S = 6.0
SLOTS = 2  # of each of the two nodes
NODE = "a"  # the node that faults hit; Ray's own store is on the other one, `head`
RUNNER, GATEWAY, ACTOR = "order_runner", "turngate cell", "ray::CellActor"  # the processes of a cell
PAUSE_S, TRIES = 1.0, 300  # of agents: after each answer, and how often a failed call is repeated
# Ray declares a node dead after three checks of five seconds; its default is more than a minute.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
TEST = 'read -r guess < guess; [ "$guess" = right ]'


def explain_missing() -> str | None:
    """Return why these faults cannot be injected here, or None if they can."""
    return needs.missing("ray") or needs.missing("postgres")


class RaySite(Site):
    """A cluster of two nodes, an engine, and a gateway on the shared store, which shows what the cells have shipped."""

    cluster: LocalRay
    database: PostgresServer
    env: Mapping[str, str]  # of the nodes

    @property
    def sandboxes(self) -> Path:
        return Path(self.env["TMPDIR"], f"turngate-{os.getuid()}")

    def add_node(self) -> None:
        self.cluster.add_node(NODE, slots=SLOTS, **self.env)

    def list_processes(self, program: str, node: str = NODE) -> list[int]:
        """Return the processes of a node that run a program."""
        return [pid for pid, line in self.cluster.nodes[node].processes().items() if program in line]


@asynccontextmanager
async def open_ray(rng: random.Random) -> AsyncIterator[RaySite]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-chaos-")))
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-"))
        postgres = await asyncio.to_thread(stack.enter_context, start_postgres())
        reader = Server(folder, "process", 1, [], data=postgres.create_database())
        reader.start()
        stack.callback(reader.kill)
        await reader.ready()
        engine = await stack.enter_async_context(serve_engine(rng))
        site = RaySite(reader, engine, rng)
        site.database, site.env = postgres, {**HEALTH, "TMPDIR": temporary}
        site.cluster = await asyncio.to_thread(stack.enter_context, start_ray(slots=SLOTS, **site.env))
        await asyncio.to_thread(site.add_node)
        yield site


class RayRun(BatchRun):
    """`turngate batch --ray` as a process."""

    site: RaySite

    def start(self) -> None:
        site, rows, config = self.site, self.root / "tasks.jsonl", self.root / "gateway.toml"
        grader = {"type": "script", "files": {"test.sh": TEST}, "decides": "exit code"}
        tasks = [{"id": name, "instruction": f"Guess. This is {name}.", "grader": grader} for name in self.names]
        rows.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        config.write_text(f"lease_s = {LEASE_S}\n")
        agent = f"command=exec {sys.executable} -I -S {shutil.copy(AGENT, self.root)} {PAUSE_S} {TRIES}"
        command = [str(ray_python()), "-m", "turngate", "batch", "--ray", site.cluster.address]
        command += ["--data", site.server.data, "--config", str(config), "--out", str(self.out), "--tasks", str(rows)]
        command += ["--agent", "shell", "--set", agent, "--sandbox", "local", "--n", str(N)]
        command += ["--concurrency", str(2 * SLOTS), "--engine", "vllm", "--engine-url", site.engine.url]
        self.launch([*command, "--model", MODEL, "--tokenizer", str(BUILTIN_TOKENIZER)], site.cluster.environment())

    async def wait_for_start(self) -> None:
        """Wait until both nodes have a cell, an agent runs on the one that the fault will hit, and the first call was answered."""
        before = len(self.site.engine.generations)
        await self.wait_until_running(lambda: self.read_output().count("is ready") >= 2, "both cells were ready")
        await self.wait_until_running(lambda: self.site.list_processes(AGENT.name), "an agent ran")
        await self.wait_until_running(lambda: len(self.site.engine.generations) > before, "an agent got an answer")
        await asyncio.sleep(self.site.rng.random())

    def find_logs(self) -> dict[str, Path]:
        return {path.parent.name: path for path in self.site.cluster.folder.glob("*/*/cell-*/rollouts/*/stdout")}

    async def list_leftovers(self) -> list[str]:
        processes = await asyncio.to_thread(find_processes, self.site.sandboxes)
        cells = await asyncio.to_thread(list_cells, self.site.cluster)
        return [*processes, *cells, *map(str, self.site.sandboxes.glob("*local-*"))]

    def check_attempts(self, row: Row) -> None:
        """Check that each rollout has one attempt that counts, and that it is the one in the ledger."""
        state = self.state()
        assert state.head is not None
        query = f"SELECT rollout, session FROM attempts WHERE state='settled' AND rollout LIKE '{state.head.batch}.%'"
        found = self.site.database.query(query, self.site.server.data.rpartition("/")[2]).splitlines()
        settled = Counter((line.partition("|")[0], line.partition("|")[2]) for line in found)
        counted = Counter((done.rollout, done.session) for done in state.finished.values())
        row.breaches.duplicated += (extra := settled - counted).total()
        row.breaches.lost += (missing := counted - settled).total()
        row.notes += [f"attempts that count twice: {extra}"] if extra else []
        row.notes += [f"attempts that do not count: {missing}"] if missing else []

    @contextmanager
    def tamper(self, session: str) -> Iterator[Tampering]:
        with psycopg.connect(self.site.server.data, autocommit=True) as db:
            yield Tampering(cast(sqlite3.Connection, _TranslatedConnection(db)), session)


class _TranslatedConnection:
    """Executes SQLite's statements on PostgreSQL."""

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db

    def execute(self, statement: str, values: Sequence[object] = ()) -> psycopg.Cursor[Any]:
        return self._db.execute(translate_statement(statement).encode(), values)


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _join_again(run: RayRun) -> None:
    """Start the node again, as a machine that reboots, and let the next batch wait until it has joined."""
    joining = asyncio.create_task(asyncio.to_thread(run.site.add_node))
    run.at_end.push_async_callback(lambda: joining)


async def _kill_node(run: RayRun, seconds: float) -> None:
    """End all processes of a node at once. The next cell on its machine removes the sandboxes, and so does the end of this batch."""
    await asyncio.to_thread(run.site.cluster.nodes[NODE].kill)
    run.at_end.push_async_callback(LocalBackend(run.site.sandboxes).sweep)
    await asyncio.sleep(seconds)
    await _join_again(run)


async def _pause_node(run: RayRun, seconds: float) -> None:
    """Stop all processes of a node until Ray declares it dead and its lease has ended. Then it comes back, too late."""
    node = run.site.cluster.nodes[NODE]
    async with _stopped([*node.processes()]):
        await run.wait_until(lambda: re.search(f"(node|cell on) {NODE} is lost", run.read_output()))
        await asyncio.sleep(LEASE_S + seconds)
    await run.wait_until(lambda: node.process.poll() is not None)  # its raylet notices that it was declared dead
    await asyncio.to_thread(node.stop)
    await _join_again(run)


async def _kill_actor(run: RayRun, seconds: float) -> None:
    _send(run.site.list_processes(ACTOR), signal.SIGKILL)


async def _kill_runner(run: RayRun, seconds: float) -> None:
    _send(run.site.list_processes(RUNNER), signal.SIGKILL)


async def _kill_gateway(run: RayRun, seconds: float) -> None:
    _send(run.site.list_processes(GATEWAY), signal.SIGKILL)


async def _pause_cell(run: RayRun, seconds: float) -> None:
    """Stop the processes of a cell, with its sandboxes."""
    runners = run.site.list_processes(RUNNER)
    async with _stopped([*runners, *(pid for runner in runners for pid in descendants(runner))]):
        await asyncio.sleep(seconds)


async def _outlast_lease(run: RayRun, seconds: float) -> None:
    await _pause_cell(run, max(seconds, 1.5 * LEASE_S))


async def _kill_driver(run: RayRun, seconds: float) -> None:
    run.process.kill()
    run.process.wait()
    run.start()


@asynccontextmanager
async def _stopped(pids: Sequence[int]) -> AsyncIterator[None]:
    _send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], number: int) -> None:
    assert pids, "there is no such process"
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


RAY_FAULTS: dict[str, BatchFault] = {
    "ray: kill -9 of a node": BatchFault(_kill_node),
    "ray: SIGSTOP of a node until it counts as dead": BatchFault(_pause_node),
    "ray: kill -9 of a cell's actor": BatchFault(_kill_actor),
    "ray: kill -9 of a cell's runner": BatchFault(_kill_runner),
    "ray: kill -9 of a cell's gateway": BatchFault(_kill_gateway),
    "ray: SIGSTOP of a cell": BatchFault(_pause_cell),
    "ray: SIGSTOP of a cell for longer than its lease": BatchFault(_outlast_lease),
    "ray: kill -9 of the driver": BatchFault(_kill_driver),
}


async def run_ray_faults(
    names: list[str], pace: Pace, seed: int, report: Callable[[Row], None]
) -> tuple[list[Row], dict[str, bool]]:
    """Inject faults, one batch for each. Return the results, and whether damage to the last batch was detected."""
    rng = random.Random(f"{seed} ray")
    rows = []
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(open_ray(rng))
        for name in [name for _ in range(pace.rounds) for name in rng.sample(names, len(names))]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-"))
            run = RayRun(site, Path(folder), pace.tasks)
            rows.append(await run_batch_fault(run, name, RAY_FAULTS[name], pace))
            report(rows[-1])
        rows.append(await verify_store(site))
        report(rows[-1])
        detected = await detect_batch_plants(run)
    return rows, {f"a batch on Ray: {plant}": found for plant, found in detected.items()}
