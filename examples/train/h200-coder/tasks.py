"""Choose tasks for a run from the files that `turngate tasks make repairs` wrote."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any, Literal

from turngate.tasks import read_tasks
from turngate.tasks.task import Task

# The expert's traces show the solutions of its tasks, so GRPO needs others.
Part = Literal["all", "expert", "grpo"]
MAX_INSTRUCTION = 4000  # characters
_SHORT, _MEDIUM = 10, 20  # lines of a function


def choose_tasks(
    file: Path, count: int, part: Part = "all", seed: int = 0, *, max_lines: int = 0, short_first: bool = False
) -> list[Task]:
    """Choose tasks whose bug is in one line, in a random order in which packages take turns. It depends only on the seed.

    With `max_lines`, choose only bugs in functions of at most this many lines. With `short_first`, begin with the short functions.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        if is_small(row) and part in ("all", find_part(row["id"])) and not 0 < max_lines < count_lines(row):
            rows.setdefault(row["metadata"]["package"], []).append(row)
    chance = random.Random(seed)
    for pile in rows.values():
        chance.shuffle(pile)
    turns = [pile[n] for n in range(max(map(len, rows.values()), default=0)) for pile in rows.values() if n < len(pile)]
    if short_first:
        turns.sort(key=lambda row: (count_lines(row) > _SHORT) + (count_lines(row) > _MEDIUM))
    tasks = {task.id: task for task in read_tasks(str(file))}
    return [tasks[row["id"]] for row in turns[:count]]


def count_lines(row: dict[str, Any]) -> int:
    """Return the number of lines of the function that the instruction names."""
    lines = re.search(r"\(lines (\d+) to (\d+)\)", row["instruction"])
    if lines is None:
        raise SystemExit(f"{row['id']} does not name its function; make the tasks with --hint function")
    return int(lines[2]) - int(lines[1]) + 1


def find_part(task: str) -> Part:
    return "expert" if hashlib.sha256(task.encode()).digest()[0] % 2 else "grpo"


def is_small(row: dict[str, Any]) -> bool:
    lines = row["solution"]["patch"].splitlines()
    changed = [sum(line.startswith(sign) and not line.startswith(sign * 3) for line in lines) for sign in "+-"]
    return changed == [1, 1] and len(row["instruction"]) <= MAX_INSTRUCTION
