"""Many rollouts: n of each task, through failures, crashes and Ctrl-C, each of them in exactly one class at the end.

    result = await run_batch(plan, gateway, connector)

    async with aclosing(rollouts(plan, gateway, connector)) as finished:
        async for one in finished: …

A few workers pull from one list, group by group, so that memory does not grow with the batch; a trainer's `pace` says when the next group
may begin. `plan.py` is what is wanted, `gates.py` bounds each phase, `ledger.py` keeps what is done, `closing.py` tells the gateway which
groups are complete. An attempt that failed by no fault of the agent's is followed by another one, later, with a session and a sandbox of
its own; a rollout that ended so for good may be asked for again at the gateway, while the batch runs or later. Where nothing
can go on (no sandbox can be made, the gateway is gone, the disk is full) the batch stops and says why; the same plan on the same folder
goes on with what is left. Called by `turngate batch`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
import shutil
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from turngate.client.gateway import GatewayClient, GatewayUnreachable, RequestRejected
from turngate.common.aio import run_to_completion
from turngate.errors import ConfigError, SandboxUnavailable, TurngateError
from turngate.rollout import retry_requests
from turngate.rollout.classify import recorded as as_recorded
from turngate.rollout.concurrency import Concurrency, Slot
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.group_closer import GroupCloser
from turngate.rollout.ledger import (
    AttemptEnded,
    AttemptStarted,
    FinishedRollout,
    Ledger,
    LedgerError,
    LedgerHeader,
    ReopenedRollout,
    RolloutClass,
    UnrecordedRollout,
    timestamp,
)
from turngate.rollout.outcome import Fault, Outcome, RolloutProgress
from turngate.rollout.plan import BatchPlan, batch_stream, describe_changes, group_name
from turngate.rollout.progress import BatchProgress, BatchProgressCallback
from turngate.rollout.retry_requests import RetryRequest
from turngate.rollout.rollout import Rollout
from turngate.rollout.summary import Summary, summarize
from turngate.rollout.throttle import Throttle, unthrottled
from turngate.store.outcomes import RecordedOutcome
from turngate.tasks.task import Task
from turngate.types import STALE, Json

log = logging.getLogger("turngate")
_LONGEST_S = 60.0  # between two attempts
_BACK_S = 15.0  # for a gateway that does not answer, before it is taken for gone
_TOLD = 2000  # characters of a message
_PROBE_S = 5.0  # for which an answer to "is it still there" holds
_TOLD_S = 5.0  # for the gateway to hear of the groups that are complete, where the batch could not go on
_LISTEN_S = 5.0  # before a gateway that could not be heard is tried again
_SOON_S = 2.0  # for an attempt to be over, before whoever asks for another one is told that it is not
_NOT_YET = "attempt {} is not over yet; what comes of the wish is decided when it is, and told in the batch's events"
_ENDING = "the batch is just ending; run it again on its folder, and it is taken up"
_RETRIED: tuple[RolloutClass, ...] = (
    "infrastructure fault",
    "cancelled",
    "stale",
)  # what may be asked for again: nobody judged it
_FEWEST_IN_A_ROW = 20  # attempts that all failed by no fault of an agent's, before the batch is stopped


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What there is by now."""

    batch: str
    folder: Path
    finished: tuple[FinishedRollout, ...]  # by round, task and index
    summary: Summary
    stopped: str = ""  # why it ended early; the same plan goes on

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.summary.overall.wanted


class _Todo(msgspec.Struct, frozen=True):
    """One rollout that is not finished."""

    id: str
    task: Task
    round: int
    index: int


async def run_batch(
    plan: BatchPlan,
    gateway: GatewayClient,
    connector: GatewayConnector,
    watch: BatchProgressCallback = lambda tally: None,
    *,
    throttle: Throttle = unthrottled,
) -> BatchResult:
    """To the end, or to where it has to stop. Being cancelled ends what runs, cleanly; the same plan goes on with the rest."""
    return await Batch(plan, gateway, connector, watch, throttle=throttle).run()


