"""Test rewards of turns: which are valid, whose turn they belong to, and at which tokens of which row they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.kit import Call, Recorder, assistant, system, user
from turngate.errors import BadRequest
from turngate.trace.sample import add_turn_rewards, build_samples
from turngate.trace.turn_rewards import (
    ToolCallRecord,
    TurnRecord,
    TurnReward,
    check_turn_rewards,
    find_callers,
    resolve_turn_rewards,
    spread_rewards,
)


def part(value: float, **fields: Any) -> TurnReward:
    return TurnReward(value=value, kind="part", **fields)


def extra(value: float, **fields: Any) -> TurnReward:
    return TurnReward(value=value, kind="extra", **fields)


VALID: dict[str, tuple[list[TurnReward], float | None]] = {
    "none": ([], None),
    "parts add up": ([part(0.1, turn=2), part(0.2, turn=4), part(0.7, turn=4)], 1.0),
    "parts add up, almost": ([part(0.5 + 9e-7, turn=2), part(0.5, turn=4)], 1.0),
    "relative to a large reward": ([part(1e9 + 500, turn=2)], 1e9),
    "extras need not": ([extra(3.0, turn=2), extra(-1.0, turn=2)], 0.0),
    "extras beside parts": ([part(1.0, turn=2), extra(-0.1, call=1)], 1.0),
    "a span": ([extra(1.0, turn=2, start=0, end=1)], 0.0),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_rewards(name: str) -> None:
    check_turn_rewards(*VALID[name])


INVALID: dict[str, tuple[list[TurnReward], float | None, str, str]] = {
    "not a number": ([extra(math.nan, turn=2)], 1.0, "turn_rewards[0].value", "finite"),
    "infinite": ([extra(1.0, turn=2), extra(-math.inf, turn=2)], 1.0, "turn_rewards[1].value", "-inf"),
    "too large": ([extra(1e31, turn=2)], 1.0, "turn_rewards[0].value", "1e+30"),
    "no turn": ([extra(1.0)], 1.0, "turn_rewards[0]", "names no turn"),
    "half a span": ([extra(1.0, turn=2, end=3)], 1.0, "turn_rewards[0]", "'start' and 'end'"),
    "an empty span": ([extra(1.0, turn=2, start=3, end=3)], 1.0, "turn_rewards[0].end", "greater than 'start'"),
    "a long name": ([extra(1.0, turn=2, name="n" * 201)], 1.0, "turn_rewards[0].name", "200"),
    "a control character": ([extra(1.0, turn=2, name="a\nb")], 1.0, "turn_rewards[0].name", "printable"),
    "without a reward": ([extra(1.0, turn=2)], None, "turn_rewards", "'reward' is null"),
    "a wrong sum": ([part(0.5, turn=2), part(0.25, turn=4)], 1.0, "turn_rewards", "the difference is -0.25"),
    "one part alone": ([part(0.5, turn=2), extra(0.5, turn=4)], 1.0, "turn_rewards", "their sum is 0.5"),
    "just beyond the tolerance": ([part(1.0 + 2e-6, turn=2)], 1.0, "turn_rewards", "2e-06"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_rewards(name: str) -> None:
    rewards, reward, param, text = INVALID[name]
    with pytest.raises(BadRequest) as error:
        check_turn_rewards(rewards, reward)
    assert error.value.param == param and text in error.value.message, error.value.message


def turn(
    number: int, started: float, ended: float, previous: int | None = None, calls: str = "", tokens: int = 5
) -> TurnRecord:
    return TurnRecord(id=number, previous=previous, started=started, ended=ended, tokens=tokens, calls=calls)


# A main conversation (turns 2, 4) whose first turn starts two helpers (turns 6 and 8), which work at the same time.
TURNS = [
    turn(2, 0, 1, calls="task find it"),
    turn(6, 2, 3, calls="bash hint '{}'"),
    turn(8, 2, 4, calls="bash ls"),
    turn(4, 9, 10, previous=2),
]
# time of the call → turns that may have made it
CALLERS: dict[str, tuple[float, list[int]]] = {
    "before the first turn ended": (0.5, []),
    "only the main conversation has begun": (1.5, [2]),
    "the helper that names the tool": (3.5, [6]),
    "also while the other one waits": (5.0, [6]),
    "a helper that never went on still waits": (11.0, [6]),
}


@pytest.mark.parametrize("name", CALLERS)
def test_caller_of_a_host_tool(name: str) -> None:
    time, expected = CALLERS[name]
    assert [one.id for one in find_callers(ToolCallRecord(1, "hint", time), TURNS)] == expected


def test_callers_without_a_name_are_ambiguous() -> None:
    # Neither helper names `report`. Both have called a tool and wait for its result, and so does the main conversation.
    assert [one.id for one in find_callers(ToolCallRecord(1, "report", 5.0), TURNS)] == [2, 6, 8]
    # A part of a word is not the name of the tool.
    assert [one.id for one in find_callers(ToolCallRecord(1, "l", 5.0), TURNS)] == [2, 6, 8]
    # A conversation that went on is no longer waiting.
    assert [one.id for one in find_callers(ToolCallRecord(1, "report", 11.0), [TURNS[0], TURNS[3]])] == [4]


def test_call_before_the_end_of_the_reply() -> None:
    """Agents may run the first of several tool calls while the rest of the reply is being streamed."""
    title, helper = turn(2, 0, 1), turn(6, 2, 3, calls="bash sleep 60")
    streamed = turn(4, 0, 9, calls="bash hint '{}'\nbash pytest")
    call = ToolCallRecord(1, "hint", 5.0)
    assert find_callers(call, [title, streamed]) == [streamed]
    assert find_callers(call, [title, streamed, helper]) == [helper, streamed], (
        "a script of the helper may have called it"
    )
    waiting = turn(8, 2, 3, calls="bash hint '{}'")
    assert find_callers(call, [title, streamed, helper, waiting]) == [waiting]


CALLS = [ToolCallRecord(1, "hint", 3.5), ToolCallRecord(2, "report", 5.0)]


def test_rewards_are_resolved() -> None:
    given = [extra(1.0, turn=4), extra(2.0, call=1), extra(3.0, turn=8, call=2), extra(4.0, turn=8, start=4, end=5)]
    assert [one.turn for one in resolve_turn_rewards(given, TURNS, CALLS)] == [4, 6, 8, 8]
    assert resolve_turn_rewards(resolve_turn_rewards(given, TURNS, CALLS), TURNS, CALLS) == resolve_turn_rewards(
        given, TURNS, CALLS
    )


UNRESOLVED: dict[str, tuple[TurnReward, str, str]] = {
    "unknown turn": (extra(1.0, turn=3), "turn_rewards[0].turn", "turns 2, 4, 6, 8"),
    "unknown call": (extra(1.0, call=3), "turn_rewards[0].call", "no such host-tool call (calls made: 2)"),
    "ambiguous call": (extra(1.0, call=2), "turn_rewards[0].call", "turns 2, 6, 8"),
    "another turn's call": (extra(1.0, turn=8, call=1), "turn_rewards[0].turn", "did not make call 1"),
    "beyond the turn": (
        extra(1.0, turn=4, start=5, end=6),
        "turn_rewards[0].end",
        "must be at most 5 (the length of turn 4), not 6",
    ),
}


@pytest.mark.parametrize("name", UNRESOLVED)
def test_unresolved_rewards(name: str) -> None:
    reward, param, text = UNRESOLVED[name]
    with pytest.raises(BadRequest) as error:
        resolve_turn_rewards([reward], TURNS, CALLS)
    assert error.value.param == param and text in error.value.message, error.value.message


def test_error_about_an_unknown_turn_names_the_only_turn() -> None:
    with pytest.raises(BadRequest, match=r"is 3, but the session has turn 2$"):
        resolve_turn_rewards([extra(1.0, turn=3)], TURNS[:1])


FIRST = [system("You code."), user("Fix it.")]
SECOND = [*FIRST, assistant("On it."), user("And?")]
OTHER = [*FIRST, assistant("On it."), user("Why?")]


def test_a_shared_turn_has_its_reward_in_one_row() -> None:
    recorder = Recorder([Call(FIRST, assistant("On it."), size=3), Call(SECOND, size=4), Call(OTHER, size=2)])
    first, second, other = (one.id for one in recorder.turns)
    rewards = [
        part(0.5, turn=first, name="plan"),
        part(0.5, turn=other),
        extra(-1.0, turn=second, start=1, end=2, name="style"),
    ]
    rows = add_turn_rewards(build_samples(recorder.trace), rewards)
    placed = [[(r.node, r.start, r.end, r.name, r.value, r.kind) for r in row.turn_rewards] for row in rows]
    # Each context has one token here: 1 + 3 of the first turn, then 1 + 4 or 1 + 2.
    assert placed == [
        [(first, 1, 4, "plan", 0.5, "part"), (second, 6, 7, "style", -1.0, "extra")],
        [(other, 5, 7, "", 0.5, "part")],
    ]
    assert spread_rewards(len(rows[0].ids), rows[0].turn_rewards).tolist() == [0, 0, 0, 0.5, 0, 0, -1.0, 0, 0]
    assert spread_rewards(len(rows[1].ids), rows[1].turn_rewards).tolist() == [0, 0, 0, 0, 0, 0, 0.5]
    assert add_turn_rewards(build_samples(recorder.trace), [])[0].turn_rewards == ()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_reward_lands_on_the_tokens_of_its_own_turn(data: st.DataObject) -> None:
    """Random conversations with forks, retries, compactions and helpers: each reward is at its turn's ids, in one row at most."""
    recorder, histories = Recorder(), [FIRST]
    for n in range(data.draw(st.integers(1, 8), "turns")):
        history = data.draw(st.sampled_from(histories), "history")
        kind = data.draw(st.sampled_from(["go on", "compact", "help", "abort"]), "kind")
        if kind == "compact":
            history = [history[0], user(f"So far: {n}")]
        elif kind == "help":
            history = [system(f"You help {n}."), user("Find it.")]
        answer = assistant(f"answer {n}")
        size = data.draw(st.integers(0, 4), "size")
        recorder.add(Call(history, answer, size=size, finish="abort" if kind == "abort" else "stop"))
        histories.append([*history, answer, user(f"more {n}")])
    ids_of = {one.id: one.ids.tolist() for one in recorder.turns}
    rewards = []
    for number, (node, ids) in enumerate(ids_of.items()):
        start = data.draw(st.integers(0, max(0, len(ids) - 1)), "start")
        rewards.append(extra(float(number), turn=node))
        if ids:
            rewards.append(extra(0.5, turn=node, start=start, end=len(ids), name="end"))
    rows = add_turn_rewards(build_samples(recorder.trace, keep_empty=True), rewards)
    found: dict[tuple[int, str], int] = {}
    for row in rows:
        trained = {span.node for span in row.spans if span.trained}
        assert {reward.node for reward in row.turn_rewards} <= trained
        for reward in row.turn_rewards:
            given_ids, placed = ids_of[reward.node], row.ids[reward.start : reward.end].tolist()
            assert placed == (given_ids[-len(placed) :] if reward.name else given_ids)
            assert row.mask[reward.start : reward.end].all()
            found[reward.node, reward.name] = found.get((reward.node, reward.name), 0) + 1
        assert math.isclose(
            float(spread_rewards(len(row.ids), row.turn_rewards).sum()), sum(r.value for r in row.turn_rewards)
        )
    every = {span.node for row in rows for span in row.spans if span.trained and span.end > span.start}
    assert found == dict.fromkeys([(node, name) for node in every for name in ("", "end")], 1)
