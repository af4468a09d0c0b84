"""What is asked of an agent, and who decides about the outcome."""

from turngate.tasks.folder import load
from turngate.tasks.read import read
from turngate.tasks.task import Task, said

__all__ = ["Task", "load", "read", "said"]
