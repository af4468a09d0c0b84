"""Run agents on tasks, through a gateway in another process. `train.py` starts this program and sends it a `RunnerConfig` as JSON on stdin.

It is a separate process because its sandboxes would otherwise compete with the sampling thread for the interpreter lock. The trainer's feed
throttles it. It ends when its tasks are done or on SIGTERM, and then prints a `RunnerReport` as JSON.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import tasks
from agent import CONTEXT, REPLY, build_agent, run_fork_server

from turngate.agents.install import Installation, ensure_installed
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.client.gateway import GatewayClient
from turngate.rollout.batch import Batch, BatchResult
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.rollout.throttle import TrainerThrottle, no_throttle
from turngate.sandboxes import get_backend


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    key: str
    model: str
    name: str  # of the batch
    folder: str
    tasks: str  # a file with rows
    count: int
    n: int
    running: int
    python: str  # version to install the agent for
    rounds: int = 1
    sandbox: str = "local"
    seed: int = 0
    timeout_s: float = 75.0
    feed: str = ""  # the feed that throttles the runner
    ahead: int = 1  # groups ahead of the trainer
    fork: bool = True  # start agents from a fork server


class RolloutLine(msgspec.Struct, frozen=True):
    """One graded rollout."""

    task: str
    reward: float
    session: str


class RunnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the rollouts, and their cost."""

    rollouts: int
    tasks: int
    kinds: dict[str, int]
    passed: float | None  # share of the graded rollouts
    turns: float | None
    seconds: float
    sampled_tokens: int
    own_cpu_s: float
    children_cpu_s: float
    stages: dict[str, float]
    messages: list[str]
    stopped: str
    graded: list[RolloutLine]


async def run_rollouts(config: RunnerConfig) -> BatchResult:
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        socket = f"{folder}/socket" if config.fork else ""
        spec = build_agent(config.python, socket)
        installed = ensure_installed(spec, report=lambda text: None)
        with run_fork_server(spec, installed, Path(socket)) if config.fork else nullcontext():
            return await _run(config, spec, installed)


async def _run(config: RunnerConfig, spec: AgentSpec, installed: Installation) -> BatchResult:
    chosen = await asyncio.to_thread(tasks.choose_tasks, Path(config.tasks), config.count, config.seed)
    plan = BatchPlan(
        tasks=tuple(chosen),
        agent=spec,
        installed=installed,
        backend=get_backend(config.sandbox),
        model=config.model,
        name=config.name,
        folder=Path(config.folder),
        n=config.n,
        rounds=config.rounds,
        timeout_s=config.timeout_s,
        bounds=Bounds(running=config.running),
        session={"sampling": {"temperature": 1.0}},
        model_limits=ModelLimits(context_tokens=CONTEXT, max_output_tokens=REPLY),
    )
    async with GatewayClient(config.url, config.key) as gateway, GatewayConnector(gateway.url) as connector:
        throttle = TrainerThrottle(config.ahead) if config.feed else None
        batch = Batch(plan, gateway, connector, throttle=throttle or no_throttle)
        running = asyncio.create_task(batch.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        following = asyncio.create_task(_follow_feed(gateway, config.feed, throttle)) if throttle else None
        try:
            with suppress(asyncio.CancelledError):
                await running
        finally:
            if following is not None:
                following.cancel()
        return batch.result


async def _follow_feed(gateway: GatewayClient, feed: str, throttle: TrainerThrottle) -> None:
    while True:
        throttle.mark_trained((await gateway.show_feed(feed)).committed)
        await asyncio.sleep(0.1)


def build_report(result: BatchResult) -> RunnerReport:
    overall = result.summary.overall
    graded = [RolloutLine(one.task, one.reward, one.session) for one in result.finished if one.reward is not None]
    own, children = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return RunnerReport(
        rollouts=len(result.finished),
        tasks=len({one.task for one in graded}),
        kinds={kind: count for kind, count in overall.kinds.items() if count},
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


if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RunnerConfig)
    print(msgspec.json.encode(build_report(asyncio.run(run_rollouts(config)))).decode())
