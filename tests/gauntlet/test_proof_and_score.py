"""Tests for the proof and the score: every kind of error must lower the score."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gauntlet import proof
from gauntlet.gateways.base import Record, Row, Turn, merge_calls, trained_spans
from gauntlet.scenario import Answer, Call, Results, Scenario, Start, ask, bash
from gauntlet.score import Score, score_rollout

PROMPT, FIRST, BRIDGE, SECOND = [1, 2, 3], [10, 11], [20, 21], [30, 31, 32]
TWO_TURNS = Scenario(
    "two-turns",
    "",
    (Start("go"), ask(Answer(calls=(bash("ls"),))), Results(("a.py",)), ask(Answer(text="done"))),
)
TITLE = Scenario("title", "", (Start("go", tools=False), ask(Answer(text="A title"), role="side")))


def generation(
    number: int, prompt: list[int], ids: list[int], *, attempt: int = 0, state: str = "whole", temperature: float = 1.0
) -> dict[str, Any]:
    return {
        "cue": f"a.{number}",
        "attempt": attempt,
        "prompt_tokens": len(prompt),
        "prompt_digest": proof.digest(prompt),
        "ids": ids,
        "state": state,
        "unseen": [],
        "temperature": temperature,
        "seconds": 0.0,
    }


LOG = [generation(0, PROMPT, FIRST), generation(1, PROMPT + FIRST + BRIDGE, SECOND)]


def call(prompt: list[int], ids: list[int]) -> tuple[list[int], list[int], list[float]]:
    return prompt, ids, proof.logprobs(prompt, ids)


def whole_row() -> Row:
    return merge_calls([call(PROMPT, FIRST), call(PROMPT + FIRST + BRIDGE, SECOND)])[0]


def score_rows(*rows: Row, log: list[dict[str, Any]] = LOG, scenario: Scenario = TWO_TURNS, **taken: int):  # type: ignore[no-untyped-def]
    record = Record([turn for row in rows for turn in trained_spans(row)], list(rows))
    answers = {int(name[1:]): attempt for name, attempt in taken.items()} or dict.fromkeys(
        range(len(scenario.calls())), 0
    )
    return score_rollout(scenario, log, record, taken=answers, faults_reported=0)


def test_perfect_row_has_full_score() -> None:
    score = score_rows(whole_row())
    assert (score.captured, score.turns) == (2, 2)
    assert score.exact == score.trained == score.learned == score.wanted == 5
    assert (score.rows, score.best_rows, score.twice, score.side, score.lost) == (1, 1, 0, 0, 0)


@pytest.mark.parametrize("position", range(len(PROMPT + FIRST + BRIDGE)))
def test_wrong_context_id_makes_later_tokens_inexact(position: int) -> None:
    row = whole_row()
    ids = list(row.ids)
    ids[position] += 1
    score = score_rows(dataclasses.replace(row, ids=ids))
    after = sum(row.mask[position:])
    assert score.exact == score.trained - after


def test_zero_logprobs_are_not_exact() -> None:
    row = whole_row()
    score = score_rows(dataclasses.replace(row, logprobs=[0.0] * len(row.ids)))
    assert score.exact == 0


def test_trained_context_token_is_not_exact() -> None:
    row = whole_row()
    mask = list(row.mask)
    mask[5] = 1
    assert score_rows(dataclasses.replace(row, mask=mask)).exact == 5 < 6


def test_retokenised_turn_is_not_captured() -> None:
    row = whole_row()
    ids = [*row.ids[:-1], 99]
    assert score_rows(dataclasses.replace(row, ids=ids)).captured == 1


def test_turn_in_two_rows_counts_as_trained_twice() -> None:
    score = score_rows(*merge_calls([call(PROMPT, FIRST)]), whole_row())
    assert (score.rows, score.twice) == (2, len(FIRST))
    assert score.learned == score.wanted


def test_trained_side_call_is_counted() -> None:
    log = [generation(0, PROMPT, FIRST)]
    assert score_rows(*merge_calls([call(PROMPT, FIRST)]), log=log, scenario=TITLE).side == 1


def test_trained_answer_the_agent_never_took_is_lost() -> None:
    log = [generation(0, PROMPT, [10, 99], state="aborted"), generation(0, PROMPT, FIRST, attempt=1), LOG[1]]
    kept = score_rows(whole_row(), log=log, _0=1, _1=0)
    assert (kept.lost, kept.learned) == (0, 5)
    trained = score_rows(whole_row(), *merge_calls([call(PROMPT, [10, 99])]), log=log, _0=1, _1=0)
    assert (trained.lost, trained.learned) == (1, 5)


def test_trained_greedy_answer_is_not_a_sample_of_the_policy() -> None:
    log = [LOG[0], generation(1, PROMPT + FIRST + BRIDGE, SECOND, temperature=0.0)]
    trained = score_rows(whole_row(), log=log)
    assert (trained.greedy, trained.learned, trained.wanted) == (1, len(FIRST), 5)
    row = whole_row()
    masked = dataclasses.replace(row, mask=[*row.mask[: -len(SECOND)], *[0] * len(SECOND)])
    score = score_rows(masked, log=log)
    assert (score.greedy, score.learned, score.wanted) == (0, len(FIRST), 5)


SMALL_MODEL = Scenario(
    "small-model",
    "",
    (
        Start("go"),
        ask(Answer(text="one")),
        Start("title", line="title", tools=False),
        Call((Answer(text="A title"),), "title", "side", unserved=True),
    ),
)


def score_refusal(*, rows: bool, told: int, refused: int = 1) -> Score:
    record = Record([Turn(tuple(FIRST))], merge_calls([call(PROMPT, FIRST)]) if rows else [], refused=told)
    answers = {0: 0} if refused else {0: 0, 1: 0}
    log = LOG[:1] if refused else [LOG[0], generation(1, [7], SECOND)]
    return score_rollout(SMALL_MODEL, log, record, taken=answers, faults_reported=0, refused=refused)


def test_refused_call_must_be_in_the_record() -> None:
    silent, told = score_refusal(rows=True, told=0), score_refusal(rows=True, told=1)
    assert (silent.refused_told, silent.refused) == (0, 1)
    assert (told.refused_told, told.refused) == (1, 1)
    assert (told.finished, told.captured, told.turns) == (1, 1, 1)


def test_rollout_may_be_excluded_only_if_its_refusal_is_told() -> None:
    excluded, silent = score_refusal(rows=False, told=1), score_refusal(rows=False, told=0)
    assert (excluded.wanted, excluded.best_rows) == (0, 0)
    assert (silent.wanted, silent.learned, silent.best_rows) == (len(FIRST), 0, 1)


def test_gateway_may_answer_a_call_for_another_model() -> None:
    score = score_refusal(rows=True, told=0, refused=0)
    assert (score.finished, score.turns, score.captured, score.refused) == (1, 2, 1, 0)


def test_merging_ignores_order_but_not_prompt_differences() -> None:
    first, second = call(PROMPT, FIRST), call(PROMPT + FIRST + BRIDGE, SECOND)
    assert merge_calls([second, first]) == merge_calls([first, second])
    assert len(merge_calls([first, call([1, 2, 4, *FIRST, *BRIDGE], SECOND)])) == 2


def test_call_without_logprobs_is_context() -> None:
    row = merge_calls([(PROMPT, FIRST, None)])[0]
    assert not any(row.mask)


def test_text_only_turns_count_as_captured() -> None:
    record = Record([Turn(text="one"), Turn(text="two"), Turn(text="three")])
    assert score_rollout(TWO_TURNS, LOG, record, taken={0: 0, 1: 0}, faults_reported=0).captured == 2


FORKING = Scenario(
    "forking",
    "",
    (Start("go"), ask(Answer(text="one")), Start("go on"), ask(Answer(text="two"), causes=("compaction",))),
    rows=2,
    drift=("whitespace",),
)


def causes(forks: dict[tuple[int, ...], str]) -> tuple[int, int]:
    record = Record([Turn(tuple(FIRST)), Turn(tuple(SECOND))], [], forks)
    score = score_rollout(FORKING, LOG, record, taken={0: 0, 1: 0}, faults_reported=0, names_causes=True)
    return score.forks_right, score.forks


def test_required_fork_needs_correct_cause() -> None:
    assert causes({tuple(SECOND): "compaction"}) == (1, 1)
    assert causes({tuple(SECOND): "edited"}) == (0, 1)
    assert causes({tuple(SECOND): ""}) == (0, 1)
    assert causes({}) == (0, 1)


def test_optional_fork_must_not_have_wrong_cause() -> None:
    named = {tuple(SECOND): "compaction"}
    assert causes({**named, tuple(FIRST): "whitespace"}) == (2, 2)
    assert causes({**named, tuple(FIRST): "edited"}) == (1, 2)
    assert causes({**named, tuple(FIRST): ""}) == (1, 1)
