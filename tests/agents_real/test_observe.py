"""Tests for observing real agents in front of native and foreign endpoints, which are as strict as the real ones
(`tests/engines/providers.py`). Every agent must work unchanged, with all calls in one conversation."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.agents_real import kit
from tests.engines.providers import (
    KEY,
    AnthropicProvider,
    ChatProvider,
    GeminiProvider,
    ModelTurn,
    Provider,
    ResponsesProvider,
)
from tests.engines.standins import serving
from tests.kit import Running, gateway
from tests.speed import scaled
from turngate.agents.launch import plan_launch, resolve_signals
from turngate.agents.spec import AgentSpec

pytestmark = pytest.mark.full


class VLLM(ChatProvider):
    """A chat endpoint that returns token ids of a template that renders the whole conversation."""

    def __init__(self, *turns: ModelTurn) -> None:
        super().__init__(*turns, returns_ids=True)


PAIRS: list[tuple[str, type[Provider]]] = [
    ("claude-code", AnthropicProvider),
    ("claude-code", VLLM),
    ("codex", ResponsesProvider),
    ("codex", AnthropicProvider),
    ("codex", VLLM),
    ("gemini-cli", GeminiProvider),
    ("gemini-cli", ResponsesProvider),
    ("gemini-cli", VLLM),
    ("pi", VLLM),
    ("pi", GeminiProvider),
]


# `make test-all` runs each agent on its own API, and two of them on another.
ONLY = {PAIRS[0], PAIRS[2], PAIRS[3], PAIRS[5], PAIRS[8]}


def pairs() -> Iterator[Any]:
    for pair in PAIRS:
        marks = [pytest.mark.needs(f"agent:{pair[0]}"), *([] if pair in ONLY else [pytest.mark.repeat])]
        yield pytest.param(*pair, marks=marks)


def script(spec: AgentSpec, workdir: Path) -> list[ModelTurn]:
    """The model's script from `turngate agents check`: read, edit, look, write and finish."""

    def fill(arguments: dict[str, Any]) -> Any:
        return {k: v.replace("{workdir}", str(workdir)) if isinstance(v, str) else v for k, v in arguments.items()}

    return [
        ModelTurn(step.say, step.think, [(call.tool, fill(call.arguments)) for call in step.calls])
        for step in spec.check
    ]


async def run(name: str, g: Running, key: str, home: Path) -> None:
    """Run the agent without a sandbox, in its own folder."""
    spec, installed = kit.agent(name)
    workdir = home / "work"
    launch = plan_launch(
        spec,
        installed,
        base_url=g.root,
        api_key=key,
        model="m",
        prompt="Change colour to color in notes.txt.",
        home=str(home),
        workdir=str(workdir),
    )
    for file in launch.files:
        path = home / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    env = {"HOME": str(home), "PATH": f"{Path(installed.node).parent}:/usr/bin:/bin", **launch.env}
    process = await asyncio.create_subprocess_exec(
        *launch.command, cwd=workdir, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), scaled(120))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-2000:]


@pytest.mark.parametrize(
    ("name", "endpoint"),
    list(pairs()),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_agent_is_fully_observed(name: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    spec, _ = kit.agent(name)
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        home = Path(folder)
        (home / "work").mkdir()
        (home / "work" / "notes.txt").write_text("alpha\ncolour\nomega\n")
        steps = script(spec, home / "work")
        async with (
            serving(endpoint(*steps)) as provider,
            gateway(observe=endpoint.name, engine_url=[provider.url], engine_key_env="PROVIDER_KEY") as g,
        ):
            signals = msgspec.to_builtins(resolve_signals(spec.signals, "m"))
            session = await g.open(mode="observe", model="m", signals=signals, sampling={"temperature": 1.0})
            await run(name, g, session.key, home)
            assert (home / "work" / "done.txt").exists() and provider.refusals == []
            turns = await g.turns(session.id)
            assert [turn["message"].get("content", "") for turn in turns] == [one.text for one in steps]
            assert {(turn["role"], turn["cause"], turn["fault"]) for turn in turns} == {("main", None, "")}
            rows = await g.samples(session.id)
            spans = [[span["trained"] for span in row["spans"]] for row in rows]
            assert spans == ([[True] * len(steps)] if endpoint is VLLM else [])
