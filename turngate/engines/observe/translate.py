"""Translate a call for an endpoint of a different dialect. This module does no I/O.

Each relay has one function that translates a request to its endpoint's format (`RelayBody`). A setting that the format cannot express is
left out and reported as lost. If the answer would be wrong without it (for example, not JSON), the call is rejected instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from turngate.engines.base import RelayRequest
from turngate.errors import BadRequest, ContextOverflow, EngineRejected
from turngate.types import Call, Constraint, Json, Message, Sampling, Tool

NEUTRAL = msgspec.structs.asdict(Sampling())
SHRINKS = 2  # how many times the limit on the answer is lowered to fit the context
_MODELS = 64  # maximum number of models whose rejected fields are remembered
# Headers that are never forwarded, because they belong to the gateway or to one connection.
_NEVER_FORWARDED = re.compile(
    "authorization|x-api-key|x-goog-api-key|cookie|host|connection|(content|accept|transfer)-.*", re.IGNORECASE
)


class RelayBody(msgspec.Struct, frozen=True):
    """A request body for an endpoint.

    `optional` contains the fields that may be left out or replaced, each with the words that identify it in a rejection.
    """

    body: dict[str, Any]
    optional: Mapping[str, tuple[str, ...]] = {}
    lost: tuple[str, ...] = ()  # parts of the call that the endpoint's format cannot express
    biases: tuple[str, ...] = ()  # fields that may bias the sampling

    def find_rejected(self, message: str) -> set[str]:
        """Return the optional fields that a rejection names."""
        text = message.lower()
        return {name for name, words in self.optional.items() if any(word.lower() in text for word in words)}


class RejectedFields:
    """Fields that an endpoint has rejected, by model."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}

    def for_model(self, model: str) -> frozenset[str]:
        return self._names.get(model, frozenset())

    def add(self, model: str, names: set[str]) -> None:
        if len(self._names) >= _MODELS and model not in self._names:  # agents may request models with any name
            self._names.pop(next(iter(self._names)))
        self._names[model] = self.for_model(model) | names


class RelayMessage(msgspec.Struct, frozen=True):
    """A message to relay. `turn` is the message in the endpoint's own format, if it must be sent back unchanged."""

    message: Message
    turn: msgspec.Raw | None = None


class _Verbatim(msgspec.Struct):
    ids: list[str]
    turn: msgspec.Raw


_verbatim = msgspec.json.Decoder(_Verbatim)


def encode_verbatim(turn: Json, ids: Sequence[str]) -> bytes:
    """Encode a turn for `RelayChunk.verbatim`: the turn in the endpoint's format, and the tool-call ids that the endpoint uses."""
    return msgspec.json.encode({"ids": ids, "turn": turn})


def read_messages(request: RelayRequest, clean_id: Callable[[str], str] = str) -> list[RelayMessage]:
    """Decode the messages of a call. Tool results get the call ids that the endpoint uses, and the names of their tools.

    `clean_id` replaces characters that the endpoint does not allow in ids. It can make different ids equal, so it is applied before ids
    are made unique.
    """
    history = request.call.history
    messages: list[RelayMessage] = []
    calls: dict[str, tuple[str, str]] = {}  # the agent's id of a call → the endpoint's id, and the tool's name
    taken: set[str] = set()
    verbatim = {index: _verbatim.decode(stored) for index, stored in request.verbatim.items()}
    fixed = {its for own in verbatim.values() for its in own.ids}  # these ids cannot be renamed
    for index in range(len(history.raws)):
        own = verbatim.get(index)
        for message in history.decode(index):
            if message.unsupported:
                raise BadRequest(message.unsupported, param=message.unsupported.partition(": ")[0])
            if message.role == "assistant":
                new_ids = (_make_unique(clean_id(call.id), taken, fixed) for call in message.tool_calls)
                ids = list(new_ids) if own is None else own.ids
                for call, its in zip(message.tool_calls, ids, strict=False):
                    calls[call.id] = its, call.name
                renamed = [msgspec.structs.replace(c, id=its) for c, its in zip(message.tool_calls, ids, strict=False)]
                spoken = msgspec.structs.replace(message, tool_calls=tuple(renamed))
                messages.append(RelayMessage(spoken, own.turn if own is not None else None))
            elif message.role == "tool":
                its, name = calls.get(message.tool_call_id, (clean_id(message.tool_call_id), ""))
                named = msgspec.structs.replace(message, tool_call_id=its, name=message.name or name)
                messages.append(RelayMessage(named))
            else:
                messages.append(RelayMessage(message))
    return messages


