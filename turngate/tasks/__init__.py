"""What is asked of an agent."""

from turngate.tasks.task import Task, load

__all__ = ["Task", "load"]
