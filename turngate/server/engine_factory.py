"""Build the engine or relay, and the renderer, from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from turngate.client import keys
from turngate.config import OBSERVED_ENGINES, ServeConfig, explain_unreadable_script
from turngate.engines.base import Engine, Generate, Relay
from turngate.engines.gate import Gate
from turngate.engines.observe.anthropic import AnthropicRelay
from turngate.engines.observe.gemini import GeminiRelay
from turngate.engines.observe.openai import OpenAIRelay
from turngate.engines.observe.responses import ResponsesRelay
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.scripted import DEFAULT_CONTEXT, Script, Scripted, ScriptedTurn
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, find_tokenizer, load_renderer

log = logging.getLogger("turngate")


def build_renderer(config: ServeConfig) -> tuple[Renderer | None, Certificate | None]:
    """Load the configured tokenizer's renderer and the renderer's certificate. Both are None in observe mode, which needs neither."""
    if config.engine in OBSERVED_ENGINES:
        return None, None
    name = config.tokenizer or (config.model_folder if config.engine == "local" else "")
    folder = find_tokenizer(name) if name else BUILTIN_TOKENIZER
    return load_renderer(folder, model=config.model, family=config.family)


def build_replica(config: ServeConfig, url: str) -> VLLM | SGLang:
    """Build one engine of a pool."""
    key, ranks, silence_s = read_engine_key(config), config.engine_ranks, config.engine_silence_s
    shape = config.expert_shape
    if config.engine == "sglang":
        return SGLang(url, config.model, key=key, ranks=ranks, silence_s=silence_s, expert_shape=shape)
    api = config.engine_api
    return VLLM(url, config.model, api=api, key=key, ranks=ranks, silence_s=silence_s, expert_shape=shape)


def list_engine_addresses(config: ServeConfig, engine: Engine | None = None) -> list[str]:
    """Return the addresses of the engines in `engine`, if it is a pool, or else in the configured pool. Return [] if there is no pool."""
    if isinstance(engine, Pool):
        return [replica.address for replica in engine.replicas]
    if config.engine not in ("vllm", "sglang"):
        return []
    return [build_replica(config, url).address for url in config.engine_url]


def build_pool(config: ServeConfig, urls: Sequence[str]) -> Pool:
    """Build a pool of the engines at `urls`. A pool that follows the engine list of a shared store may be empty at first."""
    return Pool(
        [build_replica(config, url) for url in urls],
        name=config.engine,
        timing=PoolTiming(load_s=config.engine_load_s),
        wait_s=config.engine_wait_s,
        may_be_empty=bool(config.shared) or config.is_shared,
    )


def build_engine(
    config: ServeConfig, renderer: Renderer | None, urls: Sequence[str] = ()
) -> tuple[Engine | None, Relay | None]:
    """Build the engine, or the relay for observe mode. `urls` replaces the configured URLs of a pool."""
    key = read_engine_key(config)
    match config.engine:
        case "vllm" | "sglang":
            return build_pool(config, urls or config.engine_url), None
        case "openai":
            url, silence = config.engine_url[0], config.engine_silence_s
            return None, OpenAIRelay(url, key, capture=config.capture, silence_s=silence)
        case "anthropic":
            return None, AnthropicRelay(config.engine_url[0], key, silence_s=config.engine_silence_s)
        case "gemini":
            url, silence = config.engine_url[0], config.engine_silence_s
            return None, GeminiRelay(url, key, capture=config.capture, silence_s=silence)
        case "responses":
            url, silence = config.engine_url[0], config.engine_silence_s
            return None, ResponsesRelay(url, key, capture=config.capture, silence_s=silence)
        case "local":
            return _build_local_engine(config), None
        case "gate":
            return Gate(model=config.model, max_context=config.max_context, silence_s=config.engine_silence_s), None
        case "scripted":
            if config.sampling_masks:
                raise ConfigError(
                    "sampling_masks needs the engine 'local', 'vllm' or 'sglang', not 'scripted'; remove --sampling-masks",
                    param="sampling_masks",
                )
            assert renderer is not None
            return Scripted(
                _load_script(config.script, renderer),
                model=config.model or "scripted",
                max_context=config.max_context or DEFAULT_CONTEXT,
            ), None


def _build_local_engine(config: ServeConfig) -> Engine:
    try:
        from turngate.engines.local import LocalEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the engine 'local' needs {error.name}; run `pip install 'turngate[local]'` (without a GPU, first run "
            "`pip install torch --index-url https://download.pytorch.org/whl/cpu`)",
            param="engine",
        ) from None
    return LocalEngine(
        find_tokenizer(config.model_folder or config.tokenizer),
        device=config.engine_device,
        dtype=config.engine_dtype,
        slots=config.engine_slots,
        max_context=config.max_context,
        served=config.model,
    )


def read_engine_key(config: ServeConfig) -> str | None:
    """Read the engine's API key from the environment variable that the configuration names. Return None if it names none."""
    return keys.read_engine_key(config.engine_key_env) if config.engine_key_env else None


def _load_script(path: str, renderer: Renderer) -> Script:
    """Load the scripted engine's replies from a JSON file, or use a default reply if `path` is empty.

    Each turn of a session gets the next reply. After the last one, the replies start over.
    """
    texts = ["This is the scripted engine. Start with --script FILE (a JSON list of replies) to choose what it says."]
    if path:
        try:
            texts = msgspec.json.decode(Path(path).read_bytes(), type=list[str])
        except OSError as error:
            raise explain_unreadable_script(path, error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"script {path} must be a JSON list of strings: {error}", param="script") from None
        if not texts:
            raise ConfigError(f"script {path} contains no replies; add at least one", param="script")
    turns = [ScriptedTurn([*renderer.tokenizer.encode(text), renderer.stop_ids[0]]) for text in texts]
    return _repeat(turns, path)


def _repeat(turns: Sequence[ScriptedTurn], path: str) -> Script:
    """Return a script that starts over after its last turn.

    For a script from a file, a warning is logged the first time that this happens, because an agent that never gets a final reply may run
    forever.
    """
    is_reported = not path  # the default reply is always repeated

    def script(request: Generate, index: int) -> ScriptedTurn:
        nonlocal is_reported
        if index >= len(turns) and not is_reported:
            is_reported = True
            log.warning(
                "script %s: session %s made more calls than the script has replies (%d), so the replies start over; "
                "add replies, or end the script with one that makes the agent stop",
                *(path, request.session, len(turns)),
            )
        return turns[index % len(turns)]

    return script
