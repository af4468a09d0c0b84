"""Verify detects turn rewards that no gateway could have stored, and rows whose turn rewards are not at their own tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import kit
from tests.exact.agent import World
from tests.verify.kit import run_verify, tampering, wrong
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.sample import Sample
from turngate.trace.turn_rewards import TurnReward


async def record(folder: Path) -> str:
    async with World.of(folder, kit.renderer()) as world:
        agent = world.agent()
        agent.messages = [kit.user("Begin.")]
        for text in ("One.", "Two."):
            reply = await agent.call(kit.say(text))
            agent.messages += [reply.message, kit.user("Go on.")]
        first, second = [turn.id for turn in agent.session.trace.turns()]
        await world.gateway.sessions.seal(agent.session_id)
        rewards = (
            TurnReward(turn=first, value=0.75, kind="part"),
            TurnReward(turn=second, value=0.25, kind="part"),
            TurnReward(turn=second, value=-1.0, kind="extra", start=0, end=1, name="style"),
        )
        outcome = RecordedOutcome(kind="graded", reward=1.0, turn_rewards=rewards)
        world.gateway.outcomes.record(agent.session_id, outcome)
        return agent.session_id


def test_unchanged_session_passes(recorded: tuple[Path, str]) -> None:
    found = run_verify(*recorded)
    assert found.ok, found.wrong
    assert [f.part for f in found.findings if f.check == "turn rewards"] == ["structure", "rows"]


def one(change: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda outcome: outcome["turn_rewards"][2].update(change)


STORED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "parts do not add up": lambda o: o["turn_rewards"][0].update(value=0.5),
    "other reward": lambda o: o.update(reward=2.0),
    "no reward": lambda o: o.update(reward=None),
    "unknown turn": one({"turn": 99}),
    "a context": one({"turn": 0}),
    "no turn": lambda o: o["turn_rewards"][2].pop("turn"),
    "not a number": one({"value": float("nan")}),
    "text": one({"value": "1"}),
    "a list": one({"value": []}),
    "no value": lambda o: o["turn_rewards"][2].pop("value"),
    "a part without a value": lambda o: o["turn_rewards"][0].pop("value"),
    "parts too large to add up": lambda o: [part.update(value=1e308) for part in o["turn_rewards"][:2]],
    "other kind": one({"kind": "bonus"}),
    "beyond the turn": one({"end": 99}),
    "empty span": one({"start": 1}),
    "half a span": lambda o: o["turn_rewards"][2].pop("start"),
    "start that is text": one({"start": "a"}),
    "end that is null": one({"end": None}),
    "name": one({"name": 3}),
    "call": one({"call": -1}),
    "unknown field": one({"weight": 1}),
    "not a list": lambda o: o.update(turn_rewards={}),
    "not an object": lambda o: o["turn_rewards"].append(1),
}


@pytest.mark.parametrize("name", STORED)
def test_alteration_is_detected(name: str, copy: tuple[Path, str]) -> None:
    with tampering(*copy) as t:
        [(stored,)] = t._db.execute("SELECT outcome FROM outcomes WHERE session=?", (t.key,)).fetchall()
        outcome = json.loads(stored)
        STORED[name](outcome)
        t.sql("UPDATE outcomes SET outcome=? WHERE session=?", json.dumps(outcome).encode(), t.key)
    assert "turn rewards" in wrong(run_verify(*copy))


def change_first(**change: Any) -> Callable[[Sample], Sample]:
    def apply(row: Sample) -> Sample:
        first, *others = row.turn_rewards
        return msgspec.structs.replace(row, turn_rewards=(msgspec.structs.replace(first, **change), *others))

    return apply


ROWS: dict[str, Callable[[Sample], Sample]] = {
    "missing": lambda row: msgspec.structs.replace(row, turn_rewards=row.turn_rewards[1:]),
    "twice": lambda row: msgspec.structs.replace(row, turn_rewards=row.turn_rewards * 2),
    "other value": change_first(value=0.5),
    "other kind": change_first(kind="extra"),
    "shifted": lambda row: change_first(start=row.turn_rewards[0].start + 1)(row),
    "at the other turn": lambda row: change_first(start=row.turn_rewards[1].start, end=row.turn_rewards[1].end)(row),
}


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_are_detected(name: str, recorded: tuple[Path, str]) -> None:
    found = run_verify(*recorded, ROWS[name])
    assert [(f.part, f.check) for f in found.wrong] == [("rows", "turn rewards")]
