"""Run gateways through the Gauntlet and print the tables. See docs/gauntlet.md."""

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

from gauntlet import publish, report
from gauntlet.clients import CLIENTS
from gauntlet.costs import Shape
from gauntlet.feature_report import describe_features, feature_section
from gauntlet.gateways import GATEWAYS
from gauntlet.gateways.base import CannotStart, Gateway
from gauntlet.gateways.external import Address, External, explain_unusable
from gauntlet.probes import probe_features
from gauntlet.run import Result, measure_all_costs, run_scenarios
from gauntlet.scenarios import BY_NAME
from gauntlet.tokens import tokenizer_folder
from gauntlet.trial import run_engine

LOAD = "16x20,4x100"


def main() -> int:
    parser = _build_parser()
    args = parser.parse_args()
    if args.list:
        for name, scenario in BY_NAME.items():
            print(f"{name:20} {scenario.about}")
        for name, gateway in GATEWAYS.items():
            print(f"{name:20} {gateway.about}{'' if gateway.by_default else ' (not run by default)'}")
        return 0
    usage_error = _find_usage_error(args)
    if usage_error:
        parser.exit(2, f"gauntlet: {usage_error}\n")
    try:
        results = asyncio.run(_cancel_on_sigterm(_run(args)))
    except asyncio.CancelledError:
        return 143
    except KeyboardInterrupt:
        return 130
    except CannotStart as error:
        print(f"gauntlet: {error}", file=sys.stderr)
        return 1
    _print_results(args, results)
    if any(result.misused for result in results):
        return 2
    return 1 if all(result.error for result in results) else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gauntlet", description=__doc__)
    for kind, names in (("gateway", list(GATEWAYS)), ("dialect", list(CLIENTS)), ("scenario", list(BY_NAME))):
        text = f"{kind} to run; may be repeated (default: all)"
        parser.add_argument(f"--{kind}", choices=names, action="append", default=[], help=text)
    text = (
        f"sessions x turns for measuring costs, separated by commas (default: {LOAD}; '' measures none); not with --url"
    )
    parser.add_argument("--load", help=text)
    parser.add_argument("--repeats", type=int, default=2, help="measurements per cost, of which the best is used")
    text = "gateway to compare with the cheapest of the others"
    parser.add_argument("--compare", choices=list(GATEWAYS), default="turngate", help=text)
    parser.add_argument(
        "--url", default="", help="a running gateway to test instead of starting one; see docs/gauntlet.md"
    )
    parser.add_argument("--key", default="gauntlet", help="with --url: API key for the agents")
    parser.add_argument("--open", default="", help="with --url: a command that opens the session {rollout}")
    parser.add_argument("--record", default="", help="with --url: a command that prints the record of {rollout}")
    parser.add_argument("--engine-port", type=int, default=0, help="port of the mock engine (0: any free port)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--results", type=Path, help="write all tables to this file, and the data to a .json file next to it"
    )
    parser.add_argument(
        "--readme", type=Path, help=f"write the summary into this file, between {publish.BEGIN} and {publish.END}"
    )
    parser.add_argument(
        "--only-features",
        action="store_true",
        help="test only what rows carry besides tokens; --results and --readme then update only these columns",
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and gateways")
    return parser


def _find_usage_error(args: argparse.Namespace) -> str:
    """Return an error message if the options are invalid, or an empty string. Called before anything is started."""
    load = args.load or ""
    if not re.fullmatch(r"(\d+x\d+(,\d+x\d+)*)?", load) or "0" in re.split("[x,]", load):
        return f"--load must have the form {LOAD}, not {load}"
    if load and args.url:
        return "--load cannot be combined with --url: costs are measured only for gateways that are started here"
    if args.repeats < 1:
        return "--repeats must be at least 1"
    if args.only_features and (args.url or args.scenario or args.json or load):
        return "--only-features cannot be combined with --url, --scenario, --json or --load"
    if args.only_features and bool(args.results) != bool(args.readme):
        return "--only-features needs both --results and --readme, or neither"
    if args.only_features and args.results and not args.results.with_suffix(".json").is_file():
        return f"--results {args.results}: not found; --only-features updates a page that exists"
    if args.url and args.gateway:
        return "--url and --gateway cannot be combined"
    if args.url and not args.url.startswith(("http://", "https://")):
        return f"--url must be an HTTP URL, not {args.url}"
    if (args.open or args.record) and not args.url:
        return "--open and --record need --url"
    for option, command in (("--open", args.open), ("--record", args.record)):
        if command and (why := explain_unusable(command)):
            return f"{option} {command!r}: {why}"
    if not 0 <= args.engine_port < 65536:
        return f"--engine-port must be a port number, not {args.engine_port}"
    if args.readme and not publish.has_marks(args.readme):
        return f"--readme {args.readme} does not contain {publish.BEGIN} … {publish.END}"
    if args.results and not args.results.absolute().parent.is_dir():
        return f"--results {args.results}: folder not found"
    if not (tokenizer_folder() / "tokenizer.json").exists():
        return f"no tokenizer in {tokenizer_folder()}; run python tools/parts.py tokenizers"
    return ""


def _print_results(args: argparse.Namespace, results: list[Result]) -> None:
    about = publish.describe_run("make gauntlet" if args.results else " ".join(["python -m gauntlet", *sys.argv[1:]]))
    if args.only_features:
        if args.results:
            publish.update_features(args.results, args.readme, results, about)
        print(feature_section(results))
        return
    if args.results:
        publish.write_page(args.results, results, about, args.compare)
    if args.readme:
        publish.write_readme(args.readme, results, about)
    print(report.to_json(results, about) if args.json else report.full_report(results, args.compare))
    for line in report.list_errors(results):
        print(f"gauntlet: {line}", file=sys.stderr)


async def _cancel_on_sigterm(run: Coroutine[Any, Any, list[Result]]) -> list[Result]:
    """Cancel the run on SIGTERM, so that it stops its gateways and the engine."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _select_gateways(args: argparse.Namespace, dialects: list[str]) -> list[Gateway]:
    if args.url:
        return [External(Address(args.url, args.key, args.open, args.record), tuple(dialects))]
    return [GATEWAYS[name]() for name in args.gateway or [name for name in GATEWAYS if GATEWAYS[name].by_default]]


async def _run(args: argparse.Namespace) -> list[Result]:
    scenarios = [BY_NAME[name] for name in args.scenario or BY_NAME]
    dialects = args.dialect or list(CLIENTS)
    load = LOAD if args.load is None else args.load
    shapes = [Shape(*map(int, shape.split("x"))) for shape in load.split(",") if shape]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    results: list[Result] = []
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        run_engine(http, args.engine_port) as mock,
    ):
        for gateway in _select_gateways(args, dialects):
            began = time.monotonic()
            if args.only_features:
                results.append(Result(gateway.name, gateway.about, gateway.dialects, gateway.trains))
            else:
                results.append(await run_scenarios(gateway, http, mock, scenarios, dialects))
                # Print each result immediately, so that a run that is stopped early has printed its results.
                _log(f"{report.describe_result(results[-1])} ({time.monotonic() - began:.0f} s)")
            if not args.url and not args.scenario and not results[-1].error:
                results[-1].features = await probe_features(type(gateway), http, mock)
                _log(f"{gateway.name}: rows also carry {describe_features(results[-1])}")
        if args.only_features:
            return results
        if shapes and not args.url:  # the costs of an external gateway cannot be read from /proc
            await measure_all_costs(
                results, lambda name: GATEWAYS[name](), http, mock, shapes, dialects, args.repeats, _log
            )
    return results


def _log(text: str) -> None:
    print(f"gauntlet: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
