"""A batch that starts while a live vLLM is saturated: after the first rollouts it starts no others until the engine has room.

No call of an agent fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.batch.kit import AGENT, plan
from tests.kit import Running, gateway, memory_folder
from tests.speed import scaled
from tests.vllm import TINY_RUNS, Model, Servers
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import EnginesView, OpenedSession
from turngate.rollout.batch import run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.progress import BatchProgress

# tests/rollout/test_engine_pressure.py tests the same with simulated engines, and test_shared_weights.py reads the load of vLLM.
pytestmark = [pytest.mark.needs("vllm", "tiny-qwen3"), pytest.mark.repeat]
ROLLOUTS, RUNNING, TOKENS = 16, 4, 16
DONE = 2  # rollouts that finish while the engine is saturated


@asynccontextmanager
async def saturate(model: Model) -> AsyncIterator[None]:
    """Keep more calls at the engine than it runs at once."""
    body = {"model": model.name, "prompt": "Go on.", "max_tokens": 64, "ignore_eos": True}  # vLLM completes them

    async def call(client: httpx.AsyncClient) -> None:
        while True:
            (await client.post("/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=model.url, timeout=scaled(120), trust_env=False) as client:
        calls = [asyncio.create_task(call(client)) for _ in range(3 * TINY_RUNS)]
        try:
            yield
        finally:
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


class Watch(GatewayClient):
    """Counts the sessions of the batch, until it has finished some rollouts and still learns that the engine is saturated."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.opened = 0
        self.opened_while_saturated: int | None = None
        self.has_seen_enough = asyncio.Event()
        self._done = 0

    def note(self, progress: BatchProgress) -> None:
        self._done = progress.done

    async def open(self, config: Any, session: str | None = None, traceparent: str = "") -> OpenedSession:
        self.opened += 1
        return await super().open(config, session, traceparent)

    async def engines(self) -> EnginesView:
        view = await super().engines()
        if view.saturated and self._done >= DONE and self.opened_while_saturated is None:
            self.opened_while_saturated = self.opened
            self.has_seen_enough.set()
        return view


async def is_saturated(g: Running) -> bool:
    return bool((await g.admin.get("/admin/engines")).json().get("saturated"))


async def test_saturated_engine_holds_batch_and_fails_no_call(vllm: Servers, tmp_path: Path) -> None:
    model = vllm.get("tiny-qwen3")
    settings: dict[str, Any] = {"engine_url": [model.url], "model": model.name, "tokenizer": str(model.folder)}
    with memory_folder() as root:
        async with gateway(observe="vllm", engine_load_s=0.5, **settings) as g:
            names, bounds = (
                [f"well-{n}" for n in range(ROLLOUTS)],
                Bounds(running=RUNNING, starting=4, grading=2, warm=2),
            )
            batch = plan(tmp_path, root, names, n=1, model=model.name, bounds=bounds)
            agent = AGENT.replace('"messages":', f'"max_tokens": {TOKENS}, "messages":', 1)
            (root / "agent.py").write_text(agent)
            async with Watch(g.root, g.app.admin_key) as client, GatewayConnector(g.root) as connector:
                async with saturate(model):
                    async with asyncio.timeout(scaled(60)):
                        while not await is_saturated(g):
                            await asyncio.sleep(0.1)
                    running = g.start(run_batch(batch, client, connector, client.note))
                    async with asyncio.timeout(scaled(60)):
                        await client.has_seen_enough.wait()
                result = await running
    assert client.opened_while_saturated == bounds.rollouts, client.opened_while_saturated
    assert [end.kind for end in result.finished] == ["graded"] * ROLLOUTS
    assert all(end.attempt == 1 for end in result.finished), "an agent's call failed"
