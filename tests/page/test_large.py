"""Ten thousand rollouts, and one of two hundred turns and a hundred thousand tokens: only what can be seen is on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import page_kit
from tests.page.browser import browsing

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full]

ROWS = "document.querySelectorAll('.list-row').length"


async def test_ten_thousand_rollouts_scroll_and_filter(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 10_000)
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:
        await web.sees(".toolbar", "10,001 rollouts")
        await web.sees(".list-row a", "task-1249.7")
        assert await web.asks(ROWS) < 100
        await web.press("End")
        await web.sees(".list-row.is-selected", "task-0000.0")  # the last one, fetched when it was looked at
        assert await web.asks(ROWS) < 100
        await web.press("Enter")
        await web.sees(".turn", "Done, number 0.")
        await web.press("Escape")
        await web.sees(".list-row.is-selected", "task-0000.0")  # where it was left
        await web.press("Home")
        await web.sees(".list-row.is-selected", "task-1250")
        await web.page.click(".chip >> text=Cancelled")
        await web.sees(".toolbar", "768 rollouts")
        await web.misses(".list-row .badge", "graded")
        await web.press("/")
        await web.page.keyboard.type("task-0012")
        await web.sees(".toolbar", "1 rollout")
        assert "status=cancelled&q=task-0012" in await web.asks("location.hash")
        await web.page.reload()  # the address has it all
        await web.sees(".toolbar", "1 rollout")
        await web.go("#/rollouts?class=infrastructure+fault&sort=opened")
        await web.sees(".list-row .badge", "infrastructure fault")
        await web.go("#/groups")
        await web.sees(".toolbar", "1,251 groups")
        await web.press("End")
        await web.sees(".list-row.is-selected", "task-0000")


async def test_two_hundred_turns_and_a_hundred_thousand_tokens(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    page_kit.add_long_rollout(data, turns=200, tokens=100_000)
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:
        await web.go("#/rollout/long")
        await web.sees(".turn", "I look at part 20.")
        await web.go("#/rollout/long/tokens")
        await web.sees(".tokens-tools [role=status]", "tokens")
        await web.says_no_more(".tokens-tools [role=status]", "…")
        assert await web.asks("document.querySelectorAll('.t').length") < 5000
        await web.press("x", "x")  # every context open, or every one folded
        await web.asks("document.querySelector('.tokens .window').scrollTop = 1e9")
        await web.sees(".token-head", "Turn 100")
        await web.go("#/rollout/long/tree")
        await web.sees(".tree-row", "compaction")
        assert await web.find(".tree-row").count() == 199
