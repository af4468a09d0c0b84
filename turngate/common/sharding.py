"""Which worker has a session. A session's id gives its slot, and the slot its owner, so nobody has to be asked.

Used by `control.py` (ids and secrets of new sessions), by the front (where a connection goes) and by the workers themselves.
"""

from __future__ import annotations

import re
import secrets
import uuid
import zlib
from urllib.parse import unquote_to_bytes

import msgspec

# A path that names a session, and a secret that carries its session's slot.
NAMED = re.compile(rb"/(?:s|rollout|v1/rollouts|admin/sessions|sessions|page/api/rollouts)/([^/?#\s]+)")
_SECRET = re.compile(rb"(?<![\w-])tg-([0-9a-f]{4})[\w-]{43}(?![\w-])", re.ASCII)


def slot(name: str) -> int:
    """Of a session, by its id, or by its secret where a path has that (OpenEnv's sessions)."""
    spelled = name.encode("utf-8", "surrogatepass")
    if name.startswith("tg-") and (carried := _SECRET.fullmatch(spelled)):
        return int(carried[1], 16)
    return zlib.crc32(spelled) & 0xFFFF


def new_secret(session_id: str) -> str:
    """32 random bytes. The slot before them tells nothing that the id does not, and is only a hint."""
    return f"tg-{slot(session_id):04x}{secrets.token_urlsafe(32)}"


def hinted(head: bytes) -> int | None:
    """The slot of the session that a request speaks for, as far as its head tells. None: it does not."""
    line = head.partition(b"\r\n")[0]
    target = line.partition(b" ")[2]
    if named := NAMED.match(target):
        return slot(unquote_to_bytes(named[1]).decode("utf-8", "replace"))
    if carried := _SECRET.search(head):
        return int(carried[1], 16)
    return None


class Place(msgspec.Struct, frozen=True):
    """Which worker this is, and of how many."""

    number: int = 0
    workers: int = 1

    def owner(self, session_id: str) -> int:
        return slot(session_id) % self.workers

    def owns(self, session_id: str) -> bool:
        return self.owner(session_id) == self.number

    def new_id(self) -> str:
        """An id that is this worker's."""
        while True:
            session_id = uuid.uuid4().hex
            if self.owns(session_id):
                return session_id


ALONE = Place()
