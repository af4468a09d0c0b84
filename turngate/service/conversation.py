"""Convert a trace to turns and to a conversation. Long traces take a while, so call these functions in a thread."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.service.config import Clamp
from turngate.service.result import CaptureLevel, ConversationMessage, ConversationToolCall, RolloutTurn
from turngate.service.truncation import Truncator
from turngate.types import Json
from turngate.views.trace import TraceView, TurnView

_ROLES = {"developer": "system"}  # OpenAI's newer name for the system role
_LEVELS: tuple[CaptureLevel, ...] = ("none", "text", "logprobs", "tokens")


def build_turns(view: TraceView, truncator: Truncator) -> list[RolloutTurn]:
    """Build the turns of a result, oldest first. If there are too many, only the newest are included."""
    limit = truncator.clamp.turns
    chosen = view.turns if not limit or len(view.turns) <= limit else view.turns[-limit:]
    if len(chosen) < len(view.turns):
        truncator.notes.append(
            f"turns: the oldest {len(view.turns) - len(chosen):,} of {len(view.turns):,} turns left out"
        )
    lengths = _prompt_lengths(view)
    remaining = truncator.clamp.logprobs
    turns = []
    for index, turn in enumerate(chosen):
        logprobs, remaining = _take_logprobs(index, turn, truncator, remaining)
        has_ids = turn.capture == "tokens"
        message = _parse_message(turn.message)
        turns.append(
            RolloutTurn(
                node=turn.id,
                role=turn.role,
                finish_reason=turn.finish,
                prompt_tokens=lengths[turn.parent] if has_ids else None,
                sampled_tokens=len(turn.ids) if has_ids else None,
                logprobs=logprobs,
                capture=_parse_capture(turn.capture),
                reasoning=truncator.cut_middle(f"turns[{index}].reasoning", message.thought, truncator.clamp.text),
                text=truncator.cut_middle(f"turns[{index}].text", message.text, truncator.clamp.text),
                tool_calls=_build_calls(f"turns[{index}]", message, truncator),
                version_start=turn.version_start,
                version_end=turn.version_end,
            )
        )
    return turns


def _prompt_lengths(view: TraceView) -> dict[int, int]:
    """Return the number of token ids in each prompt, by the id of the context node that ends the prompt."""
    sampled = {turn.id: turn for turn in view.turns}
    lengths: dict[int, int] = {}
    for context in view.contexts.values():  # parents precede their children
        before = 0
        if context.parent is not None:
            turn = sampled[context.parent]
            before = lengths[turn.parent] + len(turn.ids)
        lengths[context.id] = before + len(context.ids)
    return lengths


def _take_logprobs(index: int, turn: TurnView, truncator: Truncator, remaining: int) -> tuple[list[float] | None, int]:
    """Return a turn's log-probabilities (None if they are unknown or do not fit), and how many more values the result can hold."""
    if turn.logprobs is None or (turn.capture != "tokens" and not turn.ids):
        return None, remaining
    if not truncator.clamp.logprobs:
        return turn.logprobs, remaining
    size = len(turn.logprobs)
    if size > remaining:  # a partial list could be mistaken for a complete one
        truncator.notes.append(f"turns[{index}].logprobs: all {size:,} values left out (null); the trace has them")
        return None, remaining
    return turn.logprobs, remaining - size


class _ToolCall(msgspec.Struct, frozen=True):
    id: str = ""
    name: str = ""
    arguments: str = ""


class _Message(msgspec.Struct, frozen=True):
    """The parts of an OpenAI message that a conversation shows."""

    role: str
    text: str
    thought: str
    calls: list[_ToolCall]
    tool_call_id: str


def _parse_message(wire: Json) -> _Message:
    """Parse a message leniently, because agents send messages that do not follow the format.

    Where text is expected, null becomes an empty string, and other values become JSON text.
    """
    message = wire if isinstance(wire, dict) else {"content": wire}
    return _Message(
        role=_to_text(message.get("role")),
        text=_join_parts(message.get("content")),
        thought=_to_text(message.get("reasoning") or message.get("reasoning_content")),
        calls=[_parse_call(call) for call in _to_list(message.get("tool_calls"))],
        tool_call_id=_to_text(message.get("tool_call_id")),
    )


def _parse_call(call: Json) -> _ToolCall:
    if not isinstance(call, dict):
        return _ToolCall(arguments=_to_text(call))
    function = call.get("function") or call.get("custom")
    if not isinstance(function, dict):
        return _ToolCall(id=_to_text(call.get("id")), arguments=_to_text(function))
    arguments = function.get("arguments", function.get("input"))
    return _ToolCall(_to_text(call.get("id")), _to_text(function.get("name")), _to_text(arguments))


