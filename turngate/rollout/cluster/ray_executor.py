"""Run the attempts of a batch in the cells of a Ray cluster.

`RayCluster` decides in which cell an attempt runs. The shared store decides whether the outcome of an attempt counts:

    the call returned            wait until the shared store has the outcome, unless there is none to ship; if the outcome does not count,
                                 the attempt is lost
    the call failed              send the order again; a cell that already has the order does not run it twice
    the cell refused the order   the attempt is lost, and the cell gets no orders for a while
    the cell is lost             supersede the attempt once the lease of the cell has ended; adopt the outcome if the shared store has it,
                                 otherwise the attempt is lost

After a lost attempt, the batch starts another attempt at the rollout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import SessionInfo
from turngate.client.retry import retry_while_unreachable
from turngate.common.aio import run_to_completion
from turngate.rollout.classify import Classification
from turngate.rollout.cluster.messages import OrderEnded, OrderProgress
from turngate.rollout.cluster.ray_cluster import PlacedCell, RayCluster
from turngate.rollout.cluster.ray_nodes import CallFailed
from turngate.rollout.executor import Attempt, AttemptResult, build_result, fail_attempt
from turngate.rollout.lost_attempts import supersede_after_lease
from turngate.rollout.order import RolloutOrder, encode_order
from turngate.rollout.outcome import Fault, Outcome, PhaseGate, ProgressCallback, RolloutProgress
from turngate.rollout.results import is_unrecorded
from turngate.store.outcomes import RecordedOutcome
from turngate.store.projects import DEFAULT_PROJECT
from turngate.tasks.archive_cache import ArchiveCache
from turngate.tasks.grading.types import Grade
from turngate.tasks.task import Task

log = logging.getLogger("turngate")
_UNKNOWN = 404
_REPEAT_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # pauses before a failed call is repeated
_CONFIRM_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # pauses between queries of the shared store
_SHIP_S = 60.0  # an outcome that is not in the shared store after this time is treated as lost
_GATEWAY_S = 3600.0  # how long to wait for a shared store that does not answer


class RayExecutor:
    """Runs attempts in the cells of a Ray cluster. `gateway` serves the shared store. An empty `project` means the default project."""

    def __init__(self, cluster: RayCluster, gateway: GatewayClient, tasks: tuple[Task, ...], project: str = "") -> None:
        self._project = project
        self._cluster = cluster
        self._gateway = gateway
        self._archives = TaskArchives(cluster, tasks, project)

    async def check(self) -> None:
        await self._cluster.wait_for_cell()

    async def sweep(self) -> None:
        """Do nothing, because each cell removes the sandboxes that earlier cells on its machine left behind."""

    def prepare(self, order: RolloutOrder, watch: ProgressCallback, gate: PhaseGate) -> Attempt:
        order = msgspec.structs.replace(order, project=self._project)
        return _RayAttempt(order, self._cluster, SharedAttempts(self._gateway), self._archives, watch, gate)


class TaskArchives:
    """Stores the archives of a batch's tasks in Ray's object store, each only once."""

    def __init__(self, cluster: RayCluster, tasks: tuple[Task, ...], project: str) -> None:
        self._connection = cluster.connection
        self._tasks = {task.id: task for task in tasks}
        self._cache = ArchiveCache(project=project or DEFAULT_PROJECT)
        self._references: dict[str, Any] = {}  # by digest
        self._lock = asyncio.Lock()

    async def put(self, order: RolloutOrder) -> list[Any]:
        """Store the archive of an order's task, and return its reference in a list, because Ray would resolve a bare reference.

        If the task has no archive, the list is empty.
        """
        digest = order.task.archive
        if not digest:
            return []
        async with self._lock:
            if digest not in self._references:
                data = await asyncio.to_thread(self._read, order.task.task.id, digest)
                self._references[digest] = await asyncio.to_thread(self._connection.put, data)
        return [self._references[digest]]

    def _read(self, task: str, digest: str) -> bytes:
        if not self._cache.has(digest):
            self._cache.store(self._tasks[task])
        return self._cache.read(digest)


class SharedAttempts:
    """Reads attempts and their outcomes from the shared store, and supersedes attempts there."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    async def find_outcome(self, order: RolloutOrder) -> Literal["", "counts", "excluded"]:
        """Return `counts` or `excluded` for the outcome of an attempt, or "" if the shared store does not have the outcome yet.

        For example, an outcome is excluded if its cell was taken over before the outcome arrived.
        """
        try:
            shown = await retry_while_unreachable(lambda: self._gateway.show(order.session_id), limit_s=_GATEWAY_S)
        except RequestRejected as refused:
            if refused.answered == _UNKNOWN:
                return ""
            raise
        if shown.outcome is None:
            return ""
        return "excluded" if shown.excluded else "counts"

    async def is_superseded(self, order: RolloutOrder) -> bool:
        """Return whether an attempt was superseded. When a cell is taken over, all of its running attempts are superseded."""
        try:
            attempts = await retry_while_unreachable(lambda: self._gateway.attempts(order.rollout), limit_s=_GATEWAY_S)
        except RequestRejected as refused:
            if refused.answered == _UNKNOWN:
                return False
            raise
        return any(row.attempt == order.attempt and row.state == "superseded" for row in attempts)

    async def settle(self, order: RolloutOrder, message: str) -> AttemptResult:
        """Supersede an attempt once its cell's lease has ended, unless the attempt has an outcome.

        Return the recorded result, or a result marked as lost if the attempt is superseded.
        """
        settled = await retry_while_unreachable(
            lambda: supersede_after_lease(self._gateway, order.rollout, order.attempt, order.session_id),
            limit_s=_GATEWAY_S,
        )
        if settled.outcome is None or settled.attempt.state == "superseded":
            return lose_attempt(order, message)
        shown = await self._gateway.show(settled.attempt.session)
        return adopt_outcome(order, settled.outcome, shown)


