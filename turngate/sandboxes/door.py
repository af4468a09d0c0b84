"""The host's end of a sandbox's connection to the gateway: a door, which forwards only model and tool calls.

A door listens on a unix socket in the folder that a sandbox shares with the host, or on a loopback port behind a tunnel. It forwards only
requests with a listed method and path, and answers all others itself, so the admin API cannot be reached through it. It parses requests
with the strict reader of `relay.py` and sends the parsed request, not the original bytes, so the gateway cannot interpret a request
differently.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote_to_bytes

from turngate.errors import SandboxUnavailable
from turngate.sandboxes import relay

# Method and path; `*` is a model's name, which may contain slashes. Agents use HEAD to probe their provider.
MODEL_CALLS: tuple[tuple[str, str], ...] = (
    ("HEAD", "/"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/*"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses"),  # opens a WebSocket
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/*"),
    ("DELETE", "/v1/responses/*"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1beta/models"),
    ("GET", "/v1beta/models/*"),
    ("POST", "/v1beta/models/*:generateContent"),
    ("POST", "/v1beta/models/*:streamGenerateContent"),
    ("POST", "/v1beta/models/*:countTokens"),
)
# Host tools. The gateway checks that the session has the tool, and the session's secret authorizes the call.
TOOL_CALLS: tuple[tuple[str, str], ...] = (("GET", "/v1/tools"), ("POST", "/v1/tools/*"))
SEGMENT = r"[A-Za-z0-9_~@+-][A-Za-z0-9._~@+-]*"  # never ".."
MODEL_NAME = rf"{SEGMENT}(?:/{SEGMENT})*"  # replaces `*`
GATEWAY_HEADER = f"{relay.GATEWAY_HEADER}: 1"  # tells the relay that the reply does not come from a dead tunnel
# Limits on the memory that an agent can make the host use, even without a key. A relay retries requests that exceed the first two.
MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 256 * 1024 * 1024  # all request bodies together
STALL_S = 60.0  # the longest silence within a request
MAX_SOCKET_PATH = 107  # bytes; the limit on Linux
SHARED_FACTOR = 16  # multiplies the limits of a door that all remote sandboxes share
# Removed from requests, because a server might trust these headers if they come from a proxy.
STRIPPED_HEADERS = ("x-forwarded-", "forwarded", "x-real-ip", "x-turngate")


class GatewayDoor(relay.HttpRelay):
    """A proxy to the gateway that admits only the listed routes. Created by `open_door`.

    `address` is the address on this host at which the door listens. `calls` counts the admitted requests, and `refused` counts those
    refused because of their route.
    """

    def __init__(
        self, gateway: str, routes: Sequence[tuple[str, str]], on_call: Callable[[str, str], None], *, sandboxes: int
    ) -> None:
        super().__init__(lambda: gateway, give_up_s=0)
        self.max_connections = MAX_CONNECTIONS * sandboxes
        self.max_body_bytes = MAX_BODY_BYTES * sandboxes
        self.stall_s = STALL_S
        self.address = ""
        self.socket: Path | None = None
        self.calls = 0
        self.refused = 0
        self._routes = [(method, _compile_route(path)) for method, path in routes]
        self._on_call = on_call

    def check_route(self, method: str, path: str) -> None:
        plain = _decode_path(path.partition("?")[0])
        if not any(method == allowed and pattern.fullmatch(plain) for allowed, pattern in self._routes):
            self.refused += 1
            refused = relay.RequestRefused(
                404, "a sandbox may send only model and tool calls to the gateway", "not_found"
            )
            refused.headers = GATEWAY_HEADER
            raise refused

    def admit(self, request: relay.HttpRequest) -> relay.HttpRequest:
        self.check_route(request.method, request.path)
        path = _decode_path(request.path.partition("?")[0])
        self.calls += 1
        self._on_call(request.method, path)
        headers = [
            (name, value)
            for name, value in request.headers
            if not name.startswith(STRIPPED_HEADERS) or name == relay.ATTEMPT_HEADER
        ]
        return request._replace(headers=headers)

    def log(self, line: str) -> None:
        """Discard the line, because the relay in the sandbox already logs failed attempts to reach the gateway."""


def _decode_path(path: str) -> str:
    """Return a path as the gateway will read it, or an empty string if it is ambiguous."""
    decoded = unquote_to_bytes(path).decode("latin-1")
    return "" if re.search(r"%|\\|//|[^!-~]|/\.{1,2}(/|$)", decoded) else decoded


def _compile_route(path: str) -> re.Pattern[str]:
    return re.compile(MODEL_NAME.join(re.escape(part) for part in path.split("*")))


def _socket_mode(folder: Path) -> int:
    """Return the mode for a socket in `folder`: 0o666 if other users, such as the user of a container, may enter the folder, else 0o600.

    Mode 0o666 is safe, because the folder is inside a private one, which the host's other users cannot enter.
    """
    return 0o666 if folder.stat().st_mode & 0o007 else 0o600


def _check_socket_path(path: Path) -> Path:
    """Return the path, or raise `SandboxUnavailable` if it is too long for a unix socket.

    The message names TMPDIR, because sandbox folders are in the host's temporary folder.
    """
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        raise SandboxUnavailable(
            f"TMPDIR: the sandbox's socket path {path} is {size} bytes long, but the limit for a unix socket path is "
            f"{MAX_SOCKET_PATH}; set TMPDIR to a folder with a shorter path, such as /tmp"
        )
    return path


def _bind_unix_socket(path: Path, mode: int) -> socket.socket:
    """Bind a unix socket whose file has the mode `mode` from the start.

    The umask is changed only during `bind`, because it also applies to files that other threads create.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            os.fchmod(listener.fileno(), mode)  # on Linux, the bound file gets the socket's mode minus the umask
            mask = 0
        except OSError:
            mask = 0o777 & ~mode
        previous = os.umask(mask)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
    except BaseException:
        listener.close()
        raise
    return listener


@asynccontextmanager
async def open_door(
    gateway: str,
    *,
    folder: Path | None = None,
    routes: Sequence[tuple[str, str]] = MODEL_CALLS + TOOL_CALLS,
    on_call: Callable[[str, str], None] = lambda method, path: None,
) -> AsyncIterator[GatewayDoor]:
    """Open a door to the gateway at the URL `gateway`.

    The door listens on a unix socket in `folder` or, without a folder, on a port of 127.0.0.1.
    """
    door = GatewayDoor(gateway, routes, on_call, sandboxes=SHARED_FACTOR if folder is None else 1)
    try:
        if folder is None:
            listener = socket.create_server(("127.0.0.1", 0))
            door.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        else:
            door.socket = _check_socket_path(folder / "gateway.sock")
            listener = _bind_unix_socket(door.socket, _socket_mode(folder))
            door.address = f"unix:{door.socket}"
        await door.listen(listener)
        yield door
    finally:
        await door.close()
        if door.socket:
            door.socket.unlink(missing_ok=True)
