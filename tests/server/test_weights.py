"""Test weight updates behind the fence: what trainers do, what agents see, and failing replicas.

The engines are fakes with the paths of vLLM or SGLang that "sample" the name of their weights. Tests with real engines are in
`tests/real`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.kit import OpenSession, Running, gateway, renderer, say, until
from tests.server.test_forwarding import crew
from tests.speed import scaled
from turngate.engines.base import Engine
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.errors import StoreError


class FakeVLLM:
    """The part of vLLM's development API that the gateway uses. It "samples" the name of the weights or adapter it serves."""

    def __init__(self) -> None:
        self.url = ""
        self.weights = "base"
        self.weight_version = "default"
        self.adapters: dict[str, str] = {}
        self.awake = asyncio.Event()
        self.awake.set()
        self.pace = asyncio.Event()  # set: the second half of an answer may be sampled
        self.pace.set()
        self.salts: list[str] = []
        self.control_paths: list[str] = []
        self.failing_paths: set[str] = set()
        self.missing_paths: set[str] = set()
        self.aborted = False
        self.load_gate = asyncio.Event()  # set: a model loads immediately
        self.load_gate.set()
        self.half_sampled = 0  # number of answers whose first half was sampled

    def connect(self) -> Engine:
        return VLLM(self.url, "m")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = json.loads(await request.read() or b"{}") if request.method == "POST" else {}
        if path in self.missing_paths:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path in self.failing_paths:
            return web.json_response({"error": {"message": f"no {path} today"}}, status=500)
        if request.method == "POST" and path != "/v1/completions":
            self.control_paths.append(path)
        match path:
            case "/health":
                return web.Response()
            case "/v1/models":
                served = [{"id": "m", "max_model_len": 4096, "root": "base"}]
                served += [{"id": name, "max_model_len": 4096, "parent": "m"} for name in self.adapters]
                return web.json_response({"data": served})
            case "/weight_info":
                return web.json_response({"weight_version": self.weight_version})
            case "/update_weight_version":
                self.weight_version = body["new_version"]
            case "/pause":
                assert request.query["mode"] == "keep"
                self.awake.clear()
            case "/resume":
                self.awake.set()
            case "/v1/load_lora_adapter":
                if body["lora_name"] in self.adapters:
                    return web.json_response({"error": {"message": "already loaded"}}, status=400)
                if "missing" in body["lora_path"]:
                    return web.json_response({"error": {"message": "No adapter found"}}, status=404)
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/v1/unload_lora_adapter":
                self.adapters.pop(body["lora_name"])
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                path = body["kwargs"].get("weights_path", self.weights)  # as vLLM: the last path
                await self.load_gate.wait()
                if "missing" in path:
                    return web.json_response({"error": {"message": f"no weights in {path}"}}, status=500)
                self.weights = path
            case "/reset_prefix_cache":
                pass
            case "/abort_requests":
                self.aborted = True
                self.pace.set()
            case "/v1/completions":
                return await self._complete(request, body)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({})

    async def _complete(self, request: web.Request, body: Any) -> web.StreamResponse:
        self.salts.append(body["cache_salt"])
        if body["model"] not in ("m", *self.adapters):
            return web.json_response({"error": {"message": "The model does not exist"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await self.awake.wait()
        first = self._sample(body["model"])
        if body["stream"]:
            await response.prepare(request)
            await response.write(_event(first, None))
        self.half_sampled += 1
        await self.pace.wait()
        if self.aborted:
            await response.write(_event([], "abort") + b"data: [DONE]\n\n")
            return response
        await self.awake.wait()
        last = [*self._sample(body["model"]), renderer().stop_ids[0]]
        if not body["stream"]:
            return web.json_response(_answer([*first, *last], "stop"))
        await response.write(_event(last, "stop") + b"data: [DONE]\n\n")
        return response

    def _sample(self, model: str) -> list[int]:
        return renderer().tokenizer.encode(f"[{self.adapters.get(model, self.weights)}]")


class FakeSGLang(FakeVLLM):
    """The part of SGLang's API that the gateway uses to load whole models.

    If `/flush_cache` fails, it loads the weights, but reports a failure and keeps the weight version.
    """

    def connect(self) -> Engine:
        return SGLang(self.url, "m")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}") if request.method == "POST" else {}
        self.control_paths.append(request.path)
        match request.path:
            case "/health" | "/abort_request":
                return web.json_response({})
            case "/get_model_info":
                return web.json_response({"model_path": "base", "weight_version": self.weight_version})
            case "/get_server_info":
                return web.json_response({"context_length": 4096})
            case "/update_weight_version":
                assert body["abort_all_requests"] is False
                self.weight_version = body["new_version"]
            case "/update_weights_from_disk":
                await asyncio.shield(self._load(body))  # a load continues if the client disconnects
                if "/flush_cache" in self.failing_paths:
                    failure = {"success": False, "message": "Weights were updated, but the cache was not flushed"}
                    return web.json_response(failure, status=400)
            case "/generate":
                ids = [*self._sample(""), renderer().stop_ids[0]]
                meta = {"completion_tokens": len(ids), "finish_reason": {"type": "stop"}}
                meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
                return web.json_response({"output_ids": ids, "meta_info": meta})
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"success": True})

    async def _load(self, body: Any) -> None:
        await self.load_gate.wait()
        self.weights = body["model_path"]
        if "/flush_cache" not in self.failing_paths:
            self.weight_version = body.get("weight_version", self.weight_version)


