"""Compare two versions of the gateway in every dialect: `python bench/dialects.py OTHER_CHECKOUT [--turns 20] [--dialect …]`.

Uses the agents, the engine and the load of the Gauntlet. The versions alternate, with a batch of sessions each, and the result is the
median of the batches' ratios. `compare.py` does the same for chat, round by round, and checks the recordings.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from processes import cpu_s  # noqa: E402

from gauntlet.gateways.turngate import Turngate  # noqa: E402
from gauntlet.scenarios import build_load  # noqa: E402
from gauntlet.trial import Trial, run_engine, start_gateway  # noqa: E402


class Checkout(Turngate):
    """The gateway of a given checkout."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self._tree = tree

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        command, added = super().command(engine_url, folder)
        return command, {**added, "PYTHONPATH": str(self._tree)}


async def run_batch(trial: Trial, dialect: str, streamed: bool, sessions: int, turns: int) -> float:
    """Run a batch of sessions, and return the CPU ms per turn."""
    before = cpu_s(trial.pid)
    played = await asyncio.gather(
        *(trial.run_open_session(build_load(turns), dialect, streamed) for _ in range(sessions))
    )
    spent = cpu_s(trial.pid) - before
    error = next((each.error for each in played if each.error), "")
    if error:
        raise SystemExit(f"bench: {dialect}: {error}")
    return spent * 1000 / sum(len(each.taken) for each in played)


async def compare(trees: list[Path], dialects: list[str], sessions: int, turns: int, repeats: int) -> None:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        mock = await stack.enter_async_context(run_engine(http))
        trials = [await stack.enter_async_context(start_gateway(Checkout(tree), http, mock)) for tree in trees]
        for dialect in dialects:
            for streamed in (False, True):
                rounds = []
                for n in range(repeats + 1):
                    spent = [0.0] * len(trials)
                    for index in sorted(range(len(trials)), reverse=n % 2 == 1):
                        spent[index] = await run_batch(trials[index], dialect, streamed, sessions, turns)
                    if n:  # the first round warms up
                        rounds.append(spent)
                best = "  ".join(f"{min(cpu):6.2f}" for cpu in zip(*rounds, strict=True))
                ratio = statistics.median(cpu[0] / cpu[-1] for cpu in rounds)
                name = f"{dialect} {'streamed' if streamed else 'whole'} {sessions}x{turns}"
                print(f"{name:32} {best}   first/second, median of {repeats}: {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two versions of the gateway in every dialect.")
    parser.add_argument("other", type=Path, nargs="?", help="another checkout (default: measure only this one)")
    parser.add_argument(
        "--dialect", action="append", choices=Turngate.dialects, help="dialect to run; may be repeated (default: all)"
    )
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    trees = [ROOT, *([args.other.resolve()] if args.other else [])]
    print(f"CPU ms/turn, the best of {args.repeats}: {' and '.join(map(str, trees))}")
    with tempfile.TemporaryDirectory():
        asyncio.run(compare(trees, args.dialect or list(Turngate.dialects), args.sessions, args.turns, args.repeats))


if __name__ == "__main__":
    main()
