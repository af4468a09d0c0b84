"""The promises, against real vLLM: a random tiny Qwen3, whose ids never re-tokenise to themselves, and SmolLM2-135M.

The gateway is a real process that asks vLLM for the prompt ids it saw (`--echo-prompt`) and fails the call if one differs; the
test then asks vLLM itself, from the recorded ids alone, for their log-probabilities.
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
import openai
import pytest

from tests.real.conftest import Model, free_port

pytestmark = pytest.mark.real
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
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=120)
        self.clients: list[openai.OpenAI] = []

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.http.close()

    def open(self, **config: Any) -> tuple[str, openai.OpenAI]:
        session = self.http.post("/admin/sessions", json=config).json()
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=session["api_key"], max_retries=0, timeout=120)
        self.clients.append(client)
        return session["id"], client

    def trace(self, session: str) -> list[dict[str, Any]]:
        return self.http.get(f"/admin/sessions/{session}/trace").json()["nodes"]

    def samples(self, session: str) -> list[dict[str, Any]]:
        return self.http.get(f"/admin/sessions/{session}/samples").json()["samples"]


@pytest.fixture(params=["completions", "generate"])
def gateway(request: pytest.FixtureRequest, model: Model, tmp_path: Path) -> Iterator[Gateway]:
    with started(model, request.param, tmp_path) as gateway:
        yield gateway


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
        for _ in range(300):
            try:
                httpx.get(f"{url}/health", timeout=5)
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the gateway ended"
                time.sleep(0.1)
        gateway = Gateway(url)
        yield gateway
        gateway.close()
    finally:
        process.terminate()
        process.wait(20)


def converse(client: openai.OpenAI, model: str, turns: int, max_tokens: int = 24) -> list[Any]:
    messages: list[Any] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "List the files. Größe 👍🏽"},
    ]
    for n in range(turns):
        asked = {
            "model": model,
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": n,
        }
        if n % 2:
            answer: dict[str, Any] = {"role": "assistant", "content": ""}
            for chunk in client.chat.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    answer["content"] += choice.delta.content or ""
                    for call in choice.delta.tool_calls or []:
                        answer.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
        else:
            answer = client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
        messages.append(answer)
        for call in answer.get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"main.py\nü{n}.py"})
        if not answer.get("tool_calls"):
            messages.append({"role": "user", "content": f"And then? {n}"})
    return messages


def test_every_prompt_is_the_one_vllm_saw_and_the_rollout_is_one_row(model: Model, gateway: Gateway) -> None:
    session, client = gateway.open()
    converse(client, model.name, 8)
    (row,) = gateway.samples(session)
    assert len(row["spans"]) == 8
    assert all(span["trained"] for span in row["spans"]), row["spans"]
    assert sum(row["mask"]) == sum(s["end"] - s["start"] for s in row["spans"])
    assert all((p is not None) == bool(m) for p, m in zip(row["logprobs"], row["mask"], strict=True))


def test_vllm_gives_the_recorded_log_probabilities_again(model: Model, gateway: Gateway) -> None:
    session, client = gateway.open()
    converse(client, model.name, 4)
    (row,) = gateway.samples(session)
    body = {"model": model.name, "prompt": row["ids"], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    scored = httpx.post(f"{model.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["prompt_logprobs"]
    again = [entry[str(token)]["logprob"] if entry else None for token, entry in zip(row["ids"], scored, strict=True)]
    differences = [abs(a - b) for a, b, m in zip(again, row["logprobs"], row["mask"], strict=True) if m]
    assert max(differences) < 2e-3, max(differences)


def test_a_forced_tool_is_called_and_marked(model: Model, gateway: Gateway) -> None:
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
        model=model.name, messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice, max_tokens=200
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["path"] in ("a", "b")
    (turn,) = [n for n in gateway.trace(session) if n["kind"] == "sampled"]
    assert turn["biases"] == ["constrained: tool"]
    assert gateway.samples(session) == []


def test_context_overflow_reads_as_one(model: Model, gateway: Gateway) -> None:
    _, client = gateway.open()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "word " * (model.max_context + 50)}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length" in str(caught.value)


def test_hanging_up_aborts_the_generation(model: Model, gateway: Gateway) -> None:
    session, client = gateway.open(sampling={"min_tokens": 1500})
    stream = client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "x"}], max_tokens=1500, stream=True
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        running = [
            line
            for line in httpx.get(f"{model.url}/metrics").text.splitlines()
            if line.startswith("vllm:num_requests_running{")
        ]
        if running and float(running[0].rsplit(" ", 1)[1]) == 0:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("vLLM still generates")
    (turn,) = [n for n in gateway.trace(session) if n["kind"] == "sampled"]
    assert turn["role"] == "aborted"
    assert len(turn["ids"]) < 1500
