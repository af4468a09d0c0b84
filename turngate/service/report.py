"""Build the results of rollouts. `build_result` reads the agent's files and may take a while, so call it in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.errors import Boundary
from turngate.rollout.outcome import GRADE_LOG, Outcome
from turngate.service.artifacts import read_log_tails, read_tail, read_workdir
from turngate.service.config import Clamp
from turngate.service.conversation import build_turns, lowest_capture
from turngate.service.result import ErrorInfo, RolloutResult, RolloutState
from turngate.service.truncation import Truncator
from turngate.views.trace import TraceView

DIRECT_NOTE = "direct mode: the agent called the endpoint directly, so no turns are recorded; see log_tails for the agent's own logs"


def build_result(
    state: RolloutState,
    outcome: Outcome | None,
    view: TraceView | None,
    folder: Path,
    clamp: Clamp,
    notes: Sequence[str] = (),
    initial_files: Path | None = None,
) -> RolloutResult:
    """Build the full result of a rollout that has ended, with large fields truncated.

    `outcome` is None if the rollout did not run or its outcome was lost. `folder` contains the agent's files, and `initial_files` the files
    that the agent started with. For a SWE task, which starts with a whole repository, `initial_files` is None, and the result does not
    contain the working folder.
    """
    truncator = Truncator(clamp)
    turns = build_turns(view, truncator) if view is not None else []
    result = build_minimal_result(state, outcome, notes)
    result = msgspec.structs.replace(result, capture=lowest_capture(turns), turns=turns)
    if outcome is not None:
        result = msgspec.structs.replace(
            result,
            workdir_files=_read_workdir(outcome, folder, initial_files, truncator),
            log_tails=read_log_tails(folder, truncator),
            verifier_output="" if outcome.grade is None else _read_verifier_output(outcome, folder, truncator),
        )
    return msgspec.structs.replace(result, clamped=truncator.notes)


def build_minimal_result(state: RolloutState, outcome: Outcome | None, notes: Sequence[str]) -> RolloutResult:
    """Build a result from the state, the outcome and the notes only, which works even if `build_result` fails."""
    result = RolloutResult(
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
        return result
    return msgspec.structs.replace(
        result,
        resolved=None if outcome.grade is None else outcome.grade.resolved,
        exit_code=outcome.exit_code,
        excluded=outcome.excluded,
        stop=make_encodable(outcome.stop),
        training=outcome.training,
        refused=outcome.refused,
        notes=[*result.notes, *map(make_encodable, _outcome_notes(outcome))],
    )


def build_unfinished_result(state: RolloutState) -> RolloutResult:
    """Build the result of a rollout that has not ended. It shows the progress so far, and `done` is false."""
    return msgspec.structs.replace(build_minimal_result(state, None, ()), done=False)


def _read_workdir(outcome: Outcome, folder: Path, initial_files: Path | None, truncator: Truncator) -> dict[str, str]:
    if not outcome.collected.work:
        return {}
    if initial_files is None:
        truncator.notes.append("workdir_files: left out, because the working folder is a whole repository")
        return {}
    return read_workdir(folder / "work", initial_files, truncator)


def _read_verifier_output(outcome: Outcome, folder: Path, truncator: Truncator) -> str:
    """Return the end of the grader's output, from its log file if that exists, otherwise from the grade."""
    assert outcome.grade is not None
    if (folder / GRADE_LOG).is_file():
        return read_tail(folder / GRADE_LOG, "verifier_output", truncator, truncator.clamp.verifier)
    return truncator.keep_end("verifier_output", make_encodable(outcome.grade.log), truncator.clamp.verifier)


def _outcome_notes(outcome: Outcome) -> list[str]:
    grade = outcome.grade
    return [
        *([grade.message] if grade is not None and grade.message else ()),
        *(grade.notes if grade is not None else ()),
        *outcome.warnings,
        *outcome.collected.missing,
        *outcome.collected.differences,
        *(f"the {outcome.sandbox} sandbox does not enforce this setting: {rule}" for rule in outcome.not_enforced),
        *outcome.notes,
    ]


def error_from_outcome(outcome: Outcome) -> ErrorInfo | None:
    """Return the error that ended the rollout or its grading, or None if there was none. Failing the task is not an error."""
    if outcome.fault is not None:
        return ErrorInfo(boundary=outcome.fault.boundary, stage=outcome.fault.stage, message=outcome.fault.message)
    grade = outcome.grade
    if grade is not None and grade.kind in ("invalid task", "infrastructure fault"):
        boundary: Boundary = "task" if grade.kind == "invalid task" else "sandbox"
        return ErrorInfo(boundary=boundary, stage="grade", message=grade.message)
    return None
