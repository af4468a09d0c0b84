"""Check API keys against the store.

A gateway keeps a copy of the keys in memory. Outside a cell, a lookup first renews the copy if it is at least a second old.

A key looks like `tgp-1a2b3c4d-…`. Its prefix, up to the second hyphen, identifies the key in lists and in the audit log. The store contains
the prefix and a hash of the whole key, but not the key itself.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from turngate.store.projects import DEFAULT_PROJECT, ApiKey, ProjectRow, ProjectTable, Quotas

REFRESH_S = 1.0  # how long a gateway uses its copy of the projects and keys
_UNKNOWN_S = 0.1  # an unknown key makes a gateway read the keys again if its copy is at least this old
KEY_PATTERN = re.compile(r"(tgp-[0-9a-f]{8})-[\w-]{43}", re.ASCII)


class KnownProjects(msgspec.Struct, frozen=True):
    """All projects and keys, as read at one point in time."""

    projects: Mapping[str, ProjectRow]
    keys: Mapping[str, ApiKey]  # by prefix
    deleted: frozenset[str] = frozenset()  # names of deleted projects


def read_projects(table: ProjectTable) -> KnownProjects:
    projects = {project.name: project for project in table.list_projects()}
    return KnownProjects(projects, {key.prefix: key for key in table.list_keys()}, table.list_deleted())


def new_key() -> tuple[str, str, bytes]:
    """Create a key. Return the key, its prefix and its hash."""
    prefix = f"tgp-{secrets.token_hex(4)}"
    key = f"{prefix}-{secrets.token_urlsafe(32)}"
    return key, prefix, hash_key(key)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyRing:
    """A gateway's copy of the projects and keys. A lookup first calls `read` to renew a copy that is at least `refresh_s` seconds old."""

    def __init__(
        self,
        read: Callable[[], KnownProjects],
        refresh_s: float = REFRESH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._refresh_s = refresh_s
        self._clock = clock
        self._known = KnownProjects({DEFAULT_PROJECT: ProjectRow(DEFAULT_PROJECT)}, {})
        self._read_at = float("-inf")

    def update(self, known: KnownProjects | None = None) -> None:
        """Replace the copy with `known`, or read the projects and keys now if `known` is None."""
        self._known = self._read() if known is None else known
        self._read_at = self._clock()

    def _refresh(self) -> KnownProjects:
        if self._clock() - self._read_at >= self._refresh_s:
            self.update()
        return self._known

    def find(self, key: str) -> ApiKey | None:
        """Return the stored record of `key`, or None if the key is unknown, expired or revoked."""
        if (match := KEY_PATTERN.fullmatch(key)) is None:
            return None
        found = self.find_prefix(match[1])
        return found if found is not None and secrets.compare_digest(found.hash, hash_key(key)) else None

    def find_prefix(self, prefix: str) -> ApiKey | None:
        """Return the stored record of the valid key with this prefix, or None.

        Prefixes are not secret, so finding one does not authenticate a request.
        """
        found = self._refresh().keys.get(prefix)
        if found is None and _UNKNOWN_S <= self._clock() - self._read_at < self._refresh_s < float("inf"):
            self.update()  # another process may have just created the key
            found = self._known.keys.get(prefix)
        return found if found is not None and found.is_valid(time.time()) else None

    def find_project(self, name: str) -> ProjectRow | None:
        return self._refresh().projects.get(name)

    def list_projects(self) -> list[str]:
        return sorted(self._refresh().projects)

    def list_deleted(self) -> frozenset[str]:
        return self._refresh().deleted

    def read_quotas(self, project: str) -> Quotas:
        found = self.find_project(project)
        return Quotas() if found is None else found.quotas

    def weight(self, project: str) -> float:
        """Return a project's weight in the queue of model calls, as stored in the copy. The copy is not renewed first."""
        found = self._known.projects.get(project)
        return 1.0 if found is None else found.weight
