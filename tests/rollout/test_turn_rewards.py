"""Whole rollouts whose grader and host tool give rewards to turns: shown, exported, fed and verified."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit import say
from tests.rollout.kit import PRELUDE, open_harness
from tests.speed import scaled
from turngate.cli import app
from turngate.client.feed import Feed, FeedConfig
from turngate.rollout.outcome import Outcome
from turngate.rollout.recording import build_record
from turngate.tasks.loaders.harbor import load_task
from turngate.tasks.task import Task
from turngate.trace.turn_advantage import TurnCredit

pytestmark = pytest.mark.process

AGENT = (
    PRELUDE
    + """
one = ask("Begin.")
status, reply = http("POST", "/v1/tools/hint", {})
assert status == 200, reply
two = ask("Begin.", one, "Go on.")
"""
)
TOML = """
[turngate]
grader = "grade.py:{name}"
[[turngate.tools]]
name = "hint"
description = "Get a hint."
schema = {{ type = "object" }}
reward = -0.25
"""
GRADERS = """
from turngate.tasks.grading.types import Grade
from turngate.trace.turn_rewards import TurnReward

def shares(subject):
    first, last = subject.turns() or (None, None)
    assert first is None or (first.message.content, last.previous, first.role) == ("One.", first.id, "main")
    rewards = [] if first is None else [
        TurnReward(turn=first.id, value=0.25, kind="part", name="plan"),
        TurnReward(turn=last.id, value=0.75, kind="part"),
    ]
    return Grade(kind="graded", reward=1.0 if rewards else 0.0, turn_rewards=rewards)

async def by_call(subject):
    calls = [call["call"] for call in subject.answers]
    turns = await subject.read_turns()
    rewards = tuple(TurnReward(call=call, value=0.5, kind="extra", name="asked") for call in calls)
    return Grade(kind="graded", reward=float(len(turns) == 2), turn_rewards=rewards)

def unknown(subject):
    return Grade(kind="graded", reward=1.0, turn_rewards=(TurnReward(turn=99, value=1.0, kind="part"),) if subject.turns() else None)

def wrong_sum(subject):
    rewards = tuple(TurnReward(turn=turn.id, value=0.25, kind="part") for turn in subject.turns())
    return Grade(kind="graded", reward=1.0, turn_rewards=rewards)

def not_a_number(subject):
    rewards = tuple(TurnReward(turn=turn.id, value="1", kind="extra") for turn in subject.turns())
    return Grade(kind="graded", reward=1.0, turn_rewards=rewards)
"""


def make_task(folder: Path, name: str) -> Task:
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "agent.py").write_text(AGENT)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text(TOML.format(name=name))
    (folder / "grade.py").write_text(GRADERS)
    return load_task(folder)


async def run_rollout(data: Path, task: Task) -> tuple[Outcome, Any]:
    """Run a rollout of a task. Return its outcome, and the first delivery of a feed."""
    async with open_harness([say("One."), say("Two.")], data=data) as harness:
        outcome = await harness.run(task=task, command="exec python3 agent.py")
        config = FeedConfig(n=1, advantage="none", credit=TurnCredit(gamma=0.5), from_start=True)
        async with await Feed.open(harness.client, "f", config) as feed:
            return outcome, await feed.next(scaled(10))


async def test_grader_and_host_tool_give_rewards(tmp_path: Path) -> None:
    data = tmp_path / "data"
    outcome, delivery = await run_rollout(data, make_task(tmp_path / "task", "shares"))
    assert (outcome.kind, outcome.reward, outcome.unrecorded) == ("graded", 1.0, ""), outcome
    [row] = delivery.rows()
    first, second = row.spans
    placed = [(r.node, r.start, r.end, r.name, r.value, r.kind) for r in row.turn_rewards]
    assert placed == [
        (first.node, first.start, first.end, "plan", 0.25, "part"),
        (first.node, first.start, first.end, "hint", -0.25, "extra"),
        (second.node, second.start, second.end, "", 0.75, "part"),
    ]
    assert row.turn_advantages == (0.25 - 0.25 + 0.5 * 0.75, 0.75)  # discounted returns
    runner = CliRunner()

    def invoke(*arguments: str) -> str:
        done = runner.invoke(app, [*arguments, "--data", str(data)])
        assert done.exit_code == 0, done.output
        return done.output

    shown = await asyncio.to_thread(invoke, "show", outcome.session)
    assert "reward 0.25 (part, plan)" in shown and "reward -0.25 (extra, hint, tool call 1)" in shown, shown
    verified = await asyncio.to_thread(invoke, "verify", outcome.session, "--json")
    assert verified.count("turn rewards") == 2, verified
    out = tmp_path / "rows.jsonl"
    flags = ("--turn-rewards", "--credit", "turn_index", "--gamma", "0.5", "--advantage", "none", "--out", str(out))
    await asyncio.to_thread(invoke, "export", "rows", *flags)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [
        tuple(r[f] for f in ("node", "start", "end", "name", "value", "kind")) for r in record["turn_rewards"]
    ] == placed
    assert record["token_rewards"] == row.token_rewards().tolist()
    assert record["turn_advantages"] == list(row.turn_advantages)
    assert [value is not None for value in record["token_advantages"]] == record["mask"]


async def test_async_grader_rewards_the_turn_of_a_call(tmp_path: Path) -> None:
    outcome, delivery = await run_rollout(tmp_path / "data", make_task(tmp_path / "task", "by_call"))
    assert (outcome.kind, outcome.reward) == ("graded", 1.0), outcome
    [row] = delivery.rows()
    assert [(r.node, r.name, r.value) for r in row.turn_rewards] == [
        (row.spans[0].node, "asked", 0.5),
        (row.spans[0].node, "hint", -0.25),
    ]
    # The recorded outcome is the same if it is recorded again after a restart.
    assert build_record(outcome) == build_record(outcome)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown", "turn_rewards[0].turn is 99"),
        ("wrong_sum", "their sum is 0.5, the reward is 1, and the difference is -0.5"),
        ("not_a_number", "turn_rewards[0].value"),
    ],
)
async def test_invalid_turn_rewards_decide_nothing(name: str, text: str, tmp_path: Path) -> None:
    """The same grader decides about the untouched task, so the work is at fault. The message names the field."""
    outcome, delivery = await run_rollout(tmp_path / "data", make_task(tmp_path / "task", name))
    assert (outcome.kind, outcome.reward, outcome.unrecorded) == ("graded", 0.0, "")
    assert outcome.grade is not None and text in outcome.grade.message, outcome.grade.message
    [row] = delivery.rows()
    assert [(r.name, r.value) for r in row.turn_rewards] == [("hint", -0.25)]
