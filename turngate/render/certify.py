"""Certify a renderer: check that its bridges match renders of the whole conversation.

A bridge consists of the ids that extend the sampled ids up to the model's next turn. After each assistant turn of each probe conversation,
the bridge must equal the ids that the template writes there. The template must also leave the text before the turn unchanged
(`transition.py`). The turn itself may differ, because templates drop past thinking or write calls in another form; the sampled ids are
kept. Each kind of transition gets its own verdict. At a transition that fails, the whole conversation is rendered instead, unless a
hand-written renderer has its own bridge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.render.renderer import TEMPLATE_RENDERER, LastTurn, Renderer, TemplateRenderer
from turngate.render.traits import LONG_CALL_ID
from turngate.render.transition import BridgeDifference, Transition, write_after_turn
from turngate.types import ID_DTYPE, Json, Message, Tool, ToolCall

# "thinking": only the thinking of the sampled turns differs. "turn": other text of the sampled turns differs too.
ProbeVerdict = Literal["same", "thinking", "turn", "differs", "refused"]
_WORST_FIRST: tuple[ProbeVerdict, ...] = ("differs", "refused", "turn", "thinking", "same")

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


class TokenDifference(msgspec.Struct, frozen=True):
    """The tokens of the prompt with the bridge, and those of the template, around the first difference, as pairs of id and text."""

    where: str
    at: int  # number of equal tokens before the difference
    bridge: tuple[tuple[int, str], ...]
    template: tuple[tuple[int, str], ...]

    def describe(self) -> str:
        ours, theirs = ("".join(text for _, text in side) for side in (self.bridge, self.template))
        return f"{self.where}, the prompt with the bridge has {ours!r}, but the template has {theirs!r}"


class ProbeResult(msgspec.Struct, frozen=True):
    case: str
    verdict: ProbeVerdict
    detail: str = ""
    transition: Transition | None = None  # the transition that the verdict is about
    tokens: TokenDifference | None = None
    has_tools: bool = False  # whether the case offers tools


class Certificate(msgspec.Struct, frozen=True):
    renderer: str
    findings: tuple[ProbeResult, ...]
    unread: tuple[str, ...] = ()  # parts of replies that the parser cannot read, such as calls or thinking

    @property
    def passed(self) -> bool:
        """Whether all transitions passed. Conversations that the template rejects are ignored."""
        return not self.uncertified

    @property
    def uncertified(self) -> dict[Transition, str]:
        """The transitions that failed, each with the reason."""
        return {f.transition: f.detail for f in reversed(self.findings) if f.verdict == "differs" and f.transition}

    @property
    def certified(self) -> frozenset[Transition]:
        """The transitions at which the bridge matches a render of the whole conversation."""
        passed = {f.transition for f in self.findings if f.verdict in ("same", "thinking", "turn") and f.transition}
        return frozenset(passed - self.uncertified.keys())

    def select(self, *, has_tools: bool) -> Certificate:
        """Return a copy with only the findings whose `has_tools` has this value. A model may have a separate template for tools."""
        return msgspec.structs.replace(
            self, findings=tuple(finding for finding in self.findings if finding.has_tools == has_tools)
        )

    def describe_uncertified(self) -> str:
        """Describe the uncertified transitions in one phrase.

        A transition after a truncated turn is omitted if the same transition after a complete turn is uncertified too.
        """
        whole = [
            t for t in self.uncertified if not t.cut or msgspec.structs.replace(t, cut=False) not in self.uncertified
        ]
        return "; ".join(sorted(transition.describe() for transition in whole))

    def explain_uncertified(self) -> str:
        """Explain what happens at the uncertified transitions. A hand-written renderer uses its own bridge even there, if it has one."""
        where = self.describe_uncertified()
        if self.renderer == TEMPLATE_RENDERER:
            return f"at some transitions ({where}), the conversation is rendered in full, and the trace may fork"
        return (
            f"at some transitions ({where}), the hand-written renderer {self.renderer} has no bridge (so the trace may fork) or a bridge "
            "that differs from a render of the whole conversation"
        )

    def explain_unread(self) -> str:
        """Explain which parts of replies cannot be parsed and how to fix this. Return an empty string if all parts can be parsed."""
        if not self.unread:
            return ""
        install = "" if find_spec("renderers") is not None else "run `pip install 'turngate[families]'`, and "
        return (
            f"the chat template writes {' and '.join(self.unread)} in a form that Turngate cannot parse, so agents get them as text; "
            f"if the `renderers` package supports the model, {install}set --model to the model's full name, such as openai/gpt-oss-20b, "
            "or set --family"
        )


def certify(renderer: Renderer) -> Certificate:
    """Certify a renderer: run all probe cases, both with complete assistant turns and with turns that lack the closing token."""
    findings = [
        msgspec.structs.replace(finding, has_tools=bool(case.tools))
        for case in CASES
        for finding in _run_case(renderer, case)
    ]
    return Certificate(renderer.name, tuple(findings), tuple(_find_unread(renderer)))


def _run_case(renderer: Renderer, case: ProbeCase) -> list[ProbeResult]:
    """Run a probe case. Return the worst result for each kind of transition in its conversation."""
    results: dict[Transition, ProbeResult] = {}
    for at in _assistant_turns(case.messages):
        rendered = _render_turn(renderer, case, at)
        for cut in (False, True):
            found = _compare(renderer, case, rendered, cut)
            assert found.transition is not None
            known = results.get(found.transition)
            if known is None or _WORST_FIRST.index(found.verdict) < _WORST_FIRST.index(known.verdict):
                results[found.transition] = found
    return sorted(results.values(), key=lambda result: result.transition is not None and result.transition.cut)


def _assistant_turns(messages: tuple[Message, ...]) -> Iterator[int]:
    """Return the indices of the assistant turns that are followed by another message."""
    return (i for i, m in enumerate(messages[:-1]) if m.role == "assistant")


class _RenderedTurn(msgspec.Struct, frozen=True):
    """One assistant turn of a probe conversation, with the prompt, the turn and the continuation as the template writes them."""

    message: Message
    new: tuple[Message, ...]
    system: str
    prompt: list[int] = []
    sampled: list[int] = []
    whole: list[int] = []  # render of the conversation up to the next turn
    after: str | BridgeDifference = ""  # the text from the end of the turn on, or how the template changes earlier text
    refusal: str = ""  # why the template rejects the conversation; empty if it does not


def _render_turn(renderer: Renderer, case: ProbeCase, at: int) -> _RenderedTurn:
    messages = case.messages
    end = next((i for i in range(at + 1, len(messages)) if messages[i].role == "assistant"), len(messages))
    system = messages[0].content if messages[0].role == "system" else ""
    turn = _RenderedTurn(messages[at], messages[at + 1 : end], system)
    one_call = isinstance(renderer, TemplateRenderer) and not renderer.template.traits.parallel_calls
    if one_call and any(len(message.tool_calls) > 1 for message in messages):
        refusal = "the template writes one call per turn, so a reply ends after one call"
        return msgspec.structs.replace(turn, refusal=refusal)
    try:
        prompt = renderer.render(messages[:at], case.tools, case.kwargs)
        return msgspec.structs.replace(
            turn,
            prompt=prompt,
            sampled=_write_turn(renderer, case, at, prompt),
            whole=renderer.render(messages[:end], case.tools, case.kwargs),
            after=_write_after(renderer, case, end),
        )
    except BadRequest as error:
        return msgspec.structs.replace(turn, refusal=error.message)


def _compare(renderer: Renderer, case: ProbeCase, turn: _RenderedTurn, cut: bool) -> ProbeResult:
    """Compare the bridge after a turn with a render of the conversation up to the next turn. `cut` means that the turn was truncated."""
    transition = Transition.of(turn.message, turn.new, cut=cut)
    name = f"{case.name}, cut short" if cut else case.name
    if turn.refusal:
        return ProbeResult(name, "refused", turn.refusal, transition)
    encode, decode = renderer.tokenizer.encode, renderer.tokenizer.decode
    if isinstance(turn.after, BridgeDifference):
        difference = turn.after
        tokens = _find_token(renderer, difference.where, encode(difference.bridge), encode(difference.template))
        return ProbeResult(name, "differs", difference.describe(), transition, tokens if difference.template else None)
    sampled = turn.sampled[:-1] if cut else turn.sampled
    context = np.array(turn.prompt, ID_DTYPE)
    last = LastTurn(context, np.array(sampled, ID_DTYPE), turn.message, system=turn.system)
    bridge = renderer.bridge(last, turn.new, case.tools, case.kwargs)
    if bridge is None:
        why = renderer.explain_refusal(last, turn.new, case.tools, case.kwargs)
        return ProbeResult(name, "differs", why.partition(": ")[2] or why, transition)
    expected, written = encode(turn.after)[0 if cut else 1 :], turn.whole[len(turn.whole) - len(bridge) :]
    if bridge != expected or bridge != written:
        tokens = _find_token(renderer, "after the turn", bridge, expected if bridge != expected else written)
        return ProbeResult(name, "differs", tokens.describe(), transition, tokens)
    # Before the bridge, compare only the text: a render of everything may merge tokens across the end of the prompt, but a model cannot.
    ours, theirs = decode([*turn.prompt, *sampled, *bridge]), decode(turn.whole)
    if ours == theirs:
        return ProbeResult(name, "same", "", transition)
    if _without_thinking(ours) == _without_thinking(theirs):
        return ProbeResult(name, "thinking", "the template drops past thinking; the sampled ids are kept", transition)
    return ProbeResult(name, "turn", "the template writes past turns differently; the sampled ids are kept", transition)


def _write_after(renderer: Renderer, case: ProbeCase, end: int) -> str | BridgeDifference:
    """Return the text that the template writes from the end of the last assistant turn on, or the difference if it changes earlier text.

    `end` is the number of messages to render.
    """
    tokenizer = renderer.tokenizer

    def text(messages: Sequence[Message], generate: bool) -> str:
        if isinstance(renderer, TemplateRenderer):
            return renderer.text(messages, case.tools, case.kwargs, generate=generate)
        return tokenizer.decode(renderer.render(messages, case.tools, case.kwargs, generate=generate))

    closes = renderer.closing_ids if isinstance(renderer, TemplateRenderer) else renderer.stop_ids
    return write_after_turn(text, [tokenizer.decode(i) for i in closes], case.messages[:end])


def _find_token(renderer: Renderer, where: str, bridge: Sequence[int], template: Sequence[int]) -> TokenDifference:
    size = min(len(bridge), len(template))
    at = next((n for n in range(size) if bridge[n] != template[n]), size)

    def describe(ids: Sequence[int]) -> tuple[tuple[int, str], ...]:
        return tuple((i, renderer.tokenizer.decode(i)) for i in ids[max(0, at - 3) : at + 5])

    return TokenDifference(where, at, describe(bridge), describe(template))


def _write_turn(renderer: Renderer, case: ProbeCase, at: int, prompt: list[int]) -> list[int]:
    """Return the ids of a turn as the model would have sampled it, up to and including the closing token.

    If they cannot be found in a render, build them from the reasoning and the content, without calls.
    """
    tokenizer = renderer.tokenizer
    before = tokenizer.decode(prompt)
    # Include the next message, because in some templates its start ends the turn.
    whole = tokenizer.decode(renderer.render(case.messages[: at + 2], case.tools, case.kwargs, generate=False))
    if whole.startswith(before):
        turn = tokenizer.encode(whole[len(before) :])
        closes = [n for n, i in enumerate(turn) if i in renderer.stop_ids]
        if closes:
            return turn[: closes[0] + 1]
    # The template writes past turns differently from new ones, for example because the generation prompt starts the thinking. Therefore
    # build the turn here.
    message = case.messages[at]
    thinking = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    after = _write_after(renderer, case, at + 2)
    close = tokenizer.encode(after)[0] if isinstance(after, str) else renderer.stop_ids[0]
    return [*tokenizer.encode(thinking + message.content), close]


def _without_thinking(text: str) -> str:
    return re.sub(r"<think>.*?</think>\s*", "", text, flags=re.S)


def _find_unread(renderer: Renderer) -> Iterator[str]:
    """Yield the parts of a reply that the template writes in a form that the parser cannot read."""
    calls = (_call(1, "a.py"), _call(2, "b.py"))
    one_call = isinstance(renderer, TemplateRenderer) and not renderer.template.traits.parallel_calls
    for name, message in (
        ("calls", Message("assistant", tool_calls=calls[:1])),
        ("parallel calls", Message("assistant", tool_calls=calls)),
        ("thinking", Message("assistant", "It prints.", "Look at the code.")),
    ):
        try:
            prompt = renderer.render([_ASK], [_TOOL], {})
            whole = renderer.render([_ASK, message], [_TOOL], {}, generate=False)
        except BadRequest:
            continue  # the template does not support such replies
        if one_call and len(message.tool_calls) > 1:
            continue
        size = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        reader = renderer.reader(np.array(prompt[:size], ID_DTYPE), [_TOOL], (), None, False)
        reader.feed(whole[size:])
        read = reader.finish()[1].message
        if message.reasoning and message.reasoning not in renderer.tokenizer.decode(whole):
            continue  # the template drops thinking, so it is unknown how the model writes it
        if (read.reasoning, [c.name for c in read.tool_calls]) != (
            message.reasoning,
            [c.name for c in message.tool_calls],
        ):
            yield name


def _call(n: int, path: str) -> ToolCall:
    return ToolCall(_call_id(n), "read_file", '{"path": "' + path + '", "lines": 3}')


def _result(n: int, text: str) -> Message:
    return Message("tool", text, tool_call_id=_call_id(n), name="read_file")


def _call_id(n: int) -> str:
    """Return a call id in the form that the gateway uses in replies."""
    return f"{LONG_CALL_ID[:-3]}{n:03}"


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
        "a reminder after results",
        (
            *(_ASK, Message("assistant", tool_calls=(_call(1, "a.py"),)), _result(1, "A"), _MORE),
            *(Message("assistant", tool_calls=(_call(2, "b.py"),)), _result(2, "B")),
            *(_ANSWER, _MORE),
        ),
        (_TOOL,),
    ),
    ProbeCase(
        "a reminder after parallel calls",
        (
            *(_SYSTEM, _ASK, Message("assistant", tool_calls=(_call(1, "a.py"), _call(2, "b.py")))),
            *(_result(1, "A"), _result(2, "B"), _MORE),
        ),
        (_TOOL,),
    ),
    ProbeCase("two questions", (_ASK, _ANSWER, _MORE, _ASK)),
    ProbeCase("a late system prompt", (_SYSTEM, _ASK, _ANSWER, _MORE, Message("system", "Be brief."))),
    ProbeCase("a system prompt after an answer", (_SYSTEM, _ASK, _ANSWER, Message("system", "Be brief."))),
    ProbeCase(
        "a system prompt after results",
        (
            *(_SYSTEM, _ASK, Message("assistant", tool_calls=(_call(1, "a.py"),)), _result(1, "A")),
            Message("system", "Be brief."),
        ),
        (_TOOL,),
    ),
    ProbeCase(
        "a call that the agent did not answer",
        (_ASK, Message("assistant", tool_calls=(_call(1, "a.py"),)), _MORE),
        (_TOOL,),
    ),
)
