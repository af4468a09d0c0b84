"""The `Dialect` interface: one wire format, without I/O. The server loops over dialects; the rest of the gateway never sees one.

A dialect declares its routes, where callers put their key, what its errors look like and how its streams end. Everything else about a
call is the same for all dialects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from turngate.errors import TurngateError
from turngate.types import Call, Done, History, ReplyEvent, Tools

Verb = Literal["generate", "stream", "count"]


class Route(msgspec.Struct, frozen=True):
    """A path relative to a base URL. `{model}` in it stands for a model name. All routes are POST."""

    path: str
    verb: Verb = "generate"


class WireRequest(msgspec.Struct, frozen=True):
    """One HTTP request. `PrefixCache` may have cut the known items out of its body."""

    body: bytes
    headers: Mapping[str, str] = {}
    query: Mapping[str, str] = {}
    verb: Verb = "generate"
    model: str = ""  # from the path
    known_items: Sequence[bytes] = ()  # the items that were cut out of the body
    history: History | None = None  # of exactly these items, to be extended
    uncut_body: bytes = b""  # the body before the cut

    @property
    def received_body(self) -> bytes:
        """The body as received."""
        return self.uncut_body or self.body


class Stream(Protocol):
    """Encodes one streamed reply, event by event."""

    @property
    def media(self) -> str:
        """Content type of the reply."""

    def begin(self) -> bytes: ...

    def event(self, event: ReplyEvent) -> bytes:
        """Encode one event. `Done` becomes the terminal event."""

    def error(self, error: TurngateError) -> bytes: ...


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def routes(self) -> tuple[Route, ...]: ...

    @property
    def path_prefix(self) -> str:
        """Path prefix of this dialect. Unknown paths below it are answered in its error format."""

    @property
    def list_field(self) -> str:
        """The request field that holds the conversation."""

    @property
    def request_id_header(self) -> str:
        """The response header that carries the provider's request id; empty: none."""

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        """Read the secret that the caller presents; empty if none."""

    def decode(self, wire: WireRequest) -> Call: ...

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call | None:
        """Build the call of a request that differs from an earlier one only in headers and history. `call`: the earlier one.

        None: the request has to be decoded whole.
        """

    def read_stored_history(self, raws: Sequence[bytes]) -> History:
        """Messages as a trace stores them."""

    def read_stored_tools(self, raw: bytes) -> Tools:
        """Tools as a trace stores them."""

    def open_stream(self, call: Call) -> Stream: ...

    def encode_reply(self, call: Call, done: Done) -> bytes:
        """Encode a reply that is not streamed."""

    def encode_count(self, tokens: int) -> bytes:
        """Encode the reply to a call that counts its prompt's tokens."""

    def encode_models(self, names: Sequence[str], created: int) -> bytes: ...

    def encode_model(self, name: str, created: int) -> bytes: ...

    def error_status(self, error: TurngateError) -> int:
        """The HTTP status with which the provider reports such an error."""

    def encode_error(self, error: TurngateError) -> bytes: ...

    def sends_in_stream(self, error: TurngateError) -> bool:
        """Whether the provider sends such an error inside the stream, even as its first event."""
