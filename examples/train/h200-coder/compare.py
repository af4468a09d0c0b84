"""Compare evaluations of the same held-out tasks: the start of a training, and models that were trained from it.

    python compare.py run/start/before.json run/true0/after.json run/shuffled0/after.json

`train.py` wrote the files. With `--edits`, the tasks have the edit command. Prints a line for each file, as JSON: pass@1, and its
difference from the first file. Intervals are 95 % bootstraps over tasks. Those of differences are paired: both sides of a difference use
the same tasks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1]))  # for the modules that both examples share
from rollout_process import RolloutLine

# Turns of a rollout whose first change is right: read the function, change a line, finish. With the edit command, it is one turn.
SHORTEST = 3
_DRAWS = 2000


def compute_rates(graded: Sequence[RolloutLine]) -> dict[str, float]:
    """Return the share of solved rollouts by task."""
    solved: dict[str, list[bool]] = {}
    for one in graded:
        solved.setdefault(one.task, []).append(one.reward >= 1)
    return {task: sum(passed) / len(passed) for task, passed in solved.items()}


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by a bootstrap over the values."""
    chance = random.Random(0)
    means = sorted(sum(chance.choices(values, k=len(values))) / len(values) for _ in range(_DRAWS))
    return means[_DRAWS // 40], means[-1 - _DRAWS // 40]


def compare(rates: Mapping[str, float], start: Mapping[str, float]) -> tuple[float, tuple[float, float]]:
    """Return the mean difference over the tasks that both have, and its interval."""
    differences = [rates[task] - start[task] for task in rates if task in start]
    return sum(differences) / len(differences), find_interval(differences)


def count_solved_at_once(graded: Sequence[RolloutLine], shortest: int = SHORTEST) -> int:
    """Return the number of rollouts that were solved by their first change, in at most `shortest` turns."""
    return sum(one.reward >= 1 and one.turns <= shortest for one in graded)


def describe(file: Path, start: Mapping[str, float] | None, shortest: int) -> dict[str, Any]:
    graded = msgspec.json.decode(file.read_bytes(), type=list[RolloutLine])
    rates = compute_rates(graded)
    described: dict[str, Any] = {
        "file": str(file),
        "tasks": len(rates),
        "rollouts": len(graded),
        "pass_at_1": sum(rates.values()) / len(rates),
        "interval": find_interval(list(rates.values())),
        "solved_once": sum(rate > 0 for rate in rates.values()) / len(rates),
        "solved_at_once": count_solved_at_once(graded, shortest) / len(graded),
        "turns": sum(one.turns for one in graded) / len(graded),
    }
    if start is not None:
        described["difference"], described["difference_interval"] = compare(rates, start)
    return described


def main() -> None:
    shortest = 1 if "--edits" in sys.argv else SHORTEST
    first, *others = (Path(word) for word in sys.argv[1:] if word != "--edits")
    start = compute_rates(msgspec.json.decode(first.read_bytes(), type=list[RolloutLine]))
    for file in (first, *others):
        print(json.dumps(describe(file, None if file == first else start, shortest)))


if __name__ == "__main__":
    main()
