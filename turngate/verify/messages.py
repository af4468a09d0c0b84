"""Decode the messages and tools of a session's nodes from their dialect, and compare messages independently of the gateway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from math import isfinite
from typing import Literal

import msgspec

from turngate.dialects import decode_stored_tools
from turngate.dialects.chat import Chat
from turngate.dialects.gemini import Gemini
from turngate.dialects.messages import Messages
from turngate.dialects.messages_history import MessagesHistory, MessagesTools
from turngate.dialects.responses import Responses
from turngate.errors import BadRequest
from turngate.types import History, Json, Message, Tool
from turngate.verify.store_reader import (
    DECODE_ERRORS,
    StoredContext,
    StoredNode,
    StoredPreamble,
    StoredSession,
    StoredTurn,
    path,
)

Change = Literal["", "thinking", "spelling", "whitespace", "ids", "words"]
_STANDARD_TEXTS = {
    "[System: Empty message content sanitised to satisfy protocol]",
    "(no content)",
}  # sent by LiteLLM and Claude Code in place of an empty answer
_items = msgspec.json.Decoder(list[msgspec.Raw])
_message = msgspec.json.Decoder(Message)
_MESSAGE_ERRORS = (BadRequest, KeyError, *DECODE_ERRORS)


def compute_digest(tools: Sequence[Tool], kwargs: bytes) -> bytes:
    """Compute the digest of a preamble, which consists of tools and template arguments. The order of keys in the tools does not matter."""
    meaning = blake2b(json.dumps([tool.wire for tool in tools], sort_keys=True).encode(), digest_size=16).digest()
    return blake2b(meaning + kwargs, digest_size=16).digest()


class NodeMessages:
    """The decoded messages of each node. If a node's messages cannot be decoded, the reason is in `errors`."""

    def __init__(self, session: StoredSession) -> None:
        self._session = session
        self._by_node: dict[int, tuple[Message, ...]] = {}
        self.last_items: dict[int, tuple[Message, ...]] = {}
        self.item_counts: dict[int, int] = {}  # wire items of each context; an item may decode to several messages
        self.errors: dict[int, str] = {}
        self._tools: dict[tuple[bytes, str], tuple[Tool, ...] | str] = {}
        for node in session.nodes:
            try:
                self._by_node[node.id] = self._decode_node(node)
            except _MESSAGE_ERRORS as error:
                self.errors[node.id] = str(error)

    def of(self, node: StoredNode) -> tuple[Message, ...]:
        return self._by_node.get(node.id, ())

    def reply(self, turn: StoredTurn) -> Message:
        return next(iter(self.of(turn)), Message("assistant"))

    def up_to(self, node: StoredNode | None) -> list[Message]:
        """Return all messages from the root to the end of `node`."""
        return [message for n in path(node) for message in self.of(n)]

    def is_readable(self, node: StoredNode) -> bool:
        return not any(n.id in self.errors for n in path(node))

    def preamble(self, context: StoredContext) -> StoredPreamble | None:
        return self._session.preambles.get(context.info.preamble)

    def tools(self, context: StoredContext) -> tuple[Tool, ...] | None:
        """Return the tools that a context offers, or None if they are not stored or cannot be read."""
        found = self.tools_or_error(context)
        return None if isinstance(found, str) else found

    def tools_or_error(self, context: StoredContext) -> tuple[Tool, ...] | str:
        """Return the tools that a context offers, or an error message.

        Tools that were sent in several dialects are stored only once, in the form of the first dialect.
        """
        digest = context.info.preamble
        stored = self._session.preambles.get(digest)
        if stored is None:
            return "the tools of its call are not stored"
        error = ""
        dialects = [c.info.dialect for c in self._session.contexts if c.info.preamble == digest]
        for dialect in dict.fromkeys([context.info.dialect, *dialects]):
            key = digest, dialect
            if key not in self._tools:
                self._tools[key] = self._decode_tools(digest, dialect, stored)
            found = self._tools[key]
            if not isinstance(found, str):
                return found
            error = error or found
        return error

    def _decode_tools(self, digest: bytes, dialect: str, stored: StoredPreamble) -> tuple[Tool, ...] | str:
        try:
            tools = decode_stored_tools(dialect, stored.tools)
        except _MESSAGE_ERRORS as error:
            return f"the tools of its call cannot be read: {error}"
        if compute_digest(tools, stored.kwargs) != digest:
            return "the tools or template arguments stored under its digest do not match the digest"
        return tools

    def _decode_node(self, node: StoredNode) -> tuple[Message, ...]:
        if isinstance(node, StoredTurn):
            return (_message.decode(node.row.messages),)
        history = self._decode_history(node)
        items = [history.decode(n) for n in range(len(history.raws))]
        self.item_counts[node.id] = len(items)
        self.last_items[node.id] = items[-1] if items else ()
        return tuple(message for item in items for message in item)

    def _decode_history(self, context: StoredContext) -> History:
        raws = [bytes(item) for item in _items.decode(context.row.messages)]
        match context.info.dialect:
            case "chat":
                return Chat().read_stored_history(raws)
            case "responses":
                return Responses().read_stored_history(raws)
            case "gemini":
                return Gemini().read_stored_history(raws)
            case "messages":
                stored = self._session.preambles.get(context.info.preamble)
                if stored is None or stored.tools in (b"", b"[]") or b"tool_" not in context.row.messages:
                    return Messages().read_stored_history(raws)
                return MessagesHistory(raws, MessagesTools(stored.tools))  # messages may refer to tools by name
            case other:
                raise BadRequest(f"unknown dialect {other!r}")


