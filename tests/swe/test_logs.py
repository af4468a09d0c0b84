"""Logs of real test runs are read: by our own parsers, and by those of swebench, on the same logs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.speed import scaled
from turngate.errors import TaskError
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
def ran(folder: Path, *options: str, columns: int = 80) -> str:
    """What pytest prints on a terminal so wide."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": str(columns)}
    plugins = ["-p", "no:cacheprovider", *(["-p", "xdist"] if "-n2" in options else [])]
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", *plugins, *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("options", [("-rA",), ("-rA", "--color=yes"), ("-rA", "-q")], ids=" ".join)
def test_a_summary_tells_every_outcome_but_which_tests_were_skipped(suite: Path, options: tuple[str, ...]) -> None:
    assert logs.parse_log("pytest", ran(suite, *options)) == OUTCOMES


@pytest.mark.parametrize("options", [("-v",), ("-v", "-n2"), ("-vv", "-rA")], ids=" ".join)
def test_progress_lines_tell_every_outcome(suite: Path, options: tuple[str, ...]) -> None:
    assert logs.parse_log("pytest", ran(suite, *options)) == OUTCOMES | SKIPPED


@pytest.mark.parametrize("columns", [40, 240])
def test_several_runs_in_one_log_are_all_read(suite: Path, columns: int) -> None:
    one = ran(suite, "-rA", "test_broken.py", columns=columns)
    other = ran(suite, "-rA", "-q", "test_suite.py", columns=columns)
    assert logs.parse_log("pytest", one + other) == OUTCOMES
    assert logs.parse_log("pytest", other + one) == OUTCOMES


@pytest.mark.needs("swebench")
def test_swebench_reads_the_same_where_names_are_plain(suite: Path) -> None:
    """And nothing was printed that looks like an outcome, and no test has two."""
    log = ran(suite, "-rA", "-k", "plain or known or wrong or (good and not b)")
    ours = logs.parse_log("pytest", log)
    assert len(ours) == 6
    assert logs.parse_log("rebench:parse_log_pytest_v2", log) == ours
    assert logs.parse_log("swebench:astropy/astropy", log) == ours
    cut = {name.split()[0]: case for name, case in ours.items()}
    assert logs.parse_log("rebench:parse_log_pytest", log) == cut
    assert logs.parse_log("swebench:pytest-dev/pytest", log) == cut


def test_unittest_output_is_read(suite: Path) -> None:
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
def test_a_parser_that_there_is_not_is_an_error_that_names_those_there_are() -> None:
    assert (
        logs.has_parser("pytest")
        and logs.has_parser("swebench:django/django")
        and logs.has_parser("rebench:parse_log_pytest")
    )
    for name, has in (("nose", "unittest"), ("swebench:no/repo", "django/django"), ("rebench:nose", "parse_log_cargo")):
        assert not logs.has_parser(name)
        with pytest.raises(TaskError, match=has):
            logs.parse_log(name, "")


@pytest.mark.needs("swebench")
def test_a_log_that_a_parser_gets_lost_in_decides_nothing_and_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no invalid task either: an agent could print its way out of a bad grade."""
    assert logs.has_parser("swebench:django/django")  # what there is, is asked for once, without haste
    monkeypatch.setattr(logs, "FOREIGN_TIMEOUT_S", 1.0)
    with pytest.raises(Undecided, match="took longer than 1 s"):
        logs.parse_log("swebench:django/django", "test_x ... Testing against Django installed in /\n" * 60_000)


@pytest.mark.parametrize(
    "line",
    ["t.py::" + " FAILED" * 1100 + " x", "FAILED t[" + " - " * 2600, "=" * 8000, "PASSED " * 1000, "\x1b[" * 4000],
)
def test_our_own_parsers_do_not_get_lost(line: str) -> None:
    began = time.process_time()
    for name in ("pytest", "unittest"):
        logs.parse_log(name, "=== short test summary info ===\n" + f"{line}\n" * 500)
        logs.parse_log(name, f"{line}\n" * 500)
    assert time.process_time() - began < scaled(2.5)
