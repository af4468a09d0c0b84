"""What is seldom, and has to work: rollouts that never had a session, rewards of any size, answers that come late, clicks that come twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from playwright.async_api import Route

from tests import page_kit
from tests.page.browser import browsing, need_chromium

Json = Any


async def test_a_rollout_without_a_session_can_be_opened_and_run_again(tmp_path: Path, shots: Path) -> None:
    need_chromium()
    data = tmp_path / "data"
    page_kit.fill(data, 8)
    with page_kit.building(data) as builder:
        about = {"rollout": "b.t.0", "attempt": 1, "task": "t", "group": "b.t", "batch": "b", "agent": "pi"}
        fault = {"stage": "sandbox", "boundary": "sandbox"}
        ended = {"class": "infrastructure fault", "message": "sandbox: no space left", "status": "error", "fault": fault}
        builder.event("bare", "stage", {"stage": "sandbox", **about}, time.time() - 9)
        builder.event("bare", "stage", {"stage": "done", **about, **ended}, time.time() - 8)
    async with page_kit.served(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:

        async def looks_right() -> None:
            await web.go("#/rollout/bare")
            await web.sees(".banner.is-bad", "no space left")
            assert await (await web.sees(".actions button", "Retry")).is_enabled()
            await web.find(".empty a", "stages and logs").click()
            await web.sees(".panel", "no space left")
            await web.sees(".bars dt", "sandbox")
            await web.press("2")
            await web.sees(".empty", "No tokens")
            await web.press("3")
            await web.sees(".empty", "There is no tree")
            await web.go("#/rollout/starting")
            await web.sees(".view-head .badge", "starting · setup")
            await web.sees(".empty", "Nothing was said yet")
            await web.go("#/rollouts")
            await web.sees(".list-row")

        async def nothing(route: Route) -> None:
            await route.fulfill(status=404, json={"error": {"message": "it has no session", "type": "not_found"}})

        await looks_right()
        for part in ("tree", "messages*", "tokens*"):
            await web.page.route(f"**/page/api/rollouts/*/{part}", nothing)
        await looks_right()  # an answer that says no is as good as an empty one
        web.complaints.clear()  # the browser's own, about a 404
