"""Tests for making repair tasks: the choice of bugs, the instruction, the split, and one set made and proven in a real sandbox."""

from __future__ import annotations

import errno
import inspect
import io
import json
import random
import shutil
import socket
import tarfile
import textwrap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from turngate.cli.main import app
from turngate.errors import ConfigError, TaskError
from turngate.tasks.repairs import package as package_module
from turngate.tasks.repairs.make import (
    Bug,
    BugSearch,
    Repair,
    RepairSettings,
    list_bugs,
    rate_difficulty,
    split_packages,
    write_instruction,
    write_patch,
)
from turngate.tasks.repairs.measure import Baseline, Bench, TestRun, build_test_command, find_excerpt
from turngate.tasks.repairs.mutations import find_mutations
from turngate.tasks.repairs.package import Package, load_package
from turngate.tasks.task import check_instruction

MODULE = '''\
def clamp(value, low, high):
    """Limit a value."""
    if value < low:
        return low
    return min(value, high)


def spread(values, low=0):
    return max(values) - clamp(min(values), low, 9)
'''
TESTS = """\
from limits import clamp, spread


def test_clamp():
    assert clamp(5, 1, 3) == 3
    assert clamp(0, 1, 3) == 1


def test_inside():
    assert clamp(2, 1, 3) == 2


def test_spread():
    assert spread([4, 7]) == 3
"""
PROJECT = '[project]\nname = "limits"\nversion = "1.0"\nlicense = "MIT"\n'
FILES = {
    "pyproject.toml": PROJECT,
    "limits/__init__.py": "from limits.core import clamp, spread\n",
    "limits/core.py": MODULE,
    "tests/test_limits.py": TESTS,
    "docs/index.md": "left out",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "limits", FILES)


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def build_repair(distance: int | None = 1, excerpt: str = "") -> Repair:
    [mutation] = [one for one in find_mutations(MODULE) if one.kind == "comparison" and one.function == "clamp"]
    bug = Bug(path="limits/core.py", mutation=mutation, text=mutation.apply(MODULE))
    failing = tuple(f"tests/test_limits.py::test_{name}" for name in ("clamp", "a", "b", "c"))
    return Repair(
        bug=bug, failing=failing, passing=("tests/test_limits.py::test_inside",), distance=distance, excerpt=excerpt
    )


# ── packages ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_folder_is_a_package(folder: Path) -> None:
    package = load_package(str(folder))
    assert (package.name, package.version, package.license) == ("limits", "1.0", "MIT")
    assert package.modules == ("limits/__init__.py", "limits/core.py")
    assert "docs/index.md" not in package.files


def test_release_is_read_from_cached_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    about = "Metadata-Version: 2.4\nName: limits\nVersion: 1.0\nClassifier: License :: OSI Approved :: MIT License\n"
    archive = tmp_path / "releases" / "limits-1.0.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in {**FILES, "PKG-INFO": about, "logo.png": "\0"}.items():
            member = tarfile.TarInfo(f"limits-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    package = load_package("limits==1.0")
    assert package.license == "MIT License" and package.origin.startswith("limits==1.0 sha256:")
    assert package.left_out == ("logo.png",) and "PKG-INFO" not in package.files


@pytest.mark.parametrize("damage", ["truncated", "changed", "not an archive", "wrong checksum"])
def test_damaged_archive_is_a_task_error(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        member = tarfile.TarInfo("limits-1.0/limits.py")
        member.size = 300_000
        tar.addfile(member, io.BytesIO(random.Random(1).randbytes(member.size)))
    whole = stream.getvalue()
    middle = len(whole) // 2
    archive = tmp_path / "releases" / "limits-1.0.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(
        {
            "truncated": whole[:middle],
            "changed": whole[:middle] + b"\xff" * 2000 + whole[middle + 2000 :],
            "not an archive": b"<html>",
            "wrong checksum": whole[:-8] + bytes(4) + whole[-4:],
        }[damage]
    )
    with pytest.raises(TaskError, match=f"the archive of limits==1.0 cannot be read: .*; delete .*{archive.parent}"):
        load_package("limits==1.0")


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n<a", "IncompleteRead"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
    ],
    ids=["incomplete body", "invalid status line"],
)
def test_failed_download_is_a_task_error(
    response: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(response)

        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = threading.Thread(target=respond)
        server.start()
        with pytest.raises(TaskError, match=f"cannot be downloaded: {problem}.*; check the package's name"):
            load_package("limits==1.0")
        server.join()


def test_unreadable_file_is_a_task_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TaskError, match=rf"{folder}/.* cannot be read \(Permission denied\); check the permissions"):
        load_package(str(folder))


