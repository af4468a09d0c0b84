"""Tests for teacher scores with real vLLM: they equal what vLLM returns for the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.real.test_vllm import TINY, Gateway, converse, gateway, model_params  # noqa: F401
from tests.speed import scaled
from turngate.trainers.export import ExportChoices, export
from turngate.trainers.export.side_data import decode_columns
from turngate.trainers.teacher import TeacherConfig

TOP_K = 5


@pytest.mark.parametrize("gateway", model_params((TINY, "completions"), tier=pytest.mark.real), indirect=True)
def test_scores_equal_a_direct_call(gateway: Gateway, tmp_path: Path) -> None:  # noqa: F811
    model = gateway.model
    session, client = gateway.open()
    converse(client, model.name, 4)
    gateway.http.post(f"/admin/sessions/{session}/seal")
    teacher = TeacherConfig(engine="vllm", url=model.url, model=model.name, top_k=TOP_K)
    done = export(gateway.data, tmp_path / "rows.jsonl", ExportChoices(format="rows", teacher=teacher))
    assert done.teacher is not None and done.teacher.calls == 1 and done.teacher.turns == 4
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    body = {"model": model.name, "prompt": row["ids"], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": TOP_K}
    reply = httpx.post(f"{model.url}/v1/completions", json=body, timeout=scaled(120)).json()
    direct = reply["choices"][0]["prompt_logprobs"]
    side = decode_columns(row["side"])
    places = [place for start, end in side["teacher_logprobs"].spans for place in range(start, end)]
    assert places == [place for place, trained in enumerate(row["mask"]) if trained]
    tops = side["teacher_top_ids"].values.tolist(), side["teacher_top_logprobs"].values
    for n, place in enumerate(places):
        own = direct[place][str(row["ids"][place])]
        assert side["teacher_logprobs"].values[n] == pytest.approx(own["logprob"], abs=2e-3)
        ranked = sorted((entry["rank"], entry["logprob"]) for entry in direct[place].values())[:TOP_K]
        assert np.abs(tops[1][n] - np.array([logprob for _, logprob in ranked])).max() < 2e-3
        assert {str(token) for token in tops[0][n]} <= set(direct[place])
    # The model that sampled the tokens is its own teacher here.
    recorded = np.array([row["logprobs"][place] for place in places])
    assert np.abs(side["teacher_logprobs"].values - recorded).max() < 2e-3
