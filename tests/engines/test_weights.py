"""Tests for weight updates: the requests sent to vLLM 0.32 and to SGLang."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.engines.standins import Answer, StandIn, answer_with, collect, make_request, serving
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.scripted import Scripted
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.engines.weights import PolicyWeights, UpdatableReplica, list_updatable_replicas
from turngate.errors import EngineRejected, EngineUnavailable

MODEL = PolicyWeights(version=3, path="/m/3")
ADAPTER = PolicyWeights(version=3, lora_path="/a/3", name="policy-v3")


def sent_requests(server: StandIn) -> list[tuple[str, Any]]:
    return [(path, json.loads(body)) for path, body in zip(server.raw_paths, server.bodies, strict=True)]


def answer_by_path(answers: dict[str, Any]) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(answers.get(request.path, {}))

    return answer


@asynccontextmanager
async def started(engine: Any) -> Any:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_vllm_update_requests() -> None:
    adapter = {"id": "policy-v2", "root": "/a/2", "parent": "m"}
    documents = {"/v1/models": {"data": [adapter, {"id": "m", "root": "/m/0", "parent": None}]}}
    server = StandIn(answer_with({}), documents)
    async with serving(server), started(VLLM(server.url, "m")) as engine:
        await engine.pause()
        await engine.load(MODEL, frozen=True)
        await engine.resume()
        await engine.reload_initial_weights(frozen=False)
        await engine.load(ADAPTER, frozen=False)
        await engine.unload("policy-v3")
        documents["/v1/models"] = {"data": [{"id": "m"}]}
        with pytest.raises(EngineRejected, match="cannot be restored because their path is unknown"):
            await engine.reload_initial_weights(frozen=False)
    assert sent_requests(server) == [
        ("/pause?mode=keep", {}),
        ("/update_weight_version", {"new_version": "turngate: loading 3"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/m/3"}}),
        ("/update_weight_version", {"new_version": "3"}),
        ("/resume", {}),
        ("/update_weight_version", {"new_version": "turngate: loading default"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/m/0"}}),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "default"}),
        ("/v1/load_lora_adapter", {"lora_name": "policy-v3", "lora_path": "/a/3"}),
        ("/v1/unload_lora_adapter", {"lora_name": "policy-v3"}),
        ("/update_weight_version", {"new_version": "turngate: loading default"}),
    ]


@pytest.mark.parametrize(
    ("mark", "expected", "wrong"),
    [
        ("default", None, ""),
        ("3", MODEL, ""),
        ("default", MODEL, "its weight version is 'default' instead of 3"),
        ("turngate: loading 4", None, "its update to weight version 4 has not completed"),
        ("default", ADAPTER, ""),
        ("default", PolicyWeights(version=4, lora_path="/a/4", name="policy-v4"), "adapter policy-v4 is not loaded"),
    ],
)
async def test_vllm_with_wrong_weights_is_unhealthy(mark: str, expected: PolicyWeights | None, wrong: str) -> None:
    documents = {
        "/health": {},
        "/v1/models": {"data": [{"id": "m"}, {"id": "policy-v3"}]},
        "/weight_info": {"weight_version": mark},
    }
    async with serving(StandIn(None, documents)) as server, started(VLLM(server.url, "m")) as engine:
        engine.expect(expected)
        [seen] = await engine.health()
        assert seen.ok == (not wrong) and wrong in seen.detail


@pytest.mark.parametrize(
    ("engine_class", "path", "document"),
    [
        (VLLM, "/weight_info", {"weight_version": "3"}),
        (SGLang, "/get_model_info", {"model_path": "/m/0", "weight_version": "3"}),
    ],
)
async def test_engine_needs_its_weights_reported_to_return(engine_class: Any, path: str, document: Any) -> None:
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}, "/get_server_info": {}, path: document}
    async with serving(StandIn(None, documents)) as server:
        engine = engine_class(server.url, "m")
        pool = Pool([engine], timing=PoolTiming(check_s=60, backoff_s=60, load_s=0))
        await pool.start()
        try:
            engine.expect(MODEL)
            await pool.check()
            documents[path] = 500
            await pool.check()
            assert pool.accepts_calls  # one failed report means little
            documents[path] = {**document, "weight_version": "2"}
            await pool.check()
            for reply in (500, {**document, "weight_version": "2"}):
                documents[path] = reply
                for _ in range(3):
                    await pool.check()
                with pytest.raises(EngineUnavailable, match="no engine has the current weights"):
                    async with pool.generate(make_request(session="s")) as chunks:
                        await anext(chunks)
            documents[path] = document
            await pool.check()
            assert pool.accepts_calls
        finally:
            await pool.close()


@pytest.mark.parametrize("mark", [{}, {"weight_version": "default"}])  # old versions of SGLang report none
async def test_sglang_update_requests(mark: dict[str, str]) -> None:
    info = {"/get_model_info": {"model_path": "/m/0", **mark}}
    server = StandIn(answer_with({"success": True, "message": "ok"}), info)
    async with serving(server), started(SGLang(server.url)) as engine:
        with pytest.raises(EngineRejected, match="cannot be restored because their path is unknown"):
            await engine.reload_initial_weights(frozen=False)
        await engine.pause()
        await engine.load(MODEL, frozen=True)
        await engine.resume()
        await engine.reload_initial_weights(frozen=False)
        await engine.load(ADAPTER, frozen=False)
        await engine.unload("policy-v3")
        server.answer = answer_by_path({"/update_weights_from_disk": {"success": False, "message": "no such folder"}})
        with pytest.raises(EngineRejected, match="/update_weights_from_disk failed: no such folder"):
            await engine.load(MODEL, frozen=False)

    def marked(version: str) -> list[tuple[str, Any]]:
        body = {"new_version": version, "abort_all_requests": False}
        return [("/update_weight_version", body)] if mark else []

    assert sent_requests(server) == [
        *marked("turngate: loading default"),
        ("/pause_generation", {"mode": "in_place"}),
        *marked("turngate: loading 3"),
        ("/update_weights_from_disk", {"model_path": "/m/3", "flush_cache": False}),
        *marked("3"),
        ("/continue_generation", {}),
        *marked("turngate: loading default"),
        ("/update_weights_from_disk", {"model_path": "/m/0", "flush_cache": True}),
        *marked("default"),
        ("/load_lora_adapter", {"lora_name": "policy-v3", "lora_path": "/a/3"}),
        ("/unload_lora_adapter", {"lora_name": "policy-v3"}),
        *marked("turngate: loading 3"),
        ("/update_weights_from_disk", {"model_path": "/m/3", "flush_cache": True}),
    ]


@pytest.mark.parametrize("text", ["Cache flushed.", '{"x": ' + "[" * 5000])
async def test_sglang_reply_to_a_command_may_be_any_text(text: str) -> None:
    async with serving(StandIn(answer_with(text))) as server, started(SGLang(server.url)) as engine:
        await engine.resume()


@pytest.mark.parametrize("expected", [None, MODEL, ADAPTER])
async def test_sglang_is_unhealthy_after_a_failed_load(expected: PolicyWeights | None) -> None:
    info = {"model_path": "/m/4", "weight_version": "turngate: loading 4"}
    documents = {"/health": {}, "/get_model_info": info, "/get_server_info": {"context_length": 64}}
    server = StandIn(answer_with({"success": True}), documents)
    async with serving(server), started(SGLang(server.url)) as engine:
        engine.expect(expected)
        [seen] = await engine.health()
        assert not seen.ok and seen.wrong and "its update to weight version 4 has not completed" in seen.detail
        await engine.load(MODEL, frozen=False)
        with pytest.raises(EngineRejected, match="cannot be restored because their path is unknown"):
            await engine.reload_initial_weights(frozen=False)  # the server may have loaded them from another path since


async def test_requests_name_the_adapter() -> None:
    choice = {"text": "x", "logprobs": {"token_logprobs": [-1.0], "tokens": ["token_id:5"]}, "finish_reason": "stop"}
    server = StandIn(answer_with({"choices": [choice]}))
    async with serving(server), started(VLLM(server.url, "m")) as engine:
        for model in ("", "policy-v3"):
            async with engine.generate(make_request(stream=False, model=model)) as chunks:
                await collect(chunks)
    assert [json.loads(body)["model"] for body in server.bodies] == ["m", "policy-v3"]
    end = {"completion_tokens": 1, "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.1, 5, None]]}
    server = StandIn(answer_with({"output_ids": [5], "meta_info": end}))
    async with serving(server), started(SGLang(server.url)) as engine:
        for model in ("", "policy-v3"):
            async with engine.generate(make_request(stream=False, model=model)) as chunks:
                await collect(chunks)
    assert [json.loads(body).get("lora_path") for body in server.bodies if b"input_ids" in body] == [None, "policy-v3"]


def test_list_updatable_replicas() -> None:
    vllm, sglang = VLLM("http://127.0.0.1:1", "m"), SGLang("http://127.0.0.1:2")
    assert isinstance(vllm, UpdatableReplica) and isinstance(sglang, UpdatableReplica)
    assert list_updatable_replicas(Pool([vllm, sglang])) == [vllm, sglang] and list_updatable_replicas(vllm) == [vllm]
    assert list_updatable_replicas(Scripted([])) == [] and list_updatable_replicas(None) == []
