"""Reading keys: from environment variables, from the files those name, and from a data folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from turngate.errors import ConfigError
from turngate.telemetry.logs import register_secrets

ADMIN_KEY = "TURNGATE_ADMIN_KEY"
ADMIN_KEY_FILE = "admin-key"  # in a gateway's data folder


def read_key(variable: str) -> str:
    """Read a key from an environment variable, or from the file that `{variable}_FILE` names. Empty if neither is set.

    Docker, Kubernetes and systemd provide secrets as files. Their permissions are not checked here: those systems set them.
    """
    key, file = os.environ.get(variable, "").strip(), os.environ.get(f"{variable}_FILE", "").strip()
    register_secrets(key)
    if not file:
        return key
    if key:
        raise ConfigError(f"{variable}_FILE: {variable} is set, too; leave one of them out", param=f"{variable}_FILE")
    try:
        key = Path(file).read_bytes().decode("utf-8", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"{variable}_FILE: {file} cannot be read ({error.strerror})", param=f"{variable}_FILE"
        ) from None
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"{variable}_FILE: {file} holds no usable key", param=f"{variable}_FILE")
    register_secrets(key)
    return key


def read_admin_key() -> str:
    """Read the admin key of a gateway from the environment. `ConfigError` if it is not set.

    There is no argument for it: other users of the machine can read the arguments of a process.
    """
    key = read_key(ADMIN_KEY)
    if not key:
        raise ConfigError(f"{ADMIN_KEY}: is not set; it has to hold the admin key of the gateway", param=ADMIN_KEY)
    if not key.isprintable():
        raise ConfigError(f"{ADMIN_KEY}: holds characters that no key has", param=ADMIN_KEY)
    return key


def read_key_file(path: Path) -> str | None:
    """Read a key from a file that only its owner may read. None if there is no file."""
    if not path.exists():
        return None
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"data: {path} can be read by others; chmod 600 it, or delete it for a new key", param="data")
    key = path.read_bytes().decode("utf-8", "replace").strip()
    if len(key) < 16 or not (key.isascii() and key.isprintable()):
        raise ConfigError(f"data: {path} holds no usable key; delete it for a new one", param="data")
    register_secrets(key)
    return key


def read_stored_admin_key(data: Path) -> str | None:
    """Read the admin key that a gateway stored in its data folder. None if it stored none."""
    return read_key_file(data / ADMIN_KEY_FILE)
