"""Actions, observations and states: pydantic models that OpenEnv's server publishes at `/schema`.

A tool's result is a struct of `service/result.py` as JSON; the client converts it back.
"""

from __future__ import annotations

from typing import Any, Literal, Optional

from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from pydantic import Field

Name = Literal[
    "run_rollout",
    "run_swe_rollout",
    "start_rollout",
    "get_state",
    "get_messages",
    "subscribe_events",
    "abort_rollout",
    "finalize_rollout",
    "list_rollouts",
    "list_endpoints",
]


class TurngateAction(CallToolAction):
    """One call of a tool. OpenEnv's `CallToolAction` works too; this one lists the tool names."""

    tool_name: Name = Field(description="Name of the tool to call")


class TurngateObservation(CallToolObservation):
    """A tool's `result` or `error`. `metadata` names the argument that an error is about.

    If the call returned the result of a rollout that has ended, `done` and `reward` are the rollout's. An unknown reward is None.
    """

    rollout_id: str = Field(default="", description="The rollout's id; empty: the call was not about one rollout")
    status: str = Field(
        default="",
        description="The rollout's status: queued, running, finished, failed, timed out, limit, cancelled, error",
    )


class ReadyObservation(Observation):
    """The answer of `reset`: the endpoints that `model_key` may name."""

    endpoints: list[dict[str, Any]] = Field(default_factory=list, description="The server's catalog")


class TurngateState(State):
    """What this session has done since `reset`. The rollouts themselves belong to the server."""

    rollouts: list[str] = Field(
        default_factory=list, description="The ids of the rollouts that it started, oldest first"
    )
    last_rollout: str = Field(default="", description="The rollout of the last call")
    last_status: str = Field(default="", description="Its status at that call; empty: it had just started")
    last_reward: Optional[float] = Field(default=None, description="Its reward; null: unknown, which is not 0")
