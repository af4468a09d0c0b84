"""Run the tests of a package in a sandbox: twice without a bug, to find flaky tests, and once with each bug.

Graders later run the same command, with the same witness (`grading/witness.py`), and parse the log in the same way. Otherwise, a grader
could miss a bug that is caught here.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from turngate.common.aio import run_to_completion
from turngate.common.safe_text import sanitize
from turngate.errors import TaskError
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec
from turngate.tasks.grading.logs import parse_log
from turngate.tasks.grading.observed_run import run_observed
from turngate.tasks.grading.types import CaseOutcome
from turngate.tasks.loaders.rows import store_files
from turngate.tasks.repairs.package import Package, is_test

FIRST_LIMIT_S = 120.0  # time limit of the unchanged package's tests
OUTPUT_BYTES = 16_000_000
_COLLECTION_FAILED = 2  # pytest's exit code is at least this if it could not run all tests
# Python must not write compiled files: it would use an outdated one if the source changed within a second and kept its length.
_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
_MAX_EXCERPT_LINES, _MAX_EXCERPT = 24, 1500

# A pytest plugin that counts the calls between a test and a function, and writes the smallest count of all tests.
_DISTANCE = """
import os, sys
import pytest

path, line, out = os.environ["TURNGATE_CAUSE"].split(os.pathsep)
shortest = []

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    test = str(item.path)

    def watch(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_firstlineno == int(line) and os.path.abspath(code.co_filename) == path:
            calls = 0
            while frame is not None and frame.f_code.co_filename != test:
                frame, calls = frame.f_back, calls + 1
            if frame is not None:
                shortest[:] = [min([calls, *shortest])]

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)

def pytest_sessionfinish():
    with open(out, "w") as file:
        file.write("".join(map(str, shortest)))
"""


def build_test_command(
    package: Package, cases: Sequence[str] = (), options: str = "-q", *, with_path: bool = True
) -> str:
    """Build the shell command that runs the package's tests, or only `cases`. If `with_path` is false, the caller must set PYTHONPATH."""
    path = f"PYTHONPATH={package.root} " if package.root and with_path else ""
    own = " -o addopts=" if package.has_pytest_options else ""
    return " ".join([f"{path}python3 -m pytest {options}{own}", *(shlex.quote(case) for case in cases)])


GRADING_OPTIONS = "-q --no-header -rA --tb=short --color=no -p no:cacheprovider"


class GradingCommand(NamedTuple):
    """How graders run the package's tests: `before` sets variables, and `test_cmd` runs the tests."""

    before: str
    test_cmd: str


def build_grading_command(package: Package) -> GradingCommand:
    # PYTHONPATH is not set in test_cmd, because that would hide the witness's folder.
    before = f"export PYTHONPATH={package.root}" if package.root else ""
    return GradingCommand(before, build_test_command(package, options=GRADING_OPTIONS, with_path=False))


