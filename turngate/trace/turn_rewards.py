"""Rewards of individual turns, given by graders and host tools: validate them, and find the turns that they belong to.

A reward of kind `part` is a share of the rollout's reward: all parts add up to it. A reward of kind `extra` counts in addition to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.trace.advantage import MAX_REWARD, is_too_large
from turngate.trace.tool_schema import HostTool
from turngate.trace.tree import Sampled, Trace
from turngate.types import Message

RewardKind = Literal["part", "extra"]
TOLERANCE = 1e-6  # between the sum of the parts and the rollout's reward; relative if the reward is larger than 1
MAX_NAME = 200  # characters
MAX_NODE = 2**31
_MAX_LISTED = 10  # turns that an error message lists
_Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE)]


class TurnReward(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The reward of one turn, or of a span of its sampled tokens.

    The turn is identified by its node id, or by the number of a host-tool call that it made.
    """

    value: float
    kind: RewardKind
    name: str = ""
    turn: _Index | None = None  # in stored outcomes, None only if it cannot be decided which turn made the call
    call: _Index | None = None  # the number of the host-tool call
    start: _Index | None = None  # the span, in tokens of the turn's reply; None: the whole turn
    end: _Index | None = None


class RowReward(msgspec.Struct, frozen=True):
    """A reward of a turn that a row trains, and the range of the row's tokens to which the reward applies."""

    node: int
    start: int
    end: int
    name: str
    value: float
    kind: RewardKind


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a recorded turn that decide which rewards it can have."""

    id: int
    previous: int | None  # the turn before it in its conversation
    started: float
    ended: float
    tokens: int
    calls: str  # the names and arguments of the tool calls in its reply


class ToolCallRecord(msgspec.Struct, frozen=True):
    """One call of a host tool."""

    call: int
    tool: str
    time: float


def check_turn_rewards(rewards: Sequence[TurnReward], reward: float | None) -> None:
    """Raise `BadRequest`, with the name of the field, if a turn reward is invalid or the parts do not add up to `reward`.

    If `reward` is None, no turn rewards are allowed.
    """
    if rewards and reward is None:
        raise _invalid("", "must be empty if 'reward' is null")
    for n, one in enumerate(rewards):
        if not math.isfinite(one.value) or is_too_large(one.value):
            raise _invalid(
                f"[{n}].value", f"must be a finite number from {-MAX_REWARD:g} to {MAX_REWARD:g}, not {one.value}"
            )
        if one.turn is None and one.call is None:
            raise _invalid(
                f"[{n}]", "names no turn; set 'turn' to the id of a turn, or 'call' to the number of a host-tool call"
            )
        if (one.start is None) != (one.end is None):
            raise _invalid(f"[{n}]", "has only one of 'start' and 'end'; set both, or neither for the whole turn")
        if one.start is not None and one.end is not None and one.start >= one.end:
            raise _invalid(f"[{n}].end", f"must be greater than 'start' ({one.start}), not {one.end}")
        if len(one.name) > MAX_NAME or not one.name.isprintable():
            raise _invalid(f"[{n}].name", f"must be at most {MAX_NAME} printable characters")
    parts = [one.value for one in rewards if one.kind == "part"]
    if parts and reward is not None:
        total = math.fsum(parts)
        if abs(total - reward) > TOLERANCE * max(1.0, abs(reward)):
            raise _invalid(
                "",
                f"of kind 'part' must add up to the reward: their sum is {total:.9g}, the reward is {reward:.9g}, and the "
                f"difference is {total - reward:.9g}; use kind 'extra' for rewards that count in addition to the reward",
            )


def resolve_turn_rewards(
    rewards: Sequence[TurnReward], turns: Iterable[TurnRecord], calls: Iterable[ToolCallRecord] = ()
) -> tuple[TurnReward, ...]:
    """Return the rewards with `turn` set. `check_turn_rewards` must have accepted them.

    Raise `BadRequest`, with the name of the field, if a reward does not fit the recorded turns and calls, or if it cannot be decided which
    turn made its call.
    """
    turn_of, call_of = {turn.id: turn for turn in turns}, {call.call: call for call in calls}
    resolved = []
    for n, one in enumerate(rewards):
        if one.turn is not None and one.turn not in turn_of:
            raise _invalid(f"[{n}].turn", f"is {one.turn}, but the session has {_list_turns(turn_of)}")
        turn = turn_of[one.turn] if one.turn is not None else _find_caller(n, one, turn_of, call_of)
        if one.call is not None and turn not in _find_callers(n, one.call, turn_of, call_of):
            raise _invalid(
                f"[{n}].turn", f"is {one.turn}, but this turn did not make call {one.call}; omit 'turn' or 'call'"
            )
        if one.end is not None and one.end > turn.tokens:
            raise _invalid(f"[{n}].end", f"must be at most {turn.tokens} (the length of turn {turn.id}), not {one.end}")
        resolved.append(msgspec.structs.replace(one, turn=turn.id))
    return tuple(resolved)


def _find_callers(
    n: int, number: int, turn_of: Mapping[int, TurnRecord], call_of: Mapping[int, ToolCallRecord]
) -> list[TurnRecord]:
    call = call_of.get(number)
    if call is None:
        raise _invalid(
            f"[{n}].call", f"is {number}, but the session made no such host-tool call (calls made: {len(call_of)})"
        )
    return find_callers(call, turn_of.values())


def _find_caller(
    n: int, one: TurnReward, turn_of: Mapping[int, TurnRecord], call_of: Mapping[int, ToolCallRecord]
) -> TurnRecord:
    assert one.call is not None, "checked by check_turn_rewards"
    candidates = _find_callers(n, one.call, turn_of, call_of)
    if len(candidates) != 1:
        which = _list_turns({turn.id: turn for turn in candidates})
        raise _invalid(
            f"[{n}].call",
            f"is {one.call}, but it cannot be decided which turn made this call (candidates: {which}); set 'turn' instead",
        )
    return candidates[0]


def find_callers(call: ToolCallRecord, turns: Iterable[TurnRecord]) -> list[TurnRecord]:
    """Return the turns that may have made a call of a host tool. If there is only one, it is treated as the caller.

    Turns are considered as they were at the time of the call, and only if the conversation had not continued after them yet. Return the
    first of these sets that is not empty:

    1. the turns that had ended and whose tool calls name the host tool
    2. the turns that had ended with a tool call, and those that had not ended but whose tool calls name the host tool (agents may run a
       tool call before the rest of the reply has arrived)
    3. the turns that had ended
    """
    begun = [turn for turn in turns if turn.started <= call.time]
    continued = {turn.previous for turn in begun}
    latest = [turn for turn in begun if turn.id not in continued]
    waiting = [turn for turn in latest if turn.ended <= call.time]
    names_tool = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(call.tool)}(?![A-Za-z0-9_])")
    naming = [turn for turn in latest if names_tool.search(turn.calls)]
    streaming = [turn for turn in naming if turn.ended > call.time]
    return (
        [turn for turn in naming if turn.ended <= call.time]
        or [turn for turn in waiting if turn.calls] + streaming
        or waiting
    )


def reward_tool_calls(
    tools: Iterable[HostTool], turns: Sequence[TurnRecord], calls: Iterable[ToolCallRecord]
) -> dict[TurnReward, TurnReward]:
    """Return the rewards for host-tool calls. Each key is a reward without `turn`, and its value is the same reward with `turn` set.

    If it cannot be decided which turn made a call, `turn` is None in the value, too.
    """
    values = {tool.name: tool.reward for tool in tools if tool.reward is not None}
    rewards = {}
    for call in calls:
        if call.tool in values:
            reward = TurnReward(value=values[call.tool], kind="extra", name=call.tool, call=call.call)
            callers = find_callers(call, turns)
            rewards[reward] = msgspec.structs.replace(reward, turn=callers[0].id if len(callers) == 1 else None)
    return rewards


def list_turn_records(trace: Trace, messages: Mapping[int, bytes]) -> list[TurnRecord]:
    """Return the facts about all turns of a trace. `messages` contains the reply of each turn as JSON, by node id."""
    return [_describe_turn(turn, msgspec.json.decode(messages[turn.id], type=Message)) for turn in trace.turns()]


def _describe_turn(turn: Sampled, reply: Message) -> TurnRecord:
    previous = turn.parent.parent
    return TurnRecord(
        id=turn.id,
        previous=None if previous is None else previous.id,
        started=turn.info.started,
        ended=turn.info.ended,
        tokens=turn.size,
        calls=describe_calls(reply),
    )


def describe_calls(reply: Message) -> str:
    """Return the names and arguments of the tool calls in a reply, as one text."""
    return "\n".join(f"{call.name} {call.arguments}" for call in reply.tool_calls)


def spread_rewards(tokens: int, rewards: Iterable[RowReward]) -> np.ndarray:
    """Return an array with one float32 per token of a row. Each reward is added at the last token of its range; other tokens have 0."""
    spread = np.zeros(tokens, np.float32)
    for reward in rewards:
        spread[reward.end - 1] += reward.value
    return spread


def _list_turns(turns: Mapping[int, TurnRecord]) -> str:
    if not turns:
        return "no turns"
    shown = ", ".join(str(turn) for turn in sorted(turns)[:_MAX_LISTED])
    more = f" and {len(turns) - _MAX_LISTED} more" if len(turns) > _MAX_LISTED else ""
    return f"{'turn' if len(turns) == 1 else 'turns'} {shown}{more}"


def _invalid(field: str, message: str) -> BadRequest:
    return BadRequest(f"turn_rewards{field} {message}", param=f"turn_rewards{field}")
