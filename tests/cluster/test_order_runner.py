"""The process that runs orders: the folders of the cells on one machine, and the ends of orders."""

from __future__ import annotations

import asyncio
import errno
import fcntl
from pathlib import Path

import msgspec
import pytest

from tests.cluster.test_executor import ORDER
from turngate.errors import ConfigError
from turngate.rollout.cluster import order_runner
from turngate.rollout.cluster.messages import CancelOrder, OrderEnded, RunnerReply, RunnerSettings, RunOrder
from turngate.rollout.cluster.order_runner import OrderRunner, claim_folder
from turngate.rollout.order import encode_order

URL = "postgresql://turngate@db/one"


def test_cells_have_folders_of_their_own_for_each_store(tmp_path: Path) -> None:
    first, second = claim_folder(str(tmp_path), URL), claim_folder(str(tmp_path), URL)
    other = claim_folder(str(tmp_path), "postgresql://turngate@db/two")
    assert (first.name, second.name, other.name) == ("cell-1", "cell-2", "cell-1")
    assert first.parent == second.parent != other.parent, "nothing is shipped to another store"


def test_limit_on_folders_is_reached_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_runner, "_MAX_FOLDERS", 2)
    assert [claim_folder(str(tmp_path), URL).name for _ in range(2)] == ["cell-1", "cell-2"]
    with pytest.raises(ConfigError, match="all 2 folders for cells are in use"):
        claim_folder(str(tmp_path), URL)


def test_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked \(No locks available\).*TURNGATE_CELL_DATA"):
        claim_folder(str(tmp_path), URL)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="TURNGATE_CELL_DATA"):
        claim_folder(str(tmp_path / "file"), URL)


async def test_order_that_is_cancelled_at_once_ends(tmp_path: Path) -> None:
    """The cell actor waits for the end of each order that it sent."""
    sent: list[RunnerReply] = []
    runner = OrderRunner(RunnerSettings(shared="", name="node", folder="", sandbox="local"), tmp_path, sent.append)
    runner._handle(RunOrder(msgspec.Raw(encode_order(ORDER))), None)  # type: ignore[arg-type]  # the order does not start
    runner._handle(CancelOrder("s1"), None)  # type: ignore[arg-type]
    await asyncio.wait(runner._running.values())
    assert sent == [OrderEnded("s1", None)]
