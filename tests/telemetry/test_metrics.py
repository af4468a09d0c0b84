"""`GET /metrics`: the Prometheus format, what is counted, and access."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit import Running, gateway, say, until, user
from turngate.telemetry.metrics import (
    FAMILIES,
    Histogram,
    Metrics,
    MetricSeries,
    MetricsSnapshot,
    label_by_worker,
    merge_snapshots,
    to_prometheus,
)

METRICS_KEY = "reads-the-metrics-only"


def parse_metrics(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Parse samples by name and labels with the official parser. Every family must be declared exactly once."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    declared = []
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown" and family.documentation
        declared.append(family.name)
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} appears twice"
            found[key] = sample.value
    assert len(declared) == len(set(declared))
    return found


async def scrape(g: Running, query: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = await g.admin.get("/metrics" + query)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parse_metrics(response.text)


def turns_key(dialect: str, mode: str, finish: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return "turngate_turns_total", (("dialect", dialect), ("finish", finish), ("mode", mode))


def sample_key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


async def test_turns_tokens_sessions_and_outcomes_are_counted(tmp_path: Path) -> None:
    async with gateway([say("Hello."), say("Good bye.")], data=tmp_path) as g:
        one, other = await g.open(), await g.open()
        await g.ask(one.key, "Hi")
        await g.ask(one.key, "Hi again", mode="async stream")
        await g.seal(one.id)
        await g.cancel(other.id)
        await g.admin.put(f"/admin/sessions/{one.id}/outcome", json={"kind": "graded", "reward": 0.5})
        await g.admin.put(
            f"/admin/sessions/{one.id}/outcome", json={"kind": "graded", "reward": 0.5}
        )  # a repeat is not counted
        await g.admin.put(f"/admin/sessions/{other.id}/outcome", json={"kind": "infrastructure fault"})
        recorded = await g.turns(one.id)
        metrics = await scrape(g)
    assert metrics[turns_key("chat", "exact", "stop")] == 2
    assert metrics[sample_key("turngate_sampled_tokens_total", mode="exact")] == sum(
        len(turn["ids"]) for turn in recorded
    )
    assert metrics[sample_key("turngate_prompt_tokens_total", mode="exact")] > 0
    assert metrics[sample_key("turngate_sessions_opened_total", mode="exact")] == 2
    assert metrics[sample_key("turngate_sessions_ended_total", status="sealed")] == 1
    assert metrics[sample_key("turngate_sessions_ended_total", status="cancelled")] == 1
    assert metrics[sample_key("turngate_sessions_open")] == 0
    assert metrics[sample_key("turngate_rollouts_total", **{"class": "graded"})] == 1
    assert metrics[sample_key("turngate_rollouts_total", **{"class": "infrastructure fault"})] == 1
    assert (
        metrics[sample_key("turngate_rollout_reward_count")],
        metrics[sample_key("turngate_rollout_reward_sum")],
    ) == (1, 0.5)
    for name in ("turngate_engine_seconds", "turngate_engine_first_seconds", "turngate_store_commit_seconds"):
        assert metrics[sample_key(f"{name}_count")] == 2
        assert metrics[sample_key(f"{name}_bucket", le="+Inf")] == 2
    assert metrics[sample_key("turngate_own_seconds_count", dialect="chat")] == 2
    assert metrics[sample_key("turngate_engine_calls")] == 0
    assert metrics[sample_key("turngate_engines", state="up")] == 1
    assert metrics[sample_key("process_resident_memory_bytes")] > 1e6


async def test_errors_are_counted_by_boundary(tmp_path: Path) -> None:
    async with gateway([say("x", busy=True), say("Hello there.", cut_after=2)], data=tmp_path) as g:
        session = await g.open()
        wrong = await g.http("no such key").post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert wrong.status_code == 401
        bad = await g.http(session.key).post("/v1/messages", content=b"{")
        assert bad.status_code == 400
        with pytest.raises(openai.RateLimitError):
            await g.ask(session.key, "Hi")
        with pytest.raises(openai.APIError):
            await g.ask(session.key, "Hi", mode="async stream")
        metrics = await scrape(g)
    assert (
        metrics[sample_key("turngate_call_errors_total", dialect="chat", boundary="client", kind="invalid_api_key")]
        == 1
    )
    assert (
        metrics[
            sample_key(
                "turngate_call_errors_total", dialect="messages", boundary="client", kind="invalid_request_error"
            )
        ]
        == 1
    )
    assert metrics[sample_key("turngate_engine_errors_total", kind="rate_limit_exceeded")] == 1
    assert metrics[sample_key("turngate_engine_errors_total", kind="engine_unavailable")] == 1
    assert metrics[turns_key("chat", "exact", "abort")] == 1  # its sampled tokens are recorded
    assert metrics[sample_key("turngate_engine_calls")] == 0


async def test_fence_and_held_calls(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open()
        await g.pause()
        waiting = g.start(g.ask(session.key, "Hi"))
        await until(lambda: g.live(session.id).in_flight)
        assert (await scrape(g))[sample_key("turngate_fence_paused")] == 1
        await g.resume(3)
        await waiting
        metrics = await scrape(g)
    assert (metrics[sample_key("turngate_fence_version")], metrics[sample_key("turngate_fence_paused")]) == (3, 0)
    assert metrics[sample_key("turngate_held_seconds_count")] == 1


async def test_feeds_are_labeled_by_name(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        await g.admin.put("/admin/feeds/my-run", json={"n": 2})
        for group in ("a", "a", "b"):
            session = await g.open(metadata={"group": group})
            await g.ask(session.key, "Hi")
            await g.seal(session.id)
            outcome = {"kind": "graded", "reward": 1.0, "group": group}
            assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).is_success
        metrics = await scrape(g)
    positions = {
        name: metrics[sample_key(f"turngate_feed_{name}", feed="my-run")] for name in ("newest", "handed", "committed")
    }
    assert positions == {"newest": 1, "handed": 0, "committed": 0}
    assert metrics[sample_key("turngate_feed_waiting_groups", feed="my-run")] == 1
    assert metrics[sample_key("turngate_feed_waiting_rollouts", feed="my-run")] == 1


async def test_metrics_key_reads_only_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_METRICS_KEY", METRICS_KEY)
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open()
        reader = g.http(METRICS_KEY)
        assert (await reader.get("/metrics")).status_code == 200
        assert (await g.admin.get("/metrics")).status_code == 200
        for key in ("", "wrong", session.key):
            refused = await g.http(key).get("/metrics")
            assert refused.status_code == 401 and "turngate_" not in refused.text
        for path in ("/admin/sessions", "/admin/fence", "/v1/models"):
            assert (await reader.get(path)).status_code == 401
        call = await reader.post("/v1/chat/completions", json={"model": "m", "messages": [user("Hi")]})
        assert call.status_code == 401
        assert session.id not in (await reader.get("/metrics")).text  # no session id in labels


async def test_empty_metrics_key_gives_no_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_METRICS_KEY", "")
    async with gateway([say("Hello.")], data=tmp_path) as g:
        assert (await g.http("").get("/metrics")).status_code == 401


def test_worker_metrics_are_summed_except_global_ones() -> None:
    one, other = Metrics(), Metrics()
    one.count_turn("chat", "exact", "stop", 10, 2)
    other.count_turn("chat", "exact", "stop", 5, 1)
    other.count_turn("gemini", "observe", "length", 0, 0)
    one.lag.observe(0.002)
    other.lag.observe(3.0)
    gauges = {"turngate_fence_version": [((), 4.0)], "turngate_feed_newest": [(("run",), 7.0)]}
    snapshots = [one.snapshot(gauges), other.snapshot({"turngate_fence_version": [((), 5.0)]})]
    metrics = parse_metrics(to_prometheus([((), merge_snapshots(snapshots))]).decode())
    assert metrics[turns_key("chat", "exact", "stop")] == 2
    assert metrics[turns_key("gemini", "observe", "length")] == 1
    assert metrics[sample_key("turngate_prompt_tokens_total", mode="exact")] == 15
    assert metrics[sample_key("turngate_fence_version")] == 5
    assert metrics[sample_key("turngate_feed_newest", feed="run")] == 7
    assert metrics[sample_key("turngate_loop_lag_seconds_count")] == 2
    assert metrics[sample_key("turngate_loop_lag_seconds_bucket", le="0.002")] == 1
    by_worker = parse_metrics(to_prometheus(label_by_worker(dict(enumerate(snapshots)))).decode())
    assert by_worker[("turngate_prompt_tokens_total", (("mode", "exact"), ("worker", "1")))] == 5
    assert by_worker[sample_key("turngate_feed_newest", feed="run")] == 7  # not labeled by worker


def test_labels_are_escaped() -> None:
    feed_name = 'a"b\\c\nd'
    text = to_prometheus([((), MetricsSnapshot({"turngate_feed_newest": [MetricSeries((feed_name,), 1.0)]}))]).decode()
    assert list(parse_metrics(text)) == [sample_key("turngate_feed_newest", feed=feed_name)]


def test_histogram_bounds_are_inclusive() -> None:
    metrics = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        metrics.observe(value)
    assert metrics.counts == [2, 2, 1]


def test_metric_names_are_unique_and_well_formed() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith(("turngate_", "process_")) and family.about.endswith(".")
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert bool(family.bounds) == (family.kind == "histogram") and list(family.bounds) == sorted(family.bounds)
