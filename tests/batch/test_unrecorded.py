"""Outcomes reach the gateway, however long that takes: no graded rollout is lost, and no agent runs twice for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests import kit
from tests.batch.test_batch import Stage, open_stage
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
    """A method of the gateway that fails `times` times. The gateway is real: its errors come over HTTP."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Any, verb: str, times: int, error: Exception) -> None:
        self.left, self.tried = times, 0
        self._real, self._error = getattr(of, verb), error
        monkeypatch.setattr(of, verb, self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.tried += 1
        if self.left:
            self.left -= 1
            raise self._error
        return self._real(*given, **named)


FULL = StoreError("the disk is full")
FOR_GOOD = 10**9


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", 1.0)
    monkeypatch.setattr("turngate.rollout.health.RESTART_S", paced(1.0))


async def run_plan(stage: Stage, n: int = 1) -> BatchResult:
    return await asyncio.wait_for(run_batch(stage.plan("well-0", n=n), stage.client, stage.connector), scaled(60))


async def test_a_gateway_that_cannot_write_for_a_moment_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", scaled(5.0))
    async with open_stage() as stage:
        feed = await Feed.open(
            stage.client, "train", FeedConfig(n=3)
        )  # so that it takes the closing to complete a group
        Failing(monkeypatch, stage.gateway.app.outcomes, "record", 1, FULL)
        Failing(monkeypatch, stage.gateway.app.feeds, "close_group", 1, FULL)
        result = await run_plan(stage, n=2)
        delivery = await feed.next(scaled(10))
        assert (result.complete, result.stopped) == (True, "")
        assert delivery is not None and len(delivery.rollouts) == 2


async def test_an_outcome_that_the_gateway_cannot_take_stops_the_batch_and_is_recorded_first_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_stage() as stage:
        feed = await Feed.open(stage.client, "train", FeedConfig(n=1))
        failing = Failing(monkeypatch, stage.gateway.app.outcomes, "record", FOR_GOOD, FULL)
        for _ in range(2):  # the second time it is still so
            result = await run_plan(stage)
            assert not result.complete and result.finished == ()
            assert (
                "could not be recorded at the gateway (gateway: the disk is full); resume the batch" in result.stopped
            )
            [late] = read_ledger(stage.out).unrecorded.values()
            assert read_ledger(stage.out).open == {} and late.finished.kind == "graded"
            assert (stage.out / "rollouts" / late.finished.session / "outcome.json").is_file()
        assert await feed.next(0.1) is None
        failing.left = 0
        result = await run_plan(stage)
        assert result.complete and result.stopped == "" and result.finished == (late.finished,)
        assert len(await every_session(stage.gateway)) == 1, "no agent ran again"
        delivery = await feed.next(scaled(10))
        assert delivery is not None
        assert [(one.session, one.reward) for one in delivery.rollouts] == [
            (late.finished.session, late.finished.reward)
        ]
        assert (await run_plan(stage)).finished == result.finished


async def test_a_runner_that_is_stopped_while_it_waits_for_the_gateway_does_not_forget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", 3600.0)
    async with open_stage() as stage:
        failing = Failing(monkeypatch, stage.gateway.app.outcomes, "record", FOR_GOOD, FULL)
        running = asyncio.create_task(run_plan(stage))
        await kit.until(lambda: failing.tried, 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(read_ledger(stage.out).unrecorded) == 1 and read_ledger(stage.out).open == {}
        failing.left = 0
        result = await run_plan(stage)
        assert result.complete and result.finished[0].attempt == 1
        assert len(await every_session(stage.gateway)) == 1


@pytest.mark.parametrize("meanwhile", ["deleted", "another outcome"])
async def test_what_the_gateway_has_counts_where_somebody_was_there_before(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage() as stage:
        failing = Failing(monkeypatch, stage.gateway.app.outcomes, "record", FOR_GOOD, FULL)
        await run_plan(stage)
        [late] = read_ledger(stage.out).unrecorded.values()
        failing.left = 0
        if meanwhile == "deleted":
            await stage.gateway.app.sessions.delete(late.finished.session)
        else:
            await stage.client.record(late.finished.session, RecordedOutcome(kind="graded", reward=0.25, task="well-0"))
        [one] = (await run_plan(stage)).finished
        assert read_ledger(stage.out).unrecorded == {}
        if meanwhile == "deleted":
            assert (one.attempt, one.kind) == (2, "graded"), "there is nothing left to record it beside"
        else:
            assert (one.attempt, one.session, one.reward) == (1, late.finished.session, 0.25)


async def test_an_agent_that_failed_early_is_recorded_though_its_session_could_not_be_ended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def missing(*given: Any) -> None:
        raise AgentError("there is no such program")

    monkeypatch.setattr("turngate.rollout.rollout.check_program", missing)
    monkeypatch.setattr("turngate.rollout.session.RESTART_S", scaled(5.0))
    async with open_stage() as stage:
        Failing(monkeypatch, stage.gateway.app.sessions, "seal", 2, FULL)
        [one] = (await run_plan(stage)).finished
        assert one.kind == "agent failed"
        shown = await stage.client.show(one.session)
        assert shown.outcome is not None and shown.outcome.kind == "agent failed"


async def test_a_group_that_the_gateway_refuses_to_close_stops_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stage() as stage:
        feed = await Feed.open(stage.client, "train", FeedConfig(n=2))
        Failing(monkeypatch, stage.gateway.app.feeds, "close_group", 1, BadRequest("no such thing"))
        result = await run_plan(stage)
        assert result.stopped == (f"the gateway rejected closing group {result.batch}.well-0: gateway: no such thing")
        assert await feed.next(0.1) is None
        assert (await run_plan(stage)).stopped == "", "the group is closed again"
        assert await feed.next(scaled(10)) is not None
