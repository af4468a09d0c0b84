"""What is told of a rollout that has ended: its turns, what it left, how it was graded; each field within its bounds.

Reads what the agent left behind, and long traces take their time, so `Rollouts` calls it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.errors import Boundary
from turngate.rollout.outcome import Outcome
from turngate.service.artifacts import logs, tail, workdir
from turngate.service.config import Clamp
from turngate.service.conversation import least, turns
from turngate.service.result import RolloutResult, RolloutState, Trouble
from turngate.service.truncation import Cut
from turngate.views.trace import TraceView

DIRECT = "direct mode: the agent called the endpoint itself, and nothing was recorded but its own logs"


def ended(
    state: RolloutState,
    outcome: Outcome | None,
    view: TraceView | None,
    folder: Path,
    clamp: Clamp,
    notes: Sequence[str] = (),
    given: Path | None = None,
) -> RolloutResult:
    """The result of a rollout: `state` says how it ended, `outcome` what came of it, if it came so far as to have one. `given`: a folder
    with the files that its working folder began with; None: that is a whole repository, and not shown."""
    cut = Cut(clamp)
    shown = turns(view, cut) if view is not None else []
    found = msgspec.structs.replace(bare(state, outcome, notes), capture=least(shown), turns=shown)
    if outcome is not None:
        found = msgspec.structs.replace(
            found,
            workdir_files=_workdir(outcome, folder, given, cut),
            log_tails=logs(folder, cut),
            verifier_output="" if outcome.grade is None else _verified(outcome, folder, cut),
        )
    return msgspec.structs.replace(found, clamped=cut.told)


def bare(state: RolloutState, outcome: Outcome | None, notes: Sequence[str]) -> RolloutResult:
    """How it ended, without anything that an agent wrote: nothing here can fail."""
    found = RolloutResult(
        rollout_id=state.rollout_id,
        task_id=state.task_id,
        agent=state.agent,
        model_key=state.model_key,
        model=state.model,
        mode=state.mode,
        done=True,
        status=state.status,
        kind=state.kind,
        reward=state.reward,
        wall_s=state.wall_s,
        turn_count=state.turns,
        sampled_tokens=state.sampled_tokens,
        error=state.error,
        session=state.session,
        notes=[make_encodable(note) for note in notes],
    )
    if outcome is None:
        return found
    return msgspec.structs.replace(
        found,
        resolved=None if outcome.grade is None else outcome.grade.resolved,
        exit_code=outcome.exit_code,
        stop=make_encodable(outcome.stop),
        notes=[*found.notes, *map(make_encodable, _notes(outcome))],
    )


def _workdir(outcome: Outcome, folder: Path, given: Path | None, cut: Cut) -> dict[str, str]:
    if not outcome.collected.work:
        return {}
    if given is None:
        cut.told.append("workdir_files: it is a whole repository, and left out")
        return {}
    return workdir(folder / "work", given, cut)


def _verified(outcome: Outcome, folder: Path, cut: Cut) -> str:
    """What the grader printed; from its whole log where that is there."""
    assert outcome.grade is not None
    if (folder / "grade.log").is_file():
        return tail(folder / "grade.log", "verifier_output", cut, cut.clamp.verifier)
    return cut.end("verifier_output", make_encodable(outcome.grade.log), cut.clamp.verifier)


def _notes(outcome: Outcome) -> list[str]:
    grade = outcome.grade
    return [
        *([grade.message] if grade is not None and grade.message else ()),
        *(grade.notes if grade is not None else ()),
        *outcome.collected.missing,
        *outcome.collected.differences,
        *(f"not closed off in the {outcome.sandbox} sandbox: {wish}" for wish in outcome.not_enforced),
        *outcome.notes,
    ]


def trouble(outcome: Outcome) -> Trouble | None:
    """What went wrong that was not the agent's doing. A grading that failed is told as one."""
    if outcome.fault is not None:
        return Trouble(boundary=outcome.fault.boundary, stage=outcome.fault.stage, message=outcome.fault.message)
    grade = outcome.grade
    if grade is not None and grade.kind in ("invalid task", "infrastructure fault"):
        boundary: Boundary = "task" if grade.kind == "invalid task" else "sandbox"
        return Trouble(boundary=boundary, stage="grade", message=grade.message)
    return None
