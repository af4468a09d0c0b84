"""A trace for trainers that speak OpenEnv: `TrainingTrace`, version 1, as `openenv.core.harness.training` has it (TRL reads it too).

    TrainingTrace.model_validate(training_trace(await gateway.trace(session)))

Nothing of `openenv` is imported: what is made here is plain data, and its own strict model is the judge (`tests/trainers/test_openenv.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngate.server.compat.openenv import training_turns
from turngate.types import Json
from turngate.views.trace import parse_trace

SCHEMA_VERSION = 1


def training_trace(view: Mapping[str, Any]) -> dict[str, Json]:
    """The fields of a `TrainingTrace`, from what `GET /admin/sessions/{id}/trace` (or `GatewayClient.trace`) answers.

    Every model call is in it once, in the order in which they were recorded. A call that may not be trained has no 1 in its
    `loss_mask`, and `metadata.untrained` says why. Where log-probabilities are missing, `completion_token_ids` is empty (the format
    knows no token without one) and the sampled ids are in `metadata.sampled_token_ids`. A trace without ids is refused.
    """
    return {"schema_version": SCHEMA_VERSION, "turns": training_turns(parse_trace(view))}
