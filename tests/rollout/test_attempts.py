"""Attempts at a rollout: however late an attempt returns, exactly one of them is in its group, its feed and the export."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.batch.kit import plan as build_plan
from tests.feed.kit import TrainingGateway, training
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import FeedConfig
from turngate.rollout.group_closer import GroupCloser
from turngate.rollout.ledger import AttemptStarted, FinishedRollout, UnrecordedRollout, timestamp
from turngate.rollout.lost_attempts import LostAttempts
from turngate.rollout.outcome import Outcome
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.rollout.recording import record_outcome
from turngate.rollout.resolve import PlanResolver
from turngate.rollout.results import BatchResults
from turngate.rollout.session import build_session_config
from turngate.rollout.stop_signal import StopSignal
from turngate.rollout.summary import summarize
from turngate.service.report import build_minimal_result
from turngate.service.result import RolloutState
from turngate.store.outcomes import RecordedOutcome
from turngate.tasks.archive import PackedTask
from turngate.trainers.export import ExportChoices, export

BATCH = "b"
GROUP = f"{BATCH}.well-0"
ROLLOUT = f"{GROUP}.0"


class Driver:
    """The part of a batch that starts attempts and settles lost ones, with its real ledger."""

    def __init__(self, gateway: GatewayClient, plan: BatchPlan) -> None:
        self.plan = plan
        self.gateway = gateway
        stop = StopSignal(lambda text: None)
        closer = GroupCloser(gateway, plan.n, stop.stop)
        self.results = BatchResults(
            plan, BatchProgress(total=plan.total), lambda progress: None, closer, lambda finished: None
        )
        self.lost = LostAttempts(gateway, self.results, stop)

    async def begin(self, attempt: int, index: int = 0) -> AttemptStarted:
        """Write the start of an attempt to the ledger, as the batch does before it opens the session."""
        rollout, session = f"{GROUP}.{index}", f"session-{index}-{attempt}"
        started = AttemptStarted(rollout=rollout, attempt=attempt, session=session, at=timestamp())
        await self.results.ledger.add(started)
        return started


class Runner:
    """One runner on one attempt, as `Rollout` calls the gateway."""

    def __init__(self, t: TrainingGateway, plan: BatchPlan, started: AttemptStarted) -> None:
        self._t, self._plan, self._started = t, plan, started

    async def open(self) -> None:
        index = int(self._started.rollout.rpartition(".")[2])
        packed = PackedTask(task=self._plan.tasks[0])
        order = self._plan.rollout_order(packed, index, BATCH, self._started.attempt)
        spec = await PlanResolver(self._plan).resolve(order)
        opened = await self._t.client.open(build_session_config(spec, GROUP), self._started.session)
        await self._t.g.ask(opened.key, "Hi")

    async def record(self, reward: float) -> str:
        """Seal the session and record a graded outcome. Return why it does not count."""
        recorded = RecordedOutcome(
            kind="graded", reward=reward, group=GROUP, task="well-0", attempt=self._started.attempt
        )
        return await record_outcome(self._t.client, self._started.session, recorded, wait_s=5)

    async def run(self, reward: float) -> None:
        await self.open()
        assert await self.record(reward) == ""


@asynccontextmanager
async def drive(folder: Path) -> AsyncIterator[tuple[TrainingGateway, Driver, Feed]]:
    """Run a gateway with a feed of groups of two, and a driver."""
    async with training(folder / "data", model="m") as t:
        driver = Driver(t.client, build_plan(folder / "out", folder / "s", ["well-0"], n=2))
        await driver.results.open()
        feed = await Feed.open(t.client, "train", FeedConfig(n=2))
        try:
            yield t, driver, feed
        finally:
            await driver.results.ledger.close()


def export_sessions(folder: Path) -> tuple[set[str], dict[str, int]]:
    """Return the sessions of which the export has rows, and what it left out."""
    out = folder / "rows.jsonl"
    result = export(folder / "data", out, ExportChoices(format="rows"))
    return {json.loads(line)["session"] for line in out.read_text().splitlines()}, dict(result.left_out)


@pytest.mark.parametrize("returns", ["before attempt 2", "before its outcome", "after its outcome"])
async def test_partitioned_attempt_and_its_retry_are_not_both_trained(returns: str, tmp_path: Path) -> None:
    """The runner of attempt 1 opens its session, is cut off, and returns after the driver has given the attempt up."""
    async with drive(tmp_path) as (t, driver, feed):
        first = Runner(t, driver.plan, one := await driver.begin(1))
        await first.open()
        await driver.lost.settle(one, "lost", "the runner does not respond")
        assert ROLLOUT not in driver.results.state.finished
        assert (await t.client.show("session-0-1")).status == "cancelled"
        if returns == "before attempt 2":
            assert "given up" in await first.record(1.0)
        second = Runner(t, driver.plan, await driver.begin(2))
        await second.open()
        if returns == "before its outcome":
            assert await first.record(1.0) == "superseded by attempt 2"
        await second.record(0.0)
        if returns == "after its outcome":
            assert await first.record(1.0) == "superseded by attempt 2"
        await Runner(t, driver.plan, await driver.begin(1, index=1)).run(1.0)

        delivery = await feed.next(5)
        assert delivery is not None and await feed.next(0) is None
        trained = ["session-0-2", "session-1-1"]
        assert [rollout.session for rollout in delivery.rollouts] == trained
        assert (await t.client.show_feed("train")).waiting == ()
        left_out = {"a rollout: superseded by attempt 2 (--unfinished includes it)": 1}
        assert export_sessions(tmp_path) == (set(trained), left_out)
        late = await t.client.show("session-0-1")  # kept, and marked
        assert late.outcome is not None and late.outcome.reward == 1.0
        assert late.excluded == "superseded by attempt 2"


async def test_superseded_attempt_cannot_be_opened_later(tmp_path: Path) -> None:
    """The request that opens attempt 1 arrives after the driver has given the attempt up."""
    async with drive(tmp_path) as (t, driver, feed):
        first = Runner(t, driver.plan, one := await driver.begin(1))
        await driver.lost.settle(one, "lost", "the runner does not respond")
        with pytest.raises(RequestRejected, match="superseded") as refused:
            await first.open()
        assert refused.value.answered == 409
        await Runner(t, driver.plan, await driver.begin(2)).run(0.0)
        await Runner(t, driver.plan, await driver.begin(1, index=1)).run(1.0)
        delivery = await feed.next(5)
        assert delivery is not None
        assert [rollout.session for rollout in delivery.rollouts] == ["session-0-2", "session-1-1"]


async def test_settling_adopts_an_outcome_that_is_already_recorded(tmp_path: Path) -> None:
    async with drive(tmp_path) as (t, driver, feed):
        first = Runner(t, driver.plan, one := await driver.begin(1))
        await first.run(1.0)
        await driver.lost.settle(one, "lost", "the runner does not respond")
        [finished] = driver.results.state.finished.values()
        assert (finished.rollout, finished.attempt, finished.reward) == (ROLLOUT, 1, 1.0)
        with pytest.raises(RequestRejected, match="already has an outcome") as refused:
            await Runner(t, driver.plan, await driver.begin(2)).open()
        assert refused.value.answered == 409
        await Runner(t, driver.plan, await driver.begin(1, index=1)).run(0.0)
        delivery = await feed.next(5)
        assert delivery is not None
        assert [rollout.session for rollout in delivery.rollouts] == ["session-0-1", "session-1-1"]


async def test_postponed_outcome_of_a_superseded_attempt_is_not_counted(tmp_path: Path) -> None:
    """The gateway did not respond when attempt 1 was done. Meanwhile, another runner opened attempt 2."""
    async with drive(tmp_path) as (t, driver, _):
        first = Runner(t, driver.plan, one := await driver.begin(1))
        await first.open()
        await t.client.open({"rollout": ROLLOUT, "attempt": 2}, "other")
        recorded = RecordedOutcome(kind="graded", reward=1.0, group=GROUP, task="well-0")
        finished = FinishedRollout(
            rollout=ROLLOUT, task="well-0", index=0, kind="graded", reward=1.0, attempt=1, session=one.session, at=1.0
        )
        await driver.lost.record(UnrecordedRollout(finished=finished, recorded=recorded, why="gone"))
        [settled] = driver.results.state.finished.values()
        assert (settled.kind, settled.reward, settled.message) == ("cancelled", None, "superseded by attempt 2")
        summary = summarize(BATCH, ["well-0"], 2, [settled])
        assert summary.messages["cancelled"] == [("superseded by attempt 2", 1)] and summary.overall.graded == 0
        kept = (await t.client.show(one.session)).outcome
        assert kept is not None and kept.reward == 1.0


def test_results_say_why_an_outcome_does_not_count() -> None:
    outcome = Outcome(task="t", agent="a", version="", sandbox="local", model="m", excluded="superseded by attempt 2")
    state = RolloutState(
        rollout_id="r", task_id="t", agent="a", model_key="m", model="m", mode="exact", status="finished", stage="done"
    )
    assert build_minimal_result(state, outcome, ()).excluded == outcome.exclusion == "superseded by attempt 2"
