"""Test the web page with damaged, deleted, sessionless and extreme rollouts: one of them never breaks a list."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests import page_kit
from tests.kit import gateway, say
from tests.server.test_page import fetch, log_in
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.pass_at_k import pass_at_k, pass_curve

FIRST = f"{page_kit.BATCH}.task-0000"


async def test_rollout_without_session_has_empty_views(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 16)
    with page_kit.open_builder(tmp_path) as builder:
        about = {"rollout": "b.t.0", "attempt": 1, "task": "t", "group": "b.t", "batch": "b"}
        fault = {"stage": "sandbox", "boundary": "sandbox"}
        done = {
            "stage": "done",
            "status": "error",
            "class": "infrastructure fault",
            "message": "no space",
            "fault": fault,
        }
        builder.event("failed", "stage", {"stage": "sandbox", **about}, time.time() - 9)
        builder.event("failed", "stage", {**done, **about}, time.time() - 8)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        for name in ("starting", "failed"):
            tree = await fetch(client, f"rollouts/{name}/tree")
            assert (tree["nodes"], tree["forks"], tree["branches"], tree["main"]) == ([], [], [], None)
            messages = await fetch(client, f"rollouts/{name}/messages")
            assert (messages["nodes"], messages["more"]) == ([], False)
            tokens = await fetch(client, f"rollouts/{name}/tokens")
            assert (tokens["nodes"], tokens["next"], tokens["total"]) == ([], None, 0)
            header = await fetch(client, f"rollouts/{name}")
            assert header["totals"]["turns"] == header["totals"]["tokens"] == 0 and header["can"]["export"] == []
        assert header["error"]["message"] == "no space" and header["error"]["boundary"] == "sandbox"


@pytest.mark.parametrize("written", [b'{"kind":"gra', b'{"kind":"graded","message":"\xff"}', b"[]"])
async def test_damaged_outcome_is_marked_and_breaks_no_list(tmp_path: Path, written: bytes) -> None:
    page_kit.add_rollouts(tmp_path, 16)
    with page_kit.open_builder(tmp_path) as builder:
        damaged_key = "(SELECT key FROM sessions WHERE id='r00001')"
        builder._db.execute(f"UPDATE outcomes SET outcome=? WHERE session={damaged_key}", (written,))
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        assert (await fetch(client, "overview"))["rollouts"] == 17
        [row] = (await fetch(client, "rollouts", q="r00001"))["rollouts"]
        assert (row["class"], row["reward"], row["message"]) == ("", None, "its outcome is damaged on disk")
        header = await fetch(client, "rollouts/r00001")
        assert header["error"]["message"] == row["message"] and header["outcome"] is None
        assert header["can"]["retry"] == {"ok": False, "why": row["message"]}
        for path in ("groups", "training", "group", "group/evidence"):
            await fetch(client, path, name=FIRST)
        classes = {
            damaged_key["class"]: damaged_key["count"] for damaged_key in (await fetch(client, "failures"))["classes"]
        }
        assert classes["damaged"] == 1
        saved = await client.get("/page/api/export", params={"group": FIRST, "format": "rows"})
        rows = [json.loads(line) for line in saved.text.splitlines()]
        assert [r["reward"] for r in rows if r["session"] == "r00001"] == [None] and len(rows) == 8


@pytest.mark.parametrize(
    "damage",
    [
        "nodes SET info=x'c1' WHERE session=(SELECT key FROM sessions WHERE id='r00001')",
        "events SET data=x'7b' WHERE kind='turn' AND session='r00001'",
        "events SET data=x'7b' WHERE kind='stage' AND session='r00001'",
    ],
)
async def test_damaged_nodes_and_events_break_no_list(tmp_path: Path, damage: str) -> None:
    page_kit.add_rollouts(tmp_path, 16)
    with page_kit.open_builder(tmp_path) as builder:
        assert builder._db.execute(f"UPDATE {damage}").rowcount > 0
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        for path in ("overview", "rollouts", "groups", "training", "failures", "rollouts/r00001"):
            await fetch(client, path)
        for path in ("group", "group/evidence"):
            await fetch(client, path, name=FIRST)


async def test_damaged_trace_is_left_out_of_export(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 16)
    with page_kit.open_builder(tmp_path) as builder:
        session_key = "(SELECT key FROM sessions WHERE id=?)"
        builder._db.execute(f"UPDATE nodes SET ids=x'00000000' WHERE session={session_key}", ("r00001",))
        builder._db.execute(f"UPDATE sessions SET config=x'7b' WHERE key={session_key}", ("r00002",))
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        for name in ("r00001", "r00002"):
            header = await fetch(client, f"rollouts/{name}")
            assert "damaged on disk" in header["unreadable"] and header["totals"]["turns"] == 0
            assert (await client.get(f"/page/api/rollouts/{name}/export")).status_code == 503
        for format in ("rows", "messages"):
            saved = await client.get("/page/api/export", params={"group": FIRST, "format": format})
            assert (saved.status_code, saved.headers["x-turngate-left-out"]) == (200, "2")
            sessions = [json.loads(line)["session"] for line in saved.text.splitlines()]
            assert sessions == [f"r{n:05}" for n in range(8) if n not in (1, 2)]


async def test_huge_rewards_are_excluded_from_statistics() -> None:
    async with gateway([say("Hello.")] * 4, model="m") as g:
        client = await log_in(g)
        for reward in (1.7e308, 1.7e308, 1.0, 0.0):
            session = await g.open(metadata={"group": "g"})
            await g.ask(session.key, "Hi")
            await g.seal(session.id)
            g.app.outcomes.record(session.id, RecordedOutcome(kind="graded", reward=reward, group="g"))
        [row] = (await fetch(client, "groups"))["groups"]
        assert (row["mean_reward"], row["graded"], row["rewards"][0]) == (0.5, 4, 1.7e308)
        group = await fetch(client, "group", name="g")
        assert (group["mean_reward"], group["std_reward"]) == (0.5, 0.5)
        assert [row["advantage"] is None for row in group["rollouts"]] == [True, True, False, False]
        [over_time] = (await fetch(client, "training"))["version"]
        assert over_time["mean"] == 0.5
        saved = await client.get("/page/api/export", params={"group": "g", "format": "rows"})
        assert [json.loads(line)["reward"] for line in saved.text.splitlines()] == [1.0, 0.0]
        metrics = await g.admin.get("/metrics")
        assert metrics.status_code == 200 and "turngate_rollout_reward_count 4" in metrics.text


async def test_pruned_events_do_not_lose_rollouts() -> None:
    async with gateway([say("Hello.")] * 2) as g:
        client = await log_in(g)
        running = await g.open()
        assert (await fetch(client, "overview"))["rollouts"] == 1
        lost = await g.open()
        await g.ask(lost.key, "Hi")
        await g.seal(lost.id)
        await g.seal(running.id)
        await g.app.events.prune(time.time() + 1)
        await g.open(id="after")
        overview = await fetch(client, "overview")
        assert (
            overview["rollouts"] == 3 and overview["by_status"]["running"] == 1 and overview["by_status"]["done"] == 2
        )
        assert (await fetch(client, f"rollouts/{lost.id}"))["rollout"]["turns"] == 1


async def test_announcement_for_deleted_session_makes_no_row(tmp_path: Path) -> None:
    """Deleting the first session keeps the staleness of the others."""

    async def check_views(client: httpx.AsyncClient) -> None:
        assert [row["id"] for row in (await fetch(client, "rollouts"))["rollouts"]] == ["kept"]
        assert (await fetch(client, "training"))["staleness"] == [{"behind": 2, "rollouts": 1}]

    async with gateway([say("Hello.")], data=tmp_path) as g:
        client = await log_in(g)
        first, kept = await g.open(id="first"), await g.open(id="kept")
        await g.ask(kept.key, "Hi")
        await g.resume(2)
        await g.seal(kept.id)
        g.app.outcomes.record("kept", RecordedOutcome(kind="graded", reward=1.0, group="g"))
        await g.seal(first.id)
        await fetch(client, "rollouts")
        await g.admin.delete("/admin/sessions/first")
        g.app.events.announce("first", "stage", {"stage": "grade", "rollout": "x", "attempt": 1})
        await check_views(client)
    async with gateway(data=tmp_path) as g:
        client = await log_in(g)
        await check_views(client)
        await g.open(id="first")
        assert (await fetch(client, "overview"))["rollouts"] == 2, "the id can be used again"


async def test_untrainable_rollout_does_not_affect_advantages() -> None:
    async with gateway([say("Hello.")] * 2, model="m") as g:
        client = await log_in(g)
        for number, reward in enumerate((1.0, 0.0, 0.0)):
            session = await g.open(metadata={"group": "g"})
            if number < 2:
                await g.ask(session.key, "Hi")
            await g.seal(session.id)
            g.app.outcomes.record(session.id, RecordedOutcome(kind="graded", reward=reward, group="g"))
        group = await fetch(client, "group", name="g")
        assert [row["leave_one_out"] for row in group["rollouts"]] == [1.0, -1.0, None]
        saved = await client.get("/page/api/export", params={"group": "g", "format": "rows"})
        exported = [json.loads(line)["advantage"] for line in saved.text.splitlines()]
        assert [row["advantage"] for row in group["rollouts"]] == [*exported, None]


async def test_retried_rollout_is_counted_once(tmp_path: Path) -> None:
    with page_kit.open_builder(tmp_path) as builder:
        now = time.time() - 60
        for number, (rollout, attempt, reward) in enumerate([("g.0", 1, None), ("g.1", 1, 0.0), ("g.0", 2, 1.0)]):
            about = {"group": "g", "rollout": rollout, "attempt": attempt}
            key = builder.session(f"s{number}", now + number, closed=now + 9, metadata=about)
            kind = "graded" if reward is not None else "infrastructure fault"
            outcome = RecordedOutcome(kind=kind, reward=reward, group="g", attempt=attempt)
            builder.outcome(key, f"s{number}", outcome, now + 10)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        [row] = (await fetch(client, "groups"))["groups"]
        assert (row["rollouts"], row["rewards"], row["classes"]) == (2, [0.0, 1.0], {"graded": 2})
        assert len((await fetch(client, "group", name="g"))["rollouts"]) == 3, "each attempt is listed"


async def test_aborted_turn_has_policy_version(tmp_path: Path) -> None:
    with page_kit.open_builder(tmp_path) as builder:
        key = builder.session("cut", time.time() - 9, closed=time.time())
        talk = page_kit.TraceBuilder(builder, key, "cut", time.time() - 9)
        talk.answer(talk.ask([{"role": "user", "content": "Hi"}]), "Hel", finish="abort", version=4)
    async with page_kit.serve(tmp_path) as g:
        [row] = (await fetch(await log_in(g), "rollouts"))["rollouts"]
        assert (row["turns"], row["version_start"], row["version_end"]) == (0, 4, 4) and row["sampled_tokens"] > 0


@pytest.mark.parametrize(("graded", "passed"), [(0, 0), (1, 0), (1, 1), (7, 3), (8, 8), (100, 1)])
def test_pass_curve_matches_pass_at_k(graded: int, passed: int) -> None:
    curve = pass_curve(graded, passed)
    assert [k for k, _ in curve] == sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k <= graded} | {graded} - {0})
    assert [chance for _, chance in curve] == pytest.approx([pass_at_k(graded, passed, k) for k, _ in curve])


def test_pass_curve_of_large_group() -> None:
    assert len(pass_curve(200_000, 100)) == 19
