"""The `Dialect` interface: one wire format, without I/O.

A dialect declares its routes, where callers put their key, what its errors look like and how its streams end. Everything else about a
call is the same for all dialects. The server iterates over the dialects; the rest of the gateway does not depend on the wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from turngate.errors import TurngateError
from turngate.types import Call, Done, History, ReplyEvent, Tools, Usage

Verb = Literal["generate", "stream", "count"]


class Route(msgspec.Struct, frozen=True):
    """A path relative to a base URL, with `{model}` as a placeholder for a model name. All routes are POST."""

    path: str
    verb: Verb = "generate"
    socket: bool = False  # calls may also arrive over a WebSocket, opened with GET


class EarlierReply(msgspec.Struct, frozen=True):
    """A reply of the same session that a request may refer to: the history of its request, and its own items."""

    history: History
    output: Sequence[bytes]


class EarlierReplies(Protocol):
    """The replies that a request may refer to by id. Both methods return None if nothing has the id."""

    def find(self, reply_id: str) -> EarlierReply | None: ...

    def find_item(self, item_id: str) -> bytes | None: ...


class ReplyRecord(msgspec.Struct, frozen=True):
    """A reply to be stored under its id: `head`, `echo` and `tail` together are its JSON.

    `echo` repeats the request and is mostly the same in all replies of a session, so it is stored once.
    """

    id: str
    head: bytes
    echo: bytes
    tail: bytes
    output: tuple[bytes, ...]  # its items
    tools: bytes = b"[]"  # tools from the items of the request rather than from the request itself


class WireRequest(msgspec.Struct, frozen=True):
    """One HTTP request. `PrefixCache` may have removed the known items from its body."""

    body: bytes
    headers: Mapping[str, str] = {}
    query: Mapping[str, str] = {}
    verb: Verb = "generate"
    model: str = ""  # from the path
    known_items: Sequence[bytes] = ()  # items that were removed from the body
    history: History | None = None  # history of exactly these items, to be extended
    uncut_body: bytes = b""  # body before items were removed; empty if none were
    earlier: EarlierReplies | None = None  # replies that the request may refer to
    over_socket: bool = False  # it arrived as an event of a WebSocket

    @property
    def received_body(self) -> bytes:
        """The body as received."""
        return self.uncut_body or self.body


class Stream(Protocol):
    """Encoder for one streamed reply, event by event."""

    @property
    def media(self) -> str:
        """Content type of the reply."""

    def begin(self, usage: Usage | None = None) -> bytes:
        """Encode what precedes the first event. `usage` counts the prompt's tokens, if they are known yet."""

    def event(self, event: ReplyEvent) -> bytes:
        """Encode one event. `Done` becomes the terminal event."""

    def error(self, error: TurngateError) -> bytes: ...


class StorableStream(Stream, Protocol):
    """Encoder for a reply that can be stored under its id. Dialects that set `Call.store` or have a WebSocket open only such streams."""

    def whole(self, done: Done) -> bytes:
        """Encode the whole reply."""

    def empty(self) -> bytes:
        """Encode the events of a reply for which nothing is sampled."""

    def record(self) -> ReplyRecord:
        """Return the reply, once it is complete."""


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
        """Request field that contains the conversation."""

    @property
    def request_type(self) -> type:
        """The type of a request's body."""

    @property
    def error_type(self) -> type:
        """The type of an error's body."""

    @property
    def key_header(self) -> str:
        """Request header for the key besides `Authorization`, or empty if there is none."""

    @property
    def request_id_header(self) -> str:
        """Response header for the provider's request id, or empty if it has none."""

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        """Return the secret that the caller sent, or an empty string."""

    def decode(self, wire: WireRequest) -> Call: ...

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call | None:
        """Build the call for a request that differs from an earlier one only in its headers and history.

        `call` is the earlier call. Return None if the whole request must be decoded.
        """

    def read_stored_history(self, raws: Sequence[bytes]) -> History:
        """Read messages as a trace stores them."""

    def read_stored_tools(self, raw: bytes) -> Tools:
        """Read tools as a trace stores them."""

    def open_stream(self, call: Call) -> Stream: ...

    def encode_reply(self, call: Call, done: Done) -> bytes:
        """Encode a reply that is not streamed."""

    def encode_count(self, tokens: int) -> bytes:
        """Encode the reply to a request that counts prompt tokens."""

    def encode_models(self, names: Sequence[str], created: int) -> bytes: ...

    def encode_model(self, name: str, created: int) -> bytes: ...

    def error_status(self, error: TurngateError) -> int:
        """Return the HTTP status that the provider uses for this error."""

    def encode_error(self, error: TurngateError) -> bytes: ...

    def sends_in_stream(self, error: TurngateError) -> bool:
        """Return whether the provider sends this error inside the stream, even as its first event."""
