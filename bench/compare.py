"""Compare two versions of the gateway in one run: `python bench/compare.py OTHER_CHECKOUT [--scenario 16x20 …]`.

With `--cell`, compare a cell and a gateway of this checkout. The cell uses a PostgreSQL that the program starts.

The versions alternate in every round, so that noise affects both equally. The result is the median of the rounds' ratios. `--perf FILE`
records the stacks of the first version with `perf`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop
from overhead import PACE_MS, QWEN3, SCENARIOS, Bench, Scenario, _get
from processes import HERE, Gateway


async def compare(
    bench: Bench, versions: list[tuple[Path, str]], scenarios: list[Scenario], repeats: int, perf: Path | None
) -> None:
    """Compare versions. Each one is a checkout and the URL of a shared store, which is empty unless the gateway is a cell."""
    with ExitStack() as stack:
        gateways = []
        for n, (tree, shared) in enumerate(versions):
            gateway = Gateway(bench.folder, bench.engine, bench.tokenizer, f"tree-{n}", tree=tree, shared=shared)
            stack.callback(gateway.stop)
            gateways.append(gateway)
        for gateway in gateways:
            warm_up = await bench.run(gateway, Scenario(4, 20, stream=True))
            await bench.close_sessions(gateway, warm_up.agents)
        for scenario in scenarios:
            with _record_perf(perf, gateways[0]):
                rounds = [r for _ in range(repeats) for r in await run_alternating(bench, gateways, scenario)]
            mean = [sum(cpu) / len(rounds) for cpu in zip(*rounds, strict=True)]
            ratio = statistics.median(cpu[0] / cpu[-1] for cpu in rounds)
            cells = "  ".join(f"{cpu:6.2f}" for cpu in mean)
            print(f"{scenario.name:32} {cells}   first/second, median of the rounds {ratio:.3f}", flush=True)


async def run_alternating(bench: Bench, gateways: list[Gateway], scenario: Scenario) -> list[list[float]]:
    """Run a scenario in all gateways, round by round. Return the CPU ms per turn of each gateway for each round."""
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
        await bench.close_sessions(gateway, some)
    return rounds


@contextmanager
def _record_perf(file: Path | None, gateway: Gateway):
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
    parser = argparse.ArgumentParser(description="Compare two versions of the gateway.")
    parser.add_argument("other", type=Path, nargs="?", help="another checkout (default: measure only this one)")
    names = {f"{s.sessions}x{s.turns}{'-paced' if s.paced else '-stream' if s.stream else ''}": s for s in SCENARIOS}
    parser.add_argument(
        "--scenario",
        action="append",
        choices=names,
        help="scenario to run; may be repeated (default: all but the paced one)",
    )
    parser.add_argument("--cell", action="store_true", help="compare a cell with a gateway, both of this checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--perf", type=Path, metavar="FILE")
    args = parser.parse_args()
    scenarios = [names[name] for name in args.scenario or [n for n, s in names.items() if s.target_cpu_ms]]
    with (
        ExitStack() as stack,
        tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder,
        Bench(Path(folder), QWEN3) as bench,
    ):
        versions = [(HERE.parent, "")]
        if args.cell:
            versions.insert(0, (HERE.parent, stack.enter_context(start_shared_store())))
        elif args.other:
            versions.append((args.other.resolve(), ""))
        labels = " and ".join(f"{tree}{' as a cell' if shared else ''}" for tree, shared in versions)
        print(f"CPU ms/turn, mean of {args.repeats} runs: {labels}")
        uvloop.run(compare(bench, versions, scenarios, args.repeats, args.perf))


@contextmanager
def start_shared_store():
    sys.path.insert(0, str(HERE.parent))
    from tests import postgres

    with postgres.start_postgres() as server:
        yield server.create_database()


if __name__ == "__main__":
    main()
