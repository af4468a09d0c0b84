"""What a dialect is: one wire format, without I/O. The server loops over them; `turn.py` never sees one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from turngate.errors import TurngateError
from turngate.types import Call, Done, ReplyEvent


class Stream(Protocol):
    """Encodes one streamed reply, event by event."""

    def begin(self) -> bytes: ...

    def event(self, event: ReplyEvent) -> bytes:
        """`Done` gives the terminal event."""

    def error(self, error: TurngateError) -> bytes: ...


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def paths(self) -> tuple[str, ...]:
        """Where agents call it, relative to a base URL."""

    def key(self, headers: Mapping[str, str]) -> str:
        """The secret that the caller presents; empty if none."""

    def decode(self, body: bytes, headers: Mapping[str, str]) -> Call: ...

    def stream(self, call: Call) -> Stream: ...

    def whole(self, call: Call, done: Done) -> bytes:
        """A reply that was not asked to be streamed."""

    def error(self, error: TurngateError) -> bytes: ...
