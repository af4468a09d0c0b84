"""Tests for OpenEnv sessions under TRL's `HarnessRolloutWorker`, in its own process, with a real agent."""

from __future__ import annotations

import functools
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from datasets import Dataset
from openenv.core.harness import TrainableSession, TrainingTrace
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from tests.kit import calls, gateway, say
from tests.speed import scaled
from tests.trainers.inside_trl.kit import equals_row, in_thread
from turngate.client import retry
from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.errors import ConfigError, SandboxUnavailable, TurngateError
from turngate.render import BUILTIN_TOKENIZER
from turngate.sandboxes.base import Sandbox, SandboxSpec
from turngate.sandboxes.local import LocalBackend
from turngate.trainers.trl.sessions import SessionsConfig, TurngateSessions, prompts

pytestmark = pytest.mark.process

TASK = Path(__file__).parents[3] / "examples" / "tasks" / "fix-add"
MEND = [
    say("I look first.\n" + calls(("bash", {"command": "cat main.py"}))),
    say("I mend it.\n" + calls(("bash", {"command": "sed -i 's/a - b/a + b/' main.py"}))),
    say("It is mended."),
]


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda value: monkeypatch.setenv("TURNGATE_ADMIN_KEY", value)


def config(url: str, folder: Path, **given: Any) -> SessionsConfig:
    settings = {"agent": "pi", "sandbox": "local", "tasks": str(TASK), "model": "m", "folder": str(folder)}
    return SessionsConfig(gateway=url, **{**settings, **given})


def drain_rows(worker: HarnessRolloutWorker, count: int) -> list[RolloutSample]:
    """Take rows as TRL's trainer does."""
    found: list[RolloutSample] = []
    end = time.monotonic() + scaled(150)
    while len(found) < count and time.monotonic() < end:
        try:
            found.append(worker.rollout_buffer.get(timeout=2))
        except queue.Empty:
            worker.check_health(scaled(120))
    return found


@pytest.mark.real
async def test_trl_worker_trains_on_gateway_traces(key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState()  # needed by TRL's logging; its trainer usually creates it
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda *_, **__: True)  # vLLM is not used here
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(BUILTIN_TOKENIZER / "tokenizer.json"), eos_token="<|im_end|>"
    )
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.response_template = {"defaults": {"role": "assistant"}}  # unused: the gateway parses replies
    async with gateway(MEND) as g:
        key(g.app.admin_key)
        settings = config(g.root, tmp_path)
        worker = HarnessRolloutWorker(
            harness_session_factory=functools.partial(TurngateSessions, settings),
            dataset=Dataset.from_list(prompts(settings)),
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            model_name="m",
            num_generations=2,
            max_inflight_tasks=2,
        )
        worker.update_model_version(1)
        try:
            await in_thread(worker.start)
            samples = await in_thread(drain_rows, worker, 2)
        finally:
            await in_thread(worker.stop)
        assert [sample.metrics["rewards/harness_reward"] for sample in samples] == [1.0, 1.0]
        listed = (await g._request("GET", "/admin/sessions"))["sessions"]
        rows = [row for session in listed for row in await g.samples(session["id"])]
        assert all(any(equals_row(sample, row) for row in rows) for sample in samples)
        assert all(sample.completion_mask.sum() == sum(len(turn.ids) for turn in MEND) for sample in samples)
        assert (await g._request("GET", "/admin/sessions?status=open"))["sessions"] == []


async def test_session_lifecycle(key: Any, tmp_path: Path) -> None:
    async with gateway(MEND) as g:
        key(g.app.admin_key)
        factory = TurngateSessions(config(g.root, tmp_path), sampling={"temperature": 0.7, "top_k": -1, "top_p": 1.0})
        [row] = prompts(factory.config)
        session = await in_thread(factory.create, row["prompt"], 3, "mine")
        assert isinstance(session, TrainableSession)
        assert session.initial_messages() == row["prompt"]
        assert await in_thread(session.wait_for_completion) == 0
        trace = await in_thread(session.fetch_training_trace)
        assert isinstance(trace, TrainingTrace)
        assert [turn.completion_token_ids for turn in trace.turns] == [list(turn.ids) for turn in MEND]
        verdict = session.verify([])
        assert verdict.env_reward == 1.0 and verdict.artifacts["kind"] == "graded"
        shown = await g.show(session.outcome.session)
        assert shown["config"]["sampling"] == {"temperature": 0.7, "top_p": 1.0}
        assert shown["outcome"]["group"] == "trl.fix-add@3"
        await in_thread(session.close)
        await in_thread(session.close)
        with pytest.raises(ConfigError, match="build the rows of the dataset with the function `prompts`"):
            factory.create("Something else")


async def test_close_ends_session_and_missing_gateway_raises(
    key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(MEND) as g:
        key(g.app.admin_key)
        factory = TurngateSessions(config(g.root, tmp_path))
        [row] = prompts(factory.config)
        session = await in_thread(factory.create, row["prompt"])
        with pytest.raises(TimeoutError):
            await in_thread(session.wait_for_completion, 0.05)
        await in_thread(session.close)
        assert (await g._request("GET", "/admin/sessions?status=open"))["sessions"] == []
        assert session.verify([]).env_reward is None
    monkeypatch.setattr(retry, "RESTART_S", 0.5)
    with pytest.raises(GatewayUnreachable):  # the gateway has stopped
        await in_thread(TurngateSessions(config(g.root, tmp_path)).create, row["prompt"])


async def test_session_that_cannot_start_leaves_no_connection(
    key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(MEND) as g:
        key(g.app.admin_key)
        broken = TurngateSessions(config(g.root, tmp_path, tunnel="exit 3"))
        [row] = prompts(broken.config)
        with pytest.raises(TurngateError, match="tunnel"):
            await in_thread(broken.create, row["prompt"])
        assert not loop_threads()

        factory = TurngateSessions(config(g.root, tmp_path))
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="interrupted"):
            patched.setattr(GatewayClient, "check", _interrupt)
            await in_thread(factory.create, row["prompt"])
        assert not loop_threads()
        session = await in_thread(factory.create, row["prompt"])  # the next one starts
        await in_thread(session.close)
        assert not loop_threads()


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "turngate-sessions"]


async def _interrupt(gateway: GatewayClient) -> None:
    raise RuntimeError("interrupted")


async def test_infrastructure_fault_raises_and_has_no_trace(key: Any, tmp_path: Path) -> None:
    async with gateway(MEND) as g:
        key(g.app.admin_key)
        factory = TurngateSessions(config(g.root, tmp_path))
        factory._backend = _Broken()  # type: ignore[assignment]
        session = await in_thread(factory.create, prompts(factory.config)[0]["prompt"])
        with pytest.raises(TurngateError, match="infrastructure fault: no sandbox today"):
            await in_thread(session.wait_for_completion)
        assert (await in_thread(session.fetch_training_trace)).turns == []
        assert session.verify([]).env_reward is None
        await in_thread(session.close)


class _Broken(LocalBackend):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxUnavailable("no sandbox today")
