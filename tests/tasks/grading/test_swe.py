"""Grading by the tests of a repository: honest works, patches of many kinds, and invalid tasks."""

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
from turngate.tasks.task import Part, Rubric, Script, Swe, Task

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]


def swe(**fields: object) -> Swe:
    return msgspec.structs.replace(kit.SWE, **{"timeout_s": scaled(60), **fields})


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return kit.repository_task(tmp_path_factory.mktemp("shop"))


def with_grader(task: Task, **fields: object) -> Task:
    return msgspec.structs.replace(task, grader=swe(**fields))


async def test_untouched_repository_scores_zero_and_lists_failures(shop: Task, isolated: GradingEnvironment) -> None:
    result = await kit.grade_and_check(shop, None, isolated)
    assert (result.kind, result.reward, result.resolved) == ("graded", 0.0, False)
    assert {case: result.cases[case] for case in kit.PASS} == {kit.PASS[0]: "passed"}
    assert {result.cases[case] for case in kit.FAIL} == {"failed"}


async def test_fraction_reward_counts_passing_tests(shop: Task, isolated: GradingEnvironment, tmp_path: Path) -> None:
    half = {"shop/prices.py": "def total(prices):\n    return sum(prices) if len(prices) != 1 else 0\n"}
    result = await kit.grade_and_check(
        with_grader(shop, reward="fraction"), kit.make_work(tmp_path / "w", half), isolated
    )
    assert result.reward == pytest.approx(2 / 3) and result.resolved is False


async def test_allowed_changes_are_kept(shop: Task, isolated: GradingEnvironment, tmp_path: Path) -> None:
    """Keep new modules, removed files, a dependency in pyproject.toml, and a new test elsewhere."""
    project = kit.REPO["pyproject.toml"].replace('name = "shop"', 'name = "shop"\ndependencies = ["x"]')
    changes = {
        "shop/prices.py": "from shop.sums import total as total\n",
        "shop/sums.py": kit.FIX,
        "README.md": None,
        "pyproject.toml": project,
        "extra/test_mine.py": "def test_mine(): pass\n",
    }
    look = 'import pathlib; assert not pathlib.Path("README.md").exists(); assert "dependencies" in open("pyproject.toml").read()'
    result = await kit.grade_and_check(
        with_grader(shop, test_cmd=f"python3 -c '{look}' && {kit.PYTEST} extra"),
        kit.make_work(tmp_path / "w", changes),
        isolated,
    )
    assert (result.reward, result.notes) == (1.0, ()), result.log


async def test_skipped_test_does_not_count_as_passed(shop: Task, isolated: GradingEnvironment, tmp_path: Path) -> None:
    patch = kit.TEST_PATCH.replace(
        "+def test_one():\n+    assert total([7]) == 7", "+def test_one():\n+    import pytest; pytest.skip('no')"
    )
    result = await kit.grade_and_check(
        with_grader(shop, test_patch=patch), kit.make_work(tmp_path / "w", {"shop/prices.py": kit.FIX}), isolated
    )
    assert (result.reward, result.cases[kit.FAIL[1]]) == (0.0, "skipped")


async def test_command_without_witness_is_graded_by_log(
    shop: Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    command = kit.PYTEST.replace("python3", 'PYTHONPATH="$HOME/deps" python3')
    result = await kit.grade_and_check(
        with_grader(shop, test_cmd=command), kit.make_work(tmp_path / "w", {"shop/prices.py": kit.FIX}), isolated
    )
    assert result.reward == 1.0
    assert result.notes == ("the witness cannot watch this task's tests, so the log alone decides",)


async def test_tests_in_the_files_of_a_task_are_kept(shop: Task, isolated: GradingEnvironment, tmp_path: Path) -> None:
    """Without a test patch, the tests that the cases name and the folder around them stay as the task defines them."""
    command = "python3 -m pytest -rA -p no:cacheprovider tests/test_prices.py"
    task = with_grader(shop, base_commit="", test_patch="", fail_to_pass=kit.PASS, pass_to_pass=(), test_cmd=command)
    broken = {
        "shop/prices.py": "def total(prices):\n    return 1\n",
        "tests/test_prices.py": "def test_nothing(): pass\n",
        "tests/helper.py": "",
    }
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "w", broken), isolated)
    assert (result.reward, result.cases[kit.PASS[0]]) == (0.0, "failed")
    assert {note.partition(":")[0] for note in result.notes} == {"tests/test_prices.py", "tests/helper.py"}


