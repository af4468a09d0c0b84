"""Kill the gateway, trainer and runner repeatedly during training, and check that each group is trained once.

Three programs, each killed with SIGKILL at random moments and started again: a real `turngate serve`; a runner (`python -m
tests.feed.storm runner …`) that records rollouts in groups, some with infrastructure faults, some closed early; and a trainer
(`… trainer …`) that reads the feed, writes each delivery with its number as one durable line, as a checkpoint does, and commits.
At the end the trainer's lines are 1, 2, 3 …, every group and session is in exactly one of them, and reading the feed again from the
start gives the same lines.

By hand: `python -m tests.feed.storm storm --kills 100`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.crash.storm import ADMIN, Server
from tests.speed import SLOWNESS, scaled, slowness
from turngate.client.feed import Delivery, Feed, FeedConfig
from turngate.client.gateway import GatewayClient, GatewayUnreachable, RequestRejected
from turngate.store.outcomes import RecordedOutcome

N = 3
LANES = 4
CONFIG = FeedConfig(n=N, groups="storm.")


# ── the runner ──────────────────────────────────────────────────────────────────────────────────────────────────────


def size(group: int) -> int:
    """Number of rollouts in a group; every fifth has one too few and is closed."""
    return N - 1 if group % 5 == 0 else N


def reward_of(group: int, rollout: int) -> float:
    return float((group * 7 + rollout * 3) % 5)


class Runner:
    """Deterministic by group and rollout number, so that a restarted runner repeats its work."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    async def run(self) -> None:
        async with GatewayClient(self.url, ADMIN) as self.client, httpx.AsyncClient(timeout=scaled(20)) as self.http:
            await asyncio.gather(*(self.lane(lane) for lane in range(LANES)))

    async def lane(self, lane: int) -> None:
        """Run groups until the `over` file exists, starting with the group that was interrupted."""
        done = self.folder / f"lane-{lane}"
        group = int(done.read_text()) if done.exists() and done.read_text() else lane
        while True:
            for rollout in range(size(group)):
                await self.rollout(group, rollout)
            if size(group) < N:
                await self.retry(lambda name=f"storm.{group}": self.client.close_group(name))
            group += LANES
            writing = done.with_suffix(".writing")
            writing.write_text(str(group))
            writing.replace(done)  # atomic
            if (self.folder / "over").exists():
                return

    async def rollout(self, group: int, rollout: int) -> None:
        if (group + rollout) % 7 == 0:
            await self.attempt(
                f"{group}-{rollout}-fault", RecordedOutcome(kind="infrastructure fault", group=f"storm.{group}")
            )
        reward = reward_of(group, rollout)
        await self.attempt(
            f"{group}-{rollout}", RecordedOutcome(kind="graded", reward=reward, group=f"storm.{group}", task="t")
        )

    async def attempt(self, session: str, recorded: RecordedOutcome) -> None:
        await self.retry(lambda: self.open_session(session))
        await self.retry(lambda: self.send_message(session))
        await self.retry(lambda: self.client.seal(session))
        await self.retry(lambda: self.client.record(session, recorded))

    async def open_session(self, session: str) -> None:
        try:
            await self.client.open({"metadata": {"group": "storm"}}, session)
        except RequestRejected as refused:
            if refused.answered != 409:  # opened before the kill
                raise

    async def send_message(self, session: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": session}]}
        headers = {"authorization": f"Bearer {ADMIN}"}
        reply = await self.http.post(f"{self.url}/s/{session}/v1/chat/completions", json=body, headers=headers)
        if reply.status_code == 503:
            raise GatewayUnreachable(reply.text)
        assert reply.status_code in (200, 409), reply.text  # 409: sealed before the kill

    async def retry(self, ask: Any) -> None:
        while True:
            try:
                await ask()
                return
            except (GatewayUnreachable, httpx.HTTPError):
                await asyncio.sleep(0.05)
            except RequestRejected as refused:
                if refused.answered != 503:
                    raise
                await asyncio.sleep(0.05)


# ── the trainer ─────────────────────────────────────────────────────────────────────────────────────────────────────


def summarize(delivery: Delivery) -> dict[str, Any]:
    """Summarize a delivery, with a digest of its rows."""
    digest = hashlib.sha256()
    for row in delivery.rows():
        for array in (row.ids, row.mask, row.logprobs):
            digest.update(array.tobytes())
        digest.update(repr((row.weight, row.advantage, row.branch)).encode())
    return {
        "number": delivery.number,
        "group": delivery.group,
        "sessions": [rollout.session for rollout in delivery.rollouts],
        "rows": len(delivery.rows()),
        "digest": digest.hexdigest(),
    }


def read_trained(path: Path) -> list[dict[str, Any]]:
    """The complete lines; a partial last line is ignored."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(entry) for entry in text[: text.rfind("\n") + 1].splitlines()]


async def train(url: str, folder: Path) -> None:
    path = folder / "trained"
    if path.exists():
        whole = path.read_bytes()
        os.truncate(path, whole.rfind(b"\n") + 1)
    lines = read_trained(path)
    last = lines[-1]["number"] if lines else None
    async with GatewayClient(url, ADMIN) as client, await Feed.open(client, "storm", CONFIG, after=last) as feed:
        with path.open("a") as log:
            async for delivery in feed:
                log.write(json.dumps(summarize(delivery)) + "\n")
                log.flush()
                os.fsync(log.fileno())
                await feed.commit(delivery.number)


# ── the storm ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Program:
    """The runner or the trainer, as a process."""

    def __init__(self, what: str, url: str, folder: Path) -> None:
        self.command = [sys.executable, "-m", "tests.feed.storm", what, "--url", url, "--folder", str(folder)]
        self.log = folder / f"{what}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {**os.environ, SLOWNESS: str(slowness())}  # measured once, not at every start
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=env, cwd=Path(__file__).parents[2]
            )

    def kill(self) -> None:
        """Kill the process; fail if it had already crashed."""
        assert self.process is not None
        assert self.process.poll() in (None, 0), f"the process crashed:\n{self.log.read_text()[-3000:]}"
        self.end()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


async def storm(kills: int, *, seed: int = 0, workers: int = 1) -> str:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder, "process", workers)
        runner, trainer = (Program(what, server.url, folder) for what in ("runner", "trainer"))
        killed: Counter[str] = Counter()
        order = rng.sample(["gateway", "trainer", "runner"] * 3, 9)
        async with GatewayClient(server.url, ADMIN) as client:
            server.start()
            try:
                await server.ready()
                await client.open_feed("storm", CONFIG)
                runner.start()
                trainer.start()
                await wait_for_lines(folder / "trained", 1)
                for n in range(kills):
                    await asyncio.sleep(rng.uniform(0.05, 0.6))
                    what = order[n % len(order)]
                    killed[what] += 1
                    if what != "gateway":
                        program = runner if what == "runner" else trainer
                        program.kill()
                        program.start()
                    elif workers > 1 and rng.random() < 0.7:
                        server.kill_worker(rng)
                    else:
                        server.kill()
                        server.start()
                        await server.ready()
                await wait_for_lines(folder / "trained", len(read_trained(folder / "trained")) + 3)
                (folder / "over").touch()
                await wait_for_exit(runner)
                groups = sorted(set().union(*(range(lane, next_group(folder, lane), LANES) for lane in range(LANES))))
                view = await client.show_feed("storm")
                assert view.waiting == () and view.newest == len(groups), (view, len(groups))
                await wait_for_lines(folder / "trained", view.newest)
                trainer.kill()
                lines = read_trained(folder / "trained")
                check(lines, groups)
                async with await Feed.open(client, "storm", CONFIG, after=0) as feed:
                    again = [summarize(entry) for _ in lines if (entry := await feed.next(scaled(10))) is not None]
                assert again == lines, "a delivery changed between two reads"
                # The trainer may have been killed before its last commit.
                committed = (await client.show_feed("storm")).committed
                assert len(lines) - 1 <= committed <= len(lines)
                return f"{dict(killed)} killed, {len(lines)} groups delivered, none lost, none twice"
            finally:
                for program in (runner, trainer):
                    program.end()
                server.kill()


def next_group(folder: Path, lane: int) -> int:
    return int((folder / f"lane-{lane}").read_text())


def check(lines: list[dict[str, Any]], groups: list[int]) -> None:
    assert [entry["number"] for entry in lines] == list(range(1, len(groups) + 1))
    assert Counter(entry["group"] for entry in lines) == Counter(f"storm.{group}" for group in groups)
    for entry in lines:
        group = int(entry["group"].removeprefix("storm."))
        assert sorted(entry["sessions"]) == [f"{group}-{rollout}" for rollout in range(size(group))], entry
        assert entry["rows"] >= size(group)


async def wait_for_lines(path: Path, count: int, limit_s: float = 60) -> None:
    limit = scaled(limit_s)
    end = time.monotonic() + limit
    while len(read_trained(path)) < count:
        assert time.monotonic() < end, f"{len(read_trained(path))} of {count} groups were trained in {limit:.0f} s"
        await asyncio.sleep(0.05)


async def wait_for_exit(program: Program, limit_s: float = 60) -> None:
    end = time.monotonic() + scaled(limit_s)
    assert program.process is not None
    while program.process.poll() is None:
        assert time.monotonic() < end, program.log.read_text()[-3000:]
        await asyncio.sleep(0.05)
    assert program.process.returncode == 0, program.log.read_text()[-3000:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["storm", "runner", "trainer"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--url", default="")
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    if options.what == "storm":
        print(asyncio.run(storm(options.kills, seed=options.seed, workers=options.workers)))
    elif options.what == "runner":
        asyncio.run(Runner(options.url, options.folder).run())
    else:
        asyncio.run(train(options.url, options.folder))
