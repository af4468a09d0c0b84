"""`tests/openenv/test_openenv_env.py` runs these tests where `openenv` is installed; elsewhere they are not collected."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.openenv import kit
from tests.speed import scaled

collect_ignore_glob = [] if find_spec("openenv") else ["test_*.py"]


@pytest.fixture(autouse=True)
def dump_traceback_on_hang() -> Iterator[None]:
    """Dump tracebacks and exit if a test hangs."""
    faulthandler.dump_traceback_later(scaled(120), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a shared server."""
    with kit.run_server(tmp_path_factory.mktemp("served")) as server:
        yield server.url
