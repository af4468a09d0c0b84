"""Run the gateway on uvloop, and keep its files in memory, as in tests/server."""

from tests.server.conftest import pytest_asyncio_loop_factories, tmp_path  # noqa: F401
