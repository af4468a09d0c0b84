"""These run where `openenv` is installed: `tests/openenv/test_openenv_env.py` starts them there. Elsewhere they are not collected."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.openenv import kit
from tests.speed import scaled

collect_ignore_glob = [] if find_spec("openenv") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _not_for_ever() -> Iterator[None]:
    """What waits for something that does not come is told where it stood."""
    faulthandler.dump_traceback_later(scaled(120), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one server, for all tests that leave it as it is."""
    with kit.serving(tmp_path_factory.mktemp("served")) as server:
        yield server.url
