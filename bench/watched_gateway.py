"""Run the gateway with a timer on its event loop, for `stalls.py` and `page.py`.

SIGUSR1 starts the measurement. SIGUSR2 stops it and writes the file named by BENCH_STALLS. A timer is due every 2 ms, and its delay is the
time that other work had to wait for the loop. The CPU time of the loop's thread during the delay is the gateway's own share of it; in the
rest, other processes had the core.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

from turngate.cli import app
from turngate.server.app import Gateway

_INTERVAL_S = 0.002
delays: list[tuple[float, float]] = []  # ms: wall time, and CPU time of the loop's thread
watching = False
_start = Gateway.start


async def _watch_loop() -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, computed = loop.time() + _INTERVAL_S, time.thread_time()
        await asyncio.sleep(_INTERVAL_S)
        waited = max(0.0, loop.time() - due) * 1000
        if watching:
            delays.append((waited, min(waited, (time.thread_time() - computed) * 1000)))


async def _start_and_watch(self: Gateway, url: str = "") -> None:
    await _start(self, url)
    self._watch = asyncio.create_task(_watch_loop())  # type: ignore[attr-defined]  # keeps a reference, so that it is not garbage-collected


def _start_watching(*_: object) -> None:
    global watching
    delays.clear()
    watching = True


def _stop_watching(*_: object) -> None:
    global watching
    watching = False
    path = Path(os.environ["BENCH_STALLS"])
    path.with_suffix(".part").write_text(json.dumps(delays))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _start_watching)
    signal.signal(signal.SIGUSR2, _stop_watching)
    Gateway.start = _start_and_watch  # type: ignore[method-assign]
    app()
