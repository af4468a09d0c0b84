"""A sample of the fuzzing of decoders, parsers and files, with a fixed seed, and the findings of earlier runs."""

from __future__ import annotations

import json
import math
import random

import pytest

from tests.fuzz import relay_calls
from tests.fuzz.coverage_guided import CoverageGuidedFuzzer
from tests.fuzz.damaged_sessions import CellDamage, SessionDamage, check_verify
from tests.fuzz.relay_calls import RelayCall, check_relay
from tests.fuzz.requests import read_calls
from tests.fuzz.rounds import CORPUS, read_corpus, run_examples
from tests.fuzz.targets import (
    SYNTAXES,
    TARGETS,
    Target,
    _content,
    _parse,
    check_agent_file,
    check_parser,
    check_task_row,
)
from turngate.agents.spec import parse_spec
from turngate.common.validation import parse_toml
from turngate.engines.observe import translate
from turngate.errors import AgentError
from turngate.verify import turn_rewards

SEED = 1
GUIDED = [target for target in TARGETS if target.covers]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_random_input(target: Target) -> None:
    run_examples(target.inputs, target.check, 25, SEED)


@pytest.mark.repeat
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_more_random_input(target: Target) -> None:
    run_examples(target.inputs, target.check, 150, SEED)


@pytest.mark.parametrize("target", GUIDED, ids=lambda target: target.name)
def test_corpus(target: Target) -> None:
    for raw in read_corpus(target):
        target.check(raw)


def test_every_folder_of_the_corpus_belongs_to_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= {target.name for target in GUIDED}


@pytest.mark.full
@pytest.mark.parametrize("target", GUIDED, ids=lambda target: target.name)
def test_coverage_guided(target: Target) -> None:
    fuzzer = CoverageGuidedFuzzer(target.check, [*target.seeds(), *read_corpus(target)], target.covers, SEED)
    fuzzer.run_times(200)


def test_coverage_guides_to_a_planted_bug() -> None:
    """Random bytes do not find three nested conditions, but each of them is a new line."""

    def check(raw: bytes) -> None:
        if raw[:1] == b"{" and len(raw) > 4:  # noqa: SIM102
            if raw[1:2] == b"\0":  # noqa: SIM102
                if raw[2:3] == b"[":
                    raise AssertionError("planted")

    fuzzer = CoverageGuidedFuzzer(check, [b"x12345"], "tests/fuzz", SEED)
    with pytest.raises(AssertionError, match="planted"):
        fuzzer.run_times(200_000)


def test_relay_target_detects_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop_forever(call_id: str, taken: set[str], fixed: set[str]) -> str:
        unique = call_id
        while unique in taken:
            unique = f"{call_id}_{len(taken)}"
        taken.add(unique)
        return unique

    monkeypatch.setattr(translate, "_make_unique", loop_forever)
    monkeypatch.setattr(relay_calls, "HANG_S", 0.2)
    with pytest.raises(AssertionError, match="it has computed for"):
        check_relay(call_with_ids("a", "a_2", "a"))


def test_verify_target_detects_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_rewards, "_add_up", math.fsum)
    parts = [{"kind": "part", "turn": turn, "value": 1e308} for turn in (2, 4)]
    outcome = json.dumps({"kind": "graded", "reward": 1.0, "turn_rewards": parts}).encode()
    with pytest.raises(OverflowError):
        check_verify(SessionDamage([CellDamage("outcomes", "outcome", 0, outcome)], corrects_checksums=True))


# ── findings of earlier runs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "<think></think> x<｜tool▁calls▁begin｜>",  # the marker was removed from a reply without tools, depending on the chunks
        "<think>a<｜tool▁calls▁end｜></think>b",
        "<｜tool▁calls<｜tool▁calls▁begin｜>▁begin｜>",
    ],
)
def test_reply_does_not_depend_on_its_chunks(text: str) -> None:
    check_parser(SYNTAXES["deepseek"], text)
    for options in ({}, {"in_reasoning": True}):
        whole = _content(_parse(SYNTAXES["deepseek"], text, None, options)[1])
        for seed in range(20):
            assert _content(_parse(SYNTAXES["deepseek"], text, random.Random(seed), options)[1]) == whole


def test_deeply_nested_toml_is_an_error() -> None:
    nested = "x = " + "[" * 3000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml(nested)
    with pytest.raises(AgentError, match="invalid TOML: a value is nested too deeply"):
        parse_spec(nested, "agent.toml")


def test_number_with_too_many_digits_is_an_error() -> None:
    check_agent_file(b"x = " + b"9" * 5000)


@pytest.mark.parametrize("field", ["FAIL_TO_PASS", "PASS_TO_PASS", "install_config"])
def test_deeply_nested_json_in_a_task_row_is_an_error(field: str) -> None:
    row = {"instance_id": "a-1", "repo": "a/b", "base_commit": "0" * 40, "problem_statement": "Fix it."}
    check_task_row({**row, "test_patch": "x", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [], field: "[" * 5000})


def call_with_ids(*ids: str) -> RelayCall:
    """Make a `chat` call in which each of these ids is that of a tool call of one turn."""
    messages: list[object] = [{"role": "user", "content": "Hi"}]
    for one in ids:
        function = {"name": "read", "arguments": "{}"}
        messages.append({"role": "assistant", "tool_calls": [{"id": one, "type": "function", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": one, "content": "found"})
    return RelayCall("chat", json.dumps({"model": "m", "messages": messages}).encode())


@pytest.mark.parametrize("ids", [("a", "a_2", "a"), ("a.1", "a_1")])
def test_relayed_tool_call_ids_are_unique(ids: tuple[str, ...]) -> None:
    check_relay(call_with_ids(*ids))


@pytest.mark.parametrize(
    ("dialect", "history"), [("chat", "messages"), ("messages", "messages"), ("gemini", "contents")]
)
def test_recorded_calls_are_unpacked(dialect: str, history: str) -> None:
    """A recording stores a history as a reference to that of an earlier call, which decoders reject right away."""
    calls = read_calls(dialect)
    assert all(isinstance(call[history], list) for call in calls)
    assert max(len(call[history]) for call in calls) > 3