async def rollouts(
    plan: BatchPlan,
    gateway: GatewayClient,
    connector: GatewayConnector,
    watch: BatchProgressCallback = lambda tally: None,
    *,
    throttle: Throttle = unthrottled,
) -> AsyncIterator[FinishedRollout]:
    """The rollouts as they are finished, those of an earlier run first. Closing the iterator stops the batch.

    One that somebody asks for again after it was told is told once more: of two with one `rollout`, the higher `attempt` counts.
    """
    queue: asyncio.Queue[FinishedRollout | None] = asyncio.Queue()
    batch = Batch(plan, gateway, connector, watch, throttle=throttle, tell=queue.put_nowait)
    running = asyncio.create_task(batch.run())
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (one := await queue.get()) is not None:
            yield one
        result = await running
        if result.stopped:
            raise BatchStopped(result.stopped)
    finally:
        running.cancel()
        await run_to_completion(_gone(running))


class BatchStopped(TurngateError):
    """A batch cannot go on. What is finished stays finished."""

    kind = "batch_stopped"


class Batch:
    """Runs one plan. Made for one use. `result` says at any time what there is."""

    def __init__(
        self,
        plan: BatchPlan,
        gateway: GatewayClient,
        connector: GatewayConnector,
        watch: BatchProgressCallback = lambda tally: None,
        *,
        throttle: Throttle = unthrottled,
        tell: Callable[[FinishedRollout], None] = lambda finished: None,
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._connector = connector
        self._watch = watch
        self._throttle = throttle
        self._tell = tell
        self._closing = GroupCloser(gateway, plan.n, self._stop)
        self._ledger: Ledger | None = None
        self._gates = Concurrency(plan.bounds)
        self.progress = BatchProgress(total=plan.total, states=self._gates.states)
        self._fresh: deque[_Todo] = deque()  # of the group that has begun, those that nobody has taken yet
        self._all_given = False  # no group is left to begin
        self._slots: dict[asyncio.Task[object], Slot | None] = {}  # of the workers that are at something
        self._winding_up = False
        self._again: list[tuple[float, int, _Todo]] = []  # by when the next attempt is due
        self._numbers = itertools.count()
        self._under_way = 0  # attempts, and wishes of which nobody knows yet whether they make another one
        self._working = 0  # workers that look again for what is to be done
        self._at_work: dict[str, int] = {}  # by rollout, the attempt that a worker has not settled
        self._wished: set[str] = set()  # rollouts that this run has taken up because somebody asked
        self._deciding = asyncio.Lock()  # one wish after the other
        self._answering: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._stopped = ""
        self._invalid: Counter[str] = Counter()  # by task, rollouts that found it so
        self._valid: set[str] = set()  # tasks that were graded: whatever came after is not their fault
        self._in_a_row = 0
        self._probed = (0.0, "")
        self._probing = asyncio.Lock()
        self._batch = ""
        self._heard: int | None = (
            None  # the last of the events of this batch itself; None: what there was is not read yet
        )

    # ── the whole ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _opened(self) -> Ledger:
        """Being cancelled meanwhile leaves nothing locked."""
        opening = asyncio.ensure_future(asyncio.to_thread(Ledger.open, self._plan.folder))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await run_to_completion(_let_go(opening))
            raise

    async def run(self) -> BatchResult:
        ledger = self._ledger = await self._opened()
        beside = [asyncio.create_task(self._closing.run())]
        try:
            await self._agreed(ledger)
            await self._plan.backend.check()
            await self._plan.backend.sweep()
            await self._taken_up(ledger)
            beside.append(asyncio.create_task(self._listen()))
            await self._worked()
            if self._answering:
                await asyncio.wait(self._answering, timeout=_TOLD_S)
            if not await self._closing.flush(_TOLD_S if self._stopped else _BACK_S):
                self._stop(
                    "the gateway could not be told which groups are complete; taking the batch up again tells it"
                )
        except LedgerError as error:
            self._stop(error.message)
        finally:
            beside += self._answering
            for task in beside:
                task.cancel()
            await run_to_completion(_gone(*beside))
            await run_to_completion(ledger.close())
        return self.result

    async def wind_up(self) -> None:
        """Begin nothing more and end the agents that run, but grade what they have left already. `run` then returns what there is."""
        self._winding_up = True
        for worker, slot in self._slots.items():
            if slot is None or not slot.agent_is_done:
                worker.cancel()
        await self._change()

    @property
    def result(self) -> BatchResult:
        plan, order = self._plan, {task.id: n for n, task in enumerate(self._plan.tasks)}
        known = {} if self._ledger is None else self._ledger.known.finished
        finished = tuple(sorted(known.values(), key=lambda one: (one.round, order[one.task], one.index)))
        head = None if self._ledger is None else self._ledger.known.head
        return BatchResult(
            batch=self._batch,
            folder=plan.folder,
            finished=finished,
            summary=summarize(
                self._batch,
                tuple(order),
                plan.n,
                finished,
                rounds=plan.rounds,
                seconds=max((one.at for one in finished), default=0.0) - head.made if head and finished else 0.0,
                stopped=self._stopped,
            ),
            stopped=self._stopped,
        )

    async def _agreed(self, ledger: Ledger) -> None:
        """The folder is this batch's, or becomes so."""
        tasks = await asyncio.to_thread(self._plan.digests)
        terms = self._plan.terms()
        head = ledger.known.head
        if head is None:
            head = LedgerHeader(batch=self._plan.new_id(), terms=terms, tasks=tasks, made=timestamp())
            await ledger.add(head)
        elif told := describe_changes(head, terms, tasks):
            raise ConfigError(
                f"out: {ledger.folder} holds another batch ({'; '.join(told)}); choose another --out folder, or run it as it was",
                param="out",
            )
        known = (*ledger.known.finished.values(), *(late.finished for late in ledger.known.unrecorded.values()))
        begun = 1 + max((one.round for one in known), default=0)
        if begun > self._plan.rounds:
            raise ConfigError(
                f"rounds: {self._plan.rounds} is less than the {begun} that {ledger.folder} holds already",
                param="rounds",
            )
        self._batch = head.batch

    async def _taken_up(self, ledger: Ledger) -> None:
        """What an earlier run has left: outcomes that the gateway lacks are recorded there, finished rollouts count, attempts whose end
        nobody saw are ended."""
        known = ledger.known
        asked_for = await self._wishes_left() if known.attempts else {}
        granted = await self._reopened(asked_for)
        for finished in list(known.finished.values()):
            self._count(finished)
        for late in list(known.unrecorded.values()):
            await self._made_up_for(late)
        for begun in list(known.open.values()):
            await asyncio.to_thread(self._remove_work, begun.session)
            await self._closed(begun, "lost", "its runner ended before it did")
        for seq, asked in asked_for.items():
            await self._tell_asker(seq, *(asked.granted() if seq in granted else (False, self._no_retry(asked))))
        self.progress.before = self.progress.done
        if self.progress.before:
            self._note(f"{self.progress.before} of {self.progress.total} rollouts are finished already")
        self.progress.started = time.monotonic()
        self._watch(self.progress)

    # ── what others ask of it ───────────────────────────────────────────────────────────────────────────────────

    async def _wishes_left(self) -> dict[int, RetryRequest]:
        """What was asked for while nobody listened, by its place in the stream. A gateway that does not answer is found out by others."""
        try:
            async with asyncio.timeout(_BACK_S):
                return await self._caught_up()
        except TimeoutError:
            return {}

    async def _caught_up(self) -> dict[int, RetryRequest]:
        found, self._heard = await retry_requests.read_pending(self._gateway, self._batch)
        return found

    async def _reopened(self, asked_for: Mapping[int, RetryRequest]) -> set[int]:
        """Which of them are granted: rollouts that are done again, before anybody counts them as finished."""
        taken = set()
        for seq, asked in asked_for.items():
            if asked.rollout in self._books.known.finished and not self._no_retry(asked):
                await self._books.add(ReopenedRollout(rollout=asked.rollout, attempt=asked.attempt, at=timestamp()))
                self._note(f"{asked.rollout}: is tried again, as somebody asked")
                taken.add(seq)
        return taken

    async def _listen(self) -> None:
        """To who asks for another attempt of a rollout that is finished without having been judged."""
        while True:
            try:
                await self._gateway.announce(batch_stream(self._batch), "note", {"batch": self._batch, "listens": True})
                if self._heard is None:
                    for seq, asked in (await self._caught_up()).items():
                        self._consider(seq, asked)
                async for event in self._gateway.events(batch_stream(self._batch), self._heard or 0):
                    self._heard = event["seq"]
                    if (asked_now := retry_requests.parse_request(event)) is not None:
                        self._consider(event["seq"], asked_now)
            except TurngateError as error:
                log.debug("nobody can ask this batch for retries now: %s", error.message)
            await asyncio.sleep(_LISTEN_S)

    def _consider(self, seq: int, asked: RetryRequest) -> None:
        """Beside the listening: an attempt may take its time to end. The batch does not end before the wish is decided."""
        self._under_way += 1
        task = asyncio.create_task(self._answer(seq, asked))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, seq: int, asked: RetryRequest) -> None:
        """The page shows an attempt as over a little before the ledger has it, and a cancelled one while its agent is being ended."""
        try:
            if not await self._over_within(_SOON_S, asked):
                await self._tell_asker(seq, None, _NOT_YET.format(asked.attempt))
                await self._over_within(None, asked)
            async with self._deciding:
                taken, message = await self._decided(asked)
        except LedgerError as error:
            self._stop(error.message)
            return
        finally:
            self._under_way -= 1
            await self._change()
        await self._tell_asker(seq, taken, message)

    async def _over_within(self, limit_s: float | None, asked: RetryRequest) -> bool:
        """Whether the attempt is settled, as far as it will be."""
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: not (self._is_at_work(asked) and self._goes_on))
        except TimeoutError:
            return False
        return True

    def _is_at_work(self, asked: RetryRequest) -> bool:
        return self._at_work.get(asked.rollout) == asked.attempt

    async def _decided(self, asked: RetryRequest) -> tuple[bool | None, str]:
        """What is answered, once it is true. None: a later run decides."""
        if self._is_at_work(asked):
            return None, _ENDING
        if why := self._no_retry(asked):
            return False, why
        if not self._goes_on:
            return None, _ENDING
        await run_to_completion(self._begin_again(self._books.known.finished[asked.rollout]))
        return asked.granted()

    async def _tell_asker(self, seq: int, taken: bool | None, message: str) -> None:
        await retry_requests.send_reply(self._gateway, self._batch, seq, taken, message)

    async def _begin_again(self, one: FinishedRollout) -> None:
        self._wished.add(one.rollout)
        await self._books.add(ReopenedRollout(rollout=one.rollout, attempt=one.attempt, at=timestamp()))
        self.progress.remove(one)
        self._closing.reopened(one)
        task = next(task for task in self._plan.tasks if task.id == one.task)
        self._later(_Todo(one.rollout, task, one.round, one.index), 0.0)
        self._note(f"{one.rollout}: is tried again, as somebody asked")
        await self._change()

    def _no_retry(self, asked: RetryRequest) -> str:
        """Why a rollout is not tried again; empty: it can be."""
        known = self._books.known
        late = known.unrecorded.get(asked.rollout)
        one = late.finished if late is not None else known.finished.get(asked.rollout)
        if one is None:
            begun = asked.rollout in known.attempts
            return "it is not finished: it is tried again anyway" if begun else "it is not of this batch"
        if one.kind not in _RETRIED:
            return f"it has been judged: {one.kind}"
        return "" if one.attempt == asked.attempt else f"its last attempt was {one.attempt}, not {asked.attempt}"

    @property
    def _goes_on(self) -> bool:
        """Whether some worker is sure to look again for what is to be done."""
        return self._working > 0 and not (self._stopped or self._winding_up)

    async def _made_up_for(self, late: UnrecordedRollout) -> None:
        """The gateway hears what came of a rollout that an earlier run has seen to its end. Where that still cannot be, the batch stops."""
        one = late.finished
        deadline = time.monotonic() + _BACK_S
        while True:
            try:
                await self._gateway.seal(one.session, "error")  # most were, and stay as they are
                await self._gateway.record(one.session, late.recorded)
                return await self._finish(one)
            except GatewayUnreachable as error:
                if time.monotonic() > deadline:
                    return self._stop(_untold(one, error.message))
                await asyncio.sleep(0.5)
            except RequestRejected as refused:
                if refused.answered not in (404, 409):
                    return self._stop(_untold(one, refused.message))
                # Somebody has deleted the session, or recorded another outcome: what the gateway has counts.
                return await self._closed(_begun(one), "lost", refused.message)
            except TurngateError as error:
                return self._stop(_untold(one, error.message))

    async def _closed(self, begun: AttemptStarted, why: Literal["cancelled", "lost"], message: str) -> None:
        """The end of an attempt that was not seen to its end. Where the gateway has its outcome it was over, and counts: to run it
        again would make two of it."""
        shown = await self._cancelled_at_gateway(begun.session)
        recorded = (
            None if shown is None or shown["outcome"] is None else msgspec.convert(shown["outcome"], RecordedOutcome)
        )
        if recorded is None:
            await self._books.add(_ended(begun, why, message))
        elif recorded.kind == "infrastructure fault":
            await self._books.add(_ended(begun, "fault", recorded.message))
        else:
            await self._finish(_adopted(begun, recorded, shown))

    async def _cancelled_at_gateway(self, session: str) -> Json:
        """What the gateway has of it; None: it was never opened."""
        try:
            await self._gateway.cancel(session)
        except RequestRejected as refused:
            if refused.answered == 404:
                return None
            if refused.answered != 409:  # it has ended
                raise
        return await self._gateway.show(session)

    def _remove_work(self, session: str) -> None:
        if not self._plan.keep_work:
            shutil.rmtree(self._plan.folder / "rollouts" / session / "work", ignore_errors=True)

    async def _worked(self) -> None:
        """Workers until nothing is left to do, or something stops them."""
        count = min(self._plan.bounds.rollouts, self._plan.total - self.progress.before)
        self._working = count
        workers = [asyncio.create_task(self._work()) for _ in range(count)]
        stopping = asyncio.create_task(self._stopping.wait())
        supplying = asyncio.create_task(self._supply())
        try:
            running, others = {*workers}, {stopping, supplying}
            while running and not stopping.done():
                done, _ = await asyncio.wait(running | others, return_when=asyncio.FIRST_COMPLETED)
                running, others = running - done, others - done
                for one in done - {stopping}:
                    if not one.cancelled():  # as `wind_up` does
                        one.result()
        finally:
            for task in (stopping, supplying, *workers):
                task.cancel()
            await run_to_completion(_gone(stopping, supplying, *workers))

    async def _supply(self) -> None:
        """What is to be done, a group at a time: the next one when the last of the one before is taken, and its time has come."""
        finished = self._books.known.finished
        for ordinal, group in enumerate(self._groups()):
            left = [todo for todo in group if todo.id not in finished and todo.id not in self._wished]
            if not left:
                continue
            self.progress.held = True
            await self._paced(ordinal)
            self.progress.held, self.progress.round = False, left[0].round
            async with self._changed:
                self._fresh.extend(left)
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._fresh)
        self._all_given = True
        await self._change()

    async def _paced(self, ordinal: int) -> None:
        """Returns when a group may begin. One before it that nobody will hear of makes room for it."""
        closing = self._closing
        while True:
            closing.empty_group_added.clear()
            asked = asyncio.ensure_future(self._throttle(ordinal - closing.empty_groups))
            fewer = asyncio.create_task(closing.empty_group_added.wait())
            try:
                await asyncio.wait({asked, fewer}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
            finally:
                asked.cancel()
                fewer.cancel()
                await run_to_completion(_gone(asked, fewer))

    def _groups(self) -> Iterator[list[_Todo]]:
        """In the order in which they come, over all rounds."""
        for number in range(self._plan.rounds):
            for task in self._plan.ordered_tasks(number):
                group = group_name(self._batch, task.id, number)
                yield [_Todo(f"{group}.{index}", task, number, index) for index in range(self._plan.n)]

    # ── one worker ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _work(self) -> None:
        while (todo := await self._next()) is not None:
            me = asyncio.current_task()
            assert me is not None
            self._slots[me] = None
            try:
                await self._attempted(todo)
            except LedgerError as error:
                self._stop(error.message)
            finally:
                del self._slots[me]
                self._at_work.pop(todo.id, None)
                self._under_way -= 1
                await self._change()

    async def _next(self) -> _Todo | None:
        """A retry that is due, or the next of the list. While others are under way one of them may come back."""
        async with self._changed:
            while not (self._stopped or self._winding_up):
                due = self._again[0][0] - time.monotonic() if self._again else None
                if due is not None and due <= 0:
                    self._under_way += 1
                    return heapq.heappop(self._again)[2]
                if self._fresh:
                    self._under_way += 1
                    todo = self._fresh.popleft()
                    if not self._fresh:
                        self._changed.notify_all()
                    return todo
                if self._all_given and due is None and not self._under_way:
                    self._working -= 1
                    return None
                with suppress(TimeoutError):
                    async with asyncio.timeout(due):
                        await self._changed.wait()
        return None

    async def _change(self) -> None:
        self.progress.retrying = len(self._again)
        self._watch(self.progress)
        async with self._changed:
            self._changed.notify_all()

    async def _attempted(self, todo: _Todo) -> None:
        """One attempt, to its line in the ledger."""
        ledger = self._books
        if self._is_invalid(todo.task):
            await self._finish(_skipped(todo, self._invalid[todo.task.id]))
            return
        if full := self._disk_is_full():
            self._stop(full)
            return
        attempt = self._at_work[todo.id] = ledger.known.attempts.get(todo.id, 0) + 1
        begun = AttemptStarted(
            rollout=todo.id, round=todo.round, attempt=attempt, session=uuid.uuid4().hex, at=timestamp()
        )
        try:
            await ledger.add(begun)
            if full := self._disk_is_full():
                await ledger.add(_ended(begun, "cancelled", "the disk is full"))
                self._stop(full)
                return
            outcome = await self._run(todo, begun)
        except asyncio.CancelledError:
            if begun.rollout not in ledger.known.unrecorded:
                with suppress(TurngateError):  # then the next run will see to it
                    await run_to_completion(self._closed(begun, "cancelled", ""))
            raise
        # The gateway has the outcome by now, so the ledger has to have it too, whoever cancels.
        await run_to_completion(self._settled(todo, begun, outcome))
        if ledger.full:
            self._stop(self._disk_is_full())

    async def _run(self, todo: _Todo, begun: AttemptStarted) -> Outcome:
        order = self._plan.rollout_spec(todo.task, todo.index, self._batch, begun.attempt, todo.round)
        slot = self._gates.new_slot()
        me = asyncio.current_task()
        assert me is not None
        self._slots[me] = slot
        seen = 0

        def watched(progress: RolloutProgress) -> None:
            nonlocal seen
            self.progress.sampled(progress.sampled_tokens - seen)
            seen = progress.sampled_tokens
            self._watch(self.progress)

        rollout = Rollout(order, self._gateway, self._connector, watched, gate=slot, session=begun.session)
        try:
            outcome = await rollout.run()
        except asyncio.CancelledError:
            if _is_owed(rollout.outcome):
                with suppress(LedgerError):
                    await run_to_completion(self._put_off(todo, begun, rollout.outcome))
            raise
        except Exception as error:
            # A bug of ours costs this rollout, not the batch, and no agent is blamed for it.
            log.exception("rollout %s, attempt %d", todo.id, begun.attempt)
            outcome = rollout.outcome
            outcome.status, outcome.kind, outcome.reward = "error", "infrastructure fault", None
            outcome.fault = Fault("clean", "gateway", f"an error of turngate's own: {error!r}")
        finally:
            slot.leave()
        return outcome

    async def _settled(self, todo: _Todo, begun: AttemptStarted, outcome: Outcome) -> None:
        """Finished, or to be recorded when the gateway is back, or to be tried again."""
        if _is_owed(outcome):
            await self._put_off(todo, begun, outcome)
            self._stop(_untold(_finished(todo, begun, outcome), outcome.unrecorded))
            return
        await asyncio.to_thread(_kept, self._plan.folder / "rollouts" / begun.session, outcome)
        if outcome.stop == STALE and self._books.known.stale.get(todo.id, 0) < self._plan.stale_retries:
            await self._books.add(_ended(begun, "stale"))
            self._later(todo, 0.0)
            return
        if outcome.kind != "infrastructure fault":
            self._in_a_row = 0
            await self._finish(_finished(todo, begun, outcome))
            return
        message = _message(outcome)
        if why := await self._hopeless(message):
            # Not this rollout's failure: when that is mended it has all its attempts again.
            await self._books.add(_ended(begun, "cancelled", message))
            self._stop(why)
        elif (faults := self._books.known.faults.get(todo.id, 0)) < self._plan.retries:
            await self._books.add(_ended(begun, "fault", message))
            self._later(todo, min(_LONGEST_S, self._plan.back_off_s * 2**faults) * random.uniform(0.5, 1.5))
        else:
            await self._finish(_finished(todo, begun, outcome))

    async def _put_off(self, todo: _Todo, begun: AttemptStarted, outcome: Outcome) -> None:
        """All is known of it, but not by the gateway: no trainer has it before the batch is taken up again."""
        await asyncio.to_thread(_kept, self._plan.folder / "rollouts" / begun.session, outcome)
        late = UnrecordedRollout(
            finished=_finished(todo, begun, outcome), recorded=as_recorded(outcome), why=outcome.unrecorded[:_TOLD]
        )
        await self._books.add(late)

    def _later(self, todo: _Todo, wait_s: float) -> None:
        heapq.heappush(self._again, (time.monotonic() + wait_s, next(self._numbers), todo))

    async def _finish(self, finished: FinishedRollout) -> None:
        await self._books.add(finished)
        self._count(finished)
        if finished.kind == "invalid task" and self._invalid[finished.task] == self._plan.invalid_after:
            self._note(f"{finished.task}: invalid, and not tried any more: {finished.message}")

    def _count(self, finished: FinishedRollout) -> None:
        self.progress.add(finished)
        if finished.kind == "invalid task" and finished.attempt:
            self._invalid[finished.task] += 1
        elif finished.kind == "graded":
            self._valid.add(finished.task)
        self._closing.finished(finished)
        self._tell(finished)

    def _is_invalid(self, task: Task) -> bool:
        return self._invalid[task.id] >= self._plan.invalid_after and task.id not in self._valid

    # ── what stops a batch ──────────────────────────────────────────────────────────────────────────────────────

    async def _hopeless(self, message: str) -> str:
        """Why no other rollout could fare better now; empty: nothing is known that speaks against it."""
        self._in_a_row += 1
        if self._in_a_row >= max(_FEWEST_IN_A_ROW, 2 * self._plan.bounds.running):
            return f"the last {self._in_a_row} attempts all failed by no fault of an agent's, this one so: {message}"
        async with self._probing:
            at, found = self._probed
            if time.monotonic() - at > _PROBE_S:
                found = await self._probe()
                self._probed = time.monotonic(), found
            return found

    async def _probe(self) -> str:
        if full := self._disk_is_full():
            return full
        try:
            await self._plan.backend.check()
        except SandboxUnavailable as error:
            return f"no sandbox can be made: {error.message}"
        except TurngateError:
            pass  # for now
        deadline = time.monotonic() + _BACK_S
        while True:
            try:
                await self._gateway.check()
                return ""
            except GatewayUnreachable as error:
                if time.monotonic() > deadline:
                    return error.message
            except TurngateError as error:
                return error.message
            await asyncio.sleep(0.5)

    def _disk_is_full(self) -> str:
        """What is said of it; empty: there is room."""
        free = shutil.disk_usage(self._plan.folder).free
        if free >= self._plan.min_free_bytes and not self._books.full:
            return ""
        return f"{self._plan.folder}: the disk is full ({free / 1e6:.1f} MB are left); make room"

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._stopped = why
            self._note(f"stopping: {why}")
            self._stopping.set()

    def _note(self, text: str) -> None:
        self.progress.notes.append(text)
        self._watch(self.progress)

    @property
    def _books(self) -> Ledger:
        assert self._ledger is not None, "it is opened before there is anything to write"
        return self._ledger


def _message(outcome: Outcome) -> str:
    if outcome.fault is not None:
        return f"{outcome.fault.stage}: {outcome.fault.message}"
    return outcome.grade.message if outcome.grade is not None else ""


def _is_owed(outcome: Outcome) -> bool:
    """Whether the gateway has to hear of it yet. Faults of the infrastructure count in no group."""
    return bool(outcome.unrecorded) and outcome.kind != "infrastructure fault"


def _untold(one: FinishedRollout, why: str) -> str:
    return f"what came of {one.rollout} could not be recorded at the gateway ({why}); taking the batch up again does that first"


def _begun(one: FinishedRollout) -> AttemptStarted:
    return AttemptStarted(rollout=one.rollout, round=one.round, attempt=one.attempt, session=one.session, at=one.at)


def _finished(todo: _Todo, begun: AttemptStarted, outcome: Outcome) -> FinishedRollout:
    fault = outcome.fault
    return FinishedRollout(
        rollout=todo.id,
        task=todo.task.id,
        round=todo.round,
        index=todo.index,
        kind=_kind(outcome),
        reward=outcome.reward,
        resolved=None if outcome.grade is None else outcome.grade.resolved,
        attempt=begun.attempt,
        session=outcome.session,
        status=outcome.status,
        turns=outcome.turns,
        sampled_tokens=outcome.sampled_tokens,
        rows=outcome.rows,
        seconds=outcome.seconds,
        stage=fault.stage if fault else "",
        boundary=fault.boundary if fault else "",
        message=_message(outcome)[:_TOLD],
        at=timestamp(),
    )


def _kind(outcome: Outcome) -> RolloutClass:
    if outcome.kind is not None:
        return outcome.kind
    if outcome.status != "cancelled":
        return "not graded"
    return "stale" if outcome.stop == STALE else "cancelled"


def _adopted(begun: AttemptStarted, recorded: RecordedOutcome, shown: Json) -> FinishedRollout:
    """From what the gateway keeps. How long it took is not known."""
    return FinishedRollout(
        rollout=begun.rollout,
        task=recorded.task,
        round=begun.round,
        index=int(begun.rollout.rpartition(".")[2]),
        kind=recorded.kind,
        reward=recorded.reward,
        resolved=recorded.resolved,
        attempt=begun.attempt,
        session=begun.session,
        turns=shown["turns"],
        sampled_tokens=shown["sampled_tokens"],
        message=recorded.message[:_TOLD],
        at=timestamp(),
    )


def _skipped(todo: _Todo, times: int) -> FinishedRollout:
    return FinishedRollout(
        rollout=todo.id,
        task=todo.task.id,
        round=todo.round,
        index=todo.index,
        kind="invalid task",
        message=f"not tried: {times} rollouts of the task found it invalid",
        at=timestamp(),
    )


def _ended(
    begun: AttemptStarted, why: Literal["fault", "cancelled", "lost", "stale"], message: str = ""
) -> AttemptEnded:
    return AttemptEnded(
        rollout=begun.rollout,
        attempt=begun.attempt,
        session=begun.session,
        why=why,
        message=message[:_TOLD],
        at=timestamp(),
    )


def _kept(folder: Path, outcome: Outcome) -> None:
    """The whole outcome beside what the agent left. The ledger has what matters, so a full disk costs only this."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "outcome.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        outcome.notes = (*outcome.notes, f"{folder / 'outcome.json'} could not be written: {error.strerror}")


async def _gone(*tasks: asyncio.Future[Any]) -> None:
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def _let_go(opening: asyncio.Future[Ledger]) -> None:
    await asyncio.wait([opening])
    if opening.exception() is None:
        await opening.result().close()
