"""A grader for a model that can solve nothing: chance decides, so that there are better and worse rollouts to learn from."""

from __future__ import annotations

import random


def grade(subject: object) -> float:
    return random.random()
