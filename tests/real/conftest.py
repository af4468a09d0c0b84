"""Run the tests with each model that vLLM serves: one in `make test-all`, and the other in `make soak`."""

from __future__ import annotations

import pytest

from tests.vllm import Model, Servers

MODELS = [
    pytest.param("smollm2", marks=[pytest.mark.needs("vllm", "smollm2"), pytest.mark.repeat]),
    pytest.param("tiny-qwen3", marks=pytest.mark.needs("vllm", "tiny-qwen3")),
]


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, vllm: Servers) -> Model:
    return vllm.get(request.param)
