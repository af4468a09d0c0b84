"""The models, where OpenEnv looks for them."""

from turngate.openenv.models import ReadyObservation, TurngateAction, TurngateObservation, TurngateState

__all__ = ["ReadyObservation", "TurngateAction", "TurngateObservation", "TurngateState"]
