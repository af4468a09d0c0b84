"""The gateway with a clock on its event loop, for `stalls.py`: SIGUSR1 begins, SIGUSR2 ends and writes the file named by BENCH_STALLS.

Every 2 ms a timer is due. How late it is, is how long somebody had to wait for the loop; how much of that the loop's thread computed, and
was not merely kept from a core by others, is the gateway's own part in it.
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

_EVERY = 0.002
late: list[tuple[float, float]] = []  # ms: by the wall, and of our own computing
watching = False
_start = Gateway.start


async def _watch() -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, computed = loop.time() + _EVERY, time.thread_time()
        await asyncio.sleep(_EVERY)
        waited = max(0.0, loop.time() - due) * 1000
        if watching:
            late.append((waited, min(waited, (time.thread_time() - computed) * 1000)))


async def _started(self: Gateway) -> None:
    await _start(self)
    self._watch = asyncio.create_task(_watch())  # type: ignore[attr-defined]  # held, or it would be collected


def _begin(*_: object) -> None:
    global watching
    late.clear()
    watching = True


def _end(*_: object) -> None:
    global watching
    watching = False
    path = Path(os.environ["BENCH_STALLS"])
    path.with_suffix(".part").write_text(json.dumps(late))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)
    Gateway.start = _started  # type: ignore[method-assign]
    app()
