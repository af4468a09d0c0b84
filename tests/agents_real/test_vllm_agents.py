"""Two real agents on real vLLM: a model of 135 million parameters, so they get nowhere, but every token is captured as vLLM saw it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.agents_real import kit
from tests.real.conftest import Model, serving
from turngate.agents.launch import Limits
from turngate.agents.spec import AgentSpec
from turngate.config import ServeConfig
from turngate.rollout.client import GatewayClient
from turngate.rollout.one import Order, Outcome, Rollout
from turngate.rollout.wayout import WayOut
from turngate.sandboxes.base import Backend
from turngate.server.run import embedded
from turngate.tasks.task import Task
from turngate.types import Json

pytestmark = pytest.mark.real
TURNS = 3


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with serving("smollm2", 8192, tmp_path_factory.mktemp("vllm") / "log") as model:
        yield model


def wordy(spec: AgentSpec) -> AgentSpec:
    """Pi takes further messages as arguments, so that there is more than one turn though the model calls no tool."""
    return msgspec.structs.replace(spec, command=(*spec.command, "Go on.", "Größer? 👍🏽", "Still more."))


async def rollout(model: Model, agent: str, backend: Backend, folder: Path) -> tuple[Outcome, Json, list[Json]]:
    """One rollout, with a gateway that has vLLM repeat every prompt and fails the call if it saw another."""
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
    order = Order(
        task=Task(id="vllm", instruction="Write the word done into the file done.txt."),
        agent=wordy(spec) if agent == "pi" else spec,
        installed=installed,
        backend=backend,
        model=model.name,
        timeout_s=120,
        session={"limits": {"turns": TURNS}, "max_tokens": 48, "sampling": {"temperature": 1.0, "seed": 7}},
        told=Limits(context_tokens=model.max_context, max_output_tokens=1024),
        folder=folder / "rollouts",
    )
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(embedded(config))
        gateway = await stack.enter_async_context(GatewayClient(address.url, address.admin_key))
        wayout = await stack.enter_async_context(WayOut(address.url))
        outcome = await Rollout(order, gateway, wayout).run()
        return outcome, await gateway.trace(outcome.session), await gateway.samples(outcome.session, everything=True)


@pytest.mark.parametrize("agent", ["pi", "mini-swe-agent"])
async def test_every_token_is_captured_as_vllm_saw_it(
    smollm2: Model, agent: str, backend: Callable[[str], Backend], tmp_path: Path
) -> None:
    outcome, trace, samples = await rollout(smollm2, agent, backend("local"), tmp_path)
    assert (outcome.status, outcome.stop) == ("limit", "turns"), outcome
    assert outcome.roles == {"main": TURNS} and outcome.calls is not None and outcome.calls > TURNS
    assert not outcome.collected.differences and not outcome.notes
    nodes = {node["id"]: node for node in trace["nodes"]}
    [row] = samples
    assert [nodes[span["node"]]["capture"] for span in row["spans"]] == ["tokens"] * TURNS
    assert all(span["trained"] for span in row["spans"]), row["spans"]
    assert [prompt(nodes, nodes[span["node"]]) for span in row["spans"]] == [
        row["ids"][: span["start"]] for span in row["spans"]
    ]
    assert all((p is not None and p <= 0) == bool(m) for p, m in zip(row["logprobs"], row["mask"], strict=True))
    assert sum(row["mask"]) == outcome.sampled_tokens > TURNS
    again = scored(smollm2, row["ids"])
    differences = [abs(a - b) for a, b, m in zip(again, row["logprobs"], row["mask"], strict=True) if m]
    assert max(differences) < 2e-3, "vLLM gives the same log-probabilities for the recorded ids"


def prompt(nodes: dict[int, Json], turn: Json) -> list[int]:
    """The recorded ids before a turn."""
    ids: list[int] = []
    at: Any = nodes[turn["parent"]]
    while at is not None:
        ids = at["ids"] + ids
        at = nodes.get(at["parent"])
    return ids


def scored(model: Model, ids: list[int]) -> list[float | None]:
    """What vLLM itself says of these ids, asked anew."""
    body = {"model": model.name, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    reply = httpx.post(f"{model.url}/v1/completions", json=body, timeout=120).json()["choices"][0]
    found = zip(ids, reply["prompt_logprobs"], strict=True)
    return [entry[str(token)]["logprob"] if entry else None for token, entry in found]
