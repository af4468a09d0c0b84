"""The executor for a Ray cluster, without Ray: whatever happens to its calls, the shared store decides how an attempt ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from turngate.agents.spec import find_agent
from turngate.client.gateway import RequestRejected
from turngate.rollout import lost_attempts
from turngate.rollout.classify import Classification
from turngate.rollout.cluster import ray_cluster, ray_executor
from turngate.rollout.cluster.messages import OrderEnded, OrderProgress, RunnerSettings
from turngate.rollout.cluster.placement import CellLoad, Demand, RayNodeView
from turngate.rollout.cluster.ray_cluster import PlacedCell, RayCluster
from turngate.rollout.cluster.ray_executor import RayExecutor, adopt_outcome
from turngate.rollout.cluster.ray_nodes import CallFailed
from turngate.rollout.executor import AttemptResult, build_result, fail_attempt
from turngate.rollout.order import RolloutOrder, SandboxChoice, decode_order
from turngate.rollout.outcome import Fault, Outcome, RolloutProgress
from turngate.store.attempts import AttemptRow, AttemptState
from turngate.store.outcomes import RecordedOutcome
from turngate.tasks.archive import PackedTask
from turngate.tasks.task import Task

ORDER = RolloutOrder(
    rollout="b.t.0",
    attempt=1,
    group="b.t",
    session_id="s1",
    task=PackedTask(task=Task(id="t", instruction="Do it.")),
    agent=find_agent("mini-swe-agent").spec,
    sandbox=SandboxChoice(name="local"),
    model="m",
    timeout_s=60,
)
GRADED = RecordedOutcome(kind="graded", reward=1.0, task="t", group="b.t", data={"status": "finished"})


def graded() -> AttemptResult:
    return adopt_outcome(ORDER, GRADED, shown(GRADED))


def shown(outcome: RecordedOutcome | None, excluded: str = "") -> Any:
    counts = {"turns": 3, "sampled_tokens": 40, "training": None, "refused": None}
    return SimpleNamespace(id="s1", outcome=outcome, stop="", excluded=excluded, **counts)


class FakeConnection:
    """Stands for Ray: a call is a coroutine function, or an error."""

    async def call(self, reference: Callable[[], Any]) -> Any:
        return await reference()


class FakeActor:
    """Answers `run` from a script: a result, an error, or a function."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.orders: list[str] = []
        self.cancelled: list[str] = []
        self.cancel_errors: list[Exception] = []
        self.run = SimpleNamespace(remote=lambda order, archive: lambda: self._run(order))
        self.cancel = SimpleNamespace(remote=lambda session: lambda: self._cancel(session))
        self.progress_error = CallFailed("ActorUnavailableError")
        self.progress = SimpleNamespace(remote=lambda: self._report_progress)

    async def _report_progress(self) -> bytes:
        raise self.progress_error

    async def _run(self, order: bytes) -> bytes:
        self.orders.append(decode_order(order).session_id)
        reply = self.replies.pop(0)
        if callable(reply):
            reply = await reply()
        if isinstance(reply, Exception):
            raise reply
        return msgspec.json.encode(reply)

    async def _cancel(self, session: str) -> bytes:
        if self.cancel_errors:
            raise self.cancel_errors.pop()
        self.cancelled.append(session)
        return b""


class FakeStore:
    """Stands for the gateway on the shared store: an attempt with a lease, and perhaps an outcome."""

    def __init__(
        self,
        *,
        arrives_after: int = 0,
        lease_checks: int = 0,
        outcome: RecordedOutcome | None = GRADED,
        excluded: str = "",
    ) -> None:
        self.excluded = excluded
        self.looks, self.arrives_after = 0, arrives_after
        self.lease_checks, self.outcome = lease_checks, outcome
        self.superseded = False

    async def show(self, session: str) -> Any:
        self.looks += 1
        if self.outcome is None or self.looks <= self.arrives_after:
            raise RequestRejected("unknown session", 404)
        return shown(self.outcome, self.excluded)

    async def attempts(self, rollout: str) -> list[AttemptRow]:
        if self.outcome is None and not self.excluded:
            raise RequestRejected("unknown rollout", 404)
        return [AttemptRow(rollout, 1, "s1", "c1", "superseded" if self.excluded else "running", 1.0, None)]

    async def supersede(self, rollout: str, attempt: int, session: str) -> Any:
        if self.lease_checks > 0:
            self.lease_checks -= 1
            raise RequestRejected("the cell holds its lease", 409)
        state: AttemptState = "superseded" if self.outcome is None or self.excluded else "settled"
        self.superseded = self.outcome is None
        self.arrives_after = 0
        row = AttemptRow(rollout, attempt, session, "c1", state, 1.0, 2.0)
        return SimpleNamespace(attempt=row, outcome=self.outcome)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "_REPEAT_S", (0.0, 0.0))
    monkeypatch.setattr(ray_executor, "_CONFIRM_S", (0.0,))
    monkeypatch.setattr(lost_attempts, "_LEASE_CHECK_S", 0.0)


