"""Compare messages by meaning, not by bytes.

Agents rewrite their history. They change the whitespace or the key order of arguments, replace "" with `null` or a placeholder, trim
text, turn strings into parts, rename call ids and drop reasoning. None of that changes the meaning. `RequestMessages` decodes the messages
of one request, and computes digests of their meaning, only when needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b

import orjson

from turngate.types import History, Json, Message

DIGEST_SIZE = 16
# Texts that LiteLLM and Claude Code send in place of an empty answer, because some providers reject empty text.
_EMPTY_TEXTS = ("[System: Empty message content sanitised to satisfy protocol]", "(no content)")
_FRACTION = re.compile(r"[0-9][.eE]")  # found in every JSON text with a number that is not written as an integer


class RequestMessages:
    """The messages of one request, decoded on demand."""

    def __init__(self, history: History, preamble: bytes) -> None:
        self.history = history
        self.preamble = preamble
        self.raws = history.raws
        self._messages: dict[int, tuple[Message, ...]] = {}
        self._meanings: dict[int, bytes] = {}
        # For each message index: the positions of the call ids in the preceding assistant message.
        self._orders: dict[int, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self.raws)

    def messages(self, index: int) -> tuple[Message, ...]:
        if index not in self._messages:
            self._messages[index] = self.history.decode(index)
        return self._messages[index]

    def peek(self, index: int) -> tuple[Message, ...] | None:
        """Return the messages at `index` if they have already been decoded, or None."""
        return self._messages.get(index)

    def put(self, index: int, messages: tuple[Message, ...]) -> None:
        """Set the messages at `index`, unless they are already set. They must come from a request with the same bytes at this index."""
        self._messages.setdefault(index, messages)

    def messages_from(self, start: int = 0) -> list[Message]:
        return [message for index in range(start, len(self)) for message in self.messages(index)]

    def meaning(self, index: int) -> bytes:
        if index not in self._meanings:
            digest = meaning_digest(self.messages(index), self._call_order(index))
            if any(message.unsupported for message in self.messages(index)):
                # Content that we cannot decode, such as an image, is compared by its bytes.
                digest = blake2b(digest + self.raws[index], digest_size=DIGEST_SIZE).digest()
            self._meanings[index] = digest
        return self._meanings[index]

    def meanings(self, start: int, stop: int) -> bytes:
        return b"".join(self.meaning(i) for i in range(start, stop))

    def assistant(self, index: int) -> Message | None:
        """Return the message at `index` if it is a single assistant message, or None."""
        match self.messages(index):
            case (Message(role="assistant") as message,):
                return message
            case _:
                return None

    def _call_order(self, index: int) -> dict[str, int]:
        """Return the positions of the tool calls that the message at `index` may answer, by call id.

        The position identifies a call, because agents may rename call ids but keep their order.
        """
        if not any(m.role == "tool" for m in self.messages(index)):
            return {}
        start = index
        while start > 0 and start not in self._orders:
            answers = [m for m in self.messages(start - 1) if m.role == "assistant"]
            if answers:
                self._orders[start] = {call.id: n for n, call in enumerate(answers[-1].tool_calls)}
            else:
                start -= 1
        for at in range(start, index):  # consecutive results answer the same turn
            self._orders[at + 1] = self._orders.get(start, {})
        return self._orders.get(index, {})


def meaning_digest(messages: Sequence[Message], call_order: dict[str, int]) -> bytes:
    return blake2b(orjson.dumps([_normalize(m, call_order) for m in messages]), digest_size=DIGEST_SIZE).digest()


def reasoning_digest(reasoning: str) -> bytes:
    return (
        blake2b(reasoning.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if reasoning.strip()
        else b""
    )


def exact_digest(message: Message) -> bytes:
    """Return a digest of a message's exact text, tool names and unprefixed call ids. It distinguishes answers with the same meaning."""
    # Dialects add different prefixes to the same id.
    calls = [[call.id.removeprefix("call_").removeprefix("toolu_"), call.name] for call in message.tool_calls]
    content = [_escape_surrogates(message.content), calls]
    return blake2b(orjson.dumps(content), digest_size=8).digest()


def argument_sizes(message: Message) -> tuple[int, ...]:
    """Return the length of the normalized arguments of each tool call."""
    return tuple(len(normalize_arguments(call.arguments)) for call in message.tool_calls)


def tools_digest(wire: Json) -> bytes:
    # Not orjson: schemas may contain numbers that do not fit into 64 bits.
    return blake2b(json.dumps(wire, sort_keys=True).encode(), digest_size=DIGEST_SIZE).digest()


def _normalize(message: Message, call_order: dict[str, int]) -> list[Json]:
    if message.role == "assistant":
        text = _escape_surrogates(message.content.strip())
        text = "" if text in _EMPTY_TEXTS else text
        return ["assistant", text, [[call.name, normalize_arguments(call.arguments)] for call in message.tool_calls]]
    # Leading whitespace may be indentation, so only the end is trimmed.
    text = _escape_surrogates(message.content.rstrip())
    if message.role == "tool":
        return ["tool", text, call_order.get(message.tool_call_id, message.tool_call_id)]
    return [message.role, text, message.name]


def normalize_arguments(text: str) -> str:
    """Return a tool call's JSON arguments in a canonical form. Text that is not JSON is trimmed."""
    try:
        value = orjson.loads(text or "{}")
        # JavaScript agents write 1.0 as 1.
        value = _floats_to_ints(value) if _FRACTION.search(text) else value
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, TypeError, RecursionError):  # not JSON, or nested too deeply
        return _escape_surrogates(text.strip())


def _floats_to_ints(value: Json) -> Json:
    if isinstance(value, str):  # the most common type
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, dict):
        return {k: _floats_to_ints(v) for k, v in value.items()}
    return [_floats_to_ints(v) for v in value] if isinstance(value, list) else value


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode. Equal texts stay equal."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
