"""The browser of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import Chromium, start_chromium


@pytest.fixture(scope="session")
def chromium_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def chromium(chromium_address: str, tmp_path: Path) -> Chromium:
    return Chromium(chromium_address, tmp_path / "shots")
