"""Tests for `verify` with real vLLM: recorded log-probabilities and ids are reproduced."""

from __future__ import annotations

import numpy as np
import pytest

from tests.real.test_vllm import PAIRS, Gateway, converse, gateway  # noqa: F401
from tests.verify.kit import tampering, wrong
from turngate.verify import SessionReader, VerifyOptions, VLLMScorer, verify
from turngate.views.session import open_row_source


@pytest.mark.parametrize("gateway", PAIRS, indirect=True)
def test_vllm_confirms_recorded_logprobs(gateway: Gateway) -> None:  # noqa: F811
    model, data = gateway.model, gateway.data
    session, client = gateway.open()
    converse(client, model.name, 6)
    with SessionReader(data) as folder, open_row_source(data) as rows:
        options = VerifyOptions(rows=rows, scorer=VLLMScorer(model.url, model.name))
        found = verify(folder, session, options)
        assert found.ok and not found.notes, found
        assert found.replay is not None and found.replay.turns == 6 and found.replay.largest < 2e-3
        gateway.http.post(f"/admin/sessions/{session}/seal")
        with tampering(data, session) as t:
            turn = t.row(t.of_kind("sampled")[2])
            scores = np.frombuffer(turn.logprobs or b"", np.float32).copy()
            scores[1] -= 0.1
            t.node(turn.id, logprobs=scores.tobytes())
        assert wrong(verify(folder, session, options)) == {"logprobs"}
