"""Kills gateway, trainer and runner over and over while groups are recorded and trained, and proves that each group is trained once.

Three programs, each killed with SIGKILL at random moments and started again: a real `turngate serve`; a runner (`python -m
tests.feed.storm runner …`) that records rollouts in groups, some with faults of the infrastructure, some closed early; and a trainer
(`… trainer …`) that reads the feed, keeps what it trained together with its number in one durable line, as a checkpoint does,
and commits. In the end the trainer's lines are 1, 2, 3 …, with every group and every session in exactly one of them, and the feed
read again from its beginning says the same.

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
    """How many rollouts a group has: every fifth has one too few, and is closed."""
    return N - 1 if group % 5 == 0 else N


class Runner:
    """What it does follows from the numbers of group and rollout, so one that was killed does again what it had begun."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    async def run(self) -> None:
        async with GatewayClient(self.url, ADMIN) as self.client, httpx.AsyncClient(timeout=scaled(20)) as self.http:
            await asyncio.gather(*(self.lane(lane) for lane in range(LANES)))

    async def lane(self, lane: int) -> None:
        """One group after the other, until it is told to end; what one that was killed had begun is ended first."""
        done = self.folder / f"lane-{lane}"
        group = int(done.read_text()) if done.exists() and done.read_text() else lane
        while True:
            for rollout in range(size(group)):
                await self.rollout(group, rollout)
            if size(group) < N:
                await self.surely(lambda name=f"storm.{group}": self.client.close_group(name))
            group += LANES
            writing = done.with_suffix(".writing")
            writing.write_text(str(group))
            writing.replace(done)  # whole, whenever it is killed
            if (self.folder / "over").exists():
                return

    async def rollout(self, group: int, rollout: int) -> None:
        if (group + rollout) % 7 == 0:
            await self.attempt(
                f"{group}-{rollout}-fault", RecordedOutcome(kind="infrastructure fault", group=f"storm.{group}")
            )
        reward = float((group * 7 + rollout * 3) % 5)
        await self.attempt(
            f"{group}-{rollout}", RecordedOutcome(kind="graded", reward=reward, group=f"storm.{group}", task="t")
        )

    async def attempt(self, session: str, recorded: RecordedOutcome) -> None:
        await self.surely(lambda: self.opened(session))
        await self.surely(lambda: self.talked(session))
        await self.surely(lambda: self.client.seal(session))
        await self.surely(lambda: self.client.record(session, recorded))

    async def opened(self, session: str) -> None:
        try:
            await self.client.open({"metadata": {"group": "storm"}}, session)
        except RequestRejected as refused:
            if refused.answered != 409:  # it was opened before we were killed
                raise

    async def talked(self, session: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": session}]}
        headers = {"authorization": f"Bearer {ADMIN}"}
        reply = await self.http.post(f"{self.url}/s/{session}/v1/chat/completions", json=body, headers=headers)
        if reply.status_code == 503:
            raise GatewayUnreachable(reply.text)
        assert reply.status_code in (200, 409), reply.text  # 409: it was sealed before we were killed

    async def surely(self, ask: Any) -> None:
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


def line(delivery: Delivery) -> dict[str, Any]:
    """What a delivery said, down to the bytes of its rows."""
    digest = hashlib.sha256()
    for row in delivery.rows():
        for array in (row.ids, row.mask, row.logprobs):
            digest.update(array.tobytes())
        digest.update(repr((row.weight, row.advantage, row.branch)).encode())
    return {
        "number": delivery.number,
        "group": delivery.group,
        "sessions": [rolled.session for rolled in delivery.rollouts],
        "rows": len(delivery.rows()),
        "digest": digest.hexdigest(),
    }


def trained(path: Path) -> list[dict[str, Any]]:
    """The lines that have an end; what comes after was cut off with its writer, and never was."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(one) for one in text[: text.rfind("\n") + 1].splitlines()]


async def train(url: str, folder: Path) -> None:
    path = folder / "trained"
    if path.exists():
        whole = path.read_bytes()
        os.truncate(path, whole.rfind(b"\n") + 1)
    lines = trained(path)
    last = lines[-1]["number"] if lines else None
    async with GatewayClient(url, ADMIN) as client, await Feed.open(client, "storm", CONFIG, after=last) as feed:
        with path.open("a") as log:
            async for delivery in feed:
                log.write(json.dumps(line(delivery)) + "\n")
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
        env = {**os.environ, SLOWNESS: str(slowness())}  # measured once, not at each start
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=env, cwd=Path(__file__).parents[2]
            )

    def kill(self) -> None:
        """Whatever it is doing. One that has ended by itself, and not because it was told to, is a failure."""
        assert self.process is not None
        assert self.process.poll() in (None, 0), f"it ended by itself:\n{self.log.read_text()[-3000:]}"
        self.end()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


async def storm(kills: int, *, seed: int = 0, workers: int = 1) -> str:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder, "process", workers)
        runner, trainer = (Program(what, server.url, folder) for what in ("runner", "trainer"))
        killed: Counter[str] = Counter()
        order = draw.sample(["gateway", "trainer", "runner"] * 3, 9)
        async with GatewayClient(server.url, ADMIN) as client:
            server.start()
            try:
                await _ready(server)
                await client.open_feed("storm", CONFIG)
                runner.start()
                trainer.start()
                await _some(folder / "trained", 1)
                for n in range(kills):
                    await asyncio.sleep(draw.uniform(0.05, 0.6))
                    what = order[n % len(order)]
                    killed[what] += 1
                    if what != "gateway":
                        program = runner if what == "runner" else trainer
                        program.kill()
                        program.start()
                    elif workers > 1 and draw.random() < 0.7:
                        server.kill_worker(draw)
                    else:
                        server.kill()
                        server.start()
                        await _ready(server)
                await _some(folder / "trained", len(trained(folder / "trained")) + 3)
                (folder / "over").touch()
                await _ended(runner)
                groups = sorted(set().union(*(range(lane, upto(folder, lane), LANES) for lane in range(LANES))))
                view = await client.show_feed("storm")
                assert view.waiting == () and view.newest == len(groups), (view, len(groups))
                await _some(folder / "trained", view.newest)
                trainer.kill()
                lines = trained(folder / "trained")
                check(lines, groups)
                async with await Feed.open(client, "storm", CONFIG, after=0) as feed:
                    again = [line(one) for _ in lines if (one := await feed.next(scaled(10))) is not None]
                assert again == lines, "the same number says something else than before"
                # The trainer may have been killed before the last of its commits.
                committed = (await client.show_feed("storm")).committed
                assert len(lines) - 1 <= committed <= len(lines)
                return f"{dict(killed)} killed, {len(lines)} groups delivered, none lost, none twice"
            finally:
                for program in (runner, trainer):
                    program.end()
                server.kill()


async def _ready(server: Server) -> None:
    """Over a new connection: on an old one the workers of a front that was killed may still answer for a moment."""
    async with httpx.AsyncClient(timeout=scaled(30)) as http:
        await server.ready(http)


def upto(folder: Path, lane: int) -> int:
    return int((folder / f"lane-{lane}").read_text())


def check(lines: list[dict[str, Any]], groups: list[int]) -> None:
    assert [one["number"] for one in lines] == list(range(1, len(groups) + 1))
    assert Counter(one["group"] for one in lines) == Counter(f"storm.{group}" for group in groups)
    for one in lines:
        group = int(one["group"].removeprefix("storm."))
        assert sorted(one["sessions"]) == [f"{group}-{rollout}" for rollout in range(size(group))], one
        assert one["rows"] >= size(group)


async def _some(path: Path, count: int, limit_s: float = 60) -> None:
    limit = scaled(limit_s)
    end = time.monotonic() + limit
    while len(trained(path)) < count:
        assert time.monotonic() < end, f"{len(trained(path))} of {count} groups were trained in {limit:.0f} s"
        await asyncio.sleep(0.05)


async def _ended(program: Program, limit_s: float = 60) -> None:
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
