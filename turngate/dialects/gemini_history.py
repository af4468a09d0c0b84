"""Decode Gemini conversations: convert the contents of a request to messages.

A conversation is a list of contents, each with a role and a list of parts. Agents differ in how they split a turn into contents: streaming
SDKs keep every chunk as a separate content, while Gemini CLI joins the chunks. Consecutive contents with the same role are therefore
treated as one turn.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from turngate.dialects.wire import DECODE_ERRORS, decode_text, describe_error, field_error, is_given, placeholder
from turngate.errors import BadRequest
from turngate.types import History, Json, Message, ToolCall

T = TypeVar("T")
Speaker = Literal["system", "user", "model"]

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raws = msgspec.json.Decoder(list[msgspec.Raw])

# One of these fields, or of `_MEDIA`, determines the kind of a part. Fields in `_EXTRA_FIELDS` may accompany it.
_KINDS = ("text", "functionCall", "functionResponse")
_MEDIA = ("inlineData", "fileData")  # only a Gemini endpoint can read them
_EXTRA_FIELDS = ("thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution")
_SPEAKERS: dict[str, Speaker] = {"": "user", "user": "user", "function": "user", "model": "model", "system": "system"}
# Most clients write the role last, in one of these forms. If the role belonged to a nested object, another bracket would follow it.
_ROLE_ENDINGS: tuple[tuple[Speaker, tuple[bytes, ...]], ...] = (
    ("model", (b',"role":"model"}', b', "role": "model"}')),
    ("user", (b',"role":"user"}', b', "role": "user"}')),
)
_OWN_SIGNATURE = b"tg1."  # prefix of thought signatures that this gateway created
# Gemini requires the arguments of a call to be an object. If a model writes anything else, it is sent as text in this field.
RAW_ARGUMENTS = "__arguments__"


def to_camel(name: str) -> str:
    """Convert a `snake_case` field name to `camelCase`. Other names are returned unchanged."""
    if "_" not in name.strip("_"):
        return name
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)


def read_fields(raw: msgspec.Raw | bytes, where: str) -> dict[str, msgspec.Raw]:
    """Return the non-null fields of an object as raw JSON, by their `camelCase` names."""
    try:
        fields = _fields.decode(raw)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None
    return {to_camel(name): value for name, value in fields.items() if is_given(value)}


def read_items(raw: msgspec.Raw | bytes, where: str) -> list[msgspec.Raw]:
    """Return the items of a list as raw JSON. A single object is treated as a list of one item."""
    plain = bytes(raw)
    if plain.startswith(b"{"):
        return [msgspec.Raw(plain)]
    try:
        return _raws.decode(raw)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None


def read_json(raw: msgspec.Raw, where: str) -> Json:
    """Decode any JSON value."""
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None


def read_field(fields: dict[str, msgspec.Raw], name: str, kind: type[T], default: T, where: str) -> T:
    """Decode one field of an object, or return the default if it is absent."""
    if name not in fields:
        return default
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}.{name}: {describe_error(error)}", param=f"{where}.{name}") from None


def encode_signature(reasoning: str) -> str:
    """Encode reasoning as a thought signature. Most agents send signatures back, but not the reasoning itself."""
    return base64.urlsafe_b64encode(_OWN_SIGNATURE + reasoning.encode()).decode()


def decode_signature(signature: str) -> str | None:
    """Return the reasoning that `encode_signature` encoded, or None if the signature was created elsewhere.

    An agent can forge a signature, so the result is only the agent's claim about what the model thought.
    """
    try:
        plain = base64.b64decode(signature.translate(_STANDARD_ALPHABET), validate=True)
        return plain.removeprefix(_OWN_SIGNATURE).decode() if plain.startswith(_OWN_SIGNATURE) else None
    except (binascii.Error, ValueError):
        return None


_STANDARD_ALPHABET = str.maketrans("-_", "+/")


class _Turn(msgspec.Struct):
    """Consecutive contents of the same speaker."""

    speaker: Speaker
    contents: list[bytes]
    at: int  # index of the turn's first content in the request


class GeminiHistory:
    """The turns of one request. Each is decoded on demand. The system instruction, if any, is the first turn.

    `before` is the history of an earlier request whose contents are a prefix of `items`. `stored` means that the items come from a trace,
    in which case the system instruction is one of the items.
    """

    def __init__(
        self, items: Sequence[bytes], system: bytes = b"", *, stored: bool = False, before: History | None = None
    ) -> None:
        self.items = items
        self._system = system
        self._turns: list[_Turn] = []
        self.raws: list[bytes] = []
        start = 0
        turn: _Turn | None = None  # the turn being built
        if isinstance(before, GeminiHistory) and before._system == system and before._turns:
            *self._turns, last = before._turns
            self.raws = before.raws[:-1]
            turn, start = _Turn(last.speaker, last.contents.copy(), last.at), len(before.items)
        elif system:
            turn = _Turn("system", [system], -1)
        for at in range(start, len(items)):
            speaker = _read_speaker(items[at], at)
            if speaker == "system" and not stored:
                raise field_error(f"contents[{at}].role", "must not be 'system'; use systemInstruction")
            if turn is not None and turn.speaker == speaker != "system":
                turn.contents.append(items[at])
            else:
                self._end(turn)
                turn = _Turn(speaker, [items[at]], at)
        self._end(turn)

    def extend(self, items: Sequence[bytes]) -> GeminiHistory:
        return GeminiHistory(items, self._system, before=self)

    def _end(self, turn: _Turn | None) -> None:
        if turn is not None:
            self._turns.append(turn)
            self.raws.append(b",".join(turn.contents))

    def decode(self, index: int) -> tuple[Message, ...]:
        turn = self._turns[index]
        match turn.speaker:
            case "system":
                return (Message("system", _decode_system(_read_parts(turn))),)
            case "model":
                return (_decode_model(_read_parts(turn)),)
            case "user":
                before = self._turns[index - 1] if index else None
                return _decode_user(turn, before if before is not None and before.speaker == "model" else None)


def build_system_content(raw: msgspec.Raw) -> bytes:
    """Convert the system instruction to a `Content` object with the role `system`. A role in the instruction is ignored."""
    parts = read_fields(raw, "systemInstruction").get("parts", msgspec.Raw(b"[]"))
    return b'{"role":"system","parts":' + bytes(parts) + b"}"


def _read_speaker(raw: bytes, at: int) -> Speaker:
    for speaker, ends in _ROLE_ENDINGS:
        if raw.endswith(ends):
            return speaker
    where = f"contents[{at}]"
    role = read_field(read_fields(raw, where), "role", str, "", where)
    if role not in _SPEAKERS:
        raise field_error(f"{where}.role", f"must be user or model, not {role!r}")
    return _SPEAKERS[role]


def _read_parts(turn: _Turn) -> Iterator[tuple[str, dict[str, msgspec.Raw]]]:
    """Yield each part of a turn: its position in the request, and its fields."""
    for offset, raw in enumerate(turn.contents):
        where = f"contents[{turn.at + offset}]" if turn.speaker != "system" else "systemInstruction"
        for n, part in enumerate(
            read_items(read_fields(raw, where).get("parts", msgspec.Raw(b"[]")), f"{where}.parts")
        ):
            yield f"{where}.parts[{n}]", read_fields(part, f"{where}.parts[{n}]")


def _read_kind(part: dict[str, msgspec.Raw], where: str, kinds: Sequence[str], speaker: str) -> str:
    """Return a part's kind, which must be one of `kinds`.

    A part without a kind, such as one with only a signature, is treated as empty text. `speaker` describes what contains the part,
    such as "user content", for the error message.
    """
    for name in part:
        if name in _EXTRA_FIELDS or name in kinds:
            continue
        if name in _KINDS:
            raise field_error(f"{where}.{name}", f"is not allowed in {speaker}")
        raise field_error(
            f"{where}.{name}", "is not supported here; send only text, function calls and function responses"
        )
    return next((name for name in kinds if name in part), "text")


def _decode_system(parts: Iterator[tuple[str, dict[str, msgspec.Raw]]]) -> str:
    texts = []
    for where, part in parts:
        _read_kind(part, where, ("text",), "a system instruction")
        texts.append(read_field(part, "text", str, "", where))
    return "\n".join(texts)


def _decode_model(parts: Iterator[tuple[str, dict[str, msgspec.Raw]]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    message_signature = own_reasoning = ""
    for where, part in parts:
        kind = _read_kind(part, where, ("text", "functionCall"), "model content")
        signature = read_field(part, "thoughtSignature", str, "", where)
        reasoning = decode_signature(signature) if signature else None
        if reasoning is not None:
            own_reasoning, signature = reasoning, ""
        if "functionCall" in part:
            calls.append(_decode_call(part, where, len(calls), signature))
        elif signature:
            message_signature = signature
        if kind == "text":
            thought = read_field(part, "thought", bool, False, where)
            (thoughts if thought else texts).append(read_field(part, "text", str, "", where))
    return Message(
        "assistant", "".join(texts), "".join(thoughts) or own_reasoning, tuple(calls), signature=message_signature
    )


def _decode_call(part: dict[str, msgspec.Raw], where: str, n: int, signature: str) -> ToolCall:
    where = f"{where}.functionCall"
    call = read_fields(part["functionCall"], where)
    name = read_field(call, "name", str, "", where)
    return ToolCall(
        read_field(call, "id", str, "", where) or f"call_{n}", name, _decode_arguments(call, where), signature
    )


def _decode_arguments(call: dict[str, msgspec.Raw], where: str) -> str:
    if "args" not in call:
        return "{}"
    raw = bytes(call["args"])
    if not raw.startswith(b"{"):
        raise field_error(f"{where}.args", "must be an object")
    if raw.find(RAW_ARGUMENTS.encode(), 0, 200) >= 0:
        args = _fields.decode(raw)
        if list(args) == [RAW_ARGUMENTS] and bytes(args[RAW_ARGUMENTS]).startswith(b'"'):
            return read_field(args, RAW_ARGUMENTS, str, "", f"{where}.args")
    return decode_text(raw, f"{where}.args")


def _decode_user(turn: _Turn, model_turn: _Turn | None) -> tuple[Message, ...]:
    """Decode the texts and tool results of a user turn, keeping their order. `model_turn` contains the calls that the results answer."""
    messages: list[Message] = []
    texts: list[str] = []
    unsupported = ""
    calls: _OpenCalls | None = None
    for where, part in _read_parts(turn):
        media = next((name for name in _MEDIA if name in part), "")
        if media:
            texts.append(placeholder(media, bytes(part[media])))
            unsupported = (
                unsupported
                or f"{where}.{media}: images and other media are not supported here; send only text, function calls and function responses"
            )
        elif _read_kind(part, where, ("text", "functionResponse"), "user content") == "text":
            texts.append(read_field(part, "text", str, "", where))
        if "functionResponse" in part:
            if texts:
                messages.append(Message("user", "\n".join(texts), unsupported=unsupported))
                texts, unsupported = [], ""
            if calls is None:
                calls = _OpenCalls(_decode_model(_read_parts(model_turn)).tool_calls if model_turn is not None else ())
            messages.append(_decode_result(part["functionResponse"], f"{where}.functionResponse", calls))
    if texts:
        messages.append(Message("user", "\n".join(texts), unsupported=unsupported))
    if not messages:
        raise field_error(f"contents[{turn.at}].parts", "must contain at least one part")
    return tuple(messages)


class _OpenCalls:
    """The unanswered calls of a model turn. They are indexed by id and by name, because a turn may contain thousands of calls."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._open = dict(enumerate(calls))
        self._ids: dict[str, deque[int]] = {}
        self._names: dict[str, deque[int]] = {}
        for n, call in self._open.items():
            self._ids.setdefault(call.id, deque()).append(n)
            self._names.setdefault(call.name, deque()).append(n)

    def take(self, call_id: str, name: str) -> ToolCall | None:
        """Remove and return the first call with this id, or else the first call with this name. Return None if there is no such call."""
        for candidates in (self._ids.get(call_id), self._names.get(name)):
            while candidates:
                if call := self._open.pop(candidates.popleft(), None):
                    return call
        return None


