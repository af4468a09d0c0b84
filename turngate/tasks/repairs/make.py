"""Make repair tasks: choose bugs that the tests of a package catch, and write a task for each.

A bug is kept if at least one test fails, at least half of the tests still pass, and the tests finish in time. If several bugs in a
function make the same tests fail, only the first of them is kept. At most `per_function` bugs are kept per function. The order in which
bugs are tried depends only on the package and the seed.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Literal

import msgspec

from turngate.errors import ConfigError
from turngate.sandboxes.base import Backend
from turngate.tasks.repairs.measure import (
    Baseline,
    Bench,
    TestRun,
    build_grading_command,
    build_test_command,
    choose_cases,
    find_excerpt,
    measure_baseline,
    open_bench,
)
from turngate.tasks.repairs.mutations import Mutation, find_mutations
from turngate.tasks.repairs.package import Package
from turngate.types import Json

Hint = Literal["tests", "file", "function"]
Split = Literal["train", "held-out"]
Fate = Literal["kept", "not caught by tests", "breaks most tests", "hangs", "duplicate", "function has enough bugs"]

MAX_MODULE = 60_000  # characters; larger files are too long for an agent
TRIES_PER_TASK = 6
_MARGIN_S, _SLOWDOWN = (
    5.0,
    4.0,
)  # a run with a bug counts as hanging after the time of a run without bugs * _SLOWDOWN + _MARGIN_S
_MAX_FAILING = 0.5  # fraction of the tests; a bug that breaks more is too easy to find
_GRADING_MARGIN_S = 60.0
_MAX_LISTED = 3  # failing tests in an instruction
_MAX_DISTANCE_CASES = 20


class RepairSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for choosing bugs and writing tasks."""

    per_package: int = 40  # maximum number of tasks
    per_function: int = 4
    seed: int = 0
    hint: Hint = "file"  # how precisely the instruction locates the bug
    benches: int = 2  # bugs of one package tried at the same time; does not affect the result
    image: str = ""

    def __post_init__(self) -> None:
        for name in ("per_package", "per_function", "benches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """A possible bug: one mutation of one module."""

    path: str
    mutation: Mutation
    text: str  # the whole module, with the bug


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """A bug that the package's tests catch, with the test results."""

    bug: Bug
    failing: tuple[str, ...]  # names of tests
    passing: tuple[str, ...]
    distance: int | None  # calls from a failing test to the function with the bug; None if no such call was seen
    excerpt: str  # the report of the first failing test


class PackageRepairs(msgspec.Struct, frozen=True, kw_only=True):
    """The repairs of one package, and the number of tried bugs by fate."""

    package: Package
    repairs: tuple[Repair, ...]
    fates: Mapping[Fate, int]
    baseline: Baseline


def list_bugs(package: Package, seed: int) -> list[Bug]:
    """List the possible bugs of a package in the order in which to try them, alternating between kinds and modules."""
    bugs: dict[tuple[str, str], list[Bug]] = {}
    for path in package.modules:
        source = package.files[path]
        if len(source) > MAX_MODULE or "\r" in source:
            continue
        try:
            mutations = find_mutations(source)
        except SyntaxError:  # a file for a different version of Python
            continue
        for mutation in mutations:
            bug = Bug(path=path, mutation=mutation, text=mutation.apply(source))
            bugs.setdefault((mutation.kind, path), []).append(bug)
    chance = random.Random(f"{seed} {package.name}")
    piles = [bugs[key] for key in sorted(bugs)]
    for pile in piles:
        chance.shuffle(pile)
    chance.shuffle(piles)
    return [pile[n] for n in range(max(map(len, piles), default=0)) for pile in piles if n < len(pile)]


async def make_repairs(
    package: Package, backend: Backend, settings: RepairSettings, report: Callable[[str], None] = lambda text: None
) -> PackageRepairs:
    """Try bugs until there are `settings.per_package` repairs, but try at most `TRIES_PER_TASK` bugs per requested repair.

    Raise `TaskError` if the unchanged package's tests take too long, if some cannot run, or if none passes.
    """
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_bench(package, backend, settings.image))
        baseline = await measure_baseline(first, package)
        others = [
            await stack.enter_async_context(open_bench(package, backend, settings.image))
            for _ in range(settings.benches - 1)
        ]
        search = BugSearch(package, baseline, settings, [first, *others])
        candidates = list_bugs(package, settings.seed)[: settings.per_package * TRIES_PER_TASK]
        for start in range(0, len(candidates), settings.benches):
            if len(search.repairs) >= settings.per_package:
                break
            await search.try_bugs(candidates[start : start + settings.benches])
            report(f"{package.name}: tasks made: {len(search.repairs)}, bugs tried: {sum(search.fates.values())}")
    return PackageRepairs(package=package, repairs=tuple(search.repairs), fates=dict(search.fates), baseline=baseline)


