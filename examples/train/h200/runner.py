"""Run agents on errands. `train.py` starts this program and sends it a `RunnerConfig` as JSON on stdin (`../rollout_process.py`)."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import msgspec
from agent import build_agent, run_fork_server

from turngate import tasks
from turngate.agents.install import ensure_installed
from turngate.agents.launch import ModelLimits
from turngate.rollout.batch import BatchResult
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import get_backend

sys.path.append(str(Path(__file__).parents[1]))  # for the modules that both examples share
from rollout_process import GatewayAccess, build_report, run_batch

HERE = Path(__file__).parent
CONTEXT, REPLY = 2048, 80  # tokens; the agent is configured with these limits


class RunnerConfig(GatewayAccess, frozen=True, kw_only=True):
    model: str
    folder: str
    tasks: str  # name of a function in tasks.py
    count: int
    n: int
    running: int
    python: str  # Python version to install the agent for
    sandbox: str = "local"
    temperature: float = 1.0
    fork: bool = True  # start agents from a fork server


async def run_rollouts(config: RunnerConfig) -> BatchResult:
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        socket = f"{folder}/socket" if config.fork else ""
        spec = build_agent(config.python, socket)
        installed = ensure_installed(spec, report=lambda text: None)
        plan = BatchPlan(
            tasks=config.choose_share(
                list(tasks.read_tasks(f"{HERE / 'tasks.py'}:{config.tasks}", limit=config.count))
            ),
            agent=spec,
            installed=installed,
            backend=get_backend(config.sandbox),
            model=config.model,
            folder=Path(config.folder) / str(config.share),
            n=config.n,
            bounds=Bounds(running=config.divide(config.running)),
            session={"sampling": {"temperature": config.temperature}},
            model_limits=ModelLimits(context_tokens=CONTEXT, max_output_tokens=REPLY),
        )
        with run_fork_server(spec, installed, Path(socket)) if config.fork else nullcontext():
            return await run_batch(plan, config)


if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RunnerConfig)
    print(msgspec.json.encode(build_report(asyncio.run(run_rollouts(config)))).decode())
