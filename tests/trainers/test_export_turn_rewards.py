"""Rewards and advantages of turns in exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit import result, user
from tests.trainers.test_export import CALL, PROMPT, Recording
from turngate.cli import app
from turngate.errors import ConfigError
from turngate.trace.turn_advantage import TurnCredit
from turngate.trainers.export.files import encode_json
from turngate.trainers.export.tree import decode_tree, rebuild_rows
from turngate.trainers.tree_batch import read_trees

REWARD = {"node": 2, "start": 0, "end": 1, "name": "", "value": 1.0, "kind": "extra"}
LEFT_OUT = "the turn rewards of a rollout: its outcome contains none"


@pytest.fixture
async def recording(tmp_path: Path) -> Recording:
    """A group of four rollouts: with two turns, one turn, a fork, and without turn rewards."""
    (tmp_path / "out").mkdir()
    r = Recording(tmp_path / "data", tmp_path / "out", {})
    async with r.serving() as g:

        async def end(session: Any, reward: float, *earned: float) -> None:
            turns = [turn["id"] for turn in await g.turns(session.id)]
            rewards = [{"turn": turn, "value": v, "kind": "extra"} for turn, v in zip(turns, earned, strict=True)]
            await r.end(session, reward, turn_rewards=rewards)

        await end(await r.rollout("two", CALL, "It says hello."), 2.0, 1.0, 0.0)  # returns 3, 2
        await end(await r.rollout("one", "I do not know."), 1.0, 0.0)  # return 1
        forked = await r.rollout("forked")
        first = await r.ask(forked, [*PROMPT, user("Again.")], CALL)
        for text in ("one", "two"):
            await r.ask(forked, [*PROMPT, user("Again."), first.message(), result(first.calls[0], text)], f"{text}.")
        await end(forked, 0.0, 0.25, 0.5, 1.0)  # returns 1.75, 1.5, 1
        await r.end(await r.rollout("without", "Hm."), 1.0)
    return r


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_rows(recording: Recording, suffix: str) -> None:
    rows, done = recording.export("rows", suffix, turn_rewards=True, credit=TurnCredit(), advantage="leave_one_out")
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        if suffix == ".parquet":
            row |= {name: json.loads(row[name]) for name in ("turn_rewards", "spans") if row[name] is not None}
        by_name.setdefault(recording.name(row["session"]), []).append(row)
    # first turns: 3, 1, 1.75; second turns: 2, 1.5; third turns: 1
    assert by_name["two"][0]["turn_advantages"] == pytest.approx([3 - 2.75 / 2, 0.5])
    assert by_name["one"][0]["turn_advantages"] == pytest.approx([1 - 4.75 / 2])
    main, branch = by_name["forked"]
    assert sorted(v for row in (main, branch) for v in row["turn_advantages"] if v is not None) == pytest.approx(
        sorted([1.75 - 2, -0.5])
    )
    assert sum(r["value"] for row in (main, branch) for r in row["turn_rewards"]) == 1.75
    for row in [by_name["two"][0], main, branch]:
        spans = {span["node"]: span for span in row["spans"]}
        assert len(row["token_rewards"]) == len(row["token_advantages"]) == len(row["ids"])
        for reward in row["turn_rewards"]:
            assert spans[reward["node"]]["trained"]
            assert (reward["start"], reward["end"]) == (spans[reward["node"]]["start"], spans[reward["node"]]["end"])
            assert row["token_rewards"][reward["end"] - 1] == reward["value"]
        trained = [n for n, value in enumerate(row["token_advantages"]) if value is not None]
        assert all(row["mask"][n] for n in trained)
    without = by_name["without"][0]
    fields = ("turn_rewards", "token_rewards", "turn_advantages", "token_advantages")
    assert [without[name] for name in fields] == [None] * 4 and done.left_out == {LEFT_OUT: 1}
    plain, _ = recording.export("rows", suffix)
    assert not set(plain[0]) & set(fields)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_trees_have_the_values_of_rows(recording: Recording, suffix: str) -> None:
    choices: dict[str, Any] = {"turn_rewards": True, "credit": TurnCredit(), "advantage": "leave_one_out"}
    rows, _ = recording.export("rows", **choices)
    trees, done = recording.export("tree", suffix, **choices)
    for tree in trees:
        tree["outcome"] = json.loads(tree["outcome"]) if isinstance(tree["outcome"], str) else tree["outcome"]
    assert [json.loads(encode_json(row)) for tree in trees for row in rebuild_rows(tree)] == rows
    assert done.left_out == {LEFT_OUT: 1}
    decoded = list(read_trees(recording.out / f"out{suffix}"))
    assert [one.turn_rewards is None for one in decoded] == [
        recording.name(one.session) == "without" for one in decoded
    ]
    forked = next(tree for tree in trees if recording.name(tree["session"]) == "forked")
    for change, why in (
        ({"turn_advantages": [[1.0]]}, "turn_advantages has length 1, but 'rows' has length 2"),
        ({"turn_advantages": [[1.0], [1.0, 2.0]]}, r"turn_advantages\[0\] must have one value per turn \(turns: 2\)"),
        (
            {"turn_rewards": [[{**REWARD, "end": 999}], []]},
            r"turn_rewards\[0\] has a reward whose 'start' and 'end' are not",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            decode_tree({**forked, **change})


async def test_missing_turn_advantages_are_counted(recording: Recording) -> None:
    async with recording.serving():
        unclear = [{"call": 1, "value": 1.0, "kind": "extra"}]  # of a host tool whose caller is not known
        await recording.end(await recording.rollout("unclear", "Hm."), 1.0, turn_rewards=unclear)
    rows, done = recording.export("rows", credit=TurnCredit())
    [row] = [row for row in rows if row["session"] == recording.ids["unclear"]]
    assert row["turn_advantages"] is None and row["token_advantages"] is None
    reason = "host-tool call 1 has a reward, but it cannot be decided which turn made the call"
    assert done.left_out == {LEFT_OUT: 1, f"the turn advantages of a rollout: {reason}": 1}


async def test_reward_that_is_too_large_does_not_affect_others(recording: Recording) -> None:
    choices: dict[str, Any] = {"credit": TurnCredit(compare="all_turns"), "advantage": "leave_one_out"}
    before, _ = recording.export("rows", **choices)
    async with recording.serving():
        await recording.end(await recording.rollout("large", "Hm."), 1e35, turn_rewards=[])
    rows, _ = recording.export("rows", **choices)
    assert rows == before


@pytest.mark.parametrize(("format", "field"), [("verl", "extra_fields"), ("slime", "metadata")])
async def test_positions_count_from_the_response(recording: Recording, format: str, field: str) -> None:
    records, done = recording.export(format, turn_rewards=True)
    assert done.left_out == {LEFT_OUT: 1}
    for record in records:
        extra = record[field]
        mask = record["response_mask"] if format == "verl" else record["loss_mask"]
        if recording.name(extra["session"]) == "without":
            assert extra["turn_rewards"] is None and extra["token_rewards"] is None
            continue
        assert extra["turn_rewards"] and len(extra["token_rewards"]) == len(mask)
        for reward in extra["turn_rewards"]:
            assert all(mask[reward["start"] : reward["end"]])
            assert extra["token_rewards"][reward["end"] - 1] == reward["value"]
    plain, _ = recording.export(format)
    assert "turn_rewards" not in plain[0][field]


async def test_flags_that_do_not_apply_are_refused(recording: Recording) -> None:
    with pytest.raises(ConfigError, match="--turn-rewards does not apply to format tinker"):
        recording.export("tinker", turn_rewards=True)
    with pytest.raises(ConfigError, match="--credit does not apply to format verl"):
        recording.export("verl", credit=TurnCredit())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--credit", "turns"), "credit must be one of turn_index, all_turns"),
        (("--credit", "turn_index", "--gamma", "1.5"), "gamma must be a number from 0 to 1"),
        (("--gamma", "0.5"), "--credit turn_index"),
    ],
)
def test_invalid_flags(flags: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "rows", "--data", str(tmp_path), "--out", "x.jsonl", *flags])
    assert done.exit_code != 0 and text in " ".join(done.output.split()), done.output
