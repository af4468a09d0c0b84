"""Whose fault it is that a grader gave no reward: the work's, the task's, or that of neither."""

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
from turngate.sandboxes.supervised import SupervisedSandbox
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
        ("kill -9 $$", "killed by signal 9"),
        ("sleep 60", "took longer than its limit of 2 s"),
        ("reward=much\n" + REWARD, "is not a number"),
        ("mkdir $TURNGATE_LOGS/verifier/reward.txt", "not a regular file"),
    ],
)
async def test_a_grader_that_never_decides_is_an_invalid_task(
    script: str, why: str, walled: GradingEnvironment, tmp_path: Path
) -> None:
    timeout_s = 2.0 if "took longer" in why else scaled(30)
    task = kit.scripted(tmp_path / "task", {"test.sh": script}, timeout_s=timeout_s)
    for work in (None, kit.worked(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)):
        found = await kit.graded(task, work, walled)
        assert (found.kind, found.reward) == ("invalid task", None)
        assert why in found.message


async def test_a_grader_that_only_this_work_breaks_says_0_and_how(walled: GradingEnvironment, tmp_path: Path) -> None:
    """The control is run once for all works of a task."""
    script = 'echo "run" >> /tmp/runs; if grep -q hang prices.py; then sleep 3600; fi; reward=0.5\n' + REWARD
    task = kit.scripted(tmp_path / "task", {"test.sh": script}, timeout_s=scaled(1))
    made: list[str] = []

    class Counting(BubblewrapBackend):
        async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
            made.append("one")
            return await super().create(spec)

    ground = GradingEnvironment(backend=Counting(walled.backend.root))  # type: ignore[attr-defined]
    works = [kit.worked(tmp_path / f"w{n}", {"prices.py": f"# hang {n}\n"}, kit.FOLDER) for n in range(3)]
    for found in await asyncio.gather(*(grade(task, work, ground) for work in works)):
        assert (found.kind, found.reward) == ("graded", 0.0)
        assert "took longer than its" in found.message and "so the work broke it" in found.message
    assert len(made) == 3 + 1
    assert (await kit.graded(task, kit.worked(tmp_path / "w", {}, kit.FOLDER), ground)).reward == 0.5


SPOILS = {
    "closes what the probe left": "import atexit, os\natexit.register(os.chmod, os.environ['TURNGATE_LOGS'] + '/probe', 0)\n",
    "closes the logs": "import atexit, os\natexit.register(os.chmod, os.environ['TURNGATE_LOGS'], 0)\n",
    "leaves folders without end": "import os\nhere = os.getcwd()\nos.chdir(os.environ['TURNGATE_LOGS'] + '/probe')\n"
    "for _ in range(1400):\n    os.mkdir('a'); os.chdir('a')\nos.chdir(here)\n",
    "leaves a pipe instead of a folder": "import os, shutil\nplace = os.environ['TURNGATE_LOGS'] + '/probe'\n"
    "shutil.rmtree(place); os.mkfifo(place)\n",
}


@pytest.mark.parametrize("how", SPOILS)
async def test_what_a_work_does_to_the_probe_s_output_is_its_own_doing(
    how: str, walled: GradingEnvironment, tmp_path: Path
) -> None:
    work = kit.worked(tmp_path / "work", {"prices.py": SPOILS[how] + kit.BUG}, kit.FOLDER)
    found = await kit.graded(kit.probed(tmp_path / "task"), work, walled)
    assert (found.kind, found.reward) == ("graded", 0.0), found.message


class Unreadable(BubblewrapBackend):
    """Nothing comes out of the first sandboxes."""

    left = 0

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        sandbox = await super().create(spec)
        if self.left:
            self.left -= 1

            async def refused(*_: object, **__: object) -> tuple[str, ...]:
                raise SandboxError("tar: not found")

            sandbox.download = refused  # type: ignore[method-assign]
        return sandbox


