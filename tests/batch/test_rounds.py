"""A batch for a trainer: several rounds at the trainer's pace. Complete groups are closed, and stale rollouts run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests import kit
from tests.batch.kit import AGENT
from tests.batch.test_batch import Harness, open_harness
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
    """Records closed groups instead of the gateway. The first `failures` calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> None:
        self.closed: list[str] = []
        self.failures = failures
        monkeypatch.setattr(GatewayClient, "close_group", self._close)

    async def _close(self, group: str) -> None:
        if self.failures:
            self.failures -= 1
            raise GatewayUnreachable("gateway: it is being started again")
        self.closed.append(group)


async def test_each_group_of_each_round_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGroups(monkeypatch, failures=2)
    async with open_harness() as harness:
        plan = harness.plan("well-0", "sandbox-0", n=2, rounds=2, retries=0)
        result = await run_batch(plan, harness.client, harness.connector)
        batch = result.batch
        groups = {f"{batch}.well-0", f"{batch}.sandbox-0", f"{batch}.well-0@1", f"{batch}.sandbox-0@1"}
        assert set(fake.closed) == groups and len(fake.closed) == 4, "groups with faults must be closed too"
        assert result.complete and [(rollout.round, rollout.task, rollout.index) for rollout in result.finished] == [
            (r, t, i) for r in range(2) for t in ("well-0", "sandbox-0") for i in range(2)
        ]
        sessions = (await every_session(harness.gateway)).values()
        assert Counter(s["config"]["metadata"]["group"] for s in sessions) == {
            f"{batch}.well-0": 2,
            f"{batch}.well-0@1": 2,
        }, "each session must be opened with its group"
        assert [(r.round, r.wanted, r.graded) for r in result.summary.rounds] == [(0, 4, 2), (1, 4, 2)]

        # Resume with more rounds: finished rollouts count, and their groups are closed again.
        fake.closed.clear()
        more = await run_batch(msgspec.structs.replace(plan, rounds=3), harness.client, harness.connector)
        assert more.complete and more.finished[:8] == result.finished and len(more.finished) == 12
        assert set(fake.closed) == {*groups, f"{batch}.well-0@2", f"{batch}.sandbox-0@2"}
        with pytest.raises(ConfigError, match="rounds must be at least 3, not 1: "):
            await run_batch(msgspec.structs.replace(plan, rounds=1), harness.client, harness.connector)


async def test_attempt_of_later_round_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGroups(monkeypatch)
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=1, rounds=2)
        first = await run_batch(plan, harness.client, harness.connector)
        lines = (harness.out / LEDGER_NAME).read_bytes().splitlines(keepends=True)
        (harness.out / LEDGER_NAME).write_bytes(b"".join(lines[:-1]))
        again = await run_batch(plan, harness.client, harness.connector)
        assert [(rollout.round, rollout.session) for rollout in again.finished] == [
            (o.round, o.session) for o in first.finished
        ]


async def test_groups_wait_for_throttle_and_failed_group_frees_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeGroups(monkeypatch)
    async with open_harness() as harness:
        throttle = TrainerThrottle(2)
        requested: list[int] = []

        async def record(number: int) -> None:
            requested.append(number)
            await throttle(number)

        names = ("well-0", "sandbox-0", "well-1", "well-2")
        plan = harness.plan(*names, n=1, retries=0, bounds=Bounds(running=4))
        batch = harness.batch(plan, throttle=record)
        running = asyncio.create_task(batch.run())
        await kit.until(lambda: len(fake.closed) == 3, 60)
        await asyncio.sleep(0.1)
        assert {rollout.task for rollout in read_ledger(harness.out).finished.values()} == {
            "well-0",
            "sandbox-0",
            "well-1",
        }
        assert batch.progress.held, "the fourth group must wait although agents could run"
        throttle.mark_trained(1)
        result = await asyncio.wait_for(running, scaled(60))
        assert result.complete and requested in ([0, 1, 2, 1, 2], [0, 1, 1, 2]), requested


