"""Choose the gateway for a command: the one that --gateway names, one that already serves the data folder, or a new one."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
from rich.console import Console

from turngate.cli.options import RolloutOptions
from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.keys import ADMIN_KEY, read_admin_key, read_key, read_stored_admin_key
from turngate.client.protocol import EnginesView
from turngate.client.retry import retry_while_unreachable
from turngate.common.terminal import say
from turngate.config import OBSERVED_ENGINES, ServeConfig, load_config
from turngate.engines.base import Engine
from turngate.engines.http import EngineClient
from turngate.errors import ConfigError, DataFolderInUse, EngineError, EngineTimeout, EngineUnavailable, Unauthorized
from turngate.render import Renderer
from turngate.server.bind import find_running_gateway
from turngate.server.engine_factory import build_renderer
from turngate.server.run import GatewayAddress, run_embedded

START_S = 15.0  # how long to wait until the gateway that --gateway names responds
# Settings that only apply to a gateway that the command starts itself.
_OWN_SETTINGS = ("engine", "engine_url", "engine_key_env", "tokenizer", "script", "max_context")


EngineBuilder = Callable[[ServeConfig, Renderer], Engine | None]  # returns None to use the configured engine


class GatewayChoice(msgspec.Struct, frozen=True):
    """The gateway that the flags select.

    An empty `url` selects the gateway that already serves the data folder or, if there is none, a new one.
    """

    url: str = ""
    own_flags: tuple[str, ...] = ()  # flags that were passed but only apply to a new gateway


class RemoteAccess(msgspec.Struct, frozen=True):
    """How remote sandboxes reach the gateway: at a public URL, or through a tunnel that a command opens."""

    public_url: str = ""
    tunnel: str = ""


def choose_gateway(options: RolloutOptions) -> GatewayChoice:
    own = ["config"] if options.config else []
    own += [name for name in _OWN_SETTINGS if options.settings.get(name)]
    return GatewayChoice(options.gateway, tuple(own))


def load_gateway_config(options: RolloutOptions) -> ServeConfig:
    """Load the settings for a new gateway.

    Raise ConfigError if a setting or the URL in --gateway is invalid, or if a flag cannot be combined with --gateway.
    """
    if options.gateway:
        _reject_own_flags(choose_gateway(options).own_flags, options.gateway)
        GatewayClient(options.gateway, read_admin_key())  # raises an error now if the URL is malformed
    settings = {name: value or None for name, value in options.settings.items()}
    # A gateway that we start listens on any free port. Only `turngate serve` uses the configured one.
    return load_config(options.config, {**settings, "host": "127.0.0.1", "port": 0})


@asynccontextmanager
async def connect_gateway(
    config: ServeConfig,
    choice: GatewayChoice,
    console: Console,
    build_engine: EngineBuilder = lambda config, renderer: None,
) -> AsyncIterator[tuple[GatewayClient, bool]]:
    """Connect to the chosen gateway, or start one. Yield a client, and whether we started the gateway.

    If a gateway is started, `build_engine` may return an engine to use instead of the configured one.
    """
    if config.is_shared and not choice.url:
        raise ConfigError(
            "data must be a folder; to use a shared store, pass the URL of a cell as --gateway instead",
            param="data",
        )
    data = Path(config.data)
    if choice.url:
        async with GatewayClient(choice.url, read_admin_key()) as client:
            # Report a wrong key before anything is created. Retry, because the gateway may still be starting.
            await retry_while_unreachable(client.check, limit_s=START_S, warn=True)
            await _require_engine(client, own=False)
            yield client, False
        return
    if (running := find_running_gateway(data)) is not None:
        key = read_key(ADMIN_KEY) or read_stored_admin_key(data) or ""
        async with GatewayClient(running.url, key) as client:
            if await _is_alive(client, config.data):
                # A config file is accepted, because this gateway may have been started with it.
                flags = [name for name in choice.own_flags if name != "config"]
                _reject_own_flags(
                    flags, f"{running.url}, which serves {config.data}", " or choose a different --data folder"
                )
                engines = await _require_engine(client, own=False)
                engine = "scripted engine" if engines.scripted else "engine"
                say(
                    console, f"Using the gateway at {running.url}, which already serves {config.data}, and its {engine}"
                )
                yield client, False
                return
    await _require_endpoint(config)
    if config.engine == "scripted" and config.model and not {"engine", "script"} & set(choice.own_flags):
        note = f"The engine is scripted, so the model {config.model} is only a name. Pass --engine to use a real model."
        say(console, note, "yellow")
    async with _start_gateway(config, build_engine) as address, GatewayClient(address.url, address.admin_key) as client:
        await _require_engine(client, own=True)
        yield client, True


async def _is_alive(client: GatewayClient, data: str) -> bool:
    """Return whether the gateway responds.

    If it was killed, the data folder may still contain its address, which another program may use by now.
    Raise ConfigError if the gateway rejects the admin key.
    """
    try:
        await client.check()
    except (GatewayUnreachable, ConfigError):
        return False
    except Unauthorized:
        raise ConfigError(
            f"data folder {data} is served by the gateway at {client.url}, which rejected the admin key; set {ADMIN_KEY} to the "
            "gateway's admin key, or choose a different --data folder",
            param="data",
        ) from None
    return True


async def _require_engine(client: GatewayClient, *, own: bool) -> EnginesView:
    """Return the engines of the gateway. Raise an error if the gateway lists engines but none of them can be used.

    `own` means that this command started the gateway.
    """
    view = await client.engines()
    if not view.engines or any(engine.up for engine in view.engines):
        return view
    reasons = "; ".join(f"{engine.url}: {engine.detail or 'it is down'}" for engine in view.engines)
    if own:
        raise _explain_unusable(reasons)
    raise EngineUnavailable(
        f"the gateway at {client.url} has no engine that can be used ({reasons}); check that the engine has started and serves the "
        f"model. With {ADMIN_KEY} set, `turngate engines list --gateway {shlex.quote(client.url)}` shows the state of each engine"
    )


async def _require_endpoint(config: ServeConfig) -> None:
    """Raise an error if the connection to an observed endpoint fails. Any HTTP status is accepted, and a timeout is not an error."""
    if config.engine not in OBSERVED_ENGINES:
        return
    [url] = config.engine_url
    client = EngineClient(config.engine, url)
    await client.start()
    try:
        with suppress(EngineTimeout):
            await client.check_connection()
    except EngineError as error:
        raise _explain_unusable(f"{url}: {error.message}") from None
    finally:
        await client.close()


def _explain_unusable(reasons: str) -> ConfigError:
    return ConfigError(
        f"engine_url: no engine can be used ({reasons}); check that the engine has started and serves the model, and that "
        "engine_url is its address",
        param="engine_url",
    )


@asynccontextmanager
async def _start_gateway(config: ServeConfig, build_engine: EngineBuilder) -> AsyncIterator[GatewayAddress]:
    async with AsyncExitStack() as stack:
        renderer, certificate = build_renderer(config)
        engine = build_engine(config, renderer) if renderer is not None else None
        loaded = (renderer, certificate) if renderer is not None and certificate is not None else None
        try:
            address = await stack.enter_async_context(run_embedded(config, engine=engine, renderer=loaded))
        except DataFolderInUse:
            raise ConfigError(
                f"data folder {config.data} is in use by another turngate process; choose a different --data folder, or wait until "
                f"that process ends. To share a folder between runs, first start `turngate serve --data {shlex.quote(config.data)}`",
                param="data",
            ) from None
        yield address


def _reject_own_flags(flags: Iterable[str], gateway: str, alternative: str = "") -> None:
    for name in flags:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{name} cannot be set for the running gateway at {gateway}; remove {flag}{alternative}", param=name
        )
