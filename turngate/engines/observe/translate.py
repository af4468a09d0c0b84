"""A call as what it means, for an endpoint that speaks another dialect. The relays of observe mode write it down anew with this.

A relay has one function that turns a request into a body of its endpoint's format (`Written`). What that format has no word
for is either refused by name, where the answer would not be the one that was asked for, or left out and said to be lost.
No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from turngate.engines.base import RelayRequest
from turngate.errors import BadRequest, ContextOverflow, EngineRejected
from turngate.types import Call, Constraint, Json, Message, Sampling, Tool

NEUTRAL = msgspec.structs.asdict(Sampling())
SHRINKS = 2  # how often an answer is made shorter so that it fits
_MODELS = 64  # of which it is remembered what they refuse
# Never passed on, whatever a dialect says: these are the gateway's own, or belong to one connection.
_HELD_BACK = re.compile(
    "authorization|x-api-key|x-goog-api-key|cookie|host|connection|(content|accept|transfer)-.*", re.IGNORECASE
)


class RelayBody(msgspec.Struct, frozen=True):
    """A body for an endpoint.

    `loose` names what it can be written without, and the words by which an endpoint that does not know it refuses it.
    """

    body: dict[str, Any]
    loose: Mapping[str, tuple[str, ...]] = {}
    lost: tuple[str, ...] = ()  # what of the call it does not say
    biases: tuple[str, ...] = ()  # what of it may change how tokens are drawn, unrecorded so far

    def refused(self, refusal: str) -> set[str]:
        """What of it the endpoint does not want."""
        said = refusal.lower()
        return {name for name, words in self.loose.items() if any(word.lower() in said for word in words)}


class RejectedFields:
    """What an endpoint has refused by name, model by model."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}

    def of(self, model: str) -> frozenset[str]:
        return self._names.get(model, frozenset())

    def add(self, model: str, names: set[str]) -> None:
        if len(self._names) >= _MODELS and model not in self._names:  # agents may ask for any name
            self._names.pop(next(iter(self._names)))
        self._names[model] = self.of(model) | names


class RelayMessage(msgspec.Struct, frozen=True):
    """One message, with the endpoint's own words for it where it is a turn of its own that has to be given back as it was."""

    message: Message
    turn: msgspec.Raw | None = None


class _Verbatim(msgspec.Struct):
    ids: list[str]
    turn: msgspec.Raw


_verbatim = msgspec.json.Decoder(_Verbatim)


def encode_verbatim(turn: Json, ids: Sequence[str]) -> bytes:
    """A turn for `RelayChunk.verbatim`: in the endpoint's words, and with the ids that it gave its calls."""
    return msgspec.json.encode({"ids": ids, "turn": turn})


def read_messages(request: RelayRequest) -> list[RelayMessage]:
    """The messages of a call. Results name the calls that they answer by the endpoint's own ids, and by tool."""
    history = request.call.history
    said: list[RelayMessage] = []
    calls: dict[str, tuple[str, str]] = {}  # the agent's id of a call → the endpoint's, and the tool's name
    taken: set[str] = set()
    for index in range(len(history.raws)):
        known = request.verbatim.get(index)
        own = _verbatim.decode(known) if known else None
        for message in history.decode(index):
            if message.unsupported:
                raise BadRequest(message.unsupported, param=message.unsupported.partition(": ")[0])
            if message.role == "assistant":
                ids = own.ids if own is not None else [_make_unique(call.id, taken) for call in message.tool_calls]
                for call, its in zip(message.tool_calls, ids, strict=False):
                    calls[call.id] = its, call.name
                renamed = [msgspec.structs.replace(c, id=its) for c, its in zip(message.tool_calls, ids, strict=False)]
                spoken = msgspec.structs.replace(message, tool_calls=tuple(renamed))
                said.append(RelayMessage(spoken, own.turn if own is not None else None))
            elif message.role == "tool":
                its, name = calls.get(message.tool_call_id, (message.tool_call_id, ""))
                named = msgspec.structs.replace(message, tool_call_id=its, name=message.name or name)
                said.append(RelayMessage(named))
            else:
                said.append(RelayMessage(message))
    return said


