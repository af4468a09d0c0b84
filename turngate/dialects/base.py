"""The `Dialect` interface, which each wire format implements. Dialects do no I/O.

A dialect declares its routes, where clients put their key, what its errors look like and how its streams end. The server registers the
routes of every dialect. The rest of the gateway does not depend on the wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from turngate.errors import TurngateError
from turngate.types import Call, Done, History, ReplyEvent, Tools, Usage

Verb = Literal["generate", "stream", "count"]


class Route(msgspec.Struct, frozen=True):
    """A route of a dialect. `path` may contain `{model}` as a placeholder for the model name. All routes accept POST requests."""

    path: str
    verb: Verb = "generate"
    socket: bool = False  # a GET of this path opens a WebSocket, over which calls may also arrive


class EarlierReply(msgspec.Struct, frozen=True):
    """An earlier reply of the session.

    `history` is the history of the call that the reply answered, and `output` contains the reply's items.
    """

    history: History
    output: Sequence[bytes]


class EarlierReplies(Protocol):
    """The earlier replies that a request may refer to by id. Both methods return None if the id is unknown."""

    def find(self, reply_id: str) -> EarlierReply | None: ...

    def find_item(self, item_id: str) -> bytes | None: ...


class ReplyRecord(msgspec.Struct, frozen=True):
    """A reply to be stored under its id. Its JSON is the concatenation of `head`, `echo` and `tail`.

    `echo` repeats fields of the request. It is usually the same for all replies of a session, so each distinct value is stored only
    once per session.
    """

    id: str
    head: bytes
    echo: bytes
    tail: bytes
    output: tuple[bytes, ...]  # the reply's output items
    tools: bytes = b"[]"  # tools that were declared in input items instead of the request's `tools` field


class WireRequest(msgspec.Struct, frozen=True):
    """A request for a reply or for a count of prompt tokens. `body` may lack items that `PrefixCache` has already decoded."""

    body: bytes
    headers: Mapping[str, str] = {}
    query: Mapping[str, str] = {}
    verb: Verb = "generate"
    model: str = ""  # the model name in the path, if the route has one
    known_items: Sequence[bytes] = ()  # items that were removed from the body
    history: History | None = None  # history of exactly the known items, which the new items extend
    uncut_body: bytes = b""  # the body before items were removed; empty if none were removed
    earlier: EarlierReplies | None = None  # replies that the request may refer to
    over_socket: bool = False  # the request arrived as an event over a WebSocket

    @property
    def received_body(self) -> bytes:
        """The body as received, before any items were removed."""
        return self.uncut_body or self.body


class Stream(Protocol):
    """Encoder for the events of one streamed reply."""

    @property
    def media(self) -> str:
        """Content type of the reply."""

    def begin(self, usage: Usage | None = None) -> bytes:
        """Return the bytes that precede the first event. `usage` holds the prompt's token count if it is already known."""

    def event(self, event: ReplyEvent) -> bytes:
        """Encode one event. The encoding of `Done` ends the stream."""

    def error(self, error: TurngateError) -> bytes: ...


class StorableStream(Stream, Protocol):
    """Encoder for a reply that can be stored under its id.

    A dialect that sets `Call.store` or has a WebSocket route must return a `StorableStream` from `open_stream`.
    """

    def whole(self, done: Done) -> bytes:
        """Encode the whole reply as one JSON object, for a call that is not streamed."""

    def empty(self) -> bytes:
        """Encode all events of an empty reply, for a request that turns generation off."""

    def record(self) -> ReplyRecord:
        """Return the record of the reply. The reply must be complete."""


class Dialect(Protocol):
    """One wire format: it decodes requests into calls, and encodes replies and errors."""

    @property
    def name(self) -> str: ...

    @property
    def routes(self) -> tuple[Route, ...]: ...

    @property
    def path_prefix(self) -> str:
        """Path prefix that suggests this dialect if neither the route nor the headers of a request do. The longest matching prefix wins."""

    @property
    def list_field(self) -> str:
        """Name of the request field that contains the conversation: `messages`, `input` or `contents`."""

    @property
    def request_type(self) -> type:
        """The Python type of a request body, from which the OpenAPI schema is generated."""

    @property
    def error_type(self) -> type:
        """The Python type of an error body, from which the OpenAPI schema is generated."""

    @property
    def key_header(self) -> str:
        """Name of a request header that may contain the key instead of `Authorization`, or an empty string if there is none."""

    @property
    def request_id_header(self) -> str:
        """Name of the response header in which the provider sends a request id, or an empty string if it sends none."""

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        """Return the key that the client sent, or an empty string if it sent none."""

    def decode(self, wire: WireRequest) -> Call: ...

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call | None:
        """Return the call for a request that differs from an earlier request only in its headers and history.

        `call` is the call that was decoded from the earlier request. Return None if `decode` must be called instead.
        """

    def read_stored_history(self, raws: Sequence[bytes]) -> History:
        """Return a history of messages that were loaded from a trace."""

    def read_stored_tools(self, raw: bytes) -> Tools:
        """Return tools that were loaded from a trace."""

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
        """Return whether the provider reports this error as a stream event with status 200, even if nothing has been streamed yet."""
