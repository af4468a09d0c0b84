"""Measure what metrics and logging cost per turn: only what `turngate/telemetry/metrics.py` and `logs.py` do for a call.

    .venv/bin/python bench/telemetry_overhead.py

Prints microseconds per turn, the best of several rounds, for a reply in one chunk and for one that arrives token by token.
"""

from __future__ import annotations

import time

from turngate.telemetry.logs import set_log_context
from turngate.telemetry.metrics import CallTiming, EngineTimer, Metrics
from turngate.telemetry.spans import current_tracer

ROUNDS, TURNS = 20, 2000
METADATA = {"rollout": "task-7/2", "group": "task-7"}


def turn(metrics: Metrics, chunks: int) -> None:
    """Make the telemetry calls of one turn, in the gateway's order."""
    set_log_context("0123456789abcdef", METADATA)
    timing = CallTiming(time.perf_counter())
    if current_tracer() is not None:
        raise SystemExit("bench: turn spans off to measure this")
    timer = EngineTimer(metrics, timing)
    for _ in range(chunks - 1):
        timer.mark_received()
        timer.mark_waiting()
    timer.mark_received()
    timer.finish("stop", 1000, 64)
    began = time.perf_counter()
    metrics.commit.observe(time.perf_counter() - began)
    metrics.count_turn("chat", "exact", "stop", 1000, 64)
    metrics.observe_call("chat", timing, time.perf_counter())


def main() -> None:
    metrics = Metrics()
    for chunks in (1, 64):
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(TURNS):
                turn(metrics, chunks)
            best = min(best, (time.process_time() - began) / TURNS)
        print(f"a reply of {chunks} chunk{'s' * (chunks > 1)}: {best * 1e6:.1f} µs per turn")


if __name__ == "__main__":
    main()
