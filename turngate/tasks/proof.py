"""Proof that a task measures what it asks for: its reference solution scores 1, and no change scores 0. `turngate tasks check` calls it.

The solution is applied in a sandbox of its own, as if an agent had done it there; what it left is taken and graded the one way that all
work is graded.
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
from turngate.tasks.task import Solution, Task

Verdict = Literal["proven", "valid", "not proven", "infrastructure fault"]
SOLUTION = "/solution"  # as Harbor has it
SOLVE_S = 1800.0  # unless the task gives its agents another time
_TAIL = 600  # characters of what a solution said
# The patch comes in by standard input. Outside of a repository `git apply` takes the folder as it is.
_APPLY_PATCH = """
if command -v git >/dev/null 2>&1; then exec git apply --whitespace=nowarn -; fi
exec patch -p1 --batch --forward
"""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What came of proving one task."""

    task: str
    verdict: Verdict
    message: str = ""  # what is not as it should be
    solved: Grade | None = None
    untouched: Grade | None = None
    seconds: float = 0.0


async def prove_task(task: Task, ground: GradingEnvironment) -> Proof:
    """Grade the untouched task and the solved one, each in fresh sandboxes. Raises nothing but cancellation."""
    began = time.monotonic()
    proof = await _prove(task, ground)
    return msgspec.structs.replace(proof, seconds=time.monotonic() - began)


async def _prove(task: Task, ground: GradingEnvironment) -> Proof:
    if task.grader is None:
        return Proof(task=task.id, verdict="not proven", message="the task has no grader")
    untouched = await grade(task, None, _with_own_log(ground, "untouched"))
    if task.solution is None:
        return _prove_without_solution(task, untouched)
    if complaint := _explain_mismatch(untouched, 0.0, "no change"):
        return Proof(task=task.id, verdict=_verdict(untouched), message=complaint, untouched=untouched)
    try:
        with tempfile.TemporaryDirectory(prefix="turngate-prove-") as scratch:
            work = await _solve(task, task.solution, ground, Path(scratch) / "work")
            solved = await grade(task, work, _with_own_log(ground, "solved"))
    except TaskError as error:
        return Proof(task=task.id, verdict="not proven", message=error.message, untouched=untouched)
    except (SandboxError, OSError) as error:
        said = error.message if isinstance(error, SandboxError) else str(error)
        return Proof(task=task.id, verdict="infrastructure fault", message=said, untouched=untouched)
    complaint = _explain_mismatch(solved, 1.0, "the reference solution")
    return Proof(
        task=task.id,
        verdict=_verdict(solved) if complaint else "proven",
        message=complaint,
        solved=solved,
        untouched=untouched,
    )


def _prove_without_solution(task: Task, untouched: Grade) -> Proof:
    """Without a solution: whether its grader works at all, and does not give the reward away."""
    if untouched.kind != "graded" or untouched.reward == 1.0:
        complaint = _explain_mismatch(untouched, 0.0, "no change")
        return Proof(task=task.id, verdict=_verdict(untouched), message=complaint, untouched=untouched)
    message = f"no change scores {untouched.reward:g}; there is no solution, so nothing more is proven"
    return Proof(task=task.id, verdict="valid", message=message, untouched=untouched)


def _with_own_log(ground: GradingEnvironment, name: str) -> GradingEnvironment:
    """Each of the two has a log of its own."""
    if ground.log is None:
        return ground
    return msgspec.structs.replace(ground, log=ground.log.with_name(f"{ground.log.stem}-{name}{ground.log.suffix}"))


def _explain_mismatch(found: Grade, wanted: float, what: str) -> str:
    """What a grade has other than it should have; empty if it is as it should be."""
    if found.kind != "graded" or found.reward is None:
        return f"{what}: {found.kind}: {found.message or 'there is no reward'}"
    if not math.isclose(found.reward, wanted, abs_tol=1e-9):
        cases = [f"{name} {outcome}" for name, outcome in found.cases.items() if outcome != "passed"]
        parts = [f"{part.name} {part.reward}" for part in found.parts if part.reward != wanted]
        details = [text for text in (found.message, *cases[:3], *parts[:3]) if text]
        why = f" ({'; '.join(details)})" if details else ""
        return f"{what} scores {found.reward:g}, not {wanted:g}{why}"
    if found.resolved is not None and found.resolved != (wanted == 1.0):
        return f"{what} scores {found.reward:g} and is {'' if found.resolved else 'not '}resolved"
    return ""


def _verdict(found: Grade) -> Verdict:
    return "infrastructure fault" if found.kind == "infrastructure fault" else "not proven"


async def _solve(task: Task, solution: Solution, ground: GradingEnvironment, folder: Path) -> Work:
    """What the solution makes of the task, in a sandbox that is gone again when this returns."""
    spec = staging.build_sandbox_spec(task, ground.backend, image=ground.image, resources=ground.resources)
    rooted = ground.backend.relocates  # otherwise there is one file system, and / is the host's
    if rooted:
        spec = msgspec.structs.replace(spec, folders=(*spec.folders, SOLUTION))
    sandbox = await ground.backend.create(spec)
    try:
        await staging.upload_files(sandbox, task)
        await staging.run_setup(sandbox, task)
        where = SOLUTION if rooted else f"{sandbox.home}{SOLUTION}"
        await _apply(sandbox, solution, where, task.timeout_s or SOLVE_S)
        return await collect_work(sandbox, folder, git=needs_git(task))
    finally:
        await run_to_completion(sandbox.stop())


async def _apply(sandbox: Sandbox, solution: Solution, where: str, limit_s: float) -> None:
    """`where`: the solution's files are put there."""
    if solution.files is None:
        done = await sandbox.exec(["sh", "-c", _APPLY_PATCH], stdin=solution.patch.encode(), timeout_s=limit_s)
        _check_success(done, "the reference patch does not apply")
        return
    await sandbox.upload(solution.files, where)
    env = {"DEBIAN_FRONTEND": "noninteractive", **solution.env, "TURNGATE_SOLUTION": where}
    done = await sandbox.exec(["bash", f"{where}/solve.sh"], env=env, timeout_s=limit_s)
    _check_success(done, "solution/solve.sh did not succeed")


def _check_success(done: ExecResult, what: str) -> None:
    if done.timed_out or done.exit_code:
        how = "it ran out of time" if done.timed_out else f"exit code {done.exit_code}"
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-_TAIL:]
        raise TaskError(f"{what} ({how}): {said or 'it said nothing'}", param="solution")
