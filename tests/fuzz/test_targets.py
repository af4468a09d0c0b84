"""A sample of the fuzzing of decoders, parsers and files, with a fixed seed, and the findings of earlier runs."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.coverage_guided import CoverageGuidedFuzzer
from tests.fuzz.rounds import CORPUS, read_corpus, run_examples
from tests.fuzz.targets import SYNTAXES, TARGETS, Target, _content, _parse, check_agent_file, check_parser
from turngate.agents.spec import parse_spec
from turngate.common.validation import parse_toml
from turngate.errors import AgentError

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
