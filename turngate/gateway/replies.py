"""Stored replies, which later requests of a session can refer to by id, even after a restart.

A reply is stored with the turn that it delivers, before its last byte is sent. The latest replies of a session are also kept in memory, so
that the cost of a request that continues one of them depends only on the new items. Older replies are rebuilt from the store: first the
items of the recorded path, then those of the reply itself.
"""

from __future__ import annotations

import asyncio
from typing import Literal
from weakref import WeakKeyDictionary

import msgspec

from turngate.dialects import decode_stored_messages
from turngate.dialects.base import EarlierReply, ReplyRecord
from turngate.dialects.responses_items import (
    encode_message,
    index_items,
    list_input,
    read_output,
    rebuild_reply,
    response_of_item,
    split_items,
)
from turngate.errors import NotFound, TooLarge
from turngate.store.replies import PathNode, StoredReply
from turngate.store.store import Store
from turngate.trace.session import Session
from turngate.trace.tree import Trace
from turngate.types import Call, Done, History, Message

ReplyPart = Literal["output", "input"]
_MAX_RECENT = 4  # replies per session that are kept in memory
_message = msgspec.json.Decoder(Message)


class _RecentReplies:
    """The latest replies of one session.

    `echo` is the part of the newest stored reply that repeats its request. `digest` is the digest of `echo`.
    """

    __slots__ = ("by_id", "digest", "echo")

    def __init__(self) -> None:
        self.by_id: dict[str, EarlierReply] = {}  # oldest first
        self.echo = self.digest = b""


class ReplyArchive:
    """The stored replies of all sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent: WeakKeyDictionary[Trace, _RecentReplies] = WeakKeyDictionary()

    async def add(self, session: Session, node: int | None, record: ReplyRecord, history: History) -> None:
        """Store a reply durably, and keep it in memory. A reply that was not sampled has no node and is kept only in memory."""
        recent = self._recent.get(session.trace)
        if recent is None:
            recent = self._recent[session.trace] = _RecentReplies()
        if node is not None:
            known = recent.digest if record.echo == recent.echo else b""
            if self._store.durability == "process":
                recent.digest = self._store.replies.add(session.key, node, record, known)
            else:  # a sync would block other calls
                recent.digest = await asyncio.to_thread(self._store.replies.add, session.key, node, record, known)
            recent.echo = record.echo
        recent.by_id[record.id] = EarlierReply(history, record.output)
        if len(recent.by_id) > _MAX_RECENT:
            del recent.by_id[next(iter(recent.by_id))]

    def find(self, session: Session, reply_id: str) -> EarlierReply | None:
        recent = None if session.is_evicted else self._recent.get(session.trace)
        if recent is not None and (known := recent.by_id.get(reply_id)) is not None:
            return known
        stored = self._store.replies.find(session.key, reply_id)
        return None if stored is None else self._rebuild(session, stored)

    def list_items(self, session: Session, reply_id: str, part: ReplyPart) -> list[bytes]:
        """Return the output or the input items of a stored reply, oldest first. Return an empty list if the reply is not stored."""
        stored = self._store.replies.find(session.key, reply_id)
        if stored is None:
            return []
        return read_output(stored.tail) if part == "output" else self._list_input(session, stored)

    def read(self, session: Session, reply_id: str) -> bytes:
        """Return the JSON of a stored reply."""
        return self._require(session, reply_id).body

    def list_input(self, session: Session, reply_id: str) -> list[bytes]:
        """Return the input items of a stored reply, oldest first."""
        return self._list_input(session, self._require(session, reply_id))

    def delete(self, session: Session, reply_id: str) -> None:
        """Delete a stored reply. Its turn stays in the trace."""
        self._require(session, reply_id)
        self._store.replies.delete(session.key, reply_id)
        recent = None if session.is_evicted else self._recent.get(session.trace)
        if recent is not None:
            recent.by_id.pop(reply_id, None)

    def _require(self, session: Session, reply_id: str) -> StoredReply:
        stored = self._store.replies.find(session.key, reply_id)
        if stored is None:
            raise NotFound(
                f"Response with id {reply_id[:200]!r} not found: this session has no stored response with this id. Responses with "
                "store=false are not stored.",
                param="response_id",
            )
        return stored

    def _list_input(self, session: Session, stored: StoredReply) -> list[bytes]:
        return list_input(self._rebuild(session, stored), stored.id)

    def _rebuild(self, session: Session, stored: StoredReply) -> EarlierReply:
        path = self._store.replies.path(session.key, stored.node)
        items = [item for node in path[:-1] for item in _read_items(node)]
        return rebuild_reply(stored.echo, stored.tools, items, read_output(stored.tail))


class SessionReplies:
    """The replies that one request of a session may refer to.

    `max_bytes` limits the total size of the items that are read to resolve references to single items.
    """

    __slots__ = ("_archive", "_max_bytes", "_parts", "_read_bytes", "_session")

    def __init__(self, archive: ReplyArchive, session: Session, max_bytes: int) -> None:
        self._archive = archive
        self._session = session
        self._max_bytes = max_bytes
        self._read_bytes = 0
        self._parts: dict[tuple[str, ReplyPart], dict[str, bytes]] = {}  # items by id; each part is read once

    def find(self, reply_id: str) -> EarlierReply | None:
        return self._archive.find(self._session, reply_id)

    def find_item(self, item_id: str) -> bytes | None:
        """Return an item of a stored reply or of its input, or None if there is no such item."""
        reply_id = response_of_item(item_id)
        return self._read(reply_id, "output").get(item_id) or self._read(reply_id, "input").get(item_id)

    def keeps(self, call: Call) -> bool:
        """Return whether the reply to this call must be stored."""
        return call.store

    async def add(self, call: Call, done: Done, record: ReplyRecord) -> None:
        """Store a complete reply if the call requests this. The end of the reply must not have been delivered yet."""
        if call.store:
            await self._archive.add(self._session, done.node, record, call.history)

    def _read(self, reply_id: str, part: ReplyPart) -> dict[str, bytes]:
        known = self._parts.get((reply_id, part))
        if known is None:
            items = self._archive.list_items(self._session, reply_id, part)
            self._read_bytes += sum(map(len, items))
            if self._read_bytes > self._max_bytes:
                raise TooLarge(
                    f"input: the responses that contain the referenced items have more than {self._max_bytes} bytes in total (the limit "
                    "is set by max_body_mb); send the referenced items themselves, or continue with previous_response_id",
                    param="input",
                )
            known = self._parts[reply_id, part] = index_items(items)
        return known


def _read_items(node: PathNode) -> list[bytes]:
    if node.dialect == "responses":
        return split_items(node.messages)
    if node.dialect:
        return [
            item for message in decode_stored_messages(node.dialect, node.messages) for item in encode_message(message)
        ]
    return read_output(node.tail) if node.tail is not None else encode_message(_message.decode(node.messages))
