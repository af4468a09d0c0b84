"""The host's end of the way out: one door per rollout, through which nothing but model and tool calls gets to the gateway.

A unix socket in the folder that a sandbox shares with the host, or a port of the loopback for a tunnel to lead to. The door
opens for an exact list of methods and paths; everything else is answered here. So whatever an agent finds out, the admin
API and other rollouts are not at the other end. It reads requests with `relay.py`'s strict reader and sends on what it read,
not what it was sent, so that the gateway cannot read a request differently.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote_to_bytes

from turngate.errors import SandboxUnavailable
from turngate.sandboxes import relay

# Method and path; `*` is a model's name, which may have slashes in it. HEAD is how an agent looks for its provider.
MODEL_CALLS: tuple[tuple[str, str], ...] = (
    ("HEAD", "/"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/*"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1beta/models"),
    ("GET", "/v1beta/models/*"),
    ("POST", "/v1beta/models/*:generateContent"),
    ("POST", "/v1beta/models/*:streamGenerateContent"),
    ("POST", "/v1beta/models/*:countTokens"),
)
# Tools that the host handles; which ones there are is the session's affair, and its secret opens them.
TOOL_CALLS: tuple[tuple[str, str], ...] = (("GET", "/v1/tools"), ("POST", "/v1/tools/*"))
SEGMENT = r"[A-Za-z0-9_~@+-][A-Za-z0-9._~@+-]*"  # never ".."
MODEL_NAME = rf"{SEGMENT}(?:/{SEGMENT})*"  # what `*` stands for
GATEWAY_HEADER = f"{relay.GATEWAY_HEADER}: 1"  # tells the relay that this is an answer, not a dead tunnel's
# What an agent can make the host hold, without a key even. A relay tries again when it is told to wait.
MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 256 * 1024 * 1024  # bytes of requests' bodies
STALL_S = 60.0  # without a byte, in the middle of a request
MAX_SOCKET_PATH = 107  # that the path of a unix socket may have
SHARED_FACTOR = 16  # times as much where all remote sandboxes share one door
STRIPPED_HEADERS = ("x-forwarded-", "forwarded", "x-real-ip", "x-turngate")  # what a server might believe of a proxy


class GatewayDoor:
    """Made by `opened`. `calls`: how many went through; `refused`: how many did not; `target`: its address for a relay."""

    def __init__(
        self, gateway: str, routes: Sequence[tuple[str, str]], on_call: Callable[[str, str], None], *, sandboxes: int
    ) -> None:
        self.target = ""
        self.socket: Path | None = None
        self.calls = 0
        self.refused = 0
        self._routes = [(method, _compile_route(path)) for method, path in routes]
        self._on_call = on_call
        self.relay = relay.HttpRelay(
            lambda: gateway,
            admit=self._admit,
            look=self._look,
            give_up_s=0,
            connections=MAX_CONNECTIONS * sandboxes,
            held=MAX_BODY_BYTES * sandboxes,
            stall_s=STALL_S,
        )

    def _look(self, method: str, path: str) -> None:
        plain = _decode_path(path.partition("?")[0])
        if not any(method == known and pattern.fullmatch(plain) for known, pattern in self._routes):
            self.refused += 1
            raise relay.RequestRefused(404, "only model and tool calls pass here", "not_found", GATEWAY_HEADER)

    def _admit(self, request: relay.HttpRequest) -> relay.HttpRequest:
        self._look(request.method, request.path)
        path = _decode_path(request.path.partition("?")[0])
        self.calls += 1
        self._on_call(request.method, path)
        kept = [
            (name, value)
            for name, value in request.headers
            if not name.startswith(STRIPPED_HEADERS) or name == relay.ATTEMPT_HEADER
        ]
        return request._replace(headers=kept)


def _decode_path(path: str) -> str:
    """The path as the gateway will read it; empty when it could be read in two ways."""
    decoded = unquote_to_bytes(path).decode("latin-1")
    return "" if re.search(r"%|\\|//|[^!-~]|/\.{1,2}(/|$)", decoded) else decoded


def _compile_route(path: str) -> re.Pattern[str]:
    return re.compile(MODEL_NAME.join(re.escape(part) for part in path.split("*")))


def _socket_mode(folder: Path) -> int:
    """Where the folder is open to others (a container's user may be anybody), a closed one is around it."""
    return 0o666 if folder.stat().st_mode & 0o007 else 0o600


def _check_socket_path(path: Path) -> Path:
    """One that the system takes. The folders of sandboxes are in the host's temporary folder."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        raise SandboxUnavailable(
            f"TMPDIR: a sandbox's socket would be {path}, which is {size} bytes, and a unix socket's path may have {MAX_SOCKET_PATH}; set "
            f"TMPDIR to a folder whose path is {size - MAX_SOCKET_PATH} bytes shorter, such as /tmp"
        )
    return path


@asynccontextmanager
async def open_door(
    gateway: str,
    *,
    folder: Path | None = None,
    routes: Sequence[tuple[str, str]] = MODEL_CALLS + TOOL_CALLS,
    on_call: Callable[[str, str], None] = lambda method, path: None,
) -> AsyncIterator[GatewayDoor]:
    """A door to the gateway at that URL: a socket in `folder`, or without one a port of 127.0.0.1."""
    door = GatewayDoor(gateway, routes, on_call, sandboxes=SHARED_FACTOR if folder is None else 1)
    try:
        if folder is None:
            door.target = f"http://127.0.0.1:{await door.relay.listen('127.0.0.1', 0)}"
        else:
            door.socket = _check_socket_path(folder / "gateway.sock")
            await door.relay.listen_unix(str(door.socket), _socket_mode(folder))
            door.target = f"unix:{door.socket}"
        yield door
    finally:
        await door.relay.close()
        if door.socket:
            door.socket.unlink(missing_ok=True)
