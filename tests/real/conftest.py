"""Run the tests with each model that vLLM serves."""

from __future__ import annotations

import pytest

from tests.vllm import Model, Servers

MODELS = [pytest.param(name, marks=pytest.mark.needs("vllm", name)) for name in ("smollm2", "tiny-qwen3")]


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, vllm: Servers) -> Model:
    return vllm.get(request.param)
