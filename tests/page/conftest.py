"""The browser of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.page.browser import Chromium, start_chromium


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with start_chromium() as browser:
        yield browser


@pytest.fixture
def chromium(browser: Browser, tmp_path: Path) -> Chromium:
    """The browser. It belongs to the event loop of the session, in which the test must run."""
    return Chromium(browser, tmp_path / "shots")
