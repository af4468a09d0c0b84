"""Test when two messages are equal: agents rewrite their history without changing its meaning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trace.kit import Wire, assistant, read, result, system, user
from turngate.trace.message_equality import (
    argument_sizes,
    exact_digest,
    meaning_digest,
    normalize_arguments,
    reasoning_digest,
    tools_digest,
)
from turngate.types import Message


def call(arguments: str, call_id: str = "call_1", name: str = "run") -> Wire:
    return assistant("", (call_id, name, arguments))


def parts(*texts: str) -> list[Wire]:
    return [{"type": "text", "text": text} for text in texts]


LITELLM_TEXT = "[System: Empty message content sanitised to satisfy protocol]"
EQUAL: list[tuple[str, Wire, Wire]] = [
    ("null and empty", assistant(None), assistant("")),
    ("a string and a part", user("Fix it."), user(parts("Fix it."))),
    ("a string and a part, in an answer", assistant("Done."), assistant(parts("Done."))),
    ("a string and a part, in a result", result("call_1", "ok"), result("call_1", parts("ok"))),
    ("an answer, trimmed", assistant("  Done.\n"), assistant("Done.")),
    ("a question, trimmed at its end", user("Fix it.\n\n"), user("Fix it.")),
    ("a result, trimmed at its end", result("call_1", "ok \n"), result("call_1", "ok")),
    ("reasoning, dropped", assistant("Done.", thinking="Hm."), assistant("Done.")),
    ("reasoning, changed", assistant("Done.", thinking="Hm."), assistant("Done.", thinking="Well.")),
    ("white space in arguments", call('{"a": 1, "b": [2]}'), call('{"a":1,"b":[2]}')),
    ("the order of keys in arguments", call('{"a": 1, "b": 2}'), call('{"b": 2, "a": 1}')),
    ("keys inside of arguments", call('{"a": {"x": 1, "y": 2}}'), call('{"a": {"y": 2, "x": 1}}')),
    ("escapes in arguments", call('{"a": "\\u00e9"}'), call('{"a": "é"}')),
    ("1.0 and 1 in arguments", call('{"a": 1.0, "b": [2e0]}'), call('{"a": 1, "b": [2]}')),
    ("no arguments", call(""), call("{}")),
    ("arguments that are no JSON, trimmed", call("ls -l "), call("ls -l")),
    ("LiteLLM's text for an empty answer", call("{}"), assistant(LITELLM_TEXT, ("call_1", "run", "{}"))),
    ("Claude Code's text for an empty answer", assistant(""), assistant("(no content)")),
    ("a renamed call", call("{}"), call("{}", call_id="toolu_99")),
]
DIFFERENT: list[tuple[str, Wire, Wire]] = [
    ("other words", user("Fix it."), user("Fix that.")),
    ("an empty question and the text for an empty answer", user(""), user(LITELLM_TEXT)),
    ("more than the text for an empty answer", assistant(""), assistant(f"{LITELLM_TEXT} Done.")),
    ("another role", user("Fix it."), system("Fix it.")),
    ("the indentation of a question", user("  x = 1"), user("x = 1")),
    ("the indentation of a result", result("call_1", "  x"), result("call_1", "x")),
    ("another tool", call("{}"), call("{}", name="list")),
    ("another value in arguments", call('{"a": 1}'), call('{"a": 2}')),
    ("a number and a string", call('{"a": 1}'), call('{"a": "1"}')),
    ("a fraction", call('{"a": 1.5}'), call('{"a": 1}')),
    ("true and 1", call('{"a": true}'), call('{"a": 1}')),
    ("the order of a list", call('{"a": [1, 2]}'), call('{"a": [2, 1]}')),
    ("a call and none", call("{}"), assistant("")),
    ("two calls and one", assistant("", ("1", "run", "{}"), ("2", "run", "{}")), call("{}")),
    ("two images", user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]),
     user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,bbbb"}}])),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [case[1:] for case in EQUAL], ids=[case[0] for case in EQUAL])
def test_messages_equal_in_meaning(one: Wire, other: Wire) -> None:
    assert read([one]).meaning(0) == read([other]).meaning(0)


@pytest.mark.parametrize(("one", "other"), [case[1:] for case in DIFFERENT], ids=[case[0] for case in DIFFERENT])
def test_messages_different_in_meaning(one: Wire, other: Wire) -> None:
    assert read([one]).meaning(0) != read([other]).meaning(0)


TWO = [("1", "run", "{}"), ("2", "run", "{}")]
RENAMED = [("a", "run", "{}"), ("b", "run", "{}")]
RESULTS: list[tuple[str, list[Wire], list[Wire], bool]] = [
    (
        "renamed with their calls",
        [assistant("", *TWO), result("1", "x"), result("2", "y")],
        [assistant("", *RENAMED), result("a", "x"), result("b", "y")],
        True,
    ),
    (
        "renamed to each other's",
        [assistant("", *TWO), result("1", "x"), result("2", "y")],
        [assistant("", *TWO), result("2", "x"), result("1", "y")],
        False,
    ),
    ("of no call", [result("1", "x")], [result("2", "x")], False),
    (
        "of a call before the last turn",
        [assistant("", *TWO), user("And?"), assistant("No."), result("1", "x")],
        [assistant("", *TWO), user("And?"), assistant("No."), result("2", "x")],
        False,
    ),
]


@pytest.mark.parametrize(("one", "other", "equal"), [case[1:] for case in RESULTS], ids=[case[0] for case in RESULTS])
def test_results_answer_calls_by_position(one: list[Wire], other: list[Wire], equal: bool) -> None:
    first, second = read(one), read(other)
    assert (first.meanings(0, len(first)) == second.meanings(0, len(second))) is equal
    # The order in which meanings are computed does not matter.
    backwards = read(one)
    assert [backwards.meaning(n) for n in reversed(range(len(one)))][::-1] == [
        first.meaning(n) for n in range(len(one))
    ]


EXACT: list[tuple[str, Wire, Wire, bool]] = [
    ("the same", call("{}"), call("{}"), True),
    ("other arguments", call('{"a": 1}'), call('{"a": 2}'), True),
    ("a call id as another dialect writes it", call("{}", "call_7"), call("{}", "toolu_7"), True),
    ("another call id", call("{}", "call_7"), call("{}", "call_8"), False),
    ("trimmed text", assistant("Done. "), assistant("Done."), False),
    ("another tool", call("{}"), call("{}", name="list"), False),
]


@pytest.mark.parametrize(("one", "other", "equal"), [case[1:] for case in EXACT], ids=[case[0] for case in EXACT])
def test_exact_digest(one: Wire, other: Wire, equal: bool) -> None:
    assert (exact_digest(read([one]).messages(0)[0]) == exact_digest(read([other]).messages(0)[0])) is equal


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("", "{}"),
        ('{"b": 1, "a": 2}', '{"a":2,"b":1}'),
        ('{"a": 1.0}', '{"a":1}'),
        ('{"a": 1e300}', '{"a":1e+300}'),
        (" not json ", "not json"),
        ("[" * 2000, "[" * 2000),
    ],
)
def test_normalize_arguments(text: str, normalized: str) -> None:
    assert normalize_arguments(text) == normalized


def test_lone_surrogate_equals_only_itself() -> None:
    digest, same, other = (meaning_digest((Message("user", text),), {}) for text in ("a\ud800", "a\ud800 ", "a\ud801"))
    assert digest == same != other


def test_argument_sizes_are_of_normalized_arguments() -> None:
    message = read([assistant("", ("1", "run", '{"a":   1}'), ("2", "run", ""))]).messages(0)[0]
    assert argument_sizes(message) == (len('{"a":1}'), len("{}"))


@pytest.mark.parametrize(
    ("one", "other", "equal"), [("Hm.", " Hm.\n", True), ("Hm.", "Well.", False), ("", "  ", True)]
)
def test_reasoning_digest(one: str, other: str, equal: bool) -> None:
    assert (reasoning_digest(one) == reasoning_digest(other)) is equal


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([{"name": "run", "x": 1}], [{"x": 1, "name": "run"}], True),
        ([{"name": "run"}], [{"name": "list"}], False),
        ([{"name": "a"}, {"name": "b"}], [{"name": "b"}, {"name": "a"}], False),
        ([{"most": 2**70}], [{"most": 2**70}], True),
    ],
)
def test_tools_digest(one: Any, other: Any, equal: bool) -> None:
    assert (tools_digest(one) == tools_digest(other)) is equal
