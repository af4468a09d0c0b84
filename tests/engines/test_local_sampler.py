"""Tests for the sampler: draws and log-probabilities against an independent reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engines.local_kit import generate, make_request, model, random_prompts, start_engine, torch
from turngate.engines.local.cache import PromptPiece, Slots
from turngate.engines.local.decode import Decoder, SlotStart
from turngate.engines.local.graphs import GraphDecoder
from turngate.engines.local.sampler import Adjustment, adjust_scores, draw, uniform
from turngate.types import Sampling

pytestmark = pytest.mark.needs("torch")

MANY = 40_000


def draw_many(scores: Any, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Draw many samples from one row of scores."""
    rows = torch.tensor(scores, dtype=torch.float32).repeat(MANY, 1)
    ids, logprobs = draw(
        rows, torch.full((MANY,), temperature), torch.arange(MANY), torch.zeros(MANY, dtype=torch.int64)
    )
    return ids.numpy(), logprobs.numpy()


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [7, 64, 300, 512])  # less than a block, whole blocks, a partial block
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_match_distribution_and_logprobs(size: int, temperature: float) -> None:
    scores = np.random.default_rng(size).normal(0, 2, size).astype(np.float32)
    scores[3] = -np.inf
    expected = softmax(scores / temperature)
    ids, logprobs = draw_many(scores, temperature)
    counts = np.bincount(ids, minlength=size)
    assert counts[3] == 0
    assert np.abs(counts - MANY * expected).max() < 5 * np.sqrt(MANY * expected.max())
    assert np.allclose(logprobs, np.log(expected[ids]), atol=1e-5)


def test_uniform_is_even_and_deterministic() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]).repeat_interleave(20_000)
    index = torch.arange(20_000).repeat(5)
    numbers = uniform(seeds, index)
    assert torch.equal(numbers, uniform(seeds, index)) and numbers.min() >= 0 and numbers.max() < 1
    assert numbers.unique().numel() == numbers.numel()
    counts = np.histogram(numbers.numpy(), 50, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)


CASES: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_p": 0.0},
    {"top_k": 5, "top_p": 0.7, "temperature": 0.5},
    {"min_p": 0.05, "top_k": 4, "top_p": 0.9, "temperature": 1.7},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.6},
    {"min_tokens": 4},
]


def reference(scores: np.ndarray, how: Sampling, prompt: list[int], sampled: list[int], stop: int) -> np.ndarray:
    """Reference implementation: penalties, temperature, min-p, top-k, top-p."""
    scores = scores.astype(np.float64).copy()
    for token in {*prompt, *sampled}:
        scores[token] = (
            scores[token] / how.repetition_penalty if scores[token] > 0 else scores[token] * how.repetition_penalty
        )
    for token in set(sampled):
        scores[token] -= how.presence_penalty + how.frequency_penalty * sampled.count(token)
    if len(sampled) < how.min_tokens:
        scores[stop] = -np.inf
    kept = softmax(scores / how.temperature)
    kept = np.where(kept >= how.min_p * kept.max(), kept, 0)
    if how.top_k:
        kept = np.where(kept >= np.sort(kept)[-how.top_k], kept, 0)
    kept /= kept.sum()
    if how.top_p < 1:
        order = np.argsort(-kept)
        before = np.concatenate(([0.0], np.cumsum(kept[order])[:-1]))
        cut = order[(before >= how.top_p) & (np.arange(len(order)) > 0)]
        kept[cut] = 0
    return kept / kept.sum()


