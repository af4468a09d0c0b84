"""Requests of one session begin alike: an agent sends everything that was said, and then what is new. What is known byte for byte need
not be read again.

A request is a list (its `messages`, `input` or `contents`) in a frame: the other fields, before and after it. Its list is compared with
those of the session's newest requests. There are three ways to read it, which all lead to the same call:

- The list goes on from a known one, and the frame is the same: only the new items are read, the rest is the earlier call's.
- The list begins like a known one, but something else changed: the known items are cut out of the body, which leaves a request like any
  other, only shorter, for the dialect to decode.
- Nothing is known, it is spelled in an unusual way, or something is wrong with it: it is decoded whole.
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

_MAX_LISTS = 4  # lines of work that are remembered, as in the trace
_MAX_FRAMES = 64  # that sessions share
_MAX_SHARED_FRAME = 256_000  # bytes of one that is not shared
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raws = msgspec.json.Decoder(list[msgspec.Raw])


class _Frame(msgspec.Struct, frozen=True):
    """All of a request but its list. It is proven that the list stands between these two, and that no other one of its name follows."""

    head: bytes
    tail: bytes
    asked: tuple[object, ...]  # what came with it besides its headers
    call: Call  # what it is, with nothing said


class _KnownList(msgspec.Struct, frozen=True):
    """The list of an earlier request."""

    items: Sequence[bytes]
    history: History
    frame: _Frame | None


class _Match(msgspec.Struct, frozen=True):
    """Where a body's list begins, how many of its items are those of a known list, and where the first new one begins."""

    begin: int
    count: int
    at: int
    known: _KnownList


class FrameCache:
    """Sessions of one run mostly send the same frame: the same tools, the same system prompt. It is kept once."""

    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[object, ...], _Frame] = OrderedDict()

    def shared(self, frame: _Frame) -> _Frame:
        if len(frame.head) + len(frame.tail) > _MAX_SHARED_FRAME:
            return frame
        key = (frame.call.dialect, frame.head, frame.tail, *frame.asked)
        known = self._frames.setdefault(key, frame)
        self._frames.move_to_end(key)
        if len(self._frames) > _MAX_FRAMES:
            self._frames.popitem(last=False)
        return known


