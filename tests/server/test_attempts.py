"""Test the admin API for attempts: who may open one, what giving one up means, and where the result is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from tests.feed.kit import training
from tests.kit import gateway
from tests.server.test_forwarding import crew
from tests.server.test_page import fetch, log_in
from turngate.cli.show import load_from_store, print_session
from turngate.client.gateway import GatewayClient
from turngate.store.outcomes import RecordedOutcome
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

GRADED = RecordedOutcome(kind="graded", reward=1.0, group="g", task="t")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"rollout": "r", "attempt": 0}, "attempt"),
        ({"rollout": "r"}, "attempt"),
        ({"attempt": 1}, "rollout"),
        ({"rollout": "", "attempt": 1}, "rollout"),
        ({"rollout": "r\n", "attempt": 1}, "rollout"),
        ({"rollout": "r" * 513, "attempt": 1}, "rollout"),
        ({"rollout": "r", "attempt": 1, "session": "no/id"}, "session"),
    ],
)
async def test_invalid_requests_name_the_field(body: dict[str, Any], param: str) -> None:
    async with gateway() as g:
        refused = await g.admin.post("/admin/attempts/supersede", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"attempt": 2}, "rollout"), ({"rollout": "r", "attempt": 0}, "attempt"), ({"rollout": "\t"}, "rollout")],
)
async def test_invalid_settings_name_the_field(settings: dict[str, Any], param: str) -> None:
    async with gateway() as g:
        refused = await g.admin.post("/admin/sessions", json=settings)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_opening_an_attempt_cancels_the_lower_ones() -> None:
    async with training() as t:
        first = await t.client.open({"rollout": "r"}, "s1")
        await t.g.ask(first.key, "Hi")
        await t.client.open({"rollout": "r", "attempt": 2}, "s2")
        shown = await t.client.show("s1")
        assert (shown.status, shown.stop, shown.excluded) == ("cancelled", "superseded", "superseded by attempt 2")
        assert shown.training is not None and shown.training.amount == "none"
        assert "superseded by attempt 2" in shown.training.warning
        assert [(a.attempt, a.session, a.state) for a in await t.client.attempts("r")] == [
            (1, "s1", "superseded"),
            (2, "s2", "running"),
        ]
        with pytest.raises(openai.ConflictError):  # its agent gets no more turns
            await t.g.ask(first.key, "More")
        kinds = [event.kind for event in t.g.app.events.page("s1")]
        assert kinds == ["opened", "turn", "superseded", "cancelled"]


async def test_superseding_tells_what_to_do() -> None:
    async with training() as t:
        await t.client.open({"rollout": "r"}, "s1")
        dead = await t.client.supersede("r", 1)
        assert (dead.attempt.state, dead.attempt.session, dead.outcome) == ("superseded", "s1", None)
        assert (await t.client.show("s1")).status == "cancelled"
        assert await t.client.record("s1", GRADED) == "superseded: it was given up before its outcome was recorded"
        again = await t.client.supersede("r", 1)  # its outcome came too late
        assert again.attempt.state == "superseded" and again.outcome is not None
        await t.client.open({"rollout": "r", "attempt": 2}, "s2")
        await t.client.seal("s2")
        assert await t.client.record("s2", GRADED) == ""
        adopted = await t.client.supersede("r", 2)
        assert adopted.attempt.state == "settled" and adopted.outcome is not None and adopted.outcome.reward == 1.0
        assert (await t.g.admin.get("/admin/attempts?rollout=unknown")).status_code == 404


async def test_session_without_a_name_can_be_superseded() -> None:
    async with training() as t:
        await t.client.open({}, "own")
        assert (await t.client.supersede("own", 1)).attempt.session == "own"
        assert (await t.client.show("own")).stop == "superseded"
        never = await t.client.supersede("r", 1, "not-yet")
        assert never.attempt.state == "superseded"
        refused = await t.g.admin.post("/admin/sessions", json={"id": "not-yet"})  # a client that names no rollouts
        assert refused.status_code == 409 and "belongs to superseded attempt 1 of rollout 'r'" in refused.text


async def test_superseded_session_is_cancelled_after_restart(tmp_path: Path) -> None:
    """The gateway is killed between superseding the attempt and cancelling its session."""
    async with training(tmp_path) as t:
        await t.client.open({"rollout": "r"}, "s1")
        t.g.app.store.attempts.supersede("r", 1, "")
        assert (await t.client.show("s1")).status == "open"
    async with training(tmp_path) as t:
        await t.g.app.attempts.cancel_superseded()  # as the housekeeper does
        assert (await t.client.show("s1")).status == "cancelled"


async def test_superseded_attempt_of_another_worker_is_cancelled() -> None:
    async with crew() as workers:
        session = await workers.open_at(0, rollout="r")
        other = workers[1]
        async with GatewayClient(other.root, other.app.admin_key) as client:
            with_id = await client.supersede("r", 1, session.id)  # forwarded to the owner, which cancels at once
            assert with_id.attempt.state == "superseded"
            assert (await client.show(session.id)).status == "cancelled"
            late = await workers.open_at(0, rollout="r", attempt=2)
            await client.supersede("r", 2)  # any worker may serve it; the owner cancels when it next looks
            for worker in (workers[0], workers[1]):
                await worker.app.attempts.cancel_superseded()
            assert (await client.show(late.id)).stop == "superseded"


async def check_page(client: httpx.AsyncClient) -> None:
    """Check that the page marks the superseded attempt, and does not count its reward."""
    rows = {row["id"]: row for row in (await fetch(client, "rollouts"))["rollouts"]}
    assert (rows["s1"]["name"], rows["s1"]["attempt"], rows["s2"]["attempt"]) == ("r", 1, 2)
    assert (rows["s1"]["excluded"], rows["s2"]["excluded"]) == ("superseded by attempt 2", "")
    [group] = (await fetch(client, "groups"))["groups"]
    assert (group["rollouts"], group["graded"], group["rewards"]) == (1, 1, [1.0])
    detail = await fetch(client, "rollouts/s1")
    assert "superseded by attempt 2" in detail["totals"]["warnings"][0]


async def test_late_outcome_is_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with training(tmp_path) as t:
        first = await t.client.open({"rollout": "r", "metadata": {"group": "g"}}, "s1")
        await t.g.ask(first.key, "Hi")
        second = await t.client.open({"rollout": "r", "attempt": 2, "metadata": {"group": "g"}}, "s2")
        await t.g.ask(second.key, "Hi")
        await t.client.seal("s2")
        for session in ("s1", "s2"):
            await t.client.record(session, GRADED)
        listed = {s["id"]: s.get("excluded", "") for s in (await t.g.admin.get("/admin/sessions")).json()["sessions"]}
        assert listed == {"s1": "superseded by attempt 2", "s2": ""}
        await check_page(await log_in(t.g))
    view, _ = load_from_store(tmp_path, "s1")
    print_session(view, tokenizer=None, full=True, console=Console(width=200))
    printed = capsys.readouterr().out
    assert "attempt 1 of r" in printed and "does not count: superseded by attempt 2" in printed
    with SessionReader(tmp_path) as folder, open_row_source(tmp_path) as rows:
        for session in ("s1", "s2"):
            verdict = verify(folder, session, VerifyOptions(rows=rows, renderers=Renderers()))
            assert verdict.ok, verdict.findings
