"""A batch as a trainer runs it: several rounds, throttled by the trainer; complete groups are closed, stale rollouts run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests import kit
from tests.batch.kit import AGENT
from tests.batch.test_batch import Stage, open_stage
from tests.batch.test_storm import every_session
from tests.speed import paced, scaled
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.protocol import FeedConfig
from turngate.errors import ConfigError
from turngate.rollout.batch import run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.ledger import LEDGER_NAME, read_ledger
from turngate.rollout.throttle import TrainerThrottle

pytestmark = [pytest.mark.process, pytest.mark.full]


class FakeGroups:
    """Stands in for the gateway's ear for groups. `deaf`: so many times it cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deaf: int = 0) -> None:
        self.closed: list[str] = []
        self.deaf = deaf
        monkeypatch.setattr(GatewayClient, "close_group", self._close)

    async def _close(self, group: str) -> None:
        if self.deaf:
            self.deaf -= 1
            raise GatewayUnreachable("gateway: it is being started again")
        self.closed.append(group)


async def test_tasks_come_round_and_each_group_is_closed_once_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    told = FakeGroups(monkeypatch, deaf=2)
    async with open_stage() as stage:
        wanted = stage.plan("well-0", "sandbox-0", n=2, rounds=2, retries=0)
        result = await run_batch(wanted, stage.client, stage.connector)
        batch = result.batch
        groups = {f"{batch}.well-0", f"{batch}.sandbox-0", f"{batch}.well-0@1", f"{batch}.sandbox-0@1"}
        assert set(told.closed) == groups and len(told.closed) == 4, "also those that faults have shrunken"
        assert result.complete and [(one.round, one.task, one.index) for one in result.finished] == [
            (r, t, i) for r in range(2) for t in ("well-0", "sandbox-0") for i in range(2)
        ]
        sessions = (await every_session(stage.gateway)).values()
        assert Counter(s["config"]["metadata"]["group"] for s in sessions) == {
            f"{batch}.well-0": 2,
            f"{batch}.well-0@1": 2,
        }, "the gateway knows the group of each session from its beginning"
        assert [(r.round, r.wanted, r.graded) for r in result.summary.rounds] == [(0, 4, 2), (1, 4, 2)]

        # Taken up with more rounds: what there is counts, and the gateway hears of it again.
        told.closed.clear()
        more = await run_batch(msgspec.structs.replace(wanted, rounds=3), stage.client, stage.connector)
        assert more.complete and more.finished[:8] == result.finished and len(more.finished) == 12
        assert set(told.closed) == {*groups, f"{batch}.well-0@2", f"{batch}.sandbox-0@2"}
        with pytest.raises(ConfigError, match="rounds must be at least 3, not 1: "):
            await run_batch(msgspec.structs.replace(wanted, rounds=1), stage.client, stage.connector)


async def test_an_attempt_of_a_later_round_is_adopted_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGroups(monkeypatch)
    async with open_stage() as stage:
        wanted = stage.plan("well-0", n=1, rounds=2)
        first = await run_batch(wanted, stage.client, stage.connector)
        lines = (stage.out / LEDGER_NAME).read_bytes().splitlines(keepends=True)
        (stage.out / LEDGER_NAME).write_bytes(b"".join(lines[:-1]))
        again = await run_batch(wanted, stage.client, stage.connector)
        assert [(one.round, one.session) for one in again.finished] == [(o.round, o.session) for o in first.finished]


async def test_no_group_begins_before_its_pace_and_one_that_came_to_nothing_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = FakeGroups(monkeypatch)
    async with open_stage() as stage:
        pace = TrainerThrottle(2)
        asked: list[int] = []

        async def noted(number: int) -> None:
            asked.append(number)
            await pace(number)

        names = ("well-0", "sandbox-0", "well-1", "well-2")
        wanted = stage.plan(*names, n=1, retries=0, bounds=Bounds(running=4))
        batch = stage.batch(wanted, throttle=noted)
        running = asyncio.create_task(batch.run())
        await kit.until(lambda: len(told.closed) == 3, 60)
        await asyncio.sleep(0.1)
        assert {one.task for one in read_ledger(stage.out).finished.values()} == {"well-0", "sandbox-0", "well-1"}
        assert batch.progress.held, "the fourth waits, though there is room for agents"
        pace.mark_trained(1)
        result = await asyncio.wait_for(running, scaled(60))
        assert result.complete and asked in ([0, 1, 2, 1, 2], [0, 1, 1, 2]), asked


