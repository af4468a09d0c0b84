"""What is asked of an agent."""

from turngate.tasks.task import Task, load, said

__all__ = ["Task", "load", "said"]
