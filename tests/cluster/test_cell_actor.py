"""The actor of a cell, without Ray and without the process that runs its orders: which orders it sends to that process."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.cluster.test_executor import ORDER
from tests.speed import scaled
from turngate.rollout.cluster.cell_actor import CellActor
from turngate.rollout.cluster.messages import OrderEnded, RunnerSettings
from turngate.rollout.order import encode_order
from turngate.tasks.archive_cache import ArchiveCache


class SentLines:
    """Stands for the process that runs orders: keeps the lines that it gets."""

    returncode = None

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.stdin = SimpleNamespace(write=self.lines.append, is_closing=lambda: False)


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CellActor:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    runner = RunnerSettings(shared="", name="node", folder=str(tmp_path / "cell"), sandbox="local")
    actor = CellActor(msgspec.json.encode(runner))
    actor._process = SentLines()  # type: ignore[assignment]
    return actor


def sent_lines(actor: CellActor) -> list[bytes]:
    return actor._process.lines  # type: ignore[union-attr]


async def test_order_that_is_cancelled_while_its_archive_is_added_does_not_start(
    actor: CellActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"x"
    task = msgspec.structs.replace(ORDER.task, archive=hashlib.sha256(data).hexdigest())
    order = encode_order(msgspec.structs.replace(ORDER, task=task))
    started, released = threading.Event(), threading.Event()
    add = ArchiveCache.add

    def wait_and_add(self: ArchiveCache, digest: str, data: bytes) -> None:
        started.set()
        released.wait(scaled(5))
        add(self, digest, data)

    monkeypatch.setattr(ArchiveCache, "add", wait_and_add)
    reference = asyncio.get_running_loop().create_future()
    reference.set_result(data)
    async with asyncio.timeout(scaled(10)):
        running = asyncio.create_task(actor.run(order, [reference]))
        await asyncio.to_thread(started.wait)
        await actor.cancel("s1")
        released.set()
        assert msgspec.json.decode(await running, type=OrderEnded).result is None
    assert sent_lines(actor) == []


async def test_order_that_arrives_after_its_cancellation_does_not_start(actor: CellActor) -> None:
    async with asyncio.timeout(scaled(5)):
        await actor.cancel("s1")
        ended: Any = msgspec.json.decode(await actor.run(encode_order(ORDER), []), type=OrderEnded)
    assert ended.result is None and sent_lines(actor) == []


async def test_cancellation_of_a_running_order_waits_for_its_end(actor: CellActor) -> None:
    async with asyncio.timeout(scaled(5)):
        running = asyncio.create_task(actor.run(encode_order(ORDER), []))
        await asyncio.sleep(0)
        cancelling = asyncio.create_task(actor.cancel("s1"))
        await asyncio.sleep(0)
        assert [msgspec.json.decode(line)["type"] for line in sent_lines(actor)] == ["run", "cancel"]
        assert not cancelling.done()
        actor._results["s1"].set_result(OrderEnded("s1", None))
        await asyncio.gather(running, cancelling)