def test_unreadable_archive_is_a_task_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / "limits-1.0.tar.gz").symlink_to("/proc/self/mem")  # reading it fails, also for root
    with pytest.raises(TaskError, match=r"limits-1\.0\.tar\.gz cannot be read \(.*\); .* set TURNGATE_CACHE"):
        load_package("limits==1.0")


def test_unwritable_cache_is_a_task_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    (tmp_path / "releases").write_text("a file")
    monkeypatch.setattr(package_module, "_fetch", lambda address: b'<a href="limits-1.0.tar.gz">')
    with pytest.raises(TaskError, match=r"limits-1\.0\.tar\.gz cannot be written \(.*\); .* set TURNGATE_CACHE"):
        load_package("limits==1.0")


@pytest.mark.parametrize("source", ["~no-such-user/limits", "x" * 5000], ids=["unknown user", "too long"])
def test_impossible_path_is_a_task_error(source: str) -> None:
    with pytest.raises(TaskError, match="is neither a folder nor a release"):
        load_package(source)


def test_index_url_without_scheme_is_a_task_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "localhost/simple")
    with pytest.raises(TaskError, match=r"cannot be downloaded: unknown url type.*PIP_INDEX_URL"):
        load_package("limits==1.0")


def test_unpacked_release_has_the_name_of_the_release(tmp_path: Path) -> None:
    about = "Metadata-Version: 2.4\nName: limits\nVersion: 1.0\nLicense: MIT\n"
    folder = write_files(tmp_path / "limits-1.0", {**FILES, "PKG-INFO": about})
    (folder / "pyproject.toml").unlink()
    package = load_package(str(folder))
    assert (package.name, package.version, package.license) == ("limits", "1.0", "MIT")
    assert package.origin == "limits-1.0" and "PKG-INFO" not in package.files
    write_files(folder, {"pyproject.toml": '[project]\nname = "limits"\ndynamic = ["version"]\n'})
    assert load_package(str(folder)).version == "1.0"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"limits/__init__.py": ""}, "has no tests"),
        ({"tests/test_a.py": ""}, "has no code to inject bugs into"),
        ({"pyproject.toml": "["}, "limits/pyproject.toml is not valid TOML"),
        (
            {"pyproject.toml": "x = " + "[" * 5000},
            "limits/pyproject.toml is not valid TOML: a value is nested too deeply",
        ),
    ],
)
def test_unsuitable_packages(files: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        load_package(str(write_files(tmp_path / "limits", files)))


def test_unknown_source() -> None:
    with pytest.raises(TaskError, match="write a release as NAME==VERSION"):
        load_package("limits")


def test_options_of_the_project_are_ignored(folder: Path) -> None:
    package = load_package(str(folder))
    assert build_test_command(package, ["tests/a b.py"]) == "python3 -m pytest -q 'tests/a b.py'"
    files = {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--cov'\n", "src/limits/__init__.py": ""}
    other = Package(name="limits", version="1.0", license="", origin="", files=files)
    assert build_test_command(other) == "PYTHONPATH=src python3 -m pytest -q -o addopts="
    assert build_test_command(other, with_path=False) == "python3 -m pytest -q -o addopts="


# ── bugs, instructions, splits ──────────────────────────────────────────────────────────────────────────────────────


def test_bugs_depend_only_on_package_and_seed(folder: Path) -> None:
    package = load_package(str(folder))
    first, again, other = (list_bugs(package, seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert sorted(map(repr, first)) == sorted(map(repr, other)) and len(first) > 10
    kinds = [bug.mutation.kind for bug in first]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))  # the kinds take turns


def test_files_for_other_versions_of_python_have_no_bugs(folder: Path) -> None:
    write_files(folder, {"limits/old.py": "def f():\n    print 1 < 2\n"})
    assert {bug.path for bug in list_bugs(load_package(str(folder)), 0)} == {"limits/core.py"}


@pytest.mark.parametrize(
    ("hint", "named"), [("tests", ()), ("file", ("core.py",)), ("function", ("clamp", "lines 1 to 5"))]
)
def test_instruction(hint: str, named: tuple[str, ...], folder: Path) -> None:
    package, repair = load_package(str(folder)), build_repair(excerpt="E   assert 5 == 3")
    text = write_instruction(package, repair, hint)  # type: ignore[arg-type]
    assert "limits 1.0" in text and "(4 fail in all)" in text and "E   assert 5 == 3" in text
    assert "python3 -m pytest -q tests/test_limits.py" in text
    assert all(word in text for word in named)
    assert ("The bug is in" in text) == bool(named)
    assert "value <" not in text  # neither the bug nor the fix


@pytest.mark.parametrize(
    ("distance", "level"), [(1, "easy"), (2, "medium"), (3, "medium"), (4, "hard"), (None, "hard")]
)
def test_difficulty(distance: int | None, level: str) -> None:
    assert rate_difficulty(build_repair(distance)) == level


def test_patch_without_newline_at_the_end() -> None:
    assert write_patch("a.py", "x = 1", "x = 2").splitlines()[3:] == [
        "-x = 1",
        "\\ No newline at end of file",
        "+x = 2",
        "\\ No newline at end of file",
    ]


def test_split_by_package() -> None:
    names = [f"package-{n}" for n in range(8)]
    splits = split_packages(names, 0.25, seed=0)
    assert list(splits.values()).count("held-out") == 2
    assert splits == split_packages(names[::-1], 0.25, seed=0) != split_packages(names, 0.25, seed=1)
    assert split_packages(["only"], 0.9, seed=0) == {"only": "train"}
    with pytest.raises(ConfigError, match="held_out"):
        split_packages(names, 1.0, seed=0)


def test_excerpt_of_a_log() -> None:
    log = "=== FAILURES ===\n___ Case.test_a ___\nE   one\n___ test_b[x y] ___\nE   two\n=== short test summary info ===\n"
    assert find_excerpt(log, "tests/t.py::Case::test_a") == "E   one"
    assert find_excerpt(log, "tests/t.py::test_b[x y]") == "E   two"
    assert find_excerpt(log, "tests/t.py::test_c") == ""


def test_excerpt_has_no_control_characters(folder: Path) -> None:
    """A row with a NUL character in its instruction could not be loaded."""
    excerpt = find_excerpt("___ test_a ___\nE   \0one\x1b[31m\n\ttwo\n", "tests/t.py::test_a")
    assert excerpt == "E   ␀one␛[31m\n\ttwo"
    check_instruction(write_instruction(load_package(str(folder)), build_repair(excerpt=excerpt), "file"), "row")


@pytest.mark.parametrize(
    ("failing", "timed_out", "fate"),
    [
        (("a",), False, "kept"),
        ((), False, "not caught by tests"),
        (("a", "b", "c"), False, "breaks most tests"),
        (("a",), True, "hangs"),
    ],
)
def test_fate_of_a_bug(failing: tuple[str, ...], timed_out: bool, fate: str, folder: Path) -> None:
    tests = frozenset("abcde")
    baseline = Baseline(passing=tests, flaky=frozenset(), seconds=1.0)
    search = BugSearch(load_package(str(folder)), baseline, RepairSettings(), [])
    cases = {test: "failed" if test in failing else "passed" for test in tests}
    run = msgspec.convert({"cases": cases, "log": "", "exit_code": 1, "timed_out": timed_out, "seconds": 1.0}, TestRun)
    assert search.judge(build_repair().bug, run) == fate
    if fate == "kept":
        assert search.judge(build_repair().bug, run) == "duplicate"


def test_bug_in_a_function_with_enough_bugs_is_not_a_duplicate(folder: Path) -> None:
    baseline = Baseline(passing=frozenset("abcde"), flaky=frozenset(), seconds=1.0)
    search = BugSearch(load_package(str(folder)), baseline, RepairSettings(per_function=1), [])
    fates = []
    for failing in "aba":
        cases = {test: "failed" if test == failing else "passed" for test in "abcde"}
        run = {"cases": cases, "log": "", "exit_code": 1, "timed_out": False, "seconds": 1.0}
        fates.append(search.judge(build_repair().bug, msgspec.convert(run, TestRun)))
    assert fates == ["kept", "function has enough bugs", "duplicate"]


class DifferentFailures(Bench):
    """A bench in which the tests fail for every bug, each time a different one."""

    def __init__(self, failures: Iterator[str]) -> None:
        self._failures = failures

    async def run_tests(self, changed: Mapping[str, str], limit_s: float) -> TestRun:
        cases = dict.fromkeys("abcdef", "passed") | {next(self._failures): "failed"}
        run = {"cases": cases, "log": "", "exit_code": 1, "timed_out": False, "seconds": 1.0}
        return msgspec.convert(run, TestRun)

    async def measure_distance(self, *arguments: object) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("benches", [1, 2, 4])
async def test_number_of_benches_does_not_affect_the_result(benches: int, folder: Path) -> None:
    failures = iter("abcdef")
    baseline = Baseline(passing=frozenset("abcdef"), flaky=frozenset(), seconds=1.0)
    settings = RepairSettings(per_package=3, benches=benches)
    package = load_package(str(folder))
    search = BugSearch(package, baseline, settings, [DifferentFailures(failures) for _ in range(benches)])
    bugs = list_bugs(package, seed=0)
    while len(search.repairs) < settings.per_package:
        await search.try_bugs([bugs.pop(0) for _ in range(benches)])
    assert [repair.failing for repair in search.repairs] == [("a",), ("b",), ("c",)]
    assert search.fates == {"kept": 3}


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.process
@pytest.mark.full
def test_repairs_are_made_and_proven(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks"
    command = ["tasks", "make", "repairs", str(folder), "--out", str(out), "--per-package", "2", "--seed", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 2
    for row in rows:
        about = row["metadata"]
        assert (
            about["license"] == "MIT"
            and about["split"] == "train"
            and about["failing"] == len(row["grader"]["fail_to_pass"])
        )
        assert about["distance"] in (1, 2) and row["files"]["limits/core.py"] != MODULE
        assert row["grader"]["pass_to_pass"] and set(row["files"]) == set(FILES) - {"docs/index.md"}
    [package] = json.loads((out / "packages.json").read_text())
    assert package["tasks"] == 2 and package["bugs"]["kept"] == 2
    checked = CliRunner().invoke(app, ["tasks", "check", str(out / "train.jsonl"), "--json"])
    assert checked.exit_code == 0, checked.output
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "is not empty" in again.output


@pytest.mark.process
@pytest.mark.full
def test_package_that_pytest_itself_imports_is_rejected(tmp_path: Path) -> None:
    """In a grader's test run, the witness has already imported pytest, so the tests would pass without a fix."""
    files = {
        "pyproject.toml": '[project]\nname = "textwrap"\nversion = "1.0"\n',
        "textwrap.py": inspect.getsource(textwrap),
        "tests/test_textwrap.py": "import textwrap\n\n\ndef test_indent():\n    assert textwrap.indent('a\\n\\n', '-') == '-a\\n\\n'\n\n\n"
        "def test_shorten():\n    assert textwrap.shorten('a b', 9) == 'a b'\n",
    }
    out = tmp_path / "tasks"
    command = ["tasks", "make", "repairs", str(write_files(tmp_path / "textwrap", files)), "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--per-package", "1"])
    assert done.exit_code == 1, done.output
    assert "the tests cannot import textwrap.py, because pytest itself imports" in done.output.replace("\n", " ")
    assert not (out / "train.jsonl").exists()


def test_output_must_be_a_folder(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = CliRunner().invoke(app, ["tasks", "make", "repairs", str(folder), "--out", str(file)])
    assert done.exit_code == 2 and "file is not a folder" in done.output.replace("\n", "")


def test_package_must_be_listed_once(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    command = ["tasks", "make", "repairs", str(folder), str(other), "--out", str(tmp_path / "x")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "1000"})
    assert done.exit_code == 2 and f"{folder} and {other} are both the package 'limits'" in done.output


def test_wrong_hint(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["tasks", "make", "repairs", str(folder), "--out", str(tmp_path / "x"), "--hint", "all"]
    )
    assert done.exit_code == 2 and "--hint must be one of tests, file, function" in done.output