def _answer(ids: Sequence[int], finish: str | None) -> Any:
    logprobs = {"token_logprobs": [-1.0] * len(ids), "tokens": [f"token_id:{i}" for i in ids]}
    return {"choices": [{"text": "x", "logprobs": logprobs, "finish_reason": finish}]}


def _event(ids: Sequence[int], finish: str | None) -> bytes:
    return b"data: " + json.dumps(_answer(ids, finish)).encode() + b"\n\n"


@asynccontextmanager
async def engines(count: int = 1, kind: type[FakeVLLM] = FakeVLLM) -> AsyncIterator[list[FakeVLLM]]:
    async with AsyncExitStack() as stack:
        fakes = [kind() for _ in range(count)]
        for fake in fakes:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", fake.handle)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fakes


@asynccontextmanager
async def serve_gateway(
    count: int = 1, kind: type[FakeVLLM] = FakeVLLM, **config: Any
) -> AsyncIterator[tuple[Running, list[FakeVLLM]]]:
    async with engines(count, kind) as fakes:
        pool = Pool([fake.connect() for fake in fakes], timing=PoolTiming(backoff_s=0.02, check_s=0.2))
        async with gateway(engine=pool, model="m", **config) as g:
            yield g, fakes


async def load(g: Running, **update: Any) -> Any:
    response = await g.admin.post("/admin/weights", json=update)
    assert response.is_success, response.text
    return response.json()


async def load_error(g: Running, **update: Any) -> tuple[int, str]:
    response = await g.admin.post("/admin/weights", json=update)
    return response.status_code, response.json()["error"]["message"]


async def spans(g: Running, session: OpenSession) -> list[tuple[int, int]]:
    return [(turn["version_start"], turn["version_end"]) for turn in await g.turns(session.id)]


async def events(g: Running, kind: str) -> list[Any]:
    text = (await g.admin.get("/admin/events?wait=0")).text
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    return [event["data"] for event in found if event["kind"] == kind]


# ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_agents_get_active_adapter_under_one_model_name() -> None:
    async with serve_gateway(2) as (g, fakes):
        session = await g.open()
        assert (await g.ask(session.key, "Hi")).content == "[base][base]"
        done = await load(g, version=1, lora_path="/a/1", name="trl-policy-v{version}")
        assert done["version"] == 1 and done["model"] == "trl-policy-v1" and not done["paused"]
        assert [replica["has"] for replica in done["replicas"]] == [1, 1]
        assert all(fake.adapters == {"trl-policy-v1": "/a/1"} for fake in fakes)
        assert (await g.ask(session.key, "Hi")).content == "[/a/1][/a/1]"
        for version in (2, 3):
            await load(g, version=version, lora_path=f"/a/{version}", name="trl-policy-v{version}")
        assert (await g.ask(session.key, "Hi")).content == "[/a/3][/a/3]"
        assert await spans(g, session) == [(0, 0), (1, 1), (3, 3)]
        assert sorted(salt for fake in fakes for salt in fake.salts) == ["v0", "v1", "v3"]
        assert all(
            set(fake.adapters) == {"trl-policy-v2", "trl-policy-v3"} for fake in fakes
        )  # older adapters are unloaded
        assert [event["version"] for event in await events(g, "weights")] == [1, 2, 3]


async def test_call_in_flight_keeps_its_adapter_and_version() -> None:
    async with serve_gateway() as (g, [fake]):
        for version in (1, 2):
            session = await g.open()
            fake.pace.clear()
            asking = g.start(g.ask(session.key, "Hi", "async stream"))
            await until(lambda version=version: fake.half_sampled == version)
            await load(g, version=version, lora_path=f"/a/{version}")
            fake.pace.set()
            old = "base" if version == 1 else "/a/1"
            assert (await asking).content == f"[{old}][{old}]"
            assert await spans(g, session) == [(version - 1, version - 1)]


async def test_call_in_flight_on_an_adapter_keeps_its_version_when_calls_return_to_the_own_model() -> None:
    async with serve_gateway() as (g, [fake]):
        await load(g, version=1, lora_path="/a/1")
        session = await g.open()
        fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fake.half_sampled == 1)
        for resumed in ({"version": 2, "model": ""}, {"version": 3}):
            (await g.admin.post("/admin/fence/resume", json=resumed)).raise_for_status()
        fake.pace.set()
        assert (await asking).content == "[/a/1][/a/1]"
        assert await spans(g, session) == [(1, 1)]


