"""Authorization: the admin key grants full access, a session's secret only that session's model calls."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from turngate.client.keys import ADMIN_KEY, ADMIN_KEY_FILE, read_key, read_key_file
from turngate.errors import ConfigError, Unauthorized
from turngate.telemetry.logs import register_secrets

if TYPE_CHECKING:  # the front process imports this module and must stay light
    from turngate.gateway.sessions import Sessions
    from turngate.trace.session import Session

METRICS_KEY = "TURNGATE_METRICS_KEY"


def admin_key(data: Path) -> str:
    """Return the gateway's admin key. It is created on first start."""
    return own_key(data, ADMIN_KEY, ADMIN_KEY_FILE)


def metrics_key() -> str:
    """Return the key that grants access only to the metrics, or "" if only the admin key does."""
    key = read_key(METRICS_KEY)
    if key and len(key) < 16:
        raise ConfigError(f"{METRICS_KEY} must have at least 16 characters", param=METRICS_KEY)
    return key


def own_key(data: Path, variable: str, name: str) -> str:
    """Return a key from the environment or from a file in the data folder.

    The file is created on first start, readable only by its owner.
    """
    if key := read_key(variable):
        if len(key) < 16:
            raise ConfigError(f"{variable} must have at least 16 characters", param=variable)
        return key
    path = data / name
    if (stored := read_key_file(path)) is not None:
        return stored
    key = "tga-" + secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(key + "\n")
    register_secrets(key)
    return key


class Auth:
    def __init__(self, admin: str, sessions: Sessions, *, metrics: str = "", open_loopback: bool = False) -> None:
        self._admin = admin.encode()
        self._metrics = metrics.encode()
        self._sessions = sessions
        self._open_loopback = open_loopback

    def is_admin(self, key: str) -> bool:
        return secrets.compare_digest(key.encode("utf-8", "surrogatepass"), self._admin)

    def require_admin(self, key: str) -> None:
        if not self.is_admin(key):
            raise Unauthorized("the admin key is missing or wrong; send it as 'Authorization: Bearer …'")

    def require_metrics(self, key: str) -> None:
        """Require the admin key or the metrics key."""
        raw = key.encode("utf-8", "surrogatepass")
        if not (self.is_admin(key) or (self._metrics and secrets.compare_digest(raw, self._metrics))):
            raise Unauthorized(
                f"the key is missing or wrong; send the admin key or the key in {METRICS_KEY} as 'Authorization: Bearer …'"
            )

    def session(self, key: str, session_id: str | None) -> Session:
        """Return the session of a model call.

        If the path names the session, the key must be its secret or the admin key. Otherwise the secret identifies the session.
        """
        if session_id is None:
            if not key:
                raise Unauthorized("No API key provided. Send a session's secret as 'Authorization: Bearer …'.")
            if self.is_admin(key):
                raise Unauthorized("This is the admin key. Use the api_key of a session, or the path /s/{session}/v1.")
            session = self._sessions.find_by_secret(key)
            if session is None:
                raise Unauthorized("Incorrect API key provided. Use the secret of an open session as the API key.")
            return session
        if not self.is_admin(key) and not self._sessions.is_secret_of(key, session_id):
            raise Unauthorized("Incorrect API key provided. Use this session's secret, or the admin key.")
        return self._sessions.find(session_id)

    def trusts(self, key: str, client: str) -> bool:
        """Return whether a prime-rl client may omit the key. A loopback client may if `open_loopback` is set."""
        return self._open_loopback and not key and client in ("127.0.0.1", "::1")
