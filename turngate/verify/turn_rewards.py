"""Check turn rewards: stored rewards against the turns and the rollout's reward, and rewards in rows against the stored rewards.

These checks are omitted for a session without turn rewards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from reprlib import repr as brief
from typing import Protocol

from turngate.types import Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.outcome import is_finite
from turngate.verify.store_reader import DECODE_ERRORS, StoredSession, StoredTurn, path

_FIELDS = frozenset({"value", "kind", "name", "turn", "call", "start", "end"})
_TOLERANCE = 1e-6


class TrainerReward(Protocol):
    """The reward of a turn, as a trainer receives it with a row."""

    @property
    def node(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def kind(self) -> str: ...


class _Span(Protocol):
    @property
    def node(self) -> int: ...
    @property
    def trained(self) -> bool: ...


class RowWithRewards(Protocol):
    @property
    def branch(self) -> int: ...
    @property
    def spans(self) -> Sequence[_Span]: ...
    @property
    def turn_rewards(self) -> Sequence[TrainerReward]: ...


def read_turn_rewards(session: StoredSession) -> tuple[Json, Json]:
    """Return the turn rewards and the reward of the stored outcome. Each is None if it is missing or cannot be read."""
    outcome = session.related.outcome
    if outcome is None or not isinstance(outcome.raw, (bytes, str)):
        return None, None  # reported by the outcome check
    try:
        stored = json.loads(outcome.raw)
    except DECODE_ERRORS:
        return None, None
    return (stored.get("turn_rewards"), stored.get("reward")) if isinstance(stored, dict) else (None, None)


def check_turn_rewards(session: StoredSession, results: CheckResults) -> None:
    rewards, reward = read_turn_rewards(session)
    if rewards is None:
        return
    turns = {turn.id: turn for turn in session.turns}
    with results.check(
        "structure",
        "turn rewards",
        "every turn reward belongs to a turn or to a host tool call, and those of kind 'part' add up to the reward",
    ) as check:
        if not check.expect(isinstance(rewards, list), f"the turn rewards are {brief(rewards)}, not a list"):
            return
        check.expect(not rewards or is_finite(reward), "turns have rewards, but the rollout has no reward")
        sound = [_check_reward(one, n, turns, check) for n, one in enumerate(rewards)]
        if not all(sound):
            return
        parts = [one["value"] for one in rewards if one["kind"] == "part"]
        if parts and is_finite(reward):
            total = _add_up(parts)
            check.expect(
                abs(total - reward) <= _TOLERANCE * max(1.0, abs(reward)),
                f"rewards of kind 'part' add up to {total:.9g}, but the rollout's reward is {reward:.9g}",
            )


def _add_up(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _check_reward(one: Json, n: int, turns: dict[int, StoredTurn], check: VerifyCheck) -> bool:
    where = f"turn_rewards[{n}]"
    if not check.expect(isinstance(one, dict), f"it is {brief(one)}, not an object", where=where):
        return False
    unknown = sorted(one.keys() - _FIELDS)
    kind, name, value = one.get("kind"), one.get("name", ""), one.get("value")
    turn = turns.get(one["turn"]) if _is_count(one.get("turn")) else None
    holds = [
        check.expect(not unknown, f"it has unknown fields: {', '.join(map(brief, unknown[:5]))}", where=where),
        check.expect(is_finite(value), f"its value is {brief(value)}, which is not a finite number", where=where),
        check.expect(kind in ("part", "extra"), f"its kind is {brief(kind)}, not 'part' or 'extra'", where=where),
        check.expect(isinstance(name, str), f"its name is {brief(name)}, not text", where=where),
        check.expect(
            "call" not in one or _is_count(one["call"]),
            f"its call is {brief(one.get('call'))}, which is not the number of a call",
            where=where,
        ),
        check.expect(
            turn is not None or ("call" in one and "turn" not in one),
            f"its turn is {brief(one.get('turn'))}, which is not a turn of this session",
            where=where,
        ),
    ]
    if turn is not None and ("start" in one or "end" in one):
        start, end = one.get("start"), one.get("end")
        inside = _is_count(start) and _is_count(end) and start < end <= len(turn.ids)
        text = f"its span is {brief(start)} to {brief(end)}, but the length of the turn is {len(turn.ids)}"
        holds.append(check.expect(inside, text, where=where))
    return all(holds)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_row_rewards(session: StoredSession, every: Sequence[RowWithRewards], results: CheckResults) -> None:
    """Check that each row has exactly the rewards of the turns that it trains, each at the right tokens."""
    rewards, _ = read_turn_rewards(session)
    if rewards is None:
        return
    leaves = {leaf.id: leaf for leaf in session.leaves}
    with results.check(
        "rows", "turn rewards", "every turn reward is at the tokens that it belongs to, in the row that trains them"
    ) as check:
        if not _are_valid(rewards, session):
            check.skip("the stored turn rewards are not valid")
            return
        for row in every:
            if row.branch in leaves:
                trained = {span.node for span in row.spans if span.trained}
                due = _list_due(leaves[row.branch], trained, rewards)
                found = [(r.node, r.start, r.end, r.name, r.value, r.kind) for r in row.turn_rewards]
                check.expect(
                    sorted(found) == sorted(due), f"its row has the turn rewards {found}, not {due}", node=row.branch
                )


def _are_valid(rewards: Json, session: StoredSession) -> bool:
    turns = {turn.id: turn for turn in session.turns}
    check = VerifyCheck("structure", "turn rewards")  # its findings are already in the results
    return isinstance(rewards, list) and all(_check_reward(one, n, turns, check) for n, one in enumerate(rewards))


def _list_due(
    leaf: StoredTurn, trained: set[int], rewards: Sequence[dict[str, Json]]
) -> list[tuple[int, int, int, str, float, str]]:
    """Return the rewards that a row must have, as (turn, first token, token after the last, name, value, kind)."""
    due = []
    for turn in path(leaf):
        if not isinstance(turn, StoredTurn) or turn.id not in trained or not len(turn.ids):
            continue
        begin = turn.length - len(turn.ids)
        for one in rewards:
            if one.get("turn") == turn.id:
                start, end = one.get("start", 0), one.get("end", len(turn.ids))
                due.append(
                    (turn.id, begin + start, begin + end, one.get("name", ""), float(one["value"]), one.get("kind", ""))
                )
    return due
