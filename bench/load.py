"""Load the gateway with many live sessions while things fail: `python bench/load.py [--sessions 2000] [--turns 25] [--minutes 10]`.

Every session makes its turns at random times. Every few seconds, for half a second, the engine closes connections without an answer,
answers 500 or is slow, or agents drop their connections in the middle of a call. An agent repeats a failed call, as SDKs do. The gateway
keeps traces of at most `--max-loaded-mb` in memory, and evicts the others. Memory is measured every second, and reported after a tenth of
the turns, in the middle and at the end, each as the median of the last ten seconds.

At the end, every session must have a row whose text is the agent's whole conversation, in the template's rendering, with every answer that
the agent has received. If one does not, the run ends with an error and no numbers. With `--max-growth 0.1`, it also ends with an error if
the memory at the end exceeds that after a tenth of the turns by more than a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import signal
import statistics
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import uvloop
from agent import Agent, Http
from overhead import QWEN3, Bench, _admin, _get, _quantile, _require
from processes import HERE, Gateway
from stalls import print_delays

FAULTS = ("reset", "error", "slow", "drop")  # the last one is the agents' own
FAULT_S = 0.5
RETRY_S = 0.1
MEMORY_SAMPLES = 10  # one per second, of which the median is reported
CHECKED_ROWS = 200  # sessions whose rows are compared with the template's rendering


class LoadAgent(Agent):
    """An agent that repeats failed calls, and sometimes drops its connection."""

    def __init__(self, http: Http, session: str, key: str, port: int, seed: int, load: Load) -> None:
        super().__init__(http, session, key, stream=seed % 2 == 1, seed=seed)
        self._port, self._load = port, load

    async def turn(self) -> None:
        began, answered = time.perf_counter(), len(self.latencies)
        while not await self._try():
            self._load.failed += 1
            await asyncio.sleep(RETRY_S)
            self._http.close()
            self._http = await Http.connect(self._port)
        self.latencies[answered:] = [time.perf_counter() - began]  # with all attempts

    async def _try(self) -> bool:
        """Make the call. Return whether it was answered."""
        dropping = self._load.fault == "drop"
        call = asyncio.ensure_future(self._call())
        try:
            if dropping:
                await asyncio.wait([call], timeout=random.uniform(0, 0.01))
                if not call.done():
                    self._load.dropped += 1
                    call.cancel()
                    self._http.close()
            status, reply = await call
        except asyncio.CancelledError:
            if not dropping:
                raise
            return False
        except (OSError, EOFError):
            return False
        is_broken_off = self._stream and not reply.endswith(b"data: [DONE]\n\n")
        if status >= 500 or is_broken_off:
            return False
        self._accept(status, reply)
        return True


class Load:
    """The agents, the faults and the counts of one run."""

    def __init__(self, bench: Bench, gateway: Gateway, minutes: float, fault_every_s: float) -> None:
        self._bench, self._gateway = bench, gateway
        self._seconds, self._fault_every_s = minutes * 60, fault_every_s
        self.fault = ""
        self.faults: Counter[str] = Counter()
        self.failed = self.dropped = self.done = 0
        self.memory: dict[int, float] = {}  # MB, by the number of turns made so far
        self._samples: deque[float] = deque(maxlen=MEMORY_SAMPLES)

    async def run(self, agents: list[LoadAgent], turns: int) -> float:
        """Make all turns. Return the wall time in seconds."""
        rng, total = random.Random(1), len(agents) * turns
        moments = [sorted(rng.uniform(0, self._seconds) for _ in range(turns)) for _ in agents]
        began = time.perf_counter()

        async def run_agent(agent: LoadAgent, due: list[float]) -> None:
            for moment in due:
                await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
                await agent.turn()
                self.done += 1
                if self.done in (total // 10, total // 2, total):
                    self.memory[self.done] = statistics.median(self._samples)

        tasks = [asyncio.create_task(part) for part in (self._cause_faults(rng), self._sample_memory())]
        await asyncio.gather(*map(run_agent, agents, moments))
        for task in tasks:
            task.cancel()
        await _get(self._bench.engine.port, "/bench/fault/none")
        return time.perf_counter() - began

    async def _sample_memory(self) -> None:
        while True:
            self._samples.append(self._gateway.rss_mb())
            await asyncio.sleep(1)

    async def _cause_faults(self, rng: random.Random) -> None:
        while self._fault_every_s:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * self._fault_every_s)
            self.fault = FAULTS[self.faults.total() % len(FAULTS)]
            self.faults[self.fault] += 1
            if self.fault != "drop":
                await _get(self._bench.engine.port, f"/bench/fault/{self.fault}")
            await asyncio.sleep(FAULT_S)
            await _get(self._bench.engine.port, "/bench/fault/none")
            self.fault = ""

    async def check(self, agents: list[LoadAgent], turns: int) -> int:
        """Check that every session has all answers that its agent received. Return the number of recorded turns."""
        recorded = 0
        for n, agent in enumerate(agents):
            shown = await _admin(self._gateway, "GET", f"/admin/sessions/{agent.session}", 200)
            _require(shown["turns"] >= turns, "a turn is missing", shown)
            recorded += shown["turns"]
            if n % max(1, len(agents) // CHECKED_ROWS):
                continue
            found = (await _admin(self._gateway, "GET", f"/admin/sessions/{agent.session}/samples", 200))["samples"]
            # If the agent dropped its last call, there are two rows that differ in the last answer.
            _require(
                any(self._bench.has_context(row, agent) for row in found), "no row is the conversation", agent.session
            )
        return recorded


async def measure(bench: Bench, args: argparse.Namespace) -> None:
    file = bench.folder / "stalls.json"
    gateway = Gateway(
        bench.folder,
        bench.engine,
        bench.tokenizer,
        "load",
        program=HERE / "watched_gateway.py",
        env={"BENCH_STALLS": str(file)},
        arguments=["--max-loaded-mb", str(args.max_loaded_mb)],
    )
    try:
        load = Load(bench, gateway, args.minutes, args.fault_s)
        agents = [await open_agent(gateway, seed, load) for seed in range(args.sessions)]
        start_mb, cpu = gateway.rss_mb(), gateway.cpu_s()
        gateway.send_signal(signal.SIGUSR1)
        wall = await load.run(agents, args.turns)
        cpu = gateway.cpu_s() - cpu
        gateway.send_signal(signal.SIGUSR2)
        while not file.exists():
            await asyncio.sleep(0.05)
        recorded = await load.check(agents, args.turns)
        report(load, agents, args.turns, wall, cpu, recorded)
        print(f"memory: {start_mb:.0f} MB with open sessions", end="")
        print("".join(f", {mb:.0f} MB after {done:,} turns" for done, mb in load.memory.items()))
        print(f"\n{'event loop':14}{'p50':>15}{'p99':>15}{'p99.9':>15}{'longest':>15}   ms late, wall time (CPU time)")
        measured = json.loads(file.read_text())
        print_delays("", measured["delays"])
        print_steps(measured["steps"])
        print_stalls(measured["stalls"], measured["stalled"])
        check_memory(load.memory, args.max_growth)
    finally:
        gateway.stop()


async def open_agent(gateway: Gateway, seed: int, load: Load) -> LoadAgent:
    opened = await _admin(gateway, "POST", "/admin/sessions", 201, b'{"model":"bench"}')
    http = await Http.connect(gateway.port)
    return LoadAgent(http, opened["id"], opened["api_key"], gateway.port, seed, load)


def report(load: Load, agents: list[LoadAgent], turns: int, wall: float, cpu: float, recorded: int) -> None:
    made = len(agents) * turns
    faults = ", ".join(f"{count} × {kind}" for kind, count in load.faults.items())
    print(f"{len(agents):,} sessions, {made:,} turns in {wall:.0f} s, {cpu * 1000 / made:.2f} ms of CPU per turn")
    print(
        f"faults: {faults or 'none'}; {load.failed:,} calls failed, {load.dropped:,} of them dropped by agents; all were repeated"
    )
    print(f"{recorded:,} turns recorded; none of the {made:,} received answers is missing")
    latencies = sorted(s * 1000 for agent in agents for s in agent.latencies)
    p50, p99, p999 = (_quantile(latencies, share) for share in (0.5, 0.99, 0.999))
    print(f"answered in {p50:.0f} ms p50, {p99:.0f} ms p99, {p999:.0f} ms p99.9 (with repeats)")
    medians = sorted(_quantile(sorted(agent.latencies), 0.5) * 1000 for agent in agents)
    low, high = _quantile(medians, 0.01), _quantile(medians, 0.99)
    print(
        f"median of a session: {low:.0f} ms at p1, {high:.0f} ms at p99, {medians[-1]:.0f} ms for the slowest session"
    )


def print_steps(steps: list[tuple[int, int]]) -> None:
    """Print the CPU time of individual steps of requests, of eviction and of loading. `steps` has (0.1 ms, count) pairs, shortest first."""
    total, cells = sum(count for _, count in steps), []
    for share in (0.5, 0.99, 0.999, 1.0):
        left = share * total
        for tenths, count in steps:
            left -= count
            if left <= 0:
                cells.append(f"{tenths / 10:.1f}")
                break
    long = sum(count for tenths, count in steps if tenths > 500)
    print(
        f"{'single steps':14}"
        + "".join(f"{cell:>15}" for cell in cells)
        + f"   ms of CPU; {long} of {total} over 50 ms"
    )


def print_stalls(stalls: list[dict[str, Any]], count: int) -> None:
    """Print what is known about the longest delays over 50 ms."""
    print(f"{count} delays over 50 ms")
    for stall in sorted(stalls, key=lambda s: s["late"], reverse=True)[:10]:
        print(
            f"  {stall['late']:.0f} ms: {stall['cpu']:.0f} ms of CPU, of which garbage collection at most {stall['collected']:.0f} ms; "
            f"waited {stall['queued']:.0f} ms for a core"
        )
        print("".join(f"    in {stack}\n" for stack in stall["stacks"]), end="")


def check_memory(memory: dict[int, float], max_growth: float) -> None:
    first, *_, last = memory.values()
    if last > first * (1 + max_growth):
        raise SystemExit(f"bench: memory has grown from {first:.0f} to {last:.0f} MB, by more than {max_growth:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Load the gateway with many live sessions while things fail.")
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=25, help="turns of each session")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--max-loaded-mb", type=float, default=48.0, help="MB of traces that the gateway keeps in memory"
    )
    parser.add_argument("--fault-s", type=float, default=3.0, help="seconds between faults; 0: no faults")
    parser.add_argument(
        "--max-growth", type=float, default=math.inf, help="of the memory; small runs need some for caches"
    )
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder, Bench(Path(folder), QWEN3) as bench:
        uvloop.run(measure(bench, args))


if __name__ == "__main__":
    main()
