"""Incremental decoding of requests: where possible, only the new part of a request is decoded.

An agent sends its whole conversation with every call, so most requests of a session share a prefix.

A request's body consists of a list (`messages`, `input` or `contents`) and a frame: everything before and after the list. The list is
compared with the known lists, which are the lists of the session's latest requests. There are three ways to decode a request, and all
produce the same call:

- If the list extends a known list and the frame is the same, only the new items are decoded. The rest of the decoded body is copied from
  the earlier call.
- If the list and a known list share only a prefix, or if the frame is different, the shared items are removed from the body, and the
  dialect decodes the shorter body.
- If the list has no known prefix, has unusual formatting or is invalid, the whole body is decoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from turngate.dialects.base import Dialect, WireRequest
from turngate.dialects.wire import DECODE_ERRORS, without_lone_surrogates
from turngate.errors import BadRequest
from turngate.types import Call, History, Message

_MAX_LISTS = 4  # number of conversations that are remembered per session
_MAX_FRAMES = 64  # shared by all sessions
_MAX_SHARED_FRAME = 256_000  # bytes; larger frames are not shared
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raws = msgspec.json.Decoder(list[msgspec.Raw])


class _Frame(msgspec.Struct, frozen=True):
    """A request without its list, which was between `head` and `tail`.

    No other field of the body has the list's name, so the list can be replaced by another one.
    """

    head: bytes
    tail: bytes
    key: tuple[object, ...]  # the parts of the request outside its body that affect decoding: see `_request_key`
    call: Call  # the decoded call, without its history


class _KnownList(msgspec.Struct, frozen=True):
    """An earlier request's list, history and frame."""

    items: Sequence[bytes]
    history: History
    frame: _Frame | None


class _Match(msgspec.Struct, frozen=True):
    """Where a body's list starts, how many of its first items match a known list, and where the first new item starts."""

    list_start: int
    count: int
    new_start: int
    known: _KnownList


class FrameCache:
    """A cache of frames for all sessions. Sessions of the same agent usually send the same tools and settings, so they share a frame."""

    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[object, ...], _Frame] = OrderedDict()

    def intern(self, frame: _Frame) -> _Frame:
        if len(frame.head) + len(frame.tail) > _MAX_SHARED_FRAME:
            return frame
        key = (frame.call.dialect, frame.head, frame.tail, *frame.key)
        known = self._frames.setdefault(key, frame)
        self._frames.move_to_end(key)
        if len(self._frames) > _MAX_FRAMES:
            self._frames.popitem(last=False)
        return known


