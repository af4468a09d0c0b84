"""Rollouts in another process, for the examples on a GPU: `runner.py` runs them, and `train.py` starts it and reads its report.

It is a separate process because hundreds of sandboxes per minute would otherwise compete with the sampling thread for the interpreter lock.
The trainer's feed throttles it, so that it starts only groups that the trainer will need soon. It ends when its tasks are done or on
SIGTERM, and then prints a `RunnerReport` as JSON. One runner starts and grades at most three or four rollouts per second, because it uses
little more than one core. On a machine with many cores, several runners can share the tasks.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.rollout.batch import Batch, BatchResult
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.rollout.throttle import no_throttle

if TYPE_CHECKING:
    from turngate.trainers.local.grpo import Trainer  # imports torch, which the runner does not need


TaskT = TypeVar("TaskT")
_COUNT_BYTES = 8
_RECORDED = ("graded", "agent failed", "invalid task")  # the classes that trainers see


class GatewayAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway that records the rollouts, and the feed that throttles them."""

    url: str
    key: str
    feed: str = ""
    ahead: int = 1  # groups ahead of the trainer
    share: int = 0  # which part of the tasks this runner runs
    shares: int = 1  # number of runners that share the tasks
    started: str = ""  # file with the number of groups that each runner has started

    def choose_share(self, tasks: Sequence[TaskT]) -> tuple[TaskT, ...]:
        if self.share >= len(tasks):
            raise SystemExit(f"there are only {len(tasks)} tasks for {self.shares} runners; lower --runners")
        return tuple(tasks[self.share :: self.shares])

    def divide(self, limit: int) -> int:
        """Return the part of a limit that applies to this runner."""
        return -(-limit // self.shares)


class RolloutLine(msgspec.Struct, frozen=True):
    """One graded rollout."""

    task: str
    reward: float
    session: str
    turns: int


class RunnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the rollouts, and their cost."""

    rollouts: int
    tasks: int
    kinds: dict[str, int]
    reward: float | None
    passed: float | None  # share of the graded rollouts
    turns: float | None
    seconds: float
    sampled_tokens: int
    own_cpu_s: float
    children_cpu_s: float  # sandboxes, relays, agents, graders, and the fork servers with their agents
    stages: dict[str, float]
    messages: list[str]
    stopped: str
    graded: list[RolloutLine]


# ── in the runner ───────────────────────────────────────────────────────────────────────────────────────────────────


async def run_batch(plan: BatchPlan, access: GatewayAccess) -> BatchResult:
    """Run the batch to its end, or until SIGTERM."""
    async with GatewayClient(access.url, access.key) as gateway, GatewayConnector(gateway.url) as connector:
        throttle = SharedThrottle(access) if access.feed else None
        batch = Batch(plan, gateway, connector, throttle=throttle or no_throttle)
        running = asyncio.create_task(batch.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        following = asyncio.create_task(_follow_feed(gateway, access, throttle)) if throttle else None
        try:
            with suppress(asyncio.CancelledError):
                await running
        finally:
            if following is not None:
                following.cancel()
        result = batch.result
        if throttle is not None:
            throttle.end(
                {one.rollout.rpartition(".")[0] for one in result.finished if one.session and one.kind in _RECORDED}
            )
        return result


class SharedThrottle:
    """Keeps all runners together at most `ahead` groups ahead of the trainer.

    Groups without rollouts that count, which the trainer never sees, do not hold up the others, even after their runner has ended.
    """

    def __init__(self, access: GatewayAccess) -> None:
        self._access = access
        self._trained = 0

    def mark_trained(self, groups: int) -> None:
        self._trained = max(self._trained, groups)

    def end(self, groups: Collection[str]) -> None:
        """Count only these groups, which the trainer will see. The batch has ended, so it will not report empty groups anymore."""
        self._write(len(groups))

    async def __call__(self, number: int) -> None:
        """Wait until the group after this runner's first `number` groups may start."""
        while self._write(number) >= self._trained + self._access.ahead:
            await asyncio.sleep(0.05)
        self._write(number + 1)

    def _write(self, number: int) -> int:
        """Record the number of groups that this runner has started. Return the number for all runners."""
        with open(self._access.started, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), number.to_bytes(_COUNT_BYTES), self._access.share * _COUNT_BYTES)
            counts = os.pread(file.fileno(), self._access.shares * _COUNT_BYTES, 0)
        return sum(int.from_bytes(counts[at : at + _COUNT_BYTES]) for at in range(0, len(counts), _COUNT_BYTES))


async def _follow_feed(gateway: GatewayClient, access: GatewayAccess, throttle: SharedThrottle) -> None:
    while True:
        try:
            throttle.mark_trained((await gateway.show_feed(access.feed)).committed)
        except TurngateError as error:
            print(f"cannot read the feed: {error.message}; retrying", file=sys.stderr)
        await asyncio.sleep(0.1)


