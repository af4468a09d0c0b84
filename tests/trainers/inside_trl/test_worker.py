"""Tests for `TurngateWorker` with a real gateway, called as TRL's trainer calls it."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.kit import Gated, gateway, say, until
from tests.rollout.kit import PRELUDE, Harness, open_harness
from tests.sandboxes.kit import MAKE
from tests.speed import scaled
from tests.trainers.inside_trl.kit import (
    equals_row,
    in_thread,
    is_drained,
    read_metrics,
    run_rollout,
    running_worker,
    take_samples,
)
from turngate.agents.installation import Installation
from turngate.agents.spec import find_agent
from turngate.client.feed import Feed, OtherFeed
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import FeedConfig
from turngate.errors import ConfigError
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan
from turngate.tasks.task import Function, Task
from turngate.trainers.trl.worker import LAST, STATE, TurngateWorker, WorkerConfig

pytestmark = pytest.mark.process

TALK = [say(f"Answer {n}.") for n in range(40)]


@pytest.mark.real
async def test_rows_equal_trace() -> None:
    async with gateway(TALK) as g, running_worker(g) as worker:
        good, bad = await run_rollout(g, "a", 1.0, turns=3), await run_rollout(g, "a", 0.0, turns=2)
        rows = [row for session in (good, bad) for row in await g.samples(session)]
        samples = await take_samples(worker, 2)
        assert [equals_row(sample, row) for sample, row in zip(samples, rows, strict=True)] == [True, True]
        assert [sample.advantage for sample in samples] == pytest.approx([1.0, -1.0], abs=1e-4)
        assert samples[0].input_ids.dtype == samples[0].completion_mask.dtype == np.int64
        assert samples[0].old_log_probs.dtype == np.float32
        assert {sample.group_id for sample in samples} == {1}
        assert samples[0].metrics == {"reward": 1.0, "reward_std": 0.5}
        worker.check_health(scaled(5))


@pytest.mark.real
async def test_multi_row_rollout_counts_once() -> None:
    """With TRL's token mean, weighted by tokens or by rollouts."""
    async with gateway(TALK) as g:
        many, one = await run_rollout(g, "a", 1.0, conversations=3), await run_rollout(g, "a", 0.0)
        async with running_worker(g, choices={"from_start": True}) as worker:
            samples = await take_samples(worker, 4)
            assert [sample.advantage for sample in samples] == pytest.approx([1.0, 1.0, 1.0, -1.0], abs=1e-4)
        async with GatewayClient(g.root, g.app.admin_key) as client:
            await client.delete_feed("f")
        async with running_worker(g, choices={"from_start": True}, weigh="rollouts") as worker:
            samples = await take_samples(worker, 4)
            contributions = [sample.advantage * sample.completion_mask.sum() for sample in samples]
            assert sum(contributions[:3]) == pytest.approx(-contributions[3])
        assert len(await g.samples(many)) == 3
        assert len(await g.samples(one)) == 1


async def test_versions_are_relative_to_trainer_start() -> None:
    async with gateway(TALK) as g:
        await g.resume(40)
        async with running_worker(g, n=1, choices={"advantage": "none"}) as worker:
            await run_rollout(g, "a", 1.0)
            await in_thread(worker.update_model_version, 2)
            await run_rollout(g, "b", 1.0)
            assert g.app.fence.version == 41
            assert [sample.model_version for sample in await take_samples(worker, 2)] == [1, 2]


async def test_call_spanning_update_has_both_versions() -> None:
    engine = Gated([say("A long answer, of several tokens.")] * 2, tokens=2)
    async with gateway(engine=engine) as g, running_worker(g, n=1, choices={"advantage": "none"}) as worker:
        rollout = asyncio.create_task(run_rollout(g, "a", 1.0, turns=1, way="async stream"))
        await until(lambda: engine.waiting)
        await in_thread(worker.update_model_version, 2)
        engine.gate.set()
        [turn] = await g.turns(await rollout)
        assert (turn["version_start"], turn["version_end"]) == (1, 2)
        assert (await take_samples(worker, 1))[0].model_version == 1


