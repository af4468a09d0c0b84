"""Whole rollouts with their class and reward: graded work, policies, and faults that never have a reward."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import say, until
from tests.rollout.kit import PRELUDE, Harness, open_harness
from tests.sandboxes import kit as sandboxes
from tests.speed import paced
from turngate.engines.scripted import ScriptedTurn
from turngate.rollout import grading
from turngate.rollout.grading import GradeCache
from turngate.rollout.spec import EndPolicy
from turngate.rollout.work import is_broken
from turngate.sandboxes import posix
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.local import LocalBackend
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Script, Swe, Task
from turngate.trace import session

pytestmark = pytest.mark.process

WRITE_ANSWER = 'ask("Hi")\nopen("answer.txt", "w").write("{answer}")'
CHECK_ANSWER = """
reward=0; [ "$(cat answer.txt 2>/dev/null)" = 42 ] && reward=1
mkdir -p "$TURNGATE_LOGS/verifier"; echo $reward > "$TURNGATE_LOGS/verifier/reward.txt"
"""


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with open_harness([say("Hello.")] * 20) as harness:
        yield harness


def make_task(folder: Path, program: str, test: str = CHECK_ANSWER, **more: Any) -> Task:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    return Task(id="forty-two", instruction=PRELUDE + program, grader=Script(files=tests), **more)


# ── whole rollouts ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_work_is_graded_and_outcome_recorded(
    harness: Harness, tmp_path: Path, answer: str, reward: float
) -> None:
    outcome = await harness.run(task=make_task(tmp_path, WRITE_ANSWER.format(answer=answer)))
    assert (outcome.status, outcome.kind, outcome.reward) == ("finished", "graded", reward)
    assert harness.stages[-4:] == ["clean", "grade", "record", "done"]  # the agent's sandbox is removed before grading
    shown = await harness.gateway.show(outcome.session)
    assert (shown["outcome"]["kind"], shown["outcome"]["reward"]) == ("graded", reward)
    assert (shown["outcome"]["task"], shown["outcome"]["group"]) == ("forty-two", "forty-two")
    trace = await harness.gateway.admin.get(f"/admin/sessions/{outcome.session}/trace")
    assert trace.status_code == 200 and "reward" not in trace.text


async def test_work_is_discarded_without_keep_work(harness: Harness, tmp_path: Path) -> None:
    kept = await harness.run(task=make_task(tmp_path, WRITE_ANSWER.format(answer="42")))
    discarded = await harness.run(task=make_task(tmp_path, WRITE_ANSWER.format(answer="42")), keep_work=False)
    assert kept.reward == discarded.reward == 1.0
    assert harness.read_work(kept, "answer.txt") == b"42" and kept.collected.work
    assert not (harness.folder / discarded.session / "work").exists() and not discarded.collected.work


async def test_task_without_grader_has_no_class_or_reward(harness: Harness) -> None:
    outcome = await harness.run('ask("Hi")')
    assert (outcome.status, outcome.kind, outcome.reward, outcome.grade) == ("finished", None, None, None)
    assert (await harness.gateway.show(outcome.session))["outcome"] is None


async def test_work_of_timed_out_agent_is_graded(harness: Harness, tmp_path: Path) -> None:
    program = WRITE_ANSWER.format(answer="42") + "\ntime.sleep(600)"
    outcome = await harness.run(task=make_task(tmp_path, program), timeout_s=paced(1.5))
    assert (outcome.status, outcome.kind, outcome.reward) == ("timed out", "graded", 1.0)


async def test_work_of_timed_out_agent_is_excluded_by_policy(harness: Harness, tmp_path: Path) -> None:
    program = WRITE_ANSWER.format(answer="42") + "\ntime.sleep(600)"
    task, policy = make_task(tmp_path, program), EndPolicy(timed_out="exclude")
    outcome = await harness.run(task=task, timeout_s=paced(1.5), policy=policy)
    assert (outcome.status, outcome.kind, outcome.reward) == ("timed out", "agent failed", None)
    assert (await harness.gateway.show(outcome.session))["outcome"]["reward"] is None


async def test_failing_engine_is_infrastructure_fault(tmp_path: Path) -> None:
    async with open_harness([ScriptedTurn(fail_before=True)] * 20) as harness:
        outcome = await harness.run(task=make_task(tmp_path, WRITE_ANSWER.format(answer="41")))
    assert (outcome.status, outcome.kind, outcome.reward) == ("error", "infrastructure fault", None)


HANG_UP = 'ask("Hi")\nif not (child := os.fork()): ask("More")\ntime.sleep(2)\nos.kill(child, 9)\nask("More")'


@pytest.mark.parametrize("program", ['ask("Hi")\nask("More")', HANG_UP])
async def test_silent_engine_is_infrastructure_fault(tmp_path: Path, program: str) -> None:
    """This also holds if the agent hangs up and tries again."""
    async with open_harness([say("Hello."), ScriptedTurn(hang=True), ScriptedTurn(hang=True)]) as harness:
        outcome = await harness.run(task=make_task(tmp_path, program), timeout_s=paced(2.5))
    assert (outcome.status, outcome.kind, outcome.reward, outcome.turns) == ("error", "infrastructure fault", None, 1)
    assert outcome.fault is not None and (outcome.fault.boundary, outcome.fault.stage) == ("engine", "agent")
    assert "went silent" in outcome.fault.message


async def test_slow_engine_is_not_fault(tmp_path: Path) -> None:
    """A slow engine sends tokens, so it is not silent."""
    async with open_harness([say("A long story " * 100, pace_s=paced(0.025))]) as harness:
        call = '{"stream": True, "messages": [{"role": "user", "content": "Hi"}]}'
        program = f'http("POST", "/v1/chat/completions", {call})'
        outcome = await harness.run(task=make_task(tmp_path, program), timeout_s=paced(1.5))
    assert (outcome.status, outcome.fault) == ("timed out", None)
    assert outcome.kind == "agent failed"  # no turn was complete


async def test_silence_at_the_very_end_is_not_fault(tmp_path: Path) -> None:
    async with open_harness([say("Hello."), ScriptedTurn(hang=True)]) as harness:
        program = f'ask("Hi")\ntime.sleep({paced(1.4)})\nask("More")'
        outcome = await harness.run(task=make_task(tmp_path, program), timeout_s=paced(2))
    assert (outcome.status, outcome.kind, outcome.reward, outcome.fault) == ("timed out", "graded", 0.0, None)


def test_silence_counts_only_while_a_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    silence = session.EngineSilence()

    def advance(seconds: float) -> float:
        now[0] += seconds
        return silence.seconds

    assert advance(10) == 0
    silence.begin()
    assert advance(5) == 5
    silence.end()  # the call was given up
    assert advance(50) == 5
    silence.begin()
    silence.begin()
    assert advance(2) == 7
    silence.end()
    assert advance(1) == 8
    silence.reset()
    assert advance(3) == 3
    silence.reset()
    silence.end()
    assert advance(9) == 0


async def test_grading_is_retried_after_infrastructure_fault(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "BACKOFF_S", 0.01)
    tried: list[str] = []
    real = grading.grade

    async def flaky(task: Task, work: Any, environment: Any) -> Grade:
        tried.append(task.id)
        return (
            Grade(kind="infrastructure fault", message="no room")
            if len(tried) < 3
            else await real(task, work, environment)
        )

    monkeypatch.setattr(grading, "grade", flaky)
    outcome = await harness.run(task=make_task(tmp_path, WRITE_ANSWER.format(answer="42")))
    assert (outcome.kind, outcome.reward, len(tried), outcome.turns) == ("graded", 1.0, 3, 1)


# ── identical work ──────────────────────────────────────────────────────────────────────────────────────────────────


SWE = Swe(repo="r", base_commit="", test_patch="", fail_to_pass=("t.py::t",), pass_to_pass=(), test_cmd="pytest")


def make_work(folder: Path, text: str = "1", **more: Any) -> Work:
    folder.mkdir()
    (folder / "a.py").write_text(text)
    return Work(folder=folder, **more)


def change_nothing(folder: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_bytes(b"x")


CHANGES = {
    "caches": (change_nothing, 1),
    "content": (lambda folder: (folder / "a.py").write_text("2"), 2),
    "permissions": (lambda folder: (folder / "a.py").chmod(0o755), 2),
    "new file": (lambda folder: (folder / "b.py").write_text(""), 2),
    "empty folder": (lambda folder: (folder / "b").mkdir(), 2),
    "hard link": (lambda folder: (folder / "same.py").hardlink_to(folder / "a.py"), 2),
    "link": (lambda folder: ((folder / "a.py").unlink(), (folder / "a.py").symlink_to("b.py")), 2),
}


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The works that were really graded. A file `fault` makes the first grading an infrastructure fault."""
    works: list[Path] = []

    async def grade(task: Task, work: Work, environment: GradingEnvironment) -> Grade:
        works.append(work.folder)
        await asyncio.sleep(0)
        if (work.folder / "fault").exists() and len(works) <= grading.MAX_TRIES:
            return Grade(kind="infrastructure fault", message="no room")
        return Grade(kind="graded", reward=0.5, notes=("n",))

    monkeypatch.setattr(grading, "BACKOFF_S", 0.0)
    monkeypatch.setattr(grading, "grade", grade)
    return works


