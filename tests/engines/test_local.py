"""Tests for the local engine: concurrent calls, streams, aborts, weight updates and failures."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import kit
from tests.engines.local_kit import (
    SHAPE,
    generate,
    make_request,
    model,
    random_prompts,
    rescore,
    start_engine,
    torch,
)
from tests.speed import scaled
from turngate.config import ServeConfig
from turngate.engines.base import Chunk
from turngate.engines.local import LocalEngine, save
from turngate.engines.local import weights as local_weights
from turngate.engines.local.cache import PromptPiece
from turngate.engines.weights import PolicyWeights, UpdatableReplica
from turngate.errors import ConfigError, ContextOverflow, EngineError, EngineRejected, EngineUnavailable
from turngate.types import Constraint

pytestmark = pytest.mark.needs("torch")


def max_error(
    engine: LocalEngine, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], **how: Any
) -> float:
    """Largest difference between recorded and recomputed log-probabilities."""
    return max(abs(a - b) for a, b in zip(rescore(engine.model, prompt, ids, **how), logprobs, strict=True))


def slow_down(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.01) -> list[int]:
    """Make each step take at least `step_s`. Returns the list of thread ids, one per step."""
    launch, threads = engine._decoder.launch, []

    def slow(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        time.sleep(step_s)
        return launch(*arguments)

    monkeypatch.setattr(engine._decoder, "launch", slow)
    return threads


# ── sampling ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_many_calls_in_few_slots_do_not_interfere() -> None:
    async with start_engine() as engine:
        prompts = random_prompts(64)
        replies = await asyncio.gather(
            *(generate(engine, make_request(prompt, 1 + n % 23, temperature=0.7)) for n, prompt in enumerate(prompts))
        )
        for n, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            assert (len(reply.ids), reply.finish) == (1 + n % 23, "length")
            assert max_error(engine, prompt, reply.ids, reply.logprobs, temperature=0.7) < 1e-4


async def test_float32_logprobs_match_trainer() -> None:
    async with start_engine() as engine:
        prompt = random_prompts(1)[0]
        reply = await generate(engine, make_request(prompt, 150))
        again = rescore(engine.model, prompt, reply.ids)
        assert sum(abs(a - b) for a, b in zip(again, reply.logprobs, strict=True)) / 150 < 1e-5


async def test_seed_is_reproducible_under_load() -> None:
    async with start_engine() as engine:
        prompt = random_prompts(1)[0]
        alone = await generate(engine, make_request(prompt, 30, seed=7))
        others = [generate(engine, make_request(other, 40)) for other in random_prompts(9, seed=1)]
        among, *_ = await asyncio.gather(generate(engine, make_request(prompt, 30, seed=7)), *others)
        other = await generate(engine, make_request(prompt, 30, seed=8))
        unseeded = [await generate(engine, make_request(prompt, 30)) for _ in range(2)]
    assert among.ids == alone.ids and other.ids != alone.ids
    assert unseeded[0].ids != unseeded[1].ids


async def test_streamed_reply_equals_whole_reply() -> None:
    async with start_engine() as engine:
        request = make_request(random_prompts(1)[0], 60, seed=3)
        streamed = await generate(engine, request)
        whole = await generate(engine, msgspec.structs.replace(request, stream=False))
        with_stop = await generate(engine, msgspec.structs.replace(request, stream=False, stop=("END",)))
    assert (whole.ids, whole.finish, whole.chunks) == (streamed.ids, streamed.finish, 1)
    assert with_stop.ids == whole.ids and with_stop.chunks > 5  # streamed, so that a stop string can end it early
    assert streamed.chunks > 5
    assert whole.logprobs == pytest.approx(streamed.logprobs, abs=1e-5)


async def test_stop_id_ends_reply_and_is_included() -> None:
    async with start_engine() as engine:
        free = await generate(engine, make_request([1, 2, 3], 40, seed=1))
        stop = free.ids[12]
        stopped = await generate(engine, make_request([1, 2, 3], 40, (299, stop), seed=1))
        first = free.ids.index(stop)
        held = await generate(engine, make_request([1, 2, 3], 40, (stop,), seed=1, min_tokens=first + 5))
    assert (stopped.ids, stopped.finish) == (free.ids[: first + 1], "stop")
    assert len(held.ids) >= first + 5  # min_tokens suppressed the stop id


async def test_greedy_picks_argmax_with_logprob_zero() -> None:
    async with start_engine() as engine:
        first, second = [await generate(engine, make_request([5, 6], 20, temperature=0)) for _ in range(2)]
        with torch.no_grad():
            argmax = engine.model(torch.tensor([[5, 6, *first.ids]]))[0, 1:-1].argmax(-1).tolist()
    assert first.ids == second.ids == argmax and first.logprobs == [0.0] * 20


async def test_concurrent_calls_keep_own_sampling_settings() -> None:
    async with start_engine() as engine:
        best = make_request([5, 6], 30, top_k=1)
        replies = await asyncio.gather(
            generate(engine, best),
            *(generate(engine, make_request(p, 30)) for p in random_prompts(5)),
            generate(engine, best),
        )
        certain = await generate(engine, make_request([5, 6], 30, temperature=0))
        assert replies[0].ids == replies[-1].ids == certain.ids and replies[0].logprobs == [0.0] * 30
        for prompt, reply in zip(random_prompts(5), replies[1:-1], strict=True):
            assert max_error(engine, prompt, reply.ids, reply.logprobs) < 1e-4


async def test_prompt_is_echoed_on_request() -> None:
    async with start_engine() as engine, engine.generate(_with(make_request([1, 2, 3], 4), echo_prompt=True)) as chunks:
        first, *others = [chunk async for chunk in chunks]
    assert first.prompt == [1, 2, 3] and all(chunk.prompt is None for chunk in others)


# ── shared prefixes ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_shared_prefix_is_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with start_engine(slots=8, fill_tokens=32) as engine:
        computed: list[int] = []
        fill = engine._decoder.fill

        def count_fill(pieces: Sequence[PromptPiece]) -> None:
            computed.append(sum(len(piece.ids) for piece in pieces))
            fill(pieces)

        monkeypatch.setattr(engine._decoder, "fill", count_fill)
        prompt = [n % 300 for n in range(7, 107)]
        group = await asyncio.gather(*(generate(engine, make_request(prompt, 12)) for _ in range(8)))
        assert sum(computed) == 99  # the last id is the input of the first step
        for reply in group:
            assert max_error(engine, prompt, reply.ids, reply.logprobs) < 1e-4
        longer = [*prompt, *group[3].ids, 9, 8, 7]
        computed.clear()
        turn = await generate(engine, make_request(longer, 12))
        assert sum(computed) == 3 and max_error(engine, longer, turn.ids, turn.logprobs) < 1e-4


async def test_cache_is_not_shared_across_salts() -> None:
    async with start_engine() as engine:
        request = make_request(list(range(80)), 4)
        await generate(engine, _with(request, cache_salt="v1"))
        await generate(engine, _with(request, cache_salt="v2"))
        assert engine.reused_tokens == 0
        await generate(engine, _with(request, cache_salt="v1"))
        assert engine.reused_tokens == 79


async def test_calls_with_common_prefix_do_not_interfere() -> None:
    async with start_engine(slots=3) as engine:
        prompts = [[*range(70), n, *range(n, n + 9)] for n in range(12)]
        replies = await asyncio.gather(*(generate(engine, make_request(prompt, 25)) for prompt in prompts))
        assert engine.reused_tokens >= 9 * 70
        for prompt, reply in zip(prompts, replies, strict=True):
            assert max_error(engine, prompt, reply.ids, reply.logprobs) < 1e-4


# ── end of a call ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_abandoned_call_frees_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_engine(slots=1) as engine:
        steps = slow_down(engine, monkeypatch)
        async with engine.generate(make_request([1, 2], 200)) as chunks:
            await anext(chunks)
        reply = await generate(engine, make_request([1, 2], 3))
        assert len(reply.ids) == 3 and len(steps) < 200  # the steps the abandoned call would have taken
        assert (await engine.health())[0].in_flight == 0


async def test_queued_call_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_engine(slots=1) as engine:
        slow_down(engine, monkeypatch)
        async with engine.generate(make_request([1, 2], 250)) as chunks:
            await anext(chunks)
            waiting = asyncio.create_task(generate(engine, make_request([3], 5)))
            await kit.until(lambda: len(engine._open) == 2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert len((await generate(engine, make_request([3], 5))).ids) == 5


async def test_generation_starts_on_first_read() -> None:
    async with start_engine() as engine, engine.generate(make_request([1], 5)):
        assert (await engine.health())[0].in_flight == 0


async def test_reply_stops_at_max_context() -> None:
    async with start_engine(max_context=64) as engine:
        reply = await generate(engine, make_request(list(range(60)), 100))
        assert (len(reply.ids), reply.finish) == (4, "length")
        assert max_error(engine, list(range(60)), reply.ids, reply.logprobs) < 1e-4
        with pytest.raises(ContextOverflow) as caught:
            await generate(engine, make_request(list(range(64)), 1))
        assert (caught.value.limit, caught.value.size) == (64, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"constraint": Constraint("json_object")}, "does not support constrained output"),
        ({"prompt": np.array([], np.int32)}, "the prompt is empty"),
        ({"prompt": np.array([1, 300], np.int32)}, "id 300 is outside the model's vocabulary of 300"),
        ({"prompt": np.array([-1], np.int32)}, "id -1"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more, not 0"),
    ],
)
async def test_invalid_request_is_rejected(change: dict[str, Any], words: str) -> None:
    async with start_engine() as engine:
        with pytest.raises(EngineRejected, match=words):
            await generate(engine, _with(make_request([1], 3), **change))


async def test_close_under_load_fails_calls_and_ends_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    async with start_engine() as engine:
        steps = slow_down(engine, monkeypatch)
        calls = [asyncio.create_task(generate(engine, make_request([n], 250))) for n in range(20)]
        await kit.until(lambda: len(engine._open) == 20 and len(steps) > 2)
        await engine.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, EngineUnavailable) for end in ended)
        assert len({id(end) for end in ended}) == 20  # each call has its own error
        with pytest.raises(EngineUnavailable, match="closed"):
            await generate(engine, make_request([1], 3))
        assert not (await engine.health())[0].ok
    assert threading.active_count() <= threads + 1  # asyncio's executor thread


async def test_tokens_before_failure_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_engine(flush_s=60.0) as engine:
        launch, steps = engine._decoder.launch, 0

        def failing(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 5:
                raise RuntimeError("the device is on fire")
            return launch(*arguments)

        monkeypatch.setattr(engine._decoder, "launch", failing)
        given: list[int] = []
        with pytest.raises(EngineError, match="on fire"):
            async with engine.generate(make_request([1], 50)) as chunks:
                async for chunk in chunks:
                    given += chunk.ids
        assert len(given) == 4
        reply = await generate(engine, make_request([1], 5))  # the engine still works
        assert max_error(engine, [1], reply.ids, reply.logprobs) < 1e-4


@pytest.mark.parametrize(
    ("error", "words"), [(MemoryError(), "out of memory"), (torch.OutOfMemoryError(), "GPU memory")]
)
async def test_repeated_failures_stop_engine(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_engine() as engine:

        def failing(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(engine._decoder, "launch", failing)
        for _ in range(3):
            with pytest.raises(EngineError, match=words):
                await generate(engine, make_request([1], 5))
        await kit.until(lambda: engine._worker.broken)
        with pytest.raises(EngineUnavailable, match="3 times in a row"):
            await generate(engine, make_request([1], 5))
        [health] = await engine.health()
        assert not health.ok and words in health.detail


async def test_nan_weights_fail_call_not_engine() -> None:
    async with start_engine() as engine:
        good = engine.model.norm.weight.detach().clone()
        async with engine.updating() as made:
            with torch.no_grad():
                made.norm.weight.fill_(math.nan)
        with pytest.raises(EngineError, match="diverged"):
            await generate(engine, make_request([1, 2], 5))
        async with engine.updating() as made:
            with torch.no_grad():
                made.norm.weight.copy_(good)
        assert len((await generate(engine, make_request([1, 2], 5))).ids) == 5


async def test_calls_from_several_event_loops() -> None:
    async with start_engine() as engine:

        def elsewhere() -> list[int]:
            return asyncio.run(generate(engine, make_request([4, 5], 30, seed=2))).ids

        here, *there = await asyncio.gather(
            generate(engine, make_request([4, 5], 30, seed=2)), *(asyncio.to_thread(elsewhere) for _ in range(3))
        )
    assert all(ids == here.ids for ids in there)


async def test_event_loop_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_engine(slots=16) as engine:
        steps = slow_down(engine, monkeypatch, 0.005)
        calls = [asyncio.create_task(generate(engine, make_request([n], 200))) for n in range(16)]
        most, before = 0, 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.001)
            most, before = max(most, len(steps) - before), len(steps)
    assert threading.get_ident() not in steps
    assert len(steps) >= 200 and most < 100  # steps between two iterations of the loop


# ── new weights ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _train(made: Any, by: float = 1.05) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(by)


async def test_calls_continue_across_weight_update() -> None:
    async with start_engine() as engine:
        old = model()
        calls = [asyncio.create_task(generate(engine, make_request(prompt, 180))) for prompt in random_prompts(6)]
        await kit.until(lambda: engine._worker._drawn.max() > 20)
        async with engine.updating() as made:
            drawn = dict(zip(engine._worker._serial.tolist(), engine._worker._drawn.tolist(), strict=True))
            _train(made)
        for n, (prompt, call) in enumerate(zip(random_prompts(6), calls, strict=True), 1):
            reply = await call
            before = drawn.get(n, 0)
            first, second = (
                rescore(old, prompt, reply.ids)[:before],
                rescore(engine.model, prompt, reply.ids)[before:],
            )
            assert len(reply.ids) == 180 and reply.logprobs == pytest.approx([*first, *second], abs=1e-4)
        assert sum(0 < count < 180 for count in drawn.values()) >= 2


async def test_chunks_carry_weight_versions() -> None:
    async with start_engine() as engine:
        whole = asyncio.create_task(_chunks(engine, _with(make_request([1], 200), stream=False, version=4)))
        streamed = asyncio.create_task(_chunks(engine, _with(make_request([1], 200), version=4)))
        for version in (5, 6):
            await kit.until(lambda: engine._worker._drawn.max() > 20 * (version - 4))  # noqa: B023
            async with engine.updating(version):
                pass
        [only] = await whole
        seen = [chunk.versions for chunk in await streamed]
        assert only.versions == (4, 6) and len(only.ids) == 200
        assert only.version_runs is not None and [version for version, _ in only.version_runs] == [4, 5, 6]
        assert sum(tokens for _, tokens in only.version_runs) == 200
        assert seen[0] is None and seen[-1] == (6, 6) and (5, 5) in seen  # None: the version the call started with
        with pytest.raises(RuntimeError, match="the trainer failed"):
            async with engine.updating(7):
                raise RuntimeError("the trainer failed")
        assert (await _chunks(engine, make_request([1], 3)))[-1].versions == (6, 6)


async def test_update_pauses_sampling_and_drain_waits_for_calls() -> None:
    async with start_engine() as engine:
        call = asyncio.create_task(generate(engine, make_request([1], 200)))
        await kit.until(lambda: engine._worker._drawn.max() > 5)
        async with engine.updating():
            count = engine._worker._drawn.max()
            late = asyncio.create_task(generate(engine, make_request([2], 5)))
            await asyncio.sleep(0.05)
            assert engine._worker._drawn.max() == count < 200 and not late.done()
        async with engine.updating(drain=True):
            await asyncio.sleep(0)
            assert len((await call).ids) == 200
        assert len((await late).ids) == 5


async def test_concurrent_updates_from_threads() -> None:
    async with start_engine() as engine:

        def train() -> None:
            with engine.updating_here() as made:
                _train(made, 1.01)

        call = asyncio.create_task(generate(engine, make_request([1], 150)))
        async with engine.updating():
            threads = [asyncio.create_task(asyncio.to_thread(train)) for _ in range(3)]
            await asyncio.wait_for(asyncio.gather(*threads), scaled(10))
        assert len((await call).ids) == 150
        fresh = await generate(engine, make_request([3, 4], 20))
        assert max_error(engine, [3, 4], fresh.ids, fresh.logprobs) < 1e-4


async def test_cancelled_update_leaves_engine_running() -> None:
    async with start_engine() as engine:
        call = asyncio.create_task(generate(engine, make_request([1], 240)))

        async def update() -> None:
            async with engine.updating(drain=True):
                raise AssertionError("the call was not over")

        updating = asyncio.create_task(update())
        await asyncio.sleep(0.01)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        assert len((await call).ids) == 240 and len((await generate(engine, make_request([1], 5))).ids) == 5


async def test_bfloat16_engine_follows_float32_weights() -> None:
    made = model()
    async with start_engine(made, dtype="bfloat16") as engine:
        assert engine.model is made and made.dtype == torch.float32
        async with engine.updating():
            _train(made, 0.0)
        reply = await generate(engine, make_request([1], 20))
    assert reply.logprobs == pytest.approx([-math.log(300)] * 20, abs=1e-3)  # the distribution is uniform


async def test_weights_load_from_folder(tmp_path: Any) -> None:
    _write(model(seed=1), tmp_path / "new")
    async with start_engine() as engine:
        assert isinstance(engine, UpdatableReplica)
        engine.expect(PolicyWeights(version=2, path="new"))
        assert not (await engine.health())[0].ok
        await engine.pause()
        waiting = asyncio.create_task(generate(engine, make_request([7, 8], 20)))
        await engine.load(PolicyWeights(version=2, path=str(tmp_path / "new")), frozen=True)
        assert not waiting.done()
        await engine.resume()
        await engine.resume()  # no-op when not paused
        reply = await waiting
        assert (await engine.health())[0].ok
        assert (
            max(abs(a - b) for a, b in zip(rescore(model(seed=1), [7, 8], reply.ids), reply.logprobs, strict=True))
            < 1e-4
        )
        with pytest.raises(EngineRejected, match="cannot be read"):
            await engine.load(PolicyWeights(version=3, path=str(tmp_path / "missing")), frozen=False)
        with pytest.raises(EngineRejected, match="does not support adapters; merge"):
            await engine.load(PolicyWeights(version=3, name="a", lora_path="b"), frozen=False)
        calls = [asyncio.create_task(generate(engine, make_request([n], 200))) for n in range(6)]
        await kit.until(lambda: len(engine._open) == 6)
        await engine.abort_all()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, EngineUnavailable) for end in ended)
        assert len((await generate(engine, make_request([7, 8], 5))).ids) == 5


async def test_partly_loaded_weights_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(model(seed=1), tmp_path / "new")

    def fail_halfway(made: Any, folder: Any) -> None:
        next(made.parameters()).data.zero_()
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")

    async with start_engine() as engine:
        call = asyncio.create_task(generate(engine, make_request([7, 8], 500)))
        await kit.until(lambda: len(engine._open) == 1)
        with (
            monkeypatch.context() as patch,
            pytest.raises(EngineError, match=r"loaded only partly \(CUDA error: unspecified launch failure\);"),
        ):
            patch.setattr("turngate.engines.local.engine.load_into", fail_halfway)
            await engine.load(PolicyWeights(version=2, path=str(tmp_path / "new")), frozen=False)
        with pytest.raises(EngineUnavailable, match="aborted"):
            await call
        for path in ("", str(tmp_path / "missing")):
            [health] = await engine.health()
            assert not health.ok and health.wrong and "load weights again" in health.detail
            with pytest.raises(EngineUnavailable, match="load weights again"):
                await generate(engine, make_request([7, 8], 5))
            with pytest.raises(EngineRejected):
                await engine.load(PolicyWeights(version=2, path=path), frozen=False)
        await engine.load(PolicyWeights(version=2, path=str(tmp_path / "new")), frozen=False)
        assert (await engine.health())[0].ok
        assert len((await generate(engine, make_request([7, 8], 5))).ids) == 5


async def test_cancelled_weight_load_does_not_leave_new_weights_under_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(model(seed=1), tmp_path / "new")
    began, may_end = threading.Event(), threading.Event()
    load_into = local_weights.load_into

    def wait_and_load(made: Any, folder: Any) -> None:
        began.set()
        may_end.wait(10)
        load_into(made, folder)

    monkeypatch.setattr("turngate.engines.local.engine.load_into", wait_and_load)
    async with start_engine() as engine:
        loading = asyncio.create_task(engine.load(PolicyWeights(version=2, path=str(tmp_path / "new")), frozen=False))
        await asyncio.to_thread(began.wait, 10)
        loading.cancel()
        await asyncio.sleep(0.05)
        assert not loading.done()  # otherwise calls would continue while the weights change
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        [health] = await engine.health()
        assert not health.ok and health.wrong


# ── through the gateway ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_gateway_rows_match_trainer_forward_pass() -> None:
    """End-to-end exactness: recorded rows match the log-probabilities of the same weights."""
    made = model(vocabulary=kit.tokenizer().vocab_size, context=2048)
    async with kit.gateway(engine=LocalEngine(made, slots=4)) as g:
        session = await g.open(max_tokens=40)
        replies = [await g.ask(session.key, "Hello there.", mode="async stream")]
        history = [kit.user("Hello there."), replies[0].message(), kit.user("And now?")]
        replies.append(await g.ask(session.key, history))
        drawn = sum(reply.usage.completion_tokens for reply in replies)  # fewer than 80 where the end of turn was drawn
        await g.seal(session.id)
        [row] = await g.samples(session.id)
        mask = np.array(row["mask"], bool)
        with torch.no_grad():
            scores = made(torch.tensor([row["ids"]]))[0].log_softmax(-1)
        again = scores[:-1].gather(-1, torch.tensor(row["ids"])[1:, None])[:, 0].numpy()[mask[1:]]
        recorded = np.array([x for x, trained in zip(row["logprobs"], mask, strict=True) if trained])
        assert mask.sum() == drawn and np.abs(again - recorded).mean() < 1e-5
        damaged = list(row["ids"])
        damaged[3] = (damaged[3] + 1) % 300  # one wrong context id changes everything after it
        with torch.no_grad():
            scores = made(torch.tensor([damaged]))[0].log_softmax(-1)
        wrong = scores[:-1].gather(-1, torch.tensor(damaged)[1:, None])[:, 0].numpy()[mask[1:]]
        assert np.abs(wrong - recorded).mean() > 1e-3


def test_invalid_local_engine_config_is_rejected(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="pass the folder as --model-folder"):
        ServeConfig(engine="local").check()
    with pytest.raises(ConfigError, match="workers"):
        ServeConfig(engine="local", model_folder="x", workers=2).check()
    with pytest.raises(ConfigError, match="engine-url"):
        ServeConfig(engine="local", model_folder="x", engine_url=["http://127.0.0.1:1"]).check()
    with pytest.raises(ConfigError, match="engine_slots"):
        ServeConfig(engine="local", model_folder="x", engine_slots=0).check()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        LocalEngine(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="found no CUDA device"):
            LocalEngine(tmp_path, device="cuda")


@pytest.mark.process
def test_missing_torch_is_config_error(tmp_path: Any) -> None:
    program = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import turngate.cli
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.server.app import Gateway
try:
    Gateway(ServeConfig(data=sys.argv[1], engine="local", tokenizer=sys.argv[2]))
except ConfigError as error:
    print(error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(kit.BUILTIN_TOKENIZER)],
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0 and "needs torch; run `pip install 'turngate[local]'`" in done.stdout, done.stderr


async def _chunks(engine: LocalEngine, request: Any) -> list[Chunk]:
    async with engine.generate(request) as chunks:
        return [chunk async for chunk in chunks]


def _with(request: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(request, **changes)


def _write(made: Any, folder: Any) -> None:
    """Save the model as a Hugging Face folder."""
    save(made, folder)
    config = {
        "model_type": "qwen3",
        "vocab_size": SHAPE.vocabulary,
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.inner,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head,
        "rms_norm_eps": SHAPE.epsilon,
        "max_position_embeddings": SHAPE.context,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
