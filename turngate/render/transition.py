"""Transitions: the step from one turn of the model to the next, and the check that a template only appends at such a step.

The bridge of a transition is the text that the template writes between two turns. It may extend the sampled ids only if rendering the whole
conversation writes the same text there, and leaves all text before the turn as it was. `find_difference` checks that. The turns themselves
are not compared: the ids that the model sampled are kept, even where the template would spell a past turn differently or drop its thinking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import orjson

from turngate.render.traits import SENTINEL
from turngate.types import Message, ToolCall

# Renders messages, with or without the generation prompt.
TextFunction = Callable[[Sequence[Message], bool], str]
_SPEAKERS = {"user": "a user message", "system": "a system message", "tool": "results", "assistant": "an answer"}


TURN_TEXT = "turngateTURNTEXT"


class Transition(msgspec.Struct, frozen=True):
    """One kind of transition. Certificates have a verdict for each."""

    calls: int  # number of calls in the turn; 2 stands for several
    speakers: tuple[str, ...]  # the roles of the new messages; repeated roles count once
    text: bool = False  # whether the turn has text in addition to its calls
    cut: bool = False  # whether the turn lacks its closing token

    @classmethod
    def of(cls, turn: Message, new: Sequence[Message], *, cut: bool) -> Transition:
        speakers = tuple(role for role, _ in groupby(new, lambda message: message.role))
        return cls(min(len(turn.tool_calls), 2), speakers, bool(turn.tool_calls and turn.content), cut)

    def describe(self) -> str:
        turn = ("an answer", "a call", "parallel calls")[self.calls]
        new = " and ".join(_SPEAKERS[role] for role in self.speakers)
        return f"{new} after {turn}{' with text' if self.text else ''}{' that was cut short' if self.cut else ''}"


class BridgeDifference(msgspec.Struct, frozen=True):
    """Where the template writes something other than the bridge."""

    where: str
    bridge: str = ""
    template: str = ""

    def describe(self) -> str:
        if self.bridge == self.template:
            return self.where
        at = _common_size(self.bridge, self.template)
        near = slice(max(0, at - 20), at + 30)
        return f"{self.where}, the bridge has {self.bridge[near]!r}, but the template has {self.template[near]!r}"


_UNCLEAR_TURNS = BridgeDifference("the template does not write each turn and its end exactly once")


def build_stand_in(turn: Message, mark: str = SENTINEL) -> Message:
    """Build an assistant turn of the same shape whose end can be found in the rendered text."""
    if not turn.tool_calls:
        return Message("assistant", mark)
    *others, final = turn.tool_calls
    calls = [ToolCall(c.id, c.name, "{}") for c in others]
    calls.append(ToolCall(final.id, final.name, orjson.dumps({"k": mark}).decode()))
    return Message("assistant", TURN_TEXT if turn.content else "", tool_calls=tuple(calls))


def find_difference(
    text: TextFunction, stops: Sequence[str], messages: Sequence[Message], bridge: str
) -> BridgeDifference | None:
    """Compare a bridge with a render of the whole conversation, whose last assistant turn is the one that the bridge follows.

    `bridge` starts with the closing token. Return None if the template writes the same after the turn, and the same before each turn as in
    the prompt of that turn. Raise `BadRequest` if the template rejects the conversation.
    """
    after = write_after_turn(text, stops, messages)
    if isinstance(after, BridgeDifference):
        return after
    if TURN_TEXT in after:
        return BridgeDifference("the template writes the text of the turn after the messages that follow it")
    return None if after == bridge else BridgeDifference("after the turn", bridge, after)


def write_after_turn(text: TextFunction, stops: Sequence[str], messages: Sequence[Message]) -> str | BridgeDifference:
    """Return the text that the template writes from the close of the last assistant turn on, or how it changes earlier text."""
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
        # The generation prompt may differ from what the template writes before a past turn: it belongs to the turn.
        context = prompt[-1][: _common_size(prompt[-1], closed[-1])]
        # An earlier transition may have changed this text already. Then that one is not certified, and this one must leave the text alone.
        was_changed = not latest[k].startswith(context)
        if not whole[k].startswith(context) and not (was_changed and whole[k] == latest[k]):
            return BridgeDifference(f"before turn {k + 1}", context, whole[k])
    return whole[-1]


def _split(text: str, marks: Sequence[str], stops: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the marked turns. Each but the first begins with the close of a turn."""
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
