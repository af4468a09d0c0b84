"""The OpenEnv environment: rollouts behind `reset`, `step` and `state`, and behind MCP tools (docs/openenv-environment.md).

    models.py       what goes in and out          client.py   `TurngateEnv`, for whoever uses it
    environment.py  one session of a client       app.py      the server: `python -m turngate.openenv`
    tools.py        the tools, as a table         thread.py   the service, on a loop of its own

Needs the `openenv` package: `pip install 'turngate[openenv]'`.
"""

from turngate.openenv.client import TurngateEnv
from turngate.openenv.models import ReadyObservation, TurngateAction, TurngateObservation, TurngateState

__all__ = ["ReadyObservation", "TurngateAction", "TurngateEnv", "TurngateObservation", "TurngateState"]
