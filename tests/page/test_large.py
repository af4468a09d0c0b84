"""Ten thousand rollouts, and one with 200 turns and 100,000 tokens: only visible rows are in the DOM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import page_kit
from tests.page.browser import Chromium, open_browser

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

ROWS = "document.querySelectorAll('.list-row').length"


@pytest.mark.repeat  # tests/server/test_page.py tests the same lists without a browser
async def test_ten_thousand_rollouts(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 10_000)
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        await web.wait_for(".toolbar", "10,001 rollouts")
        await web.wait_for(".list-row a", "task-1249.7")
        assert await web.evaluate(ROWS) < 100
        await web.press("End")
        await web.wait_for(".list-row.is-selected", "task-0000.0")  # the last one, fetched on demand
        assert await web.evaluate(ROWS) < 100
        await web.press("Enter")
        await web.wait_for(".turn", "Done, number 0.")
        await web.press("Escape")
        await web.wait_for(".list-row.is-selected", "task-0000.0")  # the selection is kept
        await web.press("Home")
        await web.wait_for(".list-row.is-selected", "task-1250")
        await web.page.click(".chip >> text=Cancelled")
        await web.wait_for(".toolbar", "768 rollouts")
        await web.wait_until_gone(".list-row .badge", "graded")
        await web.press("/")
        await web.page.keyboard.type("task-0012")
        await web.wait_for(".toolbar", "1 rollout")
        assert "status=cancelled&q=task-0012" in await web.evaluate("location.hash")
        await web.page.reload()  # the address has the whole state
        await web.wait_for(".toolbar", "1 rollout")
        await web.go("#/rollouts?class=infrastructure+fault&sort=opened")
        await web.wait_for(".list-row .badge", "infrastructure fault")
        await web.go("#/groups")
        await web.wait_for(".toolbar", "1,251 groups")
        await web.press("End")
        await web.wait_for(".list-row.is-selected", "task-0000")


async def test_rollout_with_100k_tokens(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_long_rollout(data, turns=200, tokens=100_000)
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        await web.go("#/rollout/long")
        await web.wait_for(".turn", "I look at part 20.")
        await web.go("#/rollout/long/tokens")
        await web.wait_for(".tokens-tools [role=status]", "tokens")
        await web.wait_until_text_gone(".tokens-tools [role=status]", "…")
        assert await web.evaluate("document.querySelectorAll('.t').length") < 5000
        await web.press("x", "x")  # unfold and fold all contexts
        await web.evaluate("document.querySelector('.tokens .window').scrollTop = 1e9")
        await web.wait_for(".token-head", "Turn 100")
        await web.go("#/rollout/long/tree")
        await web.wait_for(".tree-row", "compaction")
        assert await web.find(".tree-row").count() == 199
