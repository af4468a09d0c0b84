"""These run where `openenv` is installed: `tests/environment/test_openenv_env.py` starts them there. Elsewhere they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.environment import kit

collect_ignore_glob = [] if find_spec("openenv") else ["test_*.py"]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one server, for all tests that leave it as it is."""
    with kit.serving(tmp_path_factory.mktemp("served")) as server:
        yield server.url