async def test_row_stale_in_queue_is_dropped_and_counted() -> None:
    async with gateway(TALK) as g, running_worker(g, n=1, choices={"advantage": "none", "max_staleness": 2}) as worker:
        await run_rollout(g, "a", 1.0)
        await until(lambda: worker.rollout_buffer.qsize() == 1)
        for version in (2, 3, 4):
            await in_thread(worker.update_model_version, version)
        await run_rollout(g, "b", 1.0)
        [sample] = await take_samples(worker, 1)
        assert sample.model_version == 4
        assert read_metrics(worker)["sample/dropped_stale_total"] == [1.0]
        worker.rollout_buffer.mark_trained(1)
        assert worker.state().delivery == 2  # both deliveries are done


@pytest.mark.parametrize(
    ("policy", "advantages"),
    [("train", [0.7071, -1.4142, 0.7071]), ("mask", [-1.4142, 0.7071]), ("exclude", [-1.0, 1.0])],
)
async def test_truncated_rollout_follows_policy(policy: str, advantages: list[float]) -> None:
    async with gateway(TALK) as g, running_worker(g, n=3, choices={"on_truncated": policy}) as worker:
        await run_rollout(g, "a", 1.0, turns=4, limits={"context_tokens": 40})
        await run_rollout(g, "a", 0.0)
        await run_rollout(g, "a", 1.0)
        samples = await take_samples(worker, len(advantages))
        assert [sample.advantage for sample in samples] == pytest.approx(advantages, abs=1e-3)
        assert await is_drained(worker)
        worker.check_health(scaled(5))
        assert read_metrics(worker)["completions/clipped_ratio"] == [(1.0, 3.0)]


async def test_too_long_rows_are_dropped_and_counted() -> None:
    async with gateway(TALK) as g, running_worker(g, longest_row=60) as worker:
        await run_rollout(g, "a", 1.0, turns=8)
        short = await run_rollout(g, "a", 0.0, turns=1)
        [sample] = await take_samples(worker, 1)
        assert equals_row(sample, (await g.samples(short))[0])
        assert await is_drained(worker)
        assert read_metrics(worker)["rollout/too_long_rows_total"] == [1.0]


async def test_unrewarded_rollouts_are_excluded() -> None:
    async with gateway(TALK) as g, running_worker(g, n=3) as worker:
        for reward in (1.0, None, 0.0):
            await run_rollout(g, "a", reward)
        assert [sample.advantage for sample in await take_samples(worker, 2)] == pytest.approx([1.0, -1.0], abs=1e-4)
        assert read_metrics(worker)["rollout/excluded_total"] == [1.0]


async def test_resume_skips_trained_rows(tmp_path: Path) -> None:
    async with gateway(TALK) as g:
        async with running_worker(g) as worker:
            for group in ("a", "b"):
                await run_rollout(g, group, 1.0)
                await run_rollout(g, group, 0.0)
            given = await take_samples(worker, 4)
            worker.rollout_buffer.mark_trained(3)  # the fourth was only prefetched
            (tmp_path / STATE).write_bytes(msgspec.json.encode(worker.state()))
            (tmp_path / LAST).write_text("{}")
            assert worker.state().delivery == 1
            await in_thread(worker.commit, 1)
        async with running_worker(g, checkpoint=tmp_path) as worker:
            await run_rollout(g, "c", 1.0)
            await run_rollout(g, "c", 0.0)
            again = await take_samples(worker, 3)
            assert again[0].input_ids.tolist() == given[3].input_ids.tolist()
            assert [sample.group_id for sample in again] == [2, 3, 3]
            worker.rollout_buffer.mark_trained(1)
            assert worker.state().delivery == 2
        async with running_worker(g) as worker:  # without the checkpoint: after the committed delivery
            assert [sample.group_id for sample in await take_samples(worker, 4)] == [2, 2, 3, 3]
        with pytest.raises(ConfigError, match="was trained on feed 'f', not on 'other'"):
            config = WorkerConfig(gateway=g.root, feed="other", choices=FeedConfig(n=2))
            TurngateWorker(config, admin_key="k", checkpoint=tmp_path)


def test_incomplete_checkpoint_is_rejected(tmp_path: Path) -> None:
    config = WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=2))
    with pytest.raises(ConfigError, match=r"has no turngate\.json.* leave out `checkpoint`"):
        TurngateWorker(config, admin_key="k", checkpoint=tmp_path)
    (tmp_path / STATE).write_text('{"feed":"f","delivery":3}')
    with pytest.raises(ConfigError, match=r"has no trainer_state\.json.* resume from the previous checkpoint"):
        TurngateWorker(config, admin_key="k", checkpoint=tmp_path)
    (tmp_path / LAST).write_text("{}")
    TurngateWorker(config, admin_key="k", checkpoint=tmp_path)


