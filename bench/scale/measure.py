"""Measure the costs that the model of a cluster needs, and write them to `costs.json`: `python -m bench.scale.measure`.

It takes about five minutes, and needs PostgreSQL, psycopg, Ray and bubblewrap. `--reuse FOLDER` keeps the results of the two longest
benchmarks in a folder, and uses those that are already there.

All figures are CPU time, bytes or counts, except `flush_s` and `sqlite_write_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from bench.scale import shipping
from bench.scale.costs import COSTS, Measurement, Measurements, read_measurements
from tests import page_kit
from turngate.agents.installation import Installation
from turngate.agents.spec import find_agent
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.gateway.deliveries import build_delivery
from turngate.rollout.batch import Batch
from turngate.rollout.classify import Classification
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.executor import Attempt, AttemptResult
from turngate.rollout.order import RolloutOrder
from turngate.rollout.outcome import Outcome
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import get_backend
from turngate.store.store import Store
from turngate.tasks.task import Task

BENCH = Path(__file__).parents[1]
sys.path.insert(0, str(BENCH))

from processes import Process, free_port  # noqa: E402

Found = dict[str, Measurement]


def measure_gateway(folder: Path) -> Found:
    """Measure the cost of a turn in the gateway, with `bench/overhead.py`."""
    results = _run_bench(folder / "overhead.json", "overhead.py")
    by_name = {one["name"]: one for one in results["scenarios"]}
    streamed, paced = by_name["4×100 streamed"], by_name["8×10 streamed, token by token"]
    early, late = (streamed["cpu_ms_at"][turn] / 1000 for turn in ("5", "100"))
    growth = max(0.0, late - early) / 95
    short = by_name["16×20 streamed"]["cpu_ms_at"]["5"] / 1000
    prompt = streamed["prompt_tokens_at"]["20"]
    sent = len(orjson.dumps([100_000 + i for i in range(prompt)]))
    how = "bench/overhead.py"
    return {
        "turn_cpu_s": Measurement(early - 5 * growth, f"{how}: 4×100 streamed, CPU at turn 5"),
        "turn_growth_cpu_s": Measurement(growth, f"{how}: 4×100 streamed, CPU at turn 100 less that at turn 5"),
        "token_cpu_s": Measurement((paced["cpu_ms"] / 1000 - short) / 64, f"{how}: tokens that arrive one by one"),
        "turn_network_bytes": Measurement(sent, f"JSON of the {prompt} prompt ids at turn 20, half of a rollout"),
    }


def measure_rollouts(folder: Path) -> Found:
    """Measure the cost of a rollout and of starting an agent, with `bench/rollouts.py`."""
    size = ("--rollouts", "12", "--concurrency", "4", "--alone", "2", "--only", "bubblewrap")
    plain, graded = _run_bench(folder / "rollouts.json", "rollouts.py", *size)
    (pi,) = _run_bench(folder / "agent.json", "rollouts.py", *size, "--no-grader", "--agent", "pi")
    without, with_grader, with_agent = (
        (one["runner_ms"] + one["sandboxes_ms"] + one["gateway_ms"]) / 1000 for one in (plain, graded, pi)
    )
    how = "bench/rollouts.py, bubblewrap"
    return {
        "rollout_cpu_s": Measurement(with_grader, f"{how}: runner, sandbox processes and gateway, with a grader"),
        "agent_start_cpu_s": Measurement(with_agent - without, f"{how}: Pi with one call, less a run without an agent"),
    }


def _run_bench(path: Path, program: str, *arguments: str) -> Any:
    if not path.exists():
        print(f"· {program} {' '.join(arguments)}", file=sys.stderr, flush=True)
        command = [sys.executable, str(BENCH / program), *arguments, "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return orjson.loads(path.read_bytes())


# ── the driver ──────────────────────────────────────────────────────────────────────────────────────────────────


class _EndedAttempt:
    def __init__(self, order: RolloutOrder) -> None:
        outcome = Outcome(
            session=order.session_id,
            rollout=order.rollout,
            attempt=order.attempt,
            task=order.task.task.id,
            agent="shell",
            version="",
            sandbox="local",
            model="bench",
            status="finished",
        )
        self.result = AttemptResult(outcome, Classification(status="finished", kind="not graded"))

    async def run(self) -> AttemptResult:
        return self.result


class EmptyExecutor:
    """Ends each attempt immediately, so that only the driver's own work remains."""

    async def check(self) -> None: ...

    async def sweep(self) -> None: ...

    def prepare(self, order: RolloutOrder, watch: object, gate: object) -> Attempt:
        return _EndedAttempt(order)


