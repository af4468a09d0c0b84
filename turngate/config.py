"""Every setting of `turngate serve`, once: its type, default and description.

Settings come from a TOML file, overridden by command-line flags. Secrets come from the environment or the data folder.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
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


# Groups of settings, as `--help` shows them.
GATEWAY, MODEL, ENGINE, LOCAL_ENGINE = "Gateway", "Model", "Engine", "Local engine"
LIMITS, OUTPUT, CHECKS = "Limits", "Output", "Checks"


def _about(description: str, panel: str) -> msgspec.Meta:
    """Describe a setting for `--help` and docs/configuration.md."""
    return msgspec.Meta(description=description, extra={"panel": panel})


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `turngate serve`. The command's flags are generated from these fields."""

    host: Annotated[str, _about("Address to listen on.", GATEWAY)] = "127.0.0.1"
    port: Annotated[int, _about("Port to listen on; 0 picks a free one.", GATEWAY)] = 8700
    data: Annotated[str, _about("Folder for all recorded data.", GATEWAY)] = "turngate-data"
    engine: Annotated[
        EngineKind,
        _about(
            "Engine that samples: vllm, sglang, local, scripted, or gate (the trainer). To observe an endpoint: openai, "
            "anthropic, gemini or responses.",
            ENGINE,
        ),
    ] = "scripted"
    engine_url: Annotated[list[str], _about("URL of the engine; several URLs are replicas.", ENGINE)] = []
    engine_api: Annotated[
        Literal["completions", "generate"], _about("vLLM: the endpoint to send token ids to.", ENGINE)
    ] = "completions"
    engine_key_env: Annotated[
        str, _about("Name of the environment variable that holds the engine's API key.", ENGINE)
    ] = ""
    engine_ranks: Annotated[int, _about("Data-parallel ranks behind each engine URL.", ENGINE)] = 1
    engine_silence_s: Annotated[float, _about("Fail a call after this many seconds without a byte.", ENGINE)] = 600.0
    model_folder: Annotated[
        str,
        _about("Folder with config.json and model.safetensors; without it, the tokenizer's folder.", LOCAL_ENGINE),
    ] = ""
    engine_device: Annotated[Literal["auto", "cpu", "cuda"], _about("Device to compute on.", LOCAL_ENGINE)] = "auto"
    engine_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _about("Number format of the weights; auto uses bfloat16 only on a GPU.", LOCAL_ENGINE),
    ] = "auto"
    engine_slots: Annotated[
        int | None, _about("Calls to sample at once; without it, 16 on a CPU and 256 on a GPU.", LOCAL_ENGINE)
    ] = None
    script: Annotated[str, _about("Scripted engine: a JSON file with a list of replies.", ENGINE)] = ""
    capture: Annotated[
        Literal["auto", "tokens", "logprobs", "text"],
        _about("Observe mode: what to request from the endpoint.", ENGINE),
    ] = "auto"
    model: Annotated[str, _about("Name of the model, for agents and for the engine.", MODEL)] = ""
    tokenizer: Annotated[
        str, _about("Folder with tokenizer.json and a chat template, or a name in the Hugging Face cache.", MODEL)
    ] = ""
    family: Annotated[str, _about("auto, template, or a family of the `renderers` package.", MODEL)] = "auto"
    max_context: Annotated[
        int | None, _about("Context length of the model; without it, the engine's own limit.", MODEL)
    ] = None
    workers: Annotated[int, _about("Processes that share the sessions.", GATEWAY)] = 1
    durability: Annotated[
        Literal["process", "disk"],
        _about("What a recorded turn survives: a crash of the process, or of the machine (disk).", GATEWAY),
    ] = "process"
    idle_s: Annotated[float, _about("Seal sessions that have been idle for this many seconds.", LIMITS)] = 24 * 3600
    rest_s: Annotated[
        float, _about("Evict sessions from memory after this many idle seconds; 0 keeps them.", LIMITS)
    ] = 60.0
    event_days: Annotated[
        float, _about("Remove events older than this many days; 0 keeps them with their session.", LIMITS)
    ] = 0.0
    alive_s: Annotated[float, _about("Send a keep-alive after this many seconds of silence.", LIMITS)] = 10.0
    max_body_mb: Annotated[float, _about("Largest request, in megabytes.", LIMITS)] = 64.0
    open_loopback: Annotated[bool, _about("prime-rl API: accept loopback clients without a key.", GATEWAY)] = False
    log_turns: Annotated[bool, _about("Log one line per turn.", OUTPUT)] = False
    log_format: Annotated[
        Literal["text", "json"],
        _about("Format of log lines; json adds session, rollout, group and worker to each.", OUTPUT),
    ] = "text"
    spans: Annotated[
        bool,
        _about("Send OpenTelemetry spans (extra `otel`); also on if OTEL_EXPORTER_OTLP_ENDPOINT is set.", OUTPUT),
    ] = False
    verify_every: Annotated[int, _about("Verify every n-th session that ends; 0 verifies none.", CHECKS)] = 0
    echo_prompt: Annotated[
        bool, _about("Have the engine echo each prompt, and compare it with the ids sent.", CHECKS)
    ] = False

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
