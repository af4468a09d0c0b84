"""Prove tasks in real sandboxes: the examples on each backend, a SWE row with a real repository, and tasks that fail the proof."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.sandboxes.kit import MAKE, backends, need, processes
from tests.speed import scaled
from tests.tasks.test_swe import Repo, row
from turngate.cli.main import app
from turngate.sandboxes.local import LocalBackend
from turngate.tasks import Task, read_tasks
from turngate.tasks.grading import logs
from turngate.tasks.grading.types import GradingEnvironment
from turngate.tasks.loaders import swe
from turngate.tasks.proof import prove_task
from turngate.tasks.task import Script, Solution

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
IMAGE = {"docker": "turngate-base:bookworm"}


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    [
        *backends("bubblewrap"),
        *(pytest.param(*one.values, marks=[*one.marks, pytest.mark.repeat]) for one in backends("local", "docker")),
    ],
)
async def test_examples_are_proven(name: str, tmp_path: Path) -> None:
    need(name)
    environment = GradingEnvironment(
        backend=MAKE[name](tmp_path / "sandboxes"), image=IMAGE.get(name, ""), log=tmp_path / "grade.log"
    )
    tasks = list(read_tasks(str(EXAMPLES)))
    assert len(tasks) >= 4
    for pair in zip(tasks[::2], tasks[1::2], strict=True):  # two at a time
        for proof in await asyncio.gather(*(prove_task(task, environment) for task in pair)):
            assert (proof.verdict, proof.message) == ("proven", "")
            assert proof.solved and proof.untouched and (proof.solved.reward, proof.untouched.reward) == (1.0, 0.0)
    assert (tmp_path / "grade-solved.log").stat().st_size and (tmp_path / "grade-untouched.log").exists()
    assert not processes(str(tmp_path / "sandboxes")), "processes are left running"


def script_task(folder: Path, test: str, solve: str) -> Task:
    for name, text in {"tests/test.sh": test, "solution/solve.sh": solve}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    grader = Script(files=folder / "tests", decides="exit code", timeout_s=scaled(20))
    return Task(id=folder.name, instruction="Make `done`.", grader=grader, solution=Solution(files=folder / "solution"))


async def test_failed_proof_gives_reason(tmp_path: Path) -> None:
    environment = GradingEnvironment(backend=LocalBackend(tmp_path / "sandboxes"))
    exists = "[ -e done ]"
    good = script_task(tmp_path / "good", exists, "touch done")
    wrong = {
        "the untouched task scores 1, not 0": script_task(tmp_path / "lax", "true", "touch done"),
        "the reference solution scores 0, not 1": script_task(tmp_path / "hard", exists, "touch elsewhere"),
        "solve.sh failed (exit code 3): oh no": script_task(tmp_path / "fails", exists, "echo oh no >&2; exit 3"),
        "the untouched task was not graded (invalid task)": script_task(tmp_path / "dies", "kill -9 $$", "touch done"),
        "has no grader": msgspec.structs.replace(good, grader=None),
        "the reference patch could not be applied": msgspec.structs.replace(good, solution=Solution(patch=PATCH)),
        "the setup script failed with exit code 1": msgspec.structs.replace(good, setup="false"),
    }
    for message, task in wrong.items():
        proof = await prove_task(task, environment)
        assert proof.verdict == "not proven" and message in proof.message, (message, proof)
    assert (await prove_task(good, environment)).verdict == "proven"


PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -4,2 +4,6 @@
 def test_zero():
     assert add(0, 0) == 0
+
+
+def test_sum():
+    assert add(1, 2) == 3
"""


