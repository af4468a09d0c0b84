"""Two cells that share one live vLLM: engines and weights are changed at the gateway on the shared store while agents work."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.kit import run_cli
from tests.engines.standins import collect, make_request
from tests.gateway.test_shared_engines import cell, controller
from tests.kit import OpenSession, Running, until, user
from tests.server.test_engines import change
from tests.server.test_weights import load
from tests.speed import scaled
from tests.store.kit import open_shared
from tests.vllm import Model, Servers
from turngate.engines.vllm import VLLM
from turngate.types import Sampling

pytestmark = [pytest.mark.needs("vllm", "tiny-qwen3", "postgres"), pytest.mark.real]
CROSSING = 600  # tokens of the calls during which the weights change
STORY = "Tell me a story about a river."
LEASE_S = 10.0


def other_model(folder: Path, model: Path) -> str:
    """Save a copy of the model with negated weights in one place, so that its output differs."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        name = next(name for name in sorted(tensors) if name.endswith("mlp.down_proj.weight"))
        save_file({**tensors, name: -tensors[name]}, folder / file.name)
    return str(folder)


class LiveCells:
    """Two cells, and the sessions that were opened there."""

    def __init__(self, cells: list[Running], model: str) -> None:
        self.cells, self._model = cells, model
        self.sessions: list[tuple[Running, OpenSession]] = []

    async def open(self, g: Running, **config: Any) -> OpenSession:
        session = await g.open(**config)
        self.sessions.append((g, session))
        return session

    async def ask(self, g: Running, session: OpenSession, messages: Any, tokens: int = 12, **request: Any) -> Any:
        asked = {"model": self._model, "max_tokens": tokens, **request}
        return await g.ask(session.key, messages, "async stream", **asked)

    async def ask_until(self, loaded: asyncio.Event, g: Running) -> list[tuple[Running, OpenSession]]:
        """Make calls in new sessions, one after the other, until new weights are loaded. Return the sessions."""
        used = []
        while not loaded.is_set():
            session = await self.open(g)
            await self.ask(g, session, "Go on.", CROSSING)
            used.append((g, session))
        return used

    async def sample_all(self, version: int) -> list[int]:
        """Sample at each cell, where all turns must have this version. Return the ids of the greedy answers, which must be equal."""
        greedy = []
        for g in self.cells:
            for request in ({}, {"temperature": 0}):  # the second one is not trained
                session = await self.open(g)
                await self.ask(g, session, STORY, **request)
                [turn] = await g.turns(session.id)
                assert turn["version_start"] == turn["version_end"] == version
            greedy.append(turn["ids"])
        assert greedy[0] == greedy[1]
        return greedy[0]  # type: ignore[no-any-return]

    async def finish(self, shared: str) -> None:
        """End all sessions, and wait until the shared store has them."""
        for g, session in self.sessions:
            await g.seal(session.id)
            outcome = {"kind": "graded", "reward": 1.0, "group": "g"}
            assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).is_success
        store = open_shared(shared)
        try:
            await until(lambda: all(store.find(session.id) is not None for _, session in self.sessions), 30)
        finally:
            store.close()


