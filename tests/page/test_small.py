"""A window as small as a phone's, and a keyboard as the only thing there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect

from tests import page_kit
from tests.page import scenes
from tests.page.browser import PHONE, browsing

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full]


async def test_nothing_is_too_wide_for_a_phone(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    scenes.training(data, groups=6)
    scenes.worked(data)
    page_kit.add_hostile_rollouts(data)
    views = {
        "#/rollouts": ".list-row",
        "#/groups": ".list-row",
        "#/group/" + scenes.GROUP: ".chart-svg",
        "#/training": ".chart-svg",
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
        browsing(g.root, shots=shots, size=PHONE, has_touch=True, reduced_motion="reduce") as web,
    ):
        await web.page.goto(f"{g.root}/page/")
        await web.sees("#key")
        assert await web.too_wide() == []
        await web.login(g.app.admin_key)
        for address, sign in views.items():
            await web.go(address)
            await web.sees(sign)
            assert await web.too_wide() == [], address
        await web.go("#/rollout/fix-slug-0")
        await web.sees(".turn", "I'll look at the code")
        await web.photograph("page-phone")
        await web.go("#/rollout/fix-slug-0/tokens")
        await web.find(".token-line .t.is-trained").first.tap()
        await web.sees(".token-one", "yes, in row")


async def test_everything_can_be_done_with_the_keyboard(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    scenes.worked(data)
    async with page_kit.serve(data) as g, browsing(g.root, shots=shots) as web:
        await web.page.goto(f"{g.root}/page/")
        await expect(web.find("#key")).to_be_focused()
        await web.page.keyboard.type(g.app.admin_key)
        await web.press("Enter")
        await web.sees(".list-row")
        await web.page.reload()
        await web.sees(".list-row")
        await web.press("Tab")
        await expect(web.find(".skip")).to_be_focused()  # the first stop leads past the bar
        await web.press("Enter")
        await expect(web.find("main")).to_be_focused()
        await web.press("?")
        await web.sees("dialog", "open the row")
        await web.press("Escape", "/")
        await expect(web.find("input[type=search]")).to_be_focused()
        await web.page.keyboard.type("fix-slug.0")
        await web.sees(".toolbar", "1 rollout")
        await web.press("Escape", "j")
        await web.sees(".list-row.is-selected")
        await web.press("Enter")
        await web.sees(".turn", "I'll look at the code")
        await web.press("j", "j", "Enter")
        await web.sees(".turn:focus details[open]")
        await web.press("2")
        await web.sees(".token-line .t.is-trained")
        await web.press("j", "ArrowRight", "ArrowDown")
        await web.sees(".t.is-selected")
        await web.press("3", "f")
        await web.sees(".tree-row[aria-current=true]")
        await web.press("e")
        link = await web.sees("dialog a", "Training rows")
        async with web.page.expect_download() as started:
            await link.focus()
            await web.press("Enter")
        rows = Path(await (await started.value).path()).read_text().splitlines()
        assert len(rows) == len(await g.samples("fix-slug-0"))
        await web.press("u")
        await web.sees("h1", scenes.GROUP)
        ring = await web.asks(
            "(() => { document.querySelector('.nav a').focus(); return getComputedStyle(document.activeElement).outlineStyle })()"
        )
        assert ring == "solid"
