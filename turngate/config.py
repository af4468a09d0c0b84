"""The settings of `turngate serve`: the type, default and description of each.

Settings are read from a TOML file, and command-line flags override them. API keys are not settings: they are read from the environment or
the data folder.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from turngate.common.database_url import is_database_url, parse_database_url, refuse_password_flag
from turngate.common.validation import explain_error, parse_toml, reject_credentials
from turngate.errors import ConfigError

REFERENCE_SCRIPT = "reference"  # the value of `script` that replays the reference solution
EngineKind = Literal["vllm", "sglang", "scripted", "local", "gate", "openai", "anthropic", "gemini", "responses"]
# Engines for observe mode, and the capture levels that each supports.
OBSERVED_ENGINES: dict[str, tuple[str, ...]] = {
    "openai": ("auto", "tokens", "logprobs", "text"),
    "anthropic": ("auto", "text"),
    "gemini": ("auto", "logprobs", "text"),
    "responses": ("auto", "logprobs", "text"),
}


EXPERT_SHAPE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,3})")  # layers, experts per token


# Headings under which `--help` groups the settings.
GATEWAY, MODEL, ENGINE, LOCAL_ENGINE = "Gateway", "Model", "Engine", "Local engine"
LIMITS, OUTPUT, CHECKS, CELL = "Limits", "Output", "Checks", "Cell"


def _about(description: str, panel: str) -> msgspec.Meta:
    """Return the metadata of a setting: its description, for `--help` and docs/configuration.md, and its heading in `--help`."""
    return msgspec.Meta(description=description, extra={"panel": panel})


# Bucket edges of the histogram of log-probability differences, in nats.
MISMATCH_STEPS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class MismatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits above which a trainer's report about log-probabilities causes an alarm.

    If `share`, `kl` or `stale_kl` is 0, its alarm is off. `difference` defines which tokens count as different.
    """

    difference: float = 0.2  # one of `MISMATCH_STEPS`
    share: float = 0.05  # of tokens that differ by more than `difference`, with the same weights
    kl: float = 0.01  # between trainer and engine with the same weights, in nats per token
    stale_kl: float = 0.1  # between the trainer's weights and the older weights that sampled the tokens


