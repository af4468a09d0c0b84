"""Wire formats. A new dialect is one file and one line here."""

from turngate.dialects.base import Dialect, Stream
from turngate.dialects.chat import Chat

DIALECTS: tuple[Dialect, ...] = (Chat(),)

__all__ = ["DIALECTS", "Chat", "Dialect", "Stream"]
