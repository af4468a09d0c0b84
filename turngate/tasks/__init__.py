"""Tasks: the instructions for an agent, and how the outcome is graded."""

from turngate.tasks.loaders.harbor import load_task
from turngate.tasks.loaders.load import read_tasks
from turngate.tasks.task import Task, task_from_prompt

__all__ = ["Task", "load_task", "read_tasks", "task_from_prompt"]
