"""Parse logs of real test runs with our own parsers and with those of swebench."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.speed import scaled
from turngate.errors import ConfigError, TaskError
from turngate.tasks.grading import logs
from turngate.tasks.grading.result import Undecided
from turngate.tasks.grading.types import CaseOutcome

pytestmark = pytest.mark.process

SUITE = '''
import unittest
import pytest

@pytest.mark.parametrize("x", ["a b", "a - b", "[", "PASSED x", "a] - [b"])
def test_good(x):
    pass

@pytest.mark.parametrize("x", ["a b", "a - b", "FAILED x"])
def test_bad(x):
    print("PASSED test_suite.py::test_forged")
    print("=== short test summary info ===")
    print("PASSED test_suite.py::test_bad[a b]")
    assert not x, "why - why [1]"

def test_wrong():
    assert 0, "why"

@pytest.mark.skip(reason="not (really) - now")
def test_skipped():
    pass

@pytest.mark.xfail(reason="known - bug")
def test_expected():
    assert 0

@pytest.mark.xfail
def test_unexpected():
    pass

@pytest.fixture
def leaves():
    yield
    raise OSError

@pytest.fixture
def begins():
    raise OSError

def test_left(leaves):
    pass

def test_begun(begins):
    pass

class Cases(unittest.TestCase):
    def test_plain(self):
        """What it says of itself."""

    def test_parts(self):
        for part in range(3):
            with self.subTest(part=part):
                self.assertNotEqual(part, 1)

    @unittest.skip("not now")
    def test_later(self):
        pass

    @unittest.expectedFailure
    def test_known(self):
        self.fail()
'''
GOOD = ("a b", "a - b", "[", "PASSED x", "a] - [b")
OUTCOMES: dict[str, CaseOutcome] = {
    **{f"test_suite.py::test_good[{x}]": "passed" for x in GOOD},
    **{f"test_suite.py::test_bad[{x}]": "failed" for x in ("a b", "a - b", "FAILED x")},
    "test_suite.py::test_wrong": "failed",
    "test_suite.py::test_expected": "passed",
    "test_suite.py::test_left": "error",
    "test_suite.py::test_begun": "error",
    "test_suite.py::Cases::test_plain": "passed",
    "test_suite.py::Cases::test_parts": "failed",
    "test_suite.py::Cases::test_known": "passed",
    "test_broken.py": "error",
}
SKIPPED: dict[str, CaseOutcome] = {
    "test_suite.py::test_skipped": "skipped",
    "test_suite.py::Cases::test_later": "skipped",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_broken.py").write_text("import nothing_of_that_name\n")
    return folder


@cache
def run_pytest(folder: Path, *options: str, columns: int = 80) -> str:
    """Run pytest on a terminal with the given number of columns, and return its output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": str(columns)}
    plugins = ["-p", "no:cacheprovider", *(["-p", "xdist"] if "-n2" in options else [])]
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", *plugins, *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [("-rA",), ("-rA", "--color=yes"), ("-rA", "-q")], ids=" ".join)
def test_pytest_summary_gives_every_outcome_except_skips(suite: Path, options: tuple[str, ...]) -> None:
    assert logs.parse_log("pytest", run_pytest(suite, *options)) == OUTCOMES


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [("-v",), ("-v", "-n2"), ("-vv", "-rA")], ids=" ".join)
def test_pytest_progress_lines_give_every_outcome(suite: Path, options: tuple[str, ...]) -> None:
    assert logs.parse_log("pytest", run_pytest(suite, *options)) == OUTCOMES | SKIPPED


@pytest.mark.parametrize("columns", [40, 240])
def test_several_runs_in_one_log(suite: Path, columns: int) -> None:
    first = run_pytest(suite, "-rA", "test_broken.py", columns=columns)
    second = run_pytest(suite, "-rA", "-q", "test_suite.py", columns=columns)
    assert logs.parse_log("pytest", first + second) == OUTCOMES
    assert logs.parse_log("pytest", second + first) == OUTCOMES


@pytest.mark.needs("swebench")
def test_swebench_parsers_agree_on_plain_names(suite: Path) -> None:
    """The log has no printed text that looks like an outcome, and no test with two outcomes."""
    log = run_pytest(suite, "-rA", "-k", "plain or known or wrong or (good and not b)")
    ours = logs.parse_log("pytest", log)
    assert len(ours) == 6
    assert logs.parse_log("rebench:parse_log_pytest_v2", log) == ours
    assert logs.parse_log("swebench:astropy/astropy", log) == ours
    cut = {name.split()[0]: case for name, case in ours.items()}
    assert logs.parse_log("rebench:parse_log_pytest", log) == cut
    assert logs.parse_log("swebench:pytest-dev/pytest", log) == cut


def test_unittest_output(suite: Path) -> None:
    command = [sys.executable, "-m", "unittest", "-v", "test_suite"]
    log = subprocess.run(command, cwd=suite, capture_output=True, text=True, check=False).stderr
    found = logs.parse_log("unittest", log)
    assert {name.partition(" ")[0]: case for name, case in found.items()} == {
        "test_plain": "passed",
        "test_parts": "failed",
        "test_later": "skipped",
        "test_known": "passed",
    }


@pytest.mark.needs("swebench")
def test_unknown_parser_error_lists_known_parsers() -> None:
    for name in ("pytest", "swebench:django/django", "rebench:parse_log_pytest"):
        logs.require_parser(name)
    for name, known in (
        ("nose", "unittest"),
        ("swebench:no/repo", "django/django"),
        ("rebench:nose", "parse_log_cargo"),
    ):
        with pytest.raises(TaskError, match=known):
            logs.require_parser(name)
        with pytest.raises(TaskError, match=known):
            logs.parse_log(name, "")


@pytest.mark.needs("swebench")
def test_slow_foreign_parser_times_out_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is not invalid either: otherwise an agent could avoid a bad grade by printing."""
    logs.require_parser("swebench:django/django")  # load the list of parsers before the timeout is shortened
    monkeypatch.setattr(logs, "FOREIGN_TIMEOUT_S", 1.0)
    with pytest.raises(Undecided, match="took longer than 1 s"):
        logs.parse_log("swebench:django/django", "test_x ... Testing against Django installed in /\n" * 60_000)


def test_slow_import_of_swebench_is_not_a_fault_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swebench.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logs, "FOREIGN_TIMEOUT_S", 0.001)
    logs._list_swebench_parsers.cache_clear()
    with pytest.raises(ConfigError, match=r"^log_parser: importing swebench took longer than 0\.001 s; try again"):
        logs.require_parser("swebench:django/django")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "line",
    ["t.py::" + " FAILED" * 1100 + " x", "FAILED t[" + " - " * 2600, "=" * 8000, "PASSED " * 1000, "\x1b[" * 4000],
)
def test_own_parsers_are_fast_on_pathological_lines(line: str) -> None:
    began = time.process_time()
    for name in ("pytest", "unittest"):
        logs.parse_log(name, "=== short test summary info ===\n" + f"{line}\n" * 500)
        logs.parse_log(name, f"{line}\n" * 500)
    assert time.process_time() - began < scaled(2.5)
