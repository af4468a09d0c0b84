"""A batch of many more rollouts than a live vLLM can run at once: no call of an agent fails, and the batch starts fewer rollouts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.batch.kit import AGENT, plan
from tests.kit import Running, gateway, memory_folder
from tests.vllm import TINY_RUNS, Servers
from turngate.client.gateway import GatewayClient
from turngate.rollout.batch import run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.progress import BatchProgress

pytestmark = [pytest.mark.needs("vllm", "tiny-qwen3"), pytest.mark.full]
ROLLOUTS, RUNNING, TOKENS = 24, 12, 128


class Watch:
    """What happens while the batch runs."""

    def __init__(self) -> None:
        self.most_calls = 0  # in flight at once
        self.fewest_running: int | None = None  # rollouts, while the engine is saturated and others have not started
        self.progress: BatchProgress | None = None

    def note(self, progress: BatchProgress) -> None:
        self.progress = progress

    async def run(self, g: Running) -> None:
        while True:
            saturated = (await g.admin.get("/admin/engines")).json().get("saturated", False)
            self.most_calls = max(self.most_calls, g.app.fence.in_flight)
            if self.progress is not None and saturated:
                running = sum(self.progress.states.values())
                if self.progress.done + running < ROLLOUTS:
                    self.fewest_running = min(running, self.fewest_running or running)
            await asyncio.sleep(0.1)


async def test_saturated_engine_slows_batch_and_fails_no_call(vllm: Servers, tmp_path: Path) -> None:
    model = vllm.get("tiny-qwen3")
    settings: dict[str, Any] = {"engine_url": [model.url], "model": model.name, "tokenizer": str(model.folder)}
    watch = Watch()
    with memory_folder() as root:
        async with gateway(observe="vllm", engine_load_s=0.5, **settings) as g:
            names, bounds = [f"well-{n}" for n in range(ROLLOUTS)], Bounds(running=RUNNING, starting=4)
            batch = plan(tmp_path, root, names, n=1, model=model.name, bounds=bounds)
            agent = AGENT.replace('"messages":', f'"max_tokens": {TOKENS}, "messages":', 1)
            (root / "agent.py").write_text(agent)
            watching = g.start(watch.run(g))
            async with GatewayClient(g.root, g.app.admin_key) as client, GatewayConnector(g.root) as connector:
                result = await run_batch(batch, client, connector, watch.note)
            watching.cancel()
    assert [end.kind for end in result.finished] == ["graded"] * ROLLOUTS
    assert all(end.attempt == 1 for end in result.finished), "an agent's call failed"
    assert watch.most_calls > TINY_RUNS, "the engine was not saturated"
    assert watch.fewest_running is not None and watch.fewest_running <= RUNNING - 4, watch.fewest_running