async def test_what_cannot_be_read_is_tried_twice_before_the_work_is_blamed(
    walled: GradingEnvironment, tmp_path: Path
) -> None:
    backend = Unreadable(walled.backend.root)  # type: ignore[attr-defined]
    ground = msgspec.structs.replace(walled, backend=backend)
    task = kit.probed(tmp_path / "task")
    work = kit.worked(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    backend.left = 1
    assert (await kit.graded(task, work, ground)).reward == 1.0
    backend.left = 2
    found = await kit.graded(task, work, ground)
    assert (found.kind, found.reward) == ("graded", 0.0)
    assert "tar: not found" in found.message and "twice" in found.message
    backend.left = 1
    found = await kit.graded(task, None, ground)
    assert (found.kind, found.reward) == ("infrastructure fault", None)


async def test_what_nobody_thought_of_is_asked_of_the_control_too(
    walled: GradingEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder 1400 deep once was, that nothing could pack."""
    task = kit.scripted(tmp_path / "task")
    work = kit.worked(tmp_path / "work", {"prices.py": kit.FIX}, kit.FOLDER)
    packed = archive.pack

    def breaks(folder: Path, *rest: object) -> None:
        if folder == work.folder:
            raise RecursionError("too deep")
        packed(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(archive, "pack", breaks)
    found = await kit.graded(task, work, walled)
    assert (found.kind, found.reward) == ("graded", 0.0) and "RecursionError: too deep" in found.message
    monkeypatch.setattr(archive, "pack", lambda *_: [].index(1))  # it fails for everybody: nobody's fault
    found = await kit.graded(msgspec.structs.replace(task, id="other"), work, walled)
    assert (found.kind, found.reward) == ("infrastructure fault", None)


async def test_a_task_that_was_mended_is_asked_again(walled: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.scripted(tmp_path / "task", {"test.sh": "exit 3"}, decides="exit code")
    work = kit.worked(tmp_path / "work", {"prices.py": "# hang\n"}, kit.FOLDER)
    assert (await kit.graded(task, work, walled)).kind == "invalid task"
    kit.laid(tmp_path / "task" / "tests", {"test.sh": "grep -q hang prices.py && exit 3; exit 1"})
    found = await kit.graded(task, work, walled)
    assert (found.kind, found.reward) == ("graded", 0.0), found.message


@pytest.mark.parametrize(("weights", "reward"), [((1e308, 1e308), 1.0), ((1e200, 1e200), 1e200), ((1.0, math.nan), 1)])
async def test_a_rubric_s_reward_is_a_finite_number_or_none(weights: tuple[float, ...], reward: float) -> None:
    part = Function(name="a:b")
    parts = tuple(Part(name=str(number), weight=weight, grader=part) for number, weight in enumerate(weights))

    async def one(_: Part) -> Grade:
        return Grade(kind="graded", reward=reward)

    with pytest.raises(TaskError):
        await rubric.grade_rubric(Rubric(parts=parts), one)


@pytest.mark.parametrize(
    ("code", "kind", "reward"), [(0, "graded", 1.0), (1, "graded", 0.0), (2, "invalid task", None)]
)
async def test_an_exit_code_may_decide(
    code: int, kind: str, reward: float | None, walled: GradingEnvironment, tmp_path: Path
) -> None:
    task = kit.scripted(tmp_path / "task", {"test.sh": f"exit {code}"}, decides="exit code")
    found = await kit.graded(task, None, walled)
    assert (found.kind, found.reward) == (kind, reward)


class Failing(BubblewrapBackend):
    """The n-th sandbox cannot be made."""

    left = 0

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        if self.left == 0:
            raise SandboxError("no room for another one")
        self.left -= 1
        return await super().create(spec)


async def test_a_sandbox_that_fails_is_nobody_s_fault_and_never_0(walled: GradingEnvironment, tmp_path: Path) -> None:
    backend = Failing(walled.backend.root)  # type: ignore[attr-defined]
    ground = msgspec.structs.replace(walled, backend=backend)
    task = kit.scripted(tmp_path / "task", timeout_s=scaled(1))
    work = kit.worked(tmp_path / "work", {"prices.py": attacks.SCRIPT["never ends"]}, kit.FOLDER)
    found = await kit.graded(task, work, ground)
    assert (found.kind, found.reward, found.message) == ("infrastructure fault", None, "no room for another one")
    backend.left = 1  # now the control's cannot be made
    found = await kit.graded(task, work, ground)
    assert (found.kind, found.reward) == ("infrastructure fault", None)
    backend.left = 9  # which was not remembered
    found = await kit.graded(task, work, ground)
    assert (found.kind, found.reward) == ("graded", 0.0)


async def test_being_cancelled_leaves_nothing(walled: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.scripted(tmp_path / "task", {"test.sh": "sleep 60"})
    for after_s in (0.05, 0.4, 1.0):
        running = asyncio.create_task(grade(task, kit.worked(tmp_path / f"w{after_s}", {}, kit.FOLDER), walled))
        await asyncio.sleep(after_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not list(walled.backend.root.iterdir())  # type: ignore[attr-defined]


async def test_what_is_wrong_with_a_task_is_said(walled: GradingEnvironment, tmp_path: Path) -> None:
    task = kit.scripted(tmp_path / "task")
    assert "has no grader" in (await kit.graded(msgspec.structs.replace(task, grader=None), None, walled)).message
    broken = msgspec.structs.replace(task, setup="echo no such thing >&2; exit 3")
    found = await kit.graded(broken, None, walled)
    assert (found.kind, found.reward) == ("invalid task", None) and "no such thing" in found.message
    shutil.rmtree(tmp_path / "task" / "tests")
    found = await kit.graded(task, None, walled)
    assert found.kind == "invalid task" and "does not exist" in found.message


async def test_the_agent_s_own_git_travels_where_the_task_is_about_git(
    walled: GradingEnvironment, tmp_path: Path
) -> None:
    script = "reward=$(git -C . rev-list --count HEAD)\n" + REWARD
    task = kit.scripted(tmp_path / "task", {"test.sh": script}, git=True)
    task = msgspec.structs.replace(
        task, setup="git init -q . && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m 1"
    )
    assert (await kit.graded(task, None, walled)).reward == 1.0
    (tmp_path / "work").mkdir()
    made = await asyncio.create_subprocess_shell(
        "git init -q . && for i in 1 2 3; do git -c user.name=t -c user.email=t@t commit -q --allow-empty -m $i; done",
        cwd=tmp_path / "work",
    )
    await made.wait()
    assert (await kit.graded(task, kit.Work(folder=tmp_path / "work"), walled)).reward == 3.0
