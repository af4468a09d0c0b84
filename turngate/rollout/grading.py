"""Grade an agent's work, and retry the grading after infrastructure faults. The agent is not run again."""

from __future__ import annotations

import asyncio

from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Task

MAX_TRIES = 3
BACKOFF_S = 1.0  # before the second try; four times as long before the third


async def grade_with_retries(task: Task, work: Work, environment: GradingEnvironment) -> Grade:
    """Run the task's grader on the work. Retry after an infrastructure fault, up to `MAX_TRIES` tries in total."""
    tries = 1
    while True:
        result = await grade(task, work, environment)
        if result.kind != "infrastructure fault" or tries == MAX_TRIES:
            return result
        await asyncio.sleep(BACKOFF_S * 4 ** (tries - 1))
        tries += 1
