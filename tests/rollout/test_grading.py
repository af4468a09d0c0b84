"""Whole rollouts, from how they end to their class and reward: graded work, policies, and faults that never have a reward."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import say, until
from tests.rollout.kit import PRELUDE, Stage, open_stage
from tests.sandboxes import kit as sandboxes
from tests.speed import paced
from turngate.engines.scripted import ScriptedTurn
from turngate.rollout import grading
from turngate.rollout.spec import EndPolicy
from turngate.rollout.work import is_broken
from turngate.sandboxes import posix
from turngate.sandboxes.base import SandboxSpec
from turngate.tasks.grading.types import Grade
from turngate.tasks.task import Script, Task
from turngate.trace import session

pytestmark = pytest.mark.process

WRITES = 'ask("Hi")\nopen("answer.txt", "w").write("{answer}")'
IS_42 = """
reward=0; [ "$(cat answer.txt 2>/dev/null)" = 42 ] && reward=1
mkdir -p "$TURNGATE_LOGS/verifier"; echo $reward > "$TURNGATE_LOGS/verifier/reward.txt"
"""


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage([say("Hello.")] * 20) as stage:
        yield stage


def make_task(folder: Path, program: str, test: str = IS_42, **more: Any) -> Task:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    return Task(id="forty-two", instruction=PRELUDE + program, grader=Script(files=tests), **more)


# ── whole rollouts ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_the_work_is_graded_and_the_outcome_recorded(
    stage: Stage, tmp_path: Path, answer: str, reward: float
) -> None:
    outcome = await stage.run(task=make_task(tmp_path, WRITES.format(answer=answer)))
    assert (outcome.status, outcome.kind, outcome.reward) == ("finished", "graded", reward)
    assert stage.stages[-4:] == ["clean", "grade", "record", "done"]  # the agent's sandbox is gone before
    shown = await stage.gateway.show(outcome.session)
    assert (shown["outcome"]["kind"], shown["outcome"]["reward"]) == ("graded", reward)
    assert (shown["outcome"]["task"], shown["outcome"]["group"]) == ("forty-two", "forty-two")
    trace = await stage.gateway.admin.get(f"/admin/sessions/{outcome.session}/trace")
    assert trace.status_code == 200 and "reward" not in trace.text


async def test_work_is_kept_only_where_it_is_wanted(stage: Stage, tmp_path: Path) -> None:
    kept = await stage.run(task=make_task(tmp_path, WRITES.format(answer="42")))
    gone = await stage.run(task=make_task(tmp_path, WRITES.format(answer="42")), keep_work=False)
    assert kept.reward == gone.reward == 1.0
    assert stage.read_work(kept, "answer.txt") == b"42" and kept.collected.work
    assert not (stage.folder / gone.session / "work").exists() and not gone.collected.work


async def test_a_task_without_a_grader_has_no_class_and_no_reward(stage: Stage) -> None:
    outcome = await stage.run('ask("Hi")')
    assert (outcome.status, outcome.kind, outcome.reward, outcome.grade) == ("finished", None, None, None)
    assert (await stage.gateway.show(outcome.session))["outcome"] is None


async def test_what_a_timed_out_agent_did_is_graded(stage: Stage, tmp_path: Path) -> None:
    program = WRITES.format(answer="42") + "\ntime.sleep(600)"
    outcome = await stage.run(task=make_task(tmp_path, program), timeout_s=paced(1.5))
    assert (outcome.status, outcome.kind, outcome.reward) == ("timed out", "graded", 1.0)


async def test_what_a_timed_out_agent_did_is_left_out_by_policy(stage: Stage, tmp_path: Path) -> None:
    program = WRITES.format(answer="42") + "\ntime.sleep(600)"
    task, policy = make_task(tmp_path, program), EndPolicy(timed_out="exclude")
    outcome = await stage.run(task=task, timeout_s=paced(1.5), policy=policy)
    assert (outcome.status, outcome.kind, outcome.reward) == ("timed out", "agent failed", None)
    assert (await stage.gateway.show(outcome.session))["outcome"]["reward"] is None


async def test_an_engine_that_fails_is_never_the_agents_zero(tmp_path: Path) -> None:
    async with open_stage([ScriptedTurn(fail_before=True)] * 20) as stage:
        outcome = await stage.run(task=make_task(tmp_path, WRITES.format(answer="41")))
    assert (outcome.status, outcome.kind, outcome.reward) == ("error", "infrastructure fault", None)


HANGS_UP = 'ask("Hi")\nif not (child := os.fork()): ask("More")\ntime.sleep(2)\nos.kill(child, 9)\nask("More")'


@pytest.mark.parametrize("program", ['ask("Hi")\nask("More")', HANGS_UP])
async def test_an_engine_that_goes_silent_is_never_the_agents_zero(tmp_path: Path, program: str) -> None:
    """Also where the agent hangs up and tries again."""
    async with open_stage([say("Hello."), ScriptedTurn(hang=True), ScriptedTurn(hang=True)]) as stage:
        outcome = await stage.run(task=make_task(tmp_path, program), timeout_s=paced(2.5))
    assert (outcome.status, outcome.kind, outcome.reward, outcome.turns) == ("error", "infrastructure fault", None, 1)
    assert outcome.fault is not None and (outcome.fault.boundary, outcome.fault.stage) == ("engine", "agent")
    assert "went silent" in outcome.fault.message


async def test_a_slow_engine_is_no_excuse(tmp_path: Path) -> None:
    """Its tokens come."""
    async with open_stage([say("A long story " * 100, pace_s=paced(0.025))]) as stage:
        call = '{"stream": True, "messages": [{"role": "user", "content": "Hi"}]}'
        program = f'http("POST", "/v1/chat/completions", {call})'
        outcome = await stage.run(task=make_task(tmp_path, program), timeout_s=paced(1.5))
    assert (outcome.status, outcome.fault) == ("timed out", None)
    assert outcome.kind == "agent failed"  # there was no whole turn


async def test_a_call_at_the_very_end_is_no_excuse(tmp_path: Path) -> None:
    async with open_stage([say("Hello."), ScriptedTurn(hang=True)]) as stage:
        program = f'ask("Hi")\ntime.sleep({paced(1.4)})\nask("More")'
        outcome = await stage.run(task=make_task(tmp_path, program), timeout_s=paced(2))
    assert (outcome.status, outcome.kind, outcome.reward, outcome.fault) == ("timed out", "graded", 0.0, None)


def test_only_time_in_which_a_call_waits_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    unheard = session.EngineSilence()

    def later(seconds: float) -> float:
        now[0] += seconds
        return unheard.seconds

    assert later(10) == 0
    unheard.begin()
    assert later(5) == 5
    unheard.end()  # given up
    assert later(50) == 5
    unheard.begin()
    unheard.begin()
    assert later(2) == 7
    unheard.end()
    assert later(1) == 8
    unheard.reset()
    assert later(3) == 3
    unheard.reset()
    unheard.end()
    assert later(9) == 0


async def test_a_grading_that_the_infrastructure_spoiled_is_tried_again(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "BACKOFF_S", 0.01)
    tried: list[str] = []
    real = grading.grade

    async def flaky(task: Task, work: Any, ground: Any) -> Grade:
        tried.append(task.id)
        return (
            Grade(kind="infrastructure fault", message="no room") if len(tried) < 3 else await real(task, work, ground)
        )

    monkeypatch.setattr(grading, "grade", flaky)
    outcome = await stage.run(task=make_task(tmp_path, WRITES.format(answer="42")))
    assert (outcome.kind, outcome.reward, len(tried), outcome.turns) == ("graded", 1.0, 3, 1)


# ── nothing to grade, by the agent's own doing ──────────────────────────────────────────────────────────────────────


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_an_agent_that_ends_its_own_container_gets_no_second_chance(stage: Stage, tmp_path: Path) -> None:
    sandboxes.need("docker")
    task = make_task(tmp_path, 'ask("Hi")\nos.kill(-1, 9)')
    outcome = await stage.run(task=task, backend="docker")
    assert (outcome.turns, outcome.kind, outcome.reward) == (1, "agent failed", 0.0)
    assert outcome.grade is not None and "broke its own sandbox" in outcome.grade.message
    left_out = await stage.run(task=task, backend="docker", policy=EndPolicy(lost="exclude"))
    assert (left_out.kind, left_out.reward) == ("agent failed", None)


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_a_container_that_somebody_else_ends_is_nobodys_zero(stage: Stage, tmp_path: Path) -> None:
    sandboxes.need("docker")
    task = make_task(tmp_path, 'ask("Hi")\ntime.sleep(600)')
    rollout = stage.rollout(task=task, backend="docker")
    running = asyncio.create_task(rollout.run())
    await until(lambda: running.done() or rollout.progress.turns == 1, 60)
    names = ["docker", "ps", "--quiet", "--filter", "label=task=forty-two"]
    found = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["docker", "kill", *found], capture_output=True, check=True)
    outcome = await running
    assert (outcome.kind, outcome.reward) == ("infrastructure fault", None)


async def test_more_than_can_be_taken_is_a_zero_by_policy(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "FOLDER_LIMIT", 1_000_000)
    task = make_task(tmp_path, 'ask("Hi")\nopen("big", "wb").truncate(5_000_000)')
    outcome = await stage.run(task=task)
    assert (outcome.kind, outcome.reward) == ("agent failed", 0.0)


async def test_the_tasks_variables_reach_the_agent(stage: Stage, tmp_path: Path) -> None:
    task = make_task(tmp_path, 'ask("Hi")\nprint(os.environ["WORD"])', env={"WORD": "said"})
    assert (await stage.run(task=task)).collected.stdout == "said\n"


@pytest.mark.parametrize("backend", sandboxes.backends())
async def test_a_sandbox_that_works_is_not_called_broken(stage: Stage, backend: str) -> None:
    """If work could not be copied, this alone decides whether the agent gets a zero."""
    sandboxes.need(backend)
    made = await sandboxes.MAKE[backend](stage.root).create(SandboxSpec())
    try:
        assert not await is_broken(made)
    finally:
        await made.stop()