async def test_a_pace_that_fails_ends_the_batch_and_nothing_is_left() -> None:
    async with open_stage() as stage:

        async def broken(number: int) -> None:
            if number:
                raise RuntimeError("the trainer is gone")

        with pytest.raises(RuntimeError, match="the trainer is gone"):
            await run_batch(stage.plan("hang-0", "well-0", n=1), stage.client, stage.connector, throttle=broken)


def batch_of(group: str) -> str:
    return group.partition(".")[0]


async def test_a_trainer_gets_every_group_once_and_none_before_it_asks_for_more() -> None:
    """With a real feed. The groups of one task are lost to faults: no trainer hears of them, and the runner does not wait for that."""
    async with open_stage() as stage:
        wanted = stage.plan("well-0", "sandbox-0", n=2, rounds=2, retries=0)
        async with await Feed.open(stage.client, "train", FeedConfig(n=2)) as feed:
            pace = TrainerThrottle(1, trained=feed.committed)
            running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector, throttle=pace))
            seen = []
            async with asyncio.timeout(scaled(60)):
                async for delivery in feed:
                    begun = {rollout.rpartition(".")[0] for rollout in read_ledger(stage.out).attempts}
                    assert (f"{batch_of(delivery.group)}.well-0@1" in begun) == bool(seen), (
                        "not before the first is trained"
                    )
                    seen.append(delivery.group)
                    assert len(delivery.rollouts) == 2
                    await feed.commit(delivery.number)
                    pace.mark_trained(delivery.number)
                    if len(seen) == 2:
                        break
            result = await asyncio.wait_for(running, scaled(60))
        assert result.complete and seen == [f"{result.batch}.well-0", f"{result.batch}.well-0@1"]


async def test_a_policy_that_moves_on_makes_the_gateway_cancel_and_the_runner_run_again() -> None:
    async with open_stage() as stage:
        async with await Feed.open(stage.client, "train", FeedConfig(n=1, max_staleness=0)):
            wanted = stage.plan("hang-0", n=1, retries=0)
            # With a tool: a lone question might be a title, which is not trained.
            offering = AGENT.replace('"messages":', f'"tools": {[kit.tool()]!r}, "messages":')
            (stage.root / "s" / "agent.py").write_text(offering)
            batch = stage.batch(wanted)
            running = asyncio.create_task(batch.run())
            await kit.until(lambda: batch.progress.sampled_tokens > 0, 60)
            await stage.gateway.resume(1)
            [one] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (one.kind, one.attempt) == ("agent failed", 2), "the second time it ran out of its own time"
        assert read_ledger(stage.out).stale == {one.rollout: 1}


async def test_a_stale_rollout_is_run_again_though_it_had_met_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.agent_run.GRACE_S", paced(0.5))  # for the agent to end, which it does not
    twice = AGENT.replace("with socket", "for _ in range(2):\n  with socket").replace("sys.exit(1)", "pass")
    async with open_stage() as stage:
        async with await Feed.open(stage.client, "train", FeedConfig(n=1, max_staleness=0)):
            wanted = stage.plan("hang-0", n=1, retries=0, session={"limits": {"turns": 1}})
            offering = twice.replace('"messages":', f'"tools": {[kit.tool()]!r}, "messages":')
            (stage.root / "s" / "agent.py").write_text(offering)
            running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector))
            async with asyncio.timeout(scaled(60)):
                async for event in stage.client.events():
                    if event.kind == "limit":
                        break
            await stage.gateway.resume(1)
            [one] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (one.kind, one.attempt, one.status) == ("graded", 2, "limit"), (
            "of the new policy, it met its limit again"
        )
        assert read_ledger(stage.out).stale == {one.rollout: 1}