def _join_parts(content: Json) -> str:
    """Join the parts of a message's content. A part without text, such as an image, is represented by its type in brackets."""
    if not isinstance(content, list):
        return _to_text(content)
    texts = []
    for part in content:
        if not isinstance(part, dict):
            texts.append(_to_text(part))
        else:
            texts.append(_to_text(part["text"]) if "text" in part else f"[{_to_text(part.get('type')) or 'part'}]")
    return "".join(texts)


def _to_list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _to_text(value: Json) -> str:
    """Convert a JSON value to encodable text. Null becomes an empty string, and values other than strings become JSON text."""
    if value is None:
        return ""
    try:
        return make_encodable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "[nested too deeply to show]"


def _build_calls(field: str, message: _Message, truncator: Truncator) -> list[ConversationToolCall]:
    return [
        ConversationToolCall(
            id=call.id,
            name=call.name,
            arguments=truncator.cut_middle(f"{field}.tool_calls[{n}].arguments", call.arguments, truncator.clamp.text),
        )
        for n, call in enumerate(message.calls)
    ]


def build_messages(view: TraceView) -> list[ConversationMessage]:
    """Build the messages of all branches, in the order of recording. As the trace grows, messages are only appended."""
    unlimited = Truncator(Clamp(text=0))
    branches = _number_branches(view)
    answered: dict[int, TurnView] = {}
    for turn in view.turns:
        answered.setdefault(turn.parent, turn)
    nodes: list[tuple[int, list[Json], TurnView | None, bool]] = [
        *((context.id, context.messages, answered.get(context.id), False) for context in view.contexts.values()),
        *((turn.id, [turn.message], turn, True) for turn in view.turns),
    ]
    messages: list[ConversationMessage] = []
    for node, wires, node_turn, sampled in sorted(nodes, key=lambda entry: entry[0]):
        for wire in wires:
            message = _parse_message(wire)
            messages.append(
                ConversationMessage(
                    cursor=len(messages) + 1,
                    node=node,
                    branch=branches[node],
                    turn_role=node_turn.role if node_turn is not None else "main",
                    role="assistant" if sampled else _ROLES.get(message.role, message.role),
                    text=message.text,
                    reasoning=message.thought,
                    tool_calls=_build_calls("", message, unlimited),
                    tool_call_id=message.tool_call_id,
                    finish_reason=node_turn.finish if sampled and node_turn is not None else "",
                    sampled=sampled,
                )
            )
    return messages


def _number_branches(view: TraceView) -> dict[int, int]:
    """Return the branch number of each node. The first child of a node continues its branch; every other child starts a new one."""
    parents: dict[int, int | None] = {context.id: context.parent for context in view.contexts.values()}
    parents |= {turn.id: turn.parent for turn in view.turns}
    numbers: dict[int, int] = {}
    continued: set[int] = set()
    for node in sorted(parents):
        parent = parents[node]
        if parent is not None and parent not in continued:
            continued.add(parent)
            numbers[node] = numbers[parent]
        else:
            numbers[node] = 1 + max(numbers.values(), default=-1)
    return numbers


def paginate(
    messages: Sequence[ConversationMessage], after: int, limit: int, clamp: Clamp
) -> tuple[list[ConversationMessage], list[str]]:
    """Return at most `limit` messages after a cursor, with long texts truncated, and a note for each text that was truncated."""
    truncator = Truncator(clamp)
    page = []
    for message in messages[after : after + limit]:
        where = f"messages[{message.cursor}]"
        calls = [
            msgspec.structs.replace(
                call, arguments=truncator.cut_middle(f"{where}.tool_calls[{n}].arguments", call.arguments, clamp.text)
            )
            for n, call in enumerate(message.tool_calls)
        ]
        text = truncator.cut_middle(f"{where}.text", message.text, clamp.text)
        reasoning = truncator.cut_middle(f"{where}.reasoning", message.reasoning, clamp.text)
        page.append(msgspec.structs.replace(message, text=text, reasoning=reasoning, tool_calls=calls))
    return page, truncator.notes


def _parse_capture(name: str) -> CaptureLevel:
    return next((level for level in _LEVELS if level == name), "none")  # a different version may have other levels


def lowest_capture(turns: Sequence[RolloutTurn]) -> CaptureLevel:
    return min((turn.capture for turn in turns), key=_LEVELS.index, default="none")
