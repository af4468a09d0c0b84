"""A real Chromium, and the words in which the tests of the page speak to it.

    async with browsing(g.root, g.app.admin_key) as web:      # logged in
        await web.go("#/rollout/r1")
        await web.sees(".turn", "Hello.")

Whatever the page complains about (errors of scripts, requests that its policy refuses) is collected in `complaints`; a test ends
with none. Used only here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from playwright.async_api import Locator, Page, async_playwright, expect

from tests.needs import uses
from tests.speed import scaled

DESK = (1360, 860)
PHONE = (390, 800)
_PLACE = Path(__file__).parents[2] / "docs" / "images"


def wait_ms() -> float:
    """How long anything on a page is waited for."""
    return 1000 * scaled(15)


class Web:
    """One window of a browser."""

    def __init__(self, page: Page, root: str, shots: Path) -> None:
        self.page = page
        self.root = root
        self.complaints: list[str] = []
        self._shots = shots
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "401" not in message.text:  # 401: the first question of every page
            self.complaints.append(f"{message.type}: {message.text}")

    async def login(self, key: str) -> None:
        await self.page.goto(f"{self.root}/page/")
        await self.page.fill("#key", key)
        await self.page.keyboard.press("Enter")
        await self.sees("#live", "live")

    async def go(self, address: str) -> None:
        await self.page.evaluate("address => { location.hash = address }", address)

    def find(self, what: str, text: str = "") -> Locator:
        found = self.page.locator(what)
        return found.filter(has_text=text) if text else found

    async def sees(self, what: str, text: str = "") -> Locator:
        """Waits until it is there."""
        found = self.find(what, text).first
        await expect(found).to_be_visible()
        return found

    async def misses(self, what: str, text: str = "") -> None:
        """Waits until it is gone."""
        await expect(self.find(what, text)).to_have_count(0)

    async def says(self, what: str, text: str) -> None:
        await expect(self.page.locator(what).first).to_contain_text(text)

    async def says_no_more(self, what: str, text: str) -> None:
        await expect(self.page.locator(what).first).not_to_contain_text(text)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)

    async def asks(self, script: str) -> Any:
        return await self.page.evaluate(script)

    async def too_wide(self) -> list[str]:
        """What makes the page scroll sideways."""
        return cast(
            list[str],
            await self.page.evaluate(
                """() => [document.documentElement, document.body, document.querySelector('main')]
                    .filter(one => one.scrollWidth > one.clientWidth)
                    .map(one => `${one.tagName}: ${one.scrollWidth} of ${one.clientWidth}`)"""
            ),
        )

    async def photograph(self, name: str, *, for_docs: bool = True) -> None:
        """Into `docs/images` where TURNGATE_SCREENSHOTS=1 says so, and to be thrown away otherwise."""
        place = _PLACE if for_docs and os.environ.get("TURNGATE_SCREENSHOTS") == "1" else self._shots
        place.mkdir(parents=True, exist_ok=True)
        await self.page.mouse.move(0, 0)
        await self.page.screenshot(path=place / f"{name}.png", animations="disabled")


@uses("chromium")
@asynccontextmanager
async def browsing(
    root: str, key: str = "", *, shots: Path, size: tuple[int, int] = DESK, dark: bool = False, **options: Any
) -> AsyncIterator[Web]:
    """A window on the page, logged in where a key is given. The test fails if the page complained about anything."""
    async with async_playwright() as playwright:
        # Debian's own; as root it cannot have a sandbox of its own.
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"], timeout=wait_ms()
        )
        expect.set_options(timeout=wait_ms())
        try:
            view = {"width": size[0], "height": size[1]}
            page = await browser.new_page(viewport=view, color_scheme="dark" if dark else "light", **options)
            page.set_default_timeout(wait_ms())
            web = Web(page, root, shots)
            if key:
                await web.login(key)
            yield web
            assert web.complaints == []
        finally:
            await browser.close()