async def test_call_in_flight_on_the_own_model_gets_the_version_of_its_new_weights() -> None:
    async with serve_gateway() as (g, [fake]):
        session = await g.open()
        fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fake.half_sampled == 1)
        await load(g, version=1, lora_path="/a/1")
        fake.weights = "new"  # sent by the trainer
        (await g.admin.post("/admin/fence/resume", json={"version": 2, "model": ""})).raise_for_status()
        fake.pace.set()
        assert (await asking).content == "[base][new]"
        assert await spans(g, session) == [(0, 2)]


async def test_resume_can_name_externally_loaded_adapter(tmp_path: Path) -> None:
    async with engines() as [fake]:
        fake.adapters["trl-policy-v7"] = "theirs"
        for start in range(2):
            pool = Pool([VLLM(fake.url, "m")])
            async with gateway(engine=pool, model="m", data=tmp_path) as g:
                if start == 0:
                    response = (
                        await g.admin.post("/admin/fence/resume", json={"version": 7, "model": "trl-policy-v7"})
                    ).json()
                    assert response == {"version": 7, "paused": False, "in_flight": 0, "model": "trl-policy-v7"}
                    without_model = await g.admin.post("/admin/fence/resume", json={"version": 8})
                    assert (
                        without_model.status_code == 409
                        and "set model to the name under which the engine serves version 8" in without_model.text
                    )
                    other = await g.admin.post("/admin/fence/resume", json={"version": 7, "model": "x"})
                    assert other.status_code == 409 and "is already served as trl-policy-v7" in other.text
                    without_version = await g.admin.post("/admin/fence/resume", json={"model": "x"})
                    assert without_version.status_code == 409
                session = await g.open()
                assert (await g.ask(session.key, "Hi")).content == "[theirs][theirs]"  # also after a restart
                assert await spans(g, session) == [(7, 7)]


async def test_failed_adapter_load_keeps_old_version() -> None:
    async with serve_gateway(2) as (g, fakes):
        await load(g, version=1, lora_path="/a/1")
        fakes[1].failing_paths.add("/v1/load_lora_adapter")
        status, message = await load_error(g, version=2, lora_path="/a/2")
        assert status == 502
        assert message.startswith("version 2 was not loaded; version 1 remains active.")
        assert f"{fakes[0].url}: rolled back (has version 1)" in message
        assert f"{fakes[1].url}: vllm: no /v1/load_lora_adapter today (has version 1)" in message
        assert [sorted(fake.adapters) for fake in fakes] == [["policy-v1"], ["policy-v1"]]
        session = await g.open()
        assert (await g.ask(session.key, "Hi")).content == "[/a/1][/a/1]"
        assert (await g.admin.get("/admin/fence")).json() == {
            "version": 1,
            "paused": False,
            "in_flight": 0,
            "model": "policy-v1",
        }
        fakes[1].failing_paths.clear()
        await load(g, version=2, lora_path="/a/2")


async def test_restarted_replica_gets_no_calls_without_adapter() -> None:
    async with serve_gateway(2) as (g, fakes):
        await load(g, version=1, lora_path="/a/1")
        fakes[0].adapters.clear()
        await until(lambda: any(not r.up for r in g.app.engine._replicas))  # type: ignore[union-attr]
        for _ in range(4):
            session = await g.open()
            assert (await g.ask(session.key, "Hi")).content == "[/a/1][/a/1]"
        shown = (await g.admin.get("/admin/weights")).json()
        assert (
            "adapter policy-v1 is not loaded, probably because the engine restarted" in shown["replicas"][0]["detail"]
        )
        assert (await load_error(g, version=1, lora_path="/a/other"))[0] == 409
        fakes[1].control_paths.clear()
        await load(g, version=1, lora_path="/a/1")
        assert fakes[0].adapters == {"policy-v1": "/a/1"} and fakes[1].control_paths == []
        assert all(r["ok"] for r in (await g.admin.get("/admin/weights")).json()["replicas"])


async def test_restarted_engine_with_its_initial_weights_gets_no_call() -> None:
    """A call must not be the check: it would be recorded with the version that the engine no longer has."""
    async with engines() as [fake]:
        timing = PoolTiming(check_s=3600, backoff_s=3600, backoff_max_s=3600, load_s=0)
        pool = Pool([VLLM(fake.url, "m")], timing=timing)
        async with gateway(engine=pool, model="m") as g:
            await load(g, version=1, path="/m/1")
            session = await g.open()
            assert (await g.ask(session.key, "Hi")).content == "[/m/1][/m/1]"
            fake.missing_paths |= {"/health"}  # it restarts …
            for _ in range(2):
                await pool.check()
            fake.missing_paths.clear()
            fake.weights, fake.weight_version = "base", "default"  # … and has lost the weights
            with pytest.raises(openai.InternalServerError, match="no engine has the current weights"):
                await g.ask(session.key, "Hi")
            assert await spans(g, session) == [(1, 1)]
            await load(g, version=1, path="/m/1")
            assert (await g.ask(session.key, "Hi again")).content == "[/m/1][/m/1]"


