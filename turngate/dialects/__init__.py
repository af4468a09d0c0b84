"""The dialects, which convert between wire formats and Turngate's types. To add a dialect, write its module and list it in `DIALECTS`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from turngate.dialects.base import Dialect, Route, Stream, Verb, WireRequest
from turngate.dialects.chat import Chat
from turngate.dialects.gemini import Gemini
from turngate.dialects.messages import Messages
from turngate.dialects.responses import Responses
from turngate.dialects.wire import DECODE_ERRORS, describe_error
from turngate.errors import BadRequest
from turngate.types import Message, Tool

DIALECTS: tuple[Dialect, ...] = (Chat(), Gemini(), Messages(), Responses())
_by_name = {dialect.name: dialect for dialect in DIALECTS}
_raws = msgspec.json.Decoder(list[msgspec.Raw])


def decode_stored_messages(dialect: str, raw: bytes) -> list[Message]:
    """Decode a JSON list of messages from the store. Raise BadRequest if a message is invalid or the dialect is unknown.

    `dialect` is the name of the dialect in which the messages arrived.
    """
    with _reading("messages"):
        history = _find(dialect).read_stored_history([bytes(item) for item in _raws.decode(raw)])
        return [message for index in range(len(history.raws)) for message in history.decode(index)]


def decode_stored_tools(dialect: str, raw: bytes) -> tuple[Tool, ...]:
    """Decode tools from the store. Raise BadRequest if a tool is invalid or the dialect is unknown.

    `dialect` is the name of the dialect in which the tools arrived.
    """
    with _reading("tools"):
        return () if raw in (b"", b"[]") else _find(dialect).read_stored_tools(raw).decode()


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except DECODE_ERRORS as error:
        raise BadRequest(f"{what}: {describe_error(error)}") from None


def _find(dialect: str) -> Dialect:
    if dialect not in _by_name:
        raise BadRequest(f"unknown dialect {dialect!r} (available: {', '.join(_by_name)})")
    return _by_name[dialect]


__all__ = [
    "DIALECTS",
    "Chat",
    "Dialect",
    "Route",
    "Stream",
    "Verb",
    "WireRequest",
    "decode_stored_messages",
    "decode_stored_tools",
]