async def test_swe_row_with_real_repository(tmp_path: Path) -> None:
    repo = Repo(tmp_path / "repo")
    repo.git("init", "--quiet")
    repo.git("config", "user.name", "a")
    repo.git("config", "user.email", "a@b")
    (repo.path / "tests").mkdir()
    (repo.path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repo.path / "tests" / "test_calc.py").write_text(
        "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
    )
    base = repo.commit("base")
    (repo.path / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    repo.commit("the fix")
    row = {
        "instance_id": "org__calc-1",
        "repo": "org/calc",
        "base_commit": base,
        "problem_statement": "add subtracts.",
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": '["tests/test_calc.py::test_sum"]',
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero"],
        "install_config": {"test_cmd": f"{sys.executable} -m pytest -rA -p no:cacheprovider", "log_parser": "pytest"},
    }
    # Without an image, the repository is given as the task's files, and the local sandbox chooses the working folder.
    task = msgspec.structs.replace(swe.build_task(row, "row 1"), files=repo.path, image="", workdir="")
    proof = await prove_task(task, GradingEnvironment(backend=LocalBackend(tmp_path / "sandboxes")))
    assert (proof.verdict, proof.message) == ("proven", "")
    assert proof.solved and proof.solved.resolved is True and proof.untouched and proof.untouched.resolved is False
    assert proof.untouched.cases == {
        "tests/test_calc.py::test_sum": "failed",
        "tests/test_calc.py::test_zero": "passed",
    }


def test_check_command_exit_code_reflects_proofs(tmp_path: Path) -> None:
    for name, test in {"good": "[ -e done ]", "lax": "true"}.items():
        script_task(tmp_path / "all" / name, test, "touch done")
        (tmp_path / "all" / name / "instruction.md").write_text("Make `done`.")
        (tmp_path / "all" / name / "task.toml").write_text('[turngate]\ndecides = "exit code"\n')
    run = CliRunner().invoke
    done = run(app, ["tasks", "check", str(tmp_path / "all"), "--json"])
    assert done.exit_code == 1
    found = {line["id"]: line for line in json.loads(done.stdout)}
    assert (found["good"]["verdict"], found["good"]["solved"], found["good"]["untouched"]) == ("proven", 1.0, 0.0)
    assert found["lax"]["verdict"] == "not proven" and "the untouched task scores 1" in found["lax"]["message"]
    done = run(app, ["tasks", "check", str(tmp_path / "all"), "--only", "good"])
    assert done.exit_code == 0 and "Tasks that passed: 1 of 1 (1 proven)." in done.output


def test_task_with_unknown_log_parser_is_not_tried(tmp_path: Path) -> None:
    swe_row = row(install_config={"test_cmd": "pytest", "log_parser": "nose"}, image_name="")
    (tmp_path / "t.jsonl").write_text(json.dumps(swe_row))
    done = CliRunner().invoke(app, ["tasks", "check", str(tmp_path / "t.jsonl"), "--json"])
    [line] = json.loads(done.stdout)
    assert (done.exit_code, line["verdict"], line["seconds"]) == (1, "wrong", 0.0), line
    assert line["message"].startswith("unknown log parser 'nose'; use one of: pytest, ")


def test_task_with_log_parser_that_cannot_be_looked_up_is_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swebench.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logs, "FOREIGN_TIMEOUT_S", 0.001)
    logs._list_swebench_parsers.cache_clear()
    swe_row = row(install_config={"test_cmd": "pytest", "log_parser": "parse_log_of_slow_import"}, image_name="")
    (tmp_path / "t.jsonl").write_text(json.dumps(swe_row))
    done = CliRunner().invoke(app, ["tasks", "check", str(tmp_path / "t.jsonl"), "--json"])
    [line] = json.loads(done.stdout)
    assert (done.exit_code, line["verdict"], line["seconds"]) == (1, "infrastructure fault", 0.0), line
    assert line["message"].startswith("log_parser: importing swebench took longer than 0.001 s; try again")


async def test_grader_is_tried_without_solution(tmp_path: Path) -> None:
    environment = GradingEnvironment(backend=LocalBackend(tmp_path / "sandboxes"))
    good = msgspec.structs.replace(script_task(tmp_path / "good", "[ -e done ]", "true"), solution=None)
    lax = msgspec.structs.replace(script_task(tmp_path / "lax", "true", "true"), solution=None)
    dies = msgspec.structs.replace(script_task(tmp_path / "dies", "kill -9 $$", "true"), solution=None)
    proofs = [await prove_task(task, environment) for task in (good, lax, dies)]
    assert [proof.verdict for proof in proofs] == ["valid", "not proven", "not proven"]
    assert proofs[0].message.startswith("the untouched task scores 0; the task has no solution")
