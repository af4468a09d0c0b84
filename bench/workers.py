"""Measure `--workers N`: turns per second with one worker and with several, and the cost of sharing.

    python bench/workers.py [--workers 2] [--sessions 32] [--turns 20] [--repeats 3] [--scripted] [--pin]
    python bench/workers.py --sessions 1000 --think 4 --repeats 1 --only 2      memory and latency of many open sessions

Gateways with one and with N workers run at the same time and are measured alternately, so that both see the same machine. The best of the
repeats is used. Every session sends its next turn as soon as it has the last answer, or `--think` seconds later. The load is as cheap as
possible: one real session is played first to record the model's replies. After that, requests are joined from prepared parts, and replies
are counted but not parsed. The recordings are checked afterwards: every session must have all turns in one row, without a fork.

If the machine has as many cores as workers, the load uses part of them, so also compare the CPU per turn. `--scripted` runs the engine in
the gateway, so that only the driver uses the other cores. `--pin` gives the gateway the first N cores, and the load the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from agent import Agent, Http, _dumps, system_prompt, task, tool_result
from overhead import BUILTIN, QWEN3, Bench, _admin, _get, _quantile, _require, calibrate
from processes import Gateway, cpu_s, rss_mb


class SessionConnection(asyncio.Protocol):
    """The connection of one session. It sends a turn, waits for the last byte of the reply, and sends the next."""

    def __init__(self, key: str, seed: int, replies: Sequence[bytes], tail: bytes, think_s: float) -> None:
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            "accept: application/json\r\ncontent-type: application/json\r\nuser-agent: OpenAI/Python\r\ncontent-length: "
        ).encode()
        first = [
            _dumps({"role": "system", "content": system_prompt()}),
            _dumps({"role": "user", "content": task(seed)}),
        ]
        self._history = b'{"messages":[' + b",".join(first)
        # Added before each later turn: the model's reply and the tool result.
        self._additions = [
            b"," + message + b"," + _dumps({"role": "tool", "tool_call_id": f"c{n}", "content": tool_result(seed, n)})
            for n, message in enumerate(replies, 1)
        ]
        self._tail = tail
        self._think_s = think_s
        self._rng = random.Random(seed)
        self._remaining = 0
        self._turn = 0
        self.latencies: list[float] = []
        self.ends: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as it always is
        self._transport = transport

    def send_after_pause(self) -> None:
        """Send the next turn after a pause, like an agent that runs tools."""
        if not self._think_s:
            self.send()
        else:
            wait = self._think_s * self._rng.uniform(0.5, 1.5)
            asyncio.get_running_loop().call_later(wait, self.send)

    def send(self) -> None:
        size = len(self._history) + len(self._tail)
        self._began = time.perf_counter()
        self._transport.write(b"%b%d\r\n\r\n%b%b" % (self._head, size, self._history, self._tail))

    def data_received(self, data: bytes) -> None:
        if not self._remaining:
            end = data.find(b"\r\n\r\n") + 4
            _require(end > 4 and data.startswith(b"HTTP/1.1 200"), "the gateway rejected a turn", data[:300])
            at = data.find(b"content-length: ") + 16
            self._remaining = int(data[at : data.find(b"\r", at)]) + end
        self._remaining -= len(data)
        if self._remaining:
            return
        now = time.perf_counter()
        self.latencies.append(now - self._began)
        self.ends.append(now)
        if self._turn == len(self._additions):
            self.done.set_result(None)
            return
        self._history += self._additions[self._turn]
        self._turn += 1
        self.send_after_pause()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("bench: the gateway closed the connection"))

    def close(self) -> None:
        self._transport.close()


class Run(msgspec.Struct):
    """The measurements of one repeat."""

    turns_per_s: float
    gateway_ms: float  # CPU per turn of all its processes
    front_ms: float
    engine_ms: float
    driver_ms: float
    mb_per_session: float
    p50_ms: float
    p99_ms: float
    others: float  # cores used by other processes meanwhile
    calibration_ms: float


async def record_reference(bench: Bench, gateway: Gateway, turns: int) -> tuple[list[bytes], bytes]:
    """Play a real session. Return the model's reply of each turn as the agent sends it back, and the end of the request."""
    opened = await _admin(gateway, "POST", "/admin/sessions", 201, b'{"model":"bench"}')
    agent = Agent(await Http.connect(gateway.port), opened["id"], opened["api_key"], stream=False, seed=0)
    for _ in range(turns - 1):
        await agent.turn()
    agent.close()
    replies = []
    for n, message in enumerate(agent._messages[2::2], 1):
        wire = msgspec.json.decode(message)
        wire["tool_calls"][0]["id"] = f"c{n}"  # with our own ids, replies need not be parsed for them
        replies.append(_dumps(wire))
    return replies, agent._tail


