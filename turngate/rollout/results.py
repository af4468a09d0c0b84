"""The results of a batch: its ledger, and the state derived from it (progress, complete groups, invalid tasks)."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from turngate.client.protocol import SessionInfo
from turngate.common.aio import run_to_completion
from turngate.rollout.classify import Classification
from turngate.rollout.group_closer import GroupCloser
from turngate.rollout.ledger import (
    AttemptEnded,
    AttemptStarted,
    FinishedRollout,
    Ledger,
    LedgerState,
    ReopenedRollout,
    UnrecordedRollout,
    timestamp,
)
from turngate.rollout.outcome import GRADE_LOG, Outcome
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress, BatchProgressCallback
from turngate.rollout.recording import build_record
from turngate.rollout.schedule import RolloutItem
from turngate.store.outcomes import RecordedOutcome
from turngate.tasks.task import Task
from turngate.trace.training_report import list_warnings

_MAX_CHARS = 2000  # per message
_MAX_WARNINGS = 5
_OUTCOME = "outcome.json"
EndReason = Literal["fault", "cancelled", "lost", "stale"]


class BatchResults:
    """The results of one batch. `batch` is the batch's id, which is empty until the batch's folder is claimed."""

    def __init__(
        self,
        plan: BatchPlan,
        progress: BatchProgress,
        watch: BatchProgressCallback,
        closer: GroupCloser,
        on_finished: Callable[[FinishedRollout], None],
    ) -> None:
        self.batch = ""
        self.progress = progress
        self._plan = plan
        self._watch = watch
        self._closer = closer
        self._on_finished = on_finished
        self._ledger: Ledger | None = None
        self._invalid: Counter[str] = Counter()  # number of rollouts that found the task invalid, by task
        self._noted: set[str] = set()  # warnings that have been reported in this run
        self._valid: set[str] = set()  # tasks with a graded rollout, which are therefore valid

    async def open(self) -> Ledger:
        """Open and lock the ledger. If this is cancelled, the lock is released."""
        opening = asyncio.ensure_future(asyncio.to_thread(Ledger.open, self._plan.folder))
        try:
            self._ledger = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await run_to_completion(_close_opened(opening))
            raise
        return self._ledger

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "the ledger must be opened before it is used"
        return self._ledger

    @property
    def state(self) -> LedgerState:
        return LedgerState() if self._ledger is None else self._ledger.state

    def report(self) -> None:
        """Call the progress callback with the current progress."""
        self._watch(self.progress)

    def note(self, text: str) -> None:
        """Add a message to the batch's progress, and report the progress."""
        self.progress.notes.append(text)
        self.report()

    # ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────

    async def end_attempt(self, started: AttemptStarted, why: EndReason, message: str = "") -> None:
        """Write to the ledger that an attempt ended without finishing its rollout."""
        await self.ledger.add(
            AttemptEnded(
                rollout=started.rollout,
                attempt=started.attempt,
                session=started.session,
                why=why,
                message=message[:_MAX_CHARS],
                at=timestamp(),
            )
        )

    async def postpone(
        self, item: RolloutItem, started: AttemptStarted, outcome: Outcome, verdict: Classification
    ) -> FinishedRollout:
        """Write to the ledger that a rollout is done but not yet recorded at the gateway, and return the rollout.

        Resuming the batch records the outcome.
        """
        await self.save_outcome(started.session, outcome)
        finished = build_finished(item, started, outcome, verdict)
        await self.ledger.add(
            UnrecordedRollout(finished=finished, recorded=build_record(outcome), why=outcome.unrecorded[:_MAX_CHARS])
        )
        return finished

    async def save_outcome(self, session: str, outcome: Outcome) -> None:
        """Write the full outcome to the folder that contains the agent's files. If that fails, add a note to the outcome.

        The failure is not fatal, because the ledger has the main data.
        """
        await asyncio.to_thread(_write_outcome, self._plan.folder / "rollouts" / session, outcome)

    def remove_work(self, session: str) -> None:
        """Remove a session's copy of the working folder, unless the plan keeps these copies."""
        if not self._plan.keep_work:
            shutil.rmtree(self._plan.folder / "rollouts" / session / "work", ignore_errors=True)

    # ── finished rollouts ───────────────────────────────────────────────────────────────────────────────────────

    async def finish(self, finished: FinishedRollout) -> None:
        """Write a finished rollout to the ledger, count it, and report its new warnings, up to `_MAX_WARNINGS` per run."""
        await self.ledger.add(finished)
        self.count(finished)
        for warning in finished.warnings:
            if warning not in self._noted and len(self._noted) < _MAX_WARNINGS:  # the summary has the rest
                self._noted.add(warning)
                self.note(f"{finished.rollout}: {warning}")
        is_new = finished.kind == "invalid task" and self._invalid[finished.task] == self._plan.invalid_after
        if is_new and finished.task not in self._valid:
            log = self._plan.folder / "rollouts" / finished.session / GRADE_LOG
            where = f"the grader's complete output is in {log}; " if finished.session and log.is_file() else ""
            self.note(
                f"task {finished.task} is invalid; its remaining rollouts are skipped, unless one that is already running is graded; "
                f"{where}the error was: {finished.message}"
            )

    async def skip(self, item: RolloutItem) -> None:
        """Finish a rollout of an invalid task without running it."""
        count = self._invalid[item.task.id]
        await self.finish(
            FinishedRollout(
                rollout=item.id,
                task=item.task.id,
                round=item.round,
                index=item.index,
                kind="invalid task",
                message=f"skipped: the task is invalid (rollouts that found it invalid: {count})",
                at=timestamp(),
            )
        )

    async def reopen(self, finished: FinishedRollout) -> None:
        """Reopen a finished rollout, so that it can run again."""
        await self.write_reopened(finished.rollout, finished.attempt)
        self.progress.remove(finished)
        self._closer.reopen(finished)

    async def write_reopened(self, rollout: str, attempt: int) -> None:
        await self.ledger.add(ReopenedRollout(rollout=rollout, attempt=attempt, at=timestamp()))

    def count(self, finished: FinishedRollout) -> None:
        """Count a finished rollout in the progress, in its group, and towards the validity of its task."""
        self.progress.add(finished)
        if finished.kind == "invalid task" and finished.attempt:
            self._invalid[finished.task] += 1
        elif finished.kind == "graded":
            self._valid.add(finished.task)
        self._closer.add(finished)
        self._on_finished(finished)

    def is_invalid(self, task: Task) -> bool:
        """Return whether to skip the task's remaining rollouts: enough rollouts have found it invalid, and none was graded."""
        return self._invalid[task.id] >= self._plan.invalid_after and task.id not in self._valid


