"""Authorization: which key grants access to which route.

The admin key grants full access, an API key grants access to the routes of its scopes, and a session's secret grants access to that
session's model calls, host tools and stored responses. The metrics key grants access only to the metrics. An API key belongs to one
project, and the gateways of other projects reject it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from turngate.client.keys import ADMIN_KEY, ADMIN_KEY_FILE, read_key, read_key_file
from turngate.errors import ConfigError, Forbidden, Unauthorized
from turngate.server.asgi import Scope
from turngate.server.scopes import MODEL_CALLS, Scopes
from turngate.store.projects import DEFAULT_PROJECT, OPERATOR_CALLER, SCOPE_NAMES, ApiKey, Caller
from turngate.telemetry.logs import register_secrets

if TYPE_CHECKING:  # the front process imports this module, and must not load heavy modules
    from turngate.gateway.api_keys import KeyRing
    from turngate.gateway.sessions import Sessions
    from turngate.trace.session import Session, SessionConfig

METRICS_KEY = "TURNGATE_METRICS_KEY"
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key", b"api-key"})
# A session's secret, which ends with the name of its project.
SECRET = re.compile(rb"tg-[0-9a-f]{4}[\w-]{43}\.([a-z0-9-]{1,40})(?![\w-])", re.ASCII)

_NO_SESSION_HAS_KEY = "Incorrect API key provided. Use the secret of an open session as the API key."


def admin_key(data: Path) -> str:
    """Return the gateway's admin key, and create it if it does not exist."""
    return own_key(data, ADMIN_KEY, ADMIN_KEY_FILE)


def metrics_key() -> str:
    """Return the key that grants access only to the metrics, or "" if no such key is set."""
    key = read_key(METRICS_KEY)
    if key and len(key) < 16:
        raise ConfigError(f"{METRICS_KEY} must have at least 16 characters", param=METRICS_KEY)
    return key


def own_key(data: Path, variable: str, name: str) -> str:
    """Return a key from the environment or from a file in the data folder.

    If neither exists, a key is created in a file that only its owner can read.
    """
    if key := read_key(variable):
        if len(key) < 16:
            raise ConfigError(f"{variable} must have at least 16 characters", param=variable)
        return key
    path = data / name
    _remove_unfinished(path)
    if (stored := read_key_file(path)) is not None:
        return stored
    key = "tga-" + secrets.token_urlsafe(32)
    try:
        _create_key_file(path, key)
    except OSError as error:
        if (stored := read_key_file(path)) is not None:  # another process has created it in the meantime
            return stored
        problem = (
            "is a broken link; delete it to get a new key"
            if path.is_symlink()
            else f"cannot be created ({error.strerror}); check the folder's permissions and free space"
        )
        raise ConfigError(f"data: {path} {problem}", param="data") from None
    register_secrets(key)
    return key


