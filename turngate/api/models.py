"""Which model a rollout is sampled from, from what people write: a key of a catalog, an endpoint in one line, or an entry of a catalog.

    vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000      KIND://MODEL@URL; the tokenizer is the model's, unless it is given
    openai://gpt-5                                  a provider's own address, and the key that its SDK would take
    local:///models/Qwen3-0.6B                      a folder: sampled in this process
    scripted://replies.json                         a file with a list of replies: nothing is sampled, for trying things out

`client.py` calls `settled`. Errors name the argument.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from turngate.agents.spec import find_agent, load_catalog
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.common.validation import explain_error, reject_credentials, suggestion
from turngate.errors import BadRequest, ConfigError
from turngate.render import find_tokenizer as find_tokenizer
from turngate.service.catalog import KINDS, Endpoint
from turngate.service.config import ServiceConfig, load_config
from turngate.telemetry.logs import redact

_WRITTEN = re.compile(r"(?P<kind>[a-z-]+)://(?P<name>.*?)(?:@(?P<url>https?://.+))?")
# Where the providers' own SDKs look for their keys.
_KEYS = {
    "openai": "OPENAI_API_KEY",
    "responses": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "gemini": "GEMINI_API_KEY",
    "hf-router": "HF_TOKEN",
}
_SHELL = "shell"
_EXAMPLE = "like vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000, openai://gpt-5 or scripted://replies.json"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What was given about the model, beside its name."""

    tokenizer: str = ""
    key_env: str = ""
    gateway: str = ""


def settled(
    model: str | Endpoint | ServiceConfig,
    wanted: Wanted,
    config: ServiceConfig | Path | str | None,
    given: Mapping[str, Any],
) -> tuple[ServiceConfig, str]:
    """The settings of a service that has the model, and its key there. `given`: settings that were given apart."""
    if not isinstance(model, str | Endpoint | ServiceConfig):
        raise BadRequest(f"model: {type(model).__name__} is none; give one {_EXAMPLE}", param="model")
    if isinstance(model, ServiceConfig):
        if config is not None:
            raise BadRequest(
                "config: the settings are given as the model already; leave one of them out", param="config"
            )
        config, model = model, ""
    base = config if isinstance(config, ServiceConfig) else load_config(Path(config) if config else None)
    changed = {name: value for name, value in given.items() if value is not None}
    known = list(base.endpoints)
    if wanted.gateway:
        entry = _gateway(wanted.gateway, model)
    elif isinstance(model, str) and model in base.endpoints:
        return _with(base, changed, None), model
    elif isinstance(model, str) and not model and len(known) == 1:
        return _with(base, changed, None), known[0]
    elif isinstance(model, Endpoint):
        entry = model
    else:
        entry = _written(model, wanted, known)
    return _with(base, changed, entry), entry.key


def _with(base: ServiceConfig, changed: Mapping[str, Any], entry: Endpoint | None) -> ServiceConfig:
    endpoints = {key: msgspec.structs.replace(known, key=key) for key, known in base.endpoints.items()}
    if entry is not None:
        endpoints[entry.key] = entry
    try:
        whole = msgspec.structs.replace(base, **changed, endpoints=endpoints)
        return msgspec.convert(msgspec.to_builtins(whole), ServiceConfig).check()
    except msgspec.ValidationError as error:
        message, field = explain_error(error, ServiceConfig, "setting")
        raise ConfigError(message, param=field) from None
    except ConfigError as error:
        # Whoever reads it has written no catalog.
        raise ConfigError(error.message.replace("endpoints.", "model "), param=error.param) from None


def _gateway(url: str, model: str | Endpoint) -> Endpoint:
    if isinstance(model, Endpoint):
        raise BadRequest("model: the gateway has its own; give the name of one, or leave it out", param="model")
    reject_credentials(url, "gateway", "its key comes from TURNGATE_ADMIN_KEY")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequest(f"gateway: {url!r} is not an http(s) URL such as http://127.0.0.1:8700", param="gateway")
    return Endpoint(key=f"gateway://{parts.netloc}", url=url, model=model)


def _written(model: str, wanted: Wanted, known: list[str]) -> Endpoint:
    found = _WRITTEN.fullmatch(model)
    if found is None or found["kind"] not in KINDS or not found["name"]:
        there = f"; the catalog has {', '.join(known)}{suggestion(model, known)}" if known else ""
        what = f"{redact(model)!r} is neither a key of the catalog nor KIND://MODEL" if model else "is missing"
        raise BadRequest(f"model: {what}: give one {_EXAMPLE} (kinds: {', '.join(KINDS)}){there}", param="model")
    kind, name, url = found["kind"], found["name"], found["url"] or ""
    if kind == "scripted":
        return _scripted(name)
    if kind == "local":
        return Endpoint(key=_key(kind, name), model=Path(name).name, model_folder=name, tokenizer=wanted.tokenizer)
    if not url and not KINDS[kind].url:
        raise BadRequest(
            f"model: {model!r} does not say where it listens; give {kind}://{name}@http://HOST:PORT", param="model"
        )
    key_env = wanted.key_env or ("" if url else _KEYS.get(kind, ""))
    exact = KINDS[kind].exact is not None
    tokenizer = wanted.tokenizer or (name if exact else "")
    return Endpoint(key=_key(kind, name), url=url, model=name, tokenizer=tokenizer, key_env=key_env, thinking=exact)


def _scripted(name: str) -> Endpoint:
    """By the file with its replies; any other name is an engine that says random words."""
    file = Path(name).expanduser()
    if file.suffix == ".json" and not file.is_file():
        raise BadRequest(f"model: there is no file {name} with replies", param="model")
    return Endpoint(key=_key("scripted", name), model="scripted", script=str(file) if file.is_file() else "")


def _key(kind: str, name: str) -> str:
    """The name of an entry, of the signs that one may have."""
    return f"{kind}://{re.sub(r'[^A-Za-z0-9._:/@+-]+', '-', name).lstrip('./-') or kind}"


async def check(endpoint: Endpoint) -> None:
    """That what can be known beforehand is so: the tokenizer is here, and the gateway that is named answers and takes our key."""
    if endpoint.scheme == "gateway":
        async with GatewayClient(endpoint.urls[0], read_admin_key()) as gateway:
            await gateway.check()
    elif endpoint.tokenizer or endpoint.model_folder:
        await asyncio.to_thread(find_tokenizer, endpoint.tokenizer or endpoint.model_folder)


def agent_named(agent: str) -> str:
    """The name of an agent that may be given as a file."""
    return find_agent(agent).spec.name if agent else ""


def agents_with(agent: str) -> list[str] | None:
    """Every preset, and one more: a file, or `shell`, which no service has unless it says so. None: the presets will do."""
    if not agent or (agent == agent_named(agent) and agent != _SHELL):
        return None
    return [*(name for name in load_catalog() if name != _SHELL), agent]
