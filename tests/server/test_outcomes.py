"""Test rollout outcomes: recorded once per ended session, only with the admin key, and never with an invented reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit import OpenSession, Running, gateway, say
from turngate.cli import app
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.errors import BadRequest
from turngate.store.outcomes import MAX_BYTES, RecordedOutcome

GRADED = {
    "kind": "graded",
    "reward": 0.5,
    "resolved": False,
    "message": "1 of 2",
    "group": "g",
    "task": "t",
    "attempt": 2,
    "data": {"cases": {"a": "passed", "b": "failed"}},
}


async def open_and_seal(g: Running) -> OpenSession:
    session = await g.open()
    await g.seal(session.id)
    return session


async def put_outcome(g: Running, session: str, outcome: Any, query: str = "") -> Any:
    return await g.admin.put(f"/admin/sessions/{session}/outcome{query}", json=outcome)


def outcome_events(g: Running) -> list[Any]:
    return [event.data for event in g.app.events.page() if event.kind == "outcome"]


async def test_outcome_is_shown_listed_announced_and_stored(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session, other = await open_and_seal(g), await open_and_seal(g)
        assert (await g.show(session.id))["outcome"] is None
        response = await put_outcome(g, session.id, GRADED)
        assert response.status_code == 200 and response.json()["outcome"] == GRADED
        assert outcome_events(g) == [
            {name: GRADED[name] for name in ("kind", "reward", "resolved", "task", "group", "attempt")}
        ]
    async with gateway(data=tmp_path) as g:
        assert (await g.show(session.id))["outcome"] == GRADED
        listed = (await g.admin.get("/admin/sessions")).json()["sessions"]
        assert {s["id"]: s["outcome"] for s in listed} == {session.id: GRADED, other.id: None}
        await g.admin.delete(f"/admin/sessions/{session.id}")
        assert g.rows("SELECT count(*) FROM outcomes") == [(0,)] and outcome_events(g) == []


async def test_outcome_is_recorded_once() -> None:
    async with gateway() as g:
        session = await open_and_seal(g)
        assert (await put_outcome(g, session.id, GRADED)).status_code == 200
        again = dict(reversed(GRADED.items()))  # the order of keys does not matter
        assert (await put_outcome(g, session.id, again)).status_code == 200
        assert len(outcome_events(g)) == 1
        other = {**GRADED, "reward": 1.0}
        refused = await put_outcome(g, session.id, other)
        assert refused.status_code == 409 and "replace=1" in refused.json()["error"]["message"]
        assert (await g.show(session.id))["outcome"]["reward"] == 0.5
        assert (await put_outcome(g, session.id, other, "?replace=1")).status_code == 200
        assert (await put_outcome(g, session.id, other, "?replace=1")).status_code == 200
        assert (await g.show(session.id))["outcome"]["reward"] == 1.0
        assert [data["reward"] for data in outcome_events(g)] == [0.5, 1.0]


async def test_open_session_takes_no_outcome() -> None:
    async with gateway() as g:
        session = await g.open()
        refused = await put_outcome(g, session.id, GRADED)
        assert refused.status_code == 409 and "seal" in refused.json()["error"]["message"]
        await g.cancel(session.id)
        assert (await put_outcome(g, session.id, {"kind": "agent failed"})).status_code == 200
        assert (await g.show(session.id))["outcome"]["reward"] is None
        assert (await put_outcome(g, "never", GRADED)).status_code == 404


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"kind": "infrastructure fault"}, "reward"),
        ({"kind": "invalid task", "reward": 0}, "reward"),
        ({"kind": "cancelled"}, "kind"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"resolved": 1}, "resolved"),
        ({"attempt": -1}, "attempt"),
        ({"attempt": 1.5}, "attempt"),
        ({"task": None}, "task"),
        ({"score": 1}, "score"),
        ({"data": "x" * MAX_BYTES}, "data"),
        ({"group": "a\0b"}, "group"),
        ({"group": "g" * 2001}, "group"),
        ({"task": "ü" * 1001}, "task"),
    ],
)
async def test_invalid_outcome_names_its_field(change: Any, param: str) -> None:
    async with gateway() as g:
        session = await open_and_seal(g)
        response = await put_outcome(g, session.id, {**GRADED, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert (await g.show(session.id))["outcome"] is None and outcome_events(g) == []


async def test_stop_with_null_character_is_refused() -> None:
    async with gateway() as g:
        session = await g.open()
        response = await g.admin.post(f"/admin/sessions/{session.id}/seal", json={"stop": "a\0b"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")
        assert (await g.show(session.id))["status"] == "open"


@pytest.mark.parametrize("reward", ["1e999", "-1e999", "NaN", "Infinity"])
async def test_non_finite_reward_is_refused(reward: str) -> None:
    async with gateway() as g:
        session = await open_and_seal(g)
        body = json.dumps(GRADED).replace("0.5", reward)
        response = await g.admin.put(f"/admin/sessions/{session.id}/outcome", content=body)
        assert response.status_code == 400
        with pytest.raises(BadRequest, match="reward"):
            RecordedOutcome(kind="graded", reward=float(reward.replace("1e999", "inf"))).encode()


async def test_session_key_cannot_access_outcome() -> None:
    async with gateway() as g:
        session = await open_and_seal(g)
        await put_outcome(g, session.id, GRADED)
        for key in ("", "wrong", session.key):
            http = g.http(key)
            assert (await http.put(f"/admin/sessions/{session.id}/outcome?replace=1", json=GRADED)).status_code == 401
            assert (await http.get(f"/admin/sessions/{session.id}")).status_code == 401
            for path in ("/outcome", "/v1/outcome"):
                assert (await http.get(f"/s/{session.id}{path}")).status_code == 404


async def test_python_client_records_outcome() -> None:
    async with gateway() as g, GatewayClient(g.root, g.app.admin_key) as client:
        session = await g.open()
        recorded = RecordedOutcome(kind="infrastructure fault", message="the disk was full", task="t", group="g")
        with pytest.raises(RequestRejected, match="still open"):
            await client.record(session.id, recorded)
        await client.seal(session.id)
        await client.record(session.id, recorded)
        await client.record(session.id, recorded)
        shown = (await client.show(session.id)).outcome
        assert shown is not None
        assert (shown.kind, shown.reward, shown.message) == ("infrastructure fault", None, "the disk was full")
        with pytest.raises(RequestRejected, match="already has a different outcome") as refused:
            await client.record(session.id, RecordedOutcome(kind="graded", reward=0.0))
        assert refused.value.answered == 409
        await client.record(session.id, RecordedOutcome(kind="graded", reward=0.0), replace=True)
        shown = (await client.show(session.id)).outcome
        assert shown is not None and shown.reward == 0.0
        with pytest.raises(BadRequest, match="reward"):
            await client.record(session.id, RecordedOutcome(kind="graded", reward=float("nan")), replace=True)


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (GRADED, "outcome graded · reward 0.5 · not resolved · 1 of 2"),
        (
            {"kind": "infrastructure fault", "message": "the disk\nwas full"},
            "outcome infrastructure fault · no reward · the",
        ),
        (None, ""),
    ],
)
async def test_show_command_prints_outcome_line(tmp_path: Path, outcome: Any, line: str) -> None:
    async with gateway(data=tmp_path) as g:
        session = await open_and_seal(g)
        if outcome is not None:
            assert (await put_outcome(g, session.id, outcome)).status_code == 200
        shown = CliRunner().invoke(app, ["show", session.id, "--data", str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        lines = [text for text in shown.output.splitlines() if text.startswith("outcome")]
        assert len(lines) == bool(line) and all(text.startswith(line) for text in lines)
