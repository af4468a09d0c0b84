"""The endpoints that callers choose from, and what each can do. Whoever runs the service lists them in its settings; a caller names one.

    [endpoints."vllm://Qwen3-8B"]
    url = "http://127.0.0.1:8000"
    model = "Qwen/Qwen3-8B"
    tokenizer = "/models/Qwen3-8B"
    key_env = "VLLM_KEY"                # the NAME of the environment variable that holds its key

The part before `://` says what kind of endpoint it is; the rest is a name. A caller's own endpoint (`endpoint_url`) is taken only where
`allowed_hosts` lists its host, and no key of the server's is ever sent there.
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
from turngate.config import OBSERVED_ENGINES, EngineKind, ServeConfig
from turngate.errors import BadRequest, ConfigError
from turngate.render import BUILTIN_TOKENIZER
from turngate.service.request import Mode, mode_of
from turngate.types import Json

Scheme = Literal[
    "vllm", "sglang", "local", "scripted", "gateway", "openai", "hf-router", "responses", "anthropic", "gemini"
]
_KEY = re.compile(r"([a-z-]+)://([A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199})")
# Strict, so that no two programs can read one URL differently.
_URL = re.compile(r"(https?)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::([0-9]{1,5}))?((?:/[A-Za-z0-9._~-]*)*)")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PORTS = {"http": 80, "https": 443}
OWN = "own-"  # no kind of endpoint is called so


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done with endpoints of one kind."""

    exact: EngineKind | None = None  # the engine that takes token ids
    observe: EngineKind | None = None  # the engine that relays
    speaks: tuple[Dialect, ...] = ()  # to an agent that calls it itself
    url: str = ""  # where it is, if nothing else is said


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(exact="vllm", observe="openai", speaks=("chat", "responses", "messages")),
    "sglang": Kind(exact="sglang", observe="openai", speaks=("chat",)),
    "local": Kind(exact="local"),
    "scripted": Kind(exact="scripted"),
    "gateway": Kind(),  # a gateway that runs already, with an engine of its own
    "openai": Kind(observe="openai", speaks=("chat", "responses"), url="https://api.openai.com/v1"),
    "hf-router": Kind(observe="openai", speaks=("chat",), url="https://router.huggingface.co/v1"),
    "responses": Kind(observe="responses", speaks=("responses",), url="https://api.openai.com/v1"),
    "anthropic": Kind(observe="anthropic", speaks=("messages",), url="https://api.anthropic.com"),
    "gemini": Kind(observe="gemini", speaks=("gemini",), url="https://generativelanguage.googleapis.com"),
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the catalog."""

    key: str = ""  # "vllm://Qwen3-8B"; in a file it is the table's name
    url: str | list[str] = ""  # where it listens; several are replicas. Left out: the provider's own
    model: str = ""  # the name that it knows the model by; left out, the key's name
    tokenizer: str = ""  # exact and gate: folder with tokenizer.json and a chat template
    key_env: str = ""  # name of the environment variable that holds its key
    modes: list[Mode] = []  # that callers may use; left out, all that it can
    mode: Mode | None = None  # the default; left out, the first of them
    thinking: bool = False  # its chat template knows `enable_thinking`, so that callers may choose
    capture: Literal["auto", "tokens", "logprobs", "text"] = "auto"  # observe: what to ask the endpoint for
    max_context: int | None = None  # the model's context length; left out, the engine is asked
    model_folder: str = ""  # local: folder with config.json and model.safetensors
    script: str = ""  # scripted: a JSON file with a list of replies
    engine_api: Literal["completions", "generate"] = "completions"  # vLLM: the endpoint that takes the ids
    family: str = "auto"  # of the renderer: auto, template, or one of the `renderers` package
    context_tokens: int | None = None  # what the agent is told; left out, max_context
    session: dict[str, Json] = {}  # further settings of its sessions: limits, sampling, policy …
    about: str = ""  # a line for those who choose

    @property
    def scheme(self) -> str:
        return self.key.partition("://")[0]

    @property
    def kind(self) -> Kind:
        return KINDS[self.scheme]

    @property
    def urls(self) -> list[str]:
        given = [self.url] if isinstance(self.url, str) else list(self.url)
        return [url for url in given if url] or ([self.kind.url] if self.kind.url else [])

    @property
    def served(self) -> str:
        """The model's name. Empty for a gateway that runs already: it knows."""
        if self.model or self.scheme == "gateway":
            return self.model
        return self.key.partition("://")[2]

    def can(self) -> tuple[Mode, ...]:
        """The modes that it has what it takes for; the first is the default."""
        kind, found = self.kind, list[Mode]()
        if self.scheme == "gateway":
            return tuple(self.modes) or ("exact",)
        renders = bool(self.tokenizer or self.model_folder) or self.scheme == "scripted"
        if kind.exact and renders:
            found.append("exact")
        if kind.observe and len(self.urls) == 1:  # replicas are for engines that take ids
            found.append("observe")
        if kind.exact and renders:
            found.append("gate")
        if kind.speaks and len(self.urls) == 1 and not self.key_env:
            found.append("direct")
        return tuple(found)

    @property
    def allowed(self) -> tuple[Mode, ...]:
        """The modes that callers may use."""
        return tuple(self.modes) or self.can()

    @property
    def default(self) -> Mode:
        return self.mode or self.allowed[0]

    def check(self) -> Endpoint:
        """What types cannot say. `ConfigError` names the entry and the field."""
        found = _KEY.fullmatch(self.key)
        if found is None or found[1] not in KINDS:
            raise ConfigError(
                f'endpoints: {self.key[:80]!r} has to be KIND://NAME, like "vllm://Qwen3-8B"; kinds are {", ".join(KINDS)}',
                param="endpoints",
            )
        where = f'endpoints."{self.key}"'
        for url in self.urls:
            if "@" in url:  # anywhere: a password may hold a slash, and a path has %40
                raise ConfigError(f"{where}.url: holds credentials; use key_env", param="url")
        if self.scheme == "gateway":
            if len(self.urls) != 1:
                raise ConfigError(f"{where}.url: give the one URL of the gateway", param="url")
            if "direct" in self.modes:
                raise ConfigError(f"{where}.modes: a gateway records, so there is no direct mode", param="modes")
        elif not self.can():
            missing = "tokenizer" if self.kind.exact else "url"
            raise ConfigError(f"{where}.{missing}: is missing; nothing can be done without it", param=missing)
        for mode in self.modes:
            if mode not in self.can():
                raise ConfigError(
                    f"{where}.modes: not {mode}, it can {', '.join(self.can())}: {self.why_not(mode)}", param="modes"
                )
        if self.mode is not None and self.mode not in self.allowed:
            raise ConfigError(f"{where}.mode: {self.mode} is none of {', '.join(self.allowed)}", param="mode")
        for mode in self.allowed:
            try:
                self.serves(mode, data="")
            except ConfigError as error:
                raise ConfigError(f"{where}: {error.message}", param=error.param) from None
        return self

    def serves(self, mode: Mode, data: str) -> ServeConfig | None:
        """The settings of the gateway that stands before it. None: there is no gateway of ours (one that runs already, or direct)."""
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
        """Why it cannot do that, and what would help."""
        if mode == "direct" and self.key_env and self.kind.speaks:
            return "direct mode would put the endpoint's key into the sandbox; use observe"
        if mode in ("exact", "gate") and self.kind.exact:
            return f"{mode} mode needs a tokenizer"
        if mode in ("exact", "gate"):
            return f"{self.scheme} endpoints take no token ids"
        return f"{self.scheme} endpoints have no such mode"


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """What callers see of an entry. Never a key, and no URL."""

    key: str
    model: str
    modes: list[Mode]
    default_mode: Mode
    capture: str  # what of the tokens is recorded in the default mode: tokens, logprobs, text, auto (as much as it gives), none
    thinking: bool  # whether callers may switch thinking on or off (in exact and gate mode)
    key_is_set: bool  # its key is there, or it needs none
    max_context: int | None = None
    about: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint and a mode, as one rollout uses them."""

    endpoint: Endpoint
    mode: Mode
    own: bool = False  # the endpoint is the caller's

    @property
    def place(self) -> str:
        """A folder's name for its gateway: the same for the same endpoint and mode; a caller's own is told by its first word. There is
        so much of the digest that nobody finds a URL whose place is another's."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.endpoint.key).strip("-")[:60]
        told = [self.endpoint.key, self.mode, self.own, self.endpoint.urls if self.own else []]
        return (
            f"{OWN if self.own else ''}{name}-{self.mode}-{hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:32]}"
        )


