"""Tasks in a folder of small text files. The agent must look at the files before it can act, because the right action depends on them.

    training()   tasks to train on, all different
    expert()     tasks for the expert, whose traces are used for the warm start
    held_out()   tasks of the same kinds, with words that no training task has

Load them as `tasks.py:training` (see docs/tasks.md). The grader is a function on the host that inspects the folder after the rollout. The
expert's commands are in a task's metadata, which agents cannot see; {seen} in them is the last word that the previous command printed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

TRAINING = [
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "lemon",
    "piano",
    "garden",
    "silver",
    "window",
    "bottle",
    "candle",
    "pepper",
    "rocket",
    "basket",
    "castle",
    "dragon",
    "forest",
    "guitar",
    "hammer",
    "island",
    "jacket",
    "kitten",
    "ladder",
    "magnet",
    "needle",
    "orange",
    "pencil",
    "rabbit",
    "saddle",
    "ticket",
    "turtle",
    "velvet",
    "walnut",
    "anchor",
    "beacon",
    "copper",
    "dinner",
]
HELD_OUT = [
    "engine",
    "falcon",
    "ginger",
    "harbor",
    "insect",
    "jungle",
    "kettle",
    "lizard",
    "marble",
    "nickel",
    "oyster",
    "parrot",
    "button",
    "cherry",
    "donkey",
]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # ends a run of mini-swe-agent
PARTIAL_REWARD = 0.2  # the right files exist, but something else is wrong

Files = dict[str, str]


def training(count: int = 2000, seed: int = 1) -> Iterator[dict[str, Any]]:
    return _generate("train", count, seed, TRAINING)


def expert(count: int = 300, seed: int = 2) -> Iterator[dict[str, Any]]:
    return _generate("expert", count, seed, TRAINING)


def held_out(count: int = 64, seed: int = 3) -> Iterator[dict[str, Any]]:
    return _generate("held", count, seed, HELD_OUT)


def _generate(name: str, count: int, seed: int, words: list[str]) -> Iterator[dict[str, Any]]:
    rng, kinds = random.Random(seed), list(KINDS)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        instruction, before, after, moves = KINDS[kind](*rng.sample(words, 6))
        yield {
            "id": f"{name}-{number:04d}-{kind}",
            "instruction": instruction,
            "files": {path: text + "\n" for path, text in before.items()},
            "grader": {"type": "function", "name": "tasks.py:grade", "timeout_s": 60},
            "timeout_s": 120,
            "metadata": {"kind": kind, "before": before, "after": after, "moves": [*moves, SUBMIT]},
        }


# ── Kinds of tasks: the instruction, the files before and after (a folder ends with a slash), and the expert's commands ──


def _rename(a: str, b: str, c: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    return (
        f"There is one file here. Rename it to {b}.txt",
        {f"{a}.txt": c},
        {f"{b}.txt": c},
        ["ls", f"mv {{seen}} {b}.txt"],
    )


def _copy(a: str, b: str, c: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    instruction = f"There is one file here. Make a copy of it called {b}.txt"
    return instruction, {f"{a}.txt": c}, {f"{a}.txt": c, f"{b}.txt": c}, ["ls", f"cp {{seen}} {b}.txt"]


def _folder(a: str, b: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    instruction = f"Make a folder. Its name is the word in {a}.txt"
    return instruction, {f"{a}.txt": b}, {f"{a}.txt": b, f"{b}/": ""}, [f"cat {a}.txt", "mkdir {seen}"]


def _delete(a: str, b: str, c: str, d: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": f"{b}.txt", f"{b}.txt": d, f"{c}.txt": d}
    after = {name: text for name, text in before.items() if name != f"{b}.txt"}
    return f"Delete the file that is named in {a}.txt", before, after, [f"cat {a}.txt", "rm {seen}"]


def _last(a: str, b: str, c: str, d: str, e: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": f"{c}\n{d}\n{e}"}
    instruction = f"Write the last word of {a}.txt into {b}.txt"
    return instruction, before, {**before, f"{b}.txt": e}, [f"cat {a}.txt", f"echo {{seen}} > {b}.txt"]


def _append(a: str, b: str, c: str, d: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": c, f"{b}.txt": d}
    instruction = f"Append the word in {a}.txt to {b}.txt"
    return instruction, before, {f"{a}.txt": c, f"{b}.txt": f"{d}\n{c}"}, [f"cat {a}.txt", f"echo {{seen}} >> {b}.txt"]


def _find(a: str, b: str, c: str, d: str, e: str, f: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": d, f"{b}.txt": e, f"{c}.txt": f}
    after = {name: text for name, text in before.items() if name != f"{b}.txt"}
    return f"Delete the file that has the word {e} in it", before, after, [f"grep -l {e} *", "rm {seen}"]


KINDS = {
    "rename": _rename,
    "copy": _copy,
    "folder": _folder,
    "delete": _delete,
    "last": _last,
    "append": _append,
    "find": _find,
}


# ── the grade ───────────────────────────────────────────────────────────────────────────────────────────────────────


def grade(subject: Any) -> float:
    """Return 1 if the folder is as requested, and PARTIAL_REWARD if only the names of the created and deleted files are right."""
    before, after = (dict(subject.task.metadata[name]) for name in ("before", "after"))
    files = {}
    for path in sorted(subject.folder.rglob("*")):
        name = str(path.relative_to(subject.folder))
        files[name + "/" if path.is_dir() else name] = "" if path.is_dir() else path.read_text(errors="replace").strip()
    if files == after:
        return 1.0
    created, deleted = after.keys() - before.keys(), before.keys() - after.keys()
    done = bool(created or deleted) and created <= files.keys() and not deleted & files.keys()
    return PARTIAL_REWARD if done else 0.0