def make_cluster(actor: FakeActor) -> tuple[RayCluster, PlacedCell]:
    settings = RunnerSettings(shared="", name="", folder="", sandbox="local")
    cluster = RayCluster(FakeConnection(), settings, Demand(), 4, lambda text: None)  # type: ignore[arg-type]
    cell = PlacedCell(RayNodeView(id="n1", name="a"), actor, CellLoad(slots=4))
    cluster._cells["n1"] = cell
    return cluster, cell


async def execute(actor: FakeActor, store: FakeStore) -> tuple[AttemptResult, PlacedCell]:
    cluster, cell = make_cluster(actor)
    executor = RayExecutor(cluster, store, ())  # type: ignore[arg-type]
    attempt = executor.prepare(ORDER, lambda progress: None, lambda phase: nullcontext())  # type: ignore[arg-type, return-value]
    result = await attempt.run()
    assert cell.load.running == 0
    return result, cell


async def test_result_counts_once_the_shared_store_has_it() -> None:
    store = FakeStore(arrives_after=3)
    result, _ = await execute(FakeActor(OrderEnded("s1", graded())), store)
    assert result.verdict.kind == "graded" and result.outcome.reward == 1.0
    assert store.looks == 4 and not store.superseded


async def test_failed_call_is_repeated_with_the_same_session() -> None:
    actor = FakeActor(CallFailed("ActorUnavailableError"), OrderEnded("s1", graded()))
    result, cell = await execute(actor, FakeStore())
    assert actor.orders == ["s1", "s1"]
    assert result.verdict.kind == "graded" and not result.is_lost and not cell.load.is_closed


async def test_dead_actor_is_not_called_again() -> None:
    actor = FakeActor(CallFailed("ActorDiedError", actor_died=True))
    result, _ = await execute(actor, FakeStore(outcome=None))
    assert actor.orders == ["s1"] and result.is_lost


@pytest.mark.parametrize("actor_died", [True, False])
async def test_idle_cell_whose_actor_died_gets_no_orders(actor_died: bool) -> None:
    actor = FakeActor()
    actor.progress_error = CallFailed("ActorDiedError", actor_died=actor_died)
    cluster, cell = make_cluster(actor)
    await cluster._poll(cell)
    assert cell.is_lost == actor_died and cell.load.has_room != actor_died
    assert bool(cluster.cells) != actor_died, "a cell can be started on its node again"


async def test_lost_cell_is_superseded_only_after_its_lease() -> None:
    store = FakeStore(outcome=None, lease_checks=3)
    result, cell = await execute(FakeActor(*[CallFailed("ActorDiedError")] * 3), store)
    assert store.superseded and store.lease_checks == 0
    assert result.is_lost and result.verdict.kind == "infrastructure fault" and result.outcome.reward is None
    assert cell.load.is_closed, "a lost cell gets no more orders"


@pytest.mark.parametrize(
    ("fault", "is_refusal"),
    [
        (Fault("session", "gateway", "this cell cannot reach the shared store"), True),
        (Fault("agent", "engine", "no engine answers"), False),
        (Fault("sandbox", "sandbox", "no sandbox today"), False),
    ],
)
async def test_refused_order_uses_up_no_retry_and_the_cell_rests(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, is_refusal: bool
) -> None:
    monkeypatch.setattr(ray_cluster, "_REST_S", 0.05)
    result, cell = await execute(FakeActor(OrderEnded("s1", fail_attempt(ORDER, fault))), FakeStore(outcome=None))
    assert result.verdict.kind == "infrastructure fault" and result.is_lost == is_refusal
    assert cell.load.is_resting == is_refusal and cell.load.faults == (not is_refusal)
    await asyncio.sleep(0.1)
    assert cell.load.has_room, "it is used again after a while"


async def test_outcome_of_lost_cell_is_adopted() -> None:
    result, _ = await execute(FakeActor(*[CallFailed("ActorDiedError")] * 3), FakeStore())
    assert not result.is_lost and result.verdict.kind == "graded" and result.outcome.reward == 1.0
    assert result.outcome.session == "s1" and result.outcome.turns == 3


async def test_outcome_of_a_cell_that_was_taken_over_does_not_count() -> None:
    store = FakeStore(excluded="superseded")
    result, _ = await execute(FakeActor(OrderEnded("s1", graded())), store)
    assert result.is_lost and store.looks == 1, "the rollout runs again"


@pytest.mark.parametrize(
    ("store", "is_lost"),
    [(FakeStore(excluded="superseded"), True), (FakeStore(), False), (FakeStore(outcome=None), False)],
    ids=["its cell was taken over", "a person cancelled it", "the shared store does not know it"],
)
async def test_cancelled_rollout_runs_again_if_its_cell_was_taken_over(store: FakeStore, is_lost: bool) -> None:
    cancelled = build_result(ORDER, Classification(status="cancelled", kind="cancelled"))
    result, _ = await execute(FakeActor(OrderEnded("s1", cancelled)), store)
    assert result.is_lost == is_lost
    assert result.verdict.kind == ("infrastructure fault" if is_lost else "cancelled")