def bare_call_id(call_id: str) -> str:
    """Return a call id without the prefixes that wire formats add."""
    return call_id.removeprefix("call_").removeprefix("toolu_")


def order_results(messages: Sequence[Message]) -> list[Message]:
    """Put consecutive tool results in the order of their calls. A call is identified by its id or, failing that, its name."""
    ordered: list[Message] = []
    run: list[tuple[int, Message]] = []
    calls: list[tuple[str, str]] = []
    free: list[int] = []
    for message in [*messages, None]:
        if message is not None and message.role == "tool":
            named = [n for n in free if calls[n][0] == bare_call_id(message.tool_call_id)]
            named = named or [n for n in free if message.tool_call_id == message.name == calls[n][1]]
            position = named[0] if named else -1
            if named:
                free.remove(position)
            run.append((position, message))
            continue
        ordered += _sort_run(run)
        run = []
        if message is None:
            break
        if message.role == "assistant":
            calls = [(bare_call_id(call.id), call.name) for call in message.tool_calls]
            free = list(range(len(calls)))
        ordered.append(message)
    return ordered


def _sort_run(run: list[tuple[int, Message]]) -> list[Message]:
    """Sort messages by position. A message without a position (-1) stays in place, and others do not move past it."""
    out: list[tuple[int, Message]] = []
    for position, message in run:
        at = len(out)
        if position >= 0:
            while at and out[at - 1][0] > position:
                at -= 1
        out.insert(at, (position, message))
    return [message for _, message in out]


def same_meaning(was: Message, now: Message) -> bool:
    """Return whether two messages have the same meaning.

    Differences in call ids, thinking, the JSON formatting of arguments, and trailing whitespace (in answers, also leading whitespace) are
    ignored. A standard text in place of an empty answer counts as empty.
    """
    if was.role != now.role or was.name != now.name or len(was.tool_calls) != len(now.tool_calls):
        return False
    trimmed = _answer_text if was.role == "assistant" else str.rstrip
    return trimmed(was.content) == trimmed(now.content) and all(
        a.name == b.name and _same_json(a.arguments, b.arguments)
        for a, b in zip(was.tool_calls, now.tool_calls, strict=True)
    )


def _answer_text(content: str) -> str:
    """Return the text of an answer, or "" if it is a standard text that some agents send in place of an empty answer."""
    text = content.strip()
    return "" if text in _STANDARD_TEXTS else text


def classify_change(was: Message, now: Message) -> Change:
    """Return how two versions of a message differ, or "" if there is no visible difference."""
    calls = list(zip(was.tool_calls, now.tool_calls, strict=False))
    if not same_meaning(was, now):
        squeezed = msgspec.structs.replace(was, content=now.content)
        return "whitespace" if was.content.split() == now.content.split() and same_meaning(squeezed, now) else "words"
    if any(a.arguments != b.arguments for a, b in calls):
        return "spelling"
    if was.content != now.content:
        return "whitespace"
    if was.reasoning.strip() != now.reasoning.strip():
        return "thinking"
    return "ids" if any(bare_call_id(a.id) != bare_call_id(b.id) for a, b in calls) else ""


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(_plain(json.loads(one or "{}")) == _plain(json.loads(other or "{}")))
    except (ValueError, RecursionError):
        return one.strip() == other.strip()


def _plain(value: Json) -> Json:
    """Return a copy of a JSON value that equals only copies of the same value, even though `True == 1` in Python.

    Raise `ValueError` if a number was too large to parse: all such numbers become infinity and would be equal.
    """
    match value:
        case bool():
            return (value,)  # no JSON value is a tuple
        case float() if not isfinite(value):
            raise ValueError("a number is not finite")
        case list():
            return [_plain(v) for v in value]
        case dict():
            return {k: _plain(v) for k, v in value.items()}
        case _:
            return value
