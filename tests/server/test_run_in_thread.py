"""Test a gateway in a thread of a program without an event loop."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from turngate.config import ServeConfig
from turngate.server.run import run_embedded, run_in_thread


def test_gateway_in_thread_serves_until_block_ends(tmp_path: Path) -> None:
    config = ServeConfig(data=str(tmp_path), port=0).check()
    with run_in_thread(run_embedded(config), name="test-gateway") as address:
        assert "test-gateway" in {thread.name for thread in threading.enumerate()}
        assert httpx.get(f"{address.url}/health", trust_env=False).status_code == 200
    assert "test-gateway" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address.url}/health", trust_env=False)


def test_gateway_in_thread_stops_after_error(tmp_path: Path) -> None:
    config = ServeConfig(data=str(tmp_path), port=0).check()
    with pytest.raises(ValueError, match="mine"), run_in_thread(run_embedded(config), name="test-gateway"):
        raise ValueError("mine")
    assert "test-gateway" not in {thread.name for thread in threading.enumerate()}
