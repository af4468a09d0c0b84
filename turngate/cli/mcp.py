"""`turngate mcp`: load the settings (by default, a scripted endpoint), run the server, and stop it cleanly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from turngate.cli.options import McpOptions
from turngate.cli.signals import cancel_on_signal
from turngate.client.keys import read_key
from turngate.common.terminal import console, say
from turngate.errors import ConfigError, DataFolderInUse, TurngateError
from turngate.server.auth import own_key
from turngate.server.bind import raise_file_limit
from turngate.service.config import ServiceConfig, load_config
from turngate.service.rollouts import Rollouts

try:
    from turngate.mcp import http, stdio
except ModuleNotFoundError as error:
    raise ConfigError(
        f"`turngate mcp` needs the module {error.name!r}, which is not installed; run `pip install 'turngate[mcp]'`",
        param="mcp",
    ) from None

# The endpoints of a server that is started without --config.
SCRIPTED_ENDPOINTS = {
    "scripted://demo": {"about": "Returns fixed replies, so that you can try out the tools without a model."}
}
NO_CONFIG = (
    "No --config: the only endpoint is scripted://demo, which returns fixed replies. For a real model, pass --config FILE, with a "
    'table such as [endpoints."vllm://Qwen3-8B"] (see docs/service.md).'
)
STOPPING = "Stopping: aborting rollouts and removing their sandboxes; the recordings are kept …"


def serve_mcp(options: McpOptions) -> None:
    """Serve MCP until a signal stops the server or, on stdio, until the client disconnects."""
    overrides = {"data": options.data, "sandbox": options.sandbox, "running": options.running}
    config = load_config(options.config, overrides | ({"endpoints": SCRIPTED_ENDPOINTS} if not options.config else {}))
    if not config.endpoints and not config.allowed_hosts:
        raise ConfigError(
            'no endpoints are configured; add a table such as [endpoints."vllm://Qwen3-8B"] to the --config file',
            param="endpoints",
        )
    place = None if options.http is None else _http_place(config, options.http, options.allow_host or ())
    rollouts = Rollouts(config)
    raise_file_limit()
    to = console(stderr=True)
    if options.config is None:
        say(to, NO_CONFIG, "dim")
    if place is None and sys.stdin.isatty():
        say(
            to,
            "Serving MCP on stdin and stdout. Usually, an MCP client starts this command. To start it yourself and let clients connect, "
            "use --http. Press Ctrl-D to stop.",
            "dim",
        )
    if place is not None and not read_key(http.KEY):
        say(
            to,
            f"Clients need the key in {Path(config.data) / http.KEY_FILE}. Set {http.KEY} to use a different key.",
            "dim",
        )
    # A signal cancels the server, which is not a failure.
    with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serving = stdio.serve(rollouts) if place is None else http.serve(rollouts, place)
        try:
            runner.run(cancel_on_signal(serving, to, STOPPING))
        except BaseExceptionGroup as group:  # raised by the SDK's task groups
            raise _unwrap(group, is_stdio=place is None) from None
    say(to, "turngate mcp has stopped", "dim")


def _unwrap(group: BaseExceptionGroup[BaseException], *, is_stdio: bool) -> BaseException:
    """Return the only error in a group if it is a TurngateError, and the group otherwise.

    On stdio, if the first error is `DataFolderInUse`, return a ConfigError with the same message and a hint instead.
    """
    errors: list[BaseException] = [group]
    while isinstance(errors[0], BaseExceptionGroup):
        errors[:1] = errors[0].exceptions
    if is_stdio and isinstance(errors[0], DataFolderInUse):
        return ConfigError(
            f"{errors[0].message}. On stdio, every client starts its own server; use --http to share a server between clients",
            param="data",
        )
    return errors[0] if len(errors) == 1 and isinstance(errors[0], TurngateError) else group


def _http_place(config: ServiceConfig, address: str, hosts: Sequence[str]) -> http.HttpSettings:
    data = Path(config.data)
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    return http.HttpSettings.parse(address, own_key(data, http.KEY, http.KEY_FILE), hosts)
