"""Run agents on tasks, through a gateway in another process. `train.py` starts this program and sends it a `RunnerConfig` as JSON on stdin.

It is a separate process because hundreds of sandboxes per minute would otherwise compete with the sampling thread for the interpreter lock.
The trainer's feed throttles it, so that it starts only groups that the trainer will need soon. It ends when its tasks are done or on
SIGTERM, and then prints a `RunnerReport` as JSON.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
from agent import build_agent, run_fork_server

from turngate import tasks
from turngate.agents.install import ensure_installed
from turngate.agents.launch import ModelLimits
from turngate.client.gateway import GatewayClient
from turngate.rollout.batch import Batch, BatchResult
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.rollout.throttle import TrainerThrottle, no_throttle
from turngate.sandboxes import get_backend

HERE = Path(__file__).parent
CONTEXT, REPLY = 2048, 80  # tokens; the agent is configured with these limits


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    key: str
    model: str
    folder: str
    tasks: str  # name of a function in tasks.py
    count: int
    n: int
    running: int
    python: str  # Python version to install the agent for
    sandbox: str = "local"
    temperature: float = 1.0
    feed: str = ""  # the feed that throttles the runner
    ahead: int = 1  # groups ahead of the trainer
    fork: bool = True  # start agents from a fork server


class RunnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the rollouts, and their cost."""

    rollouts: int
    graded: int
    kinds: dict[str, int]
    reward: float | None
    passed: float | None  # share of the graded rollouts
    by_kind: dict[str, float]  # share that passed, by kind of task
    turns: float | None
    seconds: float
    sampled_tokens: int
    own_cpu_s: float
    agents_cpu_s: (
        float  # sandboxes, relays and agents, without agents started by the fork server, which are not our children
    )
    stages: dict[str, float]
    messages: list[str]
    stopped: str


async def run_rollouts(config: RunnerConfig) -> BatchResult:
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        socket = f"{folder}/socket" if config.fork else ""
        spec = build_agent(config.python, socket)
        installed = ensure_installed(spec, report=lambda text: None)
        plan = BatchPlan(
            tasks=tuple(tasks.read_tasks(f"{HERE / 'tasks.py'}:{config.tasks}", limit=config.count)),
            agent=spec,
            installed=installed,
            backend=get_backend(config.sandbox),
            model=config.model,
            folder=Path(config.folder),
            n=config.n,
            bounds=Bounds(running=config.running),
            session={"sampling": {"temperature": config.temperature}},
            model_limits=ModelLimits(context_tokens=CONTEXT, max_output_tokens=REPLY),
        )
        if not config.fork:
            return await _run(config, plan)
        with run_fork_server(spec, installed, Path(socket)):
            return await _run(config, plan)


async def _run(config: RunnerConfig, plan: BatchPlan) -> BatchResult:
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
    passed_by_kind: dict[str, list[bool]] = {}
    for rollout in result.finished:
        if rollout.reward is not None:
            passed_by_kind.setdefault(rollout.task.rsplit("-", 1)[1], []).append(rollout.reward >= 1)
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    passed = [value for values in passed_by_kind.values() for value in values]
    return RunnerReport(
        rollouts=len(result.finished),
        graded=len(passed),
        kinds={kind: count for kind, count in overall.kinds.items() if count},
        reward=overall.mean_reward,
        passed=sum(passed) / len(passed) if passed else None,
        by_kind={kind: round(sum(values) / len(values), 3) for kind, values in sorted(passed_by_kind.items())},
        turns=overall.mean_turns,
        seconds=result.summary.seconds,
        sampled_tokens=overall.sampled_tokens,
        own_cpu_s=own.ru_utime + own.ru_stime,
        agents_cpu_s=children.ru_utime + children.ru_stime,
        stages=dict(overall.stages),
        messages=[
            f"{kind}: {text} ({count})" for kind, texts in result.summary.messages.items() for text, count in texts
        ][:5],
        stopped=result.stopped,
    )


if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RunnerConfig)
    print(msgspec.json.encode(build_report(asyncio.run(run_rollouts(config)))).decode())
