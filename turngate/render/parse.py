"""Parse sampled text incrementally into reasoning, content and tool calls.

The same parser is used for streamed and non-streamed replies. Its output is sent to the agent, and stored in the trace as the turn's
message. `call_syntax.py` describes how models mark reasoning and calls. Outside reasoning, text between call markers that is not a valid
call is delivered unchanged, as content, together with the markers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from turngate.render.call_syntax import Syntax, parse_calls, parse_list_body, require_object
from turngate.types import CallDelta, Constraint, Delta, Message, Tool, ToolCall


class Parsed(msgspec.Struct, frozen=True):
    """A completely parsed turn."""

    message: Message
    reasoning_open: bool  # whether the text ended inside reasoning


class Parser:
    """An incremental parser for one reply.

    `feed` returns the events that can already be sent. `finish` returns the last events and the parsed turn.
    """

    def __init__(
        self,
        syntax: Syntax,
        *,
        in_reasoning: bool = False,
        tools: Sequence[Tool] = (),
        constraint: Constraint | None = None,
        one_call: bool = False,
    ) -> None:
        self._syntax = syntax
        self._tools = tools
        self._constraint = constraint
        self.one_call = one_call
        self._buffer = ""
        self._state: Literal["start", "reasoning", "content", "call", "held"] = "start"
        # The state after reasoning: forced calls are held back until they are complete.
        self._answer: Literal["content", "held"] = "content"
        if constraint is not None and constraint.kind in ("tool", "tools"):
            self._answer = "held"
        if constraint is not None and not constraint.after_reasoning:
            self._state = self._answer
        elif in_reasoning:
            self._state = "reasoning"
        self._spaces: list[str] = []  # white space that is dropped if a marker follows
        self._searched = 0  # number of characters of the buffer that were already searched for the end of a call
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        # Whether no text has been emitted since the last marker. The newlines after a marker belong to the markup, so they are dropped.
        self._fresh = in_reasoning
        self._wants_calls = bool(tools)
        self.satisfied = False  # whether the only call that is wanted is complete, so that sampling can stop

    def feed(self, text: str) -> list[Delta | CallDelta]:
        self._buffer += text
        events: list[Delta | CallDelta] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> tuple[list[Delta | CallDelta], Parsed]:
        events = self.feed("")
        rest, self._buffer = "".join(self._spaces) + self._buffer, ""
        reasoning_open = self._state == "reasoning"
        if self._state == "reasoning":
            self._show(events, "reasoning", rest)
            self._take_calls_in_reasoning(events)
        elif self._state == "call":
            self._take_call(events, rest, closed=False)
        elif self._state == "held":
            self._take_held(events, rest)
        else:
            # White space after the last call is part of the markup, but after content it is part of the content.
            self._show(events, "content", rest if not self._calls else rest.rstrip())
        message = Message("assistant", "".join(self._content), "".join(self._reasoning), tuple(self._calls))
        return events, Parsed(message, reasoning_open)

    def _step(self, events: list[Delta | CallDelta]) -> bool:
        """Make at most one state transition. Return whether another step may be possible."""
        if self.satisfied:
            self._buffer = ""
            return False
        match self._state:
            case "start":
                return self._start()
            case "reasoning":
                return self._until(events, "reasoning", self._syntax.reasoning_close, self._answer)
            case "content":
                if not self._wants_calls:
                    text, self._buffer = "".join(self._spaces) + self._buffer, ""
                    self._spaces.clear()
                    self._show(events, "content", text)
                    return False
                return self._until(events, "content", self._syntax.call_open, "call")
            case "call":
                return self._whole_call(events)
            case _:
                return False

    def _start(self) -> bool:
        text, opening = self._buffer.lstrip(), self._syntax.reasoning_open
        self._spaces.append(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        if not text or (opening and len(text) < len(opening) and opening.startswith(text)):
            return False
        if opening and text.startswith(opening):
            self._state, self._buffer, self._fresh = "reasoning", text[len(opening) :], True
            self._spaces.clear()
        elif self._constraint is None and self._syntax.bare and self._wants_calls and text.startswith("{"):
            self._state = "held"
        else:
            self._state = self._answer
        return True

    def _until(
        self,
        events: list[Delta | CallDelta],
        kind: Literal["content", "reasoning"],
        marker: str,
        then: Literal["content", "call", "held"],
    ) -> bool:
        """Emit text up to `marker`, then switch to the state `then`. Return whether `marker` was found.

        Drop the noise markers of the syntax. Hold back trailing white space and a partial marker.
        """
        at = self._buffer.find(marker) if marker else -1
        while (found := _find_first(self._buffer, self._syntax.noise, at)) is not None:
            start, noise = found
            self._hold_spaces(events, kind, self._buffer[:start])
            self._buffer = self._buffer[start + len(noise) :]
            at = self._buffer.find(marker) if marker else -1
        if at >= 0:
            self._show_after_spaces(events, kind, self._buffer[:at].rstrip())
            self._spaces.clear()
            self._buffer, self._state = self._buffer[at + len(marker) :], then
            self._fresh, self._searched = True, 0
            return True
        keep = _partial_marker_size(self._buffer, (marker, *self._syntax.noise))
        head = self._buffer[: len(self._buffer) - keep]
        self._hold_spaces(events, kind, head)
        self._buffer = self._buffer[len(head) :]
        return False

    def _hold_spaces(self, events: list[Delta | CallDelta], kind: Literal["content", "reasoning"], text: str) -> None:
        """Emit text, but hold back the white space at its end, which is dropped if a marker follows."""
        words = text.rstrip()
        self._show_after_spaces(events, kind, words)
        self._spaces.append(text[len(words) :])

    def _show_after_spaces(
        self, events: list[Delta | CallDelta], kind: Literal["content", "reasoning"], words: str
    ) -> None:
        if words:
            self._show(events, kind, "".join(self._spaces) + words)
            self._spaces.clear()

    def _show(self, events: list[Delta | CallDelta], kind: Literal["content", "reasoning"], text: str) -> None:
        if self._fresh:
            text = text.lstrip("\n") if kind == "reasoning" or not self._calls else text.lstrip()
        if text:
            self._fresh = False
            (self._reasoning if kind == "reasoning" else self._content).append(text)
            events.append(Delta(kind, text))

    def _whole_call(self, events: list[Delta | CallDelta]) -> bool:
        close = self._syntax.call_close
        at = self._buffer.find(close, self._searched) if close else -1
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(close))
            return False
        body, self._buffer, self._state, self._fresh = (
            self._buffer[:at],
            self._buffer[at + len(close) :],
            "content",
            True,
        )
        self._take_call(events, body, closed=True)
        return True

    def _take_call(self, events: list[Delta | CallDelta], body: str, *, closed: bool) -> None:
        try:
            calls = parse_calls(self._syntax, body, self._tools)
        except ValueError:
            self._fresh = False
            self._show(events, "content", self._syntax.call_open + body + (self._syntax.call_close if closed else ""))
            return
        self._emit_calls(events, calls)

    def _emit_calls(self, events: list[Delta | CallDelta], calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls[:1] if self.one_call else calls:
            call = ToolCall(f"call_{os.urandom(12).hex()}", name, arguments)
            events.append(CallDelta(len(self._calls), call))
            self._calls.append(call)
        self.satisfied = self.one_call

    def _take_held(self, events: list[Delta | CallDelta], text: str) -> None:
        """Emit the calls in text that was held back because it might consist only of calls. If it is not valid, emit it as content."""
        try:
            if self._constraint is not None and self._constraint.kind == "tool":
                require_object(text)
                calls = [(self._constraint.tool, text.strip())]
            else:
                calls = parse_list_body(text, self._tools)
        except ValueError:
            self._fresh = False
            self._show(events, "content", text)
            return
        self._emit_calls(events, calls)

    def _take_calls_in_reasoning(self, events: list[Delta | CallDelta]) -> None:
        """Emit the calls in unclosed reasoning, up to the first call that is incomplete or invalid."""
        opening, close = self._syntax.call_open, self._syntax.call_close
        if not (self._wants_calls and opening and close):
            return
        for text in "".join(self._reasoning).split(opening)[1:]:
            body, closed, _ = text.partition(close)
            if not closed:
                return
            try:
                self._emit_calls(events, parse_calls(self._syntax, body, self._tools))
            except ValueError:
                return
            if self.satisfied:
                return


def _find_first(text: str, markers: Sequence[str], end: int) -> tuple[int, str] | None:
    """Return the position of the first marker in the text, and the marker, or None if there is none.

    Search only before `end`, unless `end` is negative.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0 and (end < 0 or at < end)]
    return min(found, default=None)


def _partial_marker_size(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the start of a marker."""
    partial = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), partial, -1):
            if text.endswith(marker[:size]):
                partial = size
                break
    return partial


class StopStrings:
    """A filter that ends a stream of text before the first stop string. It holds back text that may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._buffer = ""
        self.met = ""  # the stop string that was found

    @property
    def hit(self) -> bool:
        return bool(self.met)

    def feed(self, text: str) -> str:
        if not self._stops or self.hit:
            return "" if self.hit else text
        self._buffer += text
        found = [(at, stop) for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if found:
            at, self.met = min(found)
            shown, self._buffer = self._buffer[:at], ""
            return shown
        keep = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._buffer)), keep, -1):
                if self._buffer.endswith(stop[:size]):
                    keep = size
                    break
        shown, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        return shown

    def flush(self) -> str:
        rest, self._buffer = self._buffer, ""
        return rest