async def test_install_runs_after_work_is_in_place(shop: Task, isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = with_grader(shop, install="cp shop/template shop/prices.py")
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "a", {"shop/template": kit.FIX}), isolated)
    assert result.reward == 1.0, result.message  # the control's install would fail, but no control was needed
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "b", {"shop/prices.py": kit.FIX}), isolated)
    assert (result.kind, result.reward) == (
        "invalid task",
        None,
    ) and "install command failed with exit code" in result.message


async def test_only_graders_that_need_it_get_the_agents_git_folder(
    shop: Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    """The work of a rubric includes the agent's `.git` if one part needs it. The other parts keep the task's own."""
    count = 'git rev-list --count HEAD > "$TURNGATE_LOGS/verifier/reward.txt"'
    files = kit.write_files(tmp_path / "tests", {"test.sh": count})
    script = Script(files=files, timeout_s=scaled(60))
    parts = (
        Part(name="history", weight=1, grader=msgspec.structs.replace(script, git=True)),
        Part(name="base", weight=1, grader=script),
        Part(name="tests", weight=1, grader=swe(install='test "$(git log --format=%s)" = base')),
    )
    work = kit.make_work(tmp_path / "w", {"shop/prices.py": kit.FIX})
    make_commits = (
        "git init -q . && for i in 1 2 3; do git -c user.name=t -c user.email=t@t commit -q --allow-empty -m $i; done"
    )
    subprocess.run(["/bin/sh", "-c", make_commits], cwd=work.folder, check=True)
    result = await kit.grade_and_check(msgspec.structs.replace(shop, grader=Rubric(parts=parts)), work, isolated)
    assert {part.name: part.reward for part in result.parts} == {"history": 3.0, "base": 1.0, "tests": 1.0}, (
        result.message
    )
    assert result.notes == ()


def _binary(old: bytes, new: bytes) -> str:
    """Format a hunk for a binary file as git does."""

    def literal(data: bytes) -> str:
        packed = zlib.compress(data)
        lines = [packed[n : n + 52] for n in range(0, len(packed), 52)]
        size = [chr(len(line) + (64 if len(line) <= 26 else 70)) for line in lines]
        return f"literal {len(data)}\n" + "".join(
            f"{count}{base64.b85encode(line, pad=True).decode()}\n" for count, line in zip(size, lines, strict=True)
        )

    return f"GIT binary patch\n{literal(new)}\n{literal(old)}\n"


def _hash(data: bytes) -> str:
    return (
        subprocess.run(["git", "hash-object", "--stdin"], input=data, capture_output=True, check=True)
        .stdout.decode()
        .strip()
    )


async def test_patch_with_binary_hunks_and_crlf_without_git(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """The repository is a plain folder without git: its base is the task's files."""
    blob = bytes(range(200))
    files = {**kit.REPO, "tests/crlf.txt": "one\r\ntwo\r\n"}
    task = kit.repository_task(tmp_path / "task", files=files)
    patch = (
        "diff --git a/tests/blob b/tests/blob\nnew file mode 100644\n"
        f"index {'0' * 40}..{_hash(blob)}\n{_binary(b'', blob)}"
        "diff --git a/tests/crlf.txt b/tests/crlf.txt\n--- a/tests/crlf.txt\n+++ b/tests/crlf.txt\n"
        "@@ -1,2 +1,2 @@\n one\r\n-two\r\n+three\r\n"
    )
    look = 'assert open("tests/blob", "rb").read() == bytes(range(200)); assert b"three\\r\\n" in open("tests/crlf.txt", "rb").read()'
    task = msgspec.structs.replace(
        with_grader(task, test_patch=kit.TEST_PATCH + patch, test_cmd=f"python3 -c '{look}' && {kit.PYTEST}"),
        setup='tar -xof .deps.tar -C "$HOME" && rm .deps.tar',
    )
    work = kit.make_work(
        tmp_path / "w", {"shop/prices.py": kit.FIX, "tests/blob": "mine", "tests/crlf.txt": "mine"}, files
    )
    result = await kit.grade_and_check(task, work, isolated)
    assert result.reward == 1.0, result.message + result.log


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"test_patch": kit.TEST_PATCH.replace("total([]) == 0", "nothing like it")}, "does not apply"),
        (
            {"test_patch": kit.TEST_PATCH.replace("b/tests/test_more", "b/../out")},
            "not a valid path inside the repository",
        ),
        ({"test_cmd": "no-such-runner tests"}, "exit code 127"),
        ({"test_cmd": "kill -9 $PPID $$"}, "the test run was cut short"),
        ({"pass_to_pass": ("tests/test_prices.py::test_no_such",)}, "none of the PASS_TO_PASS tests passed"),
        ({"fail_to_pass": (), "pass_to_pass": ()}, "name at least one test"),
    ],
)
async def test_wrong_task_is_invalid_for_every_work(
    fields: dict[str, object], why: str, shop: Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    result = await kit.grade_and_check(with_grader(shop, **fields), None, isolated)
    assert (result.kind, result.reward) == ("invalid task", None) and why in result.message
    if "pass_to_pass" not in fields:
        result = await kit.grade_and_check(
            with_grader(shop, **fields), kit.make_work(tmp_path / "w", {"shop/prices.py": kit.FIX}), isolated
        )
        assert (result.kind, result.reward) == ("invalid task", None) and why in result.message


async def test_tests_that_cannot_be_imported_before_fix(
    shop: Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    """The tests cannot be imported before the change, which is valid."""
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
    task = with_grader(shop, **fields)
    assert (await kit.grade_and_check(task, None, isolated)).reward == 0.0
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "w", {"shop/sums.py": kit.FIX}), isolated)
    assert (result.reward, result.resolved) == (1.0, True), result.message