def test_throttle_must_allow_one_group() -> None:
    with pytest.raises(ConfigError, match="max_ahead must be at least 1, not 0"):
        TrainerThrottle(0)


async def test_failing_throttle_ends_batch_and_cleans_up() -> None:
    async with open_harness() as harness:

        async def broken(number: int) -> None:
            if number:
                raise RuntimeError("the trainer is gone")

        with pytest.raises(RuntimeError, match="the trainer is gone"):
            await run_batch(harness.plan("hang-0", "well-0", n=1), harness.client, harness.connector, throttle=broken)


def batch_of(group: str) -> str:
    return group.partition(".")[0]


async def test_trainer_receives_every_group_once_at_its_pace() -> None:
    """Use a real feed. The groups of one task are lost to faults: they are not delivered, and the runner does not wait for them."""
    async with open_harness() as harness:
        plan = harness.plan("well-0", "sandbox-0", n=2, rounds=2, retries=0)
        async with await Feed.open(harness.client, "train", FeedConfig(n=2)) as feed:
            throttle = TrainerThrottle(1, trained=feed.committed)
            running = asyncio.create_task(run_batch(plan, harness.client, harness.connector, throttle=throttle))
            seen = []
            async with asyncio.timeout(scaled(60)):
                async for delivery in feed:
                    started = {rollout.rpartition(".")[0] for rollout in read_ledger(harness.out).attempts}
                    assert (f"{batch_of(delivery.group)}.well-0@1" in started) == bool(seen), (
                        "the second round started before the first group was trained"
                    )
                    seen.append(delivery.group)
                    assert len(delivery.rollouts) == 2
                    await feed.commit(delivery.number)
                    throttle.mark_trained(delivery.number)
                    if len(seen) == 2:
                        break
            result = await asyncio.wait_for(running, scaled(60))
        assert result.complete and seen == [f"{result.batch}.well-0", f"{result.batch}.well-0@1"]


async def test_rollout_made_stale_by_new_policy_runs_again() -> None:
    async with open_harness() as harness:
        async with await Feed.open(harness.client, "train", FeedConfig(n=1, max_staleness=0)):
            plan = harness.plan("hang-0", n=1, retries=0)
            # Offer a tool: a single question might be taken for a title, which is not trained.
            offering = AGENT.replace('"messages":', f'"tools": {[kit.tool()]!r}, "messages":')
            (harness.root / "s" / "agent.py").write_text(offering)
            batch = harness.batch(plan)
            running = asyncio.create_task(batch.run())
            await kit.until(lambda: batch.progress.sampled_tokens > 0, 60)
            await harness.gateway.resume(1)
            [rollout] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (rollout.kind, rollout.attempt) == ("agent failed", 2), "the second attempt must time out"
        assert read_ledger(harness.out).stale == {rollout.rollout: 1}


async def test_stale_rollout_at_its_limit_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # The agent does not end within the grace period.
    monkeypatch.setattr("turngate.rollout.agent_run.GRACE_S", paced(0.5))
    two_calls = AGENT.replace("with socket", "for _ in range(2):\n  with socket").replace("sys.exit(1)", "pass")
    async with open_harness() as harness:
        async with await Feed.open(harness.client, "train", FeedConfig(n=1, max_staleness=0)):
            plan = harness.plan("hang-0", n=1, retries=0, session={"limits": {"turns": 1}})
            offering = two_calls.replace('"messages":', f'"tools": {[kit.tool()]!r}, "messages":')
            (harness.root / "s" / "agent.py").write_text(offering)
            running = asyncio.create_task(run_batch(plan, harness.client, harness.connector))
            async with asyncio.timeout(scaled(60)):
                async for event in harness.client.events():
                    if event.kind == "limit":
                        break
            await harness.gateway.resume(1)
            [rollout] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (rollout.kind, rollout.attempt, rollout.status) == ("graded", 2, "limit"), (
            "the second attempt must reach its limit"
        )
        assert read_ledger(harness.out).stale == {rollout.rollout: 1}


