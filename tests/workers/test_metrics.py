"""The metrics of several workers, asked of whichever answers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.speed import scaled
from tests.telemetry.test_metrics import plain, read, turns
from tests.workers.test_processes import Serving, served, wait_for
from turngate.server.workers.coordinator import _METRICS_S

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.full]


def scraped(serving: Serving, query: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = httpx.get(f"{serving.url}/metrics{query}", headers=serving.admin, trust_env=False, timeout=scaled(20))
    assert response.status_code == 200, response.text
    return read(response.text)


def test_they_are_summed_over_all_workers_or_told_apart(tmp_path: Path) -> None:
    with served(tmp_path / "data") as serving:
        for owner in (0, 0, 1):
            serving.say(serving.open(owner)["api_key"])
        for _ in range(4):  # each connection may come to another worker
            seen = scraped(serving)
            assert seen[turns("chat", "exact", "stop")] == 3
            assert seen[plain("turngate_workers")] == 2 and seen[plain("turngate_workers_silent")] == 0
            assert seen[plain("turngate_sessions_open")] >= 3
        apart = scraped(serving, "?by=worker")
        name, labels = turns("chat", "exact", "stop")
        told = [apart[name, tuple(sorted((*labels, ("worker", str(n)))))] for n in (0, 1)]
        assert told == [2, 1]
        without = httpx.get(f"{serving.url}/metrics", trust_env=False, timeout=scaled(20))
        assert without.status_code == 401 and "turngate_" not in without.text
        own = httpx.get(f"{serving.url}/worker/metrics", headers=serving.admin, trust_env=False, timeout=scaled(20))
        assert own.status_code == 404


def test_a_worker_that_does_not_answer_is_missing_and_is_said_to_be(tmp_path: Path) -> None:
    with served(tmp_path / "data") as serving:
        stopped = serving.workers[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            seen: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

            def answered() -> bool:  # a connection that the front gives to the one that is stopped waits for ever
                limit = _METRICS_S + scaled(1)
                try:
                    response = httpx.get(
                        f"{serving.url}/metrics", headers=serving.admin, trust_env=False, timeout=limit
                    )
                except httpx.TimeoutException:
                    return False
                seen.update(read(response.text))
                return True

            wait_for(answered)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert (seen[plain("turngate_workers")], seen[plain("turngate_workers_silent")]) == (1, 1)
