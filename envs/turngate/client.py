"""The client, where OpenEnv looks for it."""

from turngate.openenv.client import TurngateEnv

__all__ = ["TurngateEnv"]
