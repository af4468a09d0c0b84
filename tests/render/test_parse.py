"""The incremental parser gives the same message for any chunking, and loses no text."""

from __future__ import annotations

import json
import random

import pytest

from turngate.render.call_syntax import DEEPSEEK, GEMMA, GLM, HERMES, LFM, LLAMA, MISTRAL, Syntax, parse_calls
from turngate.render.parse import Parsed, Parser, StopStrings
from turngate.types import CallDelta, Constraint, Delta, Tool

TOOLS = (
    Tool(
        "read",
        {
            "function": {
                "name": "read",
                "parameters": {"properties": {"path": {"type": "string"}, "n": {"type": "integer"}}},
            }
        },
    ),
)
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{"path": "a"}\n```<｜tool▁call▁end｜>'
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


def parse(
    text: str, cuts: random.Random | None = None, syntax: Syntax = HERMES, **options: object
) -> tuple[list[Delta | CallDelta], Parsed]:
    parser = Parser(syntax, **{"tools": TOOLS, **options})  # type: ignore[arg-type]
    events: list[Delta | CallDelta] = []
    while text:
        size = len(text) if cuts is None else cuts.randint(1, 4)
        events += parser.feed(text[:size])
        text = text[size:]
    rest, parsed = parser.finish()
    return events + rest, parsed


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hello.", "", "Hello.", []),
        ("<think>\nWhy?\n</think>\n\nBecause.", "Why?", "Because.", []),
        ("\n\n<think>x</think>y", "x", "y", []),
        (f"Look:\n{CALL}", "", "Look:", [("read", '{"path": "a"}')]),
        (f"{CALL}\n{CALL}\n", "", "", [("read", '{"path": "a"}')] * 2),
        (f"<think>\nhm\n</think>\n\n{CALL}", "hm", "", [("read", '{"path": "a"}')]),
        ("a <think> b </think> c", "", "a <think> b </think> c", []),
        ("1 < 2 and <tool_cal is text", "", "1 < 2 and <tool_cal is text", []),
        ('<tool_call>{"name": "read"}</tool_call>', "", "", [("read", "{}")]),
        ('<tool_call>{"name": "read", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("read", '{"a": 1}')]),
        ("<tool_call>\n{oops}\n</tool_call>", "", "<tool_call>\n{oops}\n</tool_call>", []),
        (f"x <tool_call>{{}}</tool_call>{CALL}", "", "x<tool_call>{}</tool_call>", [("read", '{"path": "a"}')]),
        (CALL.removesuffix("</tool_call>"), "", "", [("read", '{"path": "a"}')]),
        ('<tool_call>\n{"name": "read", "argu', "", '<tool_call>\n{"name": "read", "argu', []),
        (
            "<tool_call>\n<function=read>\n<parameter=path>\n01\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            *("", "", [("read", '{"path":"01","n":3}')]),
        ),
        ("trailing space  \n", "", "trailing space  \n", []),
        ("", "", "", []),
    ],
)
def test_hermes(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    for seed in [None, *range(30)]:
        events, parsed = parse(text, None if seed is None else random.Random(seed))
        message = parsed.message
        assert (message.reasoning, message.content) == (reasoning, content)
        assert [(c.name, c.arguments) for c in message.tool_calls] == calls
        assert "".join(e.text for e in events if isinstance(e, Delta) and e.kind == "content") == content
        assert [e.call for e in events if isinstance(e, CallDelta)] == list(message.tool_calls)


@pytest.mark.parametrize(
    ("syntax", "text", "content"),
    [
        (DEEPSEEK, "ok<｜tool▁calls▁begin｜>" + DEEPSEEK_CALL + "<｜tool▁calls▁end｜>", "ok"),
        (MISTRAL, '[TOOL_CALLS][{"name": "read", "arguments": {"path": "a"}}]', ""),
        (MISTRAL, '[TOOL_CALLS]read[ARGS]{"path": "a"}', ""),
        (LLAMA, '{"name": "read", "parameters": {"path": "a"}}', ""),
        (LLAMA, '<|python_tag|>{"name": "read", "parameters": {"path": "a"}}', ""),
    ],
)
def test_other_syntaxes(syntax: Syntax, text: str, content: str) -> None:
    for seed in range(20):
        _, parsed = parse(text, random.Random(seed), syntax)
        assert parsed.message.content == content
        assert [(c.name, c.arguments) for c in parsed.message.tool_calls] == [("read", '{"path": "a"}')]


def test_json_without_call_is_content() -> None:
    _, parsed = parse('{"just": "json"}', syntax=LLAMA)
    assert parsed.message.content == '{"just": "json"}'


def test_unclosed_reasoning_is_flagged() -> None:
    _, parsed = parse("half a thought", in_reasoning=True)
    assert (parsed.message.reasoning, parsed.message.content, parsed.reasoning_open) == ("half a thought", "", True)


def test_call_inside_unclosed_reasoning_counts() -> None:
    _, parsed = parse(f"<think>\nI call now. {CALL}")
    assert [c.name for c in parsed.message.tool_calls] == ["read"]


def test_without_tools_call_markup_is_text() -> None:
    _, parsed = parse(CALL, tools=())
    assert parsed.message.content == CALL


def test_one_call_option_stops_after_first_call() -> None:
    parser = Parser(HERMES, tools=TOOLS, one_call=True)
    parser.feed(CALL)
    assert parser.satisfied
    assert len(parser.finish()[1].message.tool_calls) == 1


def test_forced_calls() -> None:
    _, parsed = parse(' {"path": "a"}', constraint=Constraint("tool", {}, "read"))
    assert [(c.name, c.arguments) for c in parsed.message.tool_calls] == [("read", '{"path": "a"}')]
    _, parsed = parse(
        '[{"name": "read", "arguments": {}}, {"name": "read", "arguments": {"n": 2}}]', constraint=Constraint("tools")
    )
    assert [c.arguments for c in parsed.message.tool_calls] == ["{}", '{"n": 2}']
    _, parsed = parse('{"path": ', constraint=Constraint("tool", {}, "read"))
    assert parsed.message.content == '{"path": '


LATE = Constraint("tool", {}, "read", after_reasoning=True)


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning"),
    [
        ('<think>\nI look.\n</think>\n\n{"path": "a"}', False, "I look."),
        ('I look.\n</think>{"path": "a"}', True, "I look."),
        ('{"path": "a"}', False, ""),
        (' {"path": "a"}', False, ""),
        ('<think></think>{"path": "a"}', False, ""),
    ],
)
def test_constraint_after_reasoning(text: str, in_reasoning: bool, reasoning: str) -> None:
    _, parsed = parse(text, constraint=LATE, in_reasoning=in_reasoning)
    [call] = parsed.message.tool_calls
    assert (call.name, call.arguments, parsed.message.reasoning, parsed.message.content) == (
        "read",
        '{"path": "a"}',
        reasoning,
        "",
    )
    assert not parsed.reasoning_open
    answer = Constraint("json_object", after_reasoning=True)
    _, parsed = parse(text, constraint=answer, in_reasoning=in_reasoning)
    assert (parsed.message.reasoning, parsed.message.content.strip()) == (reasoning, '{"path": "a"}')


def test_constrained_reply_that_ends_in_reasoning() -> None:
    _, parsed = parse("I look and", constraint=LATE, in_reasoning=True)
    assert parsed.reasoning_open and parsed.message.reasoning == "I look and" and not parsed.message.tool_calls


def test_constraint_from_the_first_token_reads_no_reasoning() -> None:
    """As recorded before constraints waited for the reasoning."""
    _, parsed = parse('{"path": "a"}', constraint=Constraint("tool", {}, "read"), in_reasoning=True)
    assert [c.arguments for c in parsed.message.tool_calls] == ['{"path": "a"}']


def test_stop_strings_across_chunks() -> None:
    for seed in range(50):
        stops, draw, text, shown = StopStrings(["END", "\n\n"]), random.Random(seed), "one EN two\nEND three", ""
        while text:
            size = draw.randint(1, 3)
            shown, text = shown + stops.feed(text[:size]), text[size:]
        assert shown + stops.flush() == "one EN two\n"
        assert stops.hit


ARGUMENTS = {"path": 'a "q" é\n.py', "n": 3, "f": 1.5, "b": True, "z": None, "l": [1, "x"], "o": {"k": "v"}}
GLM_ARGUMENTS = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
    for key, value in ARGUMENTS.items()
)
PYTHON_ARGUMENTS = 'path=\'a "q" é\\n.py\', n=3, f=1.5, b=True, z=None, l=[1, "x"], o={"k": \'v\'}'
GEMMA_ARGUMENTS = 'b:true,f:1.5,l:[1,<|"|>x<|"|>],n:3,o:{k:<|"|>v<|"|>},path:<|"|>a "q" é\n.py<|"|>,z:null'


@pytest.mark.parametrize(
    ("syntax", "text", "count"),
    [
        (GLM, f"<tool_call>read_file\n{GLM_ARGUMENTS}</tool_call>\n<tool_call>read_file{GLM_ARGUMENTS}</tool_call>", 2),
        (LFM, f"<|tool_call_start|>[read_file({PYTHON_ARGUMENTS})]<|tool_call_end|>", 1),
        (LFM, f"<|tool_call_start|>[read_file({PYTHON_ARGUMENTS}), read_file({PYTHON_ARGUMENTS})]<|tool_call_end|>", 2),
        (LFM, "<|tool_call_start|>[read_file(" + PYTHON_ARGUMENTS.replace("\\n", "\n") + ")]<|tool_call_end|>", 1),
        (LFM, "<|tool_call_start|>read_file(" + PYTHON_ARGUMENTS.replace("True", "true") + ")<|tool_call_end|>", 1),
        (GEMMA, "<|tool_call>call:read_file{" + GEMMA_ARGUMENTS + "}<tool_call|>", 1),
        (GEMMA, ("<|tool_call>call:read_file{" + GEMMA_ARGUMENTS.replace("null", "None") + "}<tool_call|>") * 2, 2),
    ],
)
def test_call_forms_that_are_not_json(syntax: Syntax, text: str, count: int) -> None:
    parser = Parser(syntax, tools=[Tool("read_file", {"function": {"name": "read_file"}})])
    for letter in text:
        parser.feed(letter)
    message = parser.finish()[1].message
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("read_file", ARGUMENTS)] * count
    assert message.content == ""


def test_unknown_escape_in_a_python_call_causes_no_warning() -> None:
    assert parse_calls(LFM, r'[grep(pattern="\d+")]', ()) == [("grep", r'{"pattern":"\\d+"}')]


@pytest.mark.parametrize(
    ("syntax", "body"),
    [
        (GLM, "two words"),
        (GLM, "f<arg_key>k</arg_key><arg_value>v"),
        (LFM, "[f(1)]"),
        (LFM, "[f(x=open('/etc/passwd'))]"),
        (LFM, "f(" * 5_000),
        (LFM, "f(**x)"),
        (LFM, "f(x={1, 2})"),
        (LFM, "\x00"),
        (GEMMA, "f"),
        (GEMMA, "f{k:1"),
        (GEMMA, 'f{k:<|"|>open}'),
        (GEMMA, "f{k:" + "[" * 5_000),
        (GEMMA, "f{k:word}"),
        (GEMMA, "f{} more"),
        (HERMES, '{"name": "f", "arguments": [1]}'),
        (HERMES, '{"name": "f", "arguments": "text"}'),
        (MISTRAL, '[{"name": "f", "arguments": 1}]'),
        (LLAMA, '{"name": "f", "parameters": "[]"}'),
        (DEEPSEEK, "function<｜tool▁sep｜>f\n```json\n1\n```"),
    ],
)
def test_malformed_calls_are_delivered_as_text(syntax: Syntax, body: str) -> None:
    parser = Parser(syntax, tools=[Tool("f", {"function": {"name": "f"}})])
    text = syntax.call_open + body + syntax.call_close
    parser.feed(text)
    message = parser.finish()[1].message
    assert (message.content, message.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("arguments", "delivered"),
    [('""', "{}"), ("null", "{}"), ('{"n": 1e400}', '{"n": 1e400}'), (r'"{\"a\": 1}"', '{"a": 1}')],
)
def test_empty_and_unusual_arguments_are_delivered(arguments: str, delivered: str) -> None:
    parser = Parser(HERMES, tools=[Tool("f", {"function": {"name": "f"}})])
    parser.feed(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    [call] = parser.finish()[1].message.tool_calls
    assert call.arguments == delivered
