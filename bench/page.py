"""How long the web page's answers take, and how late the event loop gets meanwhile: `python bench/page.py [--rollouts 10000]`.

A data folder is filled (`tests/page_kit.py`) and served by a real `turngate serve` whose event loop has a clock on it (`watched.py`). Each
question is asked some times, one after the other; the first one of all reads everything there is.
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


class Served(Process):
    """A gateway with a clock on its loop, and somebody who is logged in."""

    def __init__(self, folder: Path) -> None:
        self.stalls = folder / "stalls.json"
        key, port = secrets.token_hex(16), free_port()
        command = [
            sys.executable,
            str(HERE / "watched.py"),
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

    def ask(self, path: str, **query: object) -> tuple[float, bytes]:
        began = time.perf_counter()
        self._http.request("GET", f"/page/api/{path}?{urlencode(query)}", headers={"cookie": self._cookie})
        response = self._http.getresponse()
        content = response.read()
        if response.status != 200:
            raise SystemExit(f"bench: {path}: {response.status} {content[:300]!r}")
        return time.perf_counter() - began, content

    def late(self) -> list[float]:
        """How late each look at the loop was since the last time, in ms by the wall."""
        self.stalls.unlink(missing_ok=True)
        self.tell(signal.SIGUSR2)
        while not self.stalls.exists():
            time.sleep(0.02)
        return [wall for wall, _ in json.loads(self.stalls.read_text())]


def measure(served: Served, what: str, times: int, path: str, **query: object) -> None:
    served.tell(signal.SIGUSR1)
    took, size = [], 0
    for _ in range(times):
        seconds, content = served.ask(path, **query)
        took.append(seconds * 1000)
        size = len(content)
    late = sorted(served.late()) or [0.0]
    p99 = late[min(len(late) - 1, int(0.99 * len(late)))]
    print(f"{what:34}{sorted(took)[len(took) // 2]:9.1f}{max(took):9.1f}{size / 1000:9.1f}{p99:11.1f}{late[-1]:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the web page's answers take.")
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
        served = Served(Path(folder))
        try:
            report(served, args.times)
            print(f"\n{served.rss_mb():.0f} MB resident")
        finally:
            served.stop()


def report(served: Served, times: int) -> None:
    print(f"{'':34}{'median':>9}{'longest':>9}{'kB':>9}{'loop p99':>11}{'longest':>9}   (ms)")
    measure(served, "the first look of all", 1, "overview")
    measure(served, "overview", times, "overview")
    measure(served, "rollouts, newest first", times, "rollouts")
    measure(served, "rollouts, by reward, page 100", times, "rollouts", sort="-reward", offset=5000)
    measure(served, "rollouts, text", times, "rollouts", q="task-07")
    measure(served, "groups", times, "groups")
    measure(served, "one group", times, "group", name=f"{page_kit.BATCH}.task-0100")
    measure(served, "one group's traces", times, "group/evidence", name=f"{page_kit.BATCH}.task-0100")
    measure(served, "training, first time", 1, "training")
    measure(served, "training", times, "training")
    measure(served, "failures", times, "failures")
    measure(served, "long rollout, first time", 1, LONG)
    measure(served, "long rollout", times, LONG)
    measure(served, "its tree", times, f"{LONG}/tree")
    measure(served, "50 nodes of its conversation", times, f"{LONG}/messages")
    measure(served, "4,000 of its tokens", times, f"{LONG}/tokens", limit=4000)
    measure(served, "20,000 of its tokens", times, f"{LONG}/tokens", limit=20_000)


if __name__ == "__main__":
    main()
