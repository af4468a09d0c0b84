"""Routed experts from vLLM and SGLang: what is requested, what is read, and what is rejected.

The stand-ins send what the source of vLLM 0.32 and SGLang 0.5.23 does. vLLM does not report routed experts on a CPU.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.engines.standins import DONE, StandIn, answer_stream, answer_with, event, generated, make_request, serving
from turngate.engines.base import Chunk
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.errors import EngineError
from turngate.types import Constraint, ReasoningTokens, SideArray

IDS, LOGPROBS = [7, 9, 2], [-0.1, -0.2, -0.3]
SHAPE = (3, 2)  # layers, experts per token
Reply = tuple[list[int], list[SideArray]]


def make_experts(end: int, start: int = 0, dtype: str = "uint8") -> np.ndarray:
    """The routed experts of tokens `start` to `end`. Each number tells its token."""
    every = np.arange(end)[:, None, None] * 10 + np.arange(SHAPE[0])[:, None] + 5 * np.arange(SHAPE[1])
    return every[start:].astype(dtype)


def to_npy(values: np.ndarray) -> str:
    """Encode as vLLM does."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def to_base64(values: np.ndarray) -> str:
    """Encode as SGLang does."""
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


def vllm_events(experts: str | None) -> list[dict[str, Any]]:
    first, last = generated(IDS[:2], LOGPROBS[:2]), generated(IDS[2:], LOGPROBS[2:], "stop")
    last["choices"][0]["routed_experts"] = experts
    return [first, last]


def sglang_events(experts: str | None) -> list[dict[str, Any]]:
    events = []
    for count, finish in ((2, None), (3, {"type": "stop"})):
        positions = [[score, token, None] for score, token in zip(LOGPROBS[:count], IDS[:count], strict=True)]
        meta: dict[str, Any] = {"completion_tokens": count, "finish_reason": finish, "output_token_logprobs": positions}
        events.append({"output_ids": IDS[:count], "meta_info": meta})
    if experts is not None:
        events[-1]["meta_info"]["routed_experts"] = experts
    return events


@asynccontextmanager
async def running(engine: VLLM | SGLang) -> AsyncIterator[VLLM | SGLang]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def generate(engine: VLLM | SGLang, **fields: Any) -> Reply:
    chunks: list[Chunk] = []
    async with running(engine), engine.generate(make_request((1, 2, 3), **fields)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
    assert not any(chunk.side for chunk in chunks[:-1])
    return [token for chunk in chunks for token in chunk.ids], list(chunks[-1].side)


async def generate_vllm(experts: str | None, *, start: int = 0, shape: Any = None, stream: bool = True) -> Reply:
    events = vllm_events(experts)
    whole = generated(IDS, LOGPROBS, "stop")
    whole["choices"][0]["routed_experts"] = experts
    answer = answer_stream(*map(event, events), DONE) if stream else answer_with(whole)
    async with serving(StandIn(answer)) as server:
        engine = VLLM(server.url, "m", api="generate", expert_shape=shape)
        reply = await generate(engine, routed_experts=start, stream=stream)
        assert server.last_body["sampling_params"].get("routed_experts_prompt_start", 0) == start
    return reply


async def generate_sglang(experts: str | None, *, start: int = 0, shape: Any = SHAPE, stream: bool = True) -> Reply:
    events = sglang_events(experts)
    answer = answer_stream(*map(event, events), DONE) if stream else answer_with(events[-1])
    async with serving(StandIn(answer)) as server:
        engine = SGLang(server.url, expert_shape=shape)
        reply = await generate(engine, routed_experts=start, stream=stream)
        body = server.last_body
        assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, start)
    return reply


def check(reply: Reply, start: int, dtype: str = "uint8") -> None:
    ids, [array] = reply
    assert ids == IDS and (array.name, array.first, array.values.dtype.name) == ("routed_experts", start - 3, dtype)
    assert array.values.tolist() == make_experts(5, start).tolist()  # of 3 + 3 tokens: the last was not an input


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("start", [0, 2])
async def test_vllm_reports_prompt_and_reply(start: int, stream: bool) -> None:
    check(await generate_vllm(to_npy(make_experts(5, start)), start=start, stream=stream), start)


@pytest.mark.parametrize(("sent", "stored"), [("uint16", "uint16"), ("int32", "uint8")])
async def test_vllm_types(sent: str, stored: str) -> None:
    check(await generate_vllm(to_npy(make_experts(5, dtype=sent)), shape=SHAPE), 0, stored)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("start", [0, 2])
