"""verifiers (0.4, whose one API is `verifiers.v1`) and, through it, prime-rl.

    environment   Turngate's tasks, agents and sandboxes as a verifiers environment
    gateway       a mixin for verifiers' own harnesses: their model calls go to this gateway, through prime-rl's rollout API
    graft         recorded turns as a verifiers trace: its message graph, with ids, masks and log-probabilities

Needs `pip install 'turngate[verifiers]'`.
"""

from importlib.util import find_spec

if find_spec("verifiers") is None:
    raise ModuleNotFoundError(
        "turngate.trainers.verifiers needs verifiers: pip install 'turngate[verifiers]'", name="verifiers"
    )

from turngate.trainers.verifiers.environment import (
    TurngateEnv,
    TurngateEnvConfig,
    TurngateHarness,
    TurngateHarnessConfig,
    TurngateTask,
    TurngateTaskset,
    TurngateTasksetConfig,
)
from turngate.trainers.verifiers.gateway import GatewayConfig, RolloutGatewayMixin

__all__ = [
    "GatewayConfig",
    "RolloutGatewayMixin",
    "TurngateEnv",
    "TurngateEnvConfig",
    "TurngateHarness",
    "TurngateHarnessConfig",
    "TurngateTask",
    "TurngateTaskset",
    "TurngateTasksetConfig",
]
