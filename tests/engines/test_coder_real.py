"""Tests with a real coding model, Qwen2.5-Coder-1.5B-Instruct: its template, and a real agent that works on a task."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.agents_real import kit
from tests.engines.local_kit import torch
from tests.speed import scaled
from tools import parts
from turngate.agents.launch import ModelLimits
from turngate.client.gateway import GatewayClient
from turngate.config import ServeConfig
from turngate.engines.local import LocalEngine
from turngate.render import load_renderer
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.local import LocalBackend
from turngate.server.run import run_embedded
from turngate.tasks import BUNDLED_TASK, load_task

pytestmark = [pytest.mark.needs("coder", "torch"), pytest.mark.full]


def folder() -> Path:
    return parts.cache() / "models" / "qwen2.5-coder-1.5b"


def test_tool_template_is_certified() -> None:
    certificate = load_renderer(folder(), recertify=True)[1]
    assert certificate.passed and not certificate.uncertified


@pytest.fixture
def sandboxes() -> Iterator[Path]:
    """A short path, because the path of a unix socket must be short."""
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        yield Path(folder)


@pytest.mark.repeat  # the demo's test grades a real agent with a smaller model
@pytest.mark.needs("agent:mini-swe-agent")
async def test_agent_with_coder_is_graded(tmp_path: Path, sandboxes: Path) -> None:
    """One turn on a CPU: too few to solve the task, but everything is sampled, recorded and graded."""
    torch.set_num_threads(2)
    spec, installed = kit.agent("mini-swe-agent")
    config = ServeConfig(data=str(tmp_path / "data"), port=0, model="coder", tokenizer=str(folder()), max_context=8192)
    rollout = RolloutSpec(
        task=load_task(BUNDLED_TASK),
        agent=spec,
        installed=installed,
        backend=LocalBackend(sandboxes),
        model="coder",
        timeout_s=scaled(900),
        session={"limits": {"turns": 1}, "max_tokens": 16},
        model_limits=ModelLimits(context_tokens=8192, max_output_tokens=16),
        folder=tmp_path / "rollouts",
    )
    engine = LocalEngine(folder(), dtype="float32", max_context=8192, slots=1)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(run_embedded(config.check(), engine=engine))
        gateway = await stack.enter_async_context(GatewayClient(address.url, address.admin_key))
        connector = await stack.enter_async_context(GatewayConnector(address.url))
        outcome = await Rollout(rollout, gateway, connector).run()
        rows = await gateway.samples(outcome.session, everything=True)
    assert outcome.reward is not None, (outcome.fault, outcome.grade)
    sampled = [value for row in rows for value, trained in zip(row.logprobs, row.mask, strict=True) if trained]
    assert sampled and all(value is not None and value <= 0 for value in sampled)