async def test_a_feed_can_take_the_groups_of_one_batch_and_leave_those_of_another() -> None:
    """Held-out tasks run beside the training, and no trainer gets them."""
    async with open_stage() as stage:
        async with await Feed.open(stage.client, "train", FeedConfig(n=1, groups="train.")) as feed:
            training = stage.plan("well-0", n=1, name="train")
            result = await run_batch(training, stage.client, stage.connector)
            for name in ("held-out", ""):
                beside = stage.plan("well-1", n=1, name=name)
                beside = msgspec.structs.replace(beside, folder=stage.root / f"beside{name}")
                assert (await run_batch(beside, stage.client, stage.connector)).complete
            delivery = await feed.next(scaled(10))
            assert delivery is not None and delivery.group == f"{result.batch}.well-0"
            assert delivery.group.startswith("train.") and await feed.next(0.2) is None
        with pytest.raises(ConfigError, match="name: was train, is now other"):
            await run_batch(msgspec.structs.replace(training, name="other"), stage.client, stage.connector)
        assert (await run_batch(training, stage.client, stage.connector)).finished == result.finished


async def stale_once_it_hangs(stage: Stage, times: int) -> None:
    """What the gateway does to sessions that cannot be fresh enough any more."""
    done: set[str] = set()
    while len(done) < times:
        await asyncio.sleep(0.02)
        for session_id, shown in (await every_session(stage.gateway)).items():
            turned = shown["status"] == "open" and (await stage.client.show(session_id)).turns
            if turned and session_id not in done:
                done.add(session_id)
                await stage.gateway.app.sessions.end(session_id, "cancelled", "stale")


@pytest.mark.parametrize(
    ("retries", "cancelled", "kind", "attempt"), [(0, 1, "stale", 1), (1, 1, "agent failed", 2), (1, 2, "stale", 2)]
)
async def test_a_stale_rollout_is_run_again_or_left_out_and_nobody_is_blamed(
    retries: int, cancelled: int, kind: str, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = FakeGroups(monkeypatch)
    async with open_stage() as stage:
        wanted = stage.plan("hang-0", n=1, retries=0, stale_retries=retries)
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector))
        await asyncio.wait_for(stale_once_it_hangs(stage, cancelled), scaled(60))
        [one] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (one.kind, one.attempt, one.reward) == (kind, attempt, None)
        assert read_ledger(stage.out).faults == {} and len(told.closed) == 1
        outcomes = [s["outcome"] for s in (await every_session(stage.gateway)).values() if s["stop"] == "stale"]
        assert outcomes == [None] * cancelled, "nothing was judged"


async def test_winding_up_ends_agents_and_grades_what_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGroups(monkeypatch)
    grading, go = asyncio.Event(), asyncio.Event()
    import turngate.rollout.rollout as one

    real = one.grade_with_retries

    async def slow(*given: Any) -> Any:
        grading.set()
        await go.wait()
        return await real(*given)

    monkeypatch.setattr(one, "grade_with_retries", slow)
    async with open_stage() as stage:
        wanted = stage.plan("well-0", "hang-0", "well-1", n=1, bounds=Bounds(running=1, warm=0, grading=1))
        batch = stage.batch(wanted)
        running = asyncio.create_task(batch.run())
        await asyncio.wait_for(grading.wait(), scaled(60))
        await kit.until(lambda: batch.progress.states["run"] == 1, 60)
        await batch.wind_up()
        await kit.until(lambda: batch.progress.states["run"] == 0, 60)
        go.set()
        result = await asyncio.wait_for(running, scaled(60))
        assert [(one.task, one.kind) for one in result.finished] == [("well-0", "graded")] and not result.complete
        assert read_ledger(stage.out).open == {}
        assert (await run_batch(wanted, stage.client, stage.connector)).complete