async def test_call_in_flight_does_not_bring_wrong_weights_back() -> None:
    async with engines() as [fake]:
        timing = PoolTiming(check_s=3600, backoff_s=3600, backoff_max_s=3600, load_s=0)
        pool = Pool([VLLM(fake.url, "m")], timing=timing)
        async with gateway(engine=pool, model="m") as g:
            await load(g, version=1, path="/m/1")
            fake.awake.clear()
            call = g.start(g.ask((await g.open()).key, "Hi"))
            await until(lambda: fake.salts)
            fake.weight_version = "default"
            await pool.check()
            fake.awake.set()
            await call
            assert not pool.accepts_calls
            with pytest.raises(openai.InternalServerError, match="no engine has the current weights"):
                await g.ask((await g.open()).key, "Hi")


# ── whole models ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_model_load_waits_for_calls_in_flight() -> None:
    async with serve_gateway(2) as (g, fakes):
        session = await g.open()
        for fake in fakes:
            fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: sum(fake.half_sampled for fake in fakes) == 1)
        loading = g.start(load(g, version=1, path="/m/1"))
        await until(lambda: g.app.fence.paused)
        later = g.start(g.ask((await g.open()).key, "Hi"))
        await asyncio.sleep(0.05)
        assert not loading.done() and not later.done() and fakes[0].weights == "base"
        for fake in fakes:
            fake.pace.set()
        assert (await asking).content == "[base][base]"
        assert (await loading)["version"] == 1
        assert (await later).content == "[/m/1][/m/1]"
        assert await spans(g, session) == [(0, 0)]
        assert [fake.weight_version for fake in fakes] == ["1", "1"] and "/reset_prefix_cache" in fakes[0].control_paths


async def test_kept_calls_continue_on_new_weights() -> None:
    async with serve_gateway() as (g, [fake]):
        session = await g.open()
        fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fake.half_sampled == 1)
        fake.pace.set()  # it could continue, but is frozen
        fake.awake.clear()
        await load(g, version=1, path="/m/1", mode="keep")
        assert (await asking).content == "[base][/m/1]"
        assert await spans(g, session) == [(0, 1)]
        [row] = await g.samples(session.id)
        assert [(s["version_start"], s["version_end"]) for s in row["spans"]] == [(0, 1)]
        assert (
            fake.control_paths[0] == "/pause"
            and fake.control_paths[-1] == "/resume"
            and "/reset_prefix_cache" not in fake.control_paths
        )


async def test_pause_keep_freezes_engine_for_external_update() -> None:
    async with serve_gateway() as (g, [fake]):
        session = await g.open()
        fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fake.half_sampled == 1)
        assert (await g.pause("keep"))["paused"]
        fake.pace.set()
        fake.weights = "by nccl"
        await asyncio.sleep(0.05)
        assert not asking.done()
        await g.resume(4)
        assert (await asking).content == "[base][by nccl]"
        assert await spans(g, session) == [(0, 4)]


async def test_failed_model_load_is_rolled_back_on_other_replicas() -> None:
    async with serve_gateway(3) as (g, fakes):
        await load(g, version=1, path="/m/1")
        fakes[2].failing_paths.add("/collective_rpc")
        status, message = await load_error(g, version=2, path="/m/2")
        assert status == 502 and "version 1 remains active" in message
        assert f"{fakes[1].url}: rolled back (has version 1)" in message
        assert f"{fakes[2].url}: vllm: no /collective_rpc today (has no usable weights)" in message
        assert [fake.weights for fake in fakes] == ["/m/1", "/m/1", "/m/1"]
        assert not g.app.engine._replicas[2].up  # type: ignore[union-attr]  # before any call reached it
        for _ in range(6):
            assert (await g.ask((await g.open()).key, "Hi")).content == "[/m/1][/m/1]"
        fakes[2].failing_paths.clear()
        await load(g, version=2, path="/m/2")
        assert [fake.weight_version for fake in fakes] == ["2", "2", "2"]


@pytest.mark.parametrize("kind", [FakeVLLM, FakeSGLang])
async def test_replica_that_lost_weights_sent_by_a_trainer_gets_no_calls(kind: type[FakeVLLM]) -> None:
    """The gateway cannot restore these weights, and must not replace them with the engine's initial ones."""
    async with serve_gateway(2, kind) as (g, fakes):
        for fake in fakes:
            fake.weights = "by nccl"
        await g.resume(3)
        for fake in fakes[1:]:
            fake.failing_paths |= {"/collective_rpc", "/flush_cache"}
        status, message = await load_error(g, version=4, path="/m/4")
        assert status == 502 and "version 3 remains active" in message
        assert "previous weights cannot be restored because their path is unknown" in message
        assert "base" not in [fake.weights for fake in fakes]
        for replica in (await g.admin.get("/admin/weights")).json()["replicas"]:
            assert not replica["ok"] and replica["wrong"], replica
        with pytest.raises(openai.InternalServerError, match="no engine has the current weights"):
            await g.ask((await g.open()).key, "Hi")
        for fake in fakes:
            fake.failing_paths.clear()
            fake.aborted = False
        await load(g, version=4, path="/m/4")
        assert "/m/4" in (await g.ask((await g.open()).key, "Hi")).content


