"""Test that refused model calls are recorded, and that a rollout with one is not trained, wherever rows leave the gateway."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit import Json, OpenSession, Running, gateway, renderer, say, user
from tests.speed import scaled
from tests.verify.kit import verdict, wrong
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.engines.scripted import Scripted
from turngate.store import refusals
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.sample import REFUSED
from turngate.trainers.export import FORMATS, ExportChoices, export
from turngate.views.training_trace import training_trace

HI = [user("Hi")]
UNKNOWN = (
    "model 'editor' does not exist; this session serves m; to accept the requested name too, add it to models in [signals] of the "
    "agent's file, or to signals.models in the session's settings"
)


async def refuse(g: Running, session: OpenSession, status: int = 404, **request: Json) -> httpx.Response:
    """Make a call that is refused."""
    body = {"model": "editor", "messages": HI, **request}
    answer = await g.http(session.key).post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer


async def open_refused(g: Running, **config: Any) -> OpenSession:
    """Open a session with one turn and one refused call."""
    session = await g.open(model="m", **config)
    await g.ask(session.key, "Hi")
    await refuse(g, session)
    return session


async def record(g: Running, session: OpenSession, reward: float) -> None:
    await g.seal(session.id)
    g.app.outcomes.record(session.id, RecordedOutcome(kind="graded", reward=reward, group="g"))


REFUSED_CALLS: dict[str, tuple[str, Json, int]] = {
    "a model that is not served": ("/v1/chat/completions", {"model": "editor", "messages": HI}, 404),
    "an unsupported field": ("/v1/chat/completions", {"model": "m", "messages": HI, "n": 2}, 400),
    "another dialect": ("/v1/messages", {"model": "editor", "max_tokens": 9, "messages": HI}, 404),
    "a streamed call": ("/v1/chat/completions", {"model": "editor", "messages": HI, "stream": True}, 404),
    "an API that is not served": ("/v1/completions", {"model": "m", "prompt": "Hi"}, 404),
    "a wrong base URL": ("/v1/v1/chat/completions", {"model": "m", "messages": HI}, 404),
}


@pytest.mark.parametrize(("path", "body", "status"), REFUSED_CALLS.values(), ids=REFUSED_CALLS)
async def test_refused_call_is_recorded(path: str, body: Json, status: int) -> None:
    async with gateway() as g:
        session = await g.open(model="m")
        answer = await g.http(session.key).post(path, json=body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == status
        assert (await g.show(session.id))["refused"] == {"count": 1, "status": status, "message": message}
        [event] = [event for event in g.app.events.page(session.id) if event.kind == "refused"]
        assert event.data == {"call": 1, "status": status, "message": message}


async def test_invalid_json_is_recorded_and_first_message_is_kept() -> None:
    async with gateway() as g:
        session = await g.open(model="m")
        answer = await g.http(session.key).post("/v1/chat/completions", content=b"{")
        for _ in range(2):
            await refuse(g, session)
        refused = (await g.show(session.id))["refused"]
        assert refused["count"] == 3 and refused["status"] == 400
        assert refused["message"] == answer.json()["error"]["message"]


async def test_other_failures_are_not_refusals() -> None:
    async with gateway(engine=Scripted([say("Hi")], max_context=30)) as g:
        session = await g.open(model="m")
        http = g.http(session.key)
        assert (await http.get("/v1/models/editor")).status_code == 404
        assert (await http.head("/v1/unknown")).status_code == 404
        assert (await http.post("/v1/telemetry", json={})).status_code == 404
        count = {"model": "editor", "messages": HI}
        assert (await http.post("/v1/messages/count_tokens", json=count)).status_code == 404
        long = {"model": "m", "messages": [user("word " * 100)]}
        assert (await http.post("/v1/chat/completions", json=long)).status_code == 400
        assert (await g.http("wrong").post("/v1/chat/completions", json=long)).status_code == 401
        await g.seal(session.id)
        assert (await http.post("/v1/chat/completions", content=b"{")).status_code in (400, 409)
        assert "refused" not in await g.show(session.id)


@pytest.mark.parametrize("durability", ["process", "disk"])
async def test_refusals_survive_the_gateway(durability: str, tmp_path: Path) -> None:
    async with gateway([say("Hi")], data=tmp_path, durability=durability) as g:
        session = await open_refused(g)
    async with gateway(data=tmp_path) as g:
        assert (await g.show(session.id))["refused"] == {"count": 1, "status": 404, "message": UNKNOWN}
        await refuse(g, session)
        assert (await g.show(session.id))["refused"]["count"] == 2
        assert await g.samples(session.id) == []
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).is_success
        assert g.rows("SELECT * FROM refusals") == []


async def test_unrecorded_refusal_is_not_answered_as_one() -> None:
    """If the refusal cannot be stored, the agent receives a store error instead, which it may retry."""
    async with gateway() as g:
        session = await g.open(model="m")
        with closing(sqlite3.connect(g.database, isolation_level=None)) as db:
            db.execute("ALTER TABLE refusals RENAME TO hidden")
            answer = await refuse(g, session, status=503)
            db.execute("ALTER TABLE hidden RENAME TO refusals")
        assert "error" in answer.json() and (await g.show(session.id))["last_error"]["boundary"] == "store"
        await refuse(g, session)


async def test_no_row_leaves_the_gateway(tmp_path: Path) -> None:
    async with gateway([say("Hi")] * 3, data=tmp_path) as g:
        session = await open_refused(g)
        assert await g.samples(session.id) == []
        [row] = await g.samples(session.id, keep_empty=True)
        assert not any(row["mask"]) and row["spans"][0]["reason"] == REFUSED
        trace = await g.trace(session.id)
        [turn] = training_trace(trace)["turns"]
        assert not any(turn["loss_mask"]) and turn["metadata"]["untrained"] == REFUSED
        report = (await g.show(session.id))["training"]
        assert report["amount"] == "none" and UNKNOWN in report["reason"]

        await record(g, session, 1.0)
        for reward in (0.0, 1.0):
            other = await g.open(model="m")
            await g.ask(other.key, "Hi")
            await record(g, other, reward)
        async with (
            GatewayClient(g.root, g.app.admin_key) as client,
            await Feed.open(client, "f", FeedConfig(n=3, from_start=True)) as feed,
        ):
            delivery = await feed.next(scaled(5))
        assert delivery is not None
        by_id = {rollout.session: rollout for rollout in delivery.rollouts}
        excluded = by_id.pop(session.id)
        assert excluded.excluded == f"it has no trainable turns: a model call by the agent was refused (404: {UNKNOWN})"
        assert not excluded.rows and sum(rollout.advantage or 0 for rollout in by_id.values()) == pytest.approx(0)
    for name in [name for name in FORMATS if name not in ("atif", "dpo")]:  # not for training; needs a group
        done = export(tmp_path, tmp_path / f"{name}.jsonl", ExportChoices(format=name))
        exported = (tmp_path / f"{name}.jsonl").read_text()
        assert session.id not in exported and exported
        [why] = [why for why in done.left_out if "a model call by the agent was refused (404: model 'editor'" in why]
        assert done.left_out[why] == 1 and "--on-refused train" in why


async def test_policy_can_train_it() -> None:
    async with gateway([say("Hi")]) as g:
        session = await open_refused(g, policy={"refused": True})
        [row] = await g.samples(session.id)
        assert any(row["mask"])
        shown = await g.show(session.id)
        assert shown["refused"]["count"] == 1 and shown["training"].get("amount", "most") == "most"


async def test_prime_trajectory_masks_it() -> None:
    async with gateway([say("Hi")]) as g:
        opened = await g.admin.post("/v1/rollouts/r1/register", json={"model": "m"})
        session = OpenSession("r1", opened.json()["api_key"])
        await g.ask(session.key, "Hi")
        await refuse(g, session)
        reply = (await g.admin.get("/v1/rollouts/r1/trajectory")).json()
        assert reply["refused"]["status"] == 404
        [step] = reply["trajectory"]
        assert not any(step["tokens"]["completion_mask"]) and step["extras"]["untrained"] == REFUSED


async def test_call_that_is_repeated_with_success_is_not_refused(tmp_path: Path) -> None:
    """Some clients try a feature, and ask the same without it if it is refused."""
    async with gateway([say("Hi"), say("Ho")], data=tmp_path) as g:
        session = await g.open(model="m")
        await refuse(g, session)
        await refuse(g, session, 400, model="m", n=2)
        await refuse(g, session, messages=[user("Other")])
    async with gateway([say("Hi"), say("Ho")], data=tmp_path) as g:  # also after a restart
        assert (await g.show(session.id))["refused"]["count"] == 3
        await g.ask(session.key, "Hi")
        refused = (await g.show(session.id))["refused"]
        assert refused == {"count": 1, "status": 404, "message": UNKNOWN} and await g.samples(session.id) == []
        await g.ask(session.key, "Other", mode="async stream")
        assert "refused" not in await g.show(session.id) and len(await g.samples(session.id)) == 2
        events = [(event.kind, event.data["call"]) for event in g.app.events.page(session.id) if "call" in event.data]
        assert events == [
            ("refused", 1),
            ("refused", 2),
            ("refused", 3),
            ("repeated", 1),
            ("repeated", 2),
            ("repeated", 3),
        ]
        await g.seal(session.id)
    assert verdict(tmp_path, session.id, renderer=renderer()).ok


async def test_call_with_another_system_prompt_is_not_a_repeat() -> None:
    async with gateway([say("Hi")]) as g:
        session = await g.open(model="m")
        for model, system in (("reviewer", "You review."), ("m", "You are an engineer.")):
            body = {"model": model, "max_tokens": 9, "system": system, "messages": HI}
            await g.http(session.key).post("/v1/messages", json=body)
        assert len(await g.turns(session.id)) == 1
        assert (await g.show(session.id))["refused"]["count"] == 1 and await g.samples(session.id) == []


async def test_limit_drops_no_call_that_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls beyond the limit are stored if the others were repeated successfully, or may still be."""
    monkeypatch.setattr(refusals, "MAX_CALLS", 2)

    async def count(*texts: str) -> int:
        for text in texts:
            await refuse(g, session, messages=[user(text)])
        return int((await g.show(session.id)).get("refused", {"count": 0})["count"])

    async with gateway([say("Hi")] * 3, data=tmp_path) as g:
        session = await g.open(model="m")
        assert await count("Hi", "Hi", "Hi") == 2
        await g.ask(session.key, "Hi")
        assert await count() == 0
        assert await count("Hi", "Hi", "Hi", "Ho", "Ho", "Hu") == 3
        await g.ask(session.key, "Hi")
        await g.ask(session.key, "Ho")  # it cannot be told whether "Hu" was repeated
        assert await count() == 1 and await g.samples(session.id) == []
        rows = g.rows("SELECT call, request IS NULL, repeated FROM refusals ORDER BY call")
        assert [tuple(row) for row in rows] == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 1), (5, 1, 0)]
        await g.seal(session.id)
    assert verdict(tmp_path, session.id, renderer=renderer()).ok


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        ("UPDATE refusals SET status=400", {"events"}),
        ("DELETE FROM refusals", {"events"}),
        ("UPDATE refusals SET repeated=1", {"events"}),
    ],
)
async def test_verify_checks_refusals(change: str, checks: set[str], tmp_path: Path) -> None:
    async with gateway([say("Hi")], data=tmp_path) as g:
        session = await g.open(model="m")
        await g.ask(session.key, "Hi")
        await refuse(g, session, messages=[user("Other")])
        await g.seal(session.id)
    assert verdict(tmp_path, session.id, renderer=renderer()).ok
    with closing(sqlite3.connect(tmp_path / "turngate.db", isolation_level=None)) as db:
        db.execute(change)
    assert wrong(verdict(tmp_path, session.id, renderer=renderer())) == checks