class BugSearch:
    """Tries bugs, several at a time, and keeps those that make good tasks.

    The result depends neither on the number of benches nor on which test run finishes first.
    """

    def __init__(
        self, package: Package, baseline: Baseline, settings: RepairSettings, benches: Sequence[Bench]
    ) -> None:
        self.repairs: list[Repair] = []
        self.fates: Counter[Fate] = Counter()
        self._package, self._baseline, self._settings, self._benches = package, baseline, settings, benches
        self._limit_s = baseline.seconds * _SLOWDOWN + _MARGIN_S
        self._seen: set[tuple[str, str, frozenset[str]]] = set()
        self._per_function: Counter[tuple[str, str]] = Counter()

    async def try_bugs(self, bugs: Sequence[Bug]) -> None:
        runs = await asyncio.gather(
            *(
                bench.run_tests({bug.path: bug.text}, self._limit_s)
                for bench, bug in zip(self._benches, bugs, strict=False)
            )
        )
        kept: list[Coroutine[None, None, Repair]] = []
        for bug, run, bench in zip(bugs, runs, self._benches, strict=False):
            if len(self.repairs) + len(kept) == self._settings.per_package:
                break  # a single bench would not have tried the remaining bugs
            fate = self.judge(bug, run)
            self.fates[fate] += 1
            if fate == "kept":
                kept.append(self._finish(bench, bug, run))
        self.repairs += await asyncio.gather(*kept)

    def judge(self, bug: Bug, run: TestRun) -> Fate:
        """Return the fate of a bug, given the test run with that bug. Remember bugs that are kept, to recognize duplicates."""
        failing = self._baseline.passing - run.passed
        if run.timed_out:
            return "hangs"
        if not failing:
            return "not caught by tests"
        if len(failing) > _MAX_FAILING * len(self._baseline.passing):
            return "breaks most tests"
        place = (bug.path, bug.mutation.function)
        if (*place, failing) in self._seen:
            return "duplicate"
        if self._per_function[place] >= self._settings.per_function:
            return "function has enough bugs"
        self._seen.add((*place, failing))
        self._per_function[place] += 1
        return "kept"

    async def _finish(self, bench: Bench, bug: Bug, run: TestRun) -> Repair:
        failing = self._baseline.passing - run.passed
        chosen = choose_cases(failing, _MAX_DISTANCE_CASES)
        distance = await bench.measure_distance(
            {bug.path: bug.text}, bug.path, bug.mutation.first, chosen, self._limit_s * 2
        )
        return Repair(
            bug=bug,
            failing=tuple(sorted(failing)),
            passing=tuple(sorted(self._baseline.passing & run.passed)),
            distance=distance,
            excerpt=find_excerpt(run.log, chosen[0]),
        )


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_row(made: PackageRepairs, repair: Repair, settings: RepairSettings, split: Split) -> dict[str, Json]:
    """Build the row of a task, in the format of `loaders/rows.py`."""
    package, bug = made.package, repair.bug
    mutation = bug.mutation
    key = f"{package.name} {package.version} {bug.path} {mutation.start} {mutation.end} {mutation.text}"
    return {
        "id": f"{package.slug}-{mutation.kind.replace(' ', '-')}-{hashlib.sha256(key.encode()).hexdigest()[:8]}",
        "instruction": write_instruction(package, repair, settings.hint),
        "files": {**package.files, bug.path: bug.text},
        "grader": {
            "type": "swe",
            "repo": package.name,
            "fail_to_pass": list(repair.failing),
            "pass_to_pass": list(repair.passing),
            **build_grading_command(package)._asdict(),
            "timeout_s": round(made.baseline.seconds * _SLOWDOWN + _GRADING_MARGIN_S),
        },
        "solution": {"patch": write_patch(bug.path, bug.text, package.files[bug.path])},
        "metadata": {
            "package": package.name,
            "version": package.version,
            "license": package.license,
            "origin": package.origin,
            "split": split,
            "kind": mutation.kind,
            "path": bug.path,
            "function": mutation.function,
            "line": mutation.line,
            "failing": len(repair.failing),
            "distance": repair.distance,
            "difficulty": rate_difficulty(repair),
            "seed": settings.seed,
        },
    }


