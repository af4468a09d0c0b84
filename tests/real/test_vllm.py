"""Tests of exactness with real vLLM: a random tiny Qwen3, whose ids never re-tokenize to themselves, and SmolLM2-135M.

The gateway is a separate process that has vLLM echo the prompt ids (`--echo-prompt`) and fails the call on a mismatch. The tests
then have vLLM score the recorded ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.ports import free_port
from tests.speed import scaled
from tests.vllm import Model, Servers
from turngate.engines.base import Chunk, Generate
from turngate.engines.vllm import VLLM
from turngate.render import Tokenizer
from turngate.types import Constraint, ReasoningTokens, Sampling

ADMIN = "real-admin-key-0123456789"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


class Gateway:
    """A gateway in front of a model, with its data folder."""

    def __init__(self, url: str, model: Model, data: Path) -> None:
        self.url, self.model, self.data = url, model, data
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=scaled(120))
        self.clients: list[openai.OpenAI] = []

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.http.close()

    def open(self, **config: Any) -> tuple[str, openai.OpenAI]:
        session = self.http.post("/admin/sessions", json=config).json()
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=session["api_key"], max_retries=0, timeout=scaled(120)
        )
        self.clients.append(client)
        return session["id"], client

    def trace(self, session: str) -> list[dict[str, Any]]:
        return self.http.get(f"/admin/sessions/{session}/trace").json()["nodes"]

    def samples(self, session: str) -> list[dict[str, Any]]:
        return self.http.get(f"/admin/sessions/{session}/samples").json()["samples"]


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest, vllm: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway shared by all tests with the same model and vLLM API; they only open sessions."""
    name, api = request.param
    with started(vllm.get(name), api, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


def model_params(*pairs: tuple[str, str], tier: pytest.MarkDecorator = pytest.mark.full) -> list[Any]:
    """Pairs of model and API for `parametrize`, with their marks."""
    return [pytest.param(pair, marks=[pytest.mark.needs("vllm", pair[0]), tier], id="-".join(pair)) for pair in pairs]


# The tiny model is harder, as its ids do not re-tokenize to themselves, and cheaper: `make test-all` serves no other with vLLM.
TINY, SMOLLM2 = "tiny-qwen3", "smollm2"
MAX_TOKENS = {TINY: 24, SMOLLM2: 8}  # per turn; one token of SmolLM2 takes a fifth of a second of CPU time
EVERY = [
    *model_params((TINY, "completions"), (TINY, "generate"), tier=pytest.mark.real),
    *model_params((SMOLLM2, "completions"), (SMOLLM2, "generate"), tier=pytest.mark.repeat),
]
PAIRS = [*model_params((TINY, "generate")), *model_params((SMOLLM2, "completions"), tier=pytest.mark.repeat)]
COMPLETIONS = [
    *model_params((TINY, "completions")),
    *model_params((SMOLLM2, "completions"), tier=pytest.mark.repeat),
]


@contextmanager
def started(model: Model, api: str, data: Path) -> Iterator[Gateway]:
    port = free_port()
    argv = [sys.executable, "-m", "turngate", "serve", "--port", str(port), "--data", str(data), "--engine", "vllm"]
    argv += [
        "--engine-url",
        model.url,
        "--engine-api",
        api,
        "--model",
        model.name,
        "--tokenizer",
        str(model.folder),
        "--echo-prompt",
    ]
    process = subprocess.Popen(argv, env={**os.environ, "TURNGATE_ADMIN_KEY": ADMIN})
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + scaled(30)
        while True:
            try:
                httpx.get(f"{url}/health", timeout=scaled(5))
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the gateway exited"
                assert time.monotonic() < end, "the gateway does not answer"
                time.sleep(0.1)
        gateway = Gateway(url, model, data)
        yield gateway
        gateway.close()
    finally:
        process.terminate()
        process.wait(scaled(20))


def converse(client: openai.OpenAI, model: str, turns: int) -> list[Any]:
    messages: list[Any] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "List the files. Größe 👍🏽"},
    ]
    for n in range(turns):
        request = {
            "model": model,
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": MAX_TOKENS[model],
            "temperature": 1.0,
            "seed": n,
        }
        if n % 2:
            answer: dict[str, Any] = {"role": "assistant", "content": ""}
            for chunk in client.chat.completions.create(**request, stream=True):
                for choice in chunk.choices:
                    answer["content"] += choice.delta.content or ""
                    for call in choice.delta.tool_calls or []:
                        answer.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
        else:
            answer = client.chat.completions.create(**request).choices[0].message.model_dump(exclude_none=True)
        messages.append(answer)
        for call in answer.get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"main.py\nü{n}.py"})
        if not answer.get("tool_calls"):
            messages.append({"role": "user", "content": f"And then? {n}"})
    return messages


@pytest.mark.promise(1)
@pytest.mark.parametrize("gateway", EVERY, indirect=True)
def test_prompts_match_vllm_and_rollout_is_one_row(gateway: Gateway) -> None:
    session, client = gateway.open()
    converse(client, gateway.model.name, 8)
    (row,) = gateway.samples(session)
    assert len(row["spans"]) == 8
    assert all(span["trained"] for span in row["spans"]), row["spans"]
    assert sum(row["mask"]) == sum(s["end"] - s["start"] for s in row["spans"])
    assert all((p is not None) == bool(m) for p, m in zip(row["logprobs"], row["mask"], strict=True))


