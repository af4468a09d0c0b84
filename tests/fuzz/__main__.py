"""Fuzz every target for some time: `python -m tests.fuzz --seconds 60 [--only decode] [--seed 7]`.

Targets are fuzzed one after the other, or with --results all at the same time.

Each finding is printed with its target, its seed and the input, and makes the exit code 1. With --keep, inputs of the coverage-guided
fuzzer that reach new lines are kept in `tests/fuzz/corpus`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.rounds import CORPUS, GUIDED, NAMES, Round
from tests.fuzz.together import fuzz_in_rounds, fuzz_together, summarize


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz every target for some time.")
    parser.add_argument("--seconds", type=float, default=60.0, help="per target")
    parser.add_argument("--only", default="", help="only targets with this in their name")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach new lines in tests/fuzz/corpus")
    parser.add_argument("--results", type=Path, help="fuzz all targets at the same time; write what they find here")
    parser.add_argument("--round", type=float, default=120.0, help="with --results: seconds until the next seed")
    parser.add_argument("--summary", type=Path, help="only print the summary of this results folder")
    parser.add_argument("--target", help=argparse.SUPPRESS)  # one process of --results
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def fuzz_in_turn(names: list[str], args: argparse.Namespace) -> None:
    """Fuzz one target after the other, and exit with 1 if there are findings."""
    print(f"seed {args.seed}, {args.seconds:g} s per target", flush=True)
    failed = []
    for name in names:
        one = Round(name, args.seconds, args.seed, keep=CORPUS if args.keep else None, shrink=True)
        one.run()
        if name.startswith(GUIDED):
            print(f"  covered {one.coverage} steps between lines, {one.new_coverage} of them new")
        if one.statuses:
            print(f"  statuses {one.statuses}")
        print(f"{name}: {one.inputs} inputs", flush=True)
        for found in one.findings.values():
            print(f"FOUND: {found}", flush=True)
        failed += [name] if one.findings else []
    print(f"findings: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


def main() -> None:
    args = parse_arguments()
    if args.summary:
        print(summarize(args.summary))
        return
    if args.target:
        fuzz_in_rounds(args.results, args.target, args.end, args.round, args.seed)
        return
    names = [name for name in NAMES if args.only in name]
    if not args.results:
        fuzz_in_turn(names, args)
        return
    print(f"seed {args.seed}, {len(names)} targets for {args.seconds:g} s, in rounds of {args.round:g} s", flush=True)
    fuzz_together(args.results.resolve(), names, args.seconds, args.round, args.seed)
    print(summarize(args.results))
    sys.exit(any((args.results / "findings").iterdir()))


if __name__ == "__main__":
    main()