@pytest.mark.parametrize("how", CASES, ids=str)
def test_adjusted_draws_match_reference(how: dict[str, Any]) -> None:
    scores = np.random.default_rng(5).normal(0, 2, 40).astype(np.float32)
    prompt, sampled, stop = [1, 2, 3, 3], [3, 8, 8], int(scores.argmax())
    sampling = Sampling(**how)
    expected = reference(scores, sampling, prompt, sampled, stop)
    rows = torch.tensor(scores)[None].clone()
    adjust_scores(rows, Adjustment(0, sampling, np.array(prompt, np.int32), np.array(sampled, np.int32), (stop,)))
    ids, logprobs = draw_many(rows[0].tolist(), sampling.temperature)
    counts = np.bincount(ids, minlength=40)
    assert counts[expected == 0].sum() == 0
    assert np.abs(counts - MANY * expected).max() < 5 * np.sqrt(MANY * expected.max())
    assert np.allclose(logprobs, np.log(expected[ids]), atol=1e-5)


async def test_penalties_apply_to_sampled_tokens() -> None:
    """Penalized tokens become less likely, so the reply has more distinct tokens."""
    async with start_engine() as engine:
        prompt = random_prompts(1)[0]
        reply = await generate(
            engine, make_request(prompt, 60, frequency_penalty=2.0, presence_penalty=2.0, temperature=0)
        )
        again = await generate(engine, make_request(prompt, 60, temperature=0))
    assert len(set(reply.ids)) > len(set(again.ids))


# ── slot selection ──────────────────────────────────────────────────────────────────────────────────────────────────


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_slots_reuse_prefixes_and_evict_oldest() -> None:
    slots = Slots(3, 100)
    first, second = ids(*range(40)), ids(*range(50, 90))
    assert slots.take(first, "") == (0, 0, 0)
    slots.computed[0] = 39
    assert slots.take(first, "") == (1, 0, 39)  # slot 0 is in use, so its prefix is copied
    slots.leave(0, 39)
    slots.leave(1, 39)
    assert slots.take(second, "") == (2, 2, 0)
    slots.leave(2, 39)
    longer = ids(*range(40), 1, 2, 3)
    slot, source, known = slots.take(longer, "") or (-1, -1, -1)
    assert slot == source == 0 and known == 39  # a conversation returns to its slot
    assert slots.take(ids(*range(60, 80)), "") == (1, 1, 0)  # otherwise the least recently used slot


def test_short_match_keeps_long_sequence() -> None:
    slots = Slots(2, 100)
    slots.take(ids(*range(90)), "")
    slots.leave(0, 89)
    assert slots.take(ids(*range(10), 99, 98), "") == (1, 0, 10)


# ── graph decoder on a CPU ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 4, "head_norm": False}, {"heads": 6, "head": 8, "tied": False}], ids=str
)
def test_graph_step_matches_plain_step(shape: dict[str, Any]) -> None:
    made = model(**shape)
    plain, graph = Decoder(made, 8, 100), GraphDecoder(made, 8, 100)
    draw_ids = np.random.default_rng(0)
    rows = np.array([0, 1, 4, 6])
    lengths = {0: 5, 1: 40, 4: 41, 6: 17}
    texts = {slot: draw_ids.integers(0, 300, n).astype(np.int32) for slot, n in lengths.items()}
    first = [PromptPiece(slot, 0, text[: len(text) // 2]) for slot, text in texts.items()]
    second = [PromptPiece(slot, len(text) // 2, text[len(text) // 2 :]) for slot, text in texts.items()]
    armed = [SlotStart(int(slot), 9, lengths[slot], 100 + slot, 0, 0.0 if slot == 4 else 0.8) for slot in rows.tolist()]
    with torch.inference_mode():
        for decoder in (plain, graph):
            decoder.fill(first)
            decoder.fill(second)
            decoder.arm(armed)
        for _ in range(6):
            expected = plain.launch(rows, [])
            graph._step(8, True)
            assert graph._ids[rows].tolist() == expected.ids.tolist()
            assert torch.allclose(graph._logprobs[rows], expected.logprobs, atol=1e-4)
        assert torch.equal(plain.state[:, rows], graph.state[:, rows])
        assert (graph.state[1, [2, 3, 5, 7]] == graph.cache.spare).all()  # inactive slots are unchanged
