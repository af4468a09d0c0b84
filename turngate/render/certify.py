"""Certify a renderer: check that extending the sampled ids gives the same result as rendering the whole conversation.

In each probe conversation, for each assistant turn, the prompt, the turn and the bridge must together match a render of the whole
conversation. Past thinking may differ, since templates drop it and we keep it. If a renderer derived from a template fails, the whole
conversation is rendered on every turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.render.renderer import LastTurn, Renderer
from turngate.types import ID_DTYPE, Json, Message, Tool, ToolCall

ProbeVerdict = Literal["same", "thinking", "differs", "refused"]

_TOOL = Tool(
    "read_file",
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
                "required": ["path"],
            },
        },
    },
)


class ProbeCase(msgspec.Struct, frozen=True):
    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    kwargs: dict[str, Json] = {}


class ProbeResult(msgspec.Struct, frozen=True):
    case: str
    verdict: ProbeVerdict
    detail: str = ""


class Certificate(msgspec.Struct, frozen=True):
    renderer: str
    findings: tuple[ProbeResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no case differs. Conversations that the template itself rejects are ignored."""
        return not any(f.verdict == "differs" for f in self.findings)


def certify(renderer: Renderer) -> Certificate:
    """Run every case twice: with complete assistant turns, and with turns that lack their closing token."""
    findings = [_run_case(renderer, case, truncated=truncated) for case in CASES for truncated in (False, True)]
    return Certificate(renderer.name, tuple(findings))


def _run_case(renderer: Renderer, case: ProbeCase, *, truncated: bool) -> ProbeResult:
    name = f"{case.name}, cut short" if truncated else case.name
    try:
        verdicts = [_compare(renderer, case, at, truncated) for at in _assistant_turns(case.messages)]
    except BadRequest as error:
        return ProbeResult(name, "refused", error.message)
    order: list[ProbeVerdict] = ["differs", "thinking", "same"]
    return ProbeResult(name, *min(verdicts, key=lambda v: order.index(v[0])))


def _assistant_turns(messages: tuple[Message, ...]) -> Iterator[int]:
    """Return the indices of assistant turns that are followed by another message."""
    return (i for i, m in enumerate(messages[:-1]) if m.role == "assistant")


def _compare(renderer: Renderer, case: ProbeCase, at: int, truncated: bool) -> tuple[ProbeVerdict, str]:
    end = next(
        (i for i in range(at + 1, len(case.messages)) if case.messages[i].role == "assistant"), len(case.messages)
    )
    prompt = renderer.render(case.messages[:at], case.tools, case.kwargs)
    sampled = _write_turn(renderer, case, at, prompt)
    if truncated:
        sampled = sampled[:-1]
    last = LastTurn(np.array(prompt, ID_DTYPE), np.array(sampled, ID_DTYPE), case.messages[at])
    bridge = renderer.bridge(last, case.messages[at + 1 : end], case.tools, case.kwargs)
    if bridge is None:
        return "differs", "the new messages cannot be rendered alone"
    decode = renderer.tokenizer.decode
    whole = renderer.render(case.messages[:end], case.tools, case.kwargs)
    ours, theirs = decode([*prompt, *sampled, *bridge]), decode(whole)
    # The bridge must have the template's own ids. Before the bridge, only the text must match: a whole render may merge tokens
    # across the end of the prompt, which a model cannot do.
    if ours == theirs and whole[len(whole) - len(bridge) :] == bridge:
        return "same", ""
    if _without_thinking(ours) == _without_thinking(theirs):
        return "thinking", "the template drops past thinking; the bridge keeps it"
    return "differs", _first_difference(ours, theirs)