async def test_two_cells_share_a_live_vllm(vllm: Servers, postgres_url: str, tmp_path: Path, monkeypatch: Any) -> None:
    model = vllm.get("tiny-qwen3")
    monkeypatch.chdir(tmp_path)
    changed = other_model(tmp_path / "changed", model.folder)
    settings: dict[str, Any] = {"model": model.name, "engine_api": "generate"}
    of_cells = {**settings, "tokenizer": str(model.folder), "echo_prompt": True, "lease_s": LEASE_S}
    async with AsyncExitStack() as stack:
        g = await stack.enter_async_context(controller(postgres_url, **settings))
        cells = [await stack.enter_async_context(cell(postgres_url, f"c{n}", **of_cells)) for n in range(2)]
        live = LiveCells(cells, model.name)
        await change(g, "add", url=model.url)
        before = await live.sample_all(0)
        loaded = asyncio.Event()
        answering = [one.start(live.ask_until(loaded, one)) for one in cells]
        await until(lambda: all(one.app.fence.in_flight for one in cells))
        await _check_load(g, model)
        reply = await load(g, version=1, path=changed, mode="keep")
        loaded.set()
        assert [result["has"] for result in reply["replicas"]] == [1]
        assert await live.sample_all(1) != before
        crossing = [pair for pairs in await asyncio.gather(*answering) for pair in pairs]
        turns = [(await one.turns(session.id))[0] for one, session in crossing]
        for turn in turns:
            runs = turn.get("version_runs")
            # A token that vLLM was sampling when it was paused may have the label of the loading weights. Then the version of each token is
            # unknown, and only their range is recorded.
            if runs is None:
                assert 0 <= turn["version_start"] <= turn["version_end"] <= 1
                continue
            assert (turn["version_start"], turn["version_end"]) == (runs[0][0], runs[-1][0])
            assert sum(count for _, count in runs) == len(turn["ids"])
        assert (0, 1) in [(turn["version_start"], turn["version_end"]) for turn in turns]

        await _check_draining(g, live, model)
        await _check_cache(live, cells[1])
        await live.finish(postgres_url)
        checked = await asyncio.to_thread(run_cli, "verify", "--all", "--data", postgres_url)
        assert checked.exit_code == 0 and checked.stdout.count("✓") == len(live.sessions), checked.output
        scored = ("--engine", "vllm", "--engine-url", model.url, "--model", model.name, "--policy-version", "1")
        checked = await asyncio.to_thread(run_cli, "verify", "--all", "--data", postgres_url, *scored)
        assert checked.exit_code == 0 and checked.stdout.count("✓ exact") >= 4, checked.output  # all turns at version 1
        for turn, (_, session) in zip(turns, crossing, strict=True):
            shipped = (await g.admin.get(f"/admin/sessions/{session.id}/trace")).json()["nodes"][-1]
            assert shipped.get("version_runs") == turn.get("version_runs")
            [row] = (await g.admin.get(f"/admin/sessions/{session.id}/samples")).json()["samples"]
            assert sum(row["mask"]) == len(turn["ids"])
        await _restore(live, model, before)


async def _check_load(g: Running, model: Model) -> None:
    """The controller reads the load from the engine's own metrics, although it serves no calls itself."""
    text = (await _get(f"{model.url}/metrics")).text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
        assert re.search(rf"^vllm:{name}\{{.*}} ", text, re.M), name
    seen = {}
    end = asyncio.get_running_loop().time() + scaled(20)
    while not seen.get("running"):
        assert asyncio.get_running_loop().time() < end, seen
        await asyncio.sleep(0.2)
        [seen] = (await g.admin.get("/admin/engines")).json()["engines"]
    assert seen["waiting"] == 0 and 0 < seen["kv_use"] < 1 and seen["in_flight"] == 0


async def _check_draining(g: Running, live: LiveCells, model: Model) -> None:
    """A call waits while the only engine drains, and continues afterwards."""
    await change(g, "drain", url=model.url)
    one = live.cells[1]
    session = await live.open(one)
    asking = one.start(live.ask(one, session, "Hi"))
    await asyncio.sleep(1)
    assert not asking.done() and (await one.admin.get("/admin/engines")).json()["waiting"] == 1
    await change(g, "add", url=model.url)
    await asking
    [turn] = await one.turns(session.id)
    assert turn["version_start"] == 1


async def _check_cache(live: LiveCells, g: Running) -> None:
    """The second turn of a session finds the first one in the engine's cache."""
    session = await live.open(g)
    history = [user("Describe every river of this long list: " + ", ".join(f"river {n}" for n in range(80)))]
    for _ in range(2):
        answer = await live.ask(g, session, history)
        history = [*history, answer.message(), user("Go on.")]
    first, second = await g.turns(session.id)
    assert first["cached"] == 0 and second["cached"] > 100, json.dumps([first, second])[:2000]


async def _restore(live: LiveCells, model: Model, ids: list[int]) -> None:
    """A roll-back loads the weights that the server was started with, as the next tests expect them."""
    g, session = live.sessions[1]  # greedy
    prompt = (await g.trace(session.id))["nodes"][0]["ids"]
    engine = VLLM(model.url, model.name)
    await engine.start()
    try:
        await engine.reload_initial_weights(frozen=False)
        request = make_request(prompt, max_tokens=len(ids), sampling=Sampling(temperature=0.0))
        async with engine.generate(request) as chunks:
            assert (await collect(chunks)).ids == ids
    finally:
        await engine.close()


async def _get(url: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=scaled(20)) as client:
        return await client.get(url)
