"""Run agents on repair tasks. `train.py` starts this program and sends it a `RunnerConfig` as JSON on stdin (`../rollout_process.py`)."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import msgspec
import tasks
from agent import CONTEXT, REPLY, STEPS, build_agent, run_fork_server
from fast_pytest import run_pytest_server
from tasks import Part

from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.rollout.batch import BatchResult
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import get_backend

sys.path.append(str(Path(__file__).parents[1]))  # for the modules that both examples share
from rollout_process import GatewayAccess, build_report, run_batch


class RunnerConfig(GatewayAccess, frozen=True, kw_only=True):
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
    part: Part = "all"
    seed: int = 0  # of the order of the tasks
    max_lines: int = 0  # of a task's function; 0: no limit
    short_first: bool = False  # begin with the short functions
    context: int = CONTEXT
    reply: int = REPLY
    steps: int = STEPS  # maximum number of the agent's steps
    edits: bool = False  # the tasks have the command of `edit_command.py`
    timeout_s: float = 75.0
    fork: bool = True  # start agents and their tests from fork servers


async def run_rollouts(config: RunnerConfig) -> BatchResult:
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        if not config.fork:
            return await _run(config, *_install(build_agent(config.python, steps=config.steps, edits=config.edits)))
        with run_pytest_server(Path(folder)) as path:
            socket = f"{folder}/socket"
            spec, installed = _install(build_agent(config.python, socket, config.steps, path, edits=config.edits))
            with run_fork_server(spec, installed, Path(socket)):
                return await _run(config, spec, installed)


def _install(spec: AgentSpec) -> tuple[AgentSpec, Installation]:
    return spec, ensure_installed(spec, report=lambda text: None)


async def _run(config: RunnerConfig, spec: AgentSpec, installed: Installation) -> BatchResult:
    chosen = await asyncio.to_thread(
        tasks.choose_tasks,
        Path(config.tasks),
        config.count,
        config.part,
        config.seed,
        max_lines=config.max_lines,
        short_first=config.short_first,
    )
    plan = BatchPlan(
        tasks=config.choose_share(chosen),
        agent=spec,
        installed=installed,
        backend=get_backend(config.sandbox),
        model=config.model,
        name=config.name,
        folder=Path(config.folder) / str(config.share),
        n=config.n,
        rounds=config.rounds,
        timeout_s=config.timeout_s,
        reuse_grades=True,
        bounds=Bounds(running=config.divide(config.running)),
        session={"sampling": {"temperature": 1.0}},
        model_limits=ModelLimits(context_tokens=config.context, max_output_tokens=config.reply),
    )
    return await run_batch(plan, config)


if __name__ == "__main__":
    os.nice(10)  # if agents need all cores, sampling and training go first
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RunnerConfig)
    print(msgspec.json.encode(build_report(asyncio.run(run_rollouts(config)))).decode())
