"""Test damaged store rows: only their own session is refused or marked as damaged."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.feed.kit import TrainingGateway, training
from turngate.client.feed import Delivery, Feed
from turngate.client.protocol import FeedConfig
from turngate.server.web.login import PAGE_HEADER
from turngate.store.outcomes import RecordedOutcome

INVALID_UTF8 = "CAST(x'7bff' AS TEXT)"  # invalid UTF-8


def damage(t: TrainingGateway, table: str, cell: str, session: str, written: str = "'{'") -> None:
    """Overwrite a cell of the session's row with `written`, an SQL expression."""
    key = "key" if table == "sessions" else "session"
    with t.g.app.store._writing() as db:
        statement = f"UPDATE {table} SET {cell}={written} WHERE {key}=(SELECT key FROM sessions WHERE id=?)"
        assert db.execute(statement, (session,)).rowcount == 1


async def list_sessions(t: TrainingGateway, limit: int = 100) -> dict[str, Any]:
    answer = await t.g.admin.get(f"/admin/sessions?limit={limit}")
    assert answer.status_code == 200, answer.text
    return {session["id"]: session for session in answer.json()["sessions"]}


async def next_delivery(t: TrainingGateway, config: FeedConfig) -> Delivery | None:
    async with await Feed.open(t.client, "f", config) as feed:
        return await feed.next(5)


# ── outcomes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("written", ["'{'", "'{}'", "x'ff'", INVALID_UTF8, "5"])
async def test_damaged_outcome_marks_only_its_session(written: str) -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.5)
        damage(t, "outcomes", "outcome", bad, written)
        shown = await t.client.show(bad)
        assert (shown.outcome, shown.damaged) == (None, "its outcome is damaged on disk") and shown.turns == 1
        shown = await t.client.show(good)
        assert shown.outcome is not None and shown.outcome.reward == 0.5
        assert (await t.g.admin.get(f"/admin/sessions/{bad}/trace")).status_code == 200
        found = await list_sessions(t, 2)
        assert list(found) == [good, bad]
        assert (found[bad]["outcome"], found[bad]["damaged"]) == (None, "its outcome is damaged on disk")
        assert found[good]["outcome"]["reward"] == 0.5 and "damaged" not in found[good]
        await t.client.record(bad, RecordedOutcome(kind="graded", reward=0.25), replace=True)
        shown = await t.client.show(bad)
        assert shown.outcome is not None and shown.outcome.reward == 0.25


@pytest.mark.parametrize("written", ["'{'", INVALID_UTF8])
async def test_feed_excludes_rollout_with_damaged_outcome(written: str) -> None:
    async with training() as t:
        bad, good, other = await t.rollout(1.0), await t.rollout(0.5), await t.rollout(0.0)
        damage(t, "outcomes", "outcome", bad, written)
        found = await next_delivery(t, FeedConfig(n=3, advantage="none", from_start=True, groups="g"))
        assert found is not None
        assert [rolled.session for rolled in found.rollouts] == [bad, good, other]
        assert [rolled.advantage for rolled in found.rollouts] == [None, 0.5, 0.0]
        assert "its outcome is damaged on disk" in found.rollouts[0].excluded
        assert not any(rolled.excluded for rolled in found.rollouts[1:])


async def test_damaged_rollout_without_known_group_has_no_group() -> None:
    async with training() as t:
        bad = await t.rollout(1.0)
        damage(t, "outcomes", "outcome", bad)
        damage(t, "sessions", "config", bad)
        found = await next_delivery(t, FeedConfig(n=3, from_start=True))
        assert found is not None and found.group == "" and len(found.rollouts) == 1
        assert "damaged on disk" in found.rollouts[0].excluded


async def test_feed_excludes_rollout_with_damaged_feed_row() -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.5)
        config = FeedConfig(n=2, advantage="none", from_start=True)
        async with await Feed.open(t.client, "f", config) as feed:
            damage(t, "rolled", "outcome", bad)
            found = await feed.next(5)
        assert found is not None and found.group == "g"
        assert [rolled.session for rolled in found.rollouts] == [bad, good]
        assert "its outcome is damaged on disk" in found.rollouts[0].excluded and found.rollouts[1].advantage == 0.5


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("written", ["'{'", "'[]'", "x'ff'", INVALID_UTF8, "5"])
async def test_damaged_settings_do_not_break_session_list(written: str) -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.5)
        damage(t, "sessions", "config", bad, written)
        for limit in (2, 100):
            found = await list_sessions(t, limit)
            assert list(found) == [good, bad]
            assert found[bad]["damaged"] == "its settings are damaged on disk" and "damaged" not in found[good]
            assert found[bad]["outcome"]["reward"] == 1.0
        assert list(await list_sessions(t, 1)) == [good]
        answer = await t.g.admin.get(f"/admin/sessions/{bad}")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith(f"session {bad}: its settings are damaged on disk (")
        assert t.g.app.store.ids(10) == [good, bad]


