"""The results of a batch: its ledger, and what follows from its lines (progress, complete groups, invalid tasks)."""

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
from turngate.rollout.outcome import Outcome
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress, BatchProgressCallback
from turngate.rollout.recording import build_record
from turngate.rollout.schedule import RolloutItem
from turngate.store.outcomes import RecordedOutcome
from turngate.tasks.task import Task

_MAX_CHARS = 2000  # of a message
EndReason = Literal["fault", "cancelled", "lost", "stale"]


class BatchResults:
    """Of one batch. `batch` is its id, known once its folder is claimed."""

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
        self._invalid: Counter[str] = Counter()  # by task: rollouts that found it invalid
        self._valid: set[str] = set()  # tasks that were graded: later failures are not their fault

    async def open(self) -> Ledger:
        """Open and lock the ledger. If cancelled meanwhile, nothing stays locked."""
        opening = asyncio.ensure_future(asyncio.to_thread(Ledger.open, self._plan.folder))
        try:
            self._ledger = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await run_to_completion(_close_opened(opening))
            raise
        return self._ledger

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "it is opened before anything is written"
        return self._ledger

    @property
    def state(self) -> LedgerState:
        return LedgerState() if self._ledger is None else self._ledger.state

    def report(self) -> None:
        self._watch(self.progress)

    def note(self, text: str) -> None:
        self.progress.notes.append(text)
        self.report()

    # ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────

    async def end_attempt(self, started: AttemptStarted, why: EndReason, message: str = "") -> None:
        """Write that an attempt decided nothing: the rollout still has to be done."""
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
        """Write that a rollout is done, but the gateway has not recorded it: that is done when the batch is resumed."""
        await self.save_outcome(started.session, outcome)
        finished = build_finished(item, started, outcome, verdict)
        await self.ledger.add(
            UnrecordedRollout(finished=finished, recorded=build_record(outcome), why=outcome.unrecorded[:_MAX_CHARS])
        )
        return finished

    async def save_outcome(self, session: str, outcome: Outcome) -> None:
        """Write the whole outcome beside what the agent left. The ledger has what matters, so a full disk costs only this file."""
        await asyncio.to_thread(_write_outcome, self._plan.folder / "rollouts" / session, outcome)

    def remove_work(self, session: str) -> None:
        if not self._plan.keep_work:
            shutil.rmtree(self._plan.folder / "rollouts" / session / "work", ignore_errors=True)

    # ── finished rollouts ───────────────────────────────────────────────────────────────────────────────────────

    async def finish(self, finished: FinishedRollout) -> None:
        await self.ledger.add(finished)
        self.count(finished)
        if finished.kind == "invalid task" and self._invalid[finished.task] == self._plan.invalid_after:
            self.note(f"{finished.task}: invalid, and not tried any more: {finished.message}")

    async def skip(self, item: RolloutItem) -> None:
        """Finish a rollout of an invalid task without running it."""
        times = self._invalid[item.task.id]
        await self.finish(
            FinishedRollout(
                rollout=item.id,
                task=item.task.id,
                round=item.round,
                index=item.index,
                kind="invalid task",
                message=f"not tried: {times} rollouts of the task found it invalid",
                at=timestamp(),
            )
        )

    async def reopen(self, finished: FinishedRollout) -> None:
        """Take back a finished rollout that was not judged: it runs again."""
        await self.write_reopened(finished.rollout, finished.attempt)
        self.progress.remove(finished)
        self._closer.reopen(finished)

    async def write_reopened(self, rollout: str, attempt: int) -> None:
        await self.ledger.add(ReopenedRollout(rollout=rollout, attempt=attempt, at=timestamp()))

    def count(self, finished: FinishedRollout) -> None:
        self.progress.add(finished)
        if finished.kind == "invalid task" and finished.attempt:
            self._invalid[finished.task] += 1
        elif finished.kind == "graded":
            self._valid.add(finished.task)
        self._closer.add(finished)
        self._on_finished(finished)

    def is_invalid(self, task: Task) -> bool:
        return self._invalid[task.id] >= self._plan.invalid_after and task.id not in self._valid


def is_unrecorded(outcome: Outcome) -> bool:
    """Whether the gateway still has to record it. Infrastructure faults count in no group and need not be."""
    return bool(outcome.unrecorded) and outcome.kind != "infrastructure fault"


def describe_failure(outcome: Outcome) -> str:
    if outcome.fault is not None:
        return f"{outcome.fault.stage}: {outcome.fault.message}"
    return outcome.grade.message if outcome.grade is not None else ""


def describe_unrecorded(finished: FinishedRollout, why: str) -> str:
    return (
        f"the outcome of {finished.rollout} could not be recorded at the gateway ({why}); "
        "resuming the batch records it first"
    )


def build_finished(
    item: RolloutItem, started: AttemptStarted, outcome: Outcome, verdict: Classification
) -> FinishedRollout:
    assert verdict.kind is not None, "it has been graded if it had to be"
    fault = outcome.fault
    return FinishedRollout(
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
        seconds=outcome.seconds,
        stage=fault.stage if fault else "",
        boundary=fault.boundary if fault else "",
        message=describe_failure(outcome)[:_MAX_CHARS],
        at=timestamp(),
    )


def build_adopted(started: AttemptStarted, recorded: RecordedOutcome, shown: SessionInfo) -> FinishedRollout:
    """Build the result of a rollout from what the gateway stores. How long its stages took is not known."""
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
        message=recorded.message[:_MAX_CHARS],
        at=timestamp(),
    )


def _write_outcome(folder: Path, outcome: Outcome) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "outcome.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        outcome.notes = (*outcome.notes, f"{folder / 'outcome.json'} could not be written: {error.strerror}")


async def _close_opened(opening: asyncio.Future[Ledger]) -> None:
    await asyncio.wait([opening])
    if opening.exception() is None:
        await opening.result().close()
