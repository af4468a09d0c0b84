"""Repeat the grading of an agent's work after infrastructure faults, without running the agent again."""

from __future__ import annotations

import asyncio

from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Task

MAX_TRIES = 3
BACKOFF_S = 1.0  # pause before the second try; the pause before the third is four times as long


async def grade_with_retries(task: Task, work: Work, environment: GradingEnvironment) -> Grade:
    """Grade the work with the task's grader. After an infrastructure fault, try again, with at most `MAX_TRIES` tries in total."""
    tries = 1
    while True:
        result = await grade(task, work, environment)
        if result.kind != "infrastructure fault" or tries == MAX_TRIES:
            return result
        await asyncio.sleep(BACKOFF_S * 4 ** (tries - 1))
        tries += 1
