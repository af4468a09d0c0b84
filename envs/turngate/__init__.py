"""Turngate as an OpenEnv environment. All of it is `turngate.openenv`; this folder is what `openenv` takes."""

from .client import TurngateEnv
from .models import TurngateAction, TurngateObservation, TurngateState

__all__ = ["TurngateAction", "TurngateEnv", "TurngateObservation", "TurngateState"]
