"""Measure the web page's response times, and the delay of the event loop meanwhile: `python bench/page.py [--rollouts 10000]`.

A generated data folder (`tests/page_kit.py`) is served by a real `turngate serve` whose event loop is timed (`watched_gateway.py`). Each
request is repeated several times, one after another. The very first one reads all data.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode

from processes import HERE, Process, free_port

sys.path.insert(0, str(HERE.parent))
from tests import page_kit

LONG = "rollouts/long"


class PageGateway(Process):
    """A gateway whose event loop is timed, and a logged-in client."""

    def __init__(self, folder: Path) -> None:
        self.stalls = folder / "stalls.json"
        key, port = secrets.token_hex(16), free_port()
        command = [
            sys.executable,
            str(HERE / "watched_gateway.py"),
            "serve",
            "--port",
            str(port),
            "--data",
            str(folder / "data"),
        ]
        env = {"TURNGATE_ADMIN_KEY": key, "BENCH_STALLS": str(self.stalls)}
        super().__init__(command, port, folder / "gateway.log", env)
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._http.request("POST", "/page/login", json.dumps({"key": key}), {"x-turngate-page": "1"})
        response = self._http.getresponse()
        response.read()
        self._cookie = (response.headers["set-cookie"] or "").partition(";")[0]

    def fetch(self, path: str, **query: object) -> tuple[float, bytes]:
        began = time.perf_counter()
        self._http.request("GET", f"/page/api/{path}?{urlencode(query)}", headers={"cookie": self._cookie})
        response = self._http.getresponse()
        content = response.read()
        if response.status != 200:
            raise SystemExit(f"bench: {path}: {response.status} {content[:300]!r}")
        return time.perf_counter() - began, content

    def read_delays(self) -> list[float]:
        """Return the delays of the event loop since the last measurement, in ms of wall time."""
        self.stalls.unlink(missing_ok=True)
        self.send_signal(signal.SIGUSR2)
        while not self.stalls.exists():
            time.sleep(0.02)
        return [wall for wall, _ in json.loads(self.stalls.read_text())["delays"]]


def measure(gateway: PageGateway, label: str, times: int, path: str, **query: object) -> None:
    gateway.send_signal(signal.SIGUSR1)
    durations, size = [], 0
    for _ in range(times):
        seconds, content = gateway.fetch(path, **query)
        durations.append(seconds * 1000)
        size = len(content)
    delays = sorted(gateway.read_delays()) or [0.0]
    p99 = delays[min(len(delays) - 1, int(0.99 * len(delays)))]
    print(
        f"{label:34}{sorted(durations)[len(durations) // 2]:9.1f}{max(durations):9.1f}{size / 1000:9.1f}{p99:11.1f}{delays[-1]:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the web page's response times.")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder:
        data = Path(folder) / "data"
        began = time.perf_counter()
        page_kit.add_rollouts(data, args.rollouts)
        page_kit.add_long_rollout(data, args.turns, args.tokens)
        print(f"{args.rollouts:,} rollouts and one of {args.turns} turns, {args.tokens:,} tokens, ", end="")
        print(f"written in {time.perf_counter() - began:.1f} s\n")
        gateway = PageGateway(Path(folder))
        try:
            report(gateway, args.times)
            print(f"\n{gateway.rss_mb():.0f} MB resident")
        finally:
            gateway.stop()


def report(gateway: PageGateway, times: int) -> None:
    print(f"{'':34}{'median':>9}{'longest':>9}{'kB':>9}{'loop p99':>11}{'longest':>9}   (ms)")
    measure(gateway, "the very first request", 1, "overview")
    measure(gateway, "overview", times, "overview")
    measure(gateway, "rollouts, newest first", times, "rollouts")
    measure(gateway, "rollouts, by reward, page 100", times, "rollouts", sort="-reward", offset=5000)
    measure(gateway, "rollouts, text", times, "rollouts", q="task-07")
    measure(gateway, "groups", times, "groups")
    measure(gateway, "one group", times, "group", name=f"{page_kit.BATCH}.task-0100")
    measure(gateway, "one group's traces", times, "group/evidence", name=f"{page_kit.BATCH}.task-0100")
    measure(gateway, "training, first time", 1, "training")
    measure(gateway, "training", times, "training")
    measure(gateway, "failures", times, "failures")
    measure(gateway, "long rollout, first time", 1, LONG)
    measure(gateway, "long rollout", times, LONG)
    measure(gateway, "its tree", times, f"{LONG}/tree")
    measure(gateway, "50 nodes of its conversation", times, f"{LONG}/messages")
    measure(gateway, "4,000 of its tokens", times, f"{LONG}/tokens", limit=4000)
    measure(gateway, "20,000 of its tokens", times, f"{LONG}/tokens", limit=20_000)


if __name__ == "__main__":
    main()
