"""Why a grader gave no reward: the work broke it, the task is invalid, or the infrastructure failed."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.redteam import attacks
from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.errors import SandboxError, TaskError
from turngate.sandboxes import archive
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.supervised_sandbox import SupervisedSandbox
from turngate.tasks.grading import rubric
from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.types import Grade, GradingEnvironment
from turngate.tasks.task import Function, Part, Rubric

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]

REWARD = 'echo "$reward" > "$TURNGATE_LOGS/verifier/reward.txt"\n'


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", "wrote neither reward.txt"),
        ("kill -9 $$", "killed by signal 9 (exit code 137)"),
        ("exit 255", "gave no reward (exit code 255)"),  # there is no signal 127
        ("sleep 60", "took longer than its limit of 2 s"),
        ("reward=much\n" + REWARD, "reward.txt must contain a finite number"),
        ("mkdir $TURNGATE_LOGS/verifier/reward.txt", "it must be a regular, writable file"),
    ],
)
async def test_grader_without_decision_is_invalid_task(
    script: str, why: str, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    timeout_s = 2.0 if "took longer" in why else scaled(30)
    task = kit.script_task(tmp_path / "task", {"test.sh": script}, timeout_s=timeout_s)
    for work in (None, kit.make_work(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)):
        result = await kit.grade_and_check(task, work, isolated)
        assert (result.kind, result.reward) == ("invalid task", None)
        assert why in result.message


async def test_work_that_breaks_grader_scores_zero(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """The control runs once for all works of a task."""
    script = 'echo "run" >> /tmp/runs; if grep -q hang prices.py; then sleep 3600; fi; reward=0.5\n' + REWARD
    task = kit.script_task(tmp_path / "task", {"test.sh": script}, timeout_s=scaled(1))
    created: list[str] = []

    class Counting(BubblewrapBackend):
        async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
            created.append("one")
            return await super().create(spec)

    environment = GradingEnvironment(backend=Counting(isolated.backend.root))  # type: ignore[attr-defined]
    works = [kit.make_work(tmp_path / f"w{n}", {"prices.py": f"# hang {n}\n"}, kit.FOLDER) for n in range(3)]
    for result in await asyncio.gather(*(grade(task, work, environment) for work in works)):
        assert (result.kind, result.reward) == ("graded", 0.0)
        assert "took longer than its" in result.message and "so the work broke the grader" in result.message
    assert len(created) == 3 + 1
    assert (await kit.grade_and_check(task, kit.make_work(tmp_path / "w", {}, kit.FOLDER), environment)).reward == 0.5


SPOILED_PROBE_OUTPUT = {
    "closes what the probe left": "import atexit, os\natexit.register(os.chmod, os.environ['TURNGATE_LOGS'] + '/probe', 0)\n",
    "closes the logs": "import atexit, os\natexit.register(os.chmod, os.environ['TURNGATE_LOGS'], 0)\n",
    "leaves folders without end": "import os\nhere = os.getcwd()\nos.chdir(os.environ['TURNGATE_LOGS'] + '/probe')\n"
    "for _ in range(1400):\n    os.mkdir('a'); os.chdir('a')\nos.chdir(here)\n",
    "leaves a pipe instead of a folder": "import os, shutil\nplace = os.environ['TURNGATE_LOGS'] + '/probe'\n"
    "shutil.rmtree(place); os.mkfifo(place)\n",
}


@pytest.mark.parametrize("how", SPOILED_PROBE_OUTPUT)
async def test_work_that_spoils_probe_output_scores_zero(
    how: str, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    work = kit.make_work(tmp_path / "work", {"prices.py": SPOILED_PROBE_OUTPUT[how] + kit.BUG}, kit.FOLDER)
    result = await kit.grade_and_check(kit.probe_task(tmp_path / "task"), work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0), result.message


class Unreadable(BubblewrapBackend):
    """Downloads from the first sandboxes fail."""

    left = 0

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        sandbox = await super().create(spec)
        if self.left:
            self.left -= 1

            async def refuse(*_: object, **__: object) -> tuple[str, ...]:
                raise SandboxError("tar: not found")

            sandbox.download = refuse  # type: ignore[method-assign]
        return sandbox


async def test_unreadable_output_is_retried_before_work_is_blamed(isolated: GradingEnvironment, tmp_path: Path) -> None:
    backend = Unreadable(isolated.backend.root)  # type: ignore[attr-defined]
    environment = msgspec.structs.replace(isolated, backend=backend)
    task = kit.probe_task(tmp_path / "task")
    work = kit.make_work(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    backend.left = 1
    assert (await kit.grade_and_check(task, work, environment)).reward == 1.0
    backend.left = 2
    result = await kit.grade_and_check(task, work, environment)
    assert (result.kind, result.reward) == ("graded", 0.0)
    assert "tar: not found" in result.message and "twice" in result.message
    backend.left = 1
    result = await kit.grade_and_check(task, None, environment)
    assert (result.kind, result.reward) == ("infrastructure fault", None)


async def test_unexpected_error_blames_work_only_if_control_passes(
    isolated: GradingEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder with 1400 levels once failed to pack in this way."""
    task = kit.script_task(tmp_path / "task")
    work = kit.make_work(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    pack = archive.pack

    def break_on_work(folder: Path, *rest: object) -> None:
        if folder == work.folder:
            raise RecursionError("too deep")
        pack(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(archive, "pack", break_on_work)
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0) and "RecursionError: too deep" in result.message
    assert f"task {task.id}: unexpected error while grading" in caplog.messages
    monkeypatch.setattr(archive, "pack", lambda *_: [].index(1))  # it also fails for the control
    result = await kit.grade_and_check(msgspec.structs.replace(task, id="other"), work, isolated)
    assert (result.kind, result.reward) == ("infrastructure fault", None)
    assert caplog.messages.count("task other: unexpected error while grading") == 2  # the work's and the control's


async def test_control_runs_again_after_task_is_fixed(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.script_task(tmp_path / "task", {"test.sh": "exit 3"}, decides="exit code")
    work = kit.make_work(tmp_path / "work", {"prices.py": "# hang\n"}, kit.FOLDER)
    assert (await kit.grade_and_check(task, work, isolated)).kind == "invalid task"
    kit.write_files(tmp_path / "task" / "tests", {"test.sh": "grep -q hang prices.py && exit 3; exit 1"})
    result = await kit.grade_and_check(task, work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0), result.message


@pytest.mark.parametrize(("weights", "reward"), [((1e308, 1e308), 1.0), ((1e200, 1e200), 1e200), ((1.0, math.nan), 1)])
async def test_rubric_rejects_non_finite_reward(weights: tuple[float, ...], reward: float) -> None:
    part = Function(name="a:b")
    parts = tuple(Part(name=str(number), weight=weight, grader=part) for number, weight in enumerate(weights))

    async def grade_part(_: Part) -> Grade:
        return Grade(kind="graded", reward=reward)

    with pytest.raises(TaskError):
        await rubric.grade_rubric(Rubric(parts=parts), grade_part)


@pytest.mark.parametrize(
    ("code", "kind", "reward"), [(0, "graded", 1.0), (1, "graded", 0.0), (2, "invalid task", None)]
)
async def test_exit_code_decides_reward(
    code: int, kind: str, reward: float | None, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    task = kit.script_task(tmp_path / "task", {"test.sh": f"exit {code}"}, decides="exit code")
    result = await kit.grade_and_check(task, None, isolated)
    assert (result.kind, result.reward) == (kind, reward)


class Failing(BubblewrapBackend):
    """Sandboxes fail to start once `left` is used up."""

    left = 0

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        if self.left == 0:
            raise SandboxError("no room for another one")
        self.left -= 1
        return await super().create(spec)


async def test_sandbox_failure_is_infrastructure_fault(isolated: GradingEnvironment, tmp_path: Path) -> None:
    backend = Failing(isolated.backend.root)  # type: ignore[attr-defined]
    environment = msgspec.structs.replace(isolated, backend=backend)
    task = kit.script_task(tmp_path / "task", timeout_s=scaled(1))
    work = kit.make_work(tmp_path / "work", {"prices.py": attacks.SCRIPT["never ends"]}, kit.FOLDER)
    result = await kit.grade_and_check(task, work, environment)
    assert (result.kind, result.reward, result.message) == ("infrastructure fault", None, "no room for another one")
    backend.left = 1  # now the sandbox of the control fails
    result = await kit.grade_and_check(task, work, environment)
    assert (result.kind, result.reward) == ("infrastructure fault", None)
    backend.left = 9  # the fault was not cached
    result = await kit.grade_and_check(task, work, environment)
    assert (result.kind, result.reward) == ("graded", 0.0)


async def test_cancelled_grading_leaves_no_sandbox(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.script_task(tmp_path / "task", {"test.sh": "sleep 60"})
    for after_s in (0.05, 0.4, 1.0):
        running = asyncio.create_task(grade(task, kit.make_work(tmp_path / f"w{after_s}", {}, kit.FOLDER), isolated))
        await asyncio.sleep(after_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not list(isolated.backend.root.iterdir())  # type: ignore[attr-defined]


async def test_broken_task_is_invalid_with_reason(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.script_task(tmp_path / "task")
    assert (
        "has no grader"
        in (await kit.grade_and_check(msgspec.structs.replace(task, grader=None), None, isolated)).message
    )
    broken = msgspec.structs.replace(task, setup="echo no such thing >&2; exit 3")
    result = await kit.grade_and_check(broken, None, isolated)
    assert (result.kind, result.reward) == ("invalid task", None) and "no such thing" in result.message
    shutil.rmtree(tmp_path / "task" / "tests")
    result = await kit.grade_and_check(task, None, isolated)
    assert result.kind == "invalid task" and "does not exist" in result.message


async def test_agents_git_history_is_graded_if_task_keeps_git(isolated: GradingEnvironment, tmp_path: Path) -> None:
    script = "reward=$(git -C . rev-list --count HEAD)\n" + REWARD
    task = kit.script_task(tmp_path / "task", {"test.sh": script}, git=True)
    task = msgspec.structs.replace(
        task, setup="git init -q . && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m 1"
    )
    assert (await kit.grade_and_check(task, None, isolated)).reward == 1.0
    (tmp_path / "work").mkdir()
    process = await asyncio.create_subprocess_shell(
        "git init -q . && for i in 1 2 3; do git -c user.name=t -c user.email=t@t commit -q --allow-empty -m $i; done",
        cwd=tmp_path / "work",
    )
    await process.wait()
    assert (await kit.grade_and_check(task, kit.Work(folder=tmp_path / "work"), isolated)).reward == 3.0
