"""What `turngate mcp` does around the server: settings, key, the loop, and a clean stop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from turngate.cli.run import stoppable
from turngate.cli.terminal import console, say
from turngate.client.keys import read_key
from turngate.errors import ConfigError, DataFolderInUse, TurngateError
from turngate.server.auth import own_key
from turngate.server.bind import raise_file_limit
from turngate.service.config import ServiceConfig, load
from turngate.service.rollouts import Rollouts

try:
    from turngate.mcp import http, stdio
except ModuleNotFoundError as error:
    raise ConfigError(f"mcp: needs {error.name}: pip install 'turngate[mcp]'", param="mcp") from None

STOPPING = "Stopping: what runs is aborted and its sandboxes are removed; what was recorded stays …"
_SETTINGS = ("data", "sandbox", "running")


def ordered(given: Mapping[str, Any]) -> None:
    """Serve what the flags of `turngate mcp` ask for, until the client or a signal ends it."""
    config = load(given["config"], {name: given[name] for name in _SETTINGS})
    if not config.endpoints and not config.allowed_hosts:
        raise ConfigError(
            'endpoints: there are none; list some in a TOML file, [endpoints."vllm://Qwen3-8B"], and give it as --config',
            param="endpoints",
        )
    place = None if given["http"] is None else _place(config, given)
    rollouts = Rollouts(config)
    raise_file_limit()
    to = console(stderr=True)
    if place is None and sys.stdin.isatty():
        say(
            to,
            "This speaks MCP on stdin and stdout, to a client that starts it; for others there is --http. Ctrl-D ends it.",
            "dim",
        )
    if place is not None and not read_key(http.KEY):
        say(to, f"Clients need the key in {Path(config.data) / http.KEY_FILE} (or set {http.KEY})", "dim")
    # Who is told to end ends well: that is no failure.
    with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serving = stdio.serve(rollouts) if place is None else http.serve(rollouts, place)
        try:
            runner.run(stoppable(serving, to, STOPPING))
        except BaseExceptionGroup as group:  # of the SDK's task groups
            raise _why(group) from None
    say(to, "turngate mcp has stopped", "dim")


def _why(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that it was about, if it was one of ours."""
    found: list[BaseException] = [group]
    while isinstance(found[0], BaseExceptionGroup):
        found[:1] = found[0].exceptions
    if isinstance(found[0], DataFolderInUse):
        return ConfigError(
            f"{found[0].message}; stdio is for one client, which starts a server of its own: several share one that runs with --http",
            param="data",
        )
    return found[0] if len(found) == 1 and isinstance(found[0], TurngateError) else group


def _place(config: ServiceConfig, given: Mapping[str, Any]) -> http.Place:
    data = Path(config.data)
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    return http.Place.parse(given["http"], own_key(data, http.KEY, http.KEY_FILE), given["allow_host"] or ())
