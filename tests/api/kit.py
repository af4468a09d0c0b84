"""Helpers for the tests of the Python API: a scripted model, an agent that is a small program, and made-up results.

with open_client(tmp_path, ["Hello."]) as client:
    result = client.run(program('print(ask("Hi"))'))
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import turngate as tg
from tests.rollout.kit import PRELUDE
from turngate.trace.sample import Sample

SLEEP_S = f"66{os.getpid():07d}"  # a unique duration, by which a sleeping process is found
# The catalogue's `shell` agent with Python as its command; its program is the task.
AGENT: Any = {"agent": "shell", "options": {"command": "exec python3 -"}, "sandbox": "local"}


def program(text: str) -> str:
    return PRELUDE + text + "\n"


def write_script(folder: Path, replies: Sequence[str]) -> str:
    """Write a script file and return its model key."""
    file = folder / "replies.json"
    file.write_text(json.dumps([*replies]))
    return f"scripted://{file}"


def open_client(folder: Path, replies: Sequence[str] = ("Hello.",), **where: Any) -> tg.BlockingClient:
    return tg.open(write_script(folder, replies), **AGENT, **where)


def make_turn(number: int = 1, **fields: Any) -> tg.Turn:
    """A made-up turn."""
    count = fields.pop("tokens", 4)
    given = {
        "node": 2 * number - 1,
        "after": number - 1 or None,
        "role": "main",
        "heard": ({"role": "user", "content": "Hi"},),
        "heard_ids": np.arange(3, dtype=np.int32),
        "ids": np.arange(count, dtype=np.int32),
        "logprobs": np.linspace(-3, 0, count, dtype=np.float32),
        "pieces": tuple(f" w{n}" for n in range(count)),
        "message": {"role": "assistant", "content": "said"},
        "text": "said",
        "reasoning": "",
        "tool_calls": (),
        "finish": "stop",
        "untrained": "",
        "version_start": 0,
        "version_end": 0,
        "capture": "tokens",
        "cause": None,
        "seconds": 0.1,
    }
    return tg.Turn(number=number, **{**given, **fields})


def make_result(**fields: Any) -> tg.Result:
    """A made-up result."""
    given = {
        "rollout_id": "r1",
        "session": "s1",
        "task_id": "fix-add",
        "group": "fix-add-1",
        "agent": "pi",
        "model": "m",
        "mode": "exact",
        "status": "finished",
        "kind": "graded",
        "reward": 1.0,
        "resolved": None,
        "exit_code": 0,
        "stop": "",
        "wall_s": 2.0,
        "seconds": {"agent": 1.5},
        "turns": (make_turn(),),
        "rows": (make_row(),),
        "files": {},
        "work": None,
        "logs": {},
        "verifier": "",
        "error": None,
        "notes": (),
        "clamped": (),
    }
    return tg.Result(**{**given, **fields})


def make_row() -> Sample:
    return Sample(1, np.arange(3, dtype=np.int32), np.array([False, True, True]), np.zeros(3, np.float32), ())