async def grade_both(first: Work, second: Work, grader: Any = SWE, groups: tuple[str, str] = ("g", "g")) -> list[Grade]:
    cache, task = GradeCache(), Task(id="t", instruction="Do it.", grader=grader)
    works = zip((first, second), groups, ("r.0", "r.1"), strict=True)
    environment = GradingEnvironment(backend=LocalBackend())
    grades = [
        cache.grade(
            task,
            work,
            environment,
            group=group,
            rollout=rollout,
            grade=partial(grading.grade_with_retries, task, work, environment),
        )
        for work, group, rollout in works
    ]
    return list(await asyncio.gather(*grades))


@pytest.mark.parametrize("change", CHANGES)
async def test_only_identical_work_shares_a_grade(change: str, graded: list[Path], tmp_path: Path) -> None:
    apply, times = CHANGES[change]
    second = make_work(tmp_path / "b")
    apply(second.folder)
    grades = await grade_both(make_work(tmp_path / "a"), second)
    assert len(graded) == times
    assert [grade.reward for grade in grades] == [0.5, 0.5]
    notes = sorted(note for grade in grades for note in grade.notes if note != "n")
    first = "r.0" if grades[0].notes == ("n",) else "r.1"
    assert notes == [f"not graded again, because the work is identical to that of rollout {first}"] * (2 - times)


