"""Many rollouts: n of each task, through failures, crashes and Ctrl-C, each of them in exactly one class at the end.

    result = await run_batch(plan, gateway, wayout)

    async with aclosing(rollouts(plan, gateway, wayout)) as finished:
        async for one in finished: …

A few workers pull from one list, group by group, so that memory does not grow with the batch. `plan.py` is what is wanted, `gates.py`
bounds each phase, `ledger.py` keeps what is done. An attempt that failed by no fault of the agent's is followed by another one,
later, with a session and a sandbox of its own. Where nothing can go on (no sandbox can be made, the gateway is gone, the disk is
full) the batch stops and says why; the same plan on the same folder goes on with what is left. Called by `turngate batch`.
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
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from turngate.errors import ConfigError, SandboxUnavailable, TurngateError
from turngate.rollout.client import GatewayClient, Refused, Unreachable
from turngate.rollout.gates import Gates
from turngate.rollout.ledger import Begun, Ended, Finished, Head, Ledger, LedgerError, now
from turngate.rollout.one import Rollout
from turngate.rollout.outcome import Fault, Outcome, Progress
from turngate.rollout.plan import BatchPlan, differences
from turngate.rollout.summary import Summary, summed_up
from turngate.rollout.tally import Tally, Watch
from turngate.rollout.wayout import WayOut
from turngate.sandboxes.posix import to_the_end
from turngate.store.outcome import Recorded
from turngate.tasks.task import Task
from turngate.types import Json

log = logging.getLogger("turngate")
_LONGEST_S = 60.0  # between two attempts
_BACK_S = 15.0  # for a gateway that does not answer, before it is taken for gone
_TOLD = 2000  # characters of a message
_PROBE_S = 5.0  # for which an answer to "is it still there" holds
_FEWEST_IN_A_ROW = 20  # attempts that all failed by no fault of an agent's, before the batch is stopped


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What there is by now."""

    batch: str
    folder: Path
    finished: tuple[Finished, ...]  # by task and index
    summary: Summary
    stopped: str = ""  # why it ended early; the same plan goes on

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.summary.overall.wanted


class _Todo(msgspec.Struct, frozen=True):
    """One rollout that is not finished."""

    id: str
    task: Task
    index: int


async def run_batch(
    plan: BatchPlan, gateway: GatewayClient, wayout: WayOut, watch: Watch = lambda tally: None
) -> BatchResult:
    """To the end, or to where it has to stop. Being cancelled ends what runs, cleanly; the same plan goes on with the rest."""
    return await Batch(plan, gateway, wayout, watch).run()


async def rollouts(
    plan: BatchPlan, gateway: GatewayClient, wayout: WayOut, watch: Watch = lambda tally: None
) -> AsyncIterator[Finished]:
    """The rollouts as they are finished, those of an earlier run first. Closing the iterator stops the batch."""
    queue: asyncio.Queue[Finished | None] = asyncio.Queue()
    batch = Batch(plan, gateway, wayout, watch, tell=queue.put_nowait)
    running = asyncio.create_task(batch.run())
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (one := await queue.get()) is not None:
            yield one
        result = await running
        if result.stopped:
            raise Stopped(result.stopped)
    finally:
        running.cancel()
        await to_the_end(_gone(running))


class Stopped(TurngateError):
    """A batch cannot go on. What is finished stays finished."""

    kind = "batch_stopped"


