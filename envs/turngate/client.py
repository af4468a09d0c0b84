"""The client, where OpenEnv looks for it."""

from turngate.environment.client import TurngateEnv

__all__ = ["TurngateEnv"]
