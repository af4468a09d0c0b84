"""Grading by a Python function, and by a rubric of several graders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.tasks.grading.types import GradingEnvironment
from turngate.tasks.task import Function, Part, Rubric, Task

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]

GRADERS = """
import asyncio, time
from turngate.tasks.grading.types import Grade

def reads(subject):
    assert subject.task.id == "prices" and not (subject.folder / ".git").exists()
    return 1.0 if "prices[1:]" not in (subject.folder / "prices.py").read_text() else 0.0

async def runs(subject):
    done = await subject.exec(["python3", "-c", "from prices import total; print(total([1, 2, 3]))"])
    return Grade(kind="graded", reward=float(done.stdout == b"6\\n"), message="ran")

def runs_too(subject):
    return subject.run(["python3", "-c", "from prices import total; print(total([1, 2, 3]))"]).stdout == b"6\\n"

def answers(subject):
    return float(any(call["arguments"] == {"text": "42"} for call in subject.answers))

def fails(subject): raise ValueError("no such thing")
def fails_on_works(subject): return {"def total(prices):\\n    return sum(prices[1:])\\n": 0.0}[(subject.folder / "prices.py").read_text()]
def nothing(subject): return None
def endless(subject): return float("inf")
def sleeps(subject): time.sleep(3)
async def sleeps_too(subject): await asyncio.sleep(60)
async def swallows(subject):
    try:
        await subject.exec(["sh", "-c", "exit"], timeout_s=5)
        raise AssertionError
    except Exception:
        return 0.0
"""


def function_task(folder: Path, name: str, timeout_s: float | None = None) -> Task:
    kit.write_files(folder, {"graders.py": GRADERS})
    task = kit.script_task(folder / "task")
    grader = Function(name=f"{folder}/graders.py:{name}", timeout_s=timeout_s or scaled(10))
    return msgspec.structs.replace(task, grader=grader)


@pytest.mark.parametrize("name", ["reads", "runs", "runs_too"])
async def test_function_decides_reward(name: str, isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = function_task(tmp_path, name)
    for changes, reward in (({"prices.py": kit.FIX}, 1.0), ({}, 0.0)):
        result = await kit.grade_and_check(task, kit.make_work(tmp_path / f"w{reward}", changes, kit.FOLDER), isolated)
        assert (result.kind, result.reward) == ("graded", reward), result.message
    assert (await kit.grade_and_check(task, None, isolated)).reward == 0.0


async def test_function_sees_recorded_answers(isolated: GradingEnvironment, tmp_path: Path) -> None:
    work = kit.make_work(tmp_path / "w", {}, kit.FOLDER)
    call: Mapping[str, object] = {"tool": "answer", "arguments": {"text": "42"}}
    task = function_task(tmp_path, "answers")
    assert (await kit.grade_and_check(task, msgspec.structs.replace(work, answers=(call,)), isolated)).reward == 1.0
    assert (await kit.grade_and_check(task, work, isolated)).reward == 0.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "ValueError: no such thing"),
        ("nothing", "neither a finite number"),
        ("endless", "neither a finite number"),
        ("sleeps", "took longer than its limit of 1 s"),
        ("sleeps_too", "took longer than its limit of 1 s"),
        ("missing", "cannot be loaded"),
    ],
)
async def test_function_without_decision_is_invalid_task(
    name: str, why: str, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    task = function_task(tmp_path, name, 1.0 if "took longer" in why else None)
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "w", {}, kit.FOLDER), isolated)
    assert (result.kind, result.reward) == ("invalid task", None)
    assert why in result.message


async def test_work_that_breaks_function_scores_zero(isolated: GradingEnvironment, tmp_path: Path) -> None:
    work = kit.make_work(tmp_path / "w", {"prices.py": "?"}, kit.FOLDER)
    result = await kit.grade_and_check(function_task(tmp_path, "fails_on_works"), work, isolated)
    assert (result.kind, result.reward) == ("graded", 0.0) and "KeyError" in result.message


async def test_function_cannot_swallow_sandbox_fault(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = msgspec.structs.replace(function_task(tmp_path, "swallows"), files=tmp_path / "nowhere")
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "w", {}, kit.FOLDER), isolated)
    assert (result.kind, result.reward) == ("infrastructure fault", None)


async def test_rubric_is_weighted_mean_or_invalid(isolated: GradingEnvironment, tmp_path: Path) -> None:
    task = function_task(tmp_path, "reads")
    script = kit.script_task(tmp_path / "other").grader
    assert script is not None and not isinstance(script, Rubric)
    parts = [
        Part(name="reads", weight=3.0, grader=task.grader),  # type: ignore[arg-type]
        Part(name="script", weight=1.0, grader=script),
    ]
    half = kit.make_work(tmp_path / "w", {"prices.py": "def total(prices):\n    return prices[0]\n"}, kit.FOLDER)
    result = await kit.grade_and_check(msgspec.structs.replace(task, grader=Rubric(parts=tuple(parts))), half, isolated)
    assert (result.kind, result.reward) == ("graded", 0.75)
    assert [(part.name, part.weight, part.reward) for part in result.parts] == [
        ("reads", 3.0, 1.0),
        ("script", 1.0, 0.0),
    ]
    parts.append(Part(name="broken", weight=0.1, grader=Function(name=f"{tmp_path}/graders.py:fails")))
    result = await kit.grade_and_check(msgspec.structs.replace(task, grader=Rubric(parts=tuple(parts))), half, isolated)
    assert (result.kind, result.reward) == ("invalid task", None)
    assert [part.reward for part in result.parts] == [1.0, 0.0, None] and "broken: " in result.message
    result = await kit.grade_and_check(msgspec.structs.replace(task, grader=Rubric(parts=())), half, isolated)
    assert result.kind == "invalid task" and "weights" in result.message
