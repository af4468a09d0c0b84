"""The client, in the module in which OpenEnv expects it."""

from turngate.openenv.client import TurngateEnv

__all__ = ["TurngateEnv"]