async def test_sglang_reports_prompt_and_reply(start: int, stream: bool) -> None:
    check(await generate_sglang(to_base64(make_experts(5, start)), start=start, stream=stream), start)


async def test_versions_that_always_send_the_whole_prompt() -> None:
    check(await generate_vllm(to_npy(make_experts(5)), start=2), 2)
    check(await generate_sglang(to_base64(make_experts(5)), start=2), 2)


async def test_many_experts_need_16_bits() -> None:
    _, [array] = await generate_sglang(to_base64(make_experts(5).astype(int) + 300))
    assert array.values.dtype.name == "uint16" and int(array.values.min()) == 300


@pytest.mark.parametrize(
    ("experts", "shape", "problem"),
    [
        (None, None, "vllm returned no routed experts; start it with --enable-return-routed-experts"),
        (to_npy(make_experts(4)), None, r"\(3x2 per token\) for the wrong number of tokens: 4 instead of 5"),
        (to_npy(make_experts(6)), None, r"\(3x2 per token\) for the wrong number of tokens: 6 instead of 5"),
        (to_npy(make_experts(5)), (48, 8), "of shape 3x2, but the setting routed_experts is 48x8"),
        (to_npy(np.zeros((5, 3, 0), "int32")), None, r"sent empty routed experts \(of shape 3x0 per token\)"),
        (to_npy(np.zeros((5, 0, 2), "uint8")), None, r"sent empty routed experts \(of shape 0x2 per token\)"),
        (to_npy(make_experts(5)[:, 0]), None, "three-dimensional integer array in C order, not uint8"),
        (to_npy(make_experts(5, dtype="float32")), None, "integer array in C order, not float32"),
        (to_npy(make_experts(5))[:120], None, "cannot be read"),
        (to_npy(make_experts(5).astype("int32") - 5), None, "numbered -5 to 42; valid numbers are 0 to 65535"),
        (to_base64(make_experts(5)), None, "without their shape; set routed_experts to LAYERSxEXPERTS"),
        ("!!", None, "cannot be decoded"),
    ],
)
async def test_invalid_reply_of_vllm(experts: str | None, shape: Any, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        await generate_vllm(experts, shape=shape)


@pytest.mark.parametrize(
    ("experts", "shape", "problem"),
    [
        (None, SHAPE, "sglang returned no routed experts; start it with --enable-return-routed-experts"),
        (to_base64(make_experts(5)), (3, 4), "sent 30 routed experts, which is not a multiple of 3x4"),
        (to_base64(make_experts(5)), (1, 2), r"\(1x2 per token\) for the wrong number of tokens: 15 instead of 5"),
        (to_base64(make_experts(5).astype(int) + 70_000), SHAPE, "valid numbers are 0 to 65535"),
    ],
)
async def test_invalid_reply_of_sglang(experts: str | None, shape: Any, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        await generate_sglang(experts, shape=shape)


async def test_not_requested_unless_needed() -> None:
    async with serving(StandIn(answer_stream(*map(event, sglang_events(None)), DONE))) as server:
        ids, side = await generate(SGLang(server.url))
        assert ids == IDS and side == [] and "return_routed_experts" not in server.last_body


async def test_reply_in_two_generations() -> None:
    """The constraint begins after the reasoning, so the rest is a second generation. Together they report every token once."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(json.loads(await request.read()))
        start, size = bodies[-1]["sampling_params"].get("routed_experts_prompt_start", 0), len(bodies[-1]["token_ids"])
        ids = [7, 9] if len(bodies) == 1 else [4, 2]
        last = generated(ids, [-0.5, -0.5], "stop")
        last["choices"][0]["routed_experts"] = to_npy(make_experts(size + 1, start))
        return await answer_stream(event(last), DONE)(request)

    reasoning = ReasoningTokens(opening=7, closing=9, is_open=False)
    arrays: list[SideArray] = []
    async with serving(StandIn(answer)) as server, running(VLLM(server.url, "m", api="generate")) as engine:
        request = make_request((1, 2, 3), routed_experts=1, constraint=Constraint("json_object"), reasoning=reasoning)
        async with engine.generate(request) as chunks:
            async for chunk in chunks:
                arrays += chunk.side
    assert [body["token_ids"] for body in bodies] == [[1, 2, 3], [1, 2, 3, 7, 9]]
    assert [(array.first, array.end) for array in arrays] == [(-2, 1), (1, 3)]
    found = np.concatenate([array.values for array in arrays])
    assert found.tolist() == make_experts(6, 1).tolist()