async def test_tests_of_a_module_that_pytest_itself_imports_are_invalid(
    isolated: GradingEnvironment, tmp_path: Path
) -> None:
    """The tests would pass on Python's own `textwrap`, whatever the work is. A module that the work adds changes nothing."""
    test = "from textwrap import dedent\n\n\ndef test_dedent():\n    assert dedent(' a') == 'a'\n"
    files = {"textwrap.py": "def dedent(text):\n    return text\n", "tests/test_dedent.py": test}
    grader = swe(
        test_patch="",
        fail_to_pass=("tests/test_dedent.py::test_dedent",),
        pass_to_pass=(),
        test_cmd="python3 -m pytest -rA -p no:cacheprovider tests",
    )
    task = kit.repository_task(tmp_path / "bad", grader, files)
    for work in (None, kit.make_work(tmp_path / "w", {"textwrap.py": None}, files)):
        result = await kit.grade_and_check(task, work, isolated)
        assert (result.kind, result.reward) == ("invalid task", None)
        assert "the tests cannot import textwrap.py" in result.message
    good = kit.repository_task(
        tmp_path / "good", grader, {name: files[name] for name in files if name != "textwrap.py"}
    )
    result = await kit.grade_and_check(good, kit.make_work(tmp_path / "v", files, {}), isolated)
    assert (result.kind, result.reward) == ("graded", 1.0), result.message
