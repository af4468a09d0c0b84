"""Workers that run the attempts of a batch, write each result to the ledger, and retry after faults, with growing pauses."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress

from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion, wait_for_tasks
from turngate.errors import TurngateError
from turngate.rollout.classify import Classification
from turngate.rollout.concurrency import Concurrency, Slot
from turngate.rollout.engine_pressure import EnginePressure
from turngate.rollout.executor import Attempt, AttemptExecutor, AttemptResult, fail_attempt
from turngate.rollout.health import BatchHealth
from turngate.rollout.ledger import AttemptStarted, LedgerError, timestamp
from turngate.rollout.lost_attempts import LostAttempts
from turngate.rollout.order import RolloutOrder
from turngate.rollout.outcome import Fault, Outcome, ProgressCallback, RolloutProgress
from turngate.rollout.plan import BatchPlan
from turngate.rollout.results import BatchResults, build_finished, describe_failure, describe_unrecorded, is_unrecorded
from turngate.rollout.schedule import RolloutItem, Schedule
from turngate.rollout.stop_signal import StopSignal
from turngate.tasks.archive import PackedTask, TaskPacker

log = logging.getLogger("turngate")
_MAX_BACKOFF_S = 60.0  # longest average pause before a retry
# After this many attempts, a lost attempt counts as an infrastructure fault, because the rollout itself may break the machines.
_MAX_LOST = 10


class AttemptRunner:
    """Runs single attempts, and decides after each whether the rollout is finished, will be retried, or must be recorded later."""

    def __init__(
        self,
        plan: BatchPlan,
        gateway: GatewayClient,
        executor: AttemptExecutor,
        results: BatchResults,
        schedule: Schedule,
        lost: LostAttempts,
        stop: StopSignal,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._packer = TaskPacker()
        self._results = results
        self._schedule = schedule
        self._lost = lost
        self._stop = stop
        self._health = BatchHealth(plan, gateway, executor, results)

    async def run(self, item: RolloutItem, take_slot: Callable[[], Slot]) -> None:
        """Run one attempt, and write its result to the ledger. Do not run it if the task is invalid or the disk is full.

        `take_slot` is called just before the attempt starts.
        """
        ledger = self._results.ledger
        if self._results.is_invalid(item.task):
            await self._results.skip(item)
            return
        if full := self._health.check_disk():
            self._stop.stop(full)
            return
        attempt = ledger.state.attempts.get(item.id, 0) + 1
        self._schedule.start_attempt(item.id, attempt)
        started = AttemptStarted(
            rollout=item.id, round=item.round, attempt=attempt, session=uuid.uuid4().hex, at=timestamp()
        )
        try:
            await ledger.add(started)
            if full := self._health.check_disk():
                await self._results.end_attempt(started, "cancelled", "the disk is full")
                self._stop.stop(full)
                return
            result = await self._execute(item, started, take_slot)
        except asyncio.CancelledError:
            if started.rollout not in ledger.state.unrecorded:
                with suppress(TurngateError):  # if this fails, the next run settles the attempt
                    await run_to_completion(self._lost.settle(started, "cancelled", ""))
            raise
        # The gateway already has the outcome, so it must be written to the ledger even if we are cancelled.
        await run_to_completion(self._settle(item, started, result))
        if ledger.full:
            self._stop.stop(self._health.check_disk())

    async def _execute(
        self, item: RolloutItem, started: AttemptStarted, take_slot: Callable[[], Slot]
    ) -> AttemptResult:
        """Make the order for an attempt, and run the attempt. A failure is returned as a result, not raised."""
        slot = take_slot()
        order = self._make_order(item, started, PackedTask(task=item.task))
        attempt: Attempt | None = None
        try:
            order = self._make_order(item, started, await self._packer.pack(item.task))
            attempt = self._executor.prepare(order, self._watch_tokens(), slot)
            return await attempt.run()
        except asyncio.CancelledError:
            result = attempt.result if attempt is not None else None
            if result is not None and is_unrecorded(result.outcome):
                with suppress(LedgerError):
                    await run_to_completion(self._results.postpone(item, started, result.outcome, result.verdict))
            raise
        except TurngateError as error:
            return fail_attempt(order, Fault("files", error.boundary, error.message))
        except Exception as error:
            # A bug in an executor fails only this attempt, not the batch.
            log.exception("unexpected error in rollout %s, attempt %d", item.id, started.attempt)
            return fail_attempt(
                order,
                Fault(
                    "clean",
                    "gateway",
                    f"unexpected error in Turngate: {error!r}; report it with the traceback in the log",
                ),
            )
        finally:
            slot.leave()

    def _make_order(self, item: RolloutItem, started: AttemptStarted, packed: PackedTask) -> RolloutOrder:
        return self._plan.rollout_order(
            packed, item.index, self._results.batch, started.attempt, item.round, session_id=started.session
        )

    def _watch_tokens(self) -> ProgressCallback:
        """Return a progress callback for one attempt. It adds newly sampled tokens to the progress of the batch."""
        seen = 0

        def watch(progress: RolloutProgress) -> None:
            nonlocal seen
            self._results.progress.add_tokens(progress.sampled_tokens - seen)
            seen = progress.sampled_tokens
            self._results.report()

        return watch

    async def _settle(self, item: RolloutItem, started: AttemptStarted, result: AttemptResult) -> None:
        outcome, verdict = result.outcome, result.verdict
        results, state = self._results, self._results.state
        if is_unrecorded(outcome):
            finished = await results.postpone(item, started, outcome, verdict)
            self._stop.stop(describe_unrecorded(finished, outcome.unrecorded))
            return
        await results.save_outcome(started.session, outcome)
        if result.is_lost and started.attempt <= _MAX_LOST:
            await results.end_attempt(started, "lost", describe_failure(outcome))
            self._schedule.add_retry(item)
        elif verdict.retry == "stale" and state.stale.get(item.id, 0) < self._plan.stale_retries:
            await results.end_attempt(started, "stale")
            self._schedule.add_retry(item)
        elif verdict.kind == "infrastructure fault":
            await self._settle_fault(item, started, outcome, verdict)
        else:
            self._health.count_success()
            await results.finish(build_finished(item, started, outcome, verdict))

    async def _settle_fault(
        self, item: RolloutItem, started: AttemptStarted, outcome: Outcome, verdict: Classification
    ) -> None:
        results, message = self._results, describe_failure(outcome)
        faults = results.state.faults.get(item.id, 0)
        if reason := await self._health.check_after_fault(message):
            # The rollout is not at fault, so this attempt does not use up a retry.
            await results.end_attempt(started, "cancelled", message)
            self._stop.stop(reason)
        elif faults < self._plan.retries:
            await results.end_attempt(started, "fault", message)
            self._schedule.add_retry(item, _choose_backoff(self._plan.back_off_s, faults))
        else:
            await results.finish(build_finished(item, started, outcome, verdict))


def _choose_backoff(first_s: float, faults: int) -> float:
    """Choose the pause before a retry, at random. On average, it doubles with each of the rollout's earlier `faults`, up to a limit."""
    return min(_MAX_BACKOFF_S, first_s * 2.0**faults) * random.uniform(0.5, 1.5)


