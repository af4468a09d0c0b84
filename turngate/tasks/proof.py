"""Proof that a task measures what it asks for: its reference solution scores 1, and doing nothing scores 0.

The solution is applied in a separate sandbox, as if an agent had applied it, and the resulting work is graded like any other.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, TaskError
from turngate.sandboxes.base import ExecResult, Sandbox
from turngate.tasks import staging
from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.grading.work import collect_work, needs_git
from turngate.tasks.reference import APPLY_PATCH, SOLUTION, SOLVE_ENV, solution_folders
from turngate.tasks.task import Solution, Task

Verdict = Literal["proven", "valid", "not proven", "infrastructure fault"]
SOLVE_S = 1800.0  # seconds; used if the task sets no time limit for agents
_TAIL = 600  # characters of a failed solution's output to report


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an attempt to prove one task."""

    task: str
    verdict: Verdict
    message: str = ""  # why the task is not proven
    solved: Grade | None = None
    untouched: Grade | None = None
    seconds: float = 0.0


async def prove_task(task: Task, environment: GradingEnvironment) -> Proof:
    """Grade the untouched task and, if it scores 0, the reference solution (if there is one), each in fresh sandboxes.

    Failures are reported in the proof, not raised.
    """
    started = time.monotonic()
    proof = await _prove(task, environment)
    return msgspec.structs.replace(proof, seconds=time.monotonic() - started)


async def _prove(task: Task, environment: GradingEnvironment) -> Proof:
    if task.grader is None:
        return Proof(
            task=task.id,
            verdict="not proven",
            message="the task has no grader; add tests/test.sh to its folder, or the field 'grader' to its row",
        )
    untouched = await grade(task, None, _with_own_log(environment, "untouched"))
    if task.solution is None:
        return _prove_without_solution(task, untouched)
    if mismatch := _explain_mismatch(untouched, 0.0, "the untouched task"):
        return Proof(task=task.id, verdict=_verdict(untouched), message=mismatch, untouched=untouched)
    try:
        with tempfile.TemporaryDirectory(prefix="turngate-prove-") as scratch:
            work = await _solve(task, task.solution, environment, Path(scratch) / "work")
            solved = await grade(task, work, _with_own_log(environment, "solved"))
    except TaskError as error:
        return Proof(task=task.id, verdict="not proven", message=error.message, untouched=untouched)
    except (SandboxError, OSError) as error:
        message = error.message if isinstance(error, SandboxError) else str(error)
        return Proof(task=task.id, verdict="infrastructure fault", message=message, untouched=untouched)
    mismatch = _explain_mismatch(solved, 1.0, "the reference solution")
    return Proof(
        task=task.id,
        verdict=_verdict(solved) if mismatch else "proven",
        message=mismatch,
        solved=solved,
        untouched=untouched,
    )


def _prove_without_solution(task: Task, untouched: Grade) -> Proof:
    """Check only that the grader works and does not give the untouched task a reward of 1."""
    if untouched.kind != "graded" or untouched.reward == 1.0:
        mismatch = _explain_mismatch(untouched, 0.0, "the untouched task")
        return Proof(task=task.id, verdict=_verdict(untouched), message=mismatch, untouched=untouched)
    message = f"the untouched task scores {untouched.reward:g}; the task has no solution, so nothing more can be proven"
    return Proof(task=task.id, verdict="valid", message=message, untouched=untouched)


def _with_own_log(environment: GradingEnvironment, name: str) -> GradingEnvironment:
    """Return the environment with a separate log file: `grade.log` becomes `grade-<name>.log`."""
    if environment.log is None:
        return environment
    return msgspec.structs.replace(
        environment, log=environment.log.with_name(f"{environment.log.stem}-{name}{environment.log.suffix}")
    )


def _explain_mismatch(grade: Grade, expected: float, what: str) -> str:
    """Explain how a grade differs from the expected reward. Return an empty string if it does not differ."""
    if grade.kind != "graded" or grade.reward is None:
        return f"{what} was not graded ({grade.kind}): {grade.message or 'the grader returned no reward'}"
    if not math.isclose(grade.reward, expected, abs_tol=1e-9):
        cases = [f"{name} {outcome}" for name, outcome in grade.cases.items() if outcome != "passed"]
        parts = [f"{part.name} {part.reward}" for part in grade.parts if part.reward != expected]
        details = [text for text in (grade.message, *cases[:3], *parts[:3]) if text]
        why = f" ({'; '.join(details)})" if details else ""
        return f"{what} scores {grade.reward:g}, not {expected:g}{why}"
    if grade.resolved is not None and grade.resolved != (expected == 1.0):
        return f"{what} scores {grade.reward:g} but is {'' if grade.resolved else 'not '}resolved"
    return ""


def _verdict(grade: Grade) -> Verdict:
    return "infrastructure fault" if grade.kind == "infrastructure fault" else "not proven"


async def _solve(task: Task, solution: Solution, environment: GradingEnvironment, folder: Path) -> Work:
    """Apply the solution in a sandbox, collect the resulting work, and remove the sandbox. Return the work."""
    spec = staging.build_sandbox_spec(
        task, environment.backend, image=environment.image, resources=environment.resources
    )
    folders = solution_folders(environment.backend)
    spec = msgspec.structs.replace(spec, folders=(*spec.folders, *folders))
    sandbox = await environment.backend.create(spec)
    try:
        await staging.upload_files(sandbox, task)
        await staging.run_setup(sandbox, task)
        folder_inside = SOLUTION if folders else f"{sandbox.home}{SOLUTION}"
        await _apply(sandbox, solution, folder_inside, task.timeout_s or SOLVE_S)
        return await collect_work(sandbox, folder, git=needs_git(task))
    finally:
        await run_to_completion(sandbox.stop())


async def _apply(sandbox: Sandbox, solution: Solution, where: str, limit_s: float) -> None:
    """Apply a solution in a sandbox. If the solution has files, first copy them to the folder `where` in the sandbox."""
    if solution.files is None:
        done = await sandbox.exec(["sh", "-c", APPLY_PATCH], stdin=solution.patch.encode(), timeout_s=limit_s)
        _check_success(done, "the reference patch could not be applied", limit_s)
        return
    await sandbox.upload(solution.files, where)
    env = {**SOLVE_ENV, **solution.env, "TURNGATE_SOLUTION": where}
    done = await sandbox.exec(["bash", f"{where}/solve.sh"], env=env, timeout_s=limit_s)
    _check_success(done, "solution/solve.sh failed", limit_s)


def _check_success(done: ExecResult, failure: str, limit_s: float) -> None:
    if done.timed_out or done.exit_code:
        reason = f"it took longer than {limit_s:g} s" if done.timed_out else f"exit code {done.exit_code}"
        output = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-_TAIL:]
        raise TaskError(f"{failure} ({reason}): {output or 'no output'}", param="solution")
