"""Assign sessions to workers. A session's id determines its slot, and the slot determines the worker, so no lookup is needed."""

from __future__ import annotations

import re
import secrets
import uuid
import zlib
from urllib.parse import unquote_to_bytes

import msgspec

# Paths that contain the id or the secret of a session.
SESSION_PATH = re.compile(rb"/(?:s|rollout|v1/rollouts|admin/sessions|sessions|page/api/rollouts)/([^/?#\s]+)")
_SECRET_WITH_SLOT = re.compile(rb"(?<![\w-])tg-([0-9a-f]{4})[\w-]{43}(?![\w-])", re.ASCII)


def slot_of(name: str) -> int:
    """Return the slot of a session, given its id or, as in OpenEnv's paths, its secret."""
    raw = name.encode("utf-8", "surrogatepass")
    if name.startswith("tg-") and (match := _SECRET_WITH_SLOT.fullmatch(raw.partition(b".")[0])):
        return int(match[1], 16)
    return zlib.crc32(raw) & 0xFFFF


def new_secret(session_id: str, project: str = "") -> str:
    """Return a new secret: the session's slot, 32 random bytes, and the project, if any.

    The slot reveals no more than the session's id does.
    """
    secret = f"tg-{slot_of(session_id):04x}{secrets.token_urlsafe(32)}"
    return f"{secret}.{project}" if project else secret


def slot_from_head(head: bytes) -> int | None:
    """Return the slot of the session that an HTTP request names in its path or headers (`head`), or None if it names none."""
    line = head.partition(b"\r\n")[0]
    target = line.partition(b" ")[2]
    if match := SESSION_PATH.match(target):
        return slot_of(unquote_to_bytes(match[1]).decode("utf-8", "replace"))
    if match := _SECRET_WITH_SLOT.search(head):
        return int(match[1], 16)
    return None


class Shard(msgspec.Struct, frozen=True):
    """The sessions that one worker owns. `number` is the worker's index, and `workers` is the number of workers."""

    number: int = 0
    workers: int = 1

    def owner(self, session_id: str) -> int:
        return slot_of(session_id) % self.workers

    def owns(self, session_id: str) -> bool:
        return self.owner(session_id) == self.number

    def new_session_id(self) -> str:
        """Return a new session id that belongs to this shard."""
        while True:
            session_id = uuid.uuid4().hex
            if self.owns(session_id):
                return session_id


SINGLE_SHARD = Shard()
