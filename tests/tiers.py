"""Test tiers: define the marks and check that every test has the right ones.

| mark | the test | runs in |
|---|---|---|
| (none) | stays in one process | `make test`, `make test-all` |
| `process` | starts processes | the same |
| `needs("docker", …)` | needs real parts, listed in `PARTS` of `needs.py` | depends on the other marks |
| `real` | covers a real part | `make test-real`, `make test-all` |
| `promise(5)` | covers promise 5 of `docs/testing.md` | also in `make test-real`, unless marked `full` |
| `full` | is one of many similar tests; `real` overrides this mark | `make test-all` |
| `sample(3)` | has many similar cases; all but three are `full`, or `repeat` if their values are not new | depends on the other marks |
| `alone` | needs the machine to itself | depends on the other marks; runs before all other tests |
| `soak` | is a stress test at a tenth of its size | also in `make soak`, at full size |
| `repeat` | repeats what other tests check, with other values | `make soak` only |

If a part is missing, its tests are skipped, and the reason names the command that installs it; with `CI=true` they fail. Collection
inspects the code of each test for the processes it starts and the parts it uses, and hooks watch the test while it runs. A test without the
right marks fails.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import multiprocessing.process
import os
import platform
import pty
import subprocess
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.speed import scaled
from tools.agent_names import MORE_AGENTS

REPORT = "TURNGATE_TIER_REPORT"  # environment variable: the results file that tools/tier.py reads
PROCESS = "process"
PROMISES = {f"promise {number}" for number in range(1, 10)}  # of docs/testing.md; `make test-real` covers each
LIMIT_S, REAL_LIMIT_S = 60.0, 300.0  # timeouts on an idle machine; the second with heavy parts


# ---- find the processes and parts that a test uses, by reading its code ----

_STARTERS: dict[Any, frozenset[str]] = {
    subprocess: frozenset({"run", "Popen", "call", "check_call", "check_output"}),
    asyncio: frozenset({"create_subprocess_exec", "create_subprocess_shell"}),
    os: frozenset({"fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"}),
    pty: frozenset({"fork", "spawn"}),
}
_OURS = ("tests.", "gauntlet.", "test_")  # prefixes of the modules to search


def _reach(function: Callable[..., Any], seen: dict[Any, frozenset[str]]) -> frozenset[str]:
    """Return the parts that a function uses, and PROCESS if it starts a process. Follow the test code that it refers to."""
    function = inspect.unwrap(function)
    if function in seen:
        return seen[function]
    seen[function] = frozenset()  # ends the search at recursive calls
    found = set(getattr(function, "__needs__", ()))
    if isinstance(function, types.FunctionType):
        names = _names(function.__code__)
        for value in (function.__globals__[name] for name in names if name in function.__globals__):
            if isinstance(value, types.ModuleType):
                if names & _STARTERS.get(value, frozenset()):
                    found.add(PROCESS)
                if value.__name__.startswith(_OURS):
                    for name in names & vars(value).keys():
                        found |= _reach_value(vars(value)[name], seen)
            elif any(value is getattr(module, name) for module, names_of in _STARTERS.items() for name in names_of):
                found.add(PROCESS)
            else:
                found |= _reach_value(value, seen)
    seen[function] = frozenset(found)
    return seen[function]


def _reach_value(value: Any, seen: dict[Any, frozenset[str]]) -> frozenset[str]:
    if not str(getattr(value, "__module__", "")).startswith(_OURS):
        return frozenset()
    if isinstance(value, type):
        return frozenset().union(
            *(_reach(method, seen) for method in vars(value).values() if inspect.isroutine(method))
        )
    return _reach(value, seen) if callable(value) else frozenset()


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _mistakes(item: pytest.Item, seen: dict[Any, frozenset[str]]) -> Iterator[str]:
    """Yield each problem with the marks of a test."""
    needed = needs.needs(item)
    if unknown := needed - needs.PARTS.keys():
        yield f"needs unknown parts: {', '.join(sorted(unknown))} (PARTS in tests/needs.py lists the known ones)"
    if (heavy := needed & needs.HEAVY.keys()) and not (
        item.get_closest_marker("real") or item.get_closest_marker("full")
    ):
        yield f"needs {', '.join(sorted(heavy))}: mark it real or full"
    reached = set(_reach(item.function, seen)) if isinstance(item, pytest.Function) else set()
    for fixtures in item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ():
        for fixture in fixtures:
            reached |= _reach(fixture.func, seen)
    if PROCESS in reached and not _may_start(item):
        yield "starts a process: mark it with @pytest.mark.process"
    if unmarked := reached - needed - {PROCESS}:
        yield f"needs {', '.join(sorted(unmarked))}: mark it with @pytest.mark.needs(…)"


def _may_start(item: pytest.Item) -> bool:
    """Return whether the marks of a test allow it to start processes."""
    return bool(item.get_closest_marker(PROCESS) or needs.needs(item) - needs.IN_PROCESS)


# ---- hooks ----

# Programs that belong to a part, however a test starts them.
PROGRAMS = {
    "docker": "docker",
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "vllm": "vllm",
    "initdb": "postgres",
    "postgres": "postgres",
    "pgbouncer": "pgbouncer",
    "slurmctld": "slurm",
}
_unmarked: list[str] = []  # what the current test started without the right mark


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        _note(str(arguments[0]))
    elif event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _note(event)


def _note(program: str) -> None:
    """Fail the current test if its marks do not allow it to start this program."""
    if needs.running is None:
        return
    part = PROGRAMS.get(Path(program).name)
    if part and part not in needs.needs(needs.running):
        message = f'started {program}: mark it with @pytest.mark.needs("{part}")'
    elif not part and not _may_start(needs.running):
        message = f"started {program}: mark it with @pytest.mark.process"
    else:
        return
    _unmarked.append(message)
    raise RuntimeError(f"this test {message}")


def _wrap(owner: Any, name: str) -> None:
    """Watch a function that starts processes without an audit event, as uvloop and multiprocessing do."""
    start = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        _note(str(arguments[0]) if name == "create_subprocess_exec" else name)
        return start(*arguments, **options)

    setattr(owner, name, watched)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run stress tests at full size instead of a tenth")
    parser.addoption("--complete", action="store_true", help="fail unless every heavy part and promise has a test")


@pytest.fixture
def storm_scale(pytestconfig: pytest.Config) -> float:
    """The factor by which to scale a stress test."""
    return 1.0 if pytestconfig.getoption("--soak") else 0.1


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that a test starts prints its stack if it crashes
    platform.processor()  # runs `uname` and caches the result; SDKs call this during tests
    sys.addaudithook(_watch)
    for name in ("create_subprocess_exec", "create_subprocess_shell"):
        _wrap(asyncio, name)
    _wrap(multiprocessing.process.BaseProcess, "start")
    if path := os.environ.pop(REPORT, ""):  # hide it from a pytest that a test starts
        config.pluginmanager.register(Results(Path(path)))


@pytest.hookimpl(optionalhook=True)  # xdist calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Schedule by group as xdist does, but forget finished groups: it counts the tests of all of them after each test."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduler(LoadGroupScheduling):
        def _reschedule(self, node: Any) -> None:
            groups = self.assigned_work[node]
            for group in [name for name, tests in groups.items() if all(tests.values())]:
                del groups[group]
            super()._reschedule(node)

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the garbage collector away from the collected tests, which live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the timeout and the xdist group, which xdist reads at the end of collection, and keep repetitions out of the lighter tiers."""
    needed = needs.needs(item)
    if item.get_closest_marker("repeat"):
        item.add_marker(pytest.mark.full)
    if not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(scaled(REAL_LIMIT_S if needed & needs.HEAVY.keys() else LIMIT_S)))
    if "vllm" in needed:
        item.add_marker(pytest.mark.xdist_group("vllm"))  # one worker starts the servers, one at a time
    elif _may_start(item):
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))  # sets up its fixtures once


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _check_marks(items)
    _mark_unsampled(items)
    if config.getoption("--complete"):
        _check_complete(items)
    items.sort(key=_weight)


