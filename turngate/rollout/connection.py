"""Connect a rollout's sandbox to the gateway.

A local sandbox connects through its door (`sandboxes/door.py`), a proxy on this machine. A remote sandbox connects to a public URL.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from turngate.common.validation import reject_credentials
from turngate.errors import ConfigError
from turngate.sandboxes import door, egress, tunnel
from turngate.sandboxes.base import Sandbox
from turngate.sandboxes.tunnel import Tunnel

_TOKEN_COUNTS = ("/count_tokens", "/input_tokens", ":countTokens")  # endings of paths that only count tokens
_SOCKET = ("GET", "/v1/responses")  # opens a WebSocket
_TOOLS = "/v1/tools/"  # prefix of paths that call host tools, without sampling


class Connection(msgspec.Struct):
    """An agent's connection to the gateway: the URL that it uses, and the number of its model calls."""

    base_url: str
    # Model calls so far; None if the calls do not pass through a door on this host, or if they are sent over a WebSocket.
    generations: int | None = None

    def count_call(self, method: str, path: str) -> None:
        """Count a request through the door if it asks the model to sample."""
        if (method, path) == _SOCKET:
            self.generations = None
        samples = method == "POST" and not path.endswith(_TOKEN_COUNTS) and not path.startswith(_TOOLS)
        if samples and self.generations is not None:
            self.generations += 1


class GatewayConnector:
    """Connects the sandboxes of all rollouts to one gateway.

    Remote sandboxes use `public_url`, or the URL that the command `tunnel` prints.
    """

    def __init__(self, gateway: str, public_url: str = "", tunnel: str = "") -> None:
        reject_credentials(
            public_url, "public_url", "remove them: agents receive this URL, so it must contain only the address"
        )
        if public_url and (urlsplit(public_url).scheme not in ("http", "https") or not urlsplit(public_url).netloc):
            raise ConfigError(f"public_url must be an http(s) URL, not {public_url!r}", param="public_url")
        if public_url and tunnel:
            raise ConfigError("public_url cannot be combined with a tunnel; set only one of them", param="tunnel")
        self._gateway = gateway
        self._public_url = public_url.rstrip("/")
        self._command = tunnel
        self._tunnel: Tunnel | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> GatewayConnector:
        await self._stack.__aenter__()
        if self._command:
            try:
                # The tunnel leads to a door, so that the tunnel's public address serves only model and tool calls.
                outside = await self._stack.enter_async_context(door.open_door(self._gateway))
                self._tunnel = await self._stack.enter_async_context(tunnel.open_tunnel(self._command, outside.address))
            except BaseException:
                await self._stack.aclose()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that a remote sandbox must be able to reach."""
        host = urlsplit(self._tunnel.url if self._tunnel is not None else self._public_url).hostname
        return (host,) if host else ()

    @asynccontextmanager
    async def connect(self, sandbox: Sandbox, *, python: str = "", node: str = "") -> AsyncIterator[Connection]:
        """Run a relay in the sandbox for the duration of the block, and yield the connection."""
        python = python or sys.executable  # if the sandbox can access this interpreter, it need not search for one
        if sandbox.shared is None:
            async with egress.connect_sandbox(
                sandbox, self._find_remote_target(), python=python, node=node
            ) as base_url:
                yield Connection(base_url)
            return
        connection = Connection("", 0)
        async with (
            door.open_door(self._gateway, folder=sandbox.shared[0], on_call=connection.count_call) as own,
            egress.connect_sandbox(sandbox, own, python=python, node=node) as connection.base_url,
        ):
            yield connection

    def _find_remote_target(self) -> Tunnel | str:
        target = self._tunnel or self._public_url
        if not target:
            raise ConfigError(
                "a remote sandbox needs a public URL to reach the gateway; set public_url or tunnel (on the command line, pass "
                "--public-url URL or --tunnel COMMAND)",
                param="public_url",
            )
        return target
