"""What goes in and out of the environment, as OpenEnv wants it: pydantic models that its server publishes at `/schema`.

A tool's answer is the service's own struct as plain JSON (`service/result.py`); the client makes it that struct again.
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
    """One call of a tool. OpenEnv's own `CallToolAction` does as well; this one knows the names."""

    tool_name: Name = Field(description="Name of the tool to call")


class TurngateObservation(CallToolObservation):
    """What a tool answered: `result`, or `error`. `metadata` says which argument an error is about.

    `done` and `reward` are those of a rollout that has ended, where the call was for its result; a reward that is not known is None.
    """

    rollout_id: str = Field(default="", description="The rollout that this is about; empty: none, or several")
    status: str = Field(
        default="", description="That rollout's: queued, running, finished, failed, timed out, limit, cancelled, error"
    )


class ReadyObservation(Observation):
    """What `reset` answers: the endpoints that `model_key` may name."""

    endpoints: list[dict[str, Any]] = Field(default_factory=list, description="The server's catalog")


class TurngateState(State):
    """What this session has done since `reset`. Rollouts are the server's: they are here for whoever lost count."""

    rollouts: list[str] = Field(default_factory=list, description="The ids of those that were started, oldest first")
    last_rollout: str = Field(default="", description="The one that was last asked about")
    last_status: str = Field(default="", description="Its status when it was; empty: it had just been started")
    last_reward: Optional[float] = Field(default=None, description="Its reward; null: not known, which is not 0")