def _create_key_file(path: Path, key: str) -> None:
    """Create a key file.

    On a file system with hard links, the file never exists without its key, even if this process is killed. Without hard links, the file
    is empty for a moment.
    """
    number, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unfinished, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            # The file system has no hard links, so the file is empty for a moment.
            with open(path, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                file.write(key + "\n")
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _remove_unfinished(path: Path) -> None:
    """If the key file exists, remove the temporary files of processes that were killed while creating it."""
    if path.exists():
        for unfinished in path.parent.glob(f".{path.name}.*"):
            with suppress(OSError):
                unfinished.unlink()


class Auth:
    """Authorization for the routes of one project."""

    def __init__(
        self,
        admin: str,
        sessions: Sessions,
        ring: KeyRing,
        *,
        project: str = DEFAULT_PROJECT,
        metrics: str = "",
        open_loopback: bool = False,
    ) -> None:
        self._admin = admin.encode()
        self._metrics = metrics.encode()
        self._sessions = sessions
        self._ring = ring
        self._project = project
        self._open_loopback = open_loopback

    def is_admin(self, key: str) -> bool:
        return secrets.compare_digest(key.encode("utf-8", "surrogatepass"), self._admin)

    def find_key(self, key: str) -> ApiKey | None:
        """Return the stored API key, or None if the key is not valid or belongs to another project."""
        found = self._ring.find(key)
        return found if found is not None and found.project == self._project else None

    def find_prefix(self, prefix: str) -> ApiKey | None:
        """Return the valid API key of this project that has this prefix, or None.

        A prefix is not secret, so the calling code must authenticate the request in another way, such as with a login cookie.
        """
        found = self._ring.find_prefix(prefix)
        return found if found is not None and found.project == self._project else None

    def require(self, key: str, scopes: Scopes) -> Caller:
        """Return who sent a request with this key: the operator, or the holder of an API key that has one of the scopes.

        Raise an error for any other key.
        """
        if self.is_admin(key):
            return OPERATOR_CALLER
        found = self.find_key(key)
        if found is None:
            problem = "wrong or no longer valid" if key else "missing"
            raise Unauthorized(f"the key is {problem}; send a valid key as 'Authorization: Bearer …'")
        require_scope(found, scopes)
        return Caller(found.prefix, found.project)

    def require_metrics(self, key: str, scopes: Scopes) -> bool:
        """Require the metrics key, or a key that `require` accepts. Return whether the key grants access to the metrics of all projects."""
        raw = key.encode("utf-8", "surrogatepass")
        if self._metrics and secrets.compare_digest(raw, self._metrics):
            return True
        try:
            return self.require(key, scopes).project is None
        except Unauthorized:
            raise Unauthorized(
                f"the key is {'wrong or no longer valid' if key else 'missing'}; send the admin key, an API key with the scope 'traces' "
                f"or 'admin', or the key in {METRICS_KEY} as 'Authorization: Bearer …'"
            ) from None

    async def session(self, key: str, session_id: str | None) -> Session:
        """Return the session of a model call.

        If the path names the session, the key must be the session's secret, the admin key, or an API key with a scope for model calls.
        Otherwise, the key must be a session's secret, which also identifies the session.
        """
        if session_id is not None:
            self._require_access(key, session_id)
            return await self._sessions.find(session_id)
        self._require_possible_secret(key)
        session = await self._sessions.find_by_secret(key)
        if session is None:
            raise Unauthorized(_NO_SESSION_HAS_KEY)
        return session

    def session_config(self, key: str, session_id: str | None) -> SessionConfig:
        """Return the settings of a session, without loading its trace. The key must be one that `session` accepts."""
        if session_id is None:
            self._require_possible_secret(key)
            session_id = self._sessions.find_id_by_secret(key)
            if session_id is None:
                raise Unauthorized(_NO_SESSION_HAS_KEY)
        else:
            self._require_access(key, session_id)
        return (self._sessions.find_live(session_id) or self._sessions.find_row(session_id)).config

    def _require_possible_secret(self, key: str) -> None:
        if not key:
            raise Unauthorized("No API key provided. Send a session's secret as 'Authorization: Bearer …'.")
        if self.is_admin(key):
            raise Unauthorized(
                "This is the admin key. Use the api_key of a session, or send the admin key to the path /s/{session}/v1."
            )

    def _require_access(self, key: str, session_id: str) -> None:
        """Raise an error unless the key grants access to the model calls of this session."""
        if not self.is_admin(key) and not self._sessions.is_secret_of(key, session_id):
            found = self.find_key(key)
            if found is None:
                raise Unauthorized(
                    "Missing or incorrect API key. Use this session's secret, the admin key, or an API key of this project."
                )
            require_scope(found, MODEL_CALLS)

    def trusts(self, scope: Scope) -> bool:
        """Return whether a request of a prime-rl client needs no key.

        No key is needed if `open_loopback` is set, the request comes from this machine, and the project is `default`. But a request that
        carries a key needs a valid one: if an invalid key were ignored, the answer would reveal whether the key's project exists.
        """
        is_open = self._open_loopback and self._project == DEFAULT_PROJECT
        client = scope.get("client")
        return is_open and client is not None and client[0] in ("127.0.0.1", "::1") and not _carries_key(scope)


def _carries_key(scope: Scope) -> bool:
    """Return whether a request has a key or a cookie, valid or not, anywhere that `HostedProjects.choose` looks for one."""
    if any(value and name in (*KEY_HEADERS, b"cookie") for name, value in scope["headers"]):
        return True
    return bool(SECRET.search(scope["query_string"]) or SECRET.search(scope["path"].encode("utf-8", "surrogatepass")))


def require_scope(key: ApiKey, scopes: Scopes) -> None:
    if key.scopes & scopes:
        return
    if not scopes:
        raise Forbidden("this request needs the operator's admin key; API keys are not accepted")
    wanted = " or ".join(f"'{scope}'" for scope in SCOPE_NAMES if scope in scopes)
    raise Forbidden(f"this request needs a key with the scope {wanted}; key {key.prefix} does not have it")
