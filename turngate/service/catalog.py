"""The catalog of endpoints that callers choose from, and the modes that each supports. Endpoints are listed in the service's settings:

    [endpoints."vllm://Qwen3-8B"]
    url = "http://127.0.0.1:8000"
    model = "Qwen/Qwen3-8B"
    tokenizer = "/models/Qwen3-8B"
    key_env = "VLLM_KEY"                # the NAME of the environment variable with the endpoint's key

The part before `://` is the kind of endpoint, and the part after it is a name. A caller's own endpoint (`endpoint_url`) is accepted only if
`allowed_hosts` lists its host. The server's keys are never sent to such an endpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from turngate.agents.spec import Dialect
from turngate.client.keys import read_key
from turngate.common.validation import suggestion
from turngate.config import OBSERVED_ENGINES, EngineKind, ServeConfig, check_engine_url
from turngate.errors import BadRequest, ConfigError
from turngate.render import BUILTIN_TOKENIZER
from turngate.service.request import Mode, parse_mode
from turngate.types import Json

Scheme = Literal[
    "vllm", "sglang", "local", "scripted", "gateway", "openai", "hf-router", "responses", "anthropic", "gemini"
]
_KEY = re.compile(r"([a-z-]+)://([A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199})")
# Strict, so that all programs parse an accepted URL in the same way.
_URL = re.compile(r"(https?)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::([0-9]{1,5}))?((?:/[A-Za-z0-9._~-]*)*)")
_OPTION = re.compile(
    r"--([a-z]+(?:-[a-z]+)*)"
)  # in an error of `ServeConfig`; the fields of an endpoint have the same names
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PORTS = {"http": 80, "https": 443}
CUSTOM_PREFIX = "own-"  # prefix of the gateway names for callers' own endpoints; no kind of endpoint has this name


class EndpointKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of endpoint: the engines and dialects with which it can be used."""

    exact: EngineKind | None = None  # engine for exact mode, which accepts token ids
    observe: EngineKind | None = None  # engine for observe mode, which relays calls
    speaks: tuple[Dialect, ...] = ()  # dialects supported in direct mode
    url: str = ""  # the provider's URL


