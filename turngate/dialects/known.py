"""Requests of one session begin alike: an agent sends everything that was said, and then what is new. What is known byte for byte need
not be read again.

A request's list (its `messages`, `input` or `contents`) is compared with those of the session's newest requests. Items that it begins with
are cut out of the body, which leaves a request like any other, only shorter, for the dialect to decode; the items are given along.
That changes nothing but the time it takes: a body that is spelled in some other way, or that is refused when it is short, is decoded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from turngate.dialects.base import Dialect, Wire
from turngate.dialects.wire import UNREADABLE, without_lone_surrogates
from turngate.errors import BadRequest
from turngate.types import Call, History

_LISTS = 4  # lines of work that are remembered, as in the trace
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Short(msgspec.Struct, frozen=True):
    """A body without the items that are known."""

    body: bytes
    items: Sequence[bytes]  # those
    history: History | None  # made of exactly those, if there is one
    head: bytes  # everything before the list's first item
    at: int  # where in the whole body the first new item begins

    def wire(self, whole: Wire) -> Wire:
        told = whole.headers, whole.query, whole.verb, whole.model
        return Wire(self.body, *told, self.items, self.history, whole.body)


class _List(msgspec.Struct, frozen=True):
    """The list of an earlier request."""

    items: Sequence[bytes]
    history: History
    head: bytes  # what was before it, if that is proven to end where the list begins; else empty


class Known:
    """The lists of one session's newest requests, in one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._field = field = dialect.list_field
        self._marks = (f'"{field}":['.encode(), f'"{field}": ['.encode())
        self._lists: list[_List] = []  # the newest last

    def decode(self, wire: Wire) -> Call:
        """The call that a request is: what its dialect makes of it, read as far as it is new."""
        short = self._shorten(wire.body)
        if short is not None and without_lone_surrogates(short.body) is short.body:
            with suppress(BadRequest):  # what is wrong is told of the whole body
                call = self._dialect.decode(short.wire(wire))
                if self._ends(wire.body, short.at, call.history.items[len(short.items) :]):
                    self._remember(call.history, short)
                    return call
        clean = without_lone_surrogates(wire.body)
        call = self._dialect.decode(wire if clean is wire.body else msgspec.structs.replace(wire, body=clean))
        self._remember(call.history, None)
        return call

    def _shorten(self, body: bytes) -> _Short | None:
        """The body without what is known of it. None: nothing is."""
        begin = self._begin(body) if self._lists else 0
        if not begin:
            return None
        count, at, best = 0, 0, None
        for known in reversed(self._lists):
            same, end = _same(body, begin, known.items)
            if same > count:
                count, at, best = same, end, known
        if best is None:
            return None
        head = body[:begin]
        if head != best.head and not self._opens(head):
            return None
        history = best.history if count == len(best.items) else None
        return _Short(head + body[at:], best.items[:count], history, head, at)

    def _remember(self, history: History, short: _Short | None) -> None:
        """This request was decoded, from `short` if that is given: the next one will begin like it."""
        known = 0 if short is None else len(short.items)
        if not all(item.startswith(b"{") for item in history.items[known:]):
            return  # a number, say, may be the beginning of another one; an object ends where it ends
        if known:  # what it went on from, or most of it, will not come again
            self._lists = [old for old in self._lists if not (_common(old.items, history.items) * 2 > len(old.items))]
        self._lists = self._lists[1 - _LISTS :]
        self._lists.append(_List(history.items, history, b"" if short is None else short.head))

    def _begin(self, body: bytes) -> int:
        """Where the list seems to begin."""
        for mark in self._marks:
            if (at := body.find(mark)) >= 0:
                return at + len(mark)
        return 0

    def _opens(self, head: bytes) -> bool:
        """Whether the list does begin where `head` ends: closed there, it has to be the last field of a whole request, and empty."""
        try:
            fields = _fields.decode(head + b"]}")
        except UNREADABLE:
            return False
        return next(reversed(fields), "") == self._field and bytes(fields[self._field]) == b"[]"

    def _ends(self, body: bytes, at: int, new: Sequence[bytes]) -> bool:
        """Whether these items are the rest of the list. If they are not, there is another one of its name further on, which counts."""
        count, at = _same(body, at, new[:-1])
        if count + 1 != len(new) or not body.startswith(new[-1] + b"]", at):
            return False
        return self._field not in _fields.decode(b'{"":[0' + body[at + len(new[-1]) :])


def _same(body: bytes, at: int, items: Sequence[bytes]) -> tuple[int, int]:
    """How many of the items follow each other from `at` on, with another one after them, and where that one begins."""
    joined = b",".join(items)
    if body.startswith(joined, at) and (following := _following(body, at + len(joined))):
        return len(items), following
    for n, item in enumerate(items):
        following = _following(body, at + len(item)) if body.startswith(item, at) else 0
        if not following:
            return n, at
        at = following
    return len(items), at


def _following(body: bytes, end: int) -> int:
    """Where the item after one that ends there begins. 0: there is none, or it is parted from it in an unusual way."""
    if not body.startswith(b",", end):
        return 0
    return end + 2 if body.startswith(b" ", end + 1) else end + 1


def _common(some: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many they begin with alike. Items that were known are the very same objects, so that this takes no time."""
    return next((n for n, (one, other) in enumerate(zip(some, others, strict=False)) if one is not other), len(some))