def measure_driver(folder: Path) -> Found:
    """Measure the cost of a rollout in the process that runs a batch: its own work, and one call of a Ray actor."""
    script = folder / "script.json"
    script.write_text('["Done."]', encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "turngate", "serve", "--port", str(port), "--data", str(folder / "driver")]
    command += ["--engine", "scripted", "--script", str(script), "--model", "bench"]
    key = secrets.token_hex(16)
    gateway = Process(command, port, folder / "driver.log", {"TURNGATE_ADMIN_KEY": key})
    try:
        few, many = (asyncio.run(_run_batch(folder, port, key, count)) for count in (10, 310))
    finally:
        gateway.stop()
    own, call = (many - few) / 300, _measure_ray_call()
    source = f"300 rollouts that end at once: {own * 1000:.2f} ms; a call of a Ray actor: {call * 1000:.2f} ms"
    return {"driver_cpu_s": Measurement(own + call, source)}


async def _run_batch(folder: Path, port: int, key: str, count: int) -> float:
    url = f"http://127.0.0.1:{port}"
    plan = BatchPlan(
        tasks=(Task(id="nothing", instruction="Do nothing."),),
        agent=find_agent("shell").spec,
        installed=Installation(),
        backend=get_backend("local"),
        model="bench",
        folder=folder / f"batch-{count}",
        n=count,
        bounds=Bounds(running=64, starting=64, grading=64),
        options={"command": "true"},
        retries=0,
    )
    async with GatewayClient(url, key) as client, GatewayConnector(url) as connector:
        began = time.process_time()
        result = await Batch(plan, client, connector, executor=EmptyExecutor()).run()
        spent = time.process_time() - began
    if not result.complete:
        raise SystemExit(f"bench: the batch did not end: {result.stopped}")
    return spent


