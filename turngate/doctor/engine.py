"""The engine: is it there, has it the model, does it take ids and give log-probabilities back, and which ones."""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import numpy as np

from turngate.config import OBSERVED_ENGINES
from turngate.doctor.context import EXACT, Subject
from turngate.doctor.finding import Seen, failure, ok, unchecked, warning
from turngate.engines.base import Chunk, Engine, Generate
from turngate.errors import TurngateError
from turngate.render import Renderer, find_tokenizer
from turngate.types import ID_DTYPE, NEUTRAL, Message, Sampling

_TOKENS = 4
_CERTAIN = -1e-3  # a log-probability above this is as good as 0
_SKEW_S = 5.0
_ASKED = (Message("user", "Say any word."),)


async def reachable(subject: Subject) -> list[Seen]:
    """Every replica."""
    config = subject.config
    if config.engine == "gate":
        return [unchecked("the engine is the trainer, which comes by itself", "docs/gate.md has how it does")]
    if config.engine == "local":
        return [await asyncio.to_thread(_local, config.model_folder or config.tokenizer)]
    found = []
    for url, health in await subject.health():
        if not health.ok:
            found.append(failure(f"{_named(url, config.engine)}: {health.detail}", _mend(config.engine, health.detail)))
            continue
        context = f", {health.max_context:,} tokens of context" if health.max_context else ""
        model = f"serves {health.model}" if health.model else "answers"
        found.append(ok(f"{_named(url, config.engine)}: {model}{context}"))
    return found


def _local(folder: str) -> Seen:
    for module in ("torch", "safetensors"):
        if find_spec(module) is None:
            return failure(f"local: {module} is missing", "pip install 'turngate[local]'")
    place = find_tokenizer(folder)
    if not (place / "config.json").is_file() or not list(Path(place).glob("*.safetensors")):
        return failure(
            f"local: {place} has no config.json with a model.safetensors", "give the model's folder as --model-folder"
        )
    return ok(f"local: {place} has a model; it is loaded when the gateway is started")


def _named(url: str, engine: str) -> str:
    return f"{engine} at {url}" if url else engine


def _mend(engine: str, detail: str) -> str:
    if "serves" in detail and ", not " in detail:
        return "give --model the name that it serves, or start it with --served-model-name"
    if "credentials" in detail:
        return "--engine-key-env has to name the variable with its key"
    started = {"vllm": "vllm serve MODEL", "sglang": "python -m sglang.launch_server --model-path MODEL"}.get(engine)
    return (
        f"start it ({started}), or correct --engine-url"
        if started
        else "correct --engine-url, or see its own status page"
    )


async def call(subject: Subject) -> list[Seen]:
    """Ids in, ids with log-probabilities out, and the prompt that it saw."""
    config = subject.config
    if config.engine not in EXACT:
        why = (
            "a call to a hosted endpoint may cost money"
            if config.engine in OBSERVED_ENGINES
            else "it is made when serving"
        )
        return [unchecked(why, "turngate run --prompt 'say hello' … makes one")]
    found = []
    for url, health in await subject.health():
        if not health.ok:
            found.append(unchecked(f"{_named(url, config.engine)} is not usable"))
            continue
        found.append(await _called(subject, url))
    return found


async def _called(subject: Subject, url: str) -> Seen:
    name = _named(url, subject.config.engine)
    renderer, _ = await subject.renderer()
    began = time.perf_counter()
    try:
        ids, logprobs, prompt = await _generated(subject, url, renderer, NEUTRAL, echo=subject.config.engine == "vllm")
    except TurngateError as error:
        return failure(f"{name}: {error.message}", "look into the engine's own log")
    took = time.perf_counter() - began
    if not ids:
        return failure(f"{name}: it sampled nothing", "look into the engine's own log")
    if max(ids) >= renderer.tokenizer.vocab_size:
        # Padding of the model's table, which an untrained model samples; its ids stand for nothing in the tokenizer.
        return warning(
            f"{name}: it sampled id {max(ids)}, and the tokenizer knows {renderer.tokenizer.vocab_size}",
            "is --tokenizer that of this model?",
        )
    if prompt is not None and not prompt:
        return failure(f"{name}: it says that it saw another prompt than it was sent", "is a proxy in between?")
    if logprobs is None or any(value is None for value in logprobs):
        return failure(
            f"{name}: {len(ids)} ids came without log-probabilities", "its version or a proxy in front leaves them out"
        )
    seen = ", and saw the prompt as it was sent" if prompt else ""
    return ok(f"{name}: {len(ids)} ids with log-probabilities in {took:.2f} s{seen}")