def _mark_unsampled(items: list[pytest.Item]) -> None:
    """Mark as `full` the cases outside the sample of their test, and as `repeat` those whose parameter values are all in other cases.

    The sample covers as many values as possible.
    """
    tests: defaultdict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and names & {"sample", "full", "real"} == {"sample"}:
            tests[item.function].append(item)
    for cases in tests.values():
        [count] = cases[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        covered: set[tuple[int, str]] = set()
        for number in range(len(cases)):
            chosen = max(cases, key=lambda case: len(_values(case) - covered))
            if number >= count:
                chosen.add_marker(pytest.mark.full)
                if not _values(chosen) - covered:
                    chosen.add_marker(pytest.mark.repeat)
            covered |= _values(chosen)
            cases.remove(chosen)


def _values(case: pytest.Function) -> set[tuple[int, str]]:
    return {*enumerate(case.callspec._idlist)}  # one name for each `parametrize`


def _check_complete(items: list[pytest.Item]) -> None:
    """Fail unless `make test-real` covers every heavy part that it installs and every promise, and `make test-all` the other parts.

    A test in `make test-real` must not need the other parts, which are missing on a new machine.
    """
    marks = [(item, {mark.name for mark in item.iter_markers()}) for item in items]
    marks = [(item, names) for item, names in marks if "repeat" not in names]
    tier = [item for item, names in marks if "real" in names or names & {"promise", "full"} == {"promise"}]
    not_installed = {*needs.MORE_PARTS, *(f"agent:{name}" for name in MORE_AGENTS)}
    if wrong := sorted(item.nodeid for item in tier if needs.needs(item) & not_installed):
        raise pytest.UsageError(f"make test-real does not install the parts that these tests need: {', '.join(wrong)}")
    absent = needs.HEAVY.keys() - {part for item in tier for part in needs.needs(item)}
    more = not_installed & absent
    absent = absent - more | PROMISES - {
        f"promise {number}" for item in tier for m in item.iter_markers("promise") for number in m.args
    }
    if absent:
        raise pytest.UsageError(f"make test-real has no test for: {', '.join(sorted(absent))}")
    if more := more - {part for item, _ in marks for part in needs.needs(item)}:
        raise pytest.UsageError(f"make test-all has no test for: {', '.join(sorted(more))}")


def _check_marks(items: list[pytest.Item]) -> None:
    seen: dict[Any, frozenset[str]] = {}
    if wrong := {
        f"{item.nodeid.partition('[')[0]} {mistake}": None for item in items for mistake in _mistakes(item, seen)
    }:
        raise pytest.UsageError("\n".join(["these tests have missing or wrong marks (see tests/tiers.py):", *wrong]))


def _weight(item: pytest.Item) -> list[int]:
    """Sort key: tests of the heaviest parts first, tests of the same parts together, and tests in one process last.

    The tests of a file that start processes form a group, which can take minutes. One that begins at the end leaves the other cores idle.
    """
    order = list(needs.HEAVY)
    light = len(order) + (not _may_start(item))
    return sorted(order.index(part) for part in needs.needs(item) & needs.HEAVY.keys()) or [light]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needs.require(*sorted(needs.needs(item)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    needs.running = item
    try:
        return (yield)
    finally:
        needs.running = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    try:
        return (yield)
    finally:
        if started := _unmarked[:]:
            _unmarked.clear()
            pytest.fail(f"this test {'; it '.join(started)}")


def _without_group(name: str) -> str:
    """Return the name of a test without the group that xdist appends."""
    test, _, group = name.rpartition("@")
    return test if test and "]" not in group else name


class Results:
    """Collect the results of a run and write them for `tools/tier.py`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}
        self._finished: set[str] = set()
        self._skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        worst = ("passed", "skipped", "failed")
        self._outcomes[report.nodeid] = max(
            self._outcomes.get(report.nodeid, "passed"), report.outcome, key=worst.index
        )
        if report.when == "teardown" or report.failed:
            self._finished.add(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
            self._finished.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        slowest = sorted(self._seconds.items(), key=lambda one: -one[1])[:10]
        results = {
            "counts": Counter(self._outcomes[name] for name in self._finished),
            "slowest": [(_without_group(name), seconds) for name, seconds in slowest],
            "skips": self._skips,
        }
        self._path.write_text(json.dumps(results))