def _measure_ray_call(calls: int = 500) -> float:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote(num_cpus=0)
        class Cell:
            async def run(self, order: bytes) -> bytes:
                return order[:2000]

        cell, order = Cell.remote(), os.urandom(6000)  # type: ignore[attr-defined]
        ray.get([cell.run.remote(order) for _ in range(50)])
        began = time.process_time()
        for _ in range(calls // 50):
            ray.get([cell.run.remote(order) for _ in range(50)])
        return (time.process_time() - began) / calls
    finally:
        ray.shutdown()


# ── stores ──────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_store(folder: Path) -> Found:
    """Measure the cost of a delivery to a trainer, and how long a small transaction blocks SQLite."""
    data = folder / "store"
    for n in range(8):
        page_kit.add_long_rollout(data, shipping.TURNS, shipping.TURNS * 1000, name=f"rollout-{n}")
    store = Store(data)
    try:
        config = msgspec.json.encode(FeedConfig(n=8))
        store.feeds.open("bench", config, 8, "", from_start=True)
        row = store.feeds.find("bench")
        assert row is not None
        while store.feeds.fill(row.key, 100):
            pass
        row = store.feeds.find("bench")
        assert row is not None and row.newest == 1
        spent, size = [], 0
        for _ in range(5):
            began = time.process_time()
            size = len(build_delivery(row, 1, 0, store))
            spent.append((time.process_time() - began) / 8)
        writes = []
        for n in range(300):
            began = time.perf_counter()
            store.set_setting("bench", f"{n}" + "x" * 6000)
            writes.append(time.perf_counter() - began)
    finally:
        store.close()
    return {
        "delivery_cpu_s": Measurement(
            min(spent), "build_delivery: 8 rollouts of 50 turns, 50,000 tokens each, from SQLite"
        ),
        "delivery_network_bytes": Measurement(size / 8, "the same: size of the delivery"),
        "sqlite_write_s": Measurement(statistics.median(writes), "a transaction that writes 6 KB, elapsed"),
    }


def measure_page(folder: Path) -> Found:
    """Measure the cost of a refresh of the page for the gateway, with 2,000 rollouts."""
    from page import PageGateway

    (folder / "page").mkdir()
    page_kit.add_rollouts(folder / "page" / "data", 2000)
    gateway = PageGateway(folder / "page")
    try:
        for _ in range(3):
            gateway.fetch("overview"), gateway.fetch("rollouts")
        before = gateway.cpu_s()
        for _ in range(20):
            gateway.fetch("overview"), gateway.fetch("rollouts")
        spent = (gateway.cpu_s() - before) / 20
    finally:
        gateway.stop()
    return {
        "page_cpu_s": Measurement(
            spent, "bench/page.py's gateway: overview and first page of 2,000 rollouts, from SQLite"
        ),
        "page_server_cpu_s": Measurement(0.2, "not measured: the most that a page's query may take"),
    }


def measure_shipping(repeats: int = 3) -> Found:
    """Measure the cost of a shipment for a cell and for PostgreSQL, with one shipper and 1 or 16 sessions per transaction."""
    with shipping.start_server() as (server, url):
        one, many = ([shipping.measure_run(server, url, 1, count, 4.0) for _ in range(repeats)] for count in (1, 16))
        return _measure_lease(server, url) | split_shipping(one, many)


def split_shipping(one: list[shipping.Run], many: list[shipping.Run]) -> Found:
    """Split the medians of the runs into costs per transaction and per session."""
    more = many[0].per_transaction - one[0].per_transaction

    def split(name: str) -> tuple[float, float]:
        single, batch = (
            statistics.median(getattr(run.phases, name) / run.phases.transactions for run in runs)
            for runs in (one, many)
        )
        each = (batch - single) / more
        return max(0.0, single - each), each

    others = statistics.median(
        (run.server_cpu_s - run.phases.before_cpu_s - run.phases.locked_cpu_s) / run.phases.sessions for run in many
    )
    client, before, locked = split("client_cpu_s"), split("before_cpu_s"), split("locked_cpu_s")
    trips, locked_trips = split("before_trips"), split("locked_trips")
    how = "bench/scale/shipping.py, one shipper"
    return {
        "ship_client_cpu_s": Measurement(client[1], f"{how}: slope over sessions per transaction"),
        "ship_client_transaction_cpu_s": Measurement(client[0], f"{how}: the rest of a transaction"),
        "ship_server_cpu_s": Measurement(before[1] + max(0.0, others), f"{how}, with PostgreSQL's other processes"),
        "ship_server_transaction_cpu_s": Measurement(before[0], how),
        "feed_server_cpu_s": Measurement(locked[1], f"{how}: under both locks"),
        "counter_server_cpu_s": Measurement(0.0, "included in feed_server_cpu_s: the two locks are taken together"),
        "counter_server_transaction_cpu_s": Measurement(locked[0], f"{how}: locks, commit"),
        "ship_round_trips": Measurement(trips[0], "counted"),
        "ship_session_round_trips": Measurement(trips[1], "counted"),
        "feed_round_trips": Measurement(locked_trips[1], "counted, under both locks"),
        "counter_round_trips": Measurement(locked_trips[0], "counted, with the commit"),
        "flush_s": Measurement(
            min(run.flush_s for run in one), "pg_stat_wal: sync time per sync, elapsed, the best of the runs"
        ),
        "ship_wal_bytes": Measurement(statistics.median(r.wal_bytes / r.phases.sessions for r in many), how),
        "ship_network_bytes": Measurement(many[0].phases.bytes / many[0].phases.sessions, f"{how}: copied values"),
        "delivery_server_cpu_s": Measurement(before[1] / 2, "not measured: half of what writing the session costs"),
    }


def _measure_lease(server: Any, url: str) -> Found:
    shipper = shipping.BenchShipper(url, "lease", Path(os.environ[shipping.DATA]))
    try:
        shipper.renew()
        before, wal = shipper.server_cpu_s(), int(server.query("SELECT pg_current_wal_lsn() - '0/0'"))
        for _ in range(200):
            shipper.renew()
        spent = (shipper.server_cpu_s() - before) / 200
        written = (int(server.query("SELECT pg_current_wal_lsn() - '0/0'")) - wal) / 200
        memory = _private_bytes(shipper.server_pid)
    finally:
        shipper.close()
    return {
        "lease_server_cpu_s": Measurement(spent, "200 renewals"),
        "lease_wal_bytes": Measurement(written, "200 renewals"),
        "connection_bytes": Measurement(memory, "private memory of the connection's process"),
    }


def _private_bytes(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return 1024.0 * (sizes["Private_Clean"] + sizes["Private_Dirty"])


def describe_machine() -> str:
    cpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    names = dict(line.split(":", 1) for line in cpu.splitlines() if ":" in line)
    model = names.get("Model name", platform.machine()).strip()
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--reuse",
        type=Path,
        help="keep the results of the longest benchmarks in this folder, and use those already there",
    )
    parser.add_argument("--output", type=Path, default=COSTS)
    parser.add_argument("--only", nargs="*", help="measure only these parts, and keep the rest of the file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as name:
        folder = Path(name)
        kept = args.reuse or folder
        parts: dict[str, Callable[[], Found]] = {
            "gateway": lambda: measure_gateway(kept),
            "rollouts": lambda: measure_rollouts(kept),
            "driver": lambda: measure_driver(folder),
            "store": lambda: measure_store(folder),
            "page": lambda: measure_page(folder),
            "shipping": measure_shipping,
        }
        if unknown := set(args.only or ()) - parts.keys():
            raise SystemExit(f"bench: --only {' '.join(sorted(unknown))}: the parts are {', '.join(parts)}")
        found = read_measurements(args.output).costs if args.only else {}
        for part in args.only or parts:
            found |= parts[part]()
    measurements = Measurements(
        describe_machine(), time.strftime("%Y-%m-%d", time.gmtime()), dict(sorted(found.items()))
    )
    measurements.to_costs()
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(measurements)) + b"\n")
    print(f"wrote {len(found)} costs to {args.output}")


if __name__ == "__main__":
    main()
