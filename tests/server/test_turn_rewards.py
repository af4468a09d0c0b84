"""Test rewards of turns at the gateway: recorded with the outcome, checked against the trace, shown and put into rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit import OpenSession, Running, calls, gateway, result, say, tool, user
from tests.server.test_page import fetch, log_in
from turngate.cli import app
from turngate.client.gateway import GatewayClient
from turngate.errors import BadRequest
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.turn_rewards import TurnReward

HINT = {"name": "hint", "description": "Get a hint.", "schema": {"type": "object"}, "reward": -0.25}
NOTE = {"name": "note", "description": "Write a note.", "schema": {"type": "object"}}


async def work(g: Running, **config: Any) -> tuple[OpenSession, list[int]]:
    """Run a conversation of two turns. Return its session and the ids of its turns."""
    session = await g.open(**config)
    said = await g.ask(session.key, [user("Hi")])
    await g.ask(session.key, [user("Hi"), said.message(), user("Go on")])
    return session, [turn["id"] for turn in await g.turns(session.id)]


async def record(g: Running, session: str, rewards: Any, reward: float | None = 1.0, query: str = "") -> Any:
    outcome = {"kind": "graded", "reward": reward, "turn_rewards": rewards}
    return await g.admin.put(f"/admin/sessions/{session}/outcome{query}", json=outcome)


async def test_recorded_shown_and_in_rows(tmp_path: Path) -> None:
    async with gateway([say("One."), say("Two.")], data=tmp_path) as g:
        session, (first, second) = await work(g)
        await g.seal(session.id)
        rewards = [
            {"turn": first, "value": 0.75, "kind": "part", "name": "plan"},
            {"turn": second, "value": 0.25, "kind": "part"},
            {"turn": second, "value": -0.5, "kind": "extra", "name": "style", "start": 0, "end": 1},
        ]
        assert (await record(g, session.id, rewards)).status_code == 200
        assert (await record(g, session.id, rewards)).status_code == 200  # the same outcome again
        assert (await g.show(session.id))["outcome"]["turn_rewards"] == rewards
        [row] = await g.samples(session.id)
        spans = {span["node"]: span for span in row["spans"]}
        a, b = spans[first], spans[second]
        assert row["turn_rewards"] == [
            {"node": first, "start": a["start"], "end": a["end"], "name": "plan", "value": 0.75, "kind": "part"},
            {"node": second, "start": b["start"], "end": b["end"], "name": "", "value": 0.25, "kind": "part"},
            {
                "node": second,
                "start": b["start"],
                "end": b["start"] + 1,
                "name": "style",
                "value": -0.5,
                "kind": "extra",
            },
        ]
        # A late reward replaces the outcome.
        late = [{"turn": second, "value": 1.0, "kind": "part"}]
        assert (await record(g, session.id, late)).status_code == 409
        assert (await record(g, session.id, late, query="?replace=1")).status_code == 200
        assert (await g.samples(session.id))[0]["turn_rewards"][0]["value"] == 1.0
    done = CliRunner().invoke(app, ["show", session.id, "--data", str(tmp_path)])
    assert done.exit_code == 0 and "reward 1" in done.output, done.output
    shown = json.loads(CliRunner().invoke(app, ["show", session.id, "--data", str(tmp_path), "--json"]).output)
    assert shown["summary"]["outcome"]["turn_rewards"] == late


async def test_page_shows_rewards_as_soon_as_they_are_recorded() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session, (first, second) = await work(g)
        await g.seal(session.id)
        client = await log_in(g)

        async def list_rewards() -> dict[int, Any]:
            tree = await fetch(client, f"rollouts/{session.id}/tree")
            return {node["id"]: node["rewards"] for node in tree["nodes"] if node["kind"] == "sampled"}

        assert await list_rewards() == {first: [], second: []}
        given = {"turn": second, "value": 0.5, "kind": "extra", "name": "style"}
        assert (await record(g, session.id, [given])).status_code == 200
        assert await list_rewards() == {first: [], second: [given]}


async def test_outcome_without_turn_rewards_keeps_its_bytes() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session, _ = await work(g)
        await g.seal(session.id)
        await g.admin.put(f"/admin/sessions/{session.id}/outcome", json={"kind": "graded", "reward": 1.0})
        [(stored,)] = g.rows("SELECT CAST(outcome AS TEXT) FROM outcomes")
        assert "turn_rewards" not in stored
        [row] = await g.samples(session.id)
        assert "turn_rewards" not in row


# rewards, the rollout's reward → the field and a part of the message
REFUSED: dict[str, tuple[list[dict[str, Any]], float | None, str, str]] = {
    "unknown turn": ([{"turn": 99, "value": 1, "kind": "extra"}], 1.0, "turn_rewards[0].turn", "99"),
    "a context": ([{"turn": 0, "value": 1, "kind": "extra"}], 1.0, "turn_rewards[0].turn", "the session has turns"),
    "unknown call": (
        [{"call": 1, "value": 1, "kind": "extra"}],
        1.0,
        "turn_rewards[0].call",
        "no such host-tool call (calls made: 0)",
    ),
    "no kind": ([{"turn": 1, "value": 1}], 1.0, "turn_rewards[0].kind", "kind"),
    "other kind": ([{"turn": 1, "value": 1, "kind": "bonus"}], 1.0, "turn_rewards[0].kind", "bonus"),
    "unknown field": ([{"turn": 1, "value": 1, "kind": "extra", "strat": 2}], 1.0, "turn_rewards[0].strat", "strat"),
    "text": ([{"turn": 1, "value": "1", "kind": "extra"}], 1.0, "turn_rewards[0].value", "value"),
    "span": (
        [{"turn": 1, "value": 1, "kind": "extra", "start": 0, "end": 999}],
        1.0,
        "turn_rewards[0].end",
        "the length of turn",
    ),
    "sum": ([{"turn": 1, "value": 0.5, "kind": "part"}], 1.0, "turn_rewards", "the difference is -0.5"),
    "no reward": ([{"turn": 1, "value": 0.5, "kind": "extra"}], None, "turn_rewards", "'reward' is null"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_rewards_name_their_field_and_lose_nothing(name: str) -> None:
    rewards, reward, field, text = REFUSED[name]
    async with gateway([say("One."), say("Two.")]) as g:
        session, (first, _) = await work(g)
        await g.seal(session.id)
        given = [{**one, **({"turn": first} if one.get("turn") == 1 else {})} for one in rewards]
        refused = await record(g, session.id, given, reward)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == field and text in error["message"], error
        assert (await g.show(session.id))["outcome"] is None
        assert (await record(g, session.id, [], 1.0)).status_code == 200  # the session still takes a valid outcome


async def test_turn_of_another_attempt_is_refused() -> None:
    async with gateway(lambda request, n: say(f"Answer {n}.")) as g:
        session, turns = await work(g)
        other = await g.open()
        await g.ask(other.key, [user("Hi")])
        await g.seal(session.id)
        await g.seal(other.id)
        refused = await record(g, other.id, [{"turn": turns[1], "value": 1, "kind": "extra"}])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "turn_rewards[0].turn"


async def test_client_refuses_invalid_values_before_sending() -> None:
    reward = TurnReward(value=float("nan"), kind="extra", turn=1)
    async with gateway() as g, GatewayClient(g.root, g.app.admin_key) as client:
        with pytest.raises(BadRequest, match=r"turn_rewards\[0\].value"):
            await client.record("s", RecordedOutcome(kind="graded", reward=1.0, turn_rewards=(reward,)))


async def test_host_tool_rewards_the_turn_that_called_it() -> None:
    shell = calls(("bash", {"command": "hint '{}'"}))
    async with gateway([say(shell), say(shell), say("Done.")]) as g:
        session = await g.open(tools=[HINT, NOTE])
        history: list[Any] = [user("Hi")]
        for _ in range(2):
            said = await g.ask(session.key, history, tools=[tool("bash")])
            assert (await g.http(session.key).post("/v1/tools/hint", json={})).json() == {"ok": True}
            history += [said.message(), *(result(call, "ok") for call in said.calls)]
        await g.http(session.key).post("/v1/tools/note", json={})
        await g.ask(session.key, history, tools=[tool("bash")])
        listed = (await g.http(session.key).get("/v1/tools")).json()["tools"]
        assert all("reward" not in one for one in listed)  # the agent must not see it
        first, second, third = [turn["id"] for turn in await g.turns(session.id)]
        await g.seal(session.id)
        given = [
            {"call": 3, "value": 0.5, "kind": "extra", "name": "noted"},
            {"turn": third, "value": 1.0, "kind": "part"},
        ]
        assert (await record(g, session.id, given)).status_code == 200
        stored = (await g.show(session.id))["outcome"]["turn_rewards"]
        assert stored == [
            {"call": 3, "value": 0.5, "kind": "extra", "name": "noted", "turn": second},
            {"turn": third, "value": 1.0, "kind": "part"},
            {"call": 1, "value": -0.25, "kind": "extra", "name": "hint", "turn": first},
            {"call": 2, "value": -0.25, "kind": "extra", "name": "hint", "turn": second},
        ]
        # Sending the given or the stored outcome again changes nothing.
        assert (await record(g, session.id, given)).status_code == 200
        assert (await record(g, session.id, stored)).status_code == 200


async def test_host_tool_with_a_reward_that_was_not_called() -> None:
    async with gateway(lambda request, n: say(f"Answer {n}.")) as g:
        session, _ = await work(g, tools=[HINT])
        failed, _ = await work(g, tools=[HINT])
        for one in (session, failed):
            await g.seal(one.id)
        await g.admin.put(f"/admin/sessions/{session.id}/outcome", json={"kind": "graded", "reward": 1.0})
        assert (await g.show(session.id))["outcome"]["turn_rewards"] == []  # none earned, which is not "none given"
        await g.admin.put(f"/admin/sessions/{failed.id}/outcome", json={"kind": "infrastructure fault"})
        assert "turn_rewards" not in (await g.show(failed.id))["outcome"]


async def test_host_tool_call_whose_turn_is_unknown_does_not_block_the_outcome() -> None:
    """The tool is called before the first turn: its reward is kept and marked, and belongs to no row."""
    async with gateway([say("One.")]) as g:
        session = await g.open(tools=[HINT])
        await g.http(session.key).post("/v1/tools/hint", json={})
        await g.ask(session.key, [user("Hi")])
        await g.seal(session.id)
        for _ in range(2):
            done = await g.admin.put(f"/admin/sessions/{session.id}/outcome", json={"kind": "graded", "reward": 1.0})
            assert done.status_code == 200, done.text
        stored = (await g.show(session.id))["outcome"]["turn_rewards"]
        assert stored == [{"call": 1, "value": -0.25, "kind": "extra", "name": "hint"}]
        assert (await record(g, session.id, stored)).status_code == 200
        assert "turn_rewards" not in (await g.samples(session.id))[0]
