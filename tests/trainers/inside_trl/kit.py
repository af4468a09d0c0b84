"""Shared helpers: rollouts without agents, and a worker called from a thread, since the gateway runs in the test's loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.kit import Json, Running, user
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.trl.worker import TurngateWorker, WorkerConfig

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *given: Any) -> T:
    """Call from another thread, as TRL does."""
    return await asyncio.to_thread(work, *given)


async def run_rollout(
    g: Running,
    group: str,
    reward: float | None,
    *,
    turns: int = 2,
    conversations: int = 1,
    way: str = "async",
    **config: Json,
) -> str:
    """Record one rollout of a group, with a few turns in each conversation."""
    session = await g.open(metadata={"group": group}, **config)
    for conversation in range(conversations):
        history = [user(f"Question {conversation}")]
        for turn in range(turns):
            reply = await g.ask(session.key, history, way)
            history += [reply.message(), user(f"And then, {turn}?")]
    await g.seal(session.id)
    async with GatewayClient(g.root, g.app.admin_key) as client:
        kind = "graded" if reward is not None else "agent failed"
        await client.record(session.id, RecordedOutcome(kind=kind, reward=reward, group=group, task="t"))
    return session.id


@asynccontextmanager
async def running_worker(
    g: Running, *, n: int = 2, version: int = 1, checkpoint: Path | None = None, start: bool = True, **given: Any
) -> AsyncIterator[TurngateWorker]:
    """Run a worker on the feed `f` as TRL does, and check that its thread ends."""
    choices = FeedConfig(n=n, **given.pop("choices", {}))
    config = WorkerConfig(gateway=g.root, feed="f", choices=choices, **given)
    worker = TurngateWorker(config, admin_key=g.app.admin_key, checkpoint=checkpoint)
    before = threading.active_count()
    try:
        if start:
            await in_thread(worker.update_model_version, version)
            await in_thread(worker.start)
        yield worker
    finally:
        await in_thread(worker.stop)
        assert not [thread.name for thread in threading.enumerate() if thread.name == "turngate-worker"], before


async def take_samples(worker: TurngateWorker, count: int) -> list[RolloutSample]:
    return [await in_thread(worker.rollout_buffer.get, True, scaled(20)) for _ in range(count)]


async def is_drained(worker: TurngateWorker, seconds: float = 0.5) -> bool:
    try:
        await in_thread(worker.rollout_buffer.get, True, seconds)
    except queue.Empty:
        return True
    return False


def read_metrics(worker: TurngateWorker) -> dict[str, list[Any]]:
    """Collect the worker's metrics by name."""
    found: dict[str, list[Any]] = {}
    while not worker.metrics_queue.empty():
        for name, value in worker.metrics_queue.get_nowait().items():
            found.setdefault(name, []).append(value)
    return found


def equals_row(sample: RolloutSample, row: Json) -> bool:
    """Whether TRL's row equals the gateway's exactly."""
    mask = np.asarray(row["mask"], bool)
    logprobs = np.asarray([0.0 if value is None else value for value in row["logprobs"]], np.float32)
    return (
        sample.input_ids.tolist() == row["ids"]
        and sample.completion_mask.tolist() == mask.astype(int).tolist()
        and np.array_equal(sample.old_log_probs[mask], logprobs[mask])
        and not sample.old_log_probs[~mask].any()
    )