async def test_grades_of_other_groups_and_graders_are_not_shared(graded: list[Path], tmp_path: Path) -> None:
    await grade_both(make_work(tmp_path / "a"), make_work(tmp_path / "b"), groups=("g", "h"))
    await grade_both(make_work(tmp_path / "c"), make_work(tmp_path / "d"), Script(command=("true",)))
    await grade_both(make_work(tmp_path / "e"), make_work(tmp_path / "f", lost="too large"))
    assert len(graded) == 6


async def test_hard_links_are_not_copies(graded: list[Path], tmp_path: Path) -> None:
    copies, links = make_work(tmp_path / "a"), make_work(tmp_path / "b")
    (copies.folder / "same.py").write_text("1")
    (links.folder / "same.py").hardlink_to(links.folder / "a.py")
    await grade_both(copies, links)
    assert len(graded) == 2


async def test_unreadable_work_is_graded(graded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading.hashlib, "file_digest", refuse)
    grades = await grade_both(make_work(tmp_path / "a"), make_work(tmp_path / "b"))
    assert [grade.kind for grade in grades] == ["graded"] * 2 and len(graded) == 2


def refuse(*_: object) -> None:
    raise OSError(5, "Input/output error")


async def test_cancelled_grading_lets_others_grade(tmp_path: Path) -> None:
    cache, task = GradeCache(), Task(id="t", instruction="Do it.", grader=SWE)
    environment, started = GradingEnvironment(backend=LocalBackend()), asyncio.Event()

    async def hang() -> Grade:
        started.set()
        await asyncio.sleep(3600)
        raise AssertionError

    async def grade() -> Grade:
        return Grade(kind="graded", reward=1.0)

    def call(name: str, run: Any) -> asyncio.Task[Grade]:
        work = make_work(tmp_path / name)
        return asyncio.create_task(cache.grade(task, work, environment, group="g", rollout=name, grade=run))

    first = call("a", hang)
    await started.wait()
    waiting = [call("b", grade), call("c", grade)]
    await asyncio.sleep(0.1)
    first.cancel()
    assert [one.reward for one in await asyncio.gather(*waiting)] == [1.0, 1.0]
    assert first.cancelled()