def _decode_result(raw: msgspec.Raw, where: str, calls: _OpenCalls) -> Message:
    """Decode a tool result. Many clients omit the id; the result then answers the first unanswered call to the function that it names."""
    result = read_fields(raw, where)
    unsupported = media = ""
    if "parts" in result and read_items(result["parts"], f"{where}.parts"):
        unsupported = f"{where}.parts: images and other media are not supported here; send only text, function calls and function responses"
        media = "\n" + placeholder("media", bytes(result["parts"]))
    name, result_id = read_field(result, "name", str, "", where), read_field(result, "id", str, "", where)
    call = calls.take(result_id, name)
    text = _response_text(read_field(result, "response", dict[str, Json], {}, where)) + media
    call_id = call.id if call is not None else result_id or name
    return Message("tool", text, tool_call_id=call_id, name=name, unsupported=unsupported)


def _response_text(response: dict[str, Json]) -> str:
    """Return a tool's response as text for the model.

    Many clients wrap the response in `output` or `result`, or in `error`. These wrappers are removed. "Error: " is put before the text of
    an error that does not begin with "error". An empty response becomes an empty text. Any other object is returned as JSON.
    """
    wrapped = [name for name in ("output", "result") if name in response]
    if len(wrapped) > 1 or not response.keys() <= {*wrapped, "error"}:
        return _to_text(response)
    texts = [_to_text(response[name]) for name in wrapped]
    if response.get("error") is not None:
        texts.append(_error_text(response["error"]))
    return "\n".join(filter(None, texts))


def _to_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _error_text(error: Json) -> str:
    text = _to_text(error)
    return text if text[:5].lower() == "error" else f"Error: {text}"
