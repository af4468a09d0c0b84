"""Choose tasks for a run from the files that `turngate tasks make repairs` wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from turngate.tasks import read_tasks
from turngate.tasks.task import Task

MAX_INSTRUCTION = 4000  # characters
_LEVELS = ("easy", "medium", "hard")


def choose_tasks(file: Path, count: int, seed: int = 0) -> list[Task]:
    """Choose tasks whose bug is in one line: as many as possible from each package, easy ones first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        if is_small(row):
            rows.setdefault(row["metadata"]["package"], []).append(row)
    chance = random.Random(seed)
    for pile in rows.values():
        chance.shuffle(pile)
    turns = [pile[n] for n in range(max(map(len, rows.values()), default=0)) for pile in rows.values() if n < len(pile)]
    chosen = sorted(turns[:count], key=lambda row: _LEVELS.index(row["metadata"]["difficulty"]))
    tasks = {task.id: task for task in read_tasks(str(file))}
    return [tasks[row["id"]] for row in chosen]


def is_small(row: dict[str, Any]) -> bool:
    lines = row["solution"]["patch"].splitlines()
    changed = [sum(line.startswith(sign) and not line.startswith(sign * 3) for line in lines) for sign in "+-"]
    return changed == [1, 1] and len(row["instruction"]) <= MAX_INSTRUCTION
