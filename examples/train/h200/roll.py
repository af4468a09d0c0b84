"""The runner: agents on tasks, through a gateway that is in another process. Started by `train.py`; its orders are JSON on stdin.

It has a process of its own so that hundreds of sandboxes a minute do not take the interpreter's lock from the sampling thread. A trainer's
feed paces it: it begins no more groups than the trainer will want soon. Ends when its tasks are done, or on SIGTERM; then it prints what
came of them, and what that cost.
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
from agent import described, warmed

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
CONTEXT, REPLY = 2048, 80  # tokens, of which the agent is told


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    key: str
    model: str
    folder: str
    tasks: str  # a function of tasks.py
    count: int
    n: int
    running: int
    python: str  # the version that the agent is installed for
    sandbox: str = "local"
    temperature: float = 1.0
    feed: str = ""  # that sets the pace
    ahead: int = 1
    warm: bool = True


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    rollouts: int
    graded: int
    kinds: dict[str, int]
    reward: float | None
    passed: float | None  # share of the graded
    by_kind: dict[str, float]  # the same, by the kind of the task
    turns: float | None
    seconds: float
    sampled_tokens: int
    own_cpu_s: float
    agents_cpu_s: float  # sandboxes, relays and agents; not what warm.py has begun, which is none of our children
    stages: dict[str, float]
    messages: list[str]
    stopped: str


async def rolled(orders: Orders) -> BatchResult:
    with tempfile.TemporaryDirectory(prefix="warm-") as place:
        socket = f"{place}/socket" if orders.warm else ""
        spec = described(orders.python, socket)
        installed = ensure_installed(spec, report=lambda text: None)
        plan = BatchPlan(
            tasks=tuple(tasks.read_tasks(f"{HERE / 'tasks.py'}:{orders.tasks}", limit=orders.count)),
            agent=spec,
            installed=installed,
            backend=get_backend(orders.sandbox),
            model=orders.model,
            folder=Path(orders.folder),
            n=orders.n,
            bounds=Bounds(running=orders.running),
            session={"sampling": {"temperature": orders.temperature}},
            told=ModelLimits(context_tokens=CONTEXT, max_output_tokens=REPLY),
        )
        if not orders.warm:
            return await _run(orders, plan)
        with warmed(spec, installed, Path(socket)):
            return await _run(orders, plan)


async def _run(orders: Orders, plan: BatchPlan) -> BatchResult:
    async with GatewayClient(orders.url, orders.key) as gateway, GatewayConnector(gateway.url) as connector:
        ahead = TrainerThrottle(orders.ahead) if orders.feed else None
        batch = Batch(plan, gateway, connector, throttle=ahead or no_throttle)
        running = asyncio.create_task(batch.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        following = asyncio.create_task(_follow(gateway, orders.feed, ahead)) if ahead else None
        try:
            with suppress(asyncio.CancelledError):
                await running
        finally:
            if following is not None:
                following.cancel()
        return batch.result


async def _follow(gateway: GatewayClient, feed: str, ahead: TrainerThrottle) -> None:
    while True:
        ahead.mark_trained((await gateway.show_feed(feed)).committed)
        await asyncio.sleep(0.1)


def came(result: BatchResult) -> Came:
    overall = result.summary.overall
    kinds: dict[str, list[bool]] = {}
    for one in result.finished:
        if one.reward is not None:
            kinds.setdefault(one.task.rsplit("-", 1)[1], []).append(one.reward >= 1)
    own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    passed = [found for several in kinds.values() for found in several]
    return Came(
        rollouts=len(result.finished),
        graded=len(passed),
        kinds={kind: count for kind, count in overall.kinds.items() if count},
        reward=overall.mean_reward,
        passed=sum(passed) / len(passed) if passed else None,
        by_kind={kind: round(sum(found) / len(found), 3) for kind, found in sorted(kinds.items())},
        turns=overall.mean_turns,
        seconds=result.summary.seconds,
        sampled_tokens=overall.sampled_tokens,
        own_cpu_s=own.ru_utime + own.ru_stime,
        agents_cpu_s=theirs.ru_utime + theirs.ru_stime,
        stages=dict(overall.stages),
        messages=[
            f"{kind}: {text} ({count})" for kind, texts in result.summary.messages.items() for text, count in texts
        ][:5],
        stopped=result.stopped,
    )


if __name__ == "__main__":
    told = came(asyncio.run(rolled(msgspec.json.decode(sys.stdin.buffer.read(), type=Orders))))
    print(msgspec.json.encode(told).decode())