async def test_invalid_weights_affect_one_replica() -> None:
    async with serve_gateway(2) as (g, fakes):
        status, message = await load_error(g, version=1, path="/missing")
        assert status == 502 and "version 0 remains active" in message and "no weights in /missing" in message
        assert "not tried (has version 0)" in message
        assert "/collective_rpc" not in fakes[1].control_paths
        assert not g.app.engine._replicas[0].up  # type: ignore[union-attr]
        assert (await g.ask((await g.open()).key, "Hi")).content == "[base][base]"
        assert len(fakes[0].salts) == 0


async def test_sglang_with_weights_of_a_failed_load_gets_no_calls() -> None:
    """SGLang may report a failure although it has loaded the new weights. Then they must not be sampled under the old version."""
    async with serve_gateway(2, FakeSGLang) as (g, fakes):
        fakes[0].failing_paths.add("/flush_cache")
        status, message = await load_error(g, version=1, path="/m/1")
        assert status == 502 and "version 0 remains active" in message
        assert "Weights were updated, but the cache was not flushed (has no usable weights)" in message
        assert [fake.weights for fake in fakes] == ["/m/1", "base"]
        for _ in range(4):
            assert (await g.ask((await g.open()).key, "Hi")).content == "[base]"
        [failed, _] = (await g.admin.get("/admin/weights")).json()["replicas"]
        assert not failed["ok"] and "its update to weight version 1 has not completed" in failed["detail"]
        fakes[0].failing_paths.clear()
        await load(g, version=1, path="/m/1")
        fakes[1].failing_paths.add("/flush_cache")
        assert (await load_error(g, version=2, path="/m/2"))[0] == 502
        assert [fake.weights for fake in fakes] == ["/m/1", "/m/2"]
        for _ in range(4):
            assert (await g.ask((await g.open()).key, "Hi")).content == "[/m/1]"


async def test_sglang_that_finishes_a_load_after_the_gateway_was_killed_gets_no_calls(tmp_path: Path) -> None:
    async with engines(1, FakeSGLang) as [fake]:
        fake.load_gate.clear()
        async with gateway(engine=Pool([fake.connect()]), model="m", data=tmp_path) as g:
            loading = asyncio.create_task(g.admin.post("/admin/weights", json={"version": 1, "path": "/m/1"}))
            await until(lambda: "/update_weights_from_disk" in fake.control_paths)
        await asyncio.gather(loading, return_exceptions=True)
        async with gateway(engine=Pool([fake.connect()]), model="m", data=tmp_path) as g:
            await until(lambda: not g.app.fence.paused)
            fake.load_gate.set()
            await until(lambda: fake.weights == "/m/1")
            session = await g.open()
            with pytest.raises(openai.InternalServerError, match="no engine has the current weights"):
                await g.ask(session.key, "Hi")
            await load(g, version=1, path="/m/1")
            assert (await g.ask(session.key, "Hi")).content == "[/m/1]"
            assert await spans(g, session) == [(1, 1)]


async def test_replica_that_cannot_be_repaired_does_not_affect_the_others() -> None:
    async with serve_gateway(3) as (g, fakes):
        await load(g, version=1, path="/m/1")
        for fake in fakes[:2]:  # these restart
            fake.weights, fake.weight_version = "base", "default"
        fakes[0].failing_paths.add("/collective_rpc")
        status, message = await load_error(g, version=1, path="/m/1")
        assert status == 502
        assert message == (
            "version 1 remains active, but could not be loaded again into every engine. "
            f"{fakes[0].url}: vllm: no /collective_rpc today (has no usable weights); "
            f"{fakes[1].url}: has version 1; {fakes[2].url}: has version 1"
        )
        assert [fake.weights for fake in fakes] == ["base", "/m/1", "/m/1"]
        [_, failed] = await events(g, "weights")
        assert failed["failed"] and [replica["has"] for replica in failed["replicas"]] == [None, 1, 1]


async def test_kept_call_is_aborted_when_load_fails() -> None:
    async with serve_gateway() as (g, [fake]):
        session = await g.open()
        fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fake.half_sampled == 1)
        assert (await load_error(g, version=1, path="/missing", mode="keep"))[0] == 502
        with pytest.raises(openai.APIError):
            await asking
        assert "/abort_requests" in fake.control_paths and fake.awake.is_set()
        [turn] = await g.turns(session.id)
        assert turn["role"] == "aborted" and (turn["version_start"], turn["version_end"]) == (0, 0)


