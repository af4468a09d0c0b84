"""Wait for a real engine's process to serve, and stop it with its children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from tests.speed import scaled

START_S = 120


def stop_group(process: subprocess.Popen[Any]) -> None:
    """Stop a process that was started in a session of its own, and its children."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(scaled(20))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(engine: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `GET /health` answers 200. If the process exits or takes too long, fail with the end of its log."""
    end = time.monotonic() + scaled(START_S)
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{engine} exited with code {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=scaled(5)).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"{engine} was not ready after {scaled(START_S):.0f} s:\n{log.read_text()[-3000:]}")