class Catalog:
    """`allowed_hosts`: host or host:port, exactly, that a caller's own endpoint may be at."""

    def __init__(self, endpoints: Mapping[str, Endpoint], allowed_hosts: Sequence[str] = ()) -> None:
        self._entries = {key: msgspec.structs.replace(entry, key=key).check() for key, entry in endpoints.items()}
        self._hosts = [host.lower() for host in allowed_hosts]
        for host in self._hosts:
            if _URL.fullmatch(f"https://{host}") is None or "/" in host:
                raise ConfigError(
                    f"allowed_hosts: {host[:80]!r} has to be HOST or HOST:PORT, exactly: no scheme, no path, no *",
                    param="allowed_hosts",
                )

    def show(self) -> list[EndpointView]:
        return [_view(entry) for entry in self._entries.values()]

    def choose(self, model_key: str, mode: str = "", thinking: bool | None = None, endpoint_url: str = "") -> Choice:
        """What a caller asked for. `BadRequest` names the argument, and says what there is."""
        endpoint = self._own(model_key, endpoint_url) if endpoint_url else self._entries.get(model_key)
        if endpoint is None:
            near = suggestion(model_key, list(self._entries)) or "; the catalog is empty"
            raise BadRequest(f"model_key: there is no {model_key[:80]!r}{near}", param="model_key")
        wanted = mode_of(mode) or endpoint.default
        if wanted not in endpoint.allowed:
            why = endpoint.why_not(wanted) if wanted not in endpoint.can() else "the server does not allow it"
            raise BadRequest(
                f"mode: {endpoint.key} supports {', '.join(endpoint.allowed)}, not {wanted}: {why}", param="mode"
            )
        if thinking is not None and wanted not in ("exact", "gate"):
            raise BadRequest(
                f"thinking: can be chosen in exact and gate mode, where the gateway renders the prompt; in {wanted} mode the "
                "endpoint decides: leave it out",
                param="thinking",
            )
        if thinking is not None and not endpoint.thinking:
            raise BadRequest(
                f"thinking: {endpoint.key} has no such choice (its chat template does not know enable_thinking, or the server "
                "does not say that it does): leave it out",
                param="thinking",
            )
        if wanted != "direct" and not endpoint_url and not key_is_set(endpoint):
            raise BadRequest(
                f"model_key: the server has no key for {endpoint.key} (its {endpoint.key_env} is not set, or holds none)",
                param="model_key",
            )
        return Choice(endpoint=endpoint, mode=wanted, own=bool(endpoint_url))

    def _own(self, model_key: str, url: str) -> Endpoint:
        """A caller's endpoint: no key, and nothing of an entry but what describes the model and which modes are allowed."""
        self._listed(url)
        known = self._entries.get(model_key)
        if known is None:
            found = _KEY.fullmatch(model_key)
            if found is None or not KINDS.get(found[1], Kind()).speaks:
                kinds = [name for name, kind in KINDS.items() if kind.speaks]
                raise BadRequest(
                    f"model_key: with endpoint_url it has to be KIND://MODEL, with one of {', '.join(kinds)}",
                    param="model_key",
                )
            return Endpoint(key=model_key, url=url)
        if not known.kind.speaks:
            raise BadRequest(f"endpoint_url: does not go with {known.scheme} endpoints", param="endpoint_url")
        return msgspec.structs.replace(known, url=url, key_env="")

    def _listed(self, url: str) -> None:
        found = _URL.fullmatch(url)
        if found is None or "/.." in url:
            raise BadRequest(
                "endpoint_url: has to be a plain http(s) URL, without user, password, query or fragment",
                param="endpoint_url",
            )
        scheme, host, port = found[1], found[2].lower(), int(found[3] or _PORTS[found[1]])
        exact = [f"{host}:{port}"] + ([host] if port == _PORTS[scheme] else [])
        if not any(name in self._hosts for name in exact):
            raise BadRequest(
                f"endpoint_url: {host}:{port} is not among the hosts that this server's policy lists (allowed_hosts); "
                "choose an endpoint of its catalog",
                param="endpoint_url",
            )
        if scheme != "https" and host not in _LOOPBACK:
            raise BadRequest("endpoint_url: has to be https", param="endpoint_url")


def key_is_set(endpoint: Endpoint) -> bool:
    """In the environment, or in a file that it names."""
    try:
        return not endpoint.key_env or bool(read_key(endpoint.key_env))
    except ConfigError:
        return False


def _view(entry: Endpoint) -> EndpointView:
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
