"""The models, in the module in which OpenEnv expects them."""

from turngate.openenv.models import ReadyObservation, TurngateAction, TurngateObservation, TurngateState

__all__ = ["ReadyObservation", "TurngateAction", "TurngateObservation", "TurngateState"]
