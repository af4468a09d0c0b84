"""Fuzz every target for some time: `python -m tests.fuzz --seconds 60 [--only decode] [--seed 7]`.

Each finding is printed with its target, its seed and the input, and makes the exit code 1. Inputs of the coverage-guided fuzzer that reach
new lines are kept in `tests/fuzz/corpus` with --keep.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.coverage_guided import CoverageGuidedFuzzer
from tests.fuzz.json_values import damaged
from tests.fuzz.requests import list_operations, read_calls, requests
from tests.fuzz.targets import TARGETS, Target
from tests.fuzz.world import DAMAGES, World

CORPUS = Path(__file__).parent / "corpus"
_ROUND = 60  # examples between two looks at the clock
HISTORIES = st.lists(
    damaged(st.sampled_from([call["messages"] for call in read_calls("chat")]), most=2), min_size=1, max_size=5
)


def run_examples(inputs: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int, number: int) -> None:
    """Check random inputs, which depend only on `number`."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(inputs)
    def run(value: Any) -> None:
        check(value)

    run()


def read_corpus(target: Target) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / target.name).glob("*"))]


def list_runs(only: str, number: int) -> Iterator[tuple[str, Callable[[float], int]]]:
    """Yield the name of each target and a function that fuzzes it for some seconds and returns the number of inputs."""
    for target in TARGETS:
        if only in target.name:
            yield target.name, lambda seconds, target=target: _run_random(target.inputs, target.check, seconds, number)
    for target in TARGETS:
        if target.covers and only in f"covered-{target.name}":
            yield f"covered-{target.name}", lambda seconds, target=target: _run_guided(target, seconds, number)
    for name in ("tree", "store", "http", "http-gate", "http-memory"):
        if only in name:
            yield name, lambda seconds, name=name: _run_world(name, seconds, number)


def _run_random(inputs: st.SearchStrategy[Any], check: Callable[[Any], None], seconds: float, number: int) -> int:
    end, runs = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        run_examples(inputs, check, _ROUND, number + runs)
        runs += _ROUND
    return runs


def _run_guided(target: Target, seconds: float, number: int) -> int:
    fuzzer = CoverageGuidedFuzzer(target.check, [*target.seeds(), *read_corpus(target)], target.covers, number)
    known, start = len(fuzzer.corpus), fuzzer.coverage
    fuzzer.run(seconds)
    print(f"  covered {start} → {fuzzer.coverage} steps between lines; {len(fuzzer.corpus) - known} new inputs")
    if KEEP:
        folder = CORPUS / target.name
        folder.mkdir(parents=True, exist_ok=True)
        for raw in fuzzer.corpus[known:]:
            (folder / hashlib.sha256(raw).hexdigest()[:16]).write_bytes(raw)
    return fuzzer.runs


def _run_world(name: str, seconds: float, number: int) -> int:
    with closing(World(gated=name == "http-gate")) as world:
        if name == "store":
            return _run_random(DAMAGES, world.check_damaged_row, seconds, number)
        if name == "tree":
            return _run_random(HISTORIES, world.check_tree, seconds, number)
        end, runs = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for method, path, _ in list_operations(world.document):
                if name != "http-gate" or "/admin/gate" in path:
                    check = lambda request: world.check(request, memory=name == "http-memory")  # noqa: E731
                    run_examples(requests(world.document, method, path), check, 6, number + runs)
                    runs += 6
                if time.monotonic() > end:
                    break
        print(f"  statuses {dict(sorted(world.statuses.items()))}")
        return runs


KEEP = False


def main() -> None:
    global KEEP
    parser = argparse.ArgumentParser(description="Fuzz every target for some time.")
    parser.add_argument("--seconds", type=float, default=60.0, help="per target")
    parser.add_argument("--only", default="", help="only targets with this in their name")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach new lines in tests/fuzz/corpus")
    args = parser.parse_args()
    KEEP = args.keep
    print(f"seed {args.seed}, {args.seconds:g} s per target", flush=True)
    failed = []
    for name, run in list_runs(args.only, args.seed):
        try:
            print(f"{name}: {run(args.seconds)} inputs", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"{name}: FOUND with seed {args.seed}", flush=True)
            for one in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
                print(
                    *traceback.format_tb(one.__traceback__)[-3:],
                    f"{one!r}"[:1000],
                    *getattr(one, "__notes__", ()),
                    sep="\n",
                )
    print(f"findings: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