async def test_feed_filters_groups_by_batch() -> None:
    """Held-out tasks run during training and are not delivered to the trainer."""
    async with open_harness() as harness:
        async with await Feed.open(harness.client, "train", FeedConfig(n=1, groups="train.")) as feed:
            training = harness.plan("well-0", n=1, name="train")
            result = await run_batch(training, harness.client, harness.connector)
            for name in ("held-out", ""):
                beside = harness.plan("well-1", n=1, name=name)
                beside = msgspec.structs.replace(beside, folder=harness.root / f"beside{name}")
                assert (await run_batch(beside, harness.client, harness.connector)).complete
            delivery = await feed.next(scaled(10))
            assert delivery is not None and delivery.group == f"{result.batch}.well-0"
            assert delivery.group.startswith("train.") and await feed.next(0.2) is None
        with pytest.raises(ConfigError, match="name: was train, is now other"):
            await run_batch(msgspec.structs.replace(training, name="other"), harness.client, harness.connector)
        assert (await run_batch(training, harness.client, harness.connector)).finished == result.finished


async def mark_hanging_sessions_stale(harness: Harness, times: int) -> None:
    """Cancel running sessions as stale, as the gateway does."""
    done: set[str] = set()
    while len(done) < times:
        await asyncio.sleep(0.02)
        for session_id, shown in (await every_session(harness.gateway)).items():
            has_turns = shown["status"] == "open" and (await harness.client.show(session_id)).turns
            if has_turns and session_id not in done:
                done.add(session_id)
                await harness.gateway.app.sessions.end(session_id, "cancelled", "stale")


@pytest.mark.parametrize(
    ("retries", "cancelled", "kind", "attempt"), [(0, 1, "stale", 1), (1, 1, "agent failed", 2), (1, 2, "stale", 2)]
)
async def test_stale_rollout_is_retried_or_excluded_without_fault(
    retries: int, cancelled: int, kind: str, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGroups(monkeypatch)
    async with open_harness() as harness:
        plan = harness.plan("hang-0", n=1, retries=0, stale_retries=retries)
        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector))
        await asyncio.wait_for(mark_hanging_sessions_stale(harness, cancelled), scaled(60))
        [rollout] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (rollout.kind, rollout.attempt, rollout.reward) == (kind, attempt, None)
        assert read_ledger(harness.out).faults == {} and len(fake.closed) == 1
        outcomes = [s["outcome"] for s in (await every_session(harness.gateway)).values() if s["stop"] == "stale"]
        assert outcomes == [None] * cancelled, "a stale session has an outcome"


async def test_wind_up_ends_agents_and_grades_finished_work(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGroups(monkeypatch)
    grading, go = asyncio.Event(), asyncio.Event()
    import turngate.rollout.rollout as rollout_module

    real = rollout_module.grade_with_retries

    async def slow(*arguments: Any) -> Any:
        grading.set()
        await go.wait()
        return await real(*arguments)

    monkeypatch.setattr(rollout_module, "grade_with_retries", slow)
    async with open_harness() as harness:
        plan = harness.plan("well-0", "hang-0", "well-1", n=1, bounds=Bounds(running=1, warm=0, grading=1))
        batch = harness.batch(plan)
        running = asyncio.create_task(batch.run())
        await asyncio.wait_for(grading.wait(), scaled(60))
        await kit.until(lambda: batch.progress.states["run"] == 1, 60)
        await batch.wind_up()
        await kit.until(lambda: batch.progress.states["run"] == 0, 60)
        go.set()
        result = await asyncio.wait_for(running, scaled(60))
        assert [(rollout.task, rollout.kind) for rollout in result.finished] == [
            ("well-0", "graded")
        ] and not result.complete
        assert read_ledger(harness.out).open == {}
        assert (await run_batch(plan, harness.client, harness.connector)).complete
