"""Outcomes that the gateway cannot record at first: no graded rollout is lost, and no agent runs twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests import kit
from tests.batch.test_batch import Harness, open_harness
from tests.batch.test_storm import every_session
from tests.speed import paced, scaled
from turngate.client.feed import Feed
from turngate.client.protocol import FeedConfig
from turngate.errors import AgentError, BadRequest, StoreError
from turngate.rollout.batch import BatchResult, run_batch
from turngate.rollout.ledger import read_ledger
from turngate.store.outcomes import RecordedOutcome

pytestmark = [pytest.mark.process, pytest.mark.full]


class Failing:
    """Makes a method of the real gateway fail `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Any, verb: str, times: int, error: Exception) -> None:
        self.left, self.tried = times, 0
        self._real, self._error = getattr(of, verb), error
        monkeypatch.setattr(of, verb, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.tried += 1
        if self.left:
            self.left -= 1
            raise self._error
        return self._real(*arguments, **named)


FULL = StoreError("the disk is full")
FOR_GOOD = 10**9


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", 1.0)
    monkeypatch.setattr("turngate.rollout.health.RESTART_S", paced(1.0))


async def run_plan(harness: Harness, n: int = 1) -> BatchResult:
    return await asyncio.wait_for(run_batch(harness.plan("well-0", n=n), harness.client, harness.connector), scaled(60))


async def test_brief_store_failure_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", scaled(5.0))
    async with open_harness() as harness:
        feed = await Feed.open(
            harness.client, "train", FeedConfig(n=3)
        )  # larger than the batch's group, which must therefore be closed
        Failing(monkeypatch, harness.gateway.app.outcomes, "record", 1, FULL)
        Failing(monkeypatch, harness.gateway.app.feeds, "close_group", 1, FULL)
        result = await run_plan(harness, n=2)
        delivery = await feed.next(scaled(10))
        assert (result.complete, result.stopped) == (True, "")
        assert delivery is not None and len(delivery.rollouts) == 2


async def test_unrecorded_outcome_stops_batch_and_is_recorded_on_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_harness() as harness:
        feed = await Feed.open(harness.client, "train", FeedConfig(n=1))
        failing = Failing(monkeypatch, harness.gateway.app.outcomes, "record", FOR_GOOD, FULL)
        for _ in range(2):  # resuming fails in the same way
            result = await run_plan(harness)
            assert not result.complete and result.finished == ()
            assert (
                "could not be recorded at the gateway (gateway: the disk is full); resume the batch" in result.stopped
            )
            [unrecorded] = read_ledger(harness.out).unrecorded.values()
            assert read_ledger(harness.out).open == {} and unrecorded.finished.kind == "graded"
            assert (harness.out / "rollouts" / unrecorded.finished.session / "outcome.json").is_file()
        assert await feed.next(0.1) is None
        failing.left = 0
        result = await run_plan(harness)
        assert result.complete and result.stopped == "" and result.finished == (unrecorded.finished,)
        assert len(await every_session(harness.gateway)) == 1, "an agent ran again"
        delivery = await feed.next(scaled(10))
        assert delivery is not None
        assert [(rollout.session, rollout.reward) for rollout in delivery.rollouts] == [
            (unrecorded.finished.session, unrecorded.finished.reward)
        ]
        assert (await run_plan(harness)).finished == result.finished


async def test_outcome_survives_cancellation_while_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", 3600.0)
    async with open_harness() as harness:
        failing = Failing(monkeypatch, harness.gateway.app.outcomes, "record", FOR_GOOD, FULL)
        running = asyncio.create_task(run_plan(harness))
        await kit.until(lambda: failing.tried, 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(read_ledger(harness.out).unrecorded) == 1 and read_ledger(harness.out).open == {}
        failing.left = 0
        result = await run_plan(harness)
        assert result.complete and result.finished[0].attempt == 1
        assert len(await every_session(harness.gateway)) == 1


@pytest.mark.parametrize("meanwhile", ["deleted", "another outcome"])
async def test_gateway_state_wins_over_unrecorded_outcome(meanwhile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_harness() as harness:
        failing = Failing(monkeypatch, harness.gateway.app.outcomes, "record", FOR_GOOD, FULL)
        await run_plan(harness)
        [unrecorded] = read_ledger(harness.out).unrecorded.values()
        failing.left = 0
        if meanwhile == "deleted":
            await harness.gateway.app.sessions.delete(unrecorded.finished.session)
        else:
            await harness.client.record(
                unrecorded.finished.session, RecordedOutcome(kind="graded", reward=0.25, task="well-0")
            )
        [rollout] = (await run_plan(harness)).finished
        assert read_ledger(harness.out).unrecorded == {}
        if meanwhile == "deleted":
            assert (rollout.attempt, rollout.kind) == (2, "graded"), "the session of the first attempt is gone"
        else:
            assert (rollout.attempt, rollout.session, rollout.reward) == (1, unrecorded.finished.session, 0.25)


async def test_early_agent_failure_is_recorded_after_seal_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def missing(*arguments: Any) -> None:
        raise AgentError("there is no such program")

    monkeypatch.setattr("turngate.rollout.rollout.check_program", missing)
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", scaled(5.0))
    async with open_harness() as harness:
        Failing(monkeypatch, harness.gateway.app.sessions, "seal", 2, FULL)
        [rollout] = (await run_plan(harness)).finished
        assert rollout.kind == "agent failed"
        shown = await harness.client.show(rollout.session)
        assert shown.outcome is not None and shown.outcome.kind == "agent failed"


async def test_refused_group_close_stops_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_harness() as harness:
        feed = await Feed.open(harness.client, "train", FeedConfig(n=2))
        Failing(monkeypatch, harness.gateway.app.feeds, "close_group", 1, BadRequest("no such thing"))
        result = await run_plan(harness)
        assert result.stopped == f"closing group {result.batch}.well-0 failed: gateway: no such thing"
        assert await feed.next(0.1) is None
        assert (await run_plan(harness)).stopped == "", "closing the group must be retried"
        assert await feed.next(scaled(10)) is not None