async def _generated(
    subject: Subject, url: str, renderer: Renderer, sampling: Sampling, *, echo: bool = False
) -> tuple[list[int], list[float | None] | None, bool | None]:
    """What was sampled, its log-probabilities, and whether the engine saw the prompt as it was sent (None: it was not asked)."""
    engine = await subject.engine(url)
    request = Generate(
        prompt=np.array(renderer.render(_ASKED, (), {}), ID_DTYPE),
        max_tokens=_TOKENS,
        sampling=sampling,
        stop_ids=(),
        stream=True,
        request_id="turngate-doctor",
        echo_prompt=echo,
    )
    await engine.start()
    try:
        return await _read(engine, request)
    finally:
        await engine.close()


async def _read(engine: Engine, request: Generate) -> tuple[list[int], list[float | None] | None, bool | None]:
    chunks: list[Chunk] = []
    async with engine.generate(request) as coming:
        async for chunk in coming:
            chunks.append(chunk)
            if chunk.finish is not None:
                break
    ids = [i for chunk in chunks for i in chunk.ids]
    whole = all(chunk.logprobs is not None for chunk in chunks if chunk.ids)
    logprobs = [value for chunk in chunks for value in chunk.logprobs or ()] if whole else None
    saw = [chunk.prompt for chunk in chunks if chunk.prompt is not None]
    return ids, logprobs, list(saw[0]) == request.prompt.tolist() if saw else None


async def logprobs(subject: Subject) -> list[Seen]:
    """Whether they are of the distribution that was sampled from. Asked for the likeliest token only, with two temperatures: of what
    is left when all others are cut off, the probability is 1; a log-probability from before that is not 0."""
    config = subject.config
    if config.engine not in ("vllm", "sglang"):
        return [unchecked(f"the engine {config.engine} leaves no choice")]
    found = []
    for url, health in await subject.health():
        name = _named(url, config.engine)
        if not health.ok:
            found.append(unchecked(f"{name} is not usable"))
            continue
        try:
            found.append(await _mode(subject, url, name))
        except TurngateError as error:
            found.append(unchecked(f"{name}: {error.message}"))
    return found


async def _mode(subject: Subject, url: str, name: str) -> Seen:
    renderer, _ = await subject.renderer()
    first_only = [Sampling(temperature=heat, top_k=1) for heat in (1.0, 2.0)]
    plain, hot = [await _generated(subject, url, renderer, sampling) for sampling in first_only]
    free = await _generated(subject, url, renderer, Sampling(temperature=2.0))
    values = [plain[1], hot[1], free[1]]
    if any(given is None or None in given for given in values) or plain[0] != hot[0]:
        return unchecked(f"{name}: it cannot be told from what it gives")
    cut, heated, all_of_it = ([value or 0.0 for value in given or ()] for given in values)
    if min(all_of_it) > _CERTAIN:
        return unchecked(f"{name}: the model is so sure of its words that it cannot be told")
    if min(cut) > _CERTAIN and min(heated) > _CERTAIN:
        return ok(f"{name}: of the distribution that was sampled (processed)")
    if np.allclose(cut, heated, atol=1e-3):
        return warning(
            f"{name}: raw, from before temperature and truncation: true only where rollouts sample with temperature 1 and no top-p",
            "start vLLM with --logprobs-mode processed_logprobs" if name.startswith("vllm") else "keep temperature 1",
        )
    return warning(
        f"{name}: with temperature, but from before truncation: true only where rollouts sample without top-p and top-k",
        "sessions leave truncation off by themselves (bias neutral)",
    )


async def clock(subject: Subject) -> list[Seen]:
    """Against the engine's own."""
    urls = [url for url in subject.urls() if url]
    if not urls:
        return [unchecked("there is no other machine")]
    return [await skew(url) for url in urls]


async def skew(url: str) -> Seen:
    """Against whatever answers there. Its header counts whole seconds."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
            http.get(url.rstrip("/") + "/health", allow_redirects=False) as response,
        ):
            told, now = response.headers.get("date", ""), time.time()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return unchecked(f"{url} does not answer")
    try:
        off = now - parsedate_to_datetime(told).timestamp() - 0.5
    except (TypeError, ValueError):
        return unchecked(f"{url} does not tell its time")
    if abs(off) > _SKEW_S:
        return warning(
            f"this clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} that of {url}",
            "have both synchronised (chrony, systemd-timesyncd)",
        )
    return ok(f"within a second or so of {url}" if abs(off) < 1.5 else f"{abs(off):.0f} s from {url}")