class Batch:
    """Runs one plan. Made for one use. `result` says at any time what there is."""

    def __init__(
        self,
        plan: BatchPlan,
        gateway: GatewayClient,
        wayout: WayOut,
        watch: Watch = lambda tally: None,
        *,
        tell: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._wayout = wayout
        self._watch = watch
        self._tell = tell
        self._ledger: Ledger | None = None
        self._gates = Gates(plan.bounds)
        self.tally = Tally(total=plan.total, places=self._gates.places)
        self._fresh: Iterator[_Todo] = iter(())
        self._again: list[tuple[float, int, _Todo]] = []  # by when the next attempt is due
        self._numbers = itertools.count()
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._stopped = ""
        self._invalid: Counter[str] = Counter()  # by task, rollouts that found it so
        self._valid: set[str] = set()  # tasks that were graded: whatever came after is not their fault
        self._in_a_row = 0
        self._probed = (0.0, "")
        self._probing = asyncio.Lock()
        self._batch = ""

    # ── the whole ───────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> BatchResult:
        ledger = self._ledger = await asyncio.to_thread(Ledger.opened, self._plan.folder)
        try:
            await self._agreed(ledger)
            await self._plan.backend.check()
            await self._plan.backend.sweep()
            await self._taken_up(ledger)
            await self._worked()
        except LedgerError as error:
            self._stop(error.message)
        finally:
            await to_the_end(ledger.close())
        return self.result

    @property
    def result(self) -> BatchResult:
        plan, order = self._plan, {task.id: n for n, task in enumerate(self._plan.tasks)}
        known = {} if self._ledger is None else self._ledger.known.finished
        finished = tuple(sorted(known.values(), key=lambda one: (order[one.task], one.index)))
        head = None if self._ledger is None else self._ledger.known.head
        return BatchResult(
            batch=self._batch,
            folder=plan.folder,
            finished=finished,
            summary=summed_up(
                self._batch,
                tuple(order),
                plan.n,
                finished,
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
            head = Head(batch=uuid.uuid4().hex[:8], terms=terms, tasks=tasks, made=now())
            await ledger.add(head)
        elif told := differences(head, terms, tasks):
            raise ConfigError(
                f"out: {ledger.folder} holds another batch ({'; '.join(told)}); choose another --out folder, or run it as it was",
                param="out",
            )
        self._batch = head.batch

    async def _taken_up(self, ledger: Ledger) -> None:
        """What an earlier run has left: finished rollouts count, attempts whose end nobody saw are ended."""
        known = ledger.known
        for finished in known.finished.values():
            self._count(finished)
        for begun in list(known.open.values()):
            await asyncio.to_thread(self._remove_work, begun.session)
            await self._closed(begun, "lost", "its runner ended before it did")
        self.tally.before = self.tally.done
        if self.tally.before:
            self._note(f"{self.tally.before} of {self.tally.total} rollouts are finished already")
        self._fresh = (
            todo
            for task in self._plan.in_order()
            for index in range(self._plan.n)
            if (todo := _Todo(f"{self._batch}.{task.id}.{index}", task, index)).id not in known.finished
        )
        self.tally.started = time.monotonic()
        self._watch(self.tally)

    async def _closed(self, begun: Begun, why: Literal["cancelled", "lost"], message: str) -> None:
        """The end of an attempt that was not seen to its end. Where the gateway has its outcome it was over, and counts: to run it
        again would make two of it."""
        shown = await self._cancelled_at_gateway(begun.session)
        recorded = None if shown is None or shown["outcome"] is None else msgspec.convert(shown["outcome"], Recorded)
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
        except Refused as refused:
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
        count = min(self._plan.bounds.rollouts, self._plan.total - self.tally.before)
        workers = [asyncio.create_task(self._work()) for _ in range(count)]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            running = set(workers)
            while running and not stopping.done():
                done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                running -= done
                for one in done - {stopping}:
                    one.result()
        finally:
            for task in (stopping, *workers):
                task.cancel()
            await to_the_end(_gone(stopping, *workers))

    # ── one worker ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _work(self) -> None:
        while (todo := await self._next()) is not None:
            try:
                await self._attempted(todo)
            except LedgerError as error:
                self._stop(error.message)
            finally:
                self._under_way -= 1
                await self._change()

    async def _next(self) -> _Todo | None:
        """A retry that is due, or the next of the list. While others are under way one of them may come back."""
        async with self._changed:
            while not self._stopped:
                due = self._again[0][0] - time.monotonic() if self._again else None
                if due is not None and due <= 0:
                    self._under_way += 1
                    return heapq.heappop(self._again)[2]
                if (todo := next(self._fresh, None)) is not None:
                    self._under_way += 1
                    return todo
                if due is None and not self._under_way:
                    return None
                with suppress(TimeoutError):
                    async with asyncio.timeout(due):
                        await self._changed.wait()
        return None

    async def _change(self) -> None:
        self.tally.retrying = len(self._again)
        self._watch(self.tally)
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
        attempt = ledger.known.attempts.get(todo.id, 0) + 1
        begun = Begun(rollout=todo.id, attempt=attempt, session=uuid.uuid4().hex, at=now())
        try:
            await ledger.add(begun)
            if full := self._disk_is_full():
                await ledger.add(_ended(begun, "cancelled", "the disk is full"))
                self._stop(full)
                return
            outcome = await self._run(todo, begun)
        except asyncio.CancelledError:
            with suppress(TurngateError):  # then the next run will see to it
                await to_the_end(self._closed(begun, "cancelled", ""))
            raise
        # The gateway has the outcome by now, so the ledger has to have it too, whoever cancels.
        await to_the_end(self._settled(todo, begun, outcome))
        if ledger.full:
            self._stop(self._disk_is_full())

    async def _run(self, todo: _Todo, begun: Begun) -> Outcome:
        order = self._plan.order(todo.task, todo.index, self._batch, begun.attempt)
        ticket = self._gates.ticket()
        seen = 0

        def watched(progress: Progress) -> None:
            nonlocal seen
            self.tally.sampled(progress.sampled_tokens - seen)
            seen = progress.sampled_tokens
            self._watch(self.tally)

        rollout = Rollout(order, self._gateway, self._wayout, watched, gates=ticket, session=begun.session)
        try:
            outcome = await rollout.run()
        except Exception as error:
            # A bug of ours costs this rollout, not the batch, and no agent is blamed for it.
            log.exception("rollout %s, attempt %d", todo.id, begun.attempt)
            outcome = rollout.outcome
            outcome.status, outcome.kind, outcome.reward = "error", "infrastructure fault", None
            outcome.fault = Fault("clean", "gateway", f"an error of turngate's own: {error!r}")
        finally:
            ticket.leave()
        return outcome

    async def _settled(self, todo: _Todo, begun: Begun, outcome: Outcome) -> None:
        """Finished, or to be tried again."""
        await asyncio.to_thread(_kept, self._plan.folder / "rollouts" / begun.session, outcome)
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
            wait = min(_LONGEST_S, self._plan.back_off_s * 2**faults) * random.uniform(0.5, 1.5)
            heapq.heappush(self._again, (time.monotonic() + wait, next(self._numbers), todo))
        else:
            await self._finish(_finished(todo, begun, outcome))

    async def _finish(self, finished: Finished) -> None:
        await self._books.add(finished)
        self._count(finished)
        if finished.kind == "invalid task" and self._invalid[finished.task] == self._plan.invalid_after:
            self._note(f"{finished.task}: invalid, and not tried any more: {finished.message}")

    def _count(self, finished: Finished) -> None:
        self.tally.add(finished)
        if finished.kind == "invalid task" and finished.attempt:
            self._invalid[finished.task] += 1
        elif finished.kind == "graded":
            self._valid.add(finished.task)
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
            except Unreachable as error:
                if time.monotonic() > deadline:
                    return error.message
            except TurngateError as error:
                return error.message
            await asyncio.sleep(0.5)

    def _disk_is_full(self) -> str:
        """What is said of it; empty: there is room."""
        free = shutil.disk_usage(self._plan.folder).free
        if free >= self._plan.least_free and not self._books.full:
            return ""
        return f"{self._plan.folder}: the disk is full ({free / 1e6:.1f} MB are left); make room"

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._stopped = why
            self._note(f"stopping: {why}")
            self._stopping.set()

    def _note(self, text: str) -> None:
        self.tally.notes.append(text)
        self._watch(self.tally)

    @property
    def _books(self) -> Ledger:
        assert self._ledger is not None, "it is opened before there is anything to write"
        return self._ledger


def _message(outcome: Outcome) -> str:
    if outcome.fault is not None:
        return f"{outcome.fault.stage}: {outcome.fault.message}"
    return outcome.grade.message if outcome.grade is not None else ""


def _finished(todo: _Todo, begun: Begun, outcome: Outcome) -> Finished:
    fault = outcome.fault
    return Finished(
        rollout=todo.id,
        task=todo.task.id,
        index=todo.index,
        kind=outcome.kind or ("cancelled" if outcome.status == "cancelled" else "not graded"),
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
        at=now(),
    )


def _adopted(begun: Begun, recorded: Recorded, shown: Json) -> Finished:
    """From what the gateway keeps. How long it took is not known."""
    return Finished(
        rollout=begun.rollout,
        task=recorded.task,
        index=int(begun.rollout.rpartition(".")[2]),
        kind=recorded.kind,
        reward=recorded.reward,
        resolved=recorded.resolved,
        attempt=begun.attempt,
        session=begun.session,
        turns=shown["turns"],
        sampled_tokens=shown["sampled_tokens"],
        message=recorded.message[:_TOLD],
        at=now(),
    )


def _skipped(todo: _Todo, times: int) -> Finished:
    return Finished(
        rollout=todo.id,
        task=todo.task.id,
        index=todo.index,
        kind="invalid task",
        message=f"not tried: {times} rollouts of the task found it invalid",
        at=now(),
    )


def _ended(begun: Begun, why: Literal["fault", "cancelled", "lost"], message: str = "") -> Ended:
    return Ended(
        rollout=begun.rollout,
        attempt=begun.attempt,
        session=begun.session,
        why=why,
        message=message[:_TOLD],
        at=now(),
    )


def _kept(folder: Path, outcome: Outcome) -> None:
    """The whole outcome beside what the agent left. The ledger has what matters, so a full disk costs only this."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "outcome.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        outcome.notes = (*outcome.notes, f"{folder / 'outcome.json'} could not be written: {error.strerror}")


async def _gone(*tasks: asyncio.Task[object]) -> None:
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