def rate_difficulty(repair: Repair) -> Literal["easy", "medium", "hard"]:
    """Rate the difficulty of a repair by the number of calls between the failing tests and the bug."""
    if repair.distance is None or repair.distance > 3:
        return "hard"
    return "easy" if repair.distance == 1 else "medium"


def write_instruction(package: Package, repair: Repair, hint: Hint) -> str:
    """Write the instruction for the agent. It never contains the fix."""
    named = choose_cases(repair.failing, _MAX_LISTED)
    files = list(dict.fromkeys(case.partition("::")[0] for case in named))
    more = f" ({len(repair.failing)} fail in all)" if len(repair.failing) > len(named) else ""
    release = f"{package.name} {package.version}".strip()
    parts = [f"There is a bug in {release}: tests fail. Fix the code of the package. Do not change the tests."]
    mutation = repair.bug.mutation
    if hint == "file":
        parts.append(f"The bug is in `{repair.bug.path}`.")
    elif hint == "function":
        lines = f"lines {mutation.first} to {mutation.last}"
        parts.append(f"The bug is in the function `{mutation.function}` in `{repair.bug.path}` ({lines}).")
    parts.append("\n".join([f"Failing tests{more}:", *(f"- {case}" for case in named)]))
    if repair.excerpt:
        parts.append(f"The first one reports:\n\n```\n{repair.excerpt}\n```")
    parts.append(f"Run them with:\n\n```\n{build_test_command(package, files)}\n```")
    return "\n\n".join(parts) + "\n"


def write_patch(path: str, before: str, after: str) -> str:
    """Return a unified diff that changes a file from `before` to `after`."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def split_packages(names: Sequence[str], held_out: float, seed: int) -> dict[str, Split]:
    """Assign each package to the training or the held-out split. At least one package is for training."""
    if not 0 <= held_out < 1:
        raise ConfigError(f"held_out must be at least 0 and less than 1, not {held_out:g}", param="held_out")
    mixed = sorted(set(names))
    random.Random(seed).shuffle(mixed)
    count = min(round(held_out * len(mixed)), len(mixed) - 1)
    return {name: "held-out" if n < count else "train" for n, name in enumerate(mixed)}


def describe_package(made: PackageRepairs, split: Split) -> Iterator[tuple[str, Json]]:
    """Yield the fields of a package's entry in `packages.json`, which documents where the tasks come from."""
    yield "package", made.package.name
    yield "version", made.package.version
    yield "license", made.package.license
    yield "origin", made.package.origin
    yield "split", split
    yield "tasks", len(made.repairs)
    yield "bugs", dict(made.fates)
    yield "tests", len(made.baseline.passing)
    yield "flaky_tests", sorted(made.baseline.flaky)
    yield "left_out", list(made.package.left_out)
