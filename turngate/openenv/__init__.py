"""Rollouts as an OpenEnv environment: `reset`, `step` and `state`, and MCP tools (docs/openenv-environment.md).

    client         `TurngateEnv`, the client
    models         actions, observations and states
    app            the server: `python -m turngate.openenv`
    environment    one session with a client
    service_host   the rollout service on its own event loop

Needs the `openenv` package: `pip install 'turngate[openenv]'`.
"""

from turngate.openenv.client import TurngateEnv
from turngate.openenv.models import ReadyObservation, TurngateAction, TurngateObservation, TurngateState

__all__ = ["ReadyObservation", "TurngateAction", "TurngateEnv", "TurngateObservation", "TurngateState"]
