"""Tasks in a folder of small text files, in which the agent has to look before it can act: what is graded depends on what it finds.

    training()   as many as a run may want, never the same twice
    held_out()   of the same kinds, with words that no training task has

Read as `tasks.py:training` (see docs/tasks.md). The grader is a function on the host that looks at the folder as the agent left it. The
moves of the expert are in a task's metadata, which no agent sees; {seen} in them is the last word that the command before has printed.
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
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what mini-swe-agent takes for the end
PARTLY = 0.2  # for what is there, but not as it should be

Files = dict[str, str]


def training(count: int = 2000, seed: int = 1) -> Iterator[dict[str, Any]]:
    return _made("train", count, seed, TRAINING)


def expert(count: int = 300, seed: int = 2) -> Iterator[dict[str, Any]]:
    """What the warm start is made of."""
    return _made("expert", count, seed, TRAINING)


def held_out(count: int = 64, seed: int = 3) -> Iterator[dict[str, Any]]:
    return _made("held", count, seed, HELD_OUT)


def _made(name: str, count: int, seed: int, words: list[str]) -> Iterator[dict[str, Any]]:
    draw, kinds = random.Random(seed), list(KINDS)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        asked, before, after, moves = KINDS[kind](*draw.sample(words, 6))
        yield {
            "id": f"{name}-{number:04d}-{kind}",
            "instruction": asked,
            "files": {path: text + "\n" for path, text in before.items()},
            "grader": {"type": "function", "name": "tasks.py:grade", "timeout_s": 60},
            "timeout_s": 120,
            "metadata": {"kind": kind, "before": before, "after": after, "moves": [*moves, SUBMIT]},
        }


# ── kinds: what is asked, the files before and after (a folder ends with a slash), and how an expert does it ────────


def _rename(a: str, b: str, c: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    return (
        f"There is one file here. Rename it to {b}.txt",
        {f"{a}.txt": c},
        {f"{b}.txt": c},
        ["ls", f"mv {{seen}} {b}.txt"],
    )


def _copy(a: str, b: str, c: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    asked = f"There is one file here. Make a copy of it called {b}.txt"
    return asked, {f"{a}.txt": c}, {f"{a}.txt": c, f"{b}.txt": c}, ["ls", f"cp {{seen}} {b}.txt"]


def _folder(a: str, b: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    asked = f"Make a folder. Its name is the word in {a}.txt"
    return asked, {f"{a}.txt": b}, {f"{a}.txt": b, f"{b}/": ""}, [f"cat {a}.txt", "mkdir {seen}"]


def _delete(a: str, b: str, c: str, d: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": f"{b}.txt", f"{b}.txt": d, f"{c}.txt": d}
    after = {name: text for name, text in before.items() if name != f"{b}.txt"}
    return f"Delete the file that is named in {a}.txt", before, after, [f"cat {a}.txt", "rm {seen}"]


def _last(a: str, b: str, c: str, d: str, e: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": f"{c}\n{d}\n{e}"}
    asked = f"Write the last word of {a}.txt into {b}.txt"
    return asked, before, {**before, f"{b}.txt": e}, [f"cat {a}.txt", f"echo {{seen}} > {b}.txt"]


def _append(a: str, b: str, c: str, d: str, *_: str) -> tuple[str, Files, Files, list[str]]:
    before = {f"{a}.txt": c, f"{b}.txt": d}
    asked = f"Append the word in {a}.txt to {b}.txt"
    return asked, before, {f"{a}.txt": c, f"{b}.txt": f"{d}\n{c}"}, [f"cat {a}.txt", f"echo {{seen}} >> {b}.txt"]


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
    """1 where the folder is as it should be; a little where the right names have come and gone, but something else is wrong."""
    before, after = (dict(subject.task.metadata[name]) for name in ("before", "after"))
    found = {}
    for path in sorted(subject.folder.rglob("*")):
        name = str(path.relative_to(subject.folder))
        found[name + "/" if path.is_dir() else name] = "" if path.is_dir() else path.read_text(errors="replace").strip()
    if found == after:
        return 1.0
    new, gone = after.keys() - before.keys(), before.keys() - after.keys()
    done = bool(new or gone) and new <= found.keys() and not gone & found.keys()
    return PARTLY if done else 0.0