_LIMITS = MismatchLimits()


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `turngate serve`. The command's flags are generated from these fields."""

    host: Annotated[str, _about("Address to listen on.", GATEWAY)] = "127.0.0.1"
    port: Annotated[int, _about("Port to listen on; 0 picks a free one.", GATEWAY)] = 8700
    data: Annotated[str, _about("Folder for all recorded data, or postgresql://… for a shared store.", GATEWAY)] = (
        "turngate-data"
    )
    engine: Annotated[
        EngineKind,
        _about(
            "Sampling engine: vllm, sglang, local, scripted, or gate (the trainer samples). To observe an existing "
            "endpoint: openai, anthropic, gemini or responses.",
            ENGINE,
        ),
    ] = "scripted"
    engine_url: Annotated[
        list[str],
        _about(
            "URL of the engine; pass several for replicas. A cell also uses the engines that the shared store lists.",
            ENGINE,
        ),
    ] = []
    engine_api: Annotated[
        Literal["completions", "generate"], _about("vLLM: endpoint that receives token ids.", ENGINE)
    ] = "completions"
    engine_key_env: Annotated[str, _about("Name of the environment variable with the engine's API key.", ENGINE)] = ""
    engine_ranks: Annotated[int, _about("Number of data-parallel ranks behind each engine URL.", ENGINE)] = 1
    routed_experts: Annotated[
        str,
        _about(
            "Record which experts a mixture-of-experts model chose for each token. Set this to auto (vLLM only) or to the model's "
            "LAYERSxEXPERTS, such as 48x8 for 48 layers and 8 experts per token. vLLM also needs engine_api generate.",
            ENGINE,
        ),
    ] = ""
    sampling_masks: Annotated[
        bool,
        _about(
            "Record, for each sampled token, which ids remained after top-p, top-k and min-p, so that turns sampled with these settings "
            "can be used for training. Needs the local engine, SGLang, or vLLM with engine_api generate.",
            ENGINE,
        ),
    ] = False
    engine_silence_s: Annotated[
        float, _about("Fail a call if the engine sends nothing for this many seconds.", ENGINE)
    ] = 600.0
    engine_wait_s: Annotated[
        float,
        _about(
            "Let a call wait up to this many seconds while all engines are busy; 0 fails the call immediately.", ENGINE
        ),
    ] = 300.0
    engine_load_s: Annotated[
        float, _about("Seconds between reads of each engine's load; 0 never reads it.", ENGINE)
    ] = 2.0
    model_folder: Annotated[
        str,
        _about("Folder with config.json and safetensors files. Defaults to the tokenizer folder.", LOCAL_ENGINE),
    ] = ""
    engine_device: Annotated[Literal["auto", "cpu", "cuda"], _about("Device to run the model on.", LOCAL_ENGINE)] = (
        "auto"
    )
    engine_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _about(
            "Data type of the weights: float32, bfloat16, or auto (bfloat16 on a GPU, float32 on a CPU).", LOCAL_ENGINE
        ),
    ] = "auto"
    engine_slots: Annotated[
        int | None,
        _about(
            "Maximum concurrent calls. Defaults to 16 on a CPU and 256 on a GPU, or fewer if memory is short.",
            LOCAL_ENGINE,
        ),
    ] = None
    script: Annotated[
        str,
        _about(
            "Scripted engine: JSON file with a list of replies. `turngate run` and `turngate batch` also accept `reference` to replay the "
            "task's solution.",
            ENGINE,
        ),
    ] = ""
    capture: Annotated[
        Literal["auto", "tokens", "logprobs", "text"],
        _about("Capture level to request from the endpoint in observe mode.", ENGINE),
    ] = "auto"
    model: Annotated[str, _about("Model name, as used by agents and the engine.", MODEL)] = ""
    tokenizer: Annotated[
        str, _about("Folder with tokenizer.json and a chat template, or a model in the Hugging Face cache.", MODEL)
    ] = ""
    family: Annotated[
        str, _about("Renderer family: auto, template, or a family from the `renderers` package.", MODEL)
    ] = "auto"
    max_context: Annotated[
        int | None, _about("Context length of the model, in tokens. Defaults to the engine's limit.", MODEL)
    ] = None
    workers: Annotated[int, _about("Number of worker processes. Each serves a share of the sessions.", GATEWAY)] = 1
    durability: Annotated[
        Literal["process", "disk"],
        _about(
            "Whether recorded turns survive only a crash of the gateway (process), or also a crash of the machine (disk).",
            GATEWAY,
        ),
    ] = "process"
    idle_s: Annotated[float, _about("Seal sessions that have been idle for this many seconds.", LIMITS)] = 24 * 3600
    rest_s: Annotated[
        float, _about("Evict open sessions from memory after this many idle seconds; 0 turns this off.", LIMITS)
    ] = 60.0
    max_loaded_mb: Annotated[
        float,
        _about(
            "Memory limit in MB, per project and per worker, for traces and calls in flight. Above it, the least recently used "
            "sessions are evicted; 0 sets no limit.",
            LIMITS,
        ),
    ] = 0.0
    event_days: Annotated[
        float, _about("Delete events older than this many days; 0 keeps them as long as their session.", LIMITS)
    ] = 0.0
    session_days: Annotated[
        float,
        _about(
            "Remove sessions that ended more than this many days ago and are no longer needed; 0 keeps all sessions.",
            LIMITS,
        ),
    ] = 0.0
    archive: Annotated[
        str,
        _about(
            "Folder to which sessions are written as Parquet files before they are removed (needs the `parquet` extra).",
            LIMITS,
        ),
    ] = ""
    alive_s: Annotated[float, _about("Send agents a keep-alive after this many seconds without output.", LIMITS)] = 10.0
    max_body_mb: Annotated[float, _about("Maximum request size, in megabytes.", LIMITS)] = 64.0
    open_loopback: Annotated[
        bool, _about("prime-rl API: accept requests from this machine without a key.", GATEWAY)
    ] = False
    log_turns: Annotated[bool, _about("Log one line per turn.", OUTPUT)] = False
    log_format: Annotated[
        Literal["text", "json"],
        _about("Log format; json lines include the session, rollout, group and worker, if known.", OUTPUT),
    ] = "text"
    spans: Annotated[
        bool,
        _about(
            "Send OpenTelemetry spans (needs the `otel` extra). Setting OTEL_EXPORTER_OTLP_ENDPOINT also enables this.",
            OUTPUT,
        ),
    ] = False
    verify_every: Annotated[int, _about("Verify every n-th session when it ends; 0 verifies none.", CHECKS)] = 0
    mismatch_difference: Annotated[
        float,
        _about(
            "Count a token as different if the log-probabilities that trainer and engine compute for it with the same weights differ by "
            "more than this; one of " + ", ".join(f"{step:g}" for step in MISMATCH_STEPS) + ".",
            CHECKS,
        ),
    ] = _LIMITS.difference
    mismatch_share: Annotated[
        float,
        _about(
            "Raise an alarm if more than this share of tokens counts as different (see mismatch_difference); 0 turns it off.",
            CHECKS,
        ),
    ] = _LIMITS.share
    mismatch_kl: Annotated[
        float,
        _about(
            "Raise an alarm if trainer and engine, with the same weights, diverge by more than this many nats per token; 0 turns it off.",
            CHECKS,
        ),
    ] = _LIMITS.kl
    stale_kl: Annotated[
        float,
        _about(
            "Raise an alarm if the trainer's policy diverges by more than this many nats per token from the older weights that sampled "
            "the tokens; 0 turns it off.",
            CHECKS,
        ),
    ] = _LIMITS.stale_kl
    echo_prompt: Annotated[
        bool, _about("Ask the engine to echo each prompt, and compare the echo with the ids sent.", CHECKS)
    ] = False

    shared: Annotated[
        str,
        _about(
            "URL of the shared store, such as postgresql://user@host/database. A URL with a password is accepted only from "
            "TURNGATE_SHARED or a config file.",
            CELL,
        ),
    ] = ""
    cell_name: Annotated[str, _about("Name of this cell in the shared store. Defaults to the host name.", CELL)] = ""
    lease_s: Annotated[
        float, _about("Stop serving if the shared store has been unreachable for this many seconds.", CELL)
    ] = 30.0
    max_unshipped: Annotated[
        int,
        _about(
            "Refuse a project's new sessions while this many of its ended sessions are not in the shared store yet.",
            CELL,
        ),
    ] = 10_000

    @property
    def is_shared(self) -> bool:
        """Whether the data is in a shared store. A gateway on a shared store opens no sessions."""
        return is_database_url(self.data)

    @property
    def mismatch_limits(self) -> MismatchLimits:
        return MismatchLimits(
            difference=self.mismatch_difference,
            share=self.mismatch_share,
            kl=self.mismatch_kl,
            stale_kl=self.stale_kl,
        )

    @property
    def has_pool(self) -> bool:
        """Whether the engine is a pool of servers."""
        return self.engine in ("vllm", "sglang")

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """The number of layers and the number of experts per token that `routed_experts` sets, or None if it is `auto` or empty."""
        found = EXPERT_SHAPE.fullmatch(self.routed_experts)
        return None if found is None else (int(found[1]), int(found[2]))

    @property
    def folder(self) -> Path:
        """The data folder or, if the data is in a shared store, the local folder for files such as the admin key."""
        return parse_database_url(self.data).folder if self.is_shared else Path(self.data)

    @property
    def data_name(self) -> str:
        """The data folder, or the address of the shared store with any password removed."""
        return parse_database_url(self.data).name if self.is_shared else self.data

    def check(self) -> ServeConfig:
        """Validate the settings and the constraints between them, and return this object."""
        if self.is_shared:
            self._check_shared()
            return self
        self._check_numbers()
        self._check_engine_urls()
        if self.capture not in OBSERVED_ENGINES.get(self.engine, (self.capture,)):
            raise ConfigError(
                f"capture must be one of {', '.join(OBSERVED_ENGINES[self.engine])} for the engine {self.engine!r}, "
                f"not {self.capture!r}",
                param="capture",
            )
        if self.routed_experts:
            self._check_routed_experts()
        if self.sampling_masks:
            self._check_sampling_masks()
        if self.engine == "gate":
            self._check_gate()
        if self.engine == "local":
            self._check_local()
        if self.engine in ("vllm", "sglang", "gate") and not self.tokenizer:
            raise ConfigError(
                f"tokenizer is not set, but the engine {self.engine!r} needs the model's tokenizer; set --tokenizer to a folder, or to a "
                "model in the Hugging Face cache",
                param="tokenizer",
            )
        if self.engine == "vllm" and not self.model:
            raise ConfigError(
                "model is not set; pass the name under which vLLM serves the model (--model NAME)", param="model"
            )
        return self

    def _check_numbers(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}", param="port")
        for name in ("idle_s", "alive_s", "max_body_mb", "engine_silence_s", "engine_ranks"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}", param=name)
        for name in ("engine_wait_s", "engine_load_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or greater, not {getattr(self, name)}", param=name)
        if not self.max_loaded_mb >= 0:
            raise ConfigError(
                f"max_loaded_mb must be 0 (no limit) or greater, not {self.max_loaded_mb}", param="max_loaded_mb"
            )
        if not self.rest_s >= 0:
            raise ConfigError(f"rest_s must be 0 (no limit) or greater, not {self.rest_s}", param="rest_s")
        if not 1 <= self.workers <= 256:
            raise ConfigError(
                f"workers must be between 1 and 256, not {self.workers}",
                param="workers",
            )
        self._check_mismatch()
        for name in ("event_days", "session_days"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 (no limit) or greater, not {getattr(self, name)}", param=name)
        if self.archive and not self.session_days:
            raise ConfigError(
                "'archive' has no effect without session_days; set session_days to the number of days after which sessions are removed",
                param="archive",
            )
        if self.verify_every < 0:
            raise ConfigError(
                f"verify_every must be 0 (verify no sessions), 1 (all) or n (every n-th), not {self.verify_every}",
                param="verify_every",
            )
        if not 1 <= self.lease_s <= 3600:
            raise ConfigError(f"lease_s must be between 1 and 3600, not {self.lease_s}", param="lease_s")
        if self.max_unshipped < 1:
            raise ConfigError(f"max_unshipped must be 1 or more, not {self.max_unshipped}", param="max_unshipped")
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"max_context must be at least 1, not {self.max_context}", param="max_context")

    def _check_mismatch(self) -> None:
        if self.mismatch_difference not in MISMATCH_STEPS:
            steps = ", ".join(f"{step:g}" for step in MISMATCH_STEPS)
            raise ConfigError(
                f"mismatch_difference must be one of {steps}, not {self.mismatch_difference:g}",
                param="mismatch_difference",
            )
        if not 0 <= self.mismatch_share <= 1:
            raise ConfigError(
                f"mismatch_share must be between 0 (no alarm) and 1 (all tokens), not {self.mismatch_share}",
                param="mismatch_share",
            )
        for name in ("mismatch_kl", "stale_kl"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be 0 (no alarm) or a finite number greater than 0, not {getattr(self, name)}",
                    param=name,
                )

    def _check_shared(self) -> None:
        parse_database_url(self.data)
        self._check_numbers()
        for url in self.engine_url if self.has_pool else ():
            check_engine_url(url, "engine_url")
        if self.workers > 1:
            raise ConfigError(
                "workers must be 1 if data is a shared store; start more gateways on the same store instead",
                param="workers",
            )

    def _check_engine_urls(self) -> None:
        has_list = bool(self.shared) and self.has_pool  # the engines are listed in the shared store
        if self.engine not in ("scripted", "gate", "local") and not self.engine_url and not has_list:
            raise ConfigError(
                f"engine_url is not set; the engine {self.engine!r} needs the URL of its server (--engine-url URL)",
                param="engine_url",
            )
        for url in self.engine_url:
            check_engine_url(url, "engine_url")
        if self.engine == "scripted" and self.engine_url:
            raise ConfigError(
                "engine_url cannot be set with the engine 'scripted' (the default), which has no server; pass a different "
                "engine, such as --engine vllm, or remove --engine-url",
                param="engine_url",
            )
        if self.engine in OBSERVED_ENGINES and len(self.engine_url) > 1:
            raise ConfigError(
                "engine_url lists several URLs, but observe mode relays to one endpoint; pass one --engine-url",
                param="engine_url",
            )

    def _check_routed_experts(self) -> None:
        if not (self.routed_experts == "auto" or EXPERT_SHAPE.fullmatch(self.routed_experts)):
            raise ConfigError(
                "routed_experts must be LAYERSxEXPERTS, such as 48x8 (48 layers, 8 experts per token), or auto (vllm only), "
                f"not {self.routed_experts!r}",
                param="routed_experts",
            )
        if not self.has_pool:
            raise ConfigError(
                f"routed_experts needs the engine 'vllm' or 'sglang', not {self.engine!r}; remove --routed-experts",
                param="routed_experts",
            )
        if self.engine == "vllm" and self.engine_api != "generate":
            raise ConfigError(
                "routed_experts needs --engine-api generate, because vLLM's completions endpoint does not stream the chosen experts",
                param="routed_experts",
            )
        if self.engine == "sglang" and self.routed_experts == "auto":
            raise ConfigError(
                "routed_experts must be LAYERSxEXPERTS, such as 48x8, with the engine 'sglang', which does not report these "
                "numbers; they are num_hidden_layers and num_experts_per_tok in the model's config.json",
                param="routed_experts",
            )

    def _check_sampling_masks(self) -> None:
        if self.engine == "gate" or self.engine in OBSERVED_ENGINES:
            raise ConfigError(
                f"sampling_masks needs the engine 'local', 'vllm' or 'sglang', not {self.engine!r}; remove --sampling-masks",
                param="sampling_masks",
            )
        if self.engine == "vllm" and self.engine_api != "generate":
            raise ConfigError(
                "sampling_masks needs --engine-api generate, because vLLM's completions endpoint does not return the masks",
                param="sampling_masks",
            )

    def _check_gate(self) -> None:
        if self.engine_url:
            raise ConfigError(
                "engine_url cannot be set with the engine 'gate', because the trainer connects to the gateway "
                "(docs/gate.md); remove --engine-url",
                param="engine_url",
            )
        if self.workers > 1:
            raise ConfigError(
                "workers must be 1 with the engine 'gate', which keeps its queue of calls in one process; remove --workers",
                param="workers",
            )

    def _check_local(self) -> None:
        if not (self.model_folder or self.tokenizer):
            raise ConfigError(
                "the engine 'local' needs a Hugging Face folder with a model and a tokenizer; pass the folder as --model-folder",
                param="model_folder",
            )
        if self.engine_url:
            raise ConfigError(
                "engine_url cannot be set with the engine 'local', which runs in this process; remove --engine-url",
                param="engine_url",
            )
        if self.workers > 1:
            raise ConfigError(
                "workers must be 1 with the engine 'local', which runs the model in this process; remove --workers",
                param="workers",
            )
        if self.engine_slots is not None and self.engine_slots < 1:
            raise ConfigError(f"engine_slots must be at least 1, not {self.engine_slots}", param="engine_slots")