def _make_unique(call_id: str, taken: set[str]) -> str:
    """Some agents count their calls anew in every turn; most endpoints want an id to stand for one call."""
    found = call_id
    while found in taken:
        found = f"{call_id}_{len(taken)}"
    taken.add(found)
    return found


def split_system_prompt(said: list[RelayMessage]) -> tuple[str, list[RelayMessage]]:
    """The system prompt, and what follows it. Several system messages in a row are one."""
    count = next((n for n, one in enumerate(said) if one.message.role != "system"), len(said))
    return "\n\n".join(one.message.content for one in said[:count] if one.message.content), said[count:]


def list_tools(call: Call) -> tuple[Tool, ...]:
    return call.tools.decode() if call.tools is not None else ()


def list_allowed_tools(constraint: Constraint, tools: Sequence[Tool]) -> tuple[str, ...]:
    """The tools among which a reply has to choose, where those are not all."""
    names = [choice["properties"]["name"]["const"] for choice in constraint.schema["items"]["anyOf"]]
    return tuple(names) if set(names) != {tool.name for tool in tools} else ()


def reasoning_effort(call: Call) -> str:
    """How hard the agent wants the model to think, where it says so."""
    return str(call.template_hints.get("reasoning_effort") or "")


def wants_thinking(call: Call) -> bool | None:
    """Whether the agent wants the model to think at all, where it says so."""
    if reasoning_effort(call):
        return reasoning_effort(call) != "none"
    told = call.template_hints.get("enable_thinking")
    return None if told is None else bool(told)


def parse_arguments(text: str) -> dict[str, Json]:
    """The arguments of a call, for formats that know only objects. What the model wrote wrongly is shown to it as it was."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": text}


def list_unsupported(call: Call, *sayable: str) -> list[str]:
    """What an agent may ask of any model's thinking and style, and few endpoints have a word for."""
    asked = [name for name in ("thinking_budget", "verbosity") if call.template_hints.get(name) is not None]
    asked += ["chat_template_kwargs"] if call.template_kwargs else []
    return [name for name in asked if name not in sayable]


def shrink_to_fit(request: RelayRequest, written: RelayBody, error: ContextOverflow) -> RelayRequest | None:
    """The same call with a bound on its answer that leaves room for the prompt, where the bound was all that was too large.

    An agent of another dialect asks for as long an answer as its own provider's models can give.
    """
    bound = next((written.body[name] for name in _BOUNDS if name in written.body), None)
    if bound is None or error.limit is None or error.size is None:
        return None
    room = error.limit - (error.size - int(bound))
    return msgspec.structs.replace(request, max_tokens=room) if 0 < room < bound else None


_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def translate_pinned(endpoint: str, sampling: Sampling, names: Mapping[str, str]) -> dict[str, Json]:
    """The session's sampling under the endpoint's `names`, less what is neutral. All of it can be said, or none is."""
    values = {name: value for name, value in msgspec.structs.asdict(sampling).items() if value != NEUTRAL[name]}
    unsayable = [name for name in values if name not in names]
    if unsayable:
        raise EngineRejected(
            f"this session pins {', '.join(unsayable)}, for which {endpoint} has no word; open it without"
        )
    return {names[name]: value for name, value in values.items()}


def translate_sampling(
    call: Call, names: Mapping[str, str], without: frozenset[str]
) -> tuple[dict[str, Json], list[str]]:
    """The agent's own sampling under the endpoint's `names`, and what of it gets lost."""
    values = {name: value for name, value in call.sampling.items() if value != NEUTRAL[name]}
    sayable = {names[name]: value for name, value in values.items() if name in names and names[name] not in without}
    return sayable, [name for name in values if name not in names or names[name] in without]


def parse_fields(name: str, json: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object in the agent's body, each as the agent wrote it."""
    try:
        return _fields(json) or {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{name} is not a JSON object: {error}") from None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


def select_headers(request: RelayRequest, dialect: str) -> dict[str, str]:
    """The agent's headers that go along to an endpoint of its own dialect. Never a key."""
    if request.call.dialect != dialect:
        return {}
    return {name: value for name, value in request.call.forwarded_headers.items() if not _HELD_BACK.fullmatch(name)}
