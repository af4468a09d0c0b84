"""What a dialect is: one wire format, without I/O. The server loops over them; `turn.py` never sees one.

A dialect declares its routes, where its callers put their key, what its errors look like and how its streams end. Everything else
about a call is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from turngate.errors import TurngateError
from turngate.types import Call, Done, History, ReplyEvent, Tools

Verb = Literal["generate", "stream", "count"]


class Route(msgspec.Struct, frozen=True):
    """A path relative to a base URL. `{model}` in it stands for a model's name. All are POST."""

    path: str
    verb: Verb = "generate"


class WireRequest(msgspec.Struct, frozen=True):
    """One request as it came, or without the beginning of its list, where that is known (`known.py`)."""

    body: bytes
    headers: Mapping[str, str] = {}
    query: Mapping[str, str] = {}
    verb: Verb = "generate"
    model: str = ""  # named by the path
    known: Sequence[bytes] = ()  # the items that were cut out of the body
    history: History | None = None  # made of exactly those: it can be gone on from
    whole: bytes = b""  # the body before that

    @property
    def sent(self) -> bytes:
        """The body as it came."""
        return self.whole or self.body


class Stream(Protocol):
    """Encodes one streamed reply, event by event."""

    @property
    def media(self) -> str:
        """Content type of the reply."""

    def begin(self) -> bytes: ...

    def event(self, event: ReplyEvent) -> bytes:
        """`Done` gives the terminal event."""

    def error(self, error: TurngateError) -> bytes: ...


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def routes(self) -> tuple[Route, ...]: ...

    @property
    def path_prefix(self) -> str:
        """Paths that begin like this are meant for it: what is not there is refused in its words."""

    @property
    def list_field(self) -> str:
        """The field of a request that holds what was said."""

    @property
    def request_id_header(self) -> str:
        """The response header in which its provider names the request; empty: none."""

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        """The secret that the caller presents; empty if none."""

    def decode(self, wire: WireRequest) -> Call: ...

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call | None:
        """What `decode` makes of a request that differs from an earlier one, which was `call`, in its headers and its history only.
        None: that has to be seen."""

    def stored_history(self, raws: Sequence[bytes]) -> History:
        """Messages as a trace stores them."""

    def stored_tools(self, raw: bytes) -> Tools:
        """Tools as a trace stores them."""

    def open_stream(self, call: Call) -> Stream: ...

    def encode_reply(self, call: Call, done: Done) -> bytes:
        """A reply that was not asked to be streamed."""

    def encode_count(self, tokens: int) -> bytes:
        """The reply to a call that only asks how many tokens its prompt has."""

    def encode_models(self, names: Sequence[str], created: int) -> bytes: ...

    def encode_model(self, name: str, created: int) -> bytes: ...

    def error_status(self, error: TurngateError) -> int:
        """The HTTP status under which its provider reports such an error."""

    def encode_error(self, error: TurngateError) -> bytes: ...

    def sends_in_stream(self, error: TurngateError) -> bool:
        """Whether its provider tells such an error to a streaming caller inside a stream, even as its first word."""
