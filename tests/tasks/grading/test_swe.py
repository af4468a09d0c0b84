"""Tests of a repository decide: honest works of many kinds, patches of many kinds, and tasks that are wrong."""

from __future__ import annotations

import base64
import subprocess
import zlib
from pathlib import Path

import msgspec
import pytest

from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.tasks.grading.types import GradingEnvironment
from turngate.tasks.task import Swe, Task

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]


def swe(**fields: object) -> Swe:
    return msgspec.structs.replace(kit.SWE, **{"timeout_s": scaled(60), **fields})


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return kit.repository(tmp_path_factory.mktemp("shop"))


def judged(task: Task, **fields: object) -> Task:
    return msgspec.structs.replace(task, grader=swe(**fields))


async def test_an_untouched_repository_scores_0_and_says_which_tests_fail(
    shop: Task, walled: GradingEnvironment
) -> None:
    found = await kit.graded(shop, None, walled)
    assert (found.kind, found.reward, found.resolved) == ("graded", 0.0, False)
    assert {case: found.cases[case] for case in kit.PASS} == {kit.PASS[0]: "passed"}
    assert {found.cases[case] for case in kit.FAIL} == {"failed"}


async def test_part_of_it_is_part_of_a_fraction(shop: Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    half = {"shop/prices.py": "def total(prices):\n    return sum(prices) if len(prices) != 1 else 0\n"}
    found = await kit.graded(judged(shop, reward="fraction"), kit.worked(tmp_path / "w", half), walled)
    assert found.reward == pytest.approx(2 / 3) and found.resolved is False


async def test_what_an_agent_may_change_is_changed(shop: Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    """New modules, removed files, a dependency in pyproject.toml, a test of its own elsewhere."""
    project = kit.REPO["pyproject.toml"].replace('name = "shop"', 'name = "shop"\ndependencies = ["x"]')
    changes = {
        "shop/prices.py": "from shop.sums import total as total\n",
        "shop/sums.py": kit.FIX,
        "README.md": None,
        "pyproject.toml": project,
        "extra/test_mine.py": "def test_mine(): pass\n",
    }
    look = 'import pathlib; assert not pathlib.Path("README.md").exists(); assert "dependencies" in open("pyproject.toml").read()'
    found = await kit.graded(
        judged(shop, test_cmd=f"python3 -c '{look}' && {kit.PYTEST} extra"), kit.worked(tmp_path / "w", changes), walled
    )
    assert (found.reward, found.notes) == (1.0, ()), found.log


async def test_a_skipped_test_did_not_pass(shop: Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    patch = kit.TEST_PATCH.replace(
        "+def test_one():\n+    assert total([7]) == 7", "+def test_one():\n+    import pytest; pytest.skip('no')"
    )
    found = await kit.graded(
        judged(shop, test_patch=patch), kit.worked(tmp_path / "w", {"shop/prices.py": kit.FIX}), walled
    )
    assert (found.reward, found.cases[kit.FAIL[1]]) == (0.0, "skipped")


async def test_a_command_that_has_no_witness_is_judged_by_its_log(
    shop: Task, walled: GradingEnvironment, tmp_path: Path
) -> None:
    command = kit.PYTEST.replace("python3", 'PYTHONPATH="$HOME/deps" python3')
    found = await kit.graded(
        judged(shop, test_cmd=command), kit.worked(tmp_path / "w", {"shop/prices.py": kit.FIX}), walled
    )
    assert found.reward == 1.0
    assert found.notes == ("the witness cannot watch this task's tests, so the log alone decides",)


async def test_install_runs_after_the_work_is_laid_down(shop: Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    task = judged(shop, install="cp shop/template shop/prices.py")
    found = await kit.graded(task, kit.worked(tmp_path / "a", {"shop/template": kit.FIX}), walled)
    assert found.reward == 1.0, found.message  # the control cannot be installed, and was not needed
    found = await kit.graded(task, kit.worked(tmp_path / "b", {"shop/prices.py": kit.FIX}), walled)
    assert (found.kind, found.reward) == ("invalid task", None) and "install command failed" in found.message


def _binary(old: bytes, new: bytes) -> str:
    """A hunk of git's for a file that is no text."""

    def part(data: bytes) -> str:
        packed = zlib.compress(data)
        lines = [packed[n : n + 52] for n in range(0, len(packed), 52)]
        size = [chr(len(line) + (64 if len(line) <= 26 else 70)) for line in lines]
        return f"literal {len(data)}\n" + "".join(
            f"{count}{base64.b85encode(line, pad=True).decode()}\n" for count, line in zip(size, lines, strict=True)
        )

    return f"GIT binary patch\n{part(new)}\n{part(old)}\n"


def _hash(data: bytes) -> str:
    return (
        subprocess.run(["git", "hash-object", "--stdin"], input=data, capture_output=True, check=True)
        .stdout.decode()
        .strip()
    )


async def test_patches_with_binary_hunks_line_ends_and_no_git(walled: GradingEnvironment, tmp_path: Path) -> None:
    """The repository is a plain folder here: its base is what the task lays down."""
    blob = bytes(range(200))
    files = {**kit.REPO, "tests/crlf.txt": "one\r\ntwo\r\n"}
    task = kit.repository(tmp_path / "task", files=files)
    patch = (
        "diff --git a/tests/blob b/tests/blob\nnew file mode 100644\n"
        f"index {'0' * 40}..{_hash(blob)}\n{_binary(b'', blob)}"
        "diff --git a/tests/crlf.txt b/tests/crlf.txt\n--- a/tests/crlf.txt\n+++ b/tests/crlf.txt\n"
        "@@ -1,2 +1,2 @@\n one\r\n-two\r\n+three\r\n"
    )
    look = 'assert open("tests/blob", "rb").read() == bytes(range(200)); assert b"three\\r\\n" in open("tests/crlf.txt", "rb").read()'
    task = msgspec.structs.replace(
        judged(task, test_patch=kit.TEST_PATCH + patch, test_cmd=f"python3 -c '{look}' && {kit.PYTEST}"),
        setup='tar -xof .deps.tar -C "$HOME" && rm .deps.tar',
    )
    work = kit.worked(
        tmp_path / "w", {"shop/prices.py": kit.FIX, "tests/blob": "mine", "tests/crlf.txt": "mine"}, files
    )
    found = await kit.graded(task, work, walled)
    assert found.reward == 1.0, found.message + found.log


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"test_patch": kit.TEST_PATCH.replace("total([]) == 0", "nothing like it")}, "does not apply"),
        ({"test_patch": kit.TEST_PATCH.replace("b/tests/test_more", "b/../out")}, "not a path in a repository"),
        ({"test_cmd": "no-such-runner tests"}, "exit code 127"),
        ({"test_cmd": "kill -9 $PPID $$"}, "the test run was cut short"),
        ({"pass_to_pass": ("tests/test_prices.py::test_no_such",)}, "none of the PASS_TO_PASS tests passed"),
        ({"fail_to_pass": (), "pass_to_pass": ()}, "name at least one test"),
    ],
)
async def test_a_task_that_is_wrong_is_invalid_for_every_work(
    fields: dict[str, object], why: str, shop: Task, walled: GradingEnvironment, tmp_path: Path
) -> None:
    found = await kit.graded(judged(shop, **fields), None, walled)
    assert (found.kind, found.reward) == ("invalid task", None) and why in found.message
    if "pass_to_pass" not in fields:
        found = await kit.graded(
            judged(shop, **fields), kit.worked(tmp_path / "w", {"shop/prices.py": kit.FIX}), walled
        )
        assert (found.kind, found.reward) == ("invalid task", None) and why in found.message


async def test_a_repository_where_everything_fails_at_first(
    shop: Task, walled: GradingEnvironment, tmp_path: Path
) -> None:
    """Its tests cannot even be imported before the change: that is no fault of the task's."""
    patch = (
        "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,3 @@\n"
        "+from shop.sums import total\n+def test_sum():\n+    assert total([1, 2]) == 3\n"
    )
    fields = {
        "test_patch": patch,
        "fail_to_pass": ("tests/test_new.py::test_sum",),
        "pass_to_pass": (),
        "test_cmd": "python3 -m pytest -rA -p no:cacheprovider tests/test_new.py",
    }
    task = judged(shop, **fields)
    assert (await kit.graded(task, None, walled)).reward == 0.0
    found = await kit.graded(task, kit.worked(tmp_path / "w", {"shop/sums.py": kit.FIX}), walled)
    assert (found.reward, found.resolved) == (1.0, True), found.message
