"""The pydantic models of the environment's actions, observations and states.

A tool's result is one of the service's structs, encoded as JSON. The client converts it back to the struct.
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
    """A tool call. OpenEnv's `CallToolAction` works too, but this class also lists the names of the tools."""

    tool_name: Name = Field(description="Name of the tool to call")


class TurngateObservation(CallToolObservation):
    """A tool's `result` or `error`. If an argument caused the error, `metadata` names the argument.

    If the call returned the result of a rollout that has ended, `done` is true and `reward` is the rollout's reward (None if unknown).
    """

    rollout_id: str = Field(
        default="", description="The rollout's id, or empty if the call failed or was not about a single rollout"
    )
    status: str = Field(
        default="",
        description="The rollout's status: queued, running, finished, failed, timed out, limit, cancelled, error",
    )


class ReadyObservation(Observation):
    """The reply to `reset`: the endpoints that `model_key` may name."""

    endpoints: list[dict[str, Any]] = Field(default_factory=list, description="The endpoints in the server's catalog")


class TurngateState(State):
    """The activity of this session since `reset`. The rollouts themselves belong to the server and continue without the session."""

    rollouts: list[str] = Field(
        default_factory=list, description="The ids of the rollouts that this session started, oldest first"
    )
    last_rollout: str = Field(
        default="", description="The id of the rollout that was last started or whose status was last returned"
    )
    last_status: str = Field(
        default="", description="The status of last_rollout when last returned, or empty if no call has returned it yet"
    )
    last_reward: Optional[float] = Field(
        default=None, description="The reward of last_rollout, or null if unknown, which is not the same as 0"
    )
