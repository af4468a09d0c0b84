"""Test changes of the engine pool while agents work: add, drain and remove, their weights, and restarts.

The engines are the fakes of `test_weights.py`, which "sample" the name of their weights.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit import Running, gateway, until
from tests.server.test_forwarding import crew
from tests.server.test_weights import FakeVLLM, engines, events, load
from turngate.client.engine_pool import EnginePoolClient
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.vllm import VLLM
from turngate.gateway.engine_list import merge_engines
from turngate.render import BUILTIN_TOKENIZER


@asynccontextmanager
async def serve(fakes: Sequence[FakeVLLM], **config: Any) -> AsyncIterator[Running]:
    """Run a gateway whose configuration names these engines."""
    settings = {"engine_url": [fake.url for fake in fakes], "model": "m", "tokenizer": str(BUILTIN_TOKENIZER), **config}
    async with gateway(observe="vllm", **settings) as g:
        yield g


async def change(g: Running, action: str, **body: Any) -> Any:
    response = await g.admin.post("/admin/engines" + ("" if action == "add" else f"/{action}"), json=body)
    assert response.is_success, response.text
    return response.json()


async def refuse(g: Running, action: str, **body: Any) -> tuple[int, str]:
    response = await g.admin.post("/admin/engines" + ("" if action == "add" else f"/{action}"), json=body)
    return response.status_code, response.json()["error"]["message"]


def states(view: Any) -> dict[str, str]:
    return {engine["url"]: engine["state"] for engine in view["engines"]}


def pool_of(fakes: Sequence[FakeVLLM]) -> Any:
    return Pool([VLLM(fake.url, "m") for fake in fakes], timing=PoolTiming(check_s=0.1))


@pytest.mark.parametrize(
    ("configured", "stored", "used"),
    [
        ([], {}, {}),
        (["a", "b"], {}, {"a": "active", "b": "active"}),
        (["a"], {"b": "active"}, {"a": "active", "b": "active"}),
        (["a", "b"], {"a": None}, {"b": "active"}),  # removed, though still configured
        (["a"], {"a": "draining"}, {"a": "draining"}),
        (["c"], {"a": "active", "b": None}, {"c": "active", "a": "active"}),  # configured later
    ],
)
def test_stored_changes_apply_to_configured_engines(configured: Any, stored: Any, used: Any) -> None:
    assert merge_engines(configured, stored) == used


@pytest.mark.parametrize("weights", [{"lora_path": "/w/1"}, {"path": "/w/1"}])
async def test_added_engine_gets_weights_before_its_first_call(weights: dict[str, str]) -> None:
    async with engines(2) as fakes, serve(fakes[:1]) as g:
        await load(g, version=1, **weights)
        held = await g.open()
        assert (await g.ask(held.key, "Hi")).content == "[/w/1][/w/1]"
        view = await change(g, "add", url=fakes[1].url + "/v1/")
        assert states(view) == {fakes[0].url: "active", fakes[1].url: "active"}
        session = await g.open()  # the new engine has fewer sessions
        assert (await g.ask(session.key, "Hi")).content == "[/w/1][/w/1]"
        assert len(fakes[1].salts) == 1
        loads = [path for path in fakes[1].control_paths if "load" in path or "rpc" in path]
        await change(g, "add", url=fakes[1].url)  # repeated: nothing happens
        assert loads == [path for path in fakes[1].control_paths if "load" in path or "rpc" in path]
        await load(g, version=2, lora_path="/w/2")
        assert (await g.ask(session.key, "Hi")).content == "[/w/2][/w/2]"  # updates reach it like the others
        assert [e["state"] for e in await events(g, "engine")] == ["active"]


async def test_engine_that_cannot_get_weights_is_not_added() -> None:
    async with engines(2) as fakes, serve(fakes[:1]) as g:
        await load(g, version=1, lora_path="/w/1")
        fakes[1].failing_paths.add("/v1/load_lora_adapter")
        status, message = await refuse(g, "add", url=fakes[1].url)
        assert status == 502 and "no /v1/load_lora_adapter today" in message
        assert states((await g.admin.get("/admin/engines")).json()) == {fakes[0].url: "active"}
        assert not fakes[1].salts
        status, message = await refuse(g, "add", url="http://127.0.0.1:9")
        assert status == 503 and "http://127.0.0.1:9 cannot be added" in message


async def test_weights_of_trainer_must_be_claimed() -> None:
    async with engines(2) as fakes, serve(fakes[:1]) as g:
        await g.admin.post("/admin/fence/pause", json={})
        status, message = await refuse(g, "add", url=fakes[1].url)
        assert status == 409 and "while calls are paused" in message
        await g.admin.post("/admin/fence/resume", json={"version": 4})
        status, message = await refuse(g, "add", url=fakes[1].url)
        assert status == 409 and "set version to 4" in message
        assert (await refuse(g, "add", url=fakes[1].url, version=3))[0] == 409
        assert fakes[1].url in states(await change(g, "add", url=fakes[1].url, version=4))


async def test_drained_engine_ends_its_calls_and_sessions_move() -> None:
    async with engines(2) as fakes, serve(fakes) as g:
        sessions = [await g.open() for _ in range(2)]
        for session in sessions:
            await g.ask(session.key, "Hi")
        busy = next(fake for fake in fakes if fake is fakes[0])
        busy.pace.clear()
        asking = [g.start(g.ask(session.key, "Again")) for session in sessions]
        await until(lambda: busy.half_sampled == 2 and fakes[1].half_sampled == 2)
        view = await change(g, "drain", url=busy.url)
        assert states(view)[busy.url] == "draining"
        removing = g.start(g.admin.post("/admin/engines/remove", json={"url": busy.url}))
        for session in sessions:
            await g.ask(session.key, "Hi")
        assert busy.half_sampled == 2 and not removing.done()
        busy.pace.set()
        assert {(await each).content for each in asking} == {"[base][base]"}  # calls there ended normally
        assert states((await removing).json()) == {fakes[1].url: "active"}
        assert [e["state"] for e in await events(g, "engine")] == ["draining", "draining", "removed"]


async def test_removal_that_takes_too_long_leaves_engine_draining() -> None:
    async with engines(2) as fakes, serve(fakes) as g:
        fakes[0].pace.clear()
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fakes[0].half_sampled)
        status, message = await refuse(g, "remove", url=fakes[0].url, limit_s=0.05)
        assert status == 504 and "was not removed and is still draining" in message
        assert states((await g.admin.get("/admin/engines")).json())[fakes[0].url] == "draining"
        assert list(states(await change(g, "remove", url=fakes[0].url, force=True))) == [fakes[1].url]
        with pytest.raises(Exception, match=r"(?i)connection|engine|error"):
            await asking
        status, message = await refuse(g, "remove", url=fakes[1].url)
        assert status == 409 and "no other engine takes new calls" in message
        assert (await refuse(g, "drain", url=fakes[0].url))[0] == 404
        for url in ("ftp://x", "not a url", "http://user:secret@x:1"):
            status, message = await refuse(g, "add", url=url)
            assert status == 400 and "secret" not in message


async def test_two_removals_at_the_same_time_leave_one_engine() -> None:
    async with engines(2) as fakes, serve(fakes) as g:
        sessions = [await g.open() for _ in range(2)]
        for fake in fakes:
            fake.pace.clear()
        asking = [g.start(g.ask(session.key, "Hi")) for session in sessions]
        await until(lambda: all(fake.half_sampled for fake in fakes))
        removing = [g.start(g.admin.post("/admin/engines/remove", json={"url": fake.url})) for fake in fakes]
        await until(
            lambda: sum(event.kind == "engine" for event in g.app.events.page()) + sum(r.done() for r in removing) == 2
        )
        for fake in fakes:
            fake.pace.set()
        assert {(await each).content for each in asking} == {"[base][base]"}
        assert sorted([(await removal).status_code for removal in removing]) == [200, 409]
        assert list(states((await g.admin.get("/admin/engines")).json()).values()) == ["active"]


@pytest.mark.parametrize("force", [False, True])
async def test_engine_is_not_removed_if_all_others_are_draining(force: bool) -> None:
    async with engines(2) as fakes, serve(fakes) as g:
        await change(g, "drain", url=fakes[0].url)
        status, message = await refuse(g, "remove", url=fakes[1].url, force=force)
        assert status == 409 and "no other engine takes new calls" in message
        assert states((await g.admin.get("/admin/engines")).json()) == {
            fakes[0].url: "draining",
            fakes[1].url: "active",
        }
        await change(g, "add", url=fakes[0].url)
        assert states(await change(g, "remove", url=fakes[1].url, force=force)) == {fakes[0].url: "active"}


async def test_changes_survive_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engines(3) as fakes:
        async with serve(fakes[:2], data=tmp_path) as g:
            await load(g, version=1, lora_path="/w/1")
            await change(g, "add", url=fakes[2].url)
            await change(g, "drain", url=fakes[1].url)
            await change(g, "remove", url=fakes[0].url)
        with caplog.at_level(logging.WARNING, "turngate"):
            async with serve(fakes[:2], data=tmp_path) as g:
                view = (await g.admin.get("/admin/engines")).json()
                assert states(view) == {fakes[1].url: "draining", fakes[2].url: "active"}
                session = await g.open()
                assert (await g.ask(session.key, "Hi")).content == "[/w/1][/w/1]"
                assert len(fakes[2].salts) == 1
        assert f"engine {fakes[0].url} is configured but not used, because it was removed" in caplog.text


async def test_all_workers_use_added_engine_and_wait_for_removed_one(tmp_path: Path) -> None:
    async with engines(2) as fakes:
        pools = [pool_of(fakes[:1]) for _ in range(2)]
        async with crew(pools, data=tmp_path, model="m") as workers:
            first, second = workers
            await load(second, version=1, lora_path="/w/1")
            await change(second, "add", url=fakes[1].url)
            assert [len(pool.replicas) for pool in pools] == [2, 2]
            assert fakes[1].control_paths.count("/v1/load_lora_adapter") == 1
            fakes[1].pace.clear()
            opened = [await first.open() for _ in range(8)]
            asking = [first.start(first.ask(session.key, "Hi")) for session in opened]
            await until(lambda: fakes[1].half_sampled >= 2)
            removing = first.start(first.admin.post("/admin/engines/remove", json={"url": fakes[1].url}))
            await until(lambda: all(pool.replicas[1].is_draining for pool in pools))
            assert not removing.done()
            fakes[1].pace.set()
            assert {(await each).content for each in asking} == {"[/w/1][/w/1]"}
            assert list(states((await removing).json())) == [fakes[0].url]
            assert [len(pool.replicas) for pool in pools] == [1, 1]


async def test_client_changes_engines() -> None:
    async with engines(2) as fakes, serve(fakes[:1]) as g, EnginePoolClient(g.root, g.app.admin_key) as client:
        assert [engine.url for engine in (await client.engines()).engines] == [fakes[0].url]
        await client.add_engine(fakes[1].url)
        view = await client.drain_engine(fakes[0].url)
        assert [(engine.state, engine.up) for engine in view.engines] == [("draining", True), ("active", True)]
        view = await client.remove_engine(fakes[0].url, limit_s=5)
        assert [engine.url for engine in view.engines] == [fakes[1].url]


async def test_gateway_without_pool_has_no_engines() -> None:
    async with gateway() as g:
        assert (await g.admin.get("/admin/engines")).json() == {"engines": [], "scripted": True}
        status, message = await refuse(g, "add", url="http://127.0.0.1:9")
        assert status == 409 and "no pool of engines" in message