class PrefixCache:
    """Decoder for one session's requests in one dialect. It remembers the lists of the latest requests to avoid decoding them again."""

    def __init__(self, dialect: Dialect, frames: FrameCache) -> None:
        self._dialect = dialect
        self._frames = frames
        self._field = field = dialect.list_field
        self._marks = (f'"{field}":['.encode(), f'"{field}": ['.encode())
        self._lists: list[_KnownList] = []  # newest last

    def decode(self, wire: WireRequest) -> Call:
        """Decode a request. Where its bytes equal those of an earlier request, reuse the earlier result."""
        match = self._find(wire.body)
        if match is not None:
            with suppress(BadRequest):  # decoding the whole body below raises the error again, with the right positions
                call = self._extend_known(wire, match) or self._decode_shortened(wire, match)
                if call is not None:
                    return call
        clean = without_lone_surrogates(wire.body)
        call = self._dialect.decode(wire if clean is wire.body else msgspec.structs.replace(wire, body=clean))
        self._remember(call.history, self._build_frame(wire, call) if clean is wire.body else None)
        return call

    def _find(self, body: bytes) -> _Match | None:
        """Find the known list that shares the longest prefix with the body's list. Return None if no known list shares a prefix with it."""
        best: _Match | None = None
        start = self._find_list(body) if self._lists else 0
        for known in reversed(self._lists if start else ()):
            count, at = _match_items(body, start, known.items)
            if count > (best.count if best is not None else 0):
                best = _Match(start, count, at, known)
        return best

    def _extend_known(self, wire: WireRequest, match: _Match) -> Call | None:
        """Build the call by extending an earlier one. Return None if that is not possible, for example because the frame is different."""
        known, body = match.known, wire.body
        frame = known.frame
        if frame is None or match.count < len(known.items) or frame.key != _request_key(wire):
            return None
        if len(frame.head) != match.list_start or not body.startswith(frame.head) or not body.endswith(frame.tail):
            return None
        new = body[match.new_start : len(body) - len(frame.tail)]
        try:
            items = _raws.decode(b"[" + new + b"]")
        except DECODE_ERRORS:
            return None
        if not items or without_lone_surrogates(new) is not new:
            return None
        history = known.history.extend([*known.items, *map(bytes, items)])
        call = self._dialect.extend_call(frame.call, history, wire)
        if call is not None:
            self._remember(history, frame, match)
        return call

    def _decode_shortened(self, wire: WireRequest, match: _Match) -> Call | None:
        """Decode the body without its known items. Return None if the whole body must be decoded instead."""
        known, body = match.known, wire.body
        short = body[: match.list_start] + body[match.new_start :]
        if without_lone_surrogates(short) is not short:
            return None
        history = known.history if match.count == len(known.items) else None
        items = known.items[: match.count]
        call = self._dialect.decode(
            msgspec.structs.replace(wire, body=short, known_items=items, history=history, uncut_body=body)
        )
        frame = self._build_frame(wire, call)
        if frame is not None:
            self._remember(call.history, frame, match)
        return None if frame is None else call

    def _remember(self, history: History, frame: _Frame | None, match: _Match | None = None) -> None:
        """Remember a decoded request's list, because the list of the next request will probably start with the same items."""
        known = 0 if match is None else match.count
        if not all(item.startswith(b"{") for item in history.items[known:]):
            return  # only lists of objects can be compared: a number, for example, could match the start of a longer number
        # Drop the matched list if the new list repeats more than half of it, because the agent will not send the older list again.
        kept = [old for old in self._lists if match is None or old is not match.known or known * 2 <= len(old.items)]
        self._lists = [*kept[1 - _MAX_LISTS :], _KnownList(history.items, history, frame)]

    def _find_list(self, body: bytes) -> int:
        """Return where the list seems to start, or 0 if it is not found. This is only a text search; `_build_frame` verifies the result."""
        for mark in self._marks:
            if (at := body.find(mark)) >= 0:
                return at + len(mark)
        return 0

    def _build_frame(self, wire: WireRequest, call: Call) -> _Frame | None:
        """Build the frame of a request.

        Return None if the list is empty, has unusual formatting or does not start where `_find_list` says, or if the body has another field
        with the list's name.
        """
        body, items, start = wire.body, call.history.items, self._find_list(wire.body)
        if not start or not items:
            return None
        count, at = _match_items(body, start, items[:-1])
        end = at + len(items[-1])
        if count + 1 != len(items) or not body.startswith(items[-1] + b"]", at):
            return None
        head, tail = body[:start], body[end:]
        if not self._opens_list(head) or self._field in _fields.decode(b'{"":[0' + tail):
            return None
        plain = msgspec.structs.replace(call, history=_EMPTY_HISTORY, body=b"", forwarded_headers={})
        return self._frames.intern(_Frame(head, tail, _request_key(wire), plain))

    def _opens_list(self, head: bytes) -> bool:
        """Return whether the list starts where `head` ends.

        The check closes the list and the object after `head`. The result must be a valid object whose last field is the list, and the list
        must be empty.
        """
        try:
            fields = _fields.decode(head + b"]}")
        except DECODE_ERRORS:
            return False
        return next(reversed(fields), "") == self._field and bytes(fields[self._field]) == b"[]"


class _EmptyHistory:
    """A history without messages, for the call in a frame."""

    raws: list[bytes] = []
    items: Sequence[bytes] = ()

    def decode(self, index: int) -> tuple[Message, ...]:
        raise IndexError(index)

    def extend(self, items: Sequence[bytes]) -> History:
        raise NotImplementedError


_EMPTY_HISTORY = _EmptyHistory()


def _request_key(wire: WireRequest) -> tuple[object, ...]:
    """Return the verb, model and query of a request, and whether it came over a WebSocket.

    An API key in the query is left out: frames do not depend on the caller's key.
    """
    return wire.verb, wire.model, wire.over_socket, *sorted(item for item in wire.query.items() if item[0] != "key")


def _match_items(body: bytes, at: int, items: Sequence[bytes]) -> tuple[int, int]:
    """Return how many leading `items` are also the first items of the list at `body[at]`, and where the next item starts in `body`.

    An item matches only if another item follows it in `body`.
    """
    joined = b",".join(items)
    if body.startswith(joined, at) and (following := _next_item(body, at + len(joined))):
        return len(items), following
    for n, item in enumerate(items):
        following = _next_item(body, at + len(item)) if body.startswith(item, at) else 0
        if not following:
            return n, at
        at = following
    return len(items), at


def _next_item(body: bytes, end: int) -> int:
    """Return where the next item starts, or 0 if no comma follows the item that ends at `end`. At most one space is skipped."""
    if not body.startswith(b",", end):
        return 0
    return end + 2 if body.startswith(b" ", end + 1) else end + 1