class PrefixCache:
    """The lists of one session's newest requests, in one dialect."""

    def __init__(self, dialect: Dialect, frames: FrameCache) -> None:
        self._dialect = dialect
        self._frames = frames
        self._field = field = dialect.list_field
        self._marks = (f'"{field}":['.encode(), f'"{field}": ['.encode())
        self._lists: list[_KnownList] = []  # the newest last

    def decode(self, wire: WireRequest) -> Call:
        """The call that a request is: what its dialect makes of it, read as far as it is new."""
        place = self._find(wire.body)
        if place is not None:
            with suppress(BadRequest):  # what is wrong is told of the whole body
                call = self._gone_on(wire, place) or self._shortened(wire, place)
                if call is not None:
                    return call
        clean = without_lone_surrogates(wire.body)
        call = self._dialect.decode(wire if clean is wire.body else msgspec.structs.replace(wire, body=clean))
        self._remember(call.history, self._framed(wire, call) if clean is wire.body else None)
        return call

    def _find(self, body: bytes) -> _Match | None:
        """What is known of the body's list. None: nothing."""
        best: _Match | None = None
        begin = self._begin(body) if self._lists else 0
        for known in reversed(self._lists if begin else ()):
            count, at = _match_items(body, begin, known.items)
            if count > (best.count if best is not None else 0):
                best = _Match(begin, count, at, known)
        return best

    def _gone_on(self, wire: WireRequest, place: _Match) -> Call | None:
        """The call, where nothing but the end of the list is new."""
        known, body = place.known, wire.body
        frame = known.frame
        if frame is None or place.count < len(known.items) or frame.asked != _request_key(wire):
            return None
        if len(frame.head) != place.begin or not body.startswith(frame.head) or not body.endswith(frame.tail):
            return None
        new = body[place.at : len(body) - len(frame.tail)]
        try:
            items = _raws.decode(b"[" + new + b"]")
        except DECODE_ERRORS:
            return None
        if not items or without_lone_surrogates(new) is not new:
            return None
        history = known.history.extend([*known.items, *map(bytes, items)])
        call = self._dialect.extend_call(frame.call, history, wire)
        if call is not None:
            self._remember(history, frame, place)
        return call

    def _shortened(self, wire: WireRequest, place: _Match) -> Call | None:
        """The call, decoded from a body without the items that are known."""
        known, body = place.known, wire.body
        short = body[: place.begin] + body[place.at :]
        if without_lone_surrogates(short) is not short:
            return None
        history = known.history if place.count == len(known.items) else None
        told = wire.headers, wire.query, wire.verb, wire.model
        call = self._dialect.decode(WireRequest(short, *told, known.items[: place.count], history, body))
        frame = self._framed(wire, call)
        if frame is not None:
            self._remember(call.history, frame, place)
        return None if frame is None else call

    def _remember(self, history: History, frame: _Frame | None, place: _Match | None = None) -> None:
        """This request was decoded: the next one will begin like it."""
        known = 0 if place is None else place.count
        if not all(item.startswith(b"{") for item in history.items[known:]):
            return  # a number, say, may be the beginning of another one; an object ends where it ends
        # What it went on from, or most of it, will not come again.
        kept = [old for old in self._lists if place is None or old is not place.known or known * 2 <= len(old.items)]
        self._lists = [*kept[1 - _MAX_LISTS :], _KnownList(history.items, history, frame)]

    def _begin(self, body: bytes) -> int:
        """Where the list seems to begin."""
        for mark in self._marks:
            if (at := body.find(mark)) >= 0:
                return at + len(mark)
        return 0

    def _framed(self, wire: WireRequest, call: Call) -> _Frame | None:
        """The frame of a request. None: its list is not where it seems to be, or not the only one of its name."""
        body, items, begin = wire.body, call.history.items, self._begin(wire.body)
        if not begin or not items:
            return None
        count, at = _match_items(body, begin, items[:-1])
        end = at + len(items[-1])
        if count + 1 != len(items) or not body.startswith(items[-1] + b"]", at):
            return None
        head, tail = body[:begin], body[end:]
        if not self._opens(head) or self._field in _fields.decode(b'{"":[0' + tail):
            return None
        plain = msgspec.structs.replace(call, history=_EMPTY_HISTORY, body=b"", forwarded_headers={})
        return self._frames.shared(_Frame(head, tail, _request_key(wire), plain))

    def _opens(self, head: bytes) -> bool:
        """Whether the list does begin where `head` ends: closed there, it has to be the last field of a whole request, and empty."""
        try:
            fields = _fields.decode(head + b"]}")
        except DECODE_ERRORS:
            return False
        return next(reversed(fields), "") == self._field and bytes(fields[self._field]) == b"[]"


class _EmptyHistory:
    """The history of a frame."""

    raws: list[bytes] = []
    items: Sequence[bytes] = ()

    def decode(self, index: int) -> tuple[Message, ...]:
        raise IndexError(index)

    def extend(self, items: Sequence[bytes]) -> History:
        raise NotImplementedError


_EMPTY_HISTORY = _EmptyHistory()


def _request_key(wire: WireRequest) -> tuple[object, ...]:
    """Without the key, which is a session's secret: frames are shared, and outlive it."""
    return wire.verb, wire.model, *sorted(item for item in wire.query.items() if item[0] != "key")


def _match_items(body: bytes, at: int, items: Sequence[bytes]) -> tuple[int, int]:
    """How many of the items follow each other from `at` on, with another one after them, and where that one begins."""
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
    """Where the item after one that ends there begins. 0: there is none, or it is parted from it in an unusual way."""
    if not body.startswith(b",", end):
        return 0
    return end + 2 if body.startswith(b" ", end + 1) else end + 1
