"""Check the engine: whether it is up, serves the model and accepts ids, and which log-probabilities it returns."""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime
from importlib.util import find_spec

import aiohttp
import numpy as np

from turngate.config import OBSERVED_ENGINES
from turngate.doctor.context import TEST_CALL_ENGINES, DoctorContext
from turngate.doctor.finding import CheckOutcome, failure, not_checked, ok, warning
from turngate.engines.base import Chunk, Engine, Generate
from turngate.errors import TurngateError
from turngate.render import Renderer, find_tokenizer
from turngate.types import ID_DTYPE, NEUTRAL, Message, Sampling

_MAX_TOKENS = 4
_CERTAIN = -1e-3  # a higher log-probability is treated as 0
_SKEW_S = 5.0
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")  # that the local engine reads
_PROMPT = (Message("user", "Say any word."),)


async def check_reachable(context: DoctorContext) -> list[CheckOutcome]:
    """Check that every engine is up and serves the model."""
    config = context.config
    if config.engine == "gate":
        return [not_checked("the engine is the trainer, which connects to the gateway", "see docs/gate.md")]
    if config.engine == "local":
        return [await asyncio.to_thread(_check_local, config.model_folder or config.tokenizer)]
    if config.has_pool and not config.engine_url:
        return [not_checked("the engines are listed in the shared store", "run: turngate engines list --gateway URL")]
    results = []
    for url, health in await context.health():
        if not health.ok:
            results.append(
                failure(f"{_label(url, config.engine)}: {health.detail}", _suggest_fix(config.engine, health.detail))
            )
            continue
        length = f", {health.max_context:,} tokens of context" if health.max_context else ""
        model = f"serves {health.model}" if health.model else "responds"
        results.append(ok(f"{_label(url, config.engine)}: {model}{length}"))
    return results


def _check_local(folder: str) -> CheckOutcome:
    for module in ("torch", "safetensors"):
        if find_spec(module) is None:
            return failure(f"local: {module} is not installed", "run: pip install 'turngate[local]'")
    path = find_tokenizer(folder)
    if not (path / "config.json").is_file() or not any((path / name).is_file() for name in _WEIGHT_FILES):
        return failure(
            f"local: {path} must contain config.json, and {_WEIGHT_FILES[0]} or {_WEIGHT_FILES[1]}, but it does not",
            "set --model-folder to the model's folder",
        )
    return ok(f"local: {path} contains a model, which the gateway loads when it starts")


def _label(url: str, engine: str) -> str:
    return f"{engine} at {url}" if url else engine


def _suggest_fix(engine: str, detail: str) -> str:
    if "serves" in detail and ", not " in detail:
        return "set --model to the name that the engine serves, or start the engine with --served-model-name"
    if "API key" in detail:
        return "set --engine-key-env to the name of the environment variable with the engine's key"
    started = {"vllm": "vllm serve MODEL", "sglang": "python -m sglang.launch_server --model-path MODEL"}.get(engine)
    return (
        f"start the engine ({started}), or correct --engine-url"
        if started
        else "correct --engine-url, or check the provider's status page"
    )


async def check_call(context: DoctorContext) -> list[CheckOutcome]:
    """Check that a small call to every engine returns ids with log-probabilities."""
    config = context.config
    if config.engine not in TEST_CALL_ENGINES:
        why = (
            "a call to a hosted endpoint may cost money"
            if config.engine in OBSERVED_ENGINES
            else "the engine is available only while the gateway is running"
        )
        return [not_checked(why, "to make a call, run: turngate run --prompt 'say hello' …")]
    results = []
    for url, health in await context.health():
        if not health.ok:
            results.append(not_checked(f"{_label(url, config.engine)} is not available"))
            continue
        results.append(await _make_call(context, url))
    return results


async def _make_call(context: DoctorContext, url: str) -> CheckOutcome:
    name = _label(url, context.config.engine)
    renderer = await context.require_renderer()
    start = time.perf_counter()
    try:
        ids, logprobs, prompt = await _generate(context, url, renderer, NEUTRAL, echo=context.config.engine == "vllm")
    except TurngateError as error:
        return failure(f"{name}: {error.message}", "check the engine's log")
    took = time.perf_counter() - start
    if not ids:
        return failure(f"{name}: the engine sampled no tokens", "check the engine's log")
    if max(ids) >= renderer.tokenizer.vocab_size:
        # An untrained model may sample the padding ids of its embedding table, which the tokenizer lacks.
        return warning(
            f"{name}: the engine sampled id {max(ids)}, but the tokenizer has only {renderer.tokenizer.vocab_size} ids",
            "set --tokenizer to the folder of the model that the engine serves; if it is already set to that folder, the model "
            "sampled a padding id",
        )
    if prompt is not None and not prompt:
        return failure(
            f"{name}: the engine received a different prompt from the one sent",
            "check for a proxy that changes requests",
        )
    if logprobs is None or any(value is None for value in logprobs):
        return failure(
            f"{name}: the engine did not return log-probabilities for all ids",
            "update the engine; if there is a proxy in front of it, check that the proxy keeps log-probabilities",
        )
    same_prompt = ", and received the prompt unchanged" if prompt else ""
    return ok(f"{name}: returned log-probabilities for all ids ({len(ids)}) in {took:.2f} s{same_prompt}")


