"""Run a batch: n rollouts of each task. A batch survives failures, crashes and Ctrl-C.

    result = await run_batch(plan, gateway, connector)

    async with aclosing(rollouts(plan, gateway, connector)) as finished:
        async for rollout in finished: …

    plan            the tasks to run, and how to run them
    schedule        decides what runs next: a retry that is due, or a rollout of a group that the throttle allows
    attempts        workers that make an order for each attempt, and write its result to the ledger
    executor        runs the orders: in this process, or elsewhere
    results         the ledger, and the progress and groups that are derived from it
    group_closer    closes complete groups at the gateway
    retry_listener  handles requests to retry a rollout
    lost_attempts   settles the attempts that an earlier run left open
    health          detects when a batch cannot continue: a full disk, no sandboxes, no gateway

A limited number of workers share one schedule, so the number of asyncio tasks does not grow with the size of the batch. After an
infrastructure fault, the rollout is retried later with a new session and a new sandbox, up to `plan.retries` times. If the batch cannot
continue, it stops and reports why. Running the same plan on the same folder resumes the batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion, wait_for_tasks
from turngate.errors import ConfigError, TurngateError
from turngate.rollout import health
from turngate.rollout.attempts import AttemptRunner, Workers
from turngate.rollout.concurrency import Concurrency
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.engine_pressure import EnginePressure
from turngate.rollout.executor import AttemptExecutor, LocalExecutor
from turngate.rollout.feed_sizes import FeedSizeCheck
from turngate.rollout.group_closer import GroupCloser
from turngate.rollout.ledger import FinishedRollout, Ledger, LedgerError, LedgerHeader, timestamp
from turngate.rollout.lost_attempts import LostAttempts
from turngate.rollout.plan import BatchPlan, describe_changes
from turngate.rollout.progress import BatchProgress, BatchProgressCallback
from turngate.rollout.resolve import PlanResolver
from turngate.rollout.results import BatchResults
from turngate.rollout.retry_listener import RetryListener
from turngate.rollout.schedule import Schedule
from turngate.rollout.stop_signal import StopSignal
from turngate.rollout.summary import Summary, summarize
from turngate.rollout.throttle import Throttle, no_throttle

_FLUSH_S = 5.0  # time to send the last replies to retry requests, and to close the last groups of a stopped batch


class BatchStopped(TurngateError):
    """The batch cannot continue. Finished rollouts are kept."""

    kind = "batch_stopped"


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of a batch that have finished so far, and their summary."""

    batch: str
    folder: Path
    finished: tuple[FinishedRollout, ...]  # by round, task and index
    summary: Summary
    stopped: str = ""  # why the batch stopped early; running the same plan resumes it

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.summary.overall.wanted


async def run_batch(
    plan: BatchPlan,
    gateway: GatewayClient,
    connector: GatewayConnector,
    watch: BatchProgressCallback = lambda progress: None,
    *,
    throttle: Throttle = no_throttle,
    executor: AttemptExecutor | None = None,
) -> BatchResult:
    """Run a batch until it is complete or must stop. Running the same plan again resumes the batch.

    Cancelling the call ends the running rollouts cleanly.
    """
    return await Batch(plan, gateway, connector, watch, throttle=throttle, executor=executor).run()


async def rollouts(
    plan: BatchPlan,
    gateway: GatewayClient,
    connector: GatewayConnector,
    watch: BatchProgressCallback = lambda progress: None,
    *,
    throttle: Throttle = no_throttle,
    executor: AttemptExecutor | None = None,
) -> AsyncGenerator[FinishedRollout, None]:
    """Yield the rollouts as they finish, starting with those of earlier runs. Closing the iterator stops the batch.

    A rollout that is retried on request is yielded again, with a higher `attempt`. The new result replaces the earlier one; both have the
    same `rollout`. Raise `BatchStopped` if the batch cannot continue.
    """
    queue: asyncio.Queue[FinishedRollout | None] = asyncio.Queue()
    batch = Batch(plan, gateway, connector, watch, throttle=throttle, on_finished=queue.put_nowait, executor=executor)
    running = asyncio.create_task(batch.run())
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (finished := await queue.get()) is not None:
            yield finished
        result = await running
        if result.stopped:
            raise BatchStopped(result.stopped)
    finally:
        running.cancel()
        await run_to_completion(wait_for_tasks(running))


