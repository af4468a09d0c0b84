"""Certification per transition, and conversations that a template accepts only after they are rewritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.render.template_conversation import TOOL, build_tokenizer, certify_tokenizer, play
from turngate.render import LastTurn, TemplateRenderer
from turngate.render.certify import Certificate
from turngate.render.transition import Transition
from turngate.types import ID_DTYPE, Message, ToolCall

START, END = "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"
TURNS = "{% for m in messages %}" + START + "{{ m.content }}" + END + "{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DECLARE = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
# Like Mistral's: tools are declared before the last user message, so a new one moves them.
MOVING_TOOLS = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if tools and m.role == 'user' and m == users[-1] %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + START
    + "{{ m.content }}"
    + CALLS
    + END
    + "{% endfor %}"
    + GENERATE
)
# Like Gemma's: no tools, and roles must alternate.
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    + TURNS
    + GENERATE
)
# Like Mistral's: an answer must follow the results, and call ids have nine characters, which results repeat.
STRICT_RESULTS = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('an answer must follow') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}{% endfor %}{% endfor %}"
    + DECLARE
    + "{% for m in messages %}"
    + START
    + "{{ m.content }}{% if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}"
    + CALLS.replace("{{ c.function | tojson }}", """{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}""")
    + END
    + "{% endfor %}"
    + GENERATE
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% endfor %}" + DECLARE + TURNS.replace(END, CALLS + END) + GENERATE
)
PARTS = TURNS.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}") + GENERATE
# Like GLM's: a turn ends where the next message starts.
OPENERS = (
    DECLARE.replace("<|im_start|>system\n", "<|system|>").replace("<|im_end|>\n", "")
    + "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
    + CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Like Gemma 4's: results are part of the turn of their call, and the text of that turn follows them.
RESULTS_IN_TURN = (
    DECLARE
    + "{% for m in messages %}{% set at = loop.index %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    + CALLS.replace("\n<tool_call>", "<tool_call>")
    + "{% if m.tool_calls %}<|results|>{% for r in messages[at:] %}{% if r.role == 'tool' %}{{ r.content }};{% endif %}{% endfor %}"
    + "{% endif %}{{ m.content }}"
    + END
    + "{% elif m.role != 'tool' %}"
    + START
    + "{{ m.content }}"
    + END
    + "{% endif %}{% endfor %}"
    + GENERATE
)
MARKERS = "{# <|system|><|user|><|assistant|><|observation|> #}"

ASK, MORE = Message("user", "What does main.py do?"), Message("user", "And util.py?")


def call_turn(*ids: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(i, "read_file", '{"path": "a"}') for i in ids))


def result(call_id: str) -> Message:
    return Message("tool", "text", tool_call_id=call_id, name="read_file")


def load(template: str, folder: Path) -> tuple[TemplateRenderer, Certificate]:
    return certify_tokenizer(build_tokenizer(template, folder))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("template", "rows"),
    [
        (DECLARE + TURNS.replace(END, CALLS + END) + GENERATE, 1),
        (MOVING_TOOLS, 7),  # a row for each user message; calls and their results extend it
        (ALTERNATING, 1),
        (STRICT_RESULTS, 1),
        (ONE_CALL, 1),
        (PARTS, 1),
        (MARKERS + OPENERS, 1),
    ],
    ids=["plain", "moving tools", "alternating", "strict results", "one call", "parts", "openers"],
)
async def test_twelve_turns(template: str, rows: int, tmp_path: Path) -> None:
    renderer, certificate = load(template, tmp_path)
    outcome = await play(renderer, certificate, tmp_path / "data")
    assert outcome.rows == rows
    assert bool(outcome.reasons) == bool(certificate.uncertified) == (rows > 1)
    assert certificate.unread == ()


async def test_only_the_uncertified_transition_forks(tmp_path: Path) -> None:
    renderer, certificate = load(MOVING_TOOLS, tmp_path)
    after_answer = Transition(0, ("user",))
    assert after_answer in certificate.uncertified
    assert Transition(1, ("tool",)) in certificate.certified and Transition(2, ("tool",)) in certificate.certified
    outcome = await play(renderer, certificate, tmp_path / "data")
    assert all("a user message after" in reason for reason in outcome.reasons)
    assert any(
        r.startswith("a user message after an answer: before turn 1, the prompt with the bridge")
        for r in outcome.reasons
    )


def test_shape_that_certification_did_not_probe_is_checked_when_it_occurs(tmp_path: Path) -> None:
    """The template moves its tools only if an argument says so, which no probe passes."""
    template = MOVING_TOOLS.replace("m == users[-1]", "m == users[-1 if moving else 0]")
    renderer, certificate = load(template, tmp_path)
    assert certificate.passed
    stop = renderer.stop_ids[0]
    last = LastTurn(np.array([1], ID_DTYPE), np.array([5, stop], ID_DTYPE), Message("assistant", "It prints."))
    assert renderer.bridge(last, [MORE], [TOOL], {"moving": False}) is not None
    assert renderer.bridge(last, [MORE], [TOOL], {"moving": True}) is None
    assert "before turn 1" in renderer.explain_refusal(last, [MORE], [TOOL], {"moving": True})


@pytest.mark.parametrize(
    ("rejected", "why"),
    [
        ("'main.py' in m.content", "the template rejects every conversation that the bridge could be compared with: "),
        ("'turngateTEXT' in m.content", "the chat template does not write these messages after a turn"),
    ],
    ids=["histories", "new messages"],
)
def test_bridge_that_could_not_be_compared_is_not_used(rejected: str, why: str, tmp_path: Path) -> None:
    """With an argument that no probe passes, the template rejects the conversations that a bridge is compared with."""
    reject = f"{{% if strict and {rejected} %}}{{{{ raise_exception('not this') }}}}{{% endif %}}"
    renderer, certificate = load(TURNS.replace(START, reject + START) + GENERATE, tmp_path)
    assert certificate.passed
    stop = renderer.stop_ids[0]
    last = LastTurn(np.array([1], ID_DTYPE), np.array([5, stop], ID_DTYPE), Message("assistant", "It prints."))
    assert renderer.bridge(last, [MORE], [], {"strict": False}) is not None
    assert renderer.bridge(last, [MORE], [], {"strict": True}) is None
    assert f"a user message after an answer: {why}" in renderer.explain_refusal(last, [MORE], [], {"strict": True})


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (ALTERNATING, [ASK, MORE], "What does main.py do?\n\nAnd util.py?<|im_end|>"),
        (
            ALTERNATING,
            [ASK, call_turn("call_1"), result("call_1"), MORE],
            "<tool_response>\ntext\n</tool_response>\n\nAnd util.py?<|im_end|>",
        ),
        (
            ALTERNATING,
            [ASK, Message("assistant", "a"), Message("system", "Be brief."), MORE],
            "Be brief.\n\nAnd util.py?<|im_end|>",
        ),
        (ALTERNATING, [ASK, Message("assistant", "a"), Message("assistant", "b"), MORE], "a\n\nb<|im_end|>"),
        (STRICT_RESULTS, [ASK, call_turn("a1b2c3d4e"), result("a1b2c3d4e"), MORE], "text\n\nAnd util.py? of a1b2c3d4e"),
    ],
)
def test_roles_are_joined_where_the_template_needs_it(
    template: str, messages: list[Message], expected: str, tmp_path: Path
) -> None:
    renderer = TemplateRenderer(build_tokenizer(template, tmp_path))
    assert expected in renderer.text(messages, [TOOL], {})


def test_call_ids_are_shortened_the_same_way_in_calls_and_results(tmp_path: Path) -> None:
    renderer = TemplateRenderer(build_tokenizer(STRICT_RESULTS, tmp_path))
    texts = {
        given: renderer.text([ASK, call_turn(given), result(given)], [TOOL], {})
        for given in ("call_0123456789abcdef01234567", "call_0123456789abcdef01234568", "toolu_é")
    }
    ids = {text.partition(" of ")[2].partition("<")[0] for text in texts.values()}
    assert len(ids) == 3 and all(len(i) == 9 and i.isalnum() for i in ids)
    for text in texts.values():
        assert text.count(text.partition(" of ")[2].partition("<")[0]) == 2


def test_reply_ends_after_one_call_if_the_template_has_no_parallel_calls(tmp_path: Path) -> None:
    renderer = TemplateRenderer(build_tokenizer(ONE_CALL, tmp_path))
    reader = renderer.reader(np.array([], ID_DTYPE), [TOOL], (), None, False)
    call = '<tool_call>\n{"name": "read_file", "arguments": {}}\n</tool_call>'
    reader.feed(renderer.tokenizer.encode(f"{call}\n{call}"))
    assert reader.satisfied and len(reader.finish()[1].message.tool_calls) == 1


@pytest.mark.parametrize(
    ("sampled", "message", "new", "expected"),
    [
        ("Hi<|user|>", Message("assistant", "Hi"), [MORE], "\nAnd util.py?<|assistant|>"),
        ("Hi</s>", Message("assistant", "Hi"), [MORE], "<|user|>\nAnd util.py?<|assistant|>"),
        ("Hi", Message("assistant", "Hi"), [MORE], "<|user|>\nAnd util.py?<|assistant|>"),
        ("x<|observation|>", call_turn("1"), [result("1")], "\ntext<|assistant|>"),
        ("x<|user|>", call_turn("1"), [result("1")], "<|observation|>\ntext<|assistant|>"),
    ],
)
def test_token_that_starts_the_next_message_is_written_once(
    sampled: str, message: Message, new: list[Message], expected: str, tmp_path: Path
) -> None:
    renderer = TemplateRenderer(build_tokenizer(MARKERS + OPENERS, tmp_path))
    encode = renderer.tokenizer.encode
    last = LastTurn(np.array([], ID_DTYPE), np.array(encode(sampled), ID_DTYPE), message)
    bridge = renderer.bridge(last, new, [TOOL], {})
    assert bridge is not None and renderer.tokenizer.decode(bridge) == expected


async def test_results_that_a_template_writes_inside_the_turn_are_never_lost(tmp_path: Path) -> None:
    renderer, certificate = load(RESULTS_IN_TURN, tmp_path)
    for calls in (1, 2):
        why = certificate.uncertified[Transition(calls, ("tool",))]
        assert "after the turn" in why
    outcome = await play(renderer, certificate, tmp_path / "data")
    assert outcome.rows > 1 and all("results" in reason for reason in outcome.reasons)


def test_certificate_explains_a_difference_token_by_token(tmp_path: Path) -> None:
    _, certificate = load(MOVING_TOOLS, tmp_path)
    finding = next(f for f in certificate.findings if f.verdict == "differs" and f.tokens is not None)
    assert finding.tokens is not None
    same = [a == b for a, b in zip(finding.tokens.bridge, finding.tokens.template, strict=False)]
    assert not all(same) and finding.tokens.where == "before turn 1"