async def test_checkpoint_of_recreated_feed_is_rejected(tmp_path: Path) -> None:
    async with gateway(TALK) as g:
        async with running_worker(g) as worker:
            for reward in (0.0, 1.0):
                await run_rollout(g, "a", reward)
            await take_samples(worker, 2)
            worker.rollout_buffer.mark_trained(2)
            (tmp_path / STATE).write_bytes(msgspec.json.encode(worker.state()))
            (tmp_path / LAST).write_text("{}")
        async with GatewayClient(g.root, g.app.admin_key) as client:
            await client.delete_feed("f")
            await Feed.open(client, "f", FeedConfig(n=2))
        for reward in (0.0, 1.0):
            await run_rollout(g, "b", reward)  # also number 1, but never trained
        async with running_worker(g, checkpoint=tmp_path, start=False) as worker:
            await in_thread(worker.update_model_version, 1)
            with pytest.raises(OtherFeed, match="it was deleted and recreated"):
                await in_thread(worker.start)


async def test_stopped_worker_cannot_be_reused() -> None:
    async with gateway(TALK) as g, running_worker(g) as worker:
        for group in ("a", "b"):
            await run_rollout(g, group, 1.0)
            await run_rollout(g, group, 0.0)
        await take_samples(worker, 2)
        worker.rollout_buffer.mark_trained(2)
        await until(lambda: worker.rollout_buffer.qsize() == 2)
        await in_thread(worker.stop)
        assert worker.state().delivery == 1
        assert await is_drained(worker, 0.1)  # or a second `train()` would silently use them
        with pytest.raises(RuntimeError, match="not running: the worker was stopped, and a worker serves only one run"):
            worker.check_health(scaled(5))
        with pytest.raises(ConfigError, match="create a new worker and trainer, and pass `checkpoint` to resume"):
            await in_thread(worker.update_model_version, 2)
        with pytest.raises(ConfigError, match="create a new worker and trainer"):
            await in_thread(worker.start)
        await in_thread(worker.stop)


async def test_errors_surface_in_start_or_check_health() -> None:
    async with gateway(TALK) as g:
        async with running_worker(g) as worker:
            async with GatewayClient(g.root, g.app.admin_key) as client:
                await Feed.open(client, "f", FeedConfig(n=2))  # another trainer
            async with asyncio.timeout(scaled(20)):
                while worker._work is None or not worker._work.done():
                    await run_rollout(g, "a", 1.0)
                    await asyncio.sleep(0.05)
            with pytest.raises(RuntimeError, match="another reader has taken over"):
                worker.check_health(scaled(5))
        async with running_worker(g, n=3, start=False) as worker:
            await in_thread(worker.update_model_version, 1)
            with pytest.raises(RequestRejected, match="n is 2, not 3"):
                await in_thread(worker.start)
        with pytest.raises(ConfigError, match="TURNGATE_ADMIN_KEY"):
            TurngateWorker(worker.config)


# ── with a rollout plan ─────────────────────────────────────────────────────────────────────────────────────────────


def make_plan(stage: Harness, program: str, *, grader: str = "", **given: object) -> BatchPlan:
    task = Task(id="t", instruction=PRELUDE + program, grader=Function(name=grader) if grader else None)
    plan = {
        "tasks": (task,),
        "agent": find_agent("shell").spec,
        "installed": Installation(),
        "backend": MAKE["local"](stage.root),
        "model": "m",
        "folder": stage.folder / "batch",
        "n": 2,
        "bounds": Bounds(running=2),
        "options": {"command": "exec python3 -"},
    }
    return BatchPlan(**{**plan, **given})


