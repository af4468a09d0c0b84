"""Run the gateway on uvloop and keep its files in memory, as in tests/server, and open stores on both databases."""

from tests.server.conftest import pytest_asyncio_loop_factories, tmp_path  # noqa: F401
from tests.store.conftest import store  # noqa: F401
