"""A real Chromium for the tests of the page: one browser serves the tests of a run, each with its own window and cookies.

    async with open_browser(g.root, g.app.admin_key, chromium=chromium) as web:      # logged in
        await web.go("#/rollout/r1")
        await web.wait_for(".turn", "Hello.")

`problems` collects script errors and requests that the page's policy rejects; it must be empty at the end of a test.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from playwright.async_api import Browser, Locator, Page, async_playwright, expect

from tests.needs import uses
from tests.speed import scaled

DESKTOP = (1360, 860)
PHONE = (390, 800)
_DOCS_IMAGES = Path(__file__).parents[2] / "docs" / "images"


def timeout_ms() -> float:
    """The timeout for everything on a page."""
    return 1000 * scaled(15)


class Chromium(NamedTuple):
    """The running browser, and the folder for screenshots of the test."""

    browser: Browser
    shots: Path


class Web:
    """One window of a browser."""

    def __init__(self, page: Page, root: str, shots: Path) -> None:
        self.page = page
        self.root = root
        self.problems: list[str] = []
        self._shots = shots
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if (
            message.type in ("error", "warning") and "401" not in message.text
        ):  # every page first sends a request without a key
            self.problems.append(f"{message.type}: {message.text}")

    async def login(self, key: str) -> None:
        await self.page.goto(f"{self.root}/page/")
        await self.page.fill("#key", key)
        await self.page.keyboard.press("Enter")
        await self.wait_for("#live", "live")

    async def go(self, address: str) -> None:
        await self.page.evaluate("address => { location.hash = address }", address)

    def find(self, selector: str, text: str = "") -> Locator:
        found = self.page.locator(selector)
        return found.filter(has_text=text) if text else found

    async def wait_for(self, selector: str, text: str = "") -> Locator:
        """Wait until an element is visible."""
        found = self.find(selector, text).first
        await expect(found).to_be_visible()
        return found

    async def wait_until_gone(self, selector: str, text: str = "") -> None:
        """Wait until no element matches."""
        await expect(self.find(selector, text)).to_have_count(0)

    async def wait_for_text(self, selector: str, text: str) -> None:
        await expect(self.page.locator(selector).first).to_contain_text(text)

    async def wait_until_text_gone(self, selector: str, text: str) -> None:
        await expect(self.page.locator(selector).first).not_to_contain_text(text)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)

    async def evaluate(self, script: str) -> Any:
        return await self.page.evaluate(script)

    async def fetch_json(self, path: str) -> Any:
        """Fetch from the page's API, with the cookie of the login."""
        return await self.page.evaluate("path => fetch(path).then(reply => reply.json())", path)

    async def find_overflow(self) -> list[str]:
        """Elements that make the page scroll sideways."""
        return cast(
            list[str],
            await self.page.evaluate(
                """() => [document.documentElement, document.body, document.querySelector('main')]
                    .filter(one => one.scrollWidth > one.clientWidth)
                    .map(one => `${one.tagName}: ${one.scrollWidth} of ${one.clientWidth}`)"""
            ),
        )

    async def screenshot(self, name: str, *, for_docs: bool = True) -> None:
        """Save a screenshot in `docs/images` with TURNGATE_SCREENSHOTS=1, otherwise in a temporary folder."""
        folder = _DOCS_IMAGES if for_docs and os.environ.get("TURNGATE_SCREENSHOTS") == "1" else self._shots
        folder.mkdir(parents=True, exist_ok=True)
        await self.page.mouse.move(0, 0)
        await self.page.screenshot(path=folder / f"{name}.png", animations="disabled")


@uses("chromium")
@asynccontextmanager
async def start_chromium() -> AsyncIterator[Browser]:
    """Start Chromium, for the event loop of the caller."""
    async with async_playwright() as playwright:
        # Debian's Chromium; as root it needs --no-sandbox.
        path, args = "/usr/bin/chromium", ["--no-sandbox"]
        browser = await playwright.chromium.launch(executable_path=path, args=args, timeout=timeout_ms())
        yield browser
        await browser.close()


@uses("chromium")
@asynccontextmanager
async def open_browser(
    root: str, key: str = "", *, chromium: Chromium, size: tuple[int, int] = DESKTOP, dark: bool = False, **options: Any
) -> AsyncIterator[Web]:
    """Open a window, logged in if a key is given. Fail if the page had any problem."""
    expect.set_options(timeout=timeout_ms())
    view = {"width": size[0], "height": size[1]}
    context = await chromium.browser.new_context(viewport=view, color_scheme="dark" if dark else "light", **options)
    try:
        page = await context.new_page()
        page.set_default_timeout(timeout_ms())
        web = Web(page, root, chromium.shots)
        if key:
            await web.login(key)
        yield web
        assert web.problems == []
    finally:
        await context.close()