class Batch:
    """Runs the batch of one plan, once. `result` can be read at any time."""

    def __init__(
        self,
        plan: BatchPlan,
        gateway: GatewayClient,
        connector: GatewayConnector,
        watch: BatchProgressCallback = lambda progress: None,
        *,
        throttle: Throttle = no_throttle,
        on_finished: Callable[[FinishedRollout], None] = lambda finished: None,
        executor: AttemptExecutor | None = None,
    ) -> None:
        """Prepare a batch.

        `on_finished` is called with each finished rollout, starting with those of earlier runs. `executor` runs the attempts; by default,
        they run in this process.
        """
        self._plan = plan
        self._executor = executor or LocalExecutor(PlanResolver(plan), gateway, connector)
        concurrency = Concurrency(plan.bounds)
        self.progress = BatchProgress(total=plan.total, states=concurrency.states)
        self._stop = stop = StopSignal(self._note)
        self._closer = GroupCloser(gateway, plan.n, stop.stop)
        self._results = results = BatchResults(plan, self.progress, watch, self._closer, on_finished)
        self._schedule = Schedule(plan, self.progress, results.report, self._closer, throttle, stop)
        self._lost = LostAttempts(gateway, results, stop)
        attempts = AttemptRunner(plan, gateway, self._executor, results, self._schedule, self._lost, stop)
        self._workers = Workers(self._schedule, concurrency, attempts, EnginePressure(gateway), stop)
        self._retries = RetryListener(plan, gateway, results, self._schedule, stop)
        self._feed_sizes = FeedSizeCheck(plan, gateway, self._note)

    async def run(self) -> BatchResult:
        """Run the batch until it is complete or must stop, and return the result."""
        ledger = await self._results.open()
        background = [asyncio.create_task(self._closer.run())]
        try:
            await self._claim_folder(ledger)
            await self._executor.check()
            await self._executor.sweep()
            await self._resume(ledger)
            background.append(asyncio.create_task(self._retries.listen()))
            background.append(asyncio.create_task(self._feed_sizes.run(self._results.batch)))
            await self._run_workers()
            await self._flush()
        except LedgerError as error:
            self._stop.stop(error.message)
        finally:
            background += self._retries.tasks
            for task in background:
                task.cancel()
            await run_to_completion(wait_for_tasks(*background))
            await run_to_completion(ledger.close())
        return self.result

    async def wind_up(self) -> None:
        """Start no more rollouts, and cancel the running agents. Finished work is still graded, except on Ray.

        `run` then returns the result so far.
        """
        self._stop.is_winding_up = True
        self._workers.cancel_running()
        await self._schedule.notify()

    @property
    def result(self) -> BatchResult:
        """The rollouts finished so far, and their summary."""
        plan, state = self._plan, self._results.state
        position = {task.id: n for n, task in enumerate(plan.tasks)}
        finished = tuple(sorted(state.finished.values(), key=lambda one: (one.round, position[one.task], one.index)))
        began = state.head.made if state.head is not None else 0.0
        summary = summarize(
            self._results.batch,
            tuple(position),
            plan.n,
            finished,
            rounds=plan.rounds,
            seconds=max(one.at for one in finished) - began if finished else 0.0,
            stopped=self._stop.reason,
        )
        return BatchResult(
            batch=self._results.batch,
            folder=plan.folder,
            finished=finished,
            summary=summary,
            stopped=self._stop.reason,
        )

    async def _claim_folder(self, ledger: Ledger) -> None:
        """Write the batch's header to the ledger if the ledger is empty. Otherwise, check that the ledger belongs to this batch."""
        tasks = await asyncio.to_thread(self._plan.digests)
        terms, header = self._plan.terms(), ledger.state.head
        if header is None:
            header = LedgerHeader(batch=self._plan.new_id(), terms=terms, tasks=tasks, made=timestamp())
            await ledger.add(header)
        elif changes := describe_changes(header, terms, tasks):
            raise ConfigError(
                f"out: {ledger.folder} contains a different batch ({'; '.join(changes)}); "
                "choose a different folder, or restore the original settings",
                param="out",
            )
        unrecorded = (entry.finished for entry in ledger.state.unrecorded.values())
        rounds = 1 + max((one.round for one in (*ledger.state.finished.values(), *unrecorded)), default=0)
        if rounds > self._plan.rounds:
            raise ConfigError(
                f"rounds must be at least {rounds}, not {self._plan.rounds}: {ledger.folder} already contains {rounds} rounds",
                param="rounds",
            )
        self._results.batch = header.batch

    async def _resume(self, ledger: Ledger) -> None:
        """Continue from an earlier run: count finished rollouts, record outcomes that the gateway lacks, and settle open attempts."""
        state, results, progress = ledger.state, self._results, self.progress
        requests = await self._retries.read_earlier() if state.attempts else {}
        accepted = await self._retries.accept_earlier(requests)
        for finished in list(state.finished.values()):
            results.count(finished)
        for unrecorded in list(state.unrecorded.values()):
            await self._lost.record(unrecorded)
        for started in list(state.open.values()):
            await asyncio.to_thread(results.remove_work, started.session)
            await self._lost.settle(started, "lost", "the runner ended before the attempt did")
        await self._retries.reply_earlier(requests, accepted)
        progress.before = progress.done
        if progress.before:
            results.note(f"rollouts already finished: {progress.before} of {progress.total}")
        progress.started = time.monotonic()
        results.report()

    async def _run_workers(self) -> None:
        count = min(self._plan.bounds.rollouts, self._plan.total - self.progress.before)
        supply = self._schedule.supply(self._results.batch, self._results.state.finished)
        await self._workers.run(count, supply)

    async def _flush(self) -> None:
        """Wait, up to a time limit, until the last retry requests are answered and the last complete groups are closed.

        If not all of these groups are closed in time, stop the batch with that reason.
        """
        if self._retries.tasks:
            await asyncio.wait(self._retries.tasks, timeout=_FLUSH_S)
        if not await self._closer.flush(_FLUSH_S if self._stop.reason else health.RESTART_S):
            self._stop.stop(
                "not all complete groups could be closed at the gateway in time; resume the batch to close them"
            )
        elif not self._stop.reason:
            await self._feed_sizes.check(self._results.batch)  # for feeds opened during a short batch

    def _note(self, text: str) -> None:
        self._results.note(text)
