"""Choose tasks for a run from the files that `turngate tasks make repairs` wrote."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any, Literal

from turngate.tasks import read_tasks
from turngate.tasks.task import Task

# The expert's traces show the solutions of its tasks, so GRPO needs others.
Part = Literal["all", "expert", "grpo"]
MAX_INSTRUCTION = 4000  # characters


def choose_tasks(file: Path, count: int, part: Part = "all", seed: int = 0) -> list[Task]:
    """Choose tasks whose bug is in one line, in a random order in which packages take turns. It depends only on the seed."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        if is_small(row) and part in ("all", find_part(row["id"])):
            rows.setdefault(row["metadata"]["package"], []).append(row)
    chance = random.Random(seed)
    for pile in rows.values():
        chance.shuffle(pile)
    turns = [pile[n] for n in range(max(map(len, rows.values()), default=0)) for pile in rows.values() if n < len(pile)]
    tasks = {task.id: task for task in read_tasks(str(file))}
    return [tasks[row["id"]] for row in turns[:count]]


def find_part(task: str) -> Part:
    return "expert" if hashlib.sha256(task.encode()).digest()[0] % 2 else "grpo"


def is_small(row: dict[str, Any]) -> bool:
    lines = row["solution"]["patch"].splitlines()
    changed = [sum(line.startswith(sign) and not line.startswith(sign * 3) for line in lines) for sign in "+-"]
    return changed == [1, 1] and len(row["instruction"]) <= MAX_INSTRUCTION
