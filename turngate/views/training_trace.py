"""Convert a trace to version 1 of OpenEnv's `TrainingTrace`, which TRL also reads.

    TrainingTrace.model_validate(training_trace(await gateway.trace(session)))

OpenEnv defines the format in `openenv.core.harness.training`. This module builds plain data and does not import `openenv`. The tests
validate the result with OpenEnv's strict model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngate.client.protocol import DecodedTrace
from turngate.errors import Conflict
from turngate.types import Json
from turngate.views.trace import TraceView, TurnView, parse_trace

SCHEMA_VERSION = 1


def training_trace(trace: DecodedTrace | Mapping[str, Any], /) -> dict[str, Json]:
    """Build the fields of a `TrainingTrace` from the reply of `GET /admin/sessions/{id}/trace` or `GatewayClient.trace`.

    The result contains every turn once, in recording order. If a turn must not be trained on, its `loss_mask` is all zeros,
    and `metadata.untrained` gives the reason. The format requires a log-probability for each token of `completion_token_ids`. If
    log-probabilities are missing, `completion_token_ids` is therefore empty, and the sampled ids are in `metadata.sampled_token_ids`. Raise
    `Conflict` if the ids of a prompt are missing.
    """
    return {"schema_version": SCHEMA_VERSION, "turns": training_turns(parse_trace(trace))}


def training_turns(trace: TraceView) -> list[dict[str, Json]]:
    """Return every turn as an OpenEnv `TrainingTurn`. A turn that must not be trained on has a mask of zeros and a reason."""
    return [_training_turn(trace, turn) for turn in trace.turns]


def _training_turn(trace: TraceView, turn: TurnView) -> dict[str, Json]:
    prompt = trace.prompt(turn)
    if not prompt:
        raise Conflict(
            f"turn {turn.id} cannot be converted, because the ids of its prompt are missing ({turn.untrained or 'captured without ids'})"
        )
    # The format requires a log-probability for each sampled token. Without them, the sampled ids go into the metadata instead.
    scored = turn.logprobs is not None
    completion = turn.ids if scored else []
    trained = int(not turn.untrained)
    context = trace.contexts[turn.parent]
    metadata: dict[str, Json] = {
        "session": trace.session,
        "role": turn.role,
        "untrained": turn.untrained,
        "version_start": turn.version_start,
        "version_end": turn.version_end,
        "sampling_params": turn.sampling or {},
        "biases": turn.biases,
        "capture": turn.capture,
        "fault": turn.fault,
        "dialect": context.dialect,
        "fork": turn.cause or context.cause,
        "parent": None if context.parent is None else str(context.parent),
        "root": str(turn.root),
        "delivered": turn.delivered,
        "started": turn.started,
        "ended": turn.ended,
        **({} if scored else {"sampled_token_ids": turn.ids}),
    }
    return {
        "node_id": str(turn.id),
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [min(value, 0.0) for value in turn.logprobs or []],  # rounding may raise a value above 0
        "loss_mask": [0] * len(prompt) + [trained] * len(completion),
        "request": {"messages": trace.messages(turn), "tools": trace.tools(turn) or None},
        "response": {"choices": [{"message": turn.message, "finish_reason": turn.finish}]},
        "metadata": metadata,
    }