class _RayAttempt:
    """One attempt, which runs in a cell of the cluster."""

    def __init__(
        self,
        order: RolloutOrder,
        cluster: RayCluster,
        shared: SharedAttempts,
        archives: TaskArchives,
        watch: ProgressCallback,
        gate: PhaseGate,
    ) -> None:
        self._order = order
        self._cluster = cluster
        self._shared = shared
        self._archives = archives
        self._watch = watch
        self._gate = gate
        self._progress = RolloutProgress(session=order.session_id, started=time.time())

    @property
    def result(self) -> AttemptResult | None:
        return None  # unknown here: the outcome is in the shared store, or the attempt is superseded

    async def run(self) -> AttemptResult:
        archive = await self._archives.put(self._order)
        async with self._gate("run"), self._cluster.take_slot() as cell:
            self._cluster.watch(self._order.session_id, self._follow)
            try:
                result = await self._run_in(cell, archive)
            finally:
                self._cluster.watch(self._order.session_id, None)
            self._report_total(result.outcome)
            if _is_refusal(result):
                self._cluster.rest(cell)
                return msgspec.structs.replace(result, is_lost=True)
            cell.load.count_result(is_fault=result.verdict.kind == "infrastructure fault")
            return result

    def _follow(self, progress: OrderProgress) -> None:
        self._report(progress.turns, progress.sampled_tokens)

    def _report(self, turns: int, sampled_tokens: int) -> None:
        self._progress.turns, self._progress.sampled_tokens = turns, sampled_tokens
        self._watch(self._progress)

    def _report_total(self, outcome: Outcome) -> None:
        """Report the final totals if the last poll of the cell missed tokens. The outcome of a lost attempt has no tokens."""
        if outcome.sampled_tokens > self._progress.sampled_tokens:
            self._report(outcome.turns, outcome.sampled_tokens)

    async def _run_in(self, cell: PlacedCell, archive: list[Any]) -> AttemptResult:
        try:
            ended = await self._call(cell, archive)
        except asyncio.CancelledError:
            await run_to_completion(self._cancel(cell))
            raise
        except CallFailed as error:
            self._cluster.mark_dead(cell, error.message)
            return await self._shared.settle(self._order, f"the cell on {cell.node.name} was lost: {error.message}")
        if ended.result is None:
            return await self._shared.settle(self._order, f"the cell on {cell.node.name} returned no result")
        return await self._confirm(ended.result, cell)

    async def _call(self, cell: PlacedCell, archive: list[Any]) -> OrderEnded:
        """Send the order to the cell, and return the reply. The cell runs the order only once, even if the call is repeated."""
        data = encode_order(self._order)
        reply = await self._repeat(cell, lambda: cell.actor.run.remote(data, archive))
        return msgspec.json.decode(reply, type=OrderEnded)

    async def _repeat(self, cell: PlacedCell, call: Callable[[], Any]) -> Any:
        """Return the reply to a call of the cell's actor. Unless the actor has died, repeat a failed call a few times."""
        for pause in (*_REPEAT_S, None):
            try:
                return await self._cluster.connection.call(call())
            except CallFailed as error:
                if pause is None or error.actor_died:
                    raise
                log.warning("a call to the cell on %s failed (%s); repeating it", cell.node.name, error.message)
                await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _confirm(self, result: AttemptResult, cell: PlacedCell) -> AttemptResult:
        """Wait until the shared store has the outcome, if there is one to ship, and return the result.

        A group must not be closed before its outcomes have arrived. If this outcome does not arrive in time or does not count, settle the
        attempt.
        """
        outcome = result.outcome
        if result.verdict.kind == "cancelled" and await self._shared.is_superseded(self._order):
            # Not cancelled by the caller: a cell that was taken over cancels its sessions when it reaches the shared store again.
            return lose_attempt(self._order, f"the cell on {cell.node.name} was taken over")
        if outcome.kind is None or outcome.kind == "infrastructure fault":
            return result  # nothing to ship
        deadline = time.monotonic() + _SHIP_S
        pauses = iter(_CONFIRM_S)
        while not is_unrecorded(outcome) and time.monotonic() < deadline and not cell.is_lost:
            found = await self._shared.find_outcome(self._order)
            if found == "counts":
                return result
            if found == "excluded":
                break
            await asyncio.sleep(next(pauses, _CONFIRM_S[-1]))
        settled = await self._shared.settle(self._order, f"the shared store has no valid outcome from {cell.node.name}")
        return result if settled.outcome.kind == outcome.kind else settled

    async def _cancel(self, cell: PlacedCell) -> None:
        """Cancel the order in its cell, and wait until it has ended. A cell that does not have the order yet does not start it later."""
        try:
            await self._repeat(cell, lambda: cell.actor.cancel.remote(self._order.session_id))
        except CallFailed as error:
            log.warning(
                "could not confirm that rollout %s on %s was cancelled: %s",
                self._order.rollout,
                cell.node.name,
                error.message,
            )


