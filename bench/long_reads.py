"""Measure whether turns wait for long reads of a large store: `python bench/long_reads.py FOLDER [--only page]`.

FOLDER is a data folder that `fill_store.py` has filled. A gateway serves it, and agents make turns in new sessions. Meanwhile, one read
after the other is repeated for some seconds: lists, the page, a long session, the page's downloads, and `turngate verify`, `export` and
`show`, which are processes of their own and are stopped after that time. Phases without reads come first, in the middle and last.

One phase repeats several reads at once.

For each phase, the table shows the latency of the turns and how late the gateway's event loop was (`watched_gateway.py`). Reads need a
core, and the agents and the engine share the machine with them, so on a busy machine latencies say little. What the gateway itself computes
is less dependent on that. The first `CPU` columns have the CPU time of all its threads from the request of a turn to the end of its
reply: what a read adds to the phases without reads is an upper limit for its delay of a turn. The second ones have the CPU time during one
delay of the loop, which cannot be longer than that because of what the gateway computes for a read.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from fill_store import LONG, TURNS, end_agent, open_agent
from overhead import QWEN3, Bench, _admin, _quantile
from processes import HERE, Gateway

STALL_MS = 50.0
GROUP = "group-0000100"
NOTHING = "nothing"
FORMATS = ("rows", "tree", "sft", "rejection", "dpo", "verl", "slime", "areal", "tinker", "atif")
PAGE = (
    *("overview", "rollouts", "rollouts?sort=-reward&offset=25000", "rollouts?q=task-42", "groups"),
    *(f"group?name={GROUP}", f"group/evidence?name={GROUP}", "training", "training/entropy", "failures"),
    *(f"rollouts/{LONG}{part}" for part in ("", "/tree", "/messages", "/tokens?limit=20000")),
    *(f"rollouts/{LONG}/export?format={form}" for form in ("rows", "messages", "trace")),
    *(f"export?group={GROUP}&format={form}" for form in ("rows", "messages")),
)
ADMIN = (
    *("sessions?limit=1000", "sessions?status=open", "events?wait=0"),
    *(f"sessions/{LONG}{part}" for part in ("", "/trace", "/samples", "/events?wait=0")),
)
TOGETHER = (
    *("/page/api/groups", "/page/api/training", f"/page/api/rollouts/{LONG}/export?format=trace"),
    *("/admin/sessions?limit=1000", "/admin/events?wait=0", "/admin/events?wait=0", f"/admin/sessions/{LONG}/samples"),
)


class Phase(msgspec.Struct):
    """What was measured while one read was repeated. Times are in milliseconds."""

    name: str
    reads: list[float]
    turns: list[float]
    # CPU time of all threads of the gateway from the request of each turn to the end of its reply
    turn_cpu: list[float]
    late: list[float]
    cpu: list[float]  # CPU time of all threads of the gateway in each delay
    loop_cpu: list[float]  # CPU time of the loop's thread in each delay
    step: float  # CPU time of the longest step of a request
    stalls: list[dict[str, Any]]
    gateway_cpu_s: float
    wall_s: float


class Traffic:
    """Agents that make turns until they are stopped. Each session has 20 turns."""

    def __init__(self, gateway: Gateway, agents: int, rate: float) -> None:
        self._gateway = gateway
        self._pause_s = agents / rate
        self._seeds = itertools.count()
        self._tasks = [asyncio.create_task(self._run(seed)) for seed in range(agents)]
        # Start, latency, and CPU time of the gateway meanwhile, in seconds.
        self.turns: list[tuple[float, float, float]] = []

    async def _run(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            agent = await open_agent(self._gateway, next(self._seeds))
            for _ in range(TURNS):
                await asyncio.sleep(rng.uniform(0, 2 * self._pause_s))
                began, cpu = time.perf_counter(), self._gateway.cpu_s()
                await agent.turn()
                self.turns.append((began, agent.latencies[-1], self._gateway.cpu_s() - cpu))
            await end_agent(self._gateway, agent, 1.0)

    async def stop(self) -> None:
        failed = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in failed:
            task.result()


class Reads:
    """Runs reads in other processes, so that they do not delay the agents, which are in this one."""

    def __init__(self, gateway: Gateway, data: Path, folder: Path) -> None:
        self._pool = ProcessPoolExecutor(len(TOGETHER))
        self._data, self._folder = data, folder
        self._address = (gateway.port, gateway.admin_key)

    def list(self) -> dict[str, Callable[[float], Awaitable[bool]]]:
        """Return each read by name. A read gets the seconds that are left, and returns whether it may be repeated."""
        found: dict[str, Callable[[float], Awaitable[bool]]] = {
            path: lambda left, path=path: self._fetch(path)
            for path in (*(f"/page/api/{one}" for one in PAGE), *(f"/admin/{one}" for one in ADMIN), "/metrics")
        }
        found[f"{len(TOGETHER)} reads at once: /page and /admin"] = self._fetch_together
        commands = [["show", LONG], ["verify", LONG], ["verify", "--all"]]
        commands += [["export", form, "--out", str(self._folder / f"{form}.jsonl")] for form in FORMATS]
        for command in commands:
            name = "turngate " + " ".join(command[:2])
            found[name] = lambda left, command=command: self._run(command, left)
        return found

    async def _fetch(self, path: str) -> bool:
        await asyncio.get_running_loop().run_in_executor(self._pool, _fetch, *self._address, path)
        return True

    async def _fetch_together(self, left: float) -> bool:
        end = time.perf_counter() + left

        async def repeat(path: str) -> None:
            while time.perf_counter() < end:
                await self._fetch(path)

        await asyncio.gather(*map(repeat, TOGETHER))
        return False

    async def _run(self, command: list[str], left: float) -> bool:
        """Run a command for as long as is left."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turngate", *command, "--data", str(self._data)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=HERE.parent,
        )
        try:
            _, errors = await asyncio.wait_for(process.communicate(), left)
        except TimeoutError:
            process.kill()
            await process.wait()
            return False
        if process.returncode:
            raise SystemExit(f"bench: {command}: {errors[-500:]!r}")
        return True

    def close(self) -> None:
        self._pool.shutdown()


