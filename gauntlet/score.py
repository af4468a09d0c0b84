"""Compare what a gateway recorded with what the engine really did."""

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
    """The score of one rollout, or the sum of several."""

    rollouts: int = 0
    finished: int = 0  # the agent reached the end of its script
    turns: int = 0  # answers that the agent should have received
    captured: int = 0  # turns recorded with exactly the sampled ids
    trained: int = 0  # tokens that the rows train
    exact: int = 0  # trained tokens proven exact: this id after exactly these ids, with this log-probability
    wanted: int = 0  # tokens that should be trained
    learned: int = 0  # wanted tokens that are trained exactly, each counted once
    rows: int = 0
    best_rows: int = 0
    twice: int = 0  # tokens that are trained more than once
    side: int = 0  # side calls that are trained
    lost: int = 0  # trained answers that the agent never used
    greedy: int = 0  # trained answers that the engine chose at temperature 0: they are not samples of the policy
    faults: int = 0
    faults_told: int = 0  # faults reported to the agent in a way that it can act on
    refused: int = 0  # calls that the gateway refused
    refused_told: int = 0  # refused calls that the record reports
    unseen: int = 0  # calls whose prompt did not contain what the agent sent
    forks: int = 0  # for a gateway that reports causes: calls that fork, or should
    forks_right: int = 0  # forks with the right cause

    def add(self, other: Score) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class LoggedGeneration:
    """One generation from the engine's log, and its role for the agent."""

    number: int  # index of its call
    role: str  # role of its call, or `lost` if the agent never used it
    start: int
    digest: int
    ids: tuple[int, ...]
    unseen: bool
    greedy: bool


def sum_scores(scores: Iterable[Score]) -> Score:
    out = Score()
    for score in scores:
        out.add(score)
    return out


def score_rollout(
    scenario: Scenario,
    log: Sequence[dict[str, Any]],
    record: Record,
    *,
    taken: Mapping[int, int],
    faults_reported: int,
    refused: int = 0,
    names_causes: bool = False,
) -> Score:
    """Score one rollout. `taken`, `faults_reported` and `refused` are what the agent experienced."""
    truth = _build_truth(scenario, log, taken)
    turns = scenario.turns + sum(call.unserved and number in taken for number, call in enumerate(scenario.calls()))
    score = Score(
        rollouts=1,
        finished=int(len(taken) == turns),
        turns=turns,
        captured=_count_captured(truth, record),
        best_rows=scenario.rows,
        faults=scenario.faults,
        faults_told=faults_reported,
        refused=refused,
        refused_told=min(refused, record.refused),
        unseen=sum(each.unseen for each in truth if each.role != "lost"),
        wanted=sum(len(each.ids) for each in truth if each.role in _TRAINED),
    )
    if score.refused_told and not record.rows:  # excluding the rollout is a policy, if the record says why
        score.wanted = score.best_rows = 0
    if record.rows is not None:
        _score_rows(score, truth, record.rows)
    if names_causes:
        _score_causes(score, scenario, truth, record.forks)
    return score


def _score_causes(
    score: Score, scenario: Scenario, truth: Sequence[LoggedGeneration], named: Mapping[tuple[int, ...], str]
) -> None:
    """Score the causes of forks. A required fork needs its cause; an avoidable fork may have none, but not a wrong one."""
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


def _build_truth(scenario: Scenario, log: Sequence[dict[str, Any]], taken: Mapping[int, int]) -> list[LoggedGeneration]:
    calls = scenario.calls()
    numbers = [int(entry["cue"].rpartition(".")[2]) for entry in log]
    # For each call, the last complete generation of the attempt whose answer the agent used.
    kept: dict[int, int] = {}
    for place, (number, entry) in enumerate(zip(numbers, log, strict=True)):
        if entry["state"] == "whole" and taken.get(number) == entry["attempt"]:
            kept[number] = place
    truth = []
    for place, (number, entry) in enumerate(zip(numbers, log, strict=True)):
        role = calls[number].role if kept.get(number) == place else "lost"
        ids = tuple(entry["ids"])
        start, digest = entry["prompt_tokens"], entry["prompt_digest"]
        unseen, greedy = bool(entry["unseen"]), entry["temperature"] == 0
        truth.append(LoggedGeneration(number, role, start, digest, ids, unseen, greedy))
    return truth


def _count_captured(truth: Sequence[LoggedGeneration], record: Record) -> int:
    """Count the answers in the record. Answers recorded without ids can only be counted, not compared."""
    taken = [each for each in truth if each.role != "lost"]
    known = {turn.ids for turn in record.turns if turn.ids}
    found = sum(each.ids in known for each in taken)
    return min(len(taken), found + sum(not turn.ids for turn in record.turns))


def _score_rows(score: Score, truth: Sequence[LoggedGeneration], rows: Sequence[Row]) -> None:
    starts: dict[tuple[int, int], list[LoggedGeneration]] = {}
    for each in truth:
        starts.setdefault((each.start, each.digest), []).append(each)
    seen: set[tuple[int, int]] = set()
    unwanted: dict[str, set[LoggedGeneration]] = {"side": set(), "lost": set(), "greedy": set()}
    for row in rows:
        if not any(row.mask):
            continue
        score.rows += 1
        for place, state, turn, exact in _iterate_trained(row, starts):
            again = (place, state) in seen
            seen.add((place, state))
            score.trained += 1
            score.exact += exact
            score.twice += again
            if turn is None:
                continue
            if turn.role in unwanted:
                unwanted[turn.role].add(turn)
            elif turn.greedy:
                unwanted["greedy"].add(turn)
            elif exact and not again:
                score.learned += 1
    score.side, score.lost, score.greedy = (len(unwanted[kind]) for kind in ("side", "lost", "greedy"))


def _iterate_trained(
    row: Row, starts: Mapping[tuple[int, int], Sequence[LoggedGeneration]]
) -> Iterator[tuple[int, int, LoggedGeneration | None, bool]]:
    """Yield each trained token: its position, the digest up to it, its generation, and whether it is exact."""
    state, place, size = 0, 0, len(row.ids)
    turn: LoggedGeneration | None = None
    while place < size:
        if not row.mask[place]:
            end = place
            while end < size and not row.mask[end]:
                end += 1
            state = proof.digest(row.ids[place:end], state)
            place, turn = end, None
            continue
        if (place, state) in starts:
            turn = max(starts[place, state], key=lambda each: _match_ids(each.ids, row.ids, place))
        state = proof.digest((row.ids[place],), state)
        value = row.logprobs[place]
        yield place, state, turn, value is not None and abs(value - proof.logprob(state)) < _TOLERANCE
        place += 1


def _match_ids(sampled: Sequence[int], ids: Sequence[int], start: int) -> tuple[int, bool]:
    """Count the sampled ids that match at `start`, and return whether all do. One prompt may have several answers."""
    count = 0
    while count < len(sampled) and start + count < len(ids) and sampled[count] == ids[start + count]:
        count += 1
    return count, count == len(sampled)
