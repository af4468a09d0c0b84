"""Integration with verifiers (0.4, `verifiers.v1`) and, through it, prime-rl.

    environment   Turngate's tasks, agents and sandboxes as a verifiers environment
    gateway       a mixin that sends the model calls of verifiers' own harnesses to a gateway, through prime-rl's rollout API
    graft         conversion of recorded turns to the message graph of a verifiers trace

Requires `pip install 'turngate[verifiers]'`.
"""

from importlib.util import find_spec

if find_spec("verifiers") is None:
    raise ModuleNotFoundError(
        "turngate.trainers.verifiers requires verifiers; run `pip install 'turngate[verifiers]'`", name="verifiers"
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
