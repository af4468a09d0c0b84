"""Faults of a training run: a runner that records rollouts in groups, and a trainer that reads them from a feed (`tests/feed/storm.py`)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.chaos.suite import Pace, Row
from tests.crash.storm import ADMIN, Server, read_verdicts
from tests.feed.storm import (
    CONFIG,
    LANES,
    Program,
    next_group,
    read_trained,
    reward_of,
    size,
    wait_for_exit,
    wait_for_lines,
)
from turngate.client.gateway import GatewayClient


class TrainingRun:
    """A gateway with workers, a runner and a trainer, each a process."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.server = Server(folder, "process", workers=2)
        self.runner, self.trainer = (Program(what, self.server.url, folder) for what in ("runner", "trainer"))
        self.lines = folder / "trained"

    async def finish_groups(self) -> list[int]:
        """Let the runner finish its groups, and wait until all are trained. Return them."""
        (self.folder / "over").touch()
        await wait_for_exit(self.runner)
        groups = sorted(set().union(*(range(n, next_group(self.folder, n), LANES) for n in range(LANES))))
        await wait_for_lines(self.lines, len(groups))
        (self.folder / "over").unlink()
        return groups


async def _kill(program: Program) -> None:
    program.kill()
    program.start()


async def _pause(program: Program, seconds: float) -> None:
    assert program.process is not None
    os.kill(program.process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(program.process.pid, signal.SIGCONT)


async def _kill_gateway(run: TrainingRun) -> None:
    run.server.kill()
    run.server.start()


TRAINING_FAULTS: dict[str, Callable[[TrainingRun, float], Awaitable[None]]] = {
    "trainer: kill -9": lambda run, seconds: _kill(run.trainer),
    "trainer: SIGSTOP": lambda run, seconds: _pause(run.trainer, seconds),
    "runner: kill -9": lambda run, seconds: _kill(run.runner),
    "runner: SIGSTOP": lambda run, seconds: _pause(run.runner, seconds),
    "gateway: kill -9 during training": lambda run, seconds: _kill_gateway(run),
}


async def run_training_faults(names: list[str], pace: Pace, seed: int, report: Callable[[Row], None]) -> list[Row]:
    rng = random.Random(f"{seed} training")
    rows = []
    async with _start_training(rng) as run:
        for _ in range(pace.rounds):
            for name in rng.sample(names, len(names)):
                rows.append(await _run_fault(run, name, pace))
                report(rows[-1])
    return rows


@asynccontextmanager
async def _start_training(rng: random.Random) -> AsyncIterator[TrainingRun]:
    with tempfile.TemporaryDirectory(prefix="tg-chaos-") as name:
        run = TrainingRun(Path(name), rng)
        run.server.start()
        try:
            await run.server.ready()
            async with GatewayClient(run.server.url, ADMIN) as client:
                await client.open_feed("storm", CONFIG)
            run.trainer.start()
            yield run
        finally:
            for program in (run.runner, run.trainer):
                program.end()
            run.server.kill()


async def _run_fault(run: TrainingRun, name: str, pace: Pace) -> Row:
    row = Row(name)
    before = len(read_trained(run.lines))
    run.runner.start()
    await wait_for_lines(run.lines, before + 1)
    await asyncio.sleep(run.rng.random() * 0.3)
    await TRAINING_FAULTS[name](run, pace.seconds)
    ended, trained = time.monotonic(), len(read_trained(run.lines))
    await wait_for_lines(run.lines, trained + 1)
    row.recovery_s = time.monotonic() - ended
    await asyncio.sleep(pace.seconds)
    await _check(run, row, await run.finish_groups(), before)
    return row


async def _check(run: TrainingRun, row: Row, groups: list[int], before: int) -> None:
    """Check that every group was trained once, with all its sessions and the rewards that the runner sent."""
    lines = read_trained(run.lines)
    row.rollouts = row.counts.calls = sum(len(line["sessions"]) for line in lines[before:])
    trained = Counter(session for line in lines for session in line["sessions"])
    expected = {f"{group}-{n}" for group in groups for n in range(size(group))}
    row.breaches.lost = len(expected - trained.keys())
    row.breaches.duplicated = sum(count - 1 for count in trained.values()) + len(trained.keys() - expected)
    if [line["number"] for line in lines] != list(range(1, len(groups) + 1)):
        row.breaches.lost += 1
        row.notes.append("the deliveries are not numbered 1, 2, 3 …")
    async with GatewayClient(run.server.url, ADMIN) as client:
        for line in lines[before:]:
            for session in line["sessions"]:
                group, n = map(int, session.split("-"))
                outcome = (await client.show(session)).outcome
                if outcome is None or outcome.reward != reward_of(group, n):
                    row.breaches.wrong_rewards += 1
                    row.notes.append(f"{session}: recorded {outcome}, but the reward {reward_of(group, n)} was sent")
    wrong = [verdict["session"] for verdict in await read_verdicts(run.server.data) if not verdict["ok"]]
    row.breaches.inexact += len(wrong)
    row.notes += [f"verify rejects {session}" for session in wrong]
