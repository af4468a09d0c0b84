"""The web page where something is odd: damaged on disk, without a session, huge, removed meanwhile. No list breaks for one rollout's sake."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests import page_kit
from tests.server.test_page import entered, told

FIRST = f"{page_kit.BATCH}.task-0000"


async def test_a_rollout_without_a_session_is_empty_and_can_be_looked_at(tmp_path: Path) -> None:
    page_kit.fill(tmp_path, 16)
    with page_kit.building(tmp_path) as builder:
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
    async with page_kit.served(tmp_path) as g:
        client = await entered(g)
        for name in ("starting", "failed"):
            tree = await told(client, f"rollouts/{name}/tree")
            assert (tree["nodes"], tree["forks"], tree["branches"], tree["main"]) == ([], [], [], None)
            messages = await told(client, f"rollouts/{name}/messages")
            assert (messages["nodes"], messages["more"]) == ([], False)
            tokens = await told(client, f"rollouts/{name}/tokens")
            assert (tokens["nodes"], tokens["next"], tokens["total"]) == ([], None, 0)
            header = await told(client, f"rollouts/{name}")
            assert header["totals"]["turns"] == header["totals"]["tokens"] == 0 and header["can"]["export"] == []
        assert header["error"]["message"] == "no space" and header["error"]["boundary"] == "sandbox"


async def test_a_damaged_outcome_is_told_as_such_and_takes_no_list_along(tmp_path: Path) -> None:
    page_kit.fill(tmp_path, 16)
    with page_kit.building(tmp_path) as builder:
        one = "(SELECT key FROM sessions WHERE id='r00001')"
        builder._db.execute(f"UPDATE outcomes SET outcome=? WHERE session={one}", (b'{"kind":"gra',))
    async with page_kit.served(tmp_path) as g:
        client = await entered(g)
        assert (await told(client, "overview"))["rollouts"] == 17
        [row] = (await told(client, "rollouts", q="r00001"))["rollouts"]
        assert (row["class"], row["reward"], row["message"]) == ("", None, "its outcome is damaged on disk")
        header = await told(client, "rollouts/r00001")
        assert header["error"]["message"] == row["message"] and header["outcome"] is None
        assert header["can"]["retry"] == {"ok": False, "why": row["message"]}
        for path in ("groups", "training", "group", "group/evidence"):
            await told(client, path, name=FIRST)
        classes = {one["class"]: one["count"] for one in (await told(client, "failures"))["classes"]}
        assert classes["damaged"] == 1
        saved = await client.get("/page/api/export", params={"group": FIRST, "format": "rows"})
        rows = [json.loads(line) for line in saved.text.splitlines()]
        assert [r["reward"] for r in rows if r["session"] == "r00001"] == [None] and len(rows) == 8


async def test_a_damaged_trace_is_left_out_of_what_is_saved_and_has_a_header(tmp_path: Path) -> None:
    page_kit.fill(tmp_path, 16)
    with page_kit.building(tmp_path) as builder:
        of = "(SELECT key FROM sessions WHERE id=?)"
        builder._db.execute(f"UPDATE nodes SET ids=x'00000000' WHERE session={of}", ("r00001",))
        builder._db.execute(f"UPDATE sessions SET config=x'7b' WHERE key={of}", ("r00002",))
    async with page_kit.served(tmp_path) as g:
        client = await entered(g)
        for name in ("r00001", "r00002"):
            header = await told(client, f"rollouts/{name}")
            assert "damaged on disk" in header["unreadable"] and header["totals"]["turns"] == 0
            assert (await client.get(f"/page/api/rollouts/{name}/export")).status_code == 503
        for format in ("rows", "messages"):
            saved = await client.get("/page/api/export", params={"group": FIRST, "format": format})
            assert (saved.status_code, saved.headers["x-turngate-left-out"]) == (200, "2")
            sessions = [json.loads(line)["session"] for line in saved.text.splitlines()]
            assert sessions == [f"r{n:05}" for n in range(8) if n not in (1, 2)]