KINDS: Mapping[str, EndpointKind] = {
    "vllm": EndpointKind(exact="vllm", observe="openai", speaks=("chat", "responses", "messages")),
    "sglang": EndpointKind(exact="sglang", observe="openai", speaks=("chat",)),
    "local": EndpointKind(exact="local"),
    "scripted": EndpointKind(exact="scripted"),
    "gateway": EndpointKind(),  # a gateway that is already running, with its own engine
    "openai": EndpointKind(observe="openai", speaks=("chat", "responses"), url="https://api.openai.com/v1"),
    "hf-router": EndpointKind(observe="openai", speaks=("chat",), url="https://router.huggingface.co/v1"),
    "responses": EndpointKind(observe="responses", speaks=("responses",), url="https://api.openai.com/v1"),
    "anthropic": EndpointKind(observe="anthropic", speaks=("messages",), url="https://api.anthropic.com"),
    "gemini": EndpointKind(observe="gemini", speaks=("gemini",), url="https://generativelanguage.googleapis.com"),
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One endpoint in the catalog."""

    key: str = ""  # "vllm://Qwen3-8B"; in a file it is the table's name
    url: str | list[str] = ""  # a list of URLs means replicas; defaults to the provider's URL
    model: str = ""  # the endpoint's name for the model; defaults to the name in the key
    tokenizer: str = ""  # exact and gate: folder with tokenizer.json and a chat template
    key_env: str = ""  # name of the environment variable with the endpoint's key
    modes: list[Mode] = []  # the modes that callers may use; defaults to all supported modes
    mode: Mode | None = None  # the default mode; defaults to the first of `modes`
    thinking: bool = False  # whether the chat template supports `enable_thinking`, so that callers may set `thinking`
    capture: Literal["auto", "tokens", "logprobs", "text"] = "auto"  # observe: what to request from the endpoint
    max_context: int | None = None  # the model's context length; defaults to the length that the engine reports
    model_folder: str = ""  # local: folder with config.json and model.safetensors
    script: str = ""  # scripted: JSON file with a list of replies
    engine_api: Literal["completions", "generate"] = "completions"  # vLLM: the API that receives token ids
    family: str = "auto"  # renderer family: auto, template, or a family from the `renderers` package
    context_tokens: int | None = None  # the context length that agents are configured for; defaults to max_context
    session: dict[str, Json] = {}  # additional session settings: limits, sampling, policy …
    about: str = ""  # a one-line description for callers

    @property
    def scheme(self) -> str:
        return self.key.partition("://")[0]

    @property
    def kind(self) -> EndpointKind:
        return KINDS[self.scheme]

    @property
    def urls(self) -> list[str]:
        urls = [self.url] if isinstance(self.url, str) else list(self.url)
        return [url for url in urls if url] or ([self.kind.url] if self.kind.url else [])

    @property
    def served(self) -> str:
        """The endpoint's name for the model. It may be empty for a running gateway, which reports the name itself."""
        if self.model or self.scheme == "gateway":
            return self.model
        return self.key.partition("://")[2]

    @property
    def supported_modes(self) -> tuple[Mode, ...]:
        """The modes that the endpoint's kind and settings support. The first is the default unless `mode` or `modes` is set."""
        kind, modes = self.kind, list[Mode]()
        if self.scheme == "gateway":
            return tuple(self.modes) or ("exact",)
        renders = bool(self.tokenizer or self.model_folder) or self.scheme == "scripted"
        if kind.exact and renders:
            modes.append("exact")
        if kind.observe and len(self.urls) == 1:  # only engines that accept token ids can have replicas
            modes.append("observe")
        if kind.exact and renders:
            modes.append("gate")
        if kind.speaks and len(self.urls) == 1 and not self.key_env:
            modes.append("direct")
        return tuple(modes)

    @property
    def allowed(self) -> tuple[Mode, ...]:
        """The modes that callers may use: those in `modes`, or all supported modes if `modes` is empty."""
        return tuple(self.modes) or self.supported_modes

    @property
    def default(self) -> Mode:
        return self.mode or self.allowed[0]

    def check(self) -> Endpoint:
        """Validate constraints across fields. If one is violated, raise `ConfigError` with the names of the endpoint and the field."""
        match = _KEY.fullmatch(self.key)
        if match is None or match[1] not in KINDS:
            raise ConfigError(
                f'endpoints: {self.key[:80]!r} must have the form KIND://NAME, such as "vllm://Qwen3-8B" '
                f"(kinds: {', '.join(KINDS)})",
                param="endpoints",
            )
        where = f'endpoints."{self.key}"'
        for url in self.urls:
            if "@" in url:  # anywhere in the URL, because a password may contain a slash; in a path, @ is written %40
                raise ConfigError(f"{where}.url must not contain credentials; use key_env instead", param="url")
        if self.scheme == "gateway":
            if len(self.urls) != 1:
                raise ConfigError(f"{where}.url must be exactly one URL: the gateway's", param="url")
            if "direct" in self.modes:
                raise ConfigError(
                    f"{where}.modes cannot contain 'direct', because a gateway records every call; remove 'direct'",
                    param="modes",
                )
        elif not self.supported_modes:
            if self.scheme == "local":
                raise ConfigError(
                    f"{where} supports no mode, because model_folder is not set; set it to the model's folder",
                    param="model_folder",
                )
            if self.kind.exact:
                raise ConfigError(
                    f"{where} supports no mode: exact and gate mode need a tokenizer, and the other modes need exactly one URL, not "
                    f"{len(self.urls)}; set url to one URL or, for several replicas, set tokenizer",
                    param="tokenizer",
                )
            raise ConfigError(
                f"{where}.url must be one URL, not {len(self.urls)}, because {self.scheme} endpoints cannot have replicas",
                param="url",
            )
        for mode in self.modes:
            if mode not in self.supported_modes:
                raise ConfigError(
                    f"{where}.modes cannot contain {mode!r}: {self.why_not(mode)} (supported: {', '.join(self.supported_modes)})",
                    param="modes",
                )
        if self.mode is not None and self.mode not in self.allowed:
            raise ConfigError(f"{where}.mode must be one of {', '.join(self.allowed)}, not {self.mode}", param="mode")
        self._check_server(where)
        for mode in self.allowed:
            try:
                self.gateway_config(mode, data="")
            except ConfigError as error:
                message = _OPTION.sub(lambda option: option[1].replace("-", "_"), error.message)
                raise ConfigError(f"{where}: {message}", param=error.param) from None
        return self

    def _check_server(self, where: str) -> None:
        """Validate what a gateway needs to reach an engine. The gateway's own errors would name settings that an endpoint does not have."""
        for url in self.urls if self.scheme != "gateway" else ():
            check_engine_url(url, f"{where}.url")
        if "exact" in self.allowed and self.scheme in ("vllm", "sglang"):
            for field, value, use in (
                ("url", self.urls, "the URL of the engine's server"),
                ("tokenizer", self.tokenizer, "a folder, or a model in the Hugging Face cache"),
            ):
                if not value:
                    raise ConfigError(
                        f"{where}.{field} is not set, but exact mode needs it; set it to {use}", param=field
                    )

    def gateway_config(self, mode: Mode, data: str) -> ServeConfig | None:
        """Build the settings of the endpoint's gateway. Return None if the service starts no gateway (`gateway://` or direct mode)."""
        if self.scheme == "gateway" or mode == "direct":
            return None
        engine = {"exact": self.kind.exact, "observe": self.kind.observe}.get(mode, "gate")
        assert engine is not None
        tokenizer = self.tokenizer
        if engine == "gate" and not tokenizer:
            tokenizer = self.model_folder or str(BUILTIN_TOKENIZER)
        captures = OBSERVED_ENGINES.get(engine, ())
        return ServeConfig(
            host="127.0.0.1",
            port=0,
            data=data,
            engine=engine,
            engine_url=self.urls if engine not in ("gate", "local", "scripted") else [],
            engine_api=self.engine_api,
            engine_key_env="" if engine in ("gate", "local", "scripted") else self.key_env,
            model_folder=self.model_folder if engine == "local" else "",
            script=self.script if engine == "scripted" else "",
            capture=self.capture if self.capture in captures else "auto",
            model=self.served,
            tokenizer="" if engine in OBSERVED_ENGINES else tokenizer,
            family=self.family,
            max_context=self.max_context,
        ).check()

    def why_not(self, mode: Mode) -> str:
        """Return why the endpoint does not support a mode."""
        has_mode = {"observe": self.kind.observe, "direct": self.kind.speaks}.get(mode)
        if has_mode and len(self.urls) != 1:
            return f"{mode} mode needs exactly one URL, and this endpoint has {len(self.urls)}"
        if mode == "direct" and self.key_env and self.kind.speaks:
            return "direct mode never sends the endpoint's key"
        if mode in ("exact", "gate") and self.kind.exact:
            return f"{mode} mode needs a tokenizer"
        if mode in ("exact", "gate") and self.scheme != "gateway":
            return f"{self.scheme} endpoints do not accept token ids"
        return f"this {self.scheme} endpoint does not support {mode} mode"


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an endpoint that callers see. It never contains the endpoint's secret key or URL."""

    key: str
    model: str
    modes: list[Mode]
    default_mode: Mode
    capture: str  # what the default mode records: tokens, logprobs, text, none, auto (as much as the endpoint returns)
    thinking: bool  # whether callers may set `thinking` (in exact and gate mode)
    key_is_set: bool  # whether the server has the endpoint's secret key, or none is needed
    max_context: int | None = None
    about: str = ""


class EndpointChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoint and the mode that were chosen for one rollout."""

    endpoint: Endpoint
    mode: Mode
    is_custom: bool = False  # whether it is the caller's own endpoint

    @property
    def gateway_name(self) -> str:
        """The name of the gateway for this endpoint and mode, and of the gateway's folder.

        The name ends with a digest, which is long enough that a caller cannot construct a URL that yields another gateway's name.
        """
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.endpoint.key).strip("-")[:60]
        identity = [self.endpoint.key, self.mode, self.is_custom, self.endpoint.urls if self.is_custom else []]
        digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32]
        return f"{CUSTOM_PREFIX if self.is_custom else ''}{name}-{self.mode}-{digest}"


class Catalog:
    """The endpoints in the settings, and the rules for endpoints that callers supply.

    `allowed_hosts` lists the hosts that a caller's endpoint may use, as HOST or HOST:PORT. Hosts must match exactly. Without a
    port, only the default port of the URL's scheme is allowed.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], allowed_hosts: Sequence[str] = ()) -> None:
        self._entries = {key: msgspec.structs.replace(entry, key=key).check() for key, entry in endpoints.items()}
        self._hosts = [host.lower() for host in allowed_hosts]
        for host in self._hosts:
            if _URL.fullmatch(f"https://{host}") is None or "/" in host:
                raise ConfigError(
                    f"allowed_hosts: {host[:80]!r} must be HOST or HOST:PORT, without a scheme, path or wildcard",
                    param="allowed_hosts",
                )

    def show(self) -> list[EndpointView]:
        return [_build_view(entry) for entry in self._entries.values()]

    def choose(
        self, model_key: str, mode: str = "", thinking: bool | None = None, endpoint_url: str = ""
    ) -> EndpointChoice:
        """Return the endpoint and the mode for a request. Raise `BadRequest` if an argument is invalid or the endpoint's key is not set."""
        endpoint = self._build_custom(model_key, endpoint_url) if endpoint_url else self._entries.get(model_key)
        if endpoint is None:
            near = suggestion(model_key, list(self._entries)) or "; this server's catalog has no endpoints"
            raise BadRequest(f"unknown model_key {model_key[:80]!r}{near}", param="model_key")
        chosen = parse_mode(mode) or endpoint.default
        if chosen not in endpoint.allowed:
            why = endpoint.why_not(chosen) if chosen not in endpoint.supported_modes else "the server does not allow it"
            raise BadRequest(
                f"mode {chosen!r} is not available for endpoint {endpoint.key!r}: {why}; choose one of: {', '.join(endpoint.allowed)}",
                param="mode",
            )
        if thinking is not None and chosen not in ("exact", "gate"):
            raise BadRequest(
                f"'thinking' applies only to exact and gate mode, where the gateway renders the prompt; omit it in {chosen} mode",
                param="thinking",
            )
        if thinking is not None and not endpoint.thinking:
            raise BadRequest(
                f"'thinking' is not enabled for {endpoint.key} in the server's settings; omit the argument or, if the endpoint's chat "
                "template has enable_thinking, set thinking = true in the endpoint's entry in the settings",
                param="thinking",
            )
        if chosen != "direct" and not endpoint_url and not key_is_set(endpoint):
            raise BadRequest(
                f"model_key: the server has no valid key for the endpoint {endpoint.key}; set {endpoint.key_env} or "
                f"{endpoint.key_env}_FILE in the server's environment",
                param="model_key",
            )
        return EndpointChoice(endpoint=endpoint, mode=chosen, is_custom=bool(endpoint_url))

    def _build_custom(self, model_key: str, url: str) -> Endpoint:
        """Build a caller's own endpoint. If the catalog has an entry `model_key`, copy its settings except the URL and the secret key."""
        self._check_host(url)
        known = self._entries.get(model_key)
        if known is None:
            match = _KEY.fullmatch(model_key)
            if match is None or not KINDS.get(match[1], EndpointKind()).speaks:
                kinds = [name for name, kind in KINDS.items() if kind.speaks]
                raise BadRequest(
                    f"if endpoint_url is set, model_key must be a catalog key or have the form KIND://MODEL, not {model_key[:80]!r} "
                    f"(kinds: {', '.join(kinds)})",
                    param="model_key",
                )
            return Endpoint(key=model_key, url=url)
        if not known.kind.speaks:
            raise BadRequest(
                f"endpoint_url is not supported for {known.scheme} endpoints; omit it", param="endpoint_url"
            )
        return msgspec.structs.replace(known, url=url, key_env="")

    def _check_host(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None or "/.." in url:
            raise BadRequest(
                "endpoint_url must be a plain http(s) URL, without user, password, query, fragment or '/..'",
                param="endpoint_url",
            )
        scheme, host, port = match[1], match[2].lower(), int(match[3] or _PORTS[match[1]])
        exact = [f"{host}:{port}"] + ([host] if port == _PORTS[scheme] else [])
        if not any(name in self._hosts for name in exact):
            raise BadRequest(
                f"endpoint_url has the host {host}:{port}, which is not in this server's allowed_hosts; omit endpoint_url, and "
                "choose an endpoint from the catalog",
                param="endpoint_url",
            )
        if scheme != "https" and host not in _LOOPBACK:
            raise BadRequest(
                f"endpoint_url must use https, because {host} is not a loopback address", param="endpoint_url"
            )


def key_is_set(endpoint: Endpoint) -> bool:
    """Return whether the endpoint's secret key is set in the environment. Return True if the endpoint needs no key."""
    try:
        return not endpoint.key_env or bool(read_key(endpoint.key_env))
    except ConfigError:
        return False


def _build_view(entry: Endpoint) -> EndpointView:
    capture = "tokens"
    if entry.default == "observe":
        engine = entry.kind.observe or ""
        levels = OBSERVED_ENGINES.get(engine, ("auto",))
        capture = entry.capture if entry.capture in levels else "auto"
        capture = "text" if levels[1:] == ("text",) else capture
    elif entry.default == "direct":
        capture = "none"
    return EndpointView(
        key=entry.key,
        model=entry.served,
        modes=list(entry.allowed),
        default_mode=entry.default,
        capture=capture,
        thinking=entry.thinking,
        key_is_set=key_is_set(entry),
        max_context=entry.max_context,
        about=entry.about,
    )
