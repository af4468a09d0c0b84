"""Two versions of the gateway in turns, on one machine, in one run: `python bench/compare.py OTHER_CHECKOUT [--scenario 16x20 …]`.

Round by round, so that noise hits both alike; the median of the rounds' ratios is what counts. `--perf FILE` records the first
version's stacks with `perf` meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop
from overhead import PACE_MS, QWEN3, SCENARIOS, Bench, Scenario, _get
from processes import HERE, Gateway


async def compare(bench: Bench, trees: list[Path], scenarios: list[Scenario], repeats: int, perf: Path | None) -> None:
    with ExitStack() as stack:
        gateways = []
        for n, tree in enumerate(trees):
            gateway = Gateway(bench.folder, bench.engine, bench.tokenizer, f"tree-{n}", tree=tree)
            stack.callback(gateway.stop)
            gateways.append(gateway)
        for gateway in gateways:
            warm = await bench.run(gateway, Scenario(4, 20, stream=True))
            await bench.leave(gateway, warm.agents)
        for scenario in scenarios:
            with _recorded(perf, gateways[0]):
                rounds = [r for _ in range(repeats) for r in await in_turns(bench, gateways, scenario)]
            mean = [sum(cpu) / len(rounds) for cpu in zip(*rounds, strict=True)]
            ratio = statistics.median(cpu[0] / cpu[-1] for cpu in rounds)
            cells = "  ".join(f"{cpu:6.2f}" for cpu in mean)
            print(f"{scenario.name:32} {cells}   first/second, median of the rounds {ratio:.3f}", flush=True)


async def in_turns(bench: Bench, gateways: list[Gateway], scenario: Scenario) -> list[list[float]]:
    """One scenario in all gateways, round by round; for each round, CPU ms per turn of each. A noisy minute hits all alike."""
    await _get(bench.engine.port, f"/bench/pace/{PACE_MS if scenario.paced else 0}")
    agents = [[await bench.agent(g, scenario, seed) for seed in range(scenario.sessions)] for g in gateways]
    rounds = []
    for turn in range(scenario.turns):
        spent = [0.0] * len(gateways)
        for n in sorted(range(len(gateways)), reverse=turn % 2 == 1):
            before = gateways[n].cpu_s()
            await asyncio.gather(*(agent.turn() for agent in agents[n]))
            spent[n] = (gateways[n].cpu_s() - before) * 1000 / scenario.sessions
        rounds.append(spent)
    await bench.check(gateways[0], scenario, agents[0])
    for gateway, some in zip(gateways, agents, strict=True):
        await bench.leave(gateway, some)
    return rounds


@contextmanager
def _recorded(file: Path | None, gateway: Gateway):
    if file is None:
        yield
        return
    command = ["perf", "record", "-q", "-F", "499", "-g", "-p", str(gateway.pid), "-o", str(file)]
    with subprocess.Popen(command) as recorder:
        try:
            yield
        finally:
            recorder.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two versions of the gateway, in turns.")
    parser.add_argument("other", type=Path, nargs="?", help="another checkout; left out, this one is measured alone")
    names = {f"{s.sessions}x{s.turns}{'-paced' if s.paced else '-stream' if s.stream else ''}": s for s in SCENARIOS}
    parser.add_argument("--scenario", action="append", choices=names, help="[all but the paced one]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--perf", type=Path, metavar="FILE")
    args = parser.parse_args()
    trees = [HERE.parent, *([args.other.resolve()] if args.other else [])]
    wanted = [names[name] for name in args.scenario or [n for n, s in names.items() if s.target_cpu_ms]]
    print(f"CPU ms/turn, mean of {args.repeats} runs: {' and '.join(map(str, trees))}")
    with (
        tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder,
        Bench(Path(folder), QWEN3) as bench,
    ):
        uvloop.run(compare(bench, trees, wanted, args.repeats, args.perf))


if __name__ == "__main__":
    main()