async def test_slow_calls_time_out_update_and_continue() -> None:
    async with serve_gateway() as (g, [fake]):
        session = await g.open()
        fake.pace.clear()
        asking = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: fake.half_sampled == 1)
        status, message = await load_error(g, version=1, path="/m/1", limit_s=0.1)
        assert status == 504 and "did not end within 0.1 s, so nothing was loaded" in message
        assert not g.app.fence.paused
        fake.pace.set()
        assert (await asking).content == "[base][base]"


@pytest.mark.parametrize(
    ("update", "status", "message"),
    [
        ({"version": 1}, 400, "exactly one of 'path' and 'lora_path'"),
        ({"version": 1, "path": "/m", "lora_path": "/a"}, 400, "exactly one of 'path' and 'lora_path'"),
        ({"version": 1, "path": "/m", "mode": "hold"}, 400, "mode 'hold' cannot be used with 'path'"),
        ({"version": -1, "path": "/m"}, 400, "version"),
        ({"version": 1, "lora_path": "/a", "name": ""}, 400, "'name' is empty"),
        ({"version": 2, "lora_path": "/a"}, 409, "version 2 is older than the current version 3"),
        ({"version": 3, "lora_path": "/a"}, 409, "version 3 is already active with different weights"),
    ],
)
async def test_invalid_update_is_refused_before_any_change(update: Any, status: int, message: str) -> None:
    async with serve_gateway() as (g, [fake]):
        await g.resume(3)
        error = await load_error(g, **update)
        assert error[0] == status and message in error[1]
        assert fake.control_paths == [] and not g.app.fence.paused


async def test_engine_without_weights_refuses_update() -> None:
    async with gateway([say("Hi")]) as g:
        assert await load_error(g, version=1, path="/m") == (
            409,
            "this gateway has no engine that can load weights; the engines vllm, sglang and local can",
        )
        kept = await g.admin.post("/admin/fence/pause", json={"mode": "keep"})
        assert kept.status_code == 409 and not g.app.fence.paused


async def test_vllm_without_dev_mode_names_required_settings() -> None:
    async with serve_gateway() as (g, [fake]):
        fake.missing_paths = {"/v1/load_lora_adapter", "/update_weight_version", "/pause"}
        status, message = await load_error(g, version=1, lora_path="/a")
        assert status == 502 and "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in message
        status, message = await load_error(g, version=1, path="/m")
        assert status == 502 and "start it with VLLM_SERVER_DEV_MODE=1" in message
        kept = await g.admin.post("/admin/fence/pause", json={"mode": "keep"})
        assert kept.status_code == 400 and "does not serve /pause" in kept.text


# ── pauses, limits and restarts ─────────────────────────────────────────────────────────────────────────────────────


async def test_pause_limit_resumes_at_old_version() -> None:
    async with serve_gateway() as (g, [fake]):
        await g.resume(2)
        await g.admin.post("/admin/fence/pause", json={"mode": "keep", "limit_s": scaled(0.2)})
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        await asyncio.sleep(0.05)
        assert not asking.done() and not fake.awake.is_set()
        assert (await asking).content == "[base][base]"
        assert await spans(g, session) == [(2, 2)] and fake.awake.is_set()
        assert (await events(g, "fence"))[-1] == {"paused": False, "version": 2, "expired": True}


async def test_resume_clears_pause_limit() -> None:
    async with gateway([say("Hi")] * 3) as g:
        limit_s = scaled(0.1)
        await g.admin.post("/admin/fence/pause", json={"limit_s": limit_s})
        assert (await g.resume(1))["version"] == 1
        assert (await g.resume(1))["version"] == 1  # repeating it is allowed
        await g.pause()
        await asyncio.sleep(1.25 * limit_s)
        assert g.app.fence.paused
        await g.admin.post("/admin/fence/pause", json={"limit_s": 0.05})
        await until(lambda: not g.app.fence.paused)
        assert (await g.resume(2))["version"] == 2
        assert sum(event.get("expired", False) for event in await events(g, "fence")) == 1
        assert (await g.admin.post("/admin/fence/pause", json={"limit_s": 0})).status_code == 400


async def test_pause_survives_restart_until_resume(tmp_path: Path, caplog: Any) -> None:
    """A weight update may be incomplete, so nothing is sampled until the trainer resumes."""
    async with engines() as [fake]:
        async with gateway(engine=Pool([VLLM(fake.url, "m")]), model="m", data=tmp_path) as g:
            await g.pause("keep")
        async with gateway(engine=Pool([VLLM(fake.url, "m")]), model="m", data=tmp_path) as g:
            assert g.app.fence.paused and not fake.awake.is_set()
            assert "POST /admin/fence/resume" in caplog.text
            assert (await events(g, "fence"))[-1] == {"paused": True, "mode": "keep", "restarted": True}
            session = await g.open()
            call = asyncio.create_task(g.ask(session.key, "Hi"))
            await asyncio.sleep(0.1)
            assert not call.done() and fake.salts == []
            await g.resume(1)
            assert (await call).content == "[base][base]"
            assert await spans(g, session) == [(1, 1)]
        async with gateway(engine=Pool([VLLM(fake.url, "m")]), model="m", data=tmp_path) as g:
            assert not g.app.fence.paused