def _make_unique(call_id: str, taken: set[str], fixed: set[str]) -> str:
    """Make a tool-call id unique. Some agents use the same ids in every turn, but most endpoints require unique ids."""
    unique, number = call_id, len(taken)
    while unique in taken or unique in fixed:
        unique, number = f"{call_id}_{number}", number + 1
    taken.add(unique)
    return unique


def split_system_prompt(messages: list[RelayMessage]) -> tuple[str, list[RelayMessage]]:
    """Split the system prompt from the other messages. Several leading system messages are joined."""
    count = next((n for n, entry in enumerate(messages) if entry.message.role != "system"), len(messages))
    return "\n\n".join(entry.message.content for entry in messages[:count] if entry.message.content), messages[count:]


def list_tools(call: Call) -> tuple[Tool, ...]:
    return call.tools.decode() if call.tools is not None else ()


def list_allowed_tools(constraint: Constraint, tools: Sequence[Tool]) -> tuple[str, ...]:
    """List the tools that a reply must choose from. Return an empty tuple if all tools are allowed."""
    names = [choice["properties"]["name"]["const"] for choice in constraint.schema["items"]["anyOf"]]
    return tuple(names) if set(names) != {tool.name for tool in tools} else ()


def reasoning_effort(call: Call) -> str:
    """Return the reasoning effort that the agent requests, or an empty string."""
    return str(call.template_hints.get("reasoning_effort") or "")


def wants_thinking(call: Call) -> bool | None:
    """Return whether the agent wants the model to think, or None if the request does not say."""
    if reasoning_effort(call):
        return reasoning_effort(call) != "none"
    enabled = call.template_hints.get("enable_thinking")
    return None if enabled is None else bool(enabled)


def parse_arguments(text: str) -> dict[str, Json]:
    """Parse a tool call's arguments, for formats that accept only objects. Other text becomes the field `malformed_arguments`."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": text}


def list_unsupported(call: Call, *supported: str) -> list[str]:
    """Return which of `thinking_budget`, `verbosity` and `chat_template_kwargs` the call sets but `supported` does not list."""
    requested = [name for name in ("thinking_budget", "verbosity") if call.template_hints.get(name) is not None]
    requested += ["chat_template_kwargs"] if call.template_kwargs else []
    return [name for name in requested if name not in supported]


def shrink_to_fit(request: RelayRequest, body: RelayBody, error: ContextOverflow) -> RelayRequest | None:
    """Lower the answer's token limit so that the call fits the context. Return None if that is not possible.

    The limit may be too high because an agent of a different dialect chooses it for its own provider's models.
    """
    bound = next((body.body[name] for name in _BOUNDS if name in body.body), None)
    if bound is None or error.limit is None or error.size is None:
        return None
    room = error.limit - (error.size - int(bound))
    return msgspec.structs.replace(request, max_tokens=room) if 0 < room < bound else None


_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def translate_pinned(endpoint: str, sampling: Sampling, names: Mapping[str, str]) -> dict[str, Json]:
    """Return the session's non-neutral sampling settings under the endpoint's `names`. Raise `EngineRejected` if a name is missing."""
    values = {name: value for name, value in msgspec.structs.asdict(sampling).items() if value != NEUTRAL[name]}
    unsupported = [name for name in values if name not in names]
    if unsupported:
        raise EngineRejected(
            f"this session pins sampling settings that the {endpoint} endpoint does not support ({', '.join(unsupported)}); open a session "
            "without them"
        )
    return {names[name]: value for name, value in values.items()}


def translate_sampling(
    call: Call, names: Mapping[str, str], without: frozenset[str]
) -> tuple[dict[str, Json], list[str]]:
    """Return the agent's non-neutral sampling settings under the endpoint's `names`, and a list of the settings that are left out.

    A setting is left out if `names` lacks it, or if the endpoint's name for it is in `without`, the fields that the endpoint has rejected.
    """
    values = {name: value for name, value in call.sampling.items() if value != NEUTRAL[name]}
    translated = {names[name]: value for name, value in values.items() if name in names and names[name] not in without}
    return translated, [name for name in values if name not in names or names[name] in without]


def parse_fields(name: str, json: bytes) -> dict[str, msgspec.Raw]:
    """Parse a JSON object into its raw fields. `name` is the object's name in the error message."""
    try:
        return _fields(json) or {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{name} is not a JSON object: {error}") from None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


def select_headers(request: RelayRequest, dialect: str) -> dict[str, str]:
    """Return the agent's headers to forward. There are none if the endpoint speaks a different dialect. Keys are never forwarded."""
    if request.call.dialect != dialect:
        return {}
    return {
        name: value for name, value in request.call.forwarded_headers.items() if not _NEVER_FORWARDED.fullmatch(name)
    }
