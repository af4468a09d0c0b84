"""Transitions: the steps from one turn of the model to the next, and the check that a template only appends text at such a step.

The bridge of a transition is the text that the template writes between two turns. It may extend the sampled ids only if a render of the
whole conversation has the same text there, and leaves all text before the turn unchanged. `find_difference` checks this. The turns
themselves are not compared: the sampled ids are kept, even if the template would write a past turn differently or drop its reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import orjson

from turngate.render.traits import SENTINEL
from turngate.types import Message, ToolCall

# A function that renders messages, with or without the generation prompt.
TextFunction = Callable[[Sequence[Message], bool], str]
_SPEAKERS = {"user": "a user message", "system": "a system message", "tool": "results", "assistant": "an answer"}
# By number of calls: the complete turn, and the truncated one.
_TURNS = (
    ("an answer", "a truncated answer"),
    ("a call", "a truncated call"),
    ("parallel calls", "truncated parallel calls"),
)


TURN_TEXT = "turngateTURNTEXT"


class Transition(msgspec.Struct, frozen=True):
    """One kind of transition between two turns. A certificate contains the results for each kind in the probe conversations."""

    calls: int  # number of calls in the turn; 2 means two or more
    speakers: tuple[str, ...]  # the roles of the new messages; consecutive equal roles are listed once
    text: bool = False  # whether the turn has text in addition to its calls
    cut: bool = False  # whether the turn was truncated, so that its closing token is missing

    @classmethod
    def of(cls, turn: Message, new: Sequence[Message], *, cut: bool) -> Transition:
        speakers = tuple(role for role, _ in groupby(new, lambda message: message.role))
        return cls(min(len(turn.tool_calls), 2), speakers, bool(turn.tool_calls and turn.content), cut)

    def describe(self) -> str:
        whole, truncated = _TURNS[self.calls]
        new = " and ".join(_SPEAKERS[role] for role in self.speakers)
        return f"{new} after {truncated if self.cut else whole}{' with text' if self.text else ''}"


class BridgeDifference(msgspec.Struct, frozen=True):
    """Why a bridge does not match a render of the whole conversation, or cannot be compared with it.

    `bridge` is the text of the prompt with the bridge, and `template` is the text that the template writes there. Both are empty if no
    texts were compared.
    """

    where: str
    bridge: str = ""
    template: str = ""

    def describe(self) -> str:
        if self.bridge == self.template:
            return self.where
        at = _common_size(self.bridge, self.template)
        near = slice(max(0, at - 20), at + 30)
        return f"{self.where}, the prompt with the bridge has {self.bridge[near]!r}, but the template has {self.template[near]!r}"


_UNCLEAR_TURNS = BridgeDifference("the template does not write each turn and its end exactly once")


def build_stand_in(turn: Message, mark: str = SENTINEL) -> Message:
    """Build an assistant turn with as many calls as `turn` has. It ends with `mark`, so that its end can be found in the rendered text."""
    if not turn.tool_calls:
        return Message("assistant", mark)
    *others, final = turn.tool_calls
    calls = [ToolCall(c.id, c.name, "{}") for c in others]
    calls.append(ToolCall(final.id, final.name, orjson.dumps({"k": mark}).decode()))
    return Message("assistant", TURN_TEXT if turn.content else "", tool_calls=tuple(calls))


def find_difference(
    text: TextFunction, stops: Sequence[str], messages: Sequence[Message], bridge: str
) -> BridgeDifference | None:
    """Compare a bridge with a render of the whole conversation. The bridge follows the last assistant turn of `messages`.

    `bridge` starts with the closing token. Return None if the template writes exactly this text after the last turn and does not change
    the text before any turn. A change that an earlier transition already made is ignored. Raise `BadRequest` if the template rejects the
    conversation.
    """
    after = write_after_turn(text, stops, messages)
    if isinstance(after, BridgeDifference):
        return after
    if TURN_TEXT in after:
        return BridgeDifference("the template writes the turn's text after the messages that follow the turn")
    return None if after == bridge else BridgeDifference("after the turn", bridge, after)


def write_after_turn(text: TextFunction, stops: Sequence[str], messages: Sequence[Message]) -> str | BridgeDifference:
    """Return the template's text from the end of the last assistant turn on.

    If the template changes earlier text, return the first such change. If a turn cannot be found in the text, return `_UNCLEAR_TURNS`.
    """
    turns = [n for n, message in enumerate(messages) if message.role == "assistant"]
    marks = [f"{SENTINEL}{n}END" for n in range(len(turns))]
    marked = list(messages)
    for n, mark in zip(turns, marks, strict=True):
        marked[n] = build_stand_in(messages[n], mark)
    whole = _split(text(marked, True), marks, stops)
    if whole is None:
        return _UNCLEAR_TURNS
    latest = _split(text(marked[: turns[-1]], True), marks[:-1], stops)
    for k, n in enumerate(turns):
        prompt = _split(text(marked[:n], True), marks[:k], stops)
        closed = _split(text(marked[:n], False), marks[:k], stops)
        if prompt is None or closed is None or latest is None:
            return _UNCLEAR_TURNS
        # Leave out the generation prompt, which may differ from what the template writes before a past turn. It belongs to the turn.
        context = prompt[-1][: _common_size(prompt[-1], closed[-1])]
        # If an earlier transition already changed this text, that transition is not certified, and this one must not change the text again.
        was_changed = not latest[k].startswith(context)
        if not whole[k].startswith(context) and not (was_changed and whole[k] == latest[k]):
            return BridgeDifference(f"before turn {k + 1}", context, whole[k])
    return whole[-1]


def _split(text: str, marks: Sequence[str], stops: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the marked turns. Each text but the first begins with the closing token of a turn.

    Return None unless each mark occurs exactly once, followed by a closing token.
    """
    parts: list[str] = []
    for mark in marks:
        before, found, text = text.partition(mark)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        if not found or not ends or mark in text:
            return None
        parts.append(before)
        text = text[min(ends) :]
    return [*parts, text]


def _common_size(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    size = min(len(one), len(other))
    return next((n for n in range(size) if one[n] != other[n]), size)
