"""Metrics of several workers, requested from any of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.speed import scaled
from tests.telemetry.test_metrics import parse_metrics, sample_key, turns_key
from tests.workers.test_processes import ServeProcess, start_serve, wait_until
from turngate.server.workers.coordinator import _METRICS_S

pytestmark = [pytest.mark.process, pytest.mark.full]


def scrape(serving: ServeProcess, query: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = httpx.get(f"{serving.url}/metrics{query}", headers=serving.admin, trust_env=False, timeout=scaled(20))
    assert response.status_code == 200, response.text
    return parse_metrics(response.text)


def test_metrics_are_summed_or_labeled_by_worker(tmp_path: Path) -> None:
    with start_serve(tmp_path / "data") as serving:
        for owner in (0, 0, 1):
            serving.say(serving.open(owner)["api_key"])
        for _ in range(4):  # each connection may reach a different worker
            metrics = scrape(serving)
            assert metrics[turns_key("chat", "exact", "stop")] == 3
            assert metrics[sample_key("turngate_workers")] == 2 and metrics[sample_key("turngate_workers_silent")] == 0
            assert metrics[sample_key("turngate_sessions_open")] >= 3
        by_worker = scrape(serving, "?by=worker")
        name, labels = turns_key("chat", "exact", "stop")
        counts = [by_worker[name, tuple(sorted((*labels, ("worker", str(n)))))] for n in (0, 1)]
        assert counts == [2, 1]
        without = httpx.get(f"{serving.url}/metrics", trust_env=False, timeout=scaled(20))
        assert without.status_code == 401 and "turngate_" not in without.text
        internal = httpx.get(
            f"{serving.url}/worker/metrics", headers=serving.admin, trust_env=False, timeout=scaled(20)
        )
        assert internal.status_code == 404


def test_silent_worker_is_counted_as_missing(tmp_path: Path) -> None:
    with start_serve(tmp_path / "data") as serving:
        stopped = serving.workers[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            metrics: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

            def has_answered() -> bool:  # connections to the stopped worker hang
                limit = _METRICS_S + scaled(1)
                try:
                    response = httpx.get(
                        f"{serving.url}/metrics", headers=serving.admin, trust_env=False, timeout=limit
                    )
                except httpx.TimeoutException:
                    return False
                metrics.update(parse_metrics(response.text))
                return True

            wait_until(has_answered)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert (metrics[sample_key("turngate_workers")], metrics[sample_key("turngate_workers_silent")]) == (1, 1)