async def _generate(
    context: DoctorContext, url: str, renderer: Renderer, sampling: Sampling, *, echo: bool = False
) -> tuple[list[int], list[float | None] | None, bool | None]:
    """Make a small call. Return the sampled ids, their log-probabilities, and whether the engine received the prompt unchanged.

    The third value is None if the engine did not echo the prompt.
    """
    engine = await context.engine(url)
    request = Generate(
        prompt=np.array(renderer.render(_PROMPT, (), {}), ID_DTYPE),
        max_tokens=_MAX_TOKENS,
        sampling=sampling,
        stop_ids=(),
        stream=True,
        request_id="turngate-doctor",
        echo_prompt=echo,
    )
    await engine.start()
    try:
        return await _collect(engine, request)
    finally:
        await engine.close()


async def _collect(engine: Engine, request: Generate) -> tuple[list[int], list[float | None] | None, bool | None]:
    chunks: list[Chunk] = []
    async with engine.generate(request) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.finish is not None:
                break
    ids = [i for chunk in chunks for i in chunk.ids]
    is_complete = all(chunk.logprobs is not None for chunk in chunks if chunk.ids)
    logprobs = [value for chunk in chunks for value in chunk.logprobs or ()] if is_complete else None
    prompts = [chunk.prompt for chunk in chunks if chunk.prompt is not None]
    return ids, logprobs, list(prompts[0]) == request.prompt.tolist() if prompts else None


async def check_logprobs(context: DoctorContext) -> list[CheckOutcome]:
    """Check whether the engine returns log-probabilities of the distribution that it sampled from.

    With top-k 1, only one token remains after truncation. Its probability is 1 after truncation, and less than 1 before.
    """
    config = context.config
    if config.engine not in ("vllm", "sglang"):
        return [not_checked(f"engine {config.engine}: only vLLM and SGLang have several log-probability modes")]
    results = []
    for url, health in await context.health():
        name = _label(url, config.engine)
        if not health.ok:
            results.append(not_checked(f"{name} is not available"))
            continue
        try:
            results.append(await _detect_logprobs_mode(context, url, name))
        except TurngateError as error:
            results.append(not_checked(f"{name}: {error.message}"))
    return results


async def _detect_logprobs_mode(context: DoctorContext, url: str, name: str) -> CheckOutcome:
    renderer = await context.require_renderer()
    greedy = [Sampling(temperature=temperature, top_k=1) for temperature in (1.0, 2.0)]
    cool, hot = [await _generate(context, url, renderer, sampling) for sampling in greedy]
    free = await _generate(context, url, renderer, Sampling(temperature=2.0))
    values = [cool[1], hot[1], free[1]]
    if any(not logprobs or None in logprobs for logprobs in values) or cool[0] != hot[0]:
        return not_checked(
            f"{name}: the engine's replies do not show which log-probabilities it returns (raw or processed)"
        )
    truncated, heated, untruncated = ([value or 0.0 for value in logprobs or ()] for logprobs in values)
    if min(untruncated) > _CERTAIN:
        return not_checked(
            f"{name}: the model is too certain of its tokens to show which log-probabilities the engine returns (raw or processed)"
        )
    if min(truncated) > _CERTAIN and min(heated) > _CERTAIN:
        return ok(f"{name}: log-probabilities are those of the sampled distribution (processed)")
    if np.allclose(truncated, heated, atol=1e-3):
        return warning(
            f"{name}: log-probabilities are computed before temperature and truncation (raw), "
            "so they are correct only at temperature 1 without truncation",
            "start vLLM with --logprobs-mode processed_logprobs"
            if name.startswith("vllm")
            else 'set "temperature" to 1 in the session setting "sampling", and keep "bias" at its default, "neutral"',
        )
    return warning(
        f"{name}: log-probabilities are computed after temperature but before truncation, "
        "so they are correct only without top-p, top-k and min-p",
        'keep the session setting "bias" at its default, "neutral", which ignores the truncation that agents request',
    )


async def check_clock(context: DoctorContext) -> list[CheckOutcome]:
    """Compare this machine's clock with the engines' clocks."""
    urls = [url for url in context.urls() if url]
    if not urls:
        return [not_checked("--engine-url is not set")]
    return [await measure_skew(url) for url in urls]


async def measure_skew(url: str) -> CheckOutcome:
    """Compare this machine's clock with the Date header in a server's response. The header has a resolution of one second."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
            http.get(url.rstrip("/") + "/health", allow_redirects=False) as response,
        ):
            date, now = response.headers.get("date", ""), time.time()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return not_checked(f"{url} does not respond")
    try:
        off = now - parsedate_to_datetime(date).timestamp() - 0.5
    except (TypeError, ValueError):
        return not_checked(f"{url} did not send a valid Date header")
    if abs(off) > _SKEW_S:
        return warning(
            f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the clock of {url}",
            "synchronize both clocks (chrony, systemd-timesyncd)",
        )
    difference = "about a second" if abs(off) < 1.5 else f"about {abs(off):.0f} s"
    return ok(f"this machine's clock is within {difference} of the clock of {url}")