async def test_page_shows_warnings() -> None:
    async with gateway([say("Hi")]) as g:
        session = await open_refused(g)
        await g.seal(session.id)
        warnings = ["no tokens are trained: refused", "another"]
        for data, warning in (({"warnings": warnings}, "; ".join(warnings)), ([1], ""), ({"warnings": 3}, "")):
            outcome = RecordedOutcome(kind="graded", reward=1.0, data=data)
            g.app.outcomes.record(session.id, outcome, replace=True)
            page = g.http()
            await page.post("/page/login", json={"key": g.app.admin_key}, headers={"x-turngate-page": "1"})
            [row] = (await page.get("/page/api/rollouts")).json()["rollouts"]
            assert (row["class"], row["warning"]) == ("graded", warning)
            [shown] = (await page.get(f"/page/api/rollouts/{session.id}")).json()["totals"]["warnings"]
            assert shown.startswith(f"no tokens are trained: a model call by the agent was refused (404: {UNKNOWN}); ")


async def test_messages_are_short_and_encodable() -> None:
    async with gateway() as g:
        session = await g.open(model="m")
        body = json.dumps({"model": "\ud800" + "x" * 5000, "messages": HI}).encode()
        answer = await g.http(session.key).post("/v1/chat/completions", content=body)
        assert answer.status_code in (400, 404)
        assert 0 < len((await g.show(session.id))["refused"]["message"]) <= 500