async def test_pause_limit_survives_restart(tmp_path: Path) -> None:
    async with gateway(data=tmp_path) as g:
        await g.admin.post("/admin/fence/pause", json={"limit_s": scaled(0.25)})
    async with gateway([say("Hi")], data=tmp_path) as g:
        assert g.app.fence.paused
        await until(lambda: not g.app.fence.paused)
        assert (await events(g, "fence"))[-1] == {"paused": False, "version": 0, "expired": True}
        limit_s = scaled(0.1)
        await g.admin.post("/admin/fence/pause", json={"limit_s": limit_s})
        await g.app.updates.close()  # as if killed: the limit passes while it is down
        await asyncio.sleep(1.25 * limit_s)
        assert g.app.fence.paused
    async with gateway([say("Hi")], data=tmp_path) as g:
        await until(lambda: not g.app.fence.paused)


async def test_frozen_engines_without_pause_are_woken(tmp_path: Path) -> None:
    async with engines() as [fake]:
        async with gateway(engine=Pool([VLLM(fake.url, "m")]), model="m", data=tmp_path) as g:
            await g.pause("keep")
            g.app.barrier.resume(None)  # as if killed before waking the engines
        assert not fake.awake.is_set()
        async with gateway(engine=Pool([VLLM(fake.url, "m")]), model="m", data=tmp_path) as g:
            await until(fake.awake.is_set)
            assert (await g.ask((await g.open()).key, "Hi")).content == "[base][base]"


# ── store failures and crashes ──────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def failing_store(g: Running, monkeypatch: pytest.MonkeyPatch, *fields: str) -> AsyncIterator[None]:
    """Make writes of these settings fail."""
    write = g.app.store.set_settings

    def fails(values: Any, event: Any = None) -> None:
        if any(name.startswith(field) for name in values for field in fields):
            raise StoreError("the disk is full")
        write(values, event)

    with monkeypatch.context() as patched:
        patched.setattr(g.app.store, "set_settings", fails)
        yield


@pytest.mark.parametrize(
    ("update", "field"),
    [
        *(({"path": "/m/1"}, field) for field in ("weights:", "fence_held", "policy_version")),
        *(({"path": "/m/1", "mode": "keep"}, field) for field in ("weights:", "engines_frozen", "policy_version")),
        *(({"lora_path": "/a/1"}, field) for field in ("fence_held", "policy_version")),
    ],
)
async def test_new_weights_are_never_sampled_as_old_version(
    monkeypatch: pytest.MonkeyPatch, update: Any, field: str
) -> None:
    monkeypatch.setattr("turngate.gateway.weights._RETRY_S", 0.05)
    async with serve_gateway(2) as (g, fakes):
        async with failing_store(g, monkeypatch, field):
            assert await load_error(g, version=1, **update) == (503, "the disk is full")
            session = await g.open()
            call = asyncio.create_task(g.ask(session.key, "Hi"))
            await asyncio.sleep(0.1)
        # Once writes succeed, calls continue at the old version with its weights.
        async with asyncio.timeout(scaled(5)):
            assert (await call).content == "[base][base]"
        assert await spans(g, session) == [(0, 0)]
        assert all(fake.awake.is_set() and fake.weights == "base" and not fake.adapters for fake in fakes)
        await load(g, version=1, **update)
        assert (await g.ask((await g.open()).key, "Hi")).content in ("[/m/1][/m/1]", "[/a/1][/a/1]")


async def test_unstorable_resume_can_be_repeated_and_keeps_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for field in ("weights:", "policy_version"):
        async with gateway([say("Hi")] * 3) as g:
            await g.admin.post("/admin/fence/pause", json={"limit_s": scaled(0.15)})
            async with failing_store(g, monkeypatch, field):
                answer = await g.admin.post("/admin/fence/resume", json={"version": 1})
                assert answer.status_code == 503 and g.app.fence.paused
            await until(lambda g=g: not g.app.fence.paused)  # type: ignore[misc]
            assert g.app.fence.version == 0
            await g.pause()
            assert (await g.resume(1))["version"] == 1