def _write_turn(renderer: Renderer, case: ProbeCase, at: int, prompt: list[int]) -> list[int]:
    """Encode the turn as the model would have sampled it: reasoning, content, calls, closing token."""
    tokenizer = renderer.tokenizer
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(renderer.render(case.messages[: at + 1], case.tools, case.kwargs, generate=False))
    if whole.startswith(before):
        turn = tokenizer.encode(whole[len(before) :])
        closes = [n for n, i in enumerate(turn) if i in renderer.stop_ids]
        if closes:
            return turn[: closes[0] + 1]
    # The template writes past turns differently from new ones (for example, with thinking in the generation prompt), so write the turn
    # by hand.
    message = case.messages[at]
    thinking = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    return [*tokenizer.encode(thinking + message.content), renderer.stop_ids[0]]


def _without_thinking(text: str) -> str:
    return re.sub(r"<think>.*?</think>\s*", "", text, flags=re.S)


def _first_difference(ours: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, whole, strict=False)) if a != b), min(len(ours), len(whole)))
    return (
        f"the bridge has {ours[max(0, at - 20) : at + 30]!r}, but the template has {whole[max(0, at - 20) : at + 30]!r}"
    )


def _call(n: int, path: str) -> ToolCall:
    return ToolCall(f"callid{n:03}", "read_file", '{"path": "' + path + '", "lines": 3}')


def _result(n: int, text: str) -> Message:
    return Message("tool", text, tool_call_id=f"callid{n:03}", name="read_file")


_SYSTEM, _ASK = Message("system", "You are a careful engineer."), Message("user", "What does main.py do?")
_ANSWER, _MORE = Message("assistant", "It prints a line."), Message("user", "And util.py?")

CASES = (
    ProbeCase("two turns", (_ASK, _ANSWER, _MORE)),
    ProbeCase("system prompt", (_SYSTEM, _ASK, _ANSWER, _MORE, _ANSWER, _ASK)),
    ProbeCase("unicode", (_ASK, Message("assistant", "Größe 汉字 👩‍👩‍👧 é"), Message("user", "noch ein 👍🏽 ｘ"))),
    ProbeCase("white space", (_ASK, Message("assistant", "a  b\n\n\tc"), Message("user", "  indented\n\n\n"))),
    ProbeCase(
        "markup in text",
        (_ASK, Message("assistant", "use {{ x }} <b> & %}"), Message("user", "<tool_response> </s> [INST]")),
    ),
    ProbeCase("empty content", (_ASK, Message("assistant", ""), _MORE)),
    ProbeCase(
        "one call",
        (_SYSTEM, _ASK, Message("assistant", tool_calls=(_call(1, "main.py"),)), _result(1, "print('x')")),
        (_TOOL,),
    ),
    ProbeCase(
        "call with text",
        (
            _SYSTEM,
            _ASK,
            Message("assistant", "Let me look.", tool_calls=(_call(1, "main.py"),)),
            _result(1, '{"ok": true}'),
        ),
        (_TOOL,),
    ),
    ProbeCase(
        "parallel calls",
        (
            _SYSTEM,
            _ASK,
            Message("assistant", tool_calls=(_call(1, "a.py"), _call(2, "b.py"))),
            _result(1, "A"),
            _result(2, "B"),
            _ANSWER,
            _MORE,
        ),
        (_TOOL,),
    ),
    ProbeCase(
        "three rounds of calls",
        (
            *(_SYSTEM, _ASK, Message("assistant", tool_calls=(_call(1, "a.py"),)), _result(1, "A")),
            *(Message("assistant", tool_calls=(_call(2, "b.py"),)), _result(2, "B")),
            *(Message("assistant", tool_calls=(_call(3, "c.py"),)), _result(3, "")),
        ),
        (_TOOL,),
    ),
    ProbeCase("thinking", (_ASK, Message("assistant", "It prints.", "Look at the code."), _MORE)),
    ProbeCase(
        "thinking and calls",
        (
            _ASK,
            Message("assistant", "", "I should read it.", (_call(1, "a.py"),)),
            _result(1, "A"),
            Message("assistant", "Done.", "That was it."),
            _MORE,
        ),
        (_TOOL,),
    ),
    ProbeCase(
        "a question after results",
        (_ASK, Message("assistant", tool_calls=(_call(1, "a.py"),)), _result(1, "A"), _MORE),
        (_TOOL,),
    ),
)