async def run_once(
    bench: Bench, gateway: Gateway, sessions: int, replies: Sequence[bytes], tail: bytes, think_s: float = 0.0
) -> Run:
    opened = [await _admin(gateway, "POST", "/admin/sessions", 201, b'{"model":"bench"}') for _ in range(sessions)]
    loop = asyncio.get_running_loop()
    connections = [
        SessionConnection(session["api_key"], seed, replies, tail, think_s) for seed, session in enumerate(opened)
    ]
    speed = calibrate()
    for connection in connections:
        await loop.create_connection(lambda connection=connection: connection, "127.0.0.1", gateway.port)
    family = gateway.family()
    before, own, engine, size = (
        [*map(cpu_s, family)],
        time.process_time(),
        bench.engine.cpu_s(),
        sum(map(rss_mb, family)),
    )
    busy = busy_s()
    began = time.perf_counter()
    for connection in connections:
        connection.send_after_pause()
    await asyncio.gather(*(connection.done for connection in connections))
    wall = time.perf_counter() - began
    busy = busy_s() - busy
    spent = [after - was for after, was in zip(map(cpu_s, family), before, strict=True)]
    own, engine = time.process_time() - own, bench.engine.cpu_s() - engine
    turns = sessions * (len(replies) + 1)
    latencies = sorted(s * 1000 for connection in connections for s in connection.latencies)
    run = Run(
        turns_per_s=steady_rate([end for connection in connections for end in connection.ends]),
        gateway_ms=sum(spent) * 1000 / turns,
        front_ms=spent[0] * 1000 / turns if len(family) > 1 else 0.0,
        engine_ms=engine * 1000 / turns,
        driver_ms=own * 1000 / turns,
        others=max(0.0, busy - sum(spent) - own - engine) / wall,
        mb_per_session=(sum(map(rss_mb, family)) - size) / sessions,
        p50_ms=_quantile(latencies, 0.5),
        p99_ms=_quantile(latencies, 0.99),
        calibration_ms=(speed + calibrate()) / 2,
    )
    for connection in connections:
        connection.close()
    await check(bench, gateway, [session["id"] for session in opened], len(replies) + 1)
    return run


def steady_rate(ends: list[float]) -> float:
    """Return the turns per second after the first tenth and before the last fifth, when some sessions may already be done."""
    ends.sort()
    first, last = len(ends) // 10, len(ends) * 4 // 5
    return (last - first) / (ends[last] - ends[first])


async def check(bench: Bench, gateway: Gateway, sessions: Sequence[str], turns: int) -> None:
    """Check that every session has one row with the sampled ids and no fork, and seal it."""
    seen = await _get(bench.engine.port, "/bench/report")  # empty if the engine is in the gateway
    for session in sessions:
        shown = await _admin(gateway, "GET", f"/admin/sessions/{session}", 200)
        rows = (await _admin(gateway, "GET", f"/admin/sessions/{session}/samples", 200))["samples"]
        _require(shown["turns"] == turns, "a turn is missing or was repeated", shown)
        _require(len(rows) == 1 and shown["forks"] == [], "not exactly one row", shown["forks"])
        trained = [i for i, mask in zip(rows[0]["ids"], rows[0]["mask"], strict=True) if mask]
        _require(
            trained == [i for answer in bench.answers[:turns] for i in answer["ids"]],
            "the trained ids differ from the sampled ones",
        )
        if seen:
            _require(seen[session]["turns"] == turns and not seen[session]["broken"], "prompts do not chain", session)
            bench._check_sampled(rows[0], turns)
        await _admin(gateway, "POST", f"/admin/sessions/{session}/seal", 200, b"{}")


async def compare(bench: Bench, gateways: dict[int, Gateway], args: argparse.Namespace) -> dict[int, list[Run]]:
    runs: dict[int, list[Run]] = {workers: [] for workers in gateways}
    replies, tail = await record_reference(bench, next(iter(gateways.values())), args.turns)
    await _get(bench.engine.port, "/bench/report")
    for gateway in gateways.values():  # warm up buffers, templates and connections
        await run_once(bench, gateway, min(args.sessions, 16), replies, tail)
    for _ in range(args.repeats):
        for workers, gateway in gateways.items():
            runs[workers].append(await run_once(bench, gateway, args.sessions, replies, tail, args.think))
    return runs


