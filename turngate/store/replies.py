"""The tables of stored replies. An agent can refer to a reply by its id, read it, or delete it.

Each reply belongs to the turn that it delivered. Deleting a reply does not change the turn.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from turngate.dialects.base import ReplyRecord
from turngate.store.connection import Connect
from turngate.trace.tree import ContextInfo

REPLY_TABLES = """
CREATE TABLE IF NOT EXISTS replies (
    session INTEGER NOT NULL,     -- key of the session
    id TEXT NOT NULL,             -- as the agent received it
    node INTEGER NOT NULL,        -- the turn that it delivered
    head BLOB NOT NULL,           -- head, echo and tail together are the reply's JSON
    echo BLOB NOT NULL,           -- digest of the part that repeats the request
    tail BLOB NOT NULL,
    tools BLOB NOT NULL,          -- JSON: tools from the items of the request
    PRIMARY KEY (session, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reply_echoes (
    session INTEGER NOT NULL,
    digest BLOB NOT NULL,
    echo BLOB NOT NULL,
    PRIMARY KEY (session, digest)
) WITHOUT ROWID;
"""
# The nodes from a turn to its root. A turn can have several replies only if an older store was edited by hand.
_PATH = """
WITH RECURSIVE path(id, parent, kind, info, messages) AS (
    SELECT id, parent, kind, info, messages FROM nodes WHERE session=? AND id=?
    UNION ALL
    SELECT n.id, n.parent, n.kind, n.info, n.messages FROM path JOIN nodes n ON n.session=? AND n.id=path.parent
)
SELECT path.id, kind, info, messages, replies.tail FROM path
LEFT JOIN replies ON replies.session=? AND replies.node=path.id
"""
_context_info = msgspec.msgpack.Decoder(ContextInfo)


class StoredReply(msgspec.Struct, frozen=True):
    id: str
    node: int
    head: bytes
    echo: bytes
    tail: bytes
    tools: bytes

    @property
    def body(self) -> bytes:
        """The whole reply as JSON."""
        return self.head + self.echo + self.tail


class PathNode(msgspec.Struct, frozen=True):
    """A node on the path from the root to a turn."""

    dialect: str  # dialect of a context's messages; empty for a turn
    messages: bytes  # JSON: a list for a context, one message for a turn
    tail: bytes | None = None  # tail of the reply that delivered the turn, if that reply is stored


class ReplyTable:
    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def add(self, session: int, node: int, record: ReplyRecord, known: bytes = b"") -> bytes:
        """Add a reply, and return the digest of its echo, the part that repeats the request.

        If the echo is already stored, pass its digest as `known`.
        """
        digest = known or blake2b(record.echo, digest_size=16).digest()
        row = (session, record.id, node, record.head, digest, record.tail, record.tools)
        with self._writing() as db:
            if not known:
                db.execute(
                    "INSERT INTO reply_echoes VALUES (?,?,?) ON CONFLICT DO NOTHING", (session, digest, record.echo)
                )
            db.execute("INSERT INTO replies VALUES (?,?,?,?,?,?,?)", row)
        return digest

    def find(self, session: int, reply_id: str) -> StoredReply | None:
        query = (
            "SELECT id, node, head, e.echo, tail, tools FROM replies r"
            " JOIN reply_echoes e ON e.session=r.session AND e.digest=r.echo WHERE r.session=? AND id=?"
        )
        with self._reading() as db:
            row = db.execute(query, (session, reply_id)).fetchone()
        return None if row is None else StoredReply(*row)

    def delete(self, session: int, reply_id: str) -> bool:
        """Delete a reply. Return whether it existed."""
        with self._writing() as db:
            return bool(db.execute("DELETE FROM replies WHERE session=? AND id=?", (session, reply_id)).rowcount)

    def path(self, session: int, node: int) -> list[PathNode]:
        """Return the nodes from the root to a turn, in that order."""
        with self._reading() as db:
            rows = db.execute(_PATH, (session, node, session, session)).fetchall()
        by_id = {
            node_id: PathNode(_context_info.decode(info).dialect if kind == "context" else "", messages, tail)
            for node_id, kind, info, messages, tail in rows
        }
        return [by_id[node_id] for node_id in sorted(by_id)]
