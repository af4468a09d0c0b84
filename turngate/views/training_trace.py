"""A trace in OpenEnv's format: `TrainingTrace`, version 1, as `openenv.core.harness.training` defines it. TRL reads it, too.

    TrainingTrace.model_validate(training_trace(await gateway.trace(session)))

This module builds plain data and does not import `openenv`. Its own strict model checks the result in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngate.client.protocol import DecodedTrace
from turngate.errors import Conflict
from turngate.types import Json
from turngate.views.trace import TraceView, TurnView, parse_trace

SCHEMA_VERSION = 1


def training_trace(trace: DecodedTrace | Mapping[str, Any]) -> dict[str, Json]:
    """Build the fields of a `TrainingTrace` from the reply to `GET /admin/sessions/{id}/trace` (or of `GatewayClient.trace`).

    It has every model call once, in the order of recording. A call that may not be trained has no 1 in its `loss_mask`, and
    `metadata.untrained` says why. Where log-probabilities are missing, `completion_token_ids` is empty (the format has no token
    without one) and the sampled ids are in `metadata.sampled_token_ids`. A trace without ids raises `Conflict`.
    """
    return {"schema_version": SCHEMA_VERSION, "turns": training_turns(parse_trace(trace))}


def training_turns(trace: TraceView) -> list[dict[str, Json]]:
    """Return every model call as OpenEnv's `TrainingTurn`. A turn that may not be trained has a mask of zeros and states the reason."""
    return [_training_turn(trace, turn) for turn in trace.turns]


def _training_turn(trace: TraceView, turn: TurnView) -> dict[str, Json]:
    prompt = trace.prompt(turn)
    if not prompt:
        raise Conflict(
            f"turn {turn.id} was {turn.untrained or 'captured without ids'}: without the ids of its prompt it cannot be trained"
        )
    # The format requires log-probabilities for sampled tokens. Without them, the ids are in the metadata instead.
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
        "per_token_logps": turn.logprobs or [],
        "loss_mask": [0] * len(prompt) + [trained] * len(completion),
        "request": {"messages": trace.messages(turn), "tools": trace.tools(turn) or None},
        "response": {"choices": [{"message": turn.message, "finish_reason": turn.finish}]},
        "metadata": metadata,
    }