def measure_ceiling(processes: int) -> float:
    """Measure how much faster several independent processes are than one, which is the upper limit on this machine."""
    work = "import time\nbegan = time.perf_counter()\nfor i in range(3_000_000): str(i * 7)\nprint(time.perf_counter() - began)"

    def least(count: int) -> float:
        started = [subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE) for _ in range(count)]
        return max(float(process.communicate()[0]) for process in started)

    alone = min(least(1) for _ in range(3))
    return processes * alone / min(least(processes) for _ in range(3))


def busy_s() -> float:
    """Return the busy seconds of all cores together since the machine was started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, soft, steal = map(int, fields)
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def pin_processes(gateways: dict[int, Gateway], engine: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    most = max(gateways)
    if len(cores) < most + 2:
        raise SystemExit(f"bench: --pin needs {most + 2} cores and there are {len(cores)}")
    for gateway in gateways.values():
        for pid in gateway.family():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores[:most])
    for pid in (engine, os.getpid()):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[most:])


def print_results(runs: dict[int, list[Run]], args: argparse.Namespace) -> None:
    how = "pinned" if args.pin else "not pinned"
    if args.scripted:
        how += " · engine in the gateway"
    print(f"\n{args.sessions} sessions × {args.turns} turns · {os.cpu_count()} cores · {how}")
    print(
        "best turns/s (in the steady state) and least CPU of the repeats; latency and memory: medians; others: cores taken by other work\n"
    )
    names = (
        "turns/s",
        "CPU ms/turn",
        "front",
        "engine",
        "driver",
        "p50 ms",
        "p99 ms",
        "MB/session",
        "others",
        "calibration",
    )
    print(f"{'workers':8}" + "".join(f"{name:>13}" for name in names))
    for workers, each in runs.items():
        if not each:
            continue
        cells = (
            max(r.turns_per_s for r in each),
            min(r.gateway_ms for r in each),
            min(r.front_ms for r in each),
            min(r.engine_ms for r in each),
            min(r.driver_ms for r in each),
            statistics.median(r.p50_ms for r in each),
            statistics.median(r.p99_ms for r in each),
            statistics.median(r.mb_per_session for r in each),
            min(r.others for r in each),
            min(r.calibration_ms for r in each),
        )
        print(f"{workers:<8}" + "".join(f"{cell:13.2f}" for cell in cells))
    if len(runs) == 2:
        one, more = runs.values()
        ratio = max(r.turns_per_s for r in more) / max(r.turns_per_s for r in one)
        cost = min(r.gateway_ms for r in more) / min(r.gateway_ms for r in one)
        print(f"\nturns per second: × {ratio:.2f} · CPU per turn: × {cost:.2f}")
        load = min(r.engine_ms + r.driver_ms for r in more)
        cores = len(os.sched_getaffinity(0))
        print(f"upper limit, {max(runs)} independent processes: × {args.ceiling:.2f} on this machine")
        if not args.pin and cores <= max(runs):
            least = min(r.gateway_ms for r in one)
            print(
                f"with engine and driver on the same {cores} cores: at most × {cores * least / (least + load):.2f} of that"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", type=int, help="measure only this number of workers")
    parser.add_argument(
        "--scripted", action="store_true", help="run the engine in the gateway, so that it uses no other cores"
    )
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds between the turns of an agent")
    parser.add_argument("--pin", action="store_true", help="pin the gateway to its own cores")
    parser.add_argument("--tokenizer", type=Path, default=QWEN3 if QWEN3.is_dir() else BUILTIN)
    args = parser.parse_args()
    counts = [args.only] if args.only else [1, args.workers]
    with (
        tempfile.TemporaryDirectory(prefix="turngate-bench-") as name,
        Bench(Path(name), args.tokenizer, omit_prompt_ids=True) as bench,
    ):
        gateways: dict[int, Gateway] = {}
        script = Path(name) / "script.json" if args.scripted else None
        if script is not None:
            texts = [bench.renderer.tokenizer.decode(answer["ids"][:-1]) for answer in bench.answers[: args.turns]]
            script.write_bytes(msgspec.json.encode(texts))
        try:
            for workers in counts:
                gateways[workers] = Gateway(
                    Path(name), bench.engine, args.tokenizer, f"workers-{workers}", workers=workers, script=script
                )
            args.ceiling = measure_ceiling(args.workers)
            if args.pin:
                pin_processes(gateways, bench.engine.pid)
            print_results(uvloop.run(compare(bench, gateways, args)), args)
        finally:
            for gateway in gateways.values():
                gateway.stop()


if __name__ == "__main__":
    main()