class TestRun(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run of the tests."""

    __test__ = False  # pytest must not collect this class

    cases: Mapping[str, CaseOutcome]
    log: str
    exit_code: int
    timed_out: bool
    seconds: float
    hidden: tuple[
        str, ...
    ] = ()  # modules of the package that tests cannot import, because pytest imports other modules of the same names

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(case for case, outcome in self.cases.items() if outcome == "passed")


class Bench:
    """A sandbox in which a package's tests are run repeatedly, each time with different changes to its files."""

    def __init__(self, sandbox: Sandbox, package: Package) -> None:
        self._sandbox = sandbox
        self._package = package
        self._changed: set[str] = set()

    async def upload_package(self) -> None:
        files = store_files(self._package.files, f"repairs: {self._package.name}")
        assert files is not None
        await self._sandbox.upload(files, self._sandbox.workdir)

    async def run_tests(self, changed: Mapping[str, str], limit_s: float) -> TestRun:
        """Run all tests after replacing the content of some files. `changed` maps their paths to the new content."""
        await self._write(changed)
        began = time.monotonic()
        command = build_grading_command(self._package)
        run = await run_observed(
            self._sandbox,
            command.test_cmd,
            before=command.before,
            test_files=[path for path in self._package.files if is_test(path)],
            timeout_s=limit_s,
            env=_ENV,
        )
        log = run.output.decode("utf-8", "replace") if run.log is None else run.log
        return TestRun(
            cases={} if run.log is None else parse_log("pytest", run.log),
            log=log.replace(f"{self._sandbox.workdir}/", ""),
            exit_code=run.exit_code,
            timed_out=run.timed_out,
            seconds=time.monotonic() - began,
            hidden=run.report.find_hidden(self._package.files),
        )

    async def measure_distance(
        self, changed: Mapping[str, str], path: str, line: int, cases: Sequence[str], limit_s: float
    ) -> int | None:
        """Return the smallest number of calls from a test in `cases` to the function at `line` of `path`: 1 for a direct call.

        Return None if no such call is seen, for example because only imports or fixtures call the function, or the tests take too long.
        """
        await self._write(changed)
        home, out = self._sandbox.home, f"{self._sandbox.home}/distance"
        await self._sandbox.write(f"{home}/turngate_distance.py", _DISTANCE.encode())
        await self._sandbox.write(out, b"")
        command = build_test_command(self._package, cases, "-q -p turngate_distance -p no:cacheprovider")
        env = {**_ENV, "TURNGATE_CAUSE": f"{self._sandbox.workdir}/{path}:{line}:{out}", "PYTHONPATH": home}
        command = command.replace("PYTHONPATH=", f"PYTHONPATH={shlex.quote(home)}:", 1)
        await self._sandbox.exec(
            ["sh", "-c", f"{command} 2>&1"], env=env, timeout_s=limit_s, keep=OUTPUT_BYTES, leave=False
        )
        content = (await self._sandbox.read(out)).decode()
        return int(content) if content.isdecimal() else None

    async def _write(self, changed: Mapping[str, str]) -> None:
        originals = {path: self._package.files[path] for path in self._changed - changed.keys()}
        self._changed = set(changed)
        for path, text in {**originals, **changed}.items():
            await self._sandbox.write(f"{self._sandbox.workdir}/{path}", text.encode())


@asynccontextmanager
async def open_bench(package: Package, backend: Backend, image: str = "") -> AsyncIterator[Bench]:
    """Create a sandbox, and upload the package into it. The sandbox has no network access, unless its backend cannot block it."""
    sandbox = await backend.create(SandboxSpec(image=image, labels={"for": "repairs"}))
    try:
        bench = Bench(sandbox, package)
        await bench.upload_package()
        yield bench
    finally:
        await run_to_completion(sandbox.stop())


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The test results of the unchanged package."""

    passing: frozenset[str]  # tests that passed in every run
    flaky: frozenset[str]
    seconds: float


async def measure_baseline(bench: Bench, package: Package) -> Baseline:
    """Run the tests of the unchanged package twice. Raise `TaskError` if they take too long, if some cannot run, or if none passes."""
    runs = []
    for _ in range(2):
        run = await bench.run_tests({}, FIRST_LIMIT_S)
        if run.timed_out:
            raise TaskError(
                f"repairs: the tests of {package.name} take longer than {FIRST_LIMIT_S:g} s; choose a package with faster tests",
                param="sources",
            )
        if run.hidden:
            raise TaskError(
                f"repairs: {package.name}: the tests cannot import {', '.join(run.hidden[:3])}, because pytest itself imports other "
                "modules of the same names; choose a package that pytest does not need",
                param="sources",
            )
        if not run.passed or run.exit_code >= _COLLECTION_FAILED:
            tail = " ".join(run.log.strip().splitlines()[-3:])[-400:]
            problem = "pytest did not run all tests" if run.passed else "no test passed"
            raise TaskError(
                f"repairs: {package.name}: {problem} in this sandbox (exit code {run.exit_code}): {tail}; "
                "check that the sandbox's python3 has pytest and the other packages that the tests need",
                param="sources",
            )
        runs.append(run)
    first, second = runs
    return Baseline(
        passing=first.passed & second.passed,
        flaky=first.passed ^ second.passed,
        seconds=max(run.seconds for run in runs),
    )


def find_excerpt(log: str, case: str) -> str:
    """Return a failed test's report from pytest's log, shortened and without control characters, or an empty string if there is none."""
    name = case.partition("::")[2].replace("::", ".")
    lines = log.splitlines()
    header = re.compile(rf"_+ (ERROR at \w+ of )?{re.escape(name)} _+")
    start = next((n for n, line in enumerate(lines) if header.fullmatch(line)), None)
    if start is None:
        return ""
    block: list[str] = []
    for line in lines[start + 1 :]:
        if re.fullmatch(r"(_{2,}|={2,}|-{2,}) .* (_{2,}|={2,}|-{2,})", line) or len(block) == _MAX_EXCERPT_LINES:
            break
        block.append(sanitize(line.rstrip()))
    return "\n".join(block)[:_MAX_EXCERPT].rstrip()


def choose_cases(cases: Collection[str], most: int) -> list[str]:
    """Return at most `most` cases, shortest names first."""
    return sorted(cases, key=lambda case: (len(case), case))[:most]
