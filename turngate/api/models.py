"""Resolve the `model` argument: a catalog key, an endpoint as a string, an `Endpoint`, or a `ServiceConfig`.

    vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000      KIND://MODEL@URL; uses the model's own tokenizer, unless `tokenizer` is set
    openai://gpt-5                                  uses the provider's URL, and the key in the environment variable that its SDK reads
    local:///models/Qwen3-0.6B                      a model folder; samples in this process
    scripted://replies.json                         a JSON list of replies, for tests; no model is called

An error names the argument that is wrong.
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
from turngate.telemetry.logs import REDACTED, redact

_MODEL = re.compile(r"(?P<kind>[a-z-]+)://(?P<name>.*?)(?:@(?P<url>https?://.+))?")
# The environment variables that the providers' own SDKs read.
_KEYS = {
    "openai": "OPENAI_API_KEY",
    "responses": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "gemini": "GEMINI_API_KEY",
    "hf-router": "HF_TOKEN",
}
_SHELL = "shell"
_EXAMPLE = "such as vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000, openai://gpt-5 or scripted://replies.json"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments besides `model` that describe the model: its tokenizer, its key and its gateway."""

    tokenizer: str = ""
    key_env: str = ""
    gateway: str = ""


def resolve_model(
    model: str | Endpoint | ServiceConfig,
    options: ModelOptions,
    config: ServiceConfig | Path | str | None,
    overrides: Mapping[str, Any],
) -> tuple[ServiceConfig, str]:
    """Return service settings whose catalog contains the model, and the model's key in that catalog.

    Values in `overrides` that are not None replace settings.
    """
    if not isinstance(model, str | Endpoint | ServiceConfig):
        raise BadRequest(
            f"model must be an Endpoint, a ServiceConfig or a string {_EXAMPLE}, not {type(model).__name__}",
            param="model",
        )
    if isinstance(model, ServiceConfig):
        if config is not None:
            raise BadRequest(
                "config must not be set if model is a ServiceConfig; pass only one of them", param="config"
            )
        config, model = model, ""
    base = config if isinstance(config, ServiceConfig) else load_config(Path(config) if config else None)
    changed = {name: value for name, value in overrides.items() if value is not None}
    known = list(base.endpoints)
    if options.gateway:
        entry = _build_gateway_endpoint(options.gateway, model)
    elif isinstance(model, str) and model in base.endpoints:
        return _build_config(base, changed, None), model
    elif isinstance(model, str) and not model and len(known) == 1:
        return _build_config(base, changed, None), known[0]
    elif isinstance(model, Endpoint):
        entry = model
    else:
        entry = _parse_model(model, options, known)
    return _build_config(base, changed, entry), entry.key


def _build_config(base: ServiceConfig, changed: Mapping[str, Any], entry: Endpoint | None) -> ServiceConfig:
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
        # The caller passed a model, not a catalog, so the error should not mention `endpoints`.
        raise ConfigError(error.message.replace("endpoints.", "model "), param=error.param) from None


def _build_gateway_endpoint(url: str, model: str | Endpoint) -> Endpoint:
    if isinstance(model, Endpoint):
        raise BadRequest(
            "model must not be an Endpoint if gateway is set; pass the name of one of the gateway's models, or omit model",
            param="model",
        )
    reject_credentials(url, "gateway", "set the key in TURNGATE_ADMIN_KEY")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequest(f"gateway must be an http(s) URL such as http://127.0.0.1:8700, not {url!r}", param="gateway")
    return Endpoint(key=f"gateway://{parts.netloc}", url=url, model=model)


def _parse_model(model: str, options: ModelOptions, known: list[str]) -> Endpoint:
    match = _MODEL.fullmatch(model)
    if match is None or match["kind"] not in KINDS or not match["name"]:
        catalog = f", or a catalog key{suggestion(model, known)}" if known else ""
        problem = (
            f"model {_hide_credentials(model)!r} is neither a catalog key nor KIND://MODEL"
            if model
            else "model is missing"
        )
        raise BadRequest(f"{problem}; pass a model {_EXAMPLE} (kinds: {', '.join(KINDS)}){catalog}", param="model")
    kind, name, url = match["kind"], match["name"], match["url"] or ""
    if kind == "scripted":
        return _build_scripted(name)
    if kind == "local":
        return Endpoint(
            key=_build_key(kind, name), model=Path(name).name, model_folder=name, tokenizer=options.tokenizer
        )
    if not url and not KINDS[kind].url:
        raise BadRequest(
            f"model {_hide_credentials(model)!r} has no URL; write {kind}://MODEL@http://HOST:PORT", param="model"
        )
    key_env = options.key_env or ("" if url else _KEYS.get(kind, ""))
    is_exact = KINDS[kind].exact is not None
    tokenizer = options.tokenizer or (name if is_exact else "")
    return Endpoint(
        key=_build_key(kind, name), url=url, model=name, tokenizer=tokenizer, key_env=key_env, thinking=is_exact
    )


def _hide_credentials(model: str) -> str:
    """Return a model string for an error message. Text between KIND:// and the last @ is replaced, because it may contain a password."""
    return re.sub(r"^([\w-]+://)?.*@", rf"\1{REDACTED}@", redact(model), flags=re.DOTALL)


def _build_scripted(name: str) -> Endpoint:
    """Return an endpoint that replays the replies in the file `name`. If there is no such file, the endpoint repeats a default reply.

    If the name of the missing file ends in .json, raise `BadRequest` instead.
    """
    file = Path(name).expanduser()
    if file.suffix == ".json" and not file.is_file():
        raise BadRequest(
            f"model: file {name} not found; pass the path of a file that contains a JSON list of replies", param="model"
        )
    return Endpoint(key=_build_key("scripted", name), model="scripted", script=str(file) if file.is_file() else "")


def _build_key(kind: str, name: str) -> str:
    """Return the catalog key for a model. Characters of `name` that are not allowed in a key are replaced or left out."""
    return f"{kind}://{re.sub(r'[^A-Za-z0-9._:/@+-]+', '-', name).lstrip('./-') or kind}"


async def check_endpoint(endpoint: Endpoint) -> None:
    """Check that the endpoint's tokenizer exists or, if the endpoint is a gateway, that the gateway accepts the admin key."""
    if endpoint.scheme == "gateway":
        async with GatewayClient(endpoint.urls[0], read_admin_key()) as gateway:
            await gateway.check()
    elif endpoint.tokenizer or endpoint.model_folder:
        await asyncio.to_thread(find_tokenizer, endpoint.tokenizer or endpoint.model_folder)


def find_agent_name(agent: str) -> str:
    """Return the name of an agent, given its name or the path of its TOML file. Return an empty string if `agent` is empty."""
    return find_agent(agent).spec.name if agent else ""


def list_agents_with(agent: str) -> list[str] | None:
    """Return a value for the service's setting `agents` that allows `agent` in addition to the agents that are allowed by default.

    Return None if `agent` is empty or allowed by default. Every agent that `turngate agents` lists is allowed by default, except `shell`.
    An agent that is passed as a TOML file is not.
    """
    if not agent or (agent == find_agent_name(agent) and agent != _SHELL):
        return None
    return [*(name for name in load_catalog() if name != _SHELL), agent]
