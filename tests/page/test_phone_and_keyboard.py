"""The page on a phone-sized screen, and with the keyboard only."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect

from tests import page_kit
from tests.page import scenes
from tests.page.browser import PHONE, Chromium, open_browser

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


async def test_no_view_overflows_on_phone(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    scenes.add_training_run(data, groups=6)
    scenes.add_task_group(data)
    page_kit.add_hostile_rollouts(data)
    views = {
        "#/rollouts": ".list-row",
        "#/groups": ".list-row",
        "#/group/" + scenes.GROUP: ".chart-svg",
        "#/training": ".improvement .message",
        "#/failures": ".failure",
        "#/rollout/fix-slug-0": ".turn",
        "#/rollout/fix-slug-0/tokens": ".token-line .t",
        "#/rollout/fix-slug-0/tree": ".tree-row",
        "#/rollout/fix-slug-0/details": ".panel",
        "#/compare/fix-slug-1/fix-slug-3": ".pair-mark",
        "#/rollout/hostile": ".turn",
        "#/rollout/hostile/details": ".panel",
    }
    async with (
        page_kit.serve(data) as g,
        open_browser(g.root, chromium=chromium, size=PHONE, has_touch=True, reduced_motion="reduce") as web,
    ):
        await web.page.goto(f"{g.root}/page/")
        await web.wait_for("#key")
        assert await web.find_overflow() == []
        await web.login(g.app.admin_key)
        for address, selector in views.items():
            await web.go(address)
            await web.wait_for(selector)
            assert await web.find_overflow() == [], address
        await web.go("#/rollout/fix-slug-0")
        await web.wait_for(".turn", "I'll look at the code")
        await web.screenshot("page-phone")
        await web.go("#/rollout/fix-slug-0/tokens")
        await web.find(".token-line .t.is-trained").first.tap()
        await web.wait_for(".token-one", "yes, in row")


async def test_keyboard_navigation(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    scenes.add_task_group(data)
    async with page_kit.serve(data) as g, open_browser(g.root, chromium=chromium) as web:
        await web.page.goto(f"{g.root}/page/")
        await expect(web.find("#key")).to_be_focused()
        await web.page.keyboard.type(g.app.admin_key)
        await web.press("Enter")
        await web.wait_for(".list-row")
        await web.page.reload()
        await web.wait_for(".list-row")
        await web.press("Tab")
        await expect(web.find(".skip")).to_be_focused()  # the skip link comes first
        await web.press("Enter")
        await expect(web.find("main")).to_be_focused()
        await web.press("?")
        await web.wait_for("dialog", "open the row")
        await web.press("Escape", "/")
        await expect(web.find("input[type=search]")).to_be_focused()
        await web.page.keyboard.type("fix-slug.0")
        await web.wait_for(".toolbar", "1 rollout")
        await web.press("Escape", "j")
        await web.wait_for(".list-row.is-selected")
        await web.press("Enter")
        await web.wait_for(".turn", "I'll look at the code")
        await web.press("j", "j", "Enter")
        await web.wait_for(".turn:focus details[open]")
        await web.press("2")
        await web.wait_for(".token-line .t.is-trained")
        await web.press("j", "ArrowRight", "ArrowDown")
        await web.wait_for(".t.is-selected")
        await web.press("3", "f")
        await web.wait_for(".tree-row[aria-current=true]")
        await web.press("e")
        link = await web.wait_for("dialog a", "Training rows")
        async with web.page.expect_download() as started:
            await link.focus()
            await web.press("Enter")
        await (await started.value).save_as(tmp_path / "rows.jsonl")
        rows = (tmp_path / "rows.jsonl").read_text().splitlines()
        assert len(rows) == len(await g.samples("fix-slug-0"))
        await web.press("u")
        await web.wait_for("h1", scenes.GROUP)
        ring = await web.evaluate(
            "(() => { document.querySelector('.nav a').focus(); return getComputedStyle(document.activeElement).outlineStyle })()"
        )
        assert ring == "solid"
