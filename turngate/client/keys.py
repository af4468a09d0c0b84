"""Read keys from environment variables, key files, or a data folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from turngate.errors import ConfigError
from turngate.telemetry.logs import register_secrets

ADMIN_KEY = "TURNGATE_ADMIN_KEY"
ADMIN_KEY_FILE = "admin-key"  # in a gateway's data folder


def read_key(variable: str) -> str:
    """Read a key from an environment variable, or from the file that `{variable}_FILE` names. Return an empty string if neither is set.

    Raise `ConfigError` if both are set, or if the file cannot be read or contains no valid key. A key in the variable is not validated.
    Docker, Kubernetes and systemd provide secrets as files and set their permissions, so the permissions are not checked here.
    """
    key, file = os.environ.get(variable, "").strip(), os.environ.get(f"{variable}_FILE", "").strip()
    register_secrets(key)
    if not file:
        return key
    if key:
        raise ConfigError(
            f"{variable} and {variable}_FILE are both set; set only one of them", param=f"{variable}_FILE"
        )
    try:
        key = Path(file).read_bytes().decode("utf-8", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"{variable}_FILE: {file} cannot be read ({error.strerror})", param=f"{variable}_FILE"
        ) from None
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{variable}_FILE: {file} does not contain a valid key; a key must be printable ASCII and not empty",
            param=f"{variable}_FILE",
        )
    register_secrets(key)
    return key


def read_engine_key(variable: str) -> str:
    """Read an engine's API key from the variable that `engine_key_env` names. Raise `ConfigError` if it is not set or not valid."""
    key = read_key(variable)
    if not key:
        raise ConfigError(
            f"engine_key_env names the environment variable {variable}, which is not set; set it to the engine's API key",
            param="engine_key_env",
        )
    if not (key.isascii() and key.isprintable()):  # an HTTP client's error would contain the key
        raise ConfigError(
            f"{variable} does not contain a valid API key; a key must be printable ASCII", param="engine_key_env"
        )
    return key


def read_admin_key() -> str:
    """Read the admin key of a gateway from the environment. Raise `ConfigError` if no usable key is set.

    The key cannot be a command-line argument, because other users of the machine can read the arguments of a process.
    """
    key = read_key(ADMIN_KEY)
    if not key:
        raise ConfigError(f"{ADMIN_KEY} is not set; set it to the gateway's admin key", param=ADMIN_KEY)
    if not key.isprintable():
        raise ConfigError(
            f"{ADMIN_KEY} contains unprintable characters; set it to the gateway's admin key", param=ADMIN_KEY
        )
    return key


def locate_admin_key(data: Path) -> str:
    """Return a description of where the admin key for a data folder is stored, without the key itself."""
    if os.environ.get(ADMIN_KEY, "").strip():
        return f"the value of {ADMIN_KEY}"
    return f"in {os.environ.get(f'{ADMIN_KEY}_FILE', '').strip() or data / ADMIN_KEY_FILE}"


def read_key_file(path: Path) -> str | None:
    """Read a key from a file. Return None if the file does not exist.

    Raise `ConfigError` if the file cannot be read, if other users can access it, or if the key is invalid.
    """
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read ({error.strerror})", param="data") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"data: {path} is accessible to other users; run `chmod 600` on it, or delete it to get a new key at the next start",
            param="data",
        )
    key = content.decode("utf-8", "replace").strip()
    if len(key) < 16 or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"data: {path} does not contain a valid key (at least 16 printable ASCII characters); delete the file to get a new key "
            "at the next start",
            param="data",
        )
    register_secrets(key)
    return key


def read_stored_admin_key(data: Path) -> str | None:
    """Read the admin key from the data folder of a gateway. Return None if it is not stored there."""
    return read_key_file(data / ADMIN_KEY_FILE)
