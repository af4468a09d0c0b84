"""Tests with real agents on real vLLM: small models solve nothing, but every token is captured exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.agents_real import kit
from tests.speed import scaled
from tests.vllm import Model, Servers
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import TraceNode, TraceTurn
from turngate.config import ServeConfig
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend
from turngate.server.run import run_embedded
from turngate.tasks.task import Task
from turngate.types import Json

pytestmark = pytest.mark.full
MODELS = {"pi": "smollm2", "mini-swe-agent": "tiny-qwen3"}  # the second is for long prompts: vLLM echoes all of them
TURNS = {"pi": 2, "mini-swe-agent": 2}  # session limits; both agents would continue
TEMPERATURES = {"pi": 0.2, "mini-swe-agent": 1.0}  # higher values keep the first model from ending its answers
QUESTION = "What is the capital of France?"


def with_messages(spec: AgentSpec) -> AgentSpec:
    """Give Pi several messages as arguments, since the model calls no tools."""
    questions = (QUESTION, "And of Italy?", "And of Spain? Größe 👍🏽", "And of Japan?")
    return msgspec.structs.replace(spec, command=(*spec.command, *questions), stdin="")


async def rollout(model: Model, agent: str, backend: Backend, folder: Path) -> tuple[Outcome, Json, list[Json]]:
    """Run one rollout; the gateway has vLLM echo every prompt and fails the call on a mismatch."""
    spec, installed = kit.agent(agent)
    config = ServeConfig(
        data=str(folder / "data"),
        port=0,
        engine="vllm",
        engine_url=[model.url],
        model=model.name,
        tokenizer=str(model.folder),
        echo_prompt=True,
    )
    rollout_spec = RolloutSpec(
        task=Task(id="vllm", instruction=QUESTION),
        agent=with_messages(spec) if agent == "pi" else spec,
        installed=installed,
        backend=backend,
        model=model.name,
        timeout_s=scaled(120),
        session={"limits": {"turns": TURNS[agent]}, "max_tokens": 48, "sampling": {"temperature": TEMPERATURES[agent]}},
        model_limits=ModelLimits(context_tokens=model.max_context, max_output_tokens=1024),
        folder=folder / "rollouts",
    )
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(run_embedded(config))
        gateway = await stack.enter_async_context(GatewayClient(address.url, address.admin_key))
        connector = await stack.enter_async_context(GatewayConnector(address.url))
        outcome = await Rollout(rollout_spec, gateway, connector).run()
        return outcome, await gateway.trace(outcome.session), await gateway.samples(outcome.session, everything=True)


def pairs() -> list[Any]:
    """Return each agent with its model. Those on the model that only `make soak` serves with vLLM run there."""
    found = []
    for agent, model in MODELS.items():
        marks = [pytest.mark.needs("vllm", model, f"agent:{agent}")]
        found.append(pytest.param(agent, model, marks=marks + [pytest.mark.repeat] * (model == "smollm2"), id=agent))
    return found


@pytest.fixture
def model(vllm: Servers, request: pytest.FixtureRequest) -> Model:
    """A model whose server runs before the test looks for what rollouts leave behind."""
    return vllm.get(request.param)


@pytest.mark.parametrize(("agent", "model"), pairs(), indirect=["model"])
async def test_captured_tokens_match_vllm(
    model: Model, agent: str, backend: Callable[[str], Backend], tmp_path: Path
) -> None:
    outcome, trace, samples = await rollout(model, agent, backend("local"), tmp_path)
    count = TURNS[agent]
    assert (outcome.status, outcome.stop) == ("limit", "turns"), outcome
    assert outcome.roles == {"main": count} and outcome.calls is not None and outcome.calls > count
    assert not outcome.collected.differences and not outcome.notes
    nodes = {node.id: node for node in trace.nodes}
    *before, _ = (node for node in nodes.values() if isinstance(node, TraceTurn))
    # Pi drops truncated answers and mini-swe-agent those without a tool call, which starts a new row.
    dropped = [turn for turn in before if agent == "mini-swe-agent" or turn.finish == "length"]
    assert len(samples) == 1 + len(dropped) and sum(len(row.spans) for row in samples) == count
    for row in samples:
        for span in row.spans:
            turn = nodes[span.node]
            assert isinstance(turn, TraceTurn) and turn.capture == "tokens" and span.trained, span
            assert row.ids[: span.start] == prompt(nodes, turn)
            assert row.ids[span.start : span.end] == turn.ids.tolist()
        assert all((p is not None and p <= 0) == bool(m) for p, m in zip(row.logprobs, row.mask, strict=True))
        sampled = [n for n, is_sampled in enumerate(row.mask) if is_sampled]
        for at, again in score_tokens(model, row.ids, sampled, TEMPERATURES[agent]).items():
            assert abs(again - row.logprobs[at]) < 2e-3, "vLLM scores the token differently"
    assert sum(sum(row.mask) for row in samples) == outcome.sampled_tokens > count


def prompt(nodes: dict[int, TraceNode], turn: TraceTurn) -> list[int]:
    """The recorded ids before a turn."""
    ids: list[int] = []
    parent: int | None = turn.parent
    while parent is not None:
        ids = nodes[parent].ids.tolist() + ids
        parent = nodes[parent].parent
    return ids


def score_tokens(model: Model, ids: list[int], places: list[int], temperature: float) -> dict[int, float]:
    """Ask vLLM for the log-probabilities of the ids at these places: at temperature 1 of all of them, otherwise of every tenth."""
    body = {"model": model.name, "max_tokens": 1, "temperature": temperature, "return_tokens_as_token_ids": True}

    def ask(**fields: Any) -> Json:
        reply = httpx.post(f"{model.url}/v1/completions", json=body | fields, timeout=scaled(60))
        return reply.json()["choices"][0]

    if temperature == 1.0:
        scores = ask(prompt=ids, prompt_logprobs=0)["prompt_logprobs"]
        return {at: float(scores[at][str(ids[at])]["logprob"]) for at in places}
    few = places[::10]  # the temperature applies to one token per call
    scores = {at: ask(prompt=ids[:at], logprobs=20)["logprobs"]["top_logprobs"][0] for at in few}
    return {at: float(scores[at][f"token_id:{ids[at]}"]) for at in few}
