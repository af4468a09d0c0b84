"""Turngate as an OpenEnv environment. The code is in `turngate.openenv`; this folder has the layout that `openenv` expects."""

from .client import TurngateEnv
from .models import TurngateAction, TurngateObservation, TurngateState

__all__ = ["TurngateAction", "TurngateEnv", "TurngateObservation", "TurngateState"]
