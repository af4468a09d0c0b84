"""What is asked of an agent, and who decides about the outcome."""

from turngate.tasks.loaders.harbor import load
from turngate.tasks.loaders.load import read
from turngate.tasks.task import Task, said

__all__ = ["Task", "load", "read", "said"]