async def test_infrastructure_fault_is_not_shared(graded: list[Path], tmp_path: Path) -> None:
    first, second = make_work(tmp_path / "a"), make_work(tmp_path / "b")
    for work in (first, second):
        (work.folder / "fault").touch()
    grades = await grade_both(first, second)
    assert {grade.kind for grade in grades} == {"infrastructure fault", "graded"}
    assert len(set(graded[: grading.MAX_TRIES])) == 1 and set(graded) == {first.folder, second.folder}
    assert len(graded) == grading.MAX_TRIES + 1


# ── work lost by the agent ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_agent_that_kills_its_container_scores_zero(harness: Harness, tmp_path: Path) -> None:
    sandboxes.need("docker")
    task = make_task(tmp_path, 'ask("Hi")\nos.kill(-1, 9)')
    outcome = await harness.run(task=task, backend="docker")
    assert (outcome.turns, outcome.kind, outcome.reward) == (1, "agent failed", 0.0)
    assert outcome.grade is not None and "broke its own sandbox" in outcome.grade.message
    left_out = await harness.run(task=task, backend="docker", policy=EndPolicy(lost="exclude"))
    assert (left_out.kind, left_out.reward) == ("agent failed", None)


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_container_killed_from_outside_is_infrastructure_fault(harness: Harness, tmp_path: Path) -> None:
    sandboxes.need("docker")
    task = make_task(tmp_path, 'ask("Hi")\ntime.sleep(600)')
    rollout = harness.rollout(task=task, backend="docker")
    running = asyncio.create_task(rollout.run())
    await until(lambda: running.done() or rollout.progress.turns == 1, 60)
    list_containers = ["docker", "ps", "--quiet", "--filter", "label=task=forty-two"]
    containers = subprocess.run(list_containers, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["docker", "kill", *containers], capture_output=True, check=True)
    outcome = await running
    assert (outcome.kind, outcome.reward) == ("infrastructure fault", None)


async def test_oversized_work_scores_zero_by_policy(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "FOLDER_LIMIT", 1_000_000)
    task = make_task(tmp_path, 'ask("Hi")\nopen("big", "wb").truncate(5_000_000)')
    outcome = await harness.run(task=task)
    assert (outcome.kind, outcome.reward) == ("agent failed", 0.0)


async def test_task_variables_reach_agent(harness: Harness, tmp_path: Path) -> None:
    task = make_task(tmp_path, 'ask("Hi")\nprint(os.environ["WORD"])', env={"WORD": "said"})
    assert (await harness.run(task=task)).collected.stdout == "said\n"


@pytest.mark.parametrize("backend", sandboxes.backends())
async def test_working_sandbox_is_not_broken(harness: Harness, backend: str) -> None:
    """If work cannot be copied, this check alone decides whether the agent gets a zero."""
    sandboxes.need(backend)
    sandbox = await sandboxes.MAKE[backend](harness.root).create(SandboxSpec())
    try:
        assert not await is_broken(sandbox)
    finally:
        await sandbox.stop()