# ── other columns ───────────────────────────────────────────────────────────────────────────────────────────────────

LISTS = ("/admin/sessions", "/sessions", "/page/api/overview", "/page/api/rollouts", "/page/api/groups")


async def open_page(t: TrainingGateway) -> httpx.AsyncClient:
    page = t.g.http(t.g.app.admin_key)
    headers = {PAGE_HEADER: "1"}
    (await page.post("/page/login", json={"key": t.g.app.admin_key}, headers=headers)).raise_for_status()
    return page


@pytest.mark.parametrize("column", ["status", "stop", "vocabulary"])
async def test_text_that_is_not_utf8_marks_only_its_session(column: str) -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.5)
        damage(t, "sessions", column, bad, INVALID_UTF8)
        found = await list_sessions(t)
        assert found[bad]["damaged"] == "its session record is damaged on disk" and "damaged" not in found[good]
        page = await open_page(t)
        for path in LISTS:
            answer = await page.get(path)
            assert answer.status_code == 200, (path, answer.text)
        answer = await t.g.admin.get(f"/admin/sessions/{bad}")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == f"session {bad}: its session record is damaged on disk"


async def test_session_with_damaged_id_is_listed_under_its_readable_part() -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.5)
        damage(t, "sessions", "id", bad, "CAST(CAST('bad-' AS BLOB) || x'ff' AS TEXT)")
        found = await list_sessions(t)
        assert list(found) == [good, "bad-\ufffd"] == t.g.app.store.ids(10)
        assert found["bad-\ufffd"]["damaged"] == "its session record is damaged on disk"
        rows = (await (await open_page(t)).get("/page/api/rollouts")).json()["rollouts"]
        assert {row["id"]: row["message"] for row in rows} == {
            good: "",
            "bad-\ufffd": "its session record is damaged on disk",
        }


@pytest.mark.parametrize(
    ("table", "column"),
    [("nodes", "kind"), ("events", "kind"), ("events", "session"), ("attempts", "rollout"), ("refusals", "message")],
)
async def test_related_text_that_is_not_utf8_breaks_no_list(table: str, column: str) -> None:
    async with training() as t:
        bad = await t.open_session()
        await t.g.http(bad.key).post("/v1/chat/completions", json={"messages": 5})  # a refused call
        await t.g.seal(bad.id)
        owner = "session IN (?, (SELECT key FROM sessions WHERE id=?))"
        with t.g.app.store._writing() as db:
            [[message]] = db.execute(f"SELECT message FROM refusals WHERE {owner}", (bad.id, bad.id))
            changed = db.execute(f"UPDATE {table} SET {column}={INVALID_UTF8} WHERE {owner}", (bad.id, bad.id))
            assert changed.rowcount
        assert "damaged" not in (await list_sessions(t))[bad.id]
        page = await open_page(t)
        for path in LISTS:
            answer = await page.get(path)
            assert answer.status_code == 200, (path, answer.text)
        answer = await t.g.admin.get(f"/admin/sessions/{bad.id}/trace")
        is_named = f"session {bad.id}: node 1 is damaged on disk" in answer.text
        assert is_named if table == "nodes" else answer.status_code == 200, answer.text
        events = t.g.app.store.events.page("", 0, 100)
        assert {"damaged" in event.data for event in events} == {table == "events"}
        with t.g.app.store._writing() as db:  # so that tests/verify/everywhere.py does not find the damage
            db.execute(f"UPDATE refusals SET message=? WHERE {owner}", (message, bad.id, bad.id))


async def test_pruning_keeps_session_with_damaged_row() -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.5, group="other")
        damage(t, "sessions", "status", bad, INVALID_UTF8)
        plan = t.g.app.store.retention.plan(2**40)
        assert [session.id for group in plan.removable for session in group] == [good]
        assert plan.kept == {f"session {bad}: its session record is damaged on disk": 1}
