"""Run the gateway with a timer on its event loop, for `stalls.py`, `page.py` and `load.py`.

SIGUSR1 starts the measurement. SIGUSR2 stops it and writes the file named by BENCH_STALLS. A timer is due every 2 ms, and its delay is the
time that other work had to wait for the loop. The CPU time of the loop's thread during the delay is the gateway's own share of it; in the
rest, other processes had the core, or the thread waited for a lock or the disk. The CPU time of the whole process also includes other
threads, for which the loop may have waited because they held the interpreter lock.

The longest delays over 50 ms are explained: the CPU times, the time that the thread waited for a core, the time of garbage collections, and
what the thread was doing then.

A delay may consist of the steps of many requests. So the CPU time of each step is measured too. A step is what a request, the
eviction or the loading of traces does between two awaits. A request with a step of more than 50 ms blocks the others by itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from turngate.cli import app
from turngate.gateway.eviction import Evictor
from turngate.gateway.loading import TimeSlicer
from turngate.server.app import Gateway

_INTERVAL_S = 0.002
_STALL_S = 0.05
_LOOK_S = 0.01  # between two looks at the loop's thread
_FRAMES = 8  # of a stack, innermost first
_EXPLAINED = 100  # stalls that are kept with their stacks; thousands would look like growth of the gateway
_MEASUREMENTS = (
    2_000_000  # for more than an hour; allocated at the start, so that they do not look like growth of the gateway
)
# ms: wall time and CPU time of the loop's thread, alternating
delays = array("f", bytes(8 * _MEASUREMENTS))
process_cpu = array("f", bytes(4 * _MEASUREMENTS))  # ms: CPU time of all threads during each delay
measured = 0  # number of delays
steps: Counter[int] = Counter()  # by CPU time, in units of 0.1 ms
stalls: list[dict[str, Any]] = []  # the longest ones
stalled = 0  # number of all stalls
watching = False
_start = Gateway.start


class LoopWatch:
    """Measures how late the loop is, and inspects its thread while it is late."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._schedule = open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", buffering=0)  # noqa: SIM115
        self._due = self._loop.time()
        self._stacks: list[str] = []
        self._collected_s = self._collecting = 0.0
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._look, daemon=True).start()

    async def run(self) -> None:
        while True:
            self._due, computed = self._loop.time() + _INTERVAL_S, time.thread_time()
            queued, collected, whole = self._queued_s(), self._collected_s, time.process_time()
            await asyncio.sleep(_INTERVAL_S)
            late, cpu = max(0.0, self._loop.time() - self._due), time.thread_time() - computed
            if watching:
                whole = time.process_time() - whole
                _add_delay(late * 1000, min(late, cpu) * 1000, min(late, whole) * 1000)
                if late > _STALL_S:
                    self._add_stall(late, cpu, whole, self._queued_s() - queued, self._collected_s - collected)
            self._stacks.clear()

    def _add_stall(self, late: float, cpu: float, whole: float, queued: float, collected: float) -> None:
        times = {"late": late, "cpu": cpu, "process_cpu": whole, "queued": queued, "collected": collected}
        stalls.append({**{name: round(s * 1000, 1) for name, s in times.items()}, "stacks": self._stacks[:3]})
        global stalled
        stalled += 1
        if len(stalls) > _EXPLAINED:
            stalls.remove(min(stalls, key=lambda stall: stall["late"]))

    def _queued_s(self) -> float:
        """Return how long the thread has waited for a core since it started."""
        self._schedule.seek(0)
        return int(self._schedule.read().split()[1]) / 1e9

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._collected_s += time.perf_counter() - self._collecting

    def _look(self) -> None:
        """Note what the thread is doing while the loop is late. C code that holds the interpreter lock shows only when it returns."""
        while True:
            time.sleep(_LOOK_S)
            if watching and time.monotonic() - self._due > _STALL_S:
                frames = traceback.extract_stack(sys._current_frames()[self._thread])[: -_FRAMES - 1 : -1]
                self._stacks.append(" < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in frames))


def _add_delay(late: float, cpu: float, whole: float) -> None:
    global measured
    if measured < _MEASUREMENTS:
        delays[2 * measured], delays[2 * measured + 1], process_cpu[measured] = late, cpu, whole
        measured += 1


class _MeasuredSteps:
    """Awaits a coroutine, and measures the CPU time of each of its steps."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Iterator[Any]:
        return self  # type: ignore[return-value]  # `await` needs only the methods below

    def __next__(self) -> object:
        return self.send(None)

    def send(self, value: object) -> object:
        began = time.thread_time()
        try:
            return self._coroutine.send(value)
        finally:
            _add_step(began)

    def throw(self, *error: Any) -> object:
        began = time.thread_time()
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # otherwise, the error and this frame would refer to each other
            _add_step(began)


def _add_step(began: float) -> None:
    if watching:
        steps[round((time.thread_time() - began) * 10_000)] += 1


def _measure_steps(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(function)
    async def run(*arguments: Any) -> Any:
        return await _MeasuredSteps(function(*arguments))

    return run


async def _start_and_watch(self: Gateway, url: str = "") -> None:
    await _start(self, url)
    self._watch = asyncio.create_task(LoopWatch().run())  # type: ignore[attr-defined]  # keeps a reference, so that it is not garbage-collected


def _start_watching(*_: object) -> None:
    global watching, measured, stalled
    measured = stalled = 0
    stalls.clear()
    steps.clear()
    watching = True


def _stop_watching(*_: object) -> None:
    global watching
    watching = False
    path = Path(os.environ["BENCH_STALLS"])
    pairs = list(zip(delays[: 2 * measured : 2], delays[1 : 2 * measured : 2], strict=True))
    written = {"delays": pairs, "process_cpu": list(process_cpu[:measured]), "stalls": stalls, "stalled": stalled}
    written["steps"] = sorted(steps.items())
    path.with_suffix(".part").write_text(json.dumps(written))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _start_watching)
    signal.signal(signal.SIGUSR2, _stop_watching)
    Gateway.start = _start_and_watch  # type: ignore[method-assign]
    Gateway.__call__ = _measure_steps(Gateway.__call__)  # type: ignore[method-assign]
    Evictor.sweep = _measure_steps(Evictor.sweep)  # type: ignore[method-assign]
    TimeSlicer._run_slices = _measure_steps(TimeSlicer._run_slices)  # type: ignore[method-assign]
    app()