def _is_refusal(result: AttemptResult) -> bool:
    """Return whether the cell's gateway refused to open the session. It does so, for example, while the cell has no lease."""
    fault = result.outcome.fault
    return fault is not None and fault.stage == "session" and fault.boundary == "gateway"


def lose_attempt(order: RolloutOrder, message: str) -> AttemptResult:
    """Build the result of a lost attempt."""
    failed = fail_attempt(order, Fault("agent", "sandbox", message))
    return msgspec.structs.replace(failed, is_lost=True)


def adopt_outcome(order: RolloutOrder, recorded: RecordedOutcome, shown: SessionInfo) -> AttemptResult:
    """Build the result of an attempt from its record in the shared store. The durations of its stages are unknown."""
    grade = Grade(kind=recorded.kind, reward=recorded.reward, resolved=recorded.resolved, message=recorded.message)
    verdict = Classification(
        status=recorded.data.get("status", "finished"),
        kind=recorded.kind,
        grade=grade,
        stop=shown.stop,
        retry="fault" if recorded.kind == "infrastructure fault" else "",
    )
    result = build_result(order, verdict)
    outcome = result.outcome
    outcome.session, outcome.turns, outcome.sampled_tokens = shown.id, shown.turns, shown.sampled_tokens
    outcome.training, outcome.refused = shown.training, shown.refused
    return result
