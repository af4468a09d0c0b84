"""The settings of `turngate serve`.

They come from a TOML file, overridden by command-line flags. Secrets come from the environment or the data folder.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from turngate.common.validation import explain_error, reject_credentials
from turngate.errors import ConfigError

EngineKind = Literal["vllm", "sglang", "scripted", "local", "gate", "openai", "anthropic", "gemini", "responses"]
# Engines of observe mode, and the capture levels that each supports.
OBSERVED_ENGINES: dict[str, tuple[str, ...]] = {
    "openai": ("auto", "tokens", "logprobs", "text"),
    "anthropic": ("auto", "text"),
    "gemini": ("auto", "logprobs", "text"),
    "responses": ("auto", "logprobs", "text"),
}


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `turngate serve`."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8700  # port to listen on; 0 takes a free one
    data: str = "turngate-data"  # folder for everything that is recorded
    engine: EngineKind = "scripted"  # gate: the trainer; openai (chat), anthropic, gemini, responses: observe mode
    engine_url: list[str] = []  # base URL of the engine; give several for replicas
    engine_api: Literal["completions", "generate"] = "completions"  # vLLM endpoint that takes the token ids
    engine_key_env: str = ""  # name of the environment variable that holds the engine's API key
    engine_ranks: int = 1  # data-parallel ranks behind each engine URL
    engine_silence_s: float = 600.0  # fail a call when the engine sends nothing for this long
    model_folder: str = ""  # local engine: folder with config.json and model.safetensors; default: tokenizer
    engine_device: Literal["auto", "cpu", "cuda"] = "auto"  # local engine: device
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # local engine; auto: bfloat16 on a GPU, else float32
    engine_slots: int | None = None  # local engine: calls sampled at once; default: 16 on a CPU, 256 on a GPU
    script: str = ""  # scripted engine: path of a JSON file with a list of replies
    capture: Literal["auto", "tokens", "logprobs", "text"] = "auto"  # observe mode: what to request from the endpoint
    model: str = ""  # model name, as agents send it and the engine serves it
    tokenizer: str = ""  # folder with tokenizer.json and a chat template, or a name in the Hugging Face cache
    family: str = "auto"  # auto, template, or a family of the `renderers` package
    max_context: int | None = None  # the model's context length; default: ask the engine
    workers: int = 1  # processes that share the sessions
    durability: Literal["process", "disk"] = "process"  # a turn survives a crash of the process, or of the machine
    idle_s: float = 24 * 3600  # seal sessions that are unused for this long
    rest_s: float = 60.0  # unload the traces of sessions that are unused for this long; 0: never
    event_days: float = 0.0  # delete events older than this; 0: keep them as long as their session
    alive_s: float = 10.0  # send a keep-alive when nothing was sent for this long
    max_body_mb: float = 64.0  # largest request, in megabytes
    open_loopback: bool = False  # prime-rl API: loopback clients need no key
    log_turns: bool = False  # one log line per turn
    log_format: Literal["text", "json"] = "text"  # json: one object per line, with session, rollout, group and worker
    spans: bool = False  # OpenTelemetry spans (extra `otel`); also on if OTEL_EXPORTER_OTLP_ENDPOINT is set
    verify_every: int = 0  # verify every n-th session that ends, in the background; 0: none
    echo_prompt: bool = False  # have the engine return each prompt, and compare it

    def check(self) -> ServeConfig:
        """Validate ranges and constraints across fields."""
        self._check_numbers()
        self._check_engine_urls()
        if self.capture not in OBSERVED_ENGINES.get(self.engine, (self.capture,)):
            raise ConfigError(
                f"capture: the engine {self.engine!r} cannot return {self.capture}; "
                f"choose {' or '.join(OBSERVED_ENGINES[self.engine])}",
                param="capture",
            )
        if self.engine == "gate":
            self._check_gate()
        if self.engine == "local":
            self._check_local()
        if self.engine in ("vllm", "sglang", "gate") and not self.tokenizer:
            raise ConfigError(
                "tokenizer: exact sessions need the model's tokenizer folder; give --tokenizer PATH", param="tokenizer"
            )
        if self.engine == "vllm" and not self.model:
            raise ConfigError("model: give --model NAME, the name under which vLLM serves the model", param="model")
        return self

    def _check_numbers(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not between 0 and 65535", param="port")
        for name in ("idle_s", "alive_s", "max_body_mb", "engine_silence_s", "engine_ranks"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be more than 0", param=name)
        if not self.rest_s >= 0:
            raise ConfigError(f"rest_s: {self.rest_s} must be 0 (never) or more", param="rest_s")
        if not 1 <= self.workers <= 256:
            raise ConfigError(
                f"workers: {self.workers} is not between 1 and 256; more than one per core does not help",
                param="workers",
            )
        if not self.event_days >= 0:
            raise ConfigError(f"event_days: {self.event_days} must be 0 (keep them) or more", param="event_days")
        if self.verify_every < 0:
            raise ConfigError(
                f"verify_every: {self.verify_every} must be 0 (none), 1 (each session) or more", param="verify_every"
            )
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"max_context: {self.max_context} must be at least 1", param="max_context")

    def _check_engine_urls(self) -> None:
        if self.engine not in ("scripted", "gate", "local") and not self.engine_url:
            raise ConfigError(
                f"engine_url: the engine {self.engine!r} needs at least one --engine-url", param="engine_url"
            )
        for url in self.engine_url:
            reject_credentials(
                url, "engine_url", "put the key into an environment variable, and name that variable in engine_key_env"
            )
            if not _is_url(url):
                raise ConfigError(
                    f"engine_url: {url!r} is not an http(s) URL such as http://127.0.0.1:8000", param="engine_url"
                )
        if self.engine in OBSERVED_ENGINES and len(self.engine_url) > 1:
            raise ConfigError(
                "engine_url: observe mode relays to one endpoint; give one --engine-url", param="engine_url"
            )

    def _check_gate(self) -> None:
        if self.engine_url:
            raise ConfigError(
                "engine_url: with the engine 'gate' the trainer connects to the gateway (docs/gate.md); leave --engine-url out",
                param="engine_url",
            )
        if self.workers > 1:
            raise ConfigError(
                "workers: the engine 'gate' has one queue of calls, in one process; leave --workers out",
                param="workers",
            )

    def _check_local(self) -> None:
        if not (self.model_folder or self.tokenizer):
            raise ConfigError(
                "model_folder: the engine 'local' needs a Hugging Face folder with model and tokenizer; give --model-folder PATH",
                param="model_folder",
            )
        if self.engine_url:
            raise ConfigError(
                "engine_url: the engine 'local' runs in this process; leave --engine-url out", param="engine_url"
            )
        if self.workers > 1:
            raise ConfigError(
                "workers: the engine 'local' has one model, in one process; leave --workers out", param="workers"
            )
        if self.engine_slots is not None and self.engine_slots < 1:
            raise ConfigError(f"engine_slots: {self.engine_slots} must be at least 1", param="engine_slots")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0  # an invalid port raises
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return has_host and is_plain and parts.scheme in ("http", "https") and not (parts.query or parts.fragment)


def read_toml(file: Path | None) -> dict[str, Any]:
    """Read a TOML file of settings; None gives no settings."""
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {file} cannot be read ({error.strerror})", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {file} is not valid TOML: {error}", param="config") from None


def load_config(file: Path | None, overrides: dict[str, Any]) -> ServeConfig:
    """Load the settings of a file. Overrides that are not None take precedence."""
    values = read_toml(file)
    values.update({name: value for name, value in overrides.items() if value is not None})
    if isinstance(values.get("engine_url"), str):
        values["engine_url"] = [values["engine_url"]]
    if "admin_key" in values:
        raise ConfigError("admin_key: secrets are never settings; set the environment variable TURNGATE_ADMIN_KEY")
    try:
        return msgspec.convert(values, ServeConfig).check()
    except msgspec.ValidationError as error:
        message, field = explain_error(error, ServeConfig, "setting")
        raise ConfigError(message, param=field) from None