async def test_outcome_that_never_arrives_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "_SHIP_S", 0.02)
    result, _ = await execute(FakeActor(OrderEnded("s1", graded())), FakeStore(outcome=None))
    assert result.is_lost, "a result that only the lost cell has must not be counted"


async def test_outcome_of_a_draining_cell_is_awaited() -> None:
    actor = FakeActor(OrderEnded("s1", graded()))
    cluster, cell = make_cluster(actor)
    store = FakeStore(arrives_after=3)
    executor = RayExecutor(cluster, store, ())  # type: ignore[arg-type]
    async with cluster.take_slot():
        cell.load.is_closed = True
        attempt: Any = executor.prepare(ORDER, lambda progress: None, lambda phase: nullcontext())  # type: ignore[arg-type, return-value]
        result = await attempt._run_in(cell, [])
    assert result.verdict.kind == "graded" and store.looks == 4


async def test_unrecorded_outcome_is_settled_by_the_shared_store() -> None:
    ended = graded()
    ended.outcome.unrecorded = "the cell does not accept this now"
    result, _ = await execute(FakeActor(OrderEnded("s1", ended)), FakeStore(outcome=None))
    assert result.is_lost


async def test_fault_of_a_working_cell_is_a_fault() -> None:
    fault = fail_attempt(ORDER, Fault("sandbox", "sandbox", "no space left"))
    store = FakeStore(outcome=None)
    result, cell = await execute(FakeActor(OrderEnded("s1", fault)), store)
    assert result.verdict.kind == "infrastructure fault" and not result.is_lost and not store.superseded
    assert cell.load.faults == 1


@pytest.mark.parametrize("failures", [0, 1])
async def test_cancelled_attempt_ends_in_its_cell(failures: int) -> None:
    started = asyncio.Event()

    async def run() -> OrderEnded:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError("never ends")

    actor = FakeActor(run)
    actor.cancel_errors = [CallFailed("ActorUnavailableError")] * failures
    cluster, cell = make_cluster(actor)
    executor = RayExecutor(cluster, FakeStore(outcome=None), ())  # type: ignore[arg-type]
    attempt = executor.prepare(ORDER, lambda progress: None, lambda phase: nullcontext())  # type: ignore[arg-type, return-value]
    running = asyncio.create_task(attempt.run())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert actor.cancelled == ["s1"] and cell.load.running == 0
    assert actor.orders == ["s1"], "an order that did not reach the cell must not start now"


async def test_orders_wait_for_a_free_slot() -> None:
    cluster, cell = make_cluster(FakeActor())
    cell.load.slots = 1
    order: list[str] = []

    async def hold(name: str) -> None:
        async with cluster.take_slot():
            order.append(f"{name} starts")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    await asyncio.gather(hold("a"), hold("b"))
    assert order == ["a starts", "a ends", "b starts", "b ends"]


def test_result_travels_as_json() -> None:
    result = graded()
    result.outcome.seconds = {"agent": 1.5}
    sent = msgspec.json.encode(OrderEnded("s1", result))
    assert msgspec.json.decode(sent, type=OrderEnded).result == result


def test_progress_reaches_its_watcher() -> None:
    seen: list[RolloutProgress] = []
    cluster, _ = make_cluster(FakeActor())
    executor = RayExecutor(cluster, FakeStore(), ())  # type: ignore[arg-type]
    attempt: Any = executor.prepare(ORDER, seen.append, lambda phase: nullcontext())  # type: ignore[arg-type, return-value]
    attempt._follow(OrderProgress("s1", "agent", 2, 30))
    assert seen[0].turns == 2 and seen[0].sampled_tokens == 30
    assert isinstance(graded().outcome, Outcome)


@pytest.mark.parametrize(("polled", "reported"), [(0, [40]), (30, [30, 40]), (40, [40])])
async def test_tokens_since_the_last_poll_are_reported_at_the_end(polled: int, reported: list[int]) -> None:
    async def run() -> OrderEnded:
        if polled:
            cluster._watchers["s1"](OrderProgress("s1", "agent", 2, polled))
        return OrderEnded("s1", graded())

    seen: list[int] = []
    cluster, _ = make_cluster(FakeActor(run))
    executor = RayExecutor(cluster, FakeStore(), ())  # type: ignore[arg-type]
    watch = lambda progress: seen.append(progress.sampled_tokens)  # noqa: E731
    await executor.prepare(ORDER, watch, lambda phase: nullcontext()).run()  # type: ignore[arg-type, return-value]
    assert seen == reported


async def test_lost_attempt_keeps_the_reported_tokens() -> None:
    async def run() -> OrderEnded:
        cluster._watchers["s1"](OrderProgress("s1", "agent", 2, 30))
        raise CallFailed("ActorDiedError", actor_died=True)

    seen: list[int] = []
    cluster, _ = make_cluster(FakeActor(run))
    executor = RayExecutor(cluster, FakeStore(outcome=None), ())  # type: ignore[arg-type]
    watch = lambda progress: seen.append(progress.sampled_tokens)  # noqa: E731
    result = await executor.prepare(ORDER, watch, lambda phase: nullcontext()).run()  # type: ignore[arg-type, return-value]
    assert result.is_lost and seen == [30]
