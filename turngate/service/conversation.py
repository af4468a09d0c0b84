"""A trace as turns with their evidence, and as messages that can be read along. Pure; a long one takes its time, so it is for threads."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.service.config import Clamp
from turngate.service.result import Captured, RolloutTurn, Said, SaidCall
from turngate.service.truncation import Cut
from turngate.types import Json
from turngate.views.trace import TraceView, TurnView

_ROLES = {"developer": "system"}  # OpenAI's new name for it
_LEVELS: tuple[Captured, ...] = ("none", "text", "logprobs", "tokens")


def turns(view: TraceView, cut: Cut) -> list[RolloutTurn]:
    """Every turn, oldest first; past the bounds the newest."""
    most = cut.clamp.turns
    chosen = view.turns if not most or len(view.turns) <= most else view.turns[-most:]
    if len(chosen) < len(view.turns):
        cut.told.append(f"turns: {len(view.turns) - len(chosen):,} of {len(view.turns):,} turns left out, the oldest")
    lengths = _lengths(view)
    room = cut.clamp.logprobs
    found = []
    for index, turn in enumerate(chosen):
        logprobs, room = _logprobs(index, turn, cut, room)
        whole = turn.capture == "tokens"
        message = _read(turn.message)
        found.append(
            RolloutTurn(
                node=turn.id,
                role=turn.role,
                finish_reason=turn.finish,
                prompt_tokens=lengths[turn.parent] if whole else None,
                sampled_tokens=len(turn.ids) if whole else None,
                logprobs=logprobs,
                capture=_captured(turn.capture),
                reasoning=cut.middle(f"turns[{index}].reasoning", message.thought, cut.clamp.text),
                text=cut.middle(f"turns[{index}].text", message.text, cut.clamp.text),
                tool_calls=_calls(f"turns[{index}]", message, cut),
                version_start=turn.version_start,
                version_end=turn.version_end,
            )
        )
    return found


def _lengths(view: TraceView) -> dict[int, int]:
    """Of each context: the ids of the prompt that ends with it."""
    sampled = {turn.id: turn for turn in view.turns}
    lengths: dict[int, int] = {}
    for context in view.contexts.values():  # a parent comes before its children
        before = 0
        if context.parent is not None:
            turn = sampled[context.parent]
            before = lengths[turn.parent] + len(turn.ids)
        lengths[context.id] = before + len(context.ids)
    return lengths


def _logprobs(index: int, turn: TurnView, cut: Cut, room: int) -> tuple[list[float] | None, int]:
    if turn.logprobs is None or (turn.capture != "tokens" and not turn.ids):
        return None, room
    if not cut.clamp.logprobs:
        return turn.logprobs, room
    size = len(turn.logprobs)
    if size > room:  # some of them would be mistaken for all
        cut.told.append(
            f"turns[{index}].logprobs: all {size:,} numbers left out, so that it is None; the trace has them"
        )
        return None, room
    return turn.logprobs, room - size


class _Called(msgspec.Struct, frozen=True):
    id: str = ""
    name: str = ""
    arguments: str = ""


class _Message(msgspec.Struct, frozen=True):
    """A message in OpenAI's form, as far as it is shown."""

    role: str
    text: str
    thought: str
    calls: list[_Called]
    tool_call_id: str


def _read(wire: Json) -> _Message:
    """An agent wrote it, and gateways take more than the form says: whatever is no text where one belongs is shown as its JSON."""
    message = wire if isinstance(wire, dict) else {"content": wire}
    return _Message(
        role=_shown(message.get("role")),
        text=_parts(message.get("content")),
        thought=_shown(message.get("reasoning") or message.get("reasoning_content")),
        calls=[_called(call) for call in _listed(message.get("tool_calls"))],
        tool_call_id=_shown(message.get("tool_call_id")),
    )


def _called(call: Json) -> _Called:
    if not isinstance(call, dict):
        return _Called(arguments=_shown(call))
    function = call.get("function") or call.get("custom")
    if not isinstance(function, dict):
        return _Called(id=_shown(call.get("id")), arguments=_shown(function))
    arguments = function.get("arguments", function.get("input"))
    return _Called(_shown(call.get("id")), _shown(function.get("name")), _shown(arguments))


