"""Holds what a gateway recorded against what the engine really did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gauntlet import proof
from gauntlet.gateways.base import Record, Row
from gauntlet.scenario import Scenario

_TOLERANCE = proof.STEP / 4
_TRAINED = ("main", "subagent")


@dataclass
class Score:
    """Of one rollout, or of many added up."""

    rollouts: int = 0
    finished: int = 0  # the agent got to the end of its script
    turns: int = 0  # answers that the agent should have taken
    captured: int = 0  # of them, in the record with exactly the ids that were sampled
    trained: int = 0  # tokens that the rows train
    exact: int = 0  # of them, proven: this id, after exactly these ids, with this log-probability
    wanted: int = 0  # tokens that should be trained
    learned: int = 0  # of them, trained exactly, each counted once
    rows: int = 0
    best_rows: int = 0
    twice: int = 0  # tokens that are trained more than once
    side: int = 0  # side calls that are trained
    lost: int = 0  # answers that the agent never took and that are trained
    faults: int = 0
    faults_told: int = 0  # of them, told to the agent in a way that it can act on
    unseen: int = 0  # calls whose prompt did not hold what the agent said
    forks: int = 0  # of a gateway that names causes: calls that fork, or should
    forks_right: int = 0  # of them, with the right cause

    def add(self, other: Score) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class Sampled:
    """One generation of the engine's log, and what it was to the agent."""

    number: int  # of its call
    role: str  # of its call, or `lost`: the agent never took it
    start: int
    digest: int
    ids: tuple[int, ...]
    unseen: bool


def total(scores: Iterable[Score]) -> Score:
    out = Score()
    for score in scores:
        out.add(score)
    return out


def judge(
    scenario: Scenario,
    log: Sequence[dict[str, Any]],
    record: Record,
    *,
    taken: Mapping[int, int],
    told: int,
    names_causes: bool = False,
) -> Score:
    """The score of one rollout. `taken` and `told` are what the agent lived through."""
    truth = _truth(scenario, log, taken)
    score = Score(
        rollouts=1,
        finished=int(len(taken) == scenario.turns),
        turns=scenario.turns,
        captured=_captured(truth, record),
        best_rows=scenario.rows,
        faults=scenario.faults,
        faults_told=told,
        unseen=sum(each.unseen for each in truth if each.role != "lost"),
        wanted=sum(len(each.ids) for each in truth if each.role in _TRAINED),
    )
    if record.rows is not None:
        _judge_rows(score, truth, record.rows)
    if names_causes:
        _judge_causes(score, scenario, truth, record.forks)
    return score


def _judge_causes(
    score: Score, scenario: Scenario, truth: Sequence[Sampled], named: Mapping[tuple[int, ...], str]
) -> None:
    """A fork that has to be needs its cause; one that need not be may have none, but no wrong one."""
    calls = scenario.calls()
    for each in truth:
        if each.role == "lost":
            continue
        call, name = calls[each.number], named.get(each.ids)
        if call.causes and (call.forks or name is not None):
            score.forks += 1
            score.forks_right += name in call.causes
        elif name:
            score.forks += 1
            score.forks_right += name in scenario.drift


def _truth(scenario: Scenario, log: Sequence[dict[str, Any]], taken: Mapping[int, int]) -> list[Sampled]:
    calls = scenario.calls()
    numbers = [int(entry["cue"].rpartition(".")[2]) for entry in log]
    # Of each call, the last whole generation of the attempt that the agent took an answer of.
    kept: dict[int, int] = {}
    for place, (number, entry) in enumerate(zip(numbers, log, strict=True)):
        if entry["state"] == "whole" and taken.get(number) == entry["attempt"]:
            kept[number] = place
    truth = []
    for place, (number, entry) in enumerate(zip(numbers, log, strict=True)):
        role = calls[number].role if kept.get(number) == place else "lost"
        ids = tuple(entry["ids"])
        truth.append(Sampled(number, role, entry["prompt_tokens"], entry["prompt_digest"], ids, bool(entry["unseen"])))
    return truth


def _captured(truth: Sequence[Sampled], record: Record) -> int:
    """Answers in the record. Those that are kept without ids can only be counted."""
    taken = [each for each in truth if each.role != "lost"]
    known = {turn.ids for turn in record.turns if turn.ids}
    found = sum(each.ids in known for each in taken)
    return min(len(taken), found + sum(not turn.ids for turn in record.turns))


def _judge_rows(score: Score, truth: Sequence[Sampled], rows: Sequence[Row]) -> None:
    starts: dict[tuple[int, int], list[Sampled]] = {}
    for each in truth:
        starts.setdefault((each.start, each.digest), []).append(each)
    seen: set[tuple[int, int]] = set()
    unwanted: dict[str, set[Sampled]] = {"side": set(), "lost": set()}
    for row in rows:
        if not any(row.mask):
            continue
        score.rows += 1
        for place, state, turn, exact in _trained(row, starts):
            again = (place, state) in seen
            seen.add((place, state))
            score.trained += 1
            score.exact += exact
            score.twice += again
            if turn is None:
                continue
            if turn.role in unwanted:
                unwanted[turn.role].add(turn)
            elif exact and not again:
                score.learned += 1
    score.side, score.lost = len(unwanted["side"]), len(unwanted["lost"])


def _trained(
    row: Row, starts: Mapping[tuple[int, int], Sequence[Sampled]]
) -> Iterator[tuple[int, int, Sampled | None, bool]]:
    """Each trained token: its place, the digest up to it, the generation that it belongs to, and whether it is exact."""
    state, place, size = 0, 0, len(row.ids)
    turn: Sampled | None = None
    while place < size:
        if not row.mask[place]:
            end = place
            while end < size and not row.mask[end]:
                end += 1
            state = proof.digest(row.ids[place:end], state)
            place, turn = end, None
            continue
        if (place, state) in starts:
            turn = max(starts[place, state], key=lambda each: _common(each.ids, row.ids, place))
        state = proof.digest((row.ids[place],), state)
        value = row.logprobs[place]
        yield place, state, turn, value is not None and abs(value - proof.logprob(state)) < _TOLERANCE
        place += 1


def _common(sampled: Sequence[int], ids: Sequence[int], start: int) -> tuple[int, bool]:
    """How many of the sampled ids stand there, and whether that is all of them: one prompt may have several answers."""
    count = 0
    while count < len(sampled) and start + count < len(ids) and sampled[count] == ids[start + count]:
        count += 1
    return count, count == len(sampled)
