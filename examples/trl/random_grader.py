"""A random grader, for a model that cannot solve anything: some rollouts are rewarded more than others, so there is something to learn."""

from __future__ import annotations

import random


def grade(subject: object) -> float:
    return random.random()
