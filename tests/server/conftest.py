"""Run the gateway on uvloop, as `turngate serve` does, and keep its files in memory, because disks may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests import kit
from turngate.gateway.events import Events
from turngate.server.web import event_streams


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def no_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable keep-alives: each one would make an event follower poll and find events it was not notified of."""
    monkeypatch.setattr(Events._wait, "__defaults__", (3600.0,))
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 3600.0)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with kit.memory_folder() as folder:
        yield folder
