"""Wire formats. A new dialect is one file and one line here."""

from __future__ import annotations

import msgspec

from turngate.dialects.base import Dialect, Route, Stream, Verb, Wire
from turngate.dialects.chat import Chat
from turngate.dialects.gemini import Gemini
from turngate.dialects.messages import Messages
from turngate.dialects.responses import Responses
from turngate.types import Message

DIALECTS: tuple[Dialect, ...] = (Chat(), Gemini(), Messages(), Responses())
_by_name = {dialect.name: dialect for dialect in DIALECTS}
_pieces = msgspec.json.Decoder(list[msgspec.Raw])


def recorded(dialect: str, raw: bytes) -> list[Message]:
    """The messages of a stored JSON list in the dialect that they came in."""
    history = _by_name[dialect].history([bytes(piece) for piece in _pieces.decode(raw)])
    return [message for index in range(len(history.raws)) for message in history.decode(index)]


__all__ = ["DIALECTS", "Chat", "Dialect", "Route", "Stream", "Verb", "Wire", "recorded"]
