"""A notation for rollouts, for tests of roles and fork causes. Each line is one call, with four columns and an optional fifth:

    plan      | You plan. / Fix add.py.         | 1. Change the sign. …   | subagent
    do*       | You code. / Do this: {plan}     | {bash} sed -i s/-/+/    | main
    do*       | + tool: ok                      | It is a plus now. …     | main      | None

1. The conversation. `*`: with tools. In parentheses: signals, such as `(side)`, `(thread=b parent=a)`.
2. The messages. A first message without a prefix is the system prompt, the others are from the user, unless they have one of the
   prefixes `user:`, `assistant:` and `tool:`. `again: NAME` repeats the last answer of a conversation, with its tool calls. `+` stands
   for the last request of this conversation and its answer.
3. The answer. `{bash} TEXT` is a call of that tool with the text as its argument.
4. The expected role.
5. The expected cause of the fork, if the case states it.

`{plan}` in a message is the last answer of that conversation. `…` stands for many words, so that a text is more than a label, and `¶`
for the end of a line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.trace.kit import Call, Recorder, Wire, assistant, result, system, user
from turngate.trace.roles import RoleDecision, decide_roles
from turngate.trace.tree import Sampled
from turngate.types import CallSignals

_CONVERSATION = re.compile(r"(\w+)(\*?)(?:\((.*)\))?")
_TOOL_CALL = re.compile(r"\{(\w+)\} ?(.*)", re.DOTALL)
_ROLES = ("main", "subagent", "side", "summary")


@dataclass(frozen=True)
class Step:
    """One call of a rollout, and what is expected of it."""

    call: Call
    role: str
    cause: str | None  # None: not stated


class _Reader:
    def __init__(self, texts: bool) -> None:
        self._texts = texts
        self._history: dict[str, list[Wire]] = {}
        self._answers: dict[str, str] = {}
        self._calls = 0

    def read(self, line: str) -> Step:
        name_column, messages, answer, role, *rest = (column.strip() for column in line.split("|"))
        match = _CONVERSATION.fullmatch(name_column)
        assert match is not None, name_column
        name, star, signals = match.groups()
        history = self._read_messages(name, messages)
        reply = self._read_answer(name, answer)
        self._history[name] = [*history, reply]
        call = Call(
            history,
            reply,
            preamble="tools" if star else "",
            signals=_read_signals(signals or ""),
            finish="tool_calls" if "tool_calls" in reply else "stop",
            texts=self._texts,
        )
        return Step(call, role, rest[0] if rest else None)

    def _read_messages(self, name: str, text: str) -> list[Wire]:
        messages: list[Wire] = []
        if text.startswith("+"):
            messages, text = list(self._history[name]), text[1:]
        is_first = not messages
        for part in (part.strip() for part in text.split(" / ")):
            filled = self._fill(part)
            prefix, _, rest = filled.partition(": ")
            match prefix:
                case "user":
                    messages.append(user(rest))
                case "assistant":
                    messages.append(assistant(rest))
                case "again":
                    messages.append(self._history[rest][-1])
                case "tool":
                    messages.append(result(messages[-1]["tool_calls"][0]["id"], rest))
                case _:
                    messages.append(system(filled) if is_first else user(filled))
            is_first = False
        return messages

    def _read_answer(self, name: str, text: str) -> Wire:
        if match := _TOOL_CALL.fullmatch(text):
            self._calls += 1
            self._answers[name] = match[2]
            return assistant("", (f"call-{self._calls}", match[1], json.dumps({"text": match[2]})))
        self._answers[name] = self._fill(text)
        return assistant(self._answers[name])

    def _fill(self, text: str) -> str:
        for name, answer in self._answers.items():
            text = text.replace(f"{{{name}}}", answer)
        words = " ".join(f"{_first_word(text)}{n}" for n in range(30))
        return text.replace("…", words).replace("¶", "\n")


def _first_word(text: str) -> str:
    found = re.search(r"\w+", text)
    return found[0] if found else "word"


def _read_signals(text: str) -> CallSignals:
    fields: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        fields |= {"role": name} if name in _ROLES else {name: value}
    return CallSignals(**fields)


def read_rollout(text: str, *, texts: bool = True) -> list[Step]:
    """Read the calls of a rollout. `texts` is false for a trace of an older gateway, which recorded no excerpts."""
    reader = _Reader(texts)
    return [reader.read(line) for line in text.strip().splitlines()]


def decide(steps: list[Step]) -> tuple[list[Sampled], list[RoleDecision]]:
    """Record the calls, and return their turns and the decisions about them."""
    recorder = Recorder([step.call for step in steps])
    decided = decide_roles(recorder.trace)
    return recorder.turns, [decided[turn.id] for turn in recorder.turns]