def build_report(result: BatchResult) -> RunnerReport:
    overall = result.summary.overall
    graded = [
        RolloutLine(one.task, one.reward, one.session, one.turns) for one in result.finished if one.reward is not None
    ]
    own, children = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return RunnerReport(
        rollouts=len(result.finished),
        tasks=len({one.task for one in graded}),
        kinds={kind: count for kind, count in overall.kinds.items() if count},
        reward=overall.mean_reward,
        passed=sum(one.reward >= 1 for one in graded) / len(graded) if graded else None,
        turns=overall.mean_turns,
        seconds=result.summary.seconds,
        sampled_tokens=overall.sampled_tokens,
        own_cpu_s=own.ru_utime + own.ru_stime,
        children_cpu_s=children.ru_utime + children.ru_stime,
        stages=dict(overall.stages),
        messages=[
            f"{kind}: {text} ({count})" for kind, texts in result.summary.messages.items() for text, count in texts
        ][:8],
        stopped=result.stopped,
        graded=graded,
    )


# ── in the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def start_runners(
    program: Path, config: GatewayAccess, count: int = 1
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Start `count` processes of `runner.py`, which share the tasks. Each reads its configuration as JSON from stdin."""
    processes: list[asyncio.subprocess.Process] = []
    descriptor, started = tempfile.mkstemp(prefix="started-")
    os.close(descriptor)
    try:
        for share in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(program),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 26,
            )
            processes.append(process)
            assert process.stdin is not None
            own = msgspec.structs.replace(config, share=share, shares=count, started=started)
            process.stdin.write(msgspec.json.encode(own))
            process.stdin.close()
        yield processes
    finally:
        running = [process for process in processes if process.returncode is None]
        for process in running:
            process.kill()
        for process in running:
            await process.wait()
        os.unlink(started)


async def read_reports(processes: Sequence[asyncio.subprocess.Process]) -> RunnerReport:
    """Return the results of all runners as one report, when all have ended."""
    return merge_reports(await asyncio.gather(*map(_read_report, processes)))


async def _read_report(process: asyncio.subprocess.Process) -> RunnerReport:
    assert process.stdout is not None
    output = await process.stdout.read()
    if await process.wait():
        raise SystemExit(f"runner.py failed with exit code {process.returncode}")
    return msgspec.json.decode(output, type=RunnerReport)


def merge_reports(reports: Sequence[RunnerReport]) -> RunnerReport:
    """Add up reports of runners that ran at the same time. Means are weighted by the number of rollouts."""
    kinds: Counter[str] = Counter()
    for report in reports:
        kinds.update(report.kinds)
    names = {name: None for report in reports for name in report.stages}
    return RunnerReport(
        rollouts=sum(report.rollouts for report in reports),
        tasks=sum(report.tasks for report in reports),
        kinds=dict(kinds),
        reward=_weigh((report.reward, len(report.graded)) for report in reports),
        passed=_weigh((report.passed, len(report.graded)) for report in reports),
        turns=_weigh((report.turns, report.rollouts) for report in reports),
        seconds=max(report.seconds for report in reports),
        sampled_tokens=sum(report.sampled_tokens for report in reports),
        own_cpu_s=sum(report.own_cpu_s for report in reports),
        children_cpu_s=sum(report.children_cpu_s for report in reports),
        stages={
            name: round(_weigh((report.stages.get(name), report.rollouts) for report in reports) or 0.0, 3)
            for name in names
        },
        messages=[text for texts in zip_longest(*(report.messages for report in reports)) for text in texts if text][
            :8
        ],
        stopped="; ".join(dict.fromkeys(report.stopped for report in reports if report.stopped)),
        graded=[line for report in reports for line in report.graded],
    )


def _weigh(values: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the weighted mean of the known values, or None if there is none."""
    known = [(value, weight) for value, weight in values if value is not None and weight]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


async def run_rollouts(program: Path, config: GatewayAccess, count: int = 1) -> RunnerReport:
    async with start_runners(program, config, count) as processes:
        return await read_reports(processes)


async def train_beside(
    processes: Sequence[asyncio.subprocess.Process], trainer: Trainer, feed: Feed, *, steps: int, minutes: float
) -> RunnerReport:
    """Train on the rollouts of the runners for `steps` steps, but start no step after `minutes`. Then stop the runners."""
    began = time.monotonic()
    reporting = asyncio.create_task(read_reports(processes))
    try:
        while trainer.state.step < steps and time.monotonic() - began < 60 * minutes:
            step = asyncio.create_task(trainer.run(feed, trainer.state.step + 1))
            await asyncio.wait({step, reporting}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                step.cancel()
                raise SystemExit(f"the runners ended early: {await reporting}")
            await step
    except BaseException:
        reporting.cancel()  # otherwise the runners, which are killed next, would hide the reason
        raise
    for process in processes:
        if process.returncode is None:
            process.terminate()
    return await reporting


def record_result(out: Path, **entries: Any) -> None:
    """Add entries to result.json, and print them."""
    file = out / "result.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(before | entries, indent=1))
    new.replace(file)
    for name, value in entries.items():
        print(f"{name}: {json.dumps(value)}", flush=True)
