"""Tests for weight updates of a running vLLM: versioned adapters, a full model swap during a call, and rejected updates.

The tests restore the server's initial weights."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.real.test_vllm import Gateway, started
from tests.speed import scaled
from tests.vllm import Model, Servers

pytestmark = pytest.mark.full
QUESTION: list[Any] = [{"role": "user", "content": "Tell me a story about a river."}]


@pytest.fixture
def model(request: pytest.FixtureRequest, vllm: Servers) -> Model:
    return vllm.get(request.param)


def served_by(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test with these models. Only `make soak` runs it with other models than the first."""
    params = []
    for name in names:
        marks = [pytest.mark.needs("vllm", name), *([] if name == names[0] else [pytest.mark.repeat])]
        params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("model", params, indirect=True)


@pytest.fixture
def gateway(model: Model, tmp_path: Path) -> Iterator[Gateway]:
    with started(model, "completions", tmp_path) as gateway:
        yield gateway


def adapter(folder: Path, model: Path, seed: int) -> str:
    """Save a random adapter in PEFT's format, large enough to change the output."""
    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_key_value_heads"] * shape["head_dim"]
    rng, rank = np.random.default_rng(seed), 4
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for part, size in (("q_proj", hidden), ("v_proj", heads)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = rng.normal(0, hidden**-0.5, (rank, hidden)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.3, (size, rank)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "v_proj"]}))
    return str(folder)


def other_model(folder: Path, model: Path) -> str:
    """Save a copy of the model with one negated layer, so that its output differs."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        save_file(
            {n: -t if n.endswith("layers.1.mlp.down_proj.weight") else t for n, t in tensors.items()},
            folder / file.name,
        )
    return str(folder)


def sample_greedy(gateway: Gateway, model: Model, tokens: int = 12) -> tuple[list[int], tuple[int, int]]:
    """Sample a greedy answer in a new session; return its ids and recorded versions."""
    session, client = gateway.open()
    client.chat.completions.create(model=model.name, messages=QUESTION, max_tokens=tokens, temperature=0)
    [turn] = [node for node in gateway.trace(session) if node["kind"] == "sampled"]
    return turn["ids"], (turn["version_start"], turn["version_end"])


def load_weights(gateway: Gateway, **wanted: Any) -> Any:
    response = gateway.http.post("/admin/weights", json=wanted)
    assert response.is_success, response.text
    return response.json()


@served_by("tiny-qwen3")
def test_adapters_are_served_and_recorded_by_version(model: Model, gateway: Gateway, tmp_path: Path) -> None:
    base, versions = sample_greedy(gateway, model)
    assert versions == (0, 0)
    seen = [base]
    for version in (1, 2):
        load_weights(
            gateway,
            version=version,
            lora_path=adapter(tmp_path / f"a{version}", model.folder, version),
            name="trl-policy-v{version}",
        )
        ids, versions = sample_greedy(gateway, model)
        assert versions == (version, version) and ids not in seen
        seen.append(ids)
    # vLLM samples the same tokens under the adapter names.
    for name, ids in (("trl-policy-v1", seen[1]), ("trl-policy-v2", seen[2])):
        assert _greedy(model, name, gateway, len(ids)) == ids
    rejected = gateway.http.post("/admin/weights", json={"version": 3, "lora_path": str(tmp_path / "none")})
    assert rejected.status_code == 502 and "version 2 remains active" in rejected.text
    assert sample_greedy(gateway, model) == (seen[2], (2, 2))


def _greedy(model: Model, name: str, gateway: Gateway, tokens: int) -> list[int]:
    session = gateway.http.get("/admin/sessions?limit=1").json()["sessions"][0]["id"]
    prompt = next(node["ids"] for node in gateway.trace(session) if node["kind"] == "context")
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    reply = httpx.post(f"{model.url}/v1/completions", json=body, timeout=scaled(60)).json()
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


LONG = {"smollm2": 28, "tiny-qwen3": 200}  # tokens of a call that is still running when it is paused


@served_by("tiny-qwen3", "smollm2")
def test_call_in_flight_survives_pause_and_new_weights(model: Model, gateway: Gateway, tmp_path: Path) -> None:
    tokens = LONG[model.name]
    before, _ = sample_greedy(gateway, model, tokens)
    session, client = gateway.open(sampling={"min_tokens": tokens})
    arrivals: list[float] = []

    def read_stream() -> None:
        request: Any = {"model": model.name, "messages": QUESTION, "max_tokens": tokens, "temperature": 0}
        for _ in client.chat.completions.create(**request, stream=True):
            arrivals.append(time.monotonic())

    reader = threading.Thread(target=read_stream)
    reader.start()
    _until(lambda: len(arrivals) > 5)
    assert (
        gateway.http.post("/admin/fence/pause", json={"mode": "keep", "limit_s": scaled(60)}).json()["in_flight"] == 1
    )
    assert httpx.get(f"{model.url}/is_paused", timeout=scaled(5)).json() == {"is_paused": True}
    paused = -1
    while paused < len(arrivals):  # wait until no more chunks arrive
        paused = len(arrivals)
        time.sleep(0.7)
    assert reader.is_alive()  # paused, not aborted
    load_weights(gateway, version=1, path=other_model(tmp_path / "m1", model.folder), mode="keep")
    reader.join(scaled(60))
    assert not reader.is_alive()
    [turn] = [node for node in gateway.trace(session) if node["kind"] == "sampled"]
    assert (turn["version_start"], turn["version_end"]) == (0, 1)
    assert len(turn["ids"]) == len(before) == tokens and turn["finish"] == "length"
    same = next((n for n in range(tokens) if turn["ids"][n] != before[n]), tokens)
    assert 5 <= same < tokens, "the call should start with the old weights and end with the new ones"
    after, versions = sample_greedy(gateway, model, 28)
    assert versions == (1, 1) and after[:5] != before[:5]
    assert httpx.get(f"{model.url}/weight_info", timeout=scaled(5)).json() == {"weight_version": "1"}
    restored = load_weights(gateway, version=2, path=str(model.folder))
    assert restored["replicas"][0]["has"] == 2
    assert sample_greedy(gateway, model, 28) == (before[:28], (2, 2))


def _until(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
