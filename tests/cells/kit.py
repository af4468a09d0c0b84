"""Cells as processes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.speed import scaled
from tests.store.kit import open_shared
from tests.workers.test_processes import ServeProcess, start_process
from turngate.common.database_url import parse_database_url
from turngate.errors import Conflict
from turngate.store.shared.store import SharedStore

LEASE_S = 2.0


class CellProcess(ServeProcess):
    """A running cell."""

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request that may be refused."""
        return httpx.request(
            method, self.url + path, headers=self.admin, trust_env=False, timeout=scaled(60), **request
        )

    def record(self, session: str, group: str = "g", reward: float = 1.0) -> httpx.Response:
        outcome = {"kind": "graded", "reward": reward, "group": group}
        return self.request("PUT", f"/admin/sessions/{session}/outcome", json=outcome)

    def finish(self, rollout: str, attempt: int = 1, group: str = "g") -> str:
        """Run one attempt with a turn and an outcome, and return its session."""
        opened = self.open(rollout=rollout, attempt=attempt)
        assert self.say(opened["api_key"])
        self.ask("POST", f"/admin/sessions/{opened['id']}/seal", json={})
        assert self.record(opened["id"], group).is_success
        return str(opened["id"])

    def metric(self, name: str) -> float:
        response = self.request("GET", "/metrics")
        found = re.search(rf"^{name} (\S+)$", response.text, re.M)
        assert found is not None, response.text
        return float(found[1])


@contextmanager
def start_cell(data: Path, shared: str, *arguments: str, lease_s: float = LEASE_S) -> Iterator[CellProcess]:
    command = ["-m", "turngate", "cell", "--port", "0", "--data", str(data), "--shared", shared]
    command += ["--lease-s", str(lease_s), "--cell-name", data.name, *arguments]
    with start_process(CellProcess, command, data) as running:
        yield running


@contextmanager
def start_shared_gateway(cwd: Path, shared: str) -> Iterator[CellProcess]:
    """Start a gateway on the shared store itself."""
    data = cwd / parse_database_url(shared).folder
    with start_process(CellProcess, ["-m", "turngate", "serve", "--port", "0", "--data", shared], data, cwd) as running:
        yield running


@contextmanager
def open_shared_store(url: str) -> Iterator[SharedStore]:
    store = open_shared(url)
    try:
        yield store
    finally:
        store.close()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


def give_up(shared: SharedStore, rollout: str, attempt: int = 1) -> bool:
    """Supersede an attempt. Return False while the lease of its cell lasts."""
    try:
        shared.attempts.supersede(rollout, attempt, "")
    except Conflict:
        return False
    return True


def delivered(shared: SharedStore, feed: str = "f") -> list[str]:
    """Return the sessions that a feed has delivered, in order."""
    row = shared.feeds.find(feed)
    assert row is not None
    return [m.id for number in range(1, row.newest + 1) for m in shared.feeds.members(row.key, number)]