def check_engine_url(url: str, param: str) -> None:
    """Raise `ConfigError` if an engine URL is invalid or contains a user name or password."""
    reject_credentials(
        url, param, "put the key in an environment variable and set engine_key_env to the variable's name"
    )
    if not _is_url(url):
        raise ConfigError(
            f"{param} must be an http or https URL without a query or fragment, such as http://127.0.0.1:8000, not {url!r}",
            param=param,
        )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0  # an invalid port raises
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return has_host and is_plain and parts.scheme in ("http", "https") and not (parts.query or parts.fragment)


def read_toml(file: Path | None) -> dict[str, Any]:
    """Read a TOML file of settings. Return an empty dictionary if `file` is None."""
    if file is None:
        return {}
    try:
        return parse_toml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read ({error.strerror})", param="config") from None
    except ValueError as error:  # this includes text that is not UTF-8
        raise ConfigError(f"config file {file} is not valid TOML: {error}", param="config") from None


def explain_unreadable_script(path: str, error: OSError) -> ConfigError:
    """Return the error for a script that the scripted engine cannot read."""
    if path == REFERENCE_SCRIPT:
        return ConfigError(
            f"script {path!r} works only with `turngate run`, or with `turngate batch` if --ray is not used; pass a JSON file with a list "
            "of replies instead",
            param="script",
        )
    return ConfigError(f"script {path} cannot be read: {error.strerror}", param="script")


def load_config(file: Path | None, overrides: dict[str, Any]) -> ServeConfig:
    """Load settings from `file`, if it is not None, and validate them. Values in `overrides` that are not None take precedence."""
    values = read_toml(file)
    refuse_password_flag(str(overrides.get("data") or ""))
    values.update({name: value for name, value in overrides.items() if value is not None})
    if isinstance(values.get("engine_url"), str):
        values["engine_url"] = [values["engine_url"]]
    if "admin_key" in values:
        raise ConfigError(
            "admin_key is a secret and cannot be a setting; set the environment variable TURNGATE_ADMIN_KEY instead"
        )
    try:
        return msgspec.convert(values, ServeConfig).check()
    except msgspec.ValidationError as error:
        message, field = explain_error(error, ServeConfig, "setting")
        raise ConfigError(message, param=field) from None
