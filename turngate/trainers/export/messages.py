"""Read the messages of a branch, and convert them to the form that chat templates accept."""

from __future__ import annotations

import json

import msgspec

from turngate.dialects import decode_stored_messages, decode_stored_tools
from turngate.dialects.chat import message_to_wire
from turngate.trace.sample import Sample
from turngate.trace.tree import Context, path_to
from turngate.trainers.export.source import RecordedRollout
from turngate.types import Json, Message

_MAX_DEPTH = 64
_message = msgspec.json.Decoder(Message)


class BranchMessage(msgspec.Struct, frozen=True):
    message: Message
    node: int  # id of the node that contains it
    sampled: bool = False


def read_conversation(rollout: RecordedRollout, row: Sample) -> list[BranchMessage]:
    """Read all messages of a row's branch."""
    found: list[BranchMessage] = []
    for node in path_to(rollout.nodes[row.branch]):
        raw = rollout.messages[node.id]
        if isinstance(node, Context):
            found += [BranchMessage(message, node.id) for message in decode_stored_messages(node.info.dialect, raw)]
        else:
            found.append(BranchMessage(_message.decode(raw), node.id, sampled=True))
    return found


def read_tools(rollout: RecordedRollout, row: Sample) -> list[Json]:
    """Return the tools offered in the last turn of a row's branch, in OpenAI's format."""
    context = rollout.turn(row.branch).parent
    return [tool.wire for tool in decode_stored_tools(context.info.dialect, rollout.tools(context))]


def to_template_message(message: Message) -> dict[str, Json]:
    """Convert a message to the form that chat templates accept.

    The arguments of a tool call become an object. If they are not a JSON object or are nested too deeply, they stay text.
    """
    wire = message_to_wire(message)
    for call in wire.get("tool_calls", ()):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    return wire


def parse_arguments(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _is_shallow(value) else arguments


def _is_shallow(value: Json) -> bool:
    """Return whether a value is nested shallowly enough for common JSON readers."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inside = [v for v in level if isinstance(v, dict | list)]
        level = [child for v in inside for child in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return True
    return False
