"""A branch of a trace in words: its messages in the form that chat templates take, and which of them the model itself sampled."""

from __future__ import annotations

import json

import msgspec

from turngate.dialects import decode_stored_messages, decode_stored_tools
from turngate.dialects.chat import message_to_wire
from turngate.trace.sample import Sample
from turngate.trace.tree import Context, path_to
from turngate.trainers.export.source import Rollout
from turngate.types import Json, Message

_DEEPEST = 64
_message = msgspec.json.Decoder(Message)


class Said(msgspec.Struct, frozen=True):
    message: Message
    node: int  # the one that it is of
    sampled: bool = False


def conversation(rollout: Rollout, row: Sample) -> list[Said]:
    """From the beginning to the end of a row's branch."""
    found: list[Said] = []
    for node in path_to(rollout.nodes[row.branch]):
        raw = rollout.messages[node.id]
        if isinstance(node, Context):
            found += [Said(message, node.id) for message in decode_stored_messages(node.info.dialect, raw)]
        else:
            found.append(Said(_message.decode(raw), node.id, sampled=True))
    return found


def tools(rollout: Rollout, row: Sample) -> list[Json]:
    """Those that the branch's last turn was offered, in OpenAI's form."""
    context = rollout.turn(row.branch).parent
    return [tool.wire for tool in decode_stored_tools(context.info.dialect, rollout.tools(context))]


def spoken(message: Message) -> dict[str, Json]:
    """For a chat template: the arguments of calls as objects. Text that the model wrote for arguments, and is no object, stays text."""
    wire = message_to_wire(message)
    for call in wire.get("tool_calls", ()):
        call["function"]["arguments"] = as_object(call["function"]["arguments"])
    return wire


def as_object(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _shallow(value) else arguments


def _shallow(value: Json) -> bool:
    """Whether every reader of JSON can be given it: most have a limit."""
    level = [value]
    for _ in range(_DEEPEST):
        inside = [v for v in level if isinstance(v, dict | list)]
        level = [child for v in inside for child in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return True
    return False