_page_cookies: dict[int, str] = {}


def _fetch(port: int, key: str, path: str) -> None:
    """Fetch a path, and drop the content. Runs in the process of the pool."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    if port not in _page_cookies:
        connection.request("POST", "/page/login", json.dumps({"key": key}), {"x-turngate-page": "1"})
        response = connection.getresponse()
        response.read()
        _page_cookies[port] = (response.headers["set-cookie"] or "").partition(";")[0]
    connection.request("GET", path, headers={"cookie": _page_cookies[port], "authorization": f"Bearer {key}"})
    response = connection.getresponse()
    while content := response.read(1 << 20):
        if response.status != 200:
            raise SystemExit(f"bench: {path}: {response.status} {content[:300]!r}")
    connection.close()


class Measurement:
    def __init__(self, gateway: Gateway, traffic: Traffic, file: Path) -> None:
        self._gateway, self._traffic, self._file = gateway, traffic, file

    async def run(self, name: str, read: Callable[[float], Awaitable[bool]], seconds: float) -> Phase:
        """Repeat a read for some seconds, and measure the turns and the event loop meanwhile."""
        self._file.unlink(missing_ok=True)
        self._gateway.send_signal(signal.SIGUSR1)
        began, cpu, reads = time.perf_counter(), self._gateway.cpu_s(), []
        may_repeat = True
        while may_repeat and (left := began + seconds - time.perf_counter()) > 0:
            start = time.perf_counter()
            may_repeat = await read(left)
            reads.append((time.perf_counter() - start) * 1000)
        ended = time.perf_counter()
        cpu = self._gateway.cpu_s() - cpu
        self._gateway.send_signal(signal.SIGUSR2)
        while not self._file.exists():
            await asyncio.sleep(0.02)
        found = json.loads(self._file.read_text())
        turns = [turn for turn in self._traffic.turns if began <= turn[0] and turn[0] + turn[1] <= ended]
        latencies, turn_cpu = ([turn[column] * 1000 for turn in turns] for column in (1, 2))
        longest = max((tenths for tenths, _ in found["steps"]), default=0) / 10
        late, own = [wall for wall, _ in found["delays"]], [cpu for _, cpu in found["delays"]]
        return Phase(
            *(name, reads, latencies, turn_cpu, late, found["process_cpu"], own, longest, found["stalls"]),
            gateway_cpu_s=cpu,
            wall_s=ended - began,
        )


async def wait(left: float) -> bool:
    await asyncio.sleep(left)
    return False


HEADER = (
    f"{'':40}{'reads':>6}{'median':>9}{'longest':>9} |{'turns':>6}{'p50':>7}{'p99':>7}{'longest':>9} |"
    f"{'CPU p50':>8}{'p99':>7}{'longest':>9} |{'late p99':>9}{'longest':>9} |{'CPU p99':>8}{'longest':>9}{'loop':>7}{'step':>7}   (ms)"
)


def print_phase(phase: Phase) -> None:
    reads, turns, late = sorted(phase.reads), sorted(phase.turns) or [0.0], sorted(phase.late) or [0.0]
    cpu, in_turn = sorted(phase.cpu) or [0.0], sorted(phase.turn_cpu) or [0.0]
    print(
        f"{phase.name:40}{len(reads):6}{_quantile(reads, 0.5):9.0f}{reads[-1]:9.0f} |"
        f"{len(phase.turns):6}{_quantile(turns, 0.5):7.1f}{_quantile(turns, 0.99):7.1f}{turns[-1]:9.1f} |"
        f"{_quantile(in_turn, 0.5):8.1f}{_quantile(in_turn, 0.99):7.1f}{in_turn[-1]:9.1f} |"
        f"{_quantile(late, 0.99):9.1f}{late[-1]:9.1f} |"
        f"{_quantile(cpu, 0.99):8.1f}{cpu[-1]:9.1f}{max(phase.loop_cpu, default=0.0):7.1f}{phase.step:7.1f}",
        flush=True,
    )


def print_stalls(phase: Phase) -> None:
    """Print the delays during which the gateway computed for over 50 ms."""
    for stall in phase.stalls:
        if stall["process_cpu"] > STALL_MS:
            print(
                f"    {stall['late']:.0f} ms late: {stall['process_cpu']:.0f} ms of CPU, {stall['cpu']:.0f} ms of the loop"
            )
            print("".join(f"      in {stack}\n" for stack in stall["stacks"][:1]), end="", flush=True)


async def measure(bench: Bench, data: Path, args: argparse.Namespace) -> list[Phase]:
    file = bench.folder / "stalls.json"
    gateway = Gateway(
        data.parent,
        bench.engine,
        bench.tokenizer,
        data.name,
        program=HERE / "watched_gateway.py",
        env={"BENCH_STALLS": str(file)},
    )
    reads = Reads(gateway, data, bench.folder)
    phases: list[Phase] = []
    try:
        listed = await _admin(gateway, "GET", "/admin/sessions?limit=1", 200)
        print(f"{listed['sessions'][0]['key']:,} sessions; ready after {gateway.ready_s:.1f} s\n\n{HEADER}", flush=True)
        traffic = Traffic(gateway, args.agents, args.rate)
        measurement = Measurement(gateway, traffic, file)
        await asyncio.sleep(5)
        chosen = {name: read for name, read in reads.list().items() if args.only in name}
        plan: list[tuple[str, Callable[[float], Awaitable[bool]]]] = [(NOTHING, wait)]
        for number, one in enumerate(chosen.items(), 1):
            plan += [one, (NOTHING, wait)] if number % 8 == 0 or number == len(chosen) else [one]
        for name, read in plan:
            phase = await measurement.run(name, read, args.seconds)
            phases.append(phase)
            print_phase(phase)
            print_stalls(phase)
        await traffic.stop()
        print(f"\n{gateway.rss_mb():.0f} MB resident")
    finally:
        gateway.stop()
        reads.close()
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure whether turns wait for long reads of a large store.")
    parser.add_argument("data", type=Path, help="data folder, filled by fill_store.py; new sessions are added to it")
    parser.add_argument("--only", default="", help="only reads with this in their name")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--rate", type=float, default=16.0, help="turns per second of all agents together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measurements to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder, Bench(Path(folder), QWEN3) as bench:
        phases = uvloop.run(measure(bench, args.data.absolute(), args))
    if args.json:
        args.json.write_bytes(msgspec.json.encode(phases))


if __name__ == "__main__":
    main()
