"""The score is only worth something if every way to be wrong costs marks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gauntlet import proof
from gauntlet.gateways.base import Record, Row, Turn, merged, runs
from gauntlet.scenario import Answer, Results, Scenario, Start, ask, bash
from gauntlet.score import judge

PROMPT, FIRST, BRIDGE, SECOND = [1, 2, 3], [10, 11], [20, 21], [30, 31, 32]
TWO_TURNS = Scenario(
    "two-turns",
    "",
    (Start("go"), ask(Answer(calls=(bash("ls"),))), Results(("a.py",)), ask(Answer(text="done"))),
)
TITLE = Scenario("title", "", (Start("go", tools=False), ask(Answer(text="A title"), role="side")))


def generation(
    number: int, prompt: list[int], ids: list[int], *, attempt: int = 0, state: str = "whole"
) -> dict[str, Any]:
    return {
        "cue": f"a.{number}",
        "attempt": attempt,
        "prompt_tokens": len(prompt),
        "prompt_digest": proof.digest(prompt),
        "ids": ids,
        "state": state,
        "unseen": [],
        "seconds": 0.0,
    }


LOG = [generation(0, PROMPT, FIRST), generation(1, PROMPT + FIRST + BRIDGE, SECOND)]


def call(prompt: list[int], ids: list[int]) -> tuple[list[int], list[int], list[float]]:
    return prompt, ids, proof.logprobs(prompt, ids)


def whole_row() -> Row:
    return merged([call(PROMPT, FIRST), call(PROMPT + FIRST + BRIDGE, SECOND)])[0]


def scored(*rows: Row, log: list[dict[str, Any]] = LOG, scenario: Scenario = TWO_TURNS, **taken: int):  # type: ignore[no-untyped-def]
    record = Record([turn for row in rows for turn in runs(row)], list(rows))
    answers = {int(name[1:]): attempt for name, attempt in taken.items()} or dict.fromkeys(
        range(len(scenario.calls())), 0
    )
    return judge(scenario, log, record, taken=answers, told=0)


def test_a_perfect_row_has_full_marks() -> None:
    score = scored(whole_row())
    assert (score.captured, score.turns) == (2, 2)
    assert score.exact == score.trained == score.learned == score.wanted == 5
    assert (score.rows, score.best_rows, score.twice, score.side, score.lost) == (1, 1, 0, 0, 0)


@pytest.mark.parametrize("place", range(len(PROMPT + FIRST + BRIDGE)))
def test_one_wrong_id_in_the_context_makes_everything_after_it_inexact(place: int) -> None:
    row = whole_row()
    ids = list(row.ids)
    ids[place] += 1
    score = scored(dataclasses.replace(row, ids=ids))
    after = sum(row.mask[place:])
    assert score.exact == score.trained - after


def test_a_log_probability_of_zero_is_no_log_probability() -> None:
    row = whole_row()
    score = scored(dataclasses.replace(row, logprobs=[0.0] * len(row.ids)))
    assert score.exact == 0


def test_a_context_token_that_is_trained_is_caught() -> None:
    row = whole_row()
    mask = list(row.mask)
    mask[5] = 1
    assert scored(dataclasses.replace(row, mask=mask)).exact == 5 < 6


def test_a_turn_that_was_tokenised_again_is_not_captured() -> None:
    row = whole_row()
    ids = [*row.ids[:-1], 99]
    assert scored(dataclasses.replace(row, ids=ids)).captured == 1


def test_a_turn_in_two_rows_is_trained_twice() -> None:
    score = scored(*merged([call(PROMPT, FIRST)]), whole_row())
    assert (score.rows, score.twice) == (2, len(FIRST))
    assert score.learned == score.wanted


def test_a_side_call_that_is_trained_is_counted() -> None:
    log = [generation(0, PROMPT, FIRST)]
    assert scored(*merged([call(PROMPT, FIRST)]), log=log, scenario=TITLE).side == 1


def test_an_answer_that_the_agent_never_took_is_lost_even_with_the_same_prompt() -> None:
    log = [generation(0, PROMPT, [10, 99], state="aborted"), generation(0, PROMPT, FIRST, attempt=1), LOG[1]]
    kept = scored(whole_row(), log=log, _0=1, _1=0)
    assert (kept.lost, kept.learned) == (0, 5)
    trained = scored(whole_row(), *merged([call(PROMPT, [10, 99])]), log=log, _0=1, _1=0)
    assert (trained.lost, trained.learned) == (1, 5)


def test_calls_are_joined_in_whatever_order_they_come_and_never_where_the_prompt_differs() -> None:
    first, second = call(PROMPT, FIRST), call(PROMPT + FIRST + BRIDGE, SECOND)
    assert merged([second, first]) == merged([first, second])
    assert len(merged([first, call([1, 2, 4, *FIRST, *BRIDGE], SECOND)])) == 2


def test_a_call_without_log_probabilities_is_context() -> None:
    row = merged([(PROMPT, FIRST, None)])[0]
    assert not any(row.mask)


def test_turns_that_are_kept_as_text_are_only_counted() -> None:
    record = Record([Turn(text="one"), Turn(text="two"), Turn(text="three")])
    assert judge(TWO_TURNS, LOG, record, taken={0: 0, 1: 0}, told=0).captured == 2


FORKING = Scenario(
    "forking",
    "",
    (Start("go"), ask(Answer(text="one")), Start("go on"), ask(Answer(text="two"), causes=("compaction",))),
    rows=2,
    drift=("whitespace",),
)


def causes(forks: dict[tuple[int, ...], str]) -> tuple[int, int]:
    record = Record([Turn(tuple(FIRST)), Turn(tuple(SECOND))], [], forks)
    score = judge(FORKING, LOG, record, taken={0: 0, 1: 0}, told=0, names_causes=True)
    return score.forks_right, score.forks


def test_a_fork_needs_its_cause() -> None:
    assert causes({tuple(SECOND): "compaction"}) == (1, 1)
    assert causes({tuple(SECOND): "edited"}) == (0, 1)
    assert causes({tuple(SECOND): ""}) == (0, 1)
    assert causes({}) == (0, 1)


def test_a_fork_that_need_not_be_may_have_no_wrong_cause() -> None:
    named = {tuple(SECOND): "compaction"}
    assert causes({**named, tuple(FIRST): "whitespace"}) == (2, 2)
    assert causes({**named, tuple(FIRST): "edited"}) == (1, 2)
    assert causes({**named, tuple(FIRST): ""}) == (1, 1)
