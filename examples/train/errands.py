"""The demo's tasks: errands in a folder, each of which takes one shell command. They are generated from a few kinds and a list of words.

    turngate tasks list examples/train/errands.py:training
    turngate tasks check examples/train/errands.py:held_out

Held-out errands are of the same kinds, but use other words. The grader, `grade`, is a function on the host that inspects a copy of the
folder that the agent worked in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from turngate.tasks.grading.function import Subject

KINDS = ("write", "mkdir", "rename", "copy", "delete")
TRAINING = (
    "apple river stone cloud tiger lemon piano garden silver window bottle candle pepper rocket basket castle dragon forest guitar "
    "hammer island jacket kitten ladder magnet needle orange pencil rabbit saddle ticket turtle velvet walnut"
)
HELD_OUT = (
    "anchor beacon copper dinner engine falcon ginger harbor insect jungle kettle lizard marble nickel oyster parrot"
)
PER_KIND = 8


def training() -> Iterator[dict[str, Any]]:
    return generate_errands(TRAINING, PER_KIND, seed=1)


def held_out() -> Iterator[dict[str, Any]]:
    return generate_errands(HELD_OUT, 4, seed=2)


def generate_errands(words: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Generate `count` errands of each kind, one of each kind per round."""
    rng = random.Random(seed)
    for number in range(count):
        for kind in rng.sample(KINDS, len(KINDS)):
            yield build_errand(f"{kind}-{number}", kind, *rng.sample(words.split(), 3))


def build_errand(name: str, kind: str, a: str, b: str, c: str) -> dict[str, Any]:
    """Build a task row. `before` and `after` are the contents of the folder; a name that ends in / is a folder."""
    text = f"{c}\n"
    instruction, before, after, solution = {
        "write": (f"write the word {a} into {b}.txt", {}, {f"{b}.txt": a}, f"echo {a} > {b}.txt"),
        "mkdir": (f"make a folder called {a}", {}, {f"{a}/": ""}, f"mkdir {a}"),
        "rename": (f"rename {a}.txt to {b}.txt", {f"{a}.txt": text}, {f"{b}.txt": c}, f"mv {a}.txt {b}.txt"),
        "copy": (
            f"copy {a}.txt to {b}.txt",
            {f"{a}.txt": text},
            {f"{a}.txt": c, f"{b}.txt": c},
            f"cp {a}.txt {b}.txt",
        ),
        "delete": (
            f"delete the file {a}.txt",
            {f"{a}.txt": text, f"{b}.txt": text},
            {f"{b}.txt": c},
            f"rm {a}.txt",
        ),
    }[kind]
    return {
        "id": name,
        "instruction": instruction,
        "files": before,
        "timeout_s": 600.0,  # an agent may take a minute to start on a slow machine
        "grader": {"type": "function", "name": f"{__file__}:grade"},
        "solution": {"files": {"solve.sh": solution}},
        "metadata": {"kind": kind, "before": sorted(before), "after": after},
    }


def grade(subject: Subject) -> float:
    """Return 1 if the folder is exactly as requested, and 0.5 if the right files were created or deleted but something else is wrong."""
    before, after = set(subject.task.metadata["before"]), dict(subject.task.metadata["after"])
    files = {}
    for path in subject.folder.rglob("*"):
        name = path.relative_to(subject.folder).as_posix()
        files[f"{name}/" if path.is_dir() else name] = "" if path.is_dir() else _read_text(path)
    if files == after:
        return 1.0
    created, deleted = set(after) - before, before - set(after)
    if created:
        return 0.5 if created <= set(files) else 0.0
    return 0.5 if not deleted & set(files) else 0.0


def _read_text(path: Any) -> str:
    return path.read_bytes()[:10_000].decode(errors="replace").strip() if path.is_file() else "?"