def _parts(content: Json) -> str:
    """Parts are put together; what is no text is named."""
    if not isinstance(content, list):
        return _shown(content)
    found = []
    for part in content:
        if not isinstance(part, dict):
            found.append(_shown(part))
        else:
            found.append(_shown(part["text"]) if "text" in part else f"[{_shown(part.get('type')) or 'part'}]")
    return "".join(found)


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _shown(value: Json) -> str:
    """Any JSON as text."""
    if value is None:
        return ""
    try:
        return make_encodable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "[nested too deeply to be shown]"


def _calls(field: str, message: _Message, cut: Cut) -> list[SaidCall]:
    return [
        SaidCall(
            id=call.id,
            name=call.name,
            arguments=cut.middle(f"{field}.tool_calls[{n}].arguments", call.arguments, cut.clamp.text),
        )
        for n, call in enumerate(message.calls)
    ]


def messages(view: TraceView) -> list[Said]:
    """Every message of every branch, in the order in which it was recorded. A later trace of the same session begins with the same."""
    whole = Cut(Clamp(text=0))
    branches = _branches(view)
    answered: dict[int, TurnView] = {}
    for turn in view.turns:
        answered.setdefault(turn.parent, turn)
    nodes: list[tuple[int, list[Json], TurnView | None, bool]] = [
        *((context.id, context.messages, answered.get(context.id), False) for context in view.contexts.values()),
        *((turn.id, [turn.message], turn, True) for turn in view.turns),
    ]
    found: list[Said] = []
    for node, held, whose, sampled in sorted(nodes, key=lambda one: one[0]):
        for wire in held:
            message = _read(wire)
            found.append(
                Said(
                    cursor=len(found) + 1,
                    node=node,
                    branch=branches[node],
                    turn_role=whose.role if whose is not None else "main",
                    role="assistant" if sampled else _ROLES.get(message.role, message.role),
                    text=message.text,
                    reasoning=message.thought,
                    tool_calls=_calls("", message, whole),
                    tool_call_id=message.tool_call_id,
                    finish_reason=whose.finish if sampled and whose is not None else "",
                    sampled=sampled,
                )
            )
    return found


def _branches(view: TraceView) -> dict[int, int]:
    """A number for each path: who goes on from a node first keeps its number, who comes later begins another."""
    parents: dict[int, int | None] = {context.id: context.parent for context in view.contexts.values()}
    parents |= {turn.id: turn.parent for turn in view.turns}
    numbers: dict[int, int] = {}
    gone_on: set[int] = set()
    for node in sorted(parents):
        parent = parents[node]
        if parent is not None and parent not in gone_on:
            gone_on.add(parent)
            numbers[node] = numbers[parent]
        else:
            numbers[node] = 1 + max(numbers.values(), default=-1)
    return numbers


def page(said: Sequence[Said], after: int, limit: int, clamp: Clamp) -> tuple[list[Said], list[str]]:
    """Messages past a cursor, within bounds, and what that cost."""
    cut = Cut(clamp)
    found = []
    for one in said[after : after + limit]:
        where = f"messages[{one.cursor}]"
        calls = [
            msgspec.structs.replace(
                call, arguments=cut.middle(f"{where}.tool_calls[{n}].arguments", call.arguments, clamp.text)
            )
            for n, call in enumerate(one.tool_calls)
        ]
        text = cut.middle(f"{where}.text", one.text, clamp.text)
        reasoning = cut.middle(f"{where}.reasoning", one.reasoning, clamp.text)
        found.append(msgspec.structs.replace(one, text=text, reasoning=reasoning, tool_calls=calls))
    return found, cut.told


def _captured(told: str) -> Captured:
    return next((level for level in _LEVELS if level == told), "none")  # another version may know others


def least(found: Sequence[RolloutTurn]) -> Captured:
    return min((turn.capture for turn in found), key=_LEVELS.index, default="none")
