"""Sampling masks from vLLM and SGLang: what is requested, what is read, and what is rejected.

The stand-ins send what the source of vLLM 0.32 and SGLang 0.5.23 does. `tests/real/test_sglang.py` uses a real server.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.standins import DONE, StandIn, answer_stream, answer_with, event, generated, make_request, serving
from turngate.config import ServeConfig
from turngate.engines import sampling_mask
from turngate.engines.base import Chunk, Engine
from turngate.engines.sampling_mask import build_masks
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.errors import ConfigError, EngineError
from turngate.types import RaggedArray, Sampling, SideArray

IDS, LOGPROBS = [7, 9, 2], [-0.1, 0.0, -0.3]
MASKS = [[3, 7], [9], [2, 4, 8]]
TOP_P = Sampling(top_p=0.9, top_k=5)


def vllm_events(masks: list[list[int]] | None) -> list[dict[str, Any]]:
    first, last = generated(IDS[:2], LOGPROBS[:2]), generated(IDS[2:], LOGPROBS[2:], "stop")
    if masks is not None:
        first["choices"][0]["sampling_mask"], last["choices"][0]["sampling_mask"] = masks[:2], masks[2:]
    return [first, last]


def sglang_events(masks: list[list[int]] | None) -> list[dict[str, Any]]:
    """The masks of all tokens so far. The usual log-probabilities are those before the truncation."""
    events = []
    for count, finish in ((2, None), (3, {"type": "stop"})):
        positions = [[score - 1, token, None] for score, token in zip(LOGPROBS[:count], IDS[:count], strict=True)]
        meta: dict[str, Any] = {"completion_tokens": count, "finish_reason": finish, "output_token_logprobs": positions}
        if masks is not None:
            meta |= {
                "output_token_sampling_mask": masks[:count],
                "output_token_sampling_logprobs": LOGPROBS[:count],
                "output_token_sampling_mask_length": count,
            }
        events.append({"output_ids": IDS[:count], "meta_info": meta})
    return events


async def generate(engine: Engine, stream: bool, **fields: Any) -> tuple[list[int], list[Any], list[SideArray]]:
    await engine.start()
    chunks: list[Chunk] = []
    try:
        async with engine.generate(make_request((1, 2, 3), stream=stream, **fields)) as received:
            chunks += [chunk async for chunk in received]
    finally:
        await engine.close()
    ids = [token for chunk in chunks for token in chunk.ids]
    return ids, [value for c in chunks for value in c.logprobs or ()], [array for c in chunks for array in c.side]


def list_masks(arrays: list[SideArray]) -> dict[int, list[int]]:
    """The mask of each token, by its index in the reply."""
    found = {}
    for array in arrays:
        assert array.name == "sampling_mask" and isinstance(array.values, RaggedArray)
        found |= {array.first + n: each.tolist() for n, each in enumerate(array.values.lists())}
    return found


@pytest.mark.parametrize("masks", [MASKS, None])
@pytest.mark.parametrize("stream", [True, False])
async def test_vllm(stream: bool, masks: list[list[int]] | None) -> None:
    events = vllm_events(masks)
    whole = generated(IDS, LOGPROBS, "stop")
    whole["choices"][0]["sampling_mask"] = masks
    answer = answer_stream(*map(event, events), DONE) if stream else answer_with(whole)
    async with serving(StandIn(answer)) as server:
        engine = VLLM(server.url, "m", api="generate")
        ids, logprobs, side = await generate(engine, stream, sampling=TOP_P, sampling_mask=True)
    assert (ids, logprobs) == (IDS, LOGPROBS)
    assert list_masks(side) == (dict(enumerate(MASKS)) if masks else {})


@pytest.mark.parametrize("masks", [MASKS, None])
@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_records_the_logprobs_of_the_kept_ids(stream: bool, masks: list[list[int]] | None) -> None:
    events = sglang_events(masks)
    answer = answer_stream(*map(event, events), DONE) if stream else answer_with(events[-1])
    async with serving(StandIn(answer)) as server:
        ids, logprobs, side = await generate(SGLang(server.url), stream, sampling=TOP_P, sampling_mask=True)
        assert server.last_body["return_sampling_mask"] is True
    assert ids == IDS and list_masks(side) == (dict(enumerate(MASKS)) if masks else {})
    assert logprobs == pytest.approx(LOGPROBS if masks else [value - 1 for value in LOGPROBS])


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": TOP_P},
        {"sampling": Sampling(top_p=0.9), "sampling_mask": True},
        {"sampling": Sampling(top_k=4097), "sampling_mask": True},
    ],
    ids=["not asked", "no top_k", "large top_k"],
)
async def test_sglang_is_not_asked_for_masks_that_it_would_refuse(fields: dict[str, Any]) -> None:
    async with serving(StandIn(answer_with(sglang_events(None)[-1]))) as server:
        _, _, side = await generate(SGLang(server.url), False, **fields)
        assert "return_sampling_mask" not in server.last_body and side == []


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        ([[3], [9], [2]], "excludes the sampled token 7"),
        ([[3, 7, 3], [9], [2]], "repeated ids for token 7"),
        (MASKS[:2], r"different numbers of sampling masks \(2\) and tokens \(3\)"),
    ],
)
async def test_wrong_masks_fail_the_call(masks: list[list[int]], why: str) -> None:
    whole = generated(IDS, LOGPROBS, "stop")
    whole["choices"][0]["sampling_mask"] = masks
    async with serving(StandIn(answer_with(whole))) as server:
        with pytest.raises(EngineError, match=why):
            await generate(VLLM(server.url, "m", api="generate"), False, sampling=TOP_P, sampling_mask=True)


def test_too_large_mask_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_mask, "MAX_KEPT", 2)
    assert list_masks(list(build_masks("e", 5, IDS, MASKS))) == {5: [3, 7], 6: [9]}
    assert list_masks(list(build_masks("e", 0, IDS[::-1], MASKS[::-1]))) == {1: [9], 2: [3, 7]}
    assert build_masks("e", 0, [], []) == () == build_masks("e", 0, IDS[2:], MASKS[2:])


@pytest.mark.parametrize(
    ("engine", "fields", "why"),
    [
        ("gate", {"tokenizer": "t"}, "sampling_masks needs the engine"),
        ("openai", {"engine_url": ["http://e"]}, "sampling_masks needs the engine"),
        ("vllm", {"engine_url": ["http://e"], "tokenizer": "t"}, "sampling_masks needs --engine-api generate"),
    ],
)
def test_engines_without_masks_are_refused(engine: Any, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServeConfig(engine=engine, sampling_masks=True, **fields).check()
