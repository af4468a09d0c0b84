"""Put gateways through the Gauntlet and print the tables. See docs/gauntlet.md."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from gauntlet import paper, report
from gauntlet.costs import Shape
from gauntlet.gateways import GATEWAYS
from gauntlet.gateways.base import CannotStart, Gateway
from gauntlet.gateways.external import Address, External, unusable
from gauntlet.run import Result, count_costs, put_through
from gauntlet.scenarios import BY_NAME
from gauntlet.tokens import tokenizer
from gauntlet.trial import engine
from gauntlet.voices import VOICES

LOAD = "16x20,4x100"


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.list:
        for name, scenario in BY_NAME.items():
            print(f"{name:20} {scenario.about}")
        for name, gateway in GATEWAYS.items():
            print(f"{name:20} {gateway.about}{'' if gateway.by_default else ' (only when named)'}")
        return 0
    wrong = _wrong(args)
    if wrong:
        parser.exit(2, f"gauntlet: {wrong}\n")
    try:
        results = asyncio.run(_until_told(_run(args)))
    except asyncio.CancelledError:
        return 143
    except KeyboardInterrupt:
        return 130
    except CannotStart as error:
        print(f"gauntlet: {error}", file=sys.stderr)
        return 1
    _tell(args, results)
    if any(result.misused for result in results):
        return 2
    return 1 if all(result.trouble for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gauntlet", description=__doc__)
    for what, known in (("gateway", list(GATEWAYS)), ("dialect", list(VOICES)), ("scenario", list(BY_NAME))):
        told = f"a {what}; repeat for more, leave out for all"
        parser.add_argument(f"--{what}", choices=known, action="append", default=[], help=told)
    told = f"sessions x turns of the cost part, with commas ({LOAD}); '' leaves it out; not with --url"
    parser.add_argument("--load", help=told)
    parser.add_argument("--repeats", type=int, default=2, help="how often each cost is measured; the best counts")
    told = "the gateway that is set beside the cheapest of the others"
    parser.add_argument("--compare", choices=list(GATEWAYS), default="turngate", help=told)
    parser.add_argument(
        "--url", default="", help="a gateway that runs already, in place of those we start; see docs/gauntlet.md"
    )
    parser.add_argument("--key", default="gauntlet", help="with --url: what agents hold as their API key")
    parser.add_argument("--open", default="", help="with --url: a command that opens the session {rollout}")
    parser.add_argument("--record", default="", help="with --url: a command that prints what was recorded of {rollout}")
    parser.add_argument("--engine-port", type=int, default=0, help="where the mock engine listens; any free port if 0")
    parser.add_argument("--json", action="store_true", help="print everything, machine-readable")
    parser.add_argument("--results", type=Path, help="write all tables to this file, and a .json beside it")
    parser.add_argument(
        "--readme", type=Path, help=f"put the table into this file, between {paper.BEGIN} and {paper.END}"
    )
    parser.add_argument("--list", action="store_true", help="say what there is")
    return parser


def _wrong(args: argparse.Namespace) -> str:
    """What cannot be, before anything is started."""
    load = args.load or ""
    if not re.fullmatch(r"(\d+x\d+(,\d+x\d+)*)?", load) or "0" in re.split("[x,]", load):
        return f"--load {load}: not of the form {LOAD}"
    if load and args.url:
        return f"--load {load}: costs are not measured for a gateway that is not started here (--url)"
    if args.repeats < 1:
        return "--repeats must be at least 1"
    if args.url and args.gateway:
        return "--url and --gateway exclude each other"
    if args.url and not args.url.startswith(("http://", "https://")):
        return f"--url {args.url}: not an http address"
    if (args.open or args.record) and not args.url:
        return "--open and --record need --url"
    for option, command in (("--open", args.open), ("--record", args.record)):
        if command and (why := unusable(command)):
            return f"{option} {command!r}: {why}"
    if not 0 <= args.engine_port < 65536:
        return f"--engine-port {args.engine_port}: not a port"
    if args.readme and not paper.marked(args.readme):
        return f"--readme {args.readme}: no {paper.BEGIN} … {paper.END} in it"
    if args.results and not args.results.absolute().parent.is_dir():
        return f"--results {args.results}: there is no such folder"
    if not (tokenizer() / "tokenizer.json").exists():
        return f"no tokenizer in {tokenizer()}; python tools/parts.py tokenizers makes one"
    return ""


def _tell(args: argparse.Namespace, results: list[Result]) -> None:
    about = paper.about("make gauntlet" if args.results else " ".join(["python -m gauntlet", *sys.argv[1:]]))
    if args.results:
        paper.write_page(args.results, results, about, args.compare)
    if args.readme:
        paper.write_readme(args.readme, results, about, args.compare)
    print(report.as_json(results, about) if args.json else report.everything(results, args.compare))
    for line in report.trouble(results):
        print(f"gauntlet: {line}", file=sys.stderr)


async def _until_told(run: Coroutine[Any, Any, list[Result]]) -> list[Result]:
    """A run that is told to end takes its gateways and the engine with it."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _gateways(args: argparse.Namespace, dialects: list[str]) -> list[Gateway]:
    if args.url:
        return [External(Address(args.url, args.key, args.open, args.record), tuple(dialects))]
    return [GATEWAYS[name]() for name in args.gateway or [name for name in GATEWAYS if GATEWAYS[name].by_default]]


async def _run(args: argparse.Namespace) -> list[Result]:
    scenarios = [BY_NAME[name] for name in args.scenario or BY_NAME]
    dialects = args.dialect or list(VOICES)
    load = LOAD if args.load is None else args.load
    shapes = [Shape(*map(int, shape.split("x"))) for shape in load.split(",") if shape]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    results: list[Result] = []
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        engine(http, args.engine_port) as mock,
    ):
        for gateway in _gateways(args, dialects):
            began = time.monotonic()
            results.append(await put_through(gateway, http, mock, scenarios, dialects))
            # At once: a run that is ended early has still said what it found.
            _say(f"{report.line(results[-1])} ({time.monotonic() - began:.0f} s)")
        if shapes and not args.url:  # what cannot be seen in /proc is not measured
            await count_costs(results, lambda name: GATEWAYS[name](), http, mock, shapes, dialects, args.repeats, _say)
    return results


def _say(what: str) -> None:
    print(f"gauntlet: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