def is_unrecorded(outcome: Outcome) -> bool:
    """Return whether the gateway still needs to record the outcome. Groups exclude infrastructure faults, so these need no record."""
    return bool(outcome.unrecorded) and outcome.kind != "infrastructure fault"


def describe_failure(outcome: Outcome) -> str:
    if outcome.fault is not None:
        return f"{outcome.fault.stage}: {outcome.fault.message}"
    return outcome.grade.message if outcome.grade is not None else ""


def describe_unrecorded(finished: FinishedRollout, why: str) -> str:
    return (
        f"the outcome of {finished.rollout} could not be recorded at the gateway ({why}); resume the batch to record it"
    )


def build_finished(
    item: RolloutItem, started: AttemptStarted, outcome: Outcome, verdict: Classification
) -> FinishedRollout:
    assert verdict.kind is not None, "the rollout must be graded first"
    fault = outcome.fault
    message = describe_failure(outcome) or (outcome.stop if verdict.kind == "cancelled" else "")
    finished = FinishedRollout(
        rollout=item.id,
        task=item.task.id,
        round=item.round,
        index=item.index,
        kind=verdict.kind,
        reward=outcome.reward,
        resolved=None if outcome.grade is None else outcome.grade.resolved,
        attempt=started.attempt,
        session=outcome.session,
        status=outcome.status,
        turns=outcome.turns,
        sampled_tokens=outcome.sampled_tokens,
        rows=outcome.rows,
        trained_tokens=None if outcome.training is None else outcome.training.trained_tokens,
        warnings=tuple(warning[:_MAX_CHARS] for warning in outcome.warnings),
        refused_calls=0 if outcome.refused is None else outcome.refused.count,
        seconds=outcome.seconds,
        stage=fault.stage if fault else "",
        boundary=fault.boundary if fault else "",
        message=message[:_MAX_CHARS],
        at=timestamp(),
    )
    return exclude(finished, outcome.excluded)


def exclude(finished: FinishedRollout, reason: str) -> FinishedRollout:
    """If `reason` says why the outcome does not count, return the rollout as `cancelled` and without a reward.

    If `reason` is empty, return the rollout unchanged. The gateway keeps the outcome in either case.
    """
    if not reason:
        return finished
    return msgspec.structs.replace(finished, kind="cancelled", reward=None, resolved=None, message=reason)


def build_adopted(started: AttemptStarted, recorded: RecordedOutcome, shown: SessionInfo) -> FinishedRollout:
    """Build a finished rollout from the gateway's record. The durations of its stages are unknown."""
    return FinishedRollout(
        rollout=started.rollout,
        task=recorded.task,
        round=started.round,
        index=int(started.rollout.rpartition(".")[2]),
        kind=recorded.kind,
        reward=recorded.reward,
        resolved=recorded.resolved,
        attempt=started.attempt,
        session=started.session,
        turns=shown.turns,
        sampled_tokens=shown.sampled_tokens,
        trained_tokens=None if shown.training is None else shown.training.trained_tokens,
        warnings=tuple(warning[:_MAX_CHARS] for warning in list_warnings(shown.training, shown.refused)),
        refused_calls=0 if shown.refused is None else shown.refused.count,
        message=recorded.message[:_MAX_CHARS],
        at=timestamp(),
    )


def read_outcome(folder: Path, session: str) -> Outcome | None:
    """Read the full outcome of a finished rollout from its batch's folder, or return None if the file cannot be read."""
    try:
        return msgspec.json.decode((folder / "rollouts" / session / _OUTCOME).read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):  # missing, or incomplete because the disk was full
        return None


def _write_outcome(folder: Path, outcome: Outcome) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / _OUTCOME).write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        outcome.notes = (*outcome.notes, f"{folder / _OUTCOME} could not be written: {error.strerror}")


async def _close_opened(opening: asyncio.Future[Ledger]) -> None:
    await asyncio.wait([opening])
    if opening.exception() is None:
        await opening.result().close()