@pytest.mark.promise(1)
@pytest.mark.parametrize("gateway", EVERY, indirect=True)
def test_vllm_reproduces_recorded_logprobs(gateway: Gateway) -> None:
    session, client = gateway.open()
    converse(client, gateway.model.name, 4)
    (row,) = gateway.samples(session)
    body = {
        "model": gateway.model.name,
        "prompt": row["ids"],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }
    scored = httpx.post(f"{gateway.model.url}/v1/completions", json=body, timeout=scaled(120)).json()["choices"][0][
        "prompt_logprobs"
    ]
    again = [entry[str(token)]["logprob"] if entry else None for token, entry in zip(row["ids"], scored, strict=True)]
    differences = [abs(a - b) for a, b, m in zip(again, row["logprobs"], row["mask"], strict=True) if m]
    assert max(differences) < 2e-3, max(differences)


@pytest.mark.parametrize("gateway", PAIRS, indirect=True)
def test_forced_tool_call_is_marked_as_biased(gateway: Gateway) -> None:
    session, client = gateway.open()
    schema = {
        "type": "object",
        "properties": {"path": {"enum": ["a", "b"]}},
        "required": ["path"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "read", "parameters": schema}}]
    choice: Any = {"type": "function", "function": {"name": "read"}}
    reply = client.chat.completions.create(
        model=gateway.model.name,
        messages=[{"role": "user", "content": "x"}],
        tools=tools,
        tool_choice=choice,
        max_tokens=200,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["path"] in ("a", "b")
    (turn,) = [n for n in gateway.trace(session) if n["kind"] == "sampled"]
    may_reason = gateway.model.name == TINY  # its vocabulary has tokens for reasoning
    assert turn["biases"] == ["constrained: tool after reasoning" if may_reason else "constrained: tool"]
    assert gateway.samples(session) == []


@pytest.mark.parametrize("gateway", PAIRS, indirect=True)
def test_alternatives_are_shown_if_the_session_allows_it(gateway: Gateway) -> None:
    session, client = gateway.open(show_logprobs=True)
    reply = client.chat.completions.create(
        model=gateway.model.name,
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=3,
        max_tokens=8,
    )
    scores = (reply.choices[0].logprobs and reply.choices[0].logprobs.content) or []
    (turn,) = [n for n in gateway.trace(session) if n["kind"] == "sampled"]
    assert [score.logprob for score in scores] == pytest.approx(turn["logprobs"])
    for score in scores:
        values = [top.logprob for top in score.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and score.logprob <= values[0] + 1e-6


async def generate_all(engine: VLLM, request: Generate) -> list[Chunk]:
    async with engine.generate(request) as chunks:
        return [chunk async for chunk in chunks]


@pytest.mark.parametrize("gateway", COMPLETIONS, indirect=True)
async def test_constraint_begins_after_the_reasoning(gateway: Gateway) -> None:
    """No small model reasons: a token that it samples anyway stands in for the one that closes reasoning."""
    tokenizer = Tokenizer(gateway.model.folder)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    request = Generate(
        prompt=tokenizer.ids("The capital of France is Paris. The capital of Spain is"),
        max_tokens=200,
        sampling=Sampling(temperature=0.5, seed=1),
        echo_prompt=True,
    )
    engine = VLLM(gateway.model.url, gateway.model.name)
    await engine.start()
    try:
        free = await generate_all(engine, msgspec.structs.replace(request, max_tokens=8))
        [*_, closing] = dict.fromkeys(token for chunk in free for token in chunk.ids)  # the last one that is new
        late = msgspec.structs.replace(
            request,
            constraint=Constraint("json_schema", schema, after_reasoning=True),
            reasoning=ReasoningTokens(opening=closing, closing=closing, is_open=True),
        )
        seen = await generate_all(engine, late)
    finally:
        await engine.close()
    ids = [token for chunk in seen for token in chunk.ids]
    end = ids.index(closing) + 1
    assert end > 1 and json.loads(tokenizer.decode(ids[end:], skip_special_tokens=True))["n"] in (1, 2)
    assert seen[-1].finish == "stop" and sum(len(chunk.logprobs or ()) for chunk in seen) == len(ids)


@pytest.mark.parametrize("gateway", PAIRS, indirect=True)
def test_context_overflow_is_context_length_exceeded(gateway: Gateway) -> None:
    _, client = gateway.open()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=gateway.model.name, messages=[{"role": "user", "content": "word " * (gateway.model.max_context + 50)}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length" in str(caught.value)


@pytest.mark.parametrize("gateway", PAIRS, indirect=True)
def test_disconnect_aborts_generation(gateway: Gateway) -> None:
    session, client = gateway.open(sampling={"min_tokens": 1500})
    stream = client.chat.completions.create(
        model=gateway.model.name, messages=[{"role": "user", "content": "x"}], max_tokens=1500, stream=True
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + scaled(20)
    while time.monotonic() < end:
        running = [
            line
            for line in httpx.get(f"{gateway.model.url}/metrics", timeout=scaled(5)).text.splitlines()
            if line.startswith("vllm:num_requests_running{")
        ]
        if running and float(running[0].rsplit(" ", 1)[1]) == 0:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("vLLM is still generating")
    (turn,) = [n for n in gateway.trace(session) if n["kind"] == "sampled"]
    assert turn["role"] == "aborted"
    assert len(turn["ids"]) < 1500
