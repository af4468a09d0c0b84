"""`python -m gauntlet`: put gateways through the Gauntlet and print the table."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

import aiohttp

from gauntlet import report
from gauntlet.gateways import GATEWAYS
from gauntlet.gateways.base import Gateway
from gauntlet.gateways.external import Address, External
from gauntlet.run import Result, engine, put_through
from gauntlet.scenarios import BY_NAME
from gauntlet.tokens import tokenizer
from gauntlet.voices import VOICES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gauntlet", description=__doc__)
    for what, known in (("gateway", list(GATEWAYS)), ("dialect", list(VOICES)), ("scenario", list(BY_NAME))):
        told = f"a {what}; repeat for more, leave out for all"
        parser.add_argument(f"--{what}", choices=known, action="append", default=[], help=told)
    parser.add_argument(
        "--load", default="8x20", help="sessions x turns of the cost part, with commas; '' leaves it out"
    )
    parser.add_argument("--url", help="a gateway that runs already, in place of those we start; see docs/gauntlet.md")
    parser.add_argument("--key", default="gauntlet", help="with --url: what agents hold as their API key")
    parser.add_argument("--open", default="", help="with --url: a command that opens the session {rollout}")
    parser.add_argument("--record", default="", help="with --url: a command that prints what was recorded of {rollout}")
    parser.add_argument("--engine-port", type=int, default=0, help="where the mock engine listens; any free port if 0")
    parser.add_argument("--json", action="store_true", help="everything, machine-readable")
    parser.add_argument("--list", action="store_true", help="say what there is")
    args = parser.parse_args()
    if args.list:
        for name, scenario in BY_NAME.items():
            print(f"{name:20} {scenario.about}")
        for name, gateway in GATEWAYS.items():
            print(f"{name:20} {gateway.about}")
        return 0
    if not (tokenizer() / "tokenizer.json").exists():
        print(f"gauntlet: no tokenizer in {tokenizer()}; python tools/parts.py tokenizers makes one", file=sys.stderr)
        return 2
    try:
        results = asyncio.run(_until_told(_run(args)))
    except asyncio.CancelledError:
        return 143
    if args.json:
        print(report.as_json(results))
        return 0
    print(report.table(results), report.by_dialect(results, list(VOICES)), report.by_scenario(results), sep="\n\n")
    for line in report.trouble(results):
        print(f"gauntlet: {line}", file=sys.stderr)
    return 0


async def _until_told(run: Coroutine[Any, Any, list[Result]]) -> list[Result]:
    """A run that is told to end takes its gateways and the engine with it."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _gateways(args: argparse.Namespace, dialects: list[str]) -> list[Gateway]:
    if args.url:
        return [External(Address(args.url, args.key, args.open, args.record), tuple(dialects))]
    return [GATEWAYS[name]() for name in args.gateway or GATEWAYS]


async def _run(args: argparse.Namespace) -> list[Result]:
    scenarios = [BY_NAME[name] for name in args.scenario or BY_NAME]
    dialects = args.dialect or list(VOICES)
    shapes = [(int(a), int(b)) for a, _, b in (shape.partition("x") for shape in args.load.split(",") if shape)]
    if args.url:
        shapes = []  # what cannot be seen in /proc is not measured
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        engine(http, args.engine_port) as mock,
    ):
        results = []
        for gateway in _gateways(args, dialects):
            began = time.monotonic()
            result = await put_through(gateway, http, mock, scenarios, dialects, shapes)
            spent = time.monotonic() - began
            # At once: a run that is ended early has still said what it found.
            print(f"gauntlet: {report.line(result)} ({spent:.0f} s)", file=sys.stderr, flush=True)
            results.append(result)
    return results


if __name__ == "__main__":
    sys.exit(main())