class Workers:
    """Runs workers, which take rollouts from the schedule and run them until all are done or the batch stops."""

    def __init__(
        self,
        schedule: Schedule,
        concurrency: Concurrency,
        attempts: AttemptRunner,
        pressure: EnginePressure,
        stop: StopSignal,
    ) -> None:
        self._schedule = schedule
        self._pressure = pressure
        self._concurrency = concurrency
        self._attempts = attempts
        self._stop = stop
        # Worker → slot of its current rollout; None until the slot is taken.
        self._slots: dict[asyncio.Task[object], Slot | None] = {}

    async def run(self, count: int, supply: Awaitable[None]) -> None:
        """Run `count` workers and, in the background, `supply`, which adds rollouts to the schedule."""
        self._schedule.start_workers(count)
        workers = [asyncio.create_task(self._work()) for _ in range(count)]
        stopping = asyncio.create_task(self._stop.wait())
        supplying = asyncio.ensure_future(supply)
        try:
            running: set[asyncio.Future[None]] = {*workers}
            others: set[asyncio.Future[None]] = {stopping, supplying}
            while running and not stopping.done():
                done, _ = await asyncio.wait(running | others, return_when=asyncio.FIRST_COMPLETED)
                running, others = running - done, others - done
                for task in done - {stopping}:
                    if not task.cancelled():  # `cancel_running` cancels workers
                        task.result()
        finally:
            for task in (stopping, supplying, *workers):
                task.cancel()
            await run_to_completion(wait_for_tasks(stopping, supplying, *workers))

    def cancel_running(self) -> None:
        """Cancel the workers whose agents have not finished. Finished work is still graded, except on Ray."""
        for worker, slot in self._slots.items():
            if slot is None or not slot.agent_is_done:
                worker.cancel()

    async def _work(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        while True:
            # Wait only while other rollouts are running, so that the batch always makes progress.
            await self._pressure.wait(lambda: bool(self._slots) and not self._stop)
            item = await self._schedule.next()
            if item is None:
                return
            self._slots[worker] = None
            try:
                await self._attempts.run(item, lambda: self._take_slot(worker))
            except LedgerError as error:
                self._stop.stop(error.message)
            finally:
                del self._slots[worker]
                await self._schedule.end_attempt(item.id)

    def _take_slot(self, worker: asyncio.Task[object]) -> Slot:
        slot = self._slots[worker] = self._concurrency.new_slot()
        return slot