async def test_gateway_killed_during_load_restores_active_weights(tmp_path: Path) -> None:
    """The version was not raised, so the new weights must not be sampled under the old version."""
    for held in (False, True):
        async with engines(2) as fakes:

            def pool(fakes: Any = fakes) -> Pool:
                return Pool([VLLM(fake.url, "m") for fake in fakes], timing=PoolTiming(check_s=0.1))

            data = tmp_path / str(held)
            data.mkdir()
            async with gateway(engine=pool(), model="m", data=data) as g:
                if held:
                    await g.pause()
                fakes[1].load_gate.clear()
                loading = asyncio.create_task(g.admin.post("/admin/weights", json={"version": 1, "path": "/m/1"}))
                await until(
                    lambda fakes=fakes: fakes[0].weights == "/m/1" and "/collective_rpc" in fakes[1].control_paths
                )  # type: ignore[misc]
            await asyncio.gather(loading, return_exceptions=True)
            fakes[1].load_gate.set()
            async with gateway(engine=pool(), model="m", data=data) as g:
                if held:
                    assert g.app.fence.paused
                    await g.resume()
                await until(lambda g=g: not g.app.fence.paused)  # type: ignore[misc]
                session = await g.open()
                assert (await g.ask(session.key, "Hi")).content == "[base][base]"
                assert await spans(g, session) == [(0, 0)] and fakes[0].weights == "base"


async def test_waking_engine_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.gateway.weights._RETRY_S", 0.05)
    async with serve_gateway() as (g, [fake]):
        await g.pause("keep")
        fake.failing_paths.add("/resume")
        assert (await g.admin.post("/admin/fence/resume", json={"version": 1})).status_code == 502
        fake.failing_paths.clear()
        await until(fake.awake.is_set)
        session = await g.open()
        assert (await g.ask(session.key, "Hi")).content == "[base][base]"
        assert await spans(g, session) == [(1, 1)]


async def test_failed_freeze_does_not_pause() -> None:
    async with serve_gateway(2) as (g, fakes):
        fakes[1].failing_paths.add("/pause")
        assert (await g.admin.post("/admin/fence/pause", json={"mode": "keep"})).status_code == 502
        assert not g.app.fence.paused and all(fake.awake.is_set() for fake in fakes)


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_workers_share_one_weight_load() -> None:
    async with engines() as [fake]:
        pools: Any = [Pool([VLLM(fake.url, "m")]) for _ in range(2)]
        async with crew(pools) as c:
            sessions = [await c.open_at(0), await c.open_at(1)]
            await load(c[1], version=1, lora_path="/a/1")
            assert fake.control_paths == ["/v1/load_lora_adapter"]
            for session in sessions:
                assert (await c[0].ask(session.key, "Hi")).content == "[/a/1][/a/1]"
                assert await spans(c[0], session) == [(1, 1)]
            assert await c[1].pause("keep") == {"version": 1, "paused": True, "in_flight": 0, "model": "policy-v1"}
            assert not fake.awake.is_set()
            await c[0].resume()
            assert fake.awake.is_set()
            assert (await load_error(c[1], version=2, lora_path="/missing"))[0] == 502
            assert [worker.app.fence.version for worker in c.workers] == [1, 1]
            await load(c[0], version=2, path="/m/2", mode="drain")
            assert [(w.app.fence.version, w.app.fence.model) for w in c.workers] == [(2, ""), (2, "")]
            assert (await c[0].ask(sessions[1].key, "Hi again")).content == "[/m/2][/m/2]"


async def test_pause_limit_applies_to_all_workers_across_restart(tmp_path: Path) -> None:
    async with crew(data=tmp_path) as c:
        await c[1].admin.post("/admin/fence/pause", json={"limit_s": scaled(0.1)})
        assert all(worker.app.fence.paused for worker in c.workers)
        await until(lambda: not any(worker.app.fence.paused for worker in c.workers))
        await c[1].admin.post("/admin/fence/pause", json={"limit_s": scaled(0.25)})
    async with crew(data=tmp_path, run="another") as c:  # a new run
        assert all(worker.app.fence.paused for worker in c.workers)
        await until(lambda: not any(worker.app.fence.paused for worker in c.workers))
        assert (await events(c[0], "fence"))[-1]["expired"] is True


async def test_worker_0_crash_during_load_resumes_workers(tmp_path: Path) -> None:
    async with engines(2) as fakes:
        fakes[0].load_gate.clear()
        pools: Any = [Pool([VLLM(f.url, "m") for f in fakes], timing=PoolTiming(check_s=0.1)) for _ in range(2)]
        async with crew(pools, data=tmp_path) as c:
            loading = asyncio.create_task(c[0].admin.post("/admin/weights", json={"version": 1, "path": "/m/1"}))
            await until(lambda: "/collective_rpc" in fakes[0].control_paths)
            assert all(worker.app.fence.paused for worker in c.workers)
        await asyncio.gather(loading, return_exceptions=True)
        pools = [Pool([VLLM(f.url, "m") for f in fakes], timing=PoolTiming(check_s=0.1)) for _ in range(2)]
        async with crew(pools, data=tmp_path) as c:  # the same run
            await until(lambda: not any(worker.app.fence.paused for worker in c.workers))
            for _ in range(3):  # the replica with the incomplete update gets no calls
                assert (await c[0].ask((await c[0].open()).key, "Hi")).content == "[base][base]"
            assert (
                fakes[0].salts == []
                and "its update to weight version 1 has not completed" in (await c[0].admin.get("/admin/weights")).text
            )
