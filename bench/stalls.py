"""Measure how long the event loop blocks other work: `python bench/stalls.py [--sessions 256] [--tokens 100000] [--rate 25]`.

Each session starts with a prompt of `tokens` tokens, then makes some turns at random times. All sessions together make `rate` turns per
second, like a gateway in normal use. First calls are reported separately, because they tokenize the whole prompt. The recordings are
checked as in `overhead.py`: if a prompt does not chain or a session does not have exactly one row, no numbers are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import tempfile
import time
from pathlib import Path

import uvloop
from agent import _CODE, Agent, Http, _dumps
from overhead import QWEN3, Bench, _admin, _get, _require
from processes import HERE, Gateway

from turngate.types import Message


class LongAgent(Agent):
    """An agent with a very long task."""

    def __init__(self, http: Http, session: str, key: str, text: str, seed: int) -> None:
        super().__init__(http, session, key, stream=seed % 2 == 1, seed=seed)
        self.conversation[1] = Message("user", f"Task {seed}.\n{text}")
        self._messages[1] = _dumps({"role": "user", "content": self.conversation[1].content})


async def measure(bench: Bench, sessions: int, tokens: int, turns: int, rate: float) -> None:
    file = bench.folder / "stalls.json"
    gateway = Gateway(
        bench.folder,
        bench.engine,
        bench.tokenizer,
        "stalls",
        program=HERE / "watched_gateway.py",
        env={"BENCH_STALLS": str(file)},
    )
    try:
        text = build_text(bench, tokens)
        agents = [await open_agent(gateway, text, seed) for seed in range(sessions)]
        print(
            f"{sessions} sessions of {tokens:,} tokens, {turns} turns each, {rate:g} turns/s in all, half of the sessions streamed\n"
        )
        print(
            f"{'':14}{'p50':>9}{'p99':>9}{'p99.9':>9}{'longest':>9}   ms late, wall time (CPU time of the loop's thread)"
        )
        first = await run_phase(gateway, file, agents, 1, rate / 3)
        later = await run_phase(gateway, file, agents, turns - 1, rate)
        for name, (delays, latency, cpu) in (("first calls", first), ("later turns", later)):
            print_delays(name, delays)
            p50, p99 = (sorted(latency)[int(len(latency) * share)] * 1000 for share in (0.5, 0.99))
            print(f"{'':14}answered in {p50:.0f} ms p50, {p99:.0f} ms p99; {cpu:.1f} ms of CPU per turn")
        await check(bench, gateway, agents, turns)
        print(f"\n{gateway.rss_mb():.0f} MB resident")
        for agent in agents:
            agent.close()
    finally:
        gateway.stop()


async def open_agent(gateway: Gateway, text: str, seed: int) -> LongAgent:
    opened = await _admin(gateway, "POST", "/admin/sessions", 201, b'{"model":"bench"}')
    return LongAgent(await Http.connect(gateway.port), opened["id"], opened["api_key"], text, seed)


async def run_phase(
    gateway: Gateway, file: Path, agents: list[LongAgent], turns: int, rate: float
) -> tuple[list[tuple[float, float]], list[float], float]:
    rng = random.Random(1)
    seconds = len(agents) * turns / rate
    gateway.send_signal(signal.SIGUSR1)
    before = gateway.cpu_s()

    async def run_agent(agent: LongAgent) -> None:
        moments = sorted(rng.uniform(0, seconds) for _ in range(turns))
        for moment in moments:
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            await agent.turn()

    began = time.perf_counter()
    await asyncio.gather(*(run_agent(agent) for agent in agents))
    cpu = (gateway.cpu_s() - before) * 1000 / (len(agents) * turns)
    file.unlink(missing_ok=True)
    gateway.send_signal(signal.SIGUSR2)
    while not file.exists():
        await asyncio.sleep(0.05)
    return json.loads(file.read_text())["delays"], [s for agent in agents for s in agent.latencies[-turns:]], cpu


def print_delays(name: str, delays: list[tuple[float, float]]) -> None:
    cells = []
    for share in (0.5, 0.99, 0.999, 1.0):
        wall, own = (sorted(v)[min(len(delays) - 1, int(share * len(delays)))] for v in zip(*delays, strict=True))
        cells.append(f"{wall:.1f} ({own:.1f})")
    print(f"{name:14}" + "".join(f"{cell:>15}" for cell in cells) + f"   {len(delays)} measurements")


async def check(bench: Bench, gateway: Gateway, agents: list[LongAgent], turns: int) -> None:
    seen = await _get(bench.engine.port, "/bench/report")
    for agent in agents:
        session = seen[agent.session]
        _require(session["turns"] == turns and session["broken"] == 0, "a turn is missing or does not chain", session)
    for agent in agents[:2]:
        found = (await _admin(gateway, "GET", f"/admin/sessions/{agent.session}/samples", 200))["samples"]
        _require(len(found) == 1, "not exactly one row", len(found))
        bench._check_context(found[0], agent)


def build_text(bench: Bench, tokens: int) -> str:
    """Build a text of code with this many tokens."""
    total = len(bench.renderer.tokenizer.encode(_CODE))
    text = _CODE * (tokens // total + 1)
    return text[: int(len(_CODE) * tokens / total)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long the event loop blocks other work.")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rate", type=float, default=25.0, help="turns per second of all sessions together")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder, Bench(Path(folder), QWEN3) as bench:
        uvloop.run(measure(bench, args.sessions, args.tokens, args.turns, args.rate))


if __name__ == "__main__":
    main()