async def test_plan_follows_trainer_pace_and_reports_exhaustion(tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("import random\ndef grade(subject):\n    return random.random()\n")
    async with open_harness() as stage:
        plan = make_plan(stage, 'ask("Hi")', grader=f"{grader}:grade", rounds=3)
        async with running_worker(stage.gateway, plan=plan, ahead=1) as worker:
            await until(lambda: worker.rollout_buffer.qsize() == 2, 30)
            await asyncio.sleep(1.0)
            assert len(await stage.client.sessions()) == 2  # the next group waits until the trainer takes a row
            [session, _] = await stage.client.sessions()
            assert (await stage.client.show(session)).config.sampling == {"temperature": 1.0}
            samples = await take_samples(worker, 6)
            assert sorted({sample.group_id for sample in samples}) == [1, 2, 3]
            await until(lambda: worker._dry, 30)
            assert await is_drained(worker)
            with pytest.raises(RuntimeError, match="6 of 6 rollouts are finished, and the plan has no more rounds"):
                worker.check_health(scaled(5))


async def test_feed_accepts_only_groups_of_plan(tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("import random\ndef grade(subject):\n    return random.random()\n")
    async with open_harness() as stage:
        plan = make_plan(stage, 'ask("Hi")', grader=f"{grader}:grade")
        async with running_worker(stage.gateway, plan=plan) as worker:
            others = [await run_rollout(stage.gateway, "other", reward) for reward in (0.0, 1.0)]
            samples = await take_samples(worker, 2)
            await until(lambda: worker._dry, 30)
            assert await is_drained(worker)
            assert len(samples) == 2 and len(await stage.client.sessions()) == 4 and len(others) == 2
            assert (await stage.client.show_feed("f")).config.groups == "f."
        named = msgspec.structs.replace(plan, name="train-1", folder=tmp_path / "named")
        async with running_worker(stage.gateway, plan=named, start=False, choices={"groups": "train"}) as worker:
            assert (worker.config.plan, worker.config.choices.groups) == (named, "train")


async def test_stop_ends_agents_sandboxes_and_sessions() -> None:
    async with open_harness() as stage:
        plan = make_plan(stage, 'ask("Hi"); time.sleep(600)', rounds=10)
        async with running_worker(stage.gateway, plan=plan) as worker:
            async with asyncio.timeout(scaled(20)):
                while len(await stage.open_sessions()) < 2:
                    await asyncio.sleep(0.1)
            worker.check_health(scaled(5))
        assert await stage.open_sessions() == []
        assert stage.alive() == []


async def test_plan_without_rewards_is_abandoned(tmp_path: Path) -> None:
    async with open_harness() as stage:
        plan = make_plan(stage, 'ask("Hi")', grader=f"{tmp_path}/none.py:grade", rounds=100_000)
        async with running_worker(stage.gateway, plan=plan) as worker:
            await until(lambda: worker._work is not None and worker._work.done(), 60)
            with pytest.raises(
                RuntimeError,
                match=r"none of the last \d+ rollouts can be trained on; .* has no reward: ",
            ):
                worker.check_health(scaled(5))


def test_conflicting_plan_and_feed_are_rejected(tmp_path: Path) -> None:
    task = Task(id="t", instruction="x")
    plan = BatchPlan(
        tasks=(task,),
        agent=find_agent("shell").spec,
        installed=Installation(),
        backend=MAKE["local"](tmp_path),
        model="m",
        folder=tmp_path,
        n=4,
    )
    with pytest.raises(ConfigError, match=r"plan\.n is 4, but choices\.n \(the group size of the feed\) is 8"):
        WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=8), plan=plan)
    with pytest.raises(
        ConfigError, match=r"accepts only groups whose names start with 'train\.'; leave `groups` empty, or set"
    ):
        WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=4, groups="train."), plan=plan)
    other = msgspec.structs.replace(plan, name="test")
    with pytest.raises(ConfigError, match=r"group names start with 'test\.', but the feed accepts only"):
        WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=4, groups="train."), plan=other)
    warm = msgspec.structs.replace(plan, session={"sampling": {"temperature": 0.7}})
    with pytest.raises(ConfigError, match=r"temperature is 1 in the worker, but 0\.7 in the plan's sessions"):
        WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=4), plan=warm)


def test_feed_with_sampling_masks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"choices\.side must not contain sampling_mask: TRL computes"):
        WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=1, side=("sampling_mask",)))


def test_empty_queue_times_out() -> None:
    worker = TurngateWorker(WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=1)), admin_key="k")
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get(timeout=0.01)
    worker.stop()  # stopping an unstarted worker is a no-op
