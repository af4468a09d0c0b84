"""Share the loaded renderers, and open stores on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.renderer_fixtures import renderers  # noqa: F401
from tests.store.kit import open_shared
from turngate.store.store import Store

_POSTGRES = pytest.param("postgres", marks=[pytest.mark.needs("postgres"), pytest.mark.full])


@pytest.fixture(params=["sqlite", _POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store on each database."""
    shared = request.param == "postgres"
    store = open_shared(request.getfixturevalue("postgres_url")) if shared else Store(tmp_path)
    try:
        yield store
    finally:
        store.close()
