"""The witness recognizes a test's own function, however it is wrapped, and reports replaced ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.tasks.grading import observed_run, witness
from turngate.tasks.grading.witness_report import WitnessReport, parse_report

pytestmark = pytest.mark.process

EVERY_KIND = """
import asyncio, functools, unittest
from unittest import mock
import pytest
from hypothesis import given, settings, strategies as st
from mixins import Shared, test_taken

def plain(f):
    def inner(x=1):
        return f()
    return inner

def wrapped(f):
    @functools.wraps(f)
    def inner(*args, **more):
        return f(*args, **more)
    return inner

@pytest.fixture
def three():
    return 3

def test_plain(): pass
def test_fixture(three, tmp_path): assert three == 3
@pytest.mark.parametrize("x", ["a", "b::c", "d [e]"])
def test_parameters(x): assert x
@plain
def test_without_wraps(): pass
@wrapped
@plain
@wrapped
def test_many_layers(): pass
@mock.patch("os.getpid", return_value=1)
def test_mocked(getpid): assert __import__("os").getpid() == 1
@pytest.mark.asyncio
async def test_async(): await asyncio.sleep(0)
@given(st.integers())
@settings(max_examples=3, database=None)
def test_hypothesis(x): assert x == x
def _partly(x): assert x == 2
test_made_here = wrapped(_partly.__get__(2))

class TestClass:
    def test_method(self, three): assert three == 3
    @staticmethod
    def test_static(): pass
    @classmethod
    def test_of_class(cls): pass
    @wrapped
    def test_wrapped(self): pass
    class TestInner:
        def test_deep(self): pass

class TestInherited(Shared): pass

def adding(n):
    def check(self): self.assertEqual(n, n)
    return check

class Units(unittest.TestCase):
    def setUp(self): self.x = 1
    def test_unit(self): self.assertEqual(self.x, 1)
    @mock.patch("os.getpid")
    def test_unit_mocked(self, getpid): pass
    def test_subtests(self):
        for n in range(2):
            with self.subTest(n=n): self.assertLess(n, 2)
class UnitsAsync(unittest.IsolatedAsyncioTestCase):
    async def test_awaits(self): await asyncio.sleep(0)
for n in range(2):
    setattr(Units, "test_made_%d" % n, adding(n))
"""
MIXINS = "class Shared:\n    def test_shared(self): pass\ndef test_taken(): pass\n"
SWAP_CONFTEST = """
import pytest
def nothing(**more): pass
@pytest.fixture(autouse=True)
def swapped(request):
    if request.node.name == "test_all": request.node._obj = nothing
    if request.node.name == "test_some": request.node._obj = request.module.test_one
    if request.node.name == "test_runs": request.node.runtest = nothing
"""


def run_with_witness(folder: Path, *words: str, tests: tuple[str, ...]) -> tuple[WitnessReport, str]:
    """Run pytest with the witness, as `observed_run.py` does. Return its report and the output."""
    witness_folder, key = folder.parent / "ours", b"k" * 48
    test_paths = b"\0".join(os.fsencode(path) for path in (str(folder), *tests))
    site, source = observed_run.SITE.encode(), Path(witness.__file__).read_bytes()
    kit.write_files(
        witness_folder, {"key": key, "tests": test_paths, "sitecustomize.py": site, "turngate_witness.py": source}
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{witness_folder}:{folder}:{folder}/lib"}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout
    report = witness_folder / "report"
    return parse_report(key, report.read_bytes() if report.exists() else b""), done.stdout + done.stderr


def test_every_kind_of_test_is_recognized(tmp_path: Path) -> None:
    folder = kit.write_files(tmp_path / "w", {"tests/test_many.py": EVERY_KIND, "tests/mixins.py": MIXINS})
    report, output = run_with_witness(folder, "tests", tests=("tests/test_many.py", "tests/mixins.py"))
    assert report.ended, output
    assert report.replaced == frozenset() and report.tampered == frozenset()
    assert len(report.outcomes) >= 22 and set(report.outcomes.values()) == {"passed"}, output
    passed = [line.removeprefix("PASSED ") for line in output.splitlines() if line.startswith("PASSED ")]
    assert passed and all(report.passed(case) for case in passed)


def test_replaced_test_functions_are_reported(tmp_path: Path) -> None:
    tests = "def test_one(): pass\ndef test_all(): assert 0\ndef test_some(): assert 0\ndef test_runs(): assert 0\n"
    folder = kit.write_files(tmp_path / "w", {"tests/test_x.py": tests, "tests/conftest.py": SWAP_CONFTEST})
    report, output = run_with_witness(folder, "tests", tests=("tests/test_x.py",))
    assert report.ended and "4 passed" in output
    assert report.passed("tests/test_x.py::test_one")
    assert report.replaced == {f"tests/test_x.py::test_{name}" for name in ("all", "some", "runs")}
    assert not any(report.passed(case) for case in report.replaced)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["json", "hmac", "hashlib", "unittest", "re"])
def test_work_cannot_shadow_modules_of_witness(name: str, tmp_path: Path) -> None:
    """The working folder is on PYTHONPATH, so its modules would come before those of the standard library."""
    shadow = f"import os, sys\nprint('STOLEN', any(os.path.exists(p + '/key') for p in sys.path))\nraise ImportError({name!r})\n"
    files = {"tests/test_x.py": "def test_one(): pass\n", f"{name}.py": shadow}
    report, output = run_with_witness(kit.write_files(tmp_path / "w", files), "tests", tests=("tests/test_x.py",))
    assert report.ended and report.passed("tests/test_x.py::test_one"), output
    assert "STOLEN True" not in output


def test_names_are_relative_to_start_folder(tmp_path: Path) -> None:
    """A pytest.ini makes another folder the root directory of pytest."""
    files = {"lib/pytest.ini": "[pytest]\n", "lib/tests/test_x.py": "def test_one(): pass\n"}
    report, output = run_with_witness(
        kit.write_files(tmp_path / "w", files), "lib/tests", tests=("lib/tests/test_x.py",)
    )
    assert "PASSED lib/tests/test_x.py::test_one" in output
    assert report.ended and report.passed("lib/tests/test_x.py::test_one") and not report.replaced


def test_modules_imported_before_the_witness_are_not_hidden() -> None:
    """Tests get a module that a .pth file imported with and without the witness."""
    names = witness._list_imported_modules(("/nowhere/",), {"json"})
    assert "json" not in names and {"hashlib", "pytest"} <= set(names)


def test_modules_that_pytest_imported_are_hidden_from_tests(tmp_path: Path) -> None:
    """The witness imports pytest before the tests run, so they get the installed `iniconfig`."""
    test = "import iniconfig, sums\ndef test_one(): assert iniconfig.IniConfig and sums.TWO == 2\n"
    files = {"tests/test_x.py": test, "iniconfig.py": "", "lib/iniconfig/__init__.py": "", "lib/sums.py": "TWO = 2\n"}
    folder = kit.write_files(tmp_path / "w", {**files, "elsewhere/iniconfig.py": ""})
    report, output = run_with_witness(folder, "tests", tests=("tests/test_x.py",))
    assert report.passed("tests/test_x.py::test_one"), output
    assert report.find_hidden([*files, "elsewhere/iniconfig.py"]) == ("iniconfig.py", "lib/iniconfig/__init__.py")
