"""Tests for the local engine with a real model, SmolLM2-135M-Instruct, behind a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests import kit
from tests.engines.local_kit import rescore, torch
from tools import parts
from turngate.config import ServeConfig
from turngate.engines.local import LocalEngine, Model
from turngate.server.app import Gateway

pytestmark = [pytest.mark.needs("smollm2", "torch"), pytest.mark.full]


@pytest.fixture(scope="module")
def folder() -> Path:
    torch.set_num_threads(2)
    return parts.cache() / "models" / "smollm2-135m"


async def test_real_model_answers_and_rows_match_trainer(folder: Path) -> None:
    async with kit.gateway(engine=LocalEngine(folder, max_context=1024), tokenizer=str(folder)) as g:
        session = await g.open(max_tokens=24, sampling={"temperature": 0})
        reply = await g.ask(session.key, "What is the capital of France?", mode="async stream")
        assert "Paris" in reply.content and reply.finish == "stop"

        sessions = [await g.open(max_tokens=8) for _ in range(3)]
        questions = [f"Tell me a story about {what}." for what in ("a fox", "a fox", "rain")]
        await asyncio.gather(*(g.ask(s.key, q) for s, q in zip(sessions, questions, strict=True)))
        made = g.app.engine
        assert isinstance(made, LocalEngine)
        errors = [_errors(made.model, (await g.samples(session.id))[0]) for session in sessions]
        assert float(np.concatenate(errors).mean()) < 1e-4


def _errors(model: Model, row: kit.Json) -> np.ndarray:
    begin = int(np.argmax(row["mask"]))
    again = rescore(model, row["ids"][:begin], row["ids"][begin:])
    trained = np.array(row["mask"][begin:], bool)
    return np.abs(np.array(again)[trained] - np.array(row["logprobs"][begin:], np.float64)[trained])


async def test_gateway_builds_engine_from_config(folder: Path, tmp_path: Path) -> None:
    settings = ServeConfig(
        data=str(tmp_path), engine="local", model_folder=str(folder), engine_dtype="bfloat16", engine_slots=2
    ).check()
    app = Gateway(settings)
    await app.start()
    try:
        engine = app.engine
        assert isinstance(engine, LocalEngine) and engine.slots == 2 and engine.model.dtype == torch.bfloat16
        [health] = await engine.health()
        assert health.ok and health.max_context == 8192 and health.model == "smollm2-135m"
    finally:
        await app.stop()
