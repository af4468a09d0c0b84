"""Tasks: what an agent is asked to do, and how the outcome is graded."""

from pathlib import Path

from turngate.tasks.loaders.harbor import load_task
from turngate.tasks.loaders.load import load_single_task, read_tasks
from turngate.tasks.task import Task, task_from_prompt

BUNDLED_TASK = Path(__file__).parent / "bundled" / "fix-add"  # for a first run without a task

__all__ = ["BUNDLED_TASK", "Task", "load_single_task", "load_task", "read_tasks", "task_from_prompt"]
