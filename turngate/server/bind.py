"""Listen for connections, and publish the gateway's address in the data folder.

The small parent process of the workers (`workers/front.py`) imports this module, so this module must import neither the gateway's
application (`app.py`) nor the renderers.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from turngate.client.keys import locate_admin_key
from turngate.config import ServeConfig
from turngate.errors import ConfigError

_NOTE = "gateway.json"


class RunningGateway(msgspec.Struct, frozen=True):
    """The address and process id of a running gateway, published in its data folder for other processes on the machine."""

    url: str
    pid: int


def find_running_gateway(data: Path) -> RunningGateway | None:
    """Return the gateway whose address is in this data folder, or None if there is no address, or if its process no longer exists."""
    try:
        gateway = msgspec.json.decode((data / _NOTE).read_bytes(), type=RunningGateway)
    except (OSError, msgspec.DecodeError):
        return None
    return gateway if _is_running(gateway.pid) else None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # it belongs to another user
        return True
    except (OSError, OverflowError):
        return False
    return True


def has_stale_note(data: Path) -> bool:
    """Return whether the data folder still contains the address of a gateway that is no longer running."""
    return (data / _NOTE).exists() and find_running_gateway(data) is None


@contextmanager
def publish_address(data: Path, listener: socket.socket) -> Iterator[None]:
    """Publish the gateway's address in the data folder for the duration of the block."""
    note, unfinished = data / _NOTE, data / f".{_NOTE}.{os.getpid()}"
    try:
        unfinished.write_bytes(msgspec.json.encode(RunningGateway(local_url(listener), os.getpid())))
        unfinished.replace(note)  # so other processes never read an incomplete file
        yield
    finally:
        for file in (unfinished, note):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def local_url(listener: socket.socket) -> str:
    """Return the URL at which processes on this machine can reach the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://{_join(host, port)}"


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(config: ServeConfig) -> None:
    """Raise `ConfigError` if the gateway cannot listen on its port. Call this before creating anything in the data folder.

    If a gateway already serves the data folder, return without an error: opening the store then reports that the folder is in use.
    """
    if find_running_gateway(config.folder) is None:
        _bind(config).close()


def open_listener(config: ServeConfig) -> socket.socket:
    listener = _bind(config)
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _explain_bind_error(config, error) from None
    return listener


def _bind(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise _explain_bind_error(config, error) from None
    return bound


def _explain_bind_error(config: ServeConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {_join(config.host, config.port)}: {error.strerror}; choose a different --port or --host",
        param="port",
    )


def startup_message(config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    workers = f"{config.workers} workers · " if config.workers > 1 else ""
    engine = f"engine {config.engine} · model {config.model or 'any'}"
    if config.is_shared:
        managed = f"manages the {config.engine} engines of all cells" if config.has_pool else "manages no engines"
        engine = f"{managed} · open sessions at the cells' gateways"
    key = locate_admin_key(config.folder)
    return f"turngate listens on http://{_join(host, port)} · {workers}{engine} · data {config.data_name} · the admin key is {key}"


def raise_file_limit() -> None:
    """Raise the limit on open files to the maximum that the system allows.

    An active session needs two open files. Child processes inherit the limit.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
