"""What the tests of the Python API are written with: a scripted model, an agent that is a small program, and results out of thin air.

with opened(tmp_path, ["Hello."]) as client:
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

NAP = f"66{os.getpid():07d}"  # seconds that nobody else on this machine sleeps: by them a process is known again
# The agent is the catalogue's `shell`, whose command here is a Python; its program is the task.
AGENT: Any = {"agent": "shell", "options": {"command": "exec python3 -"}, "sandbox": "local"}


def program(text: str) -> str:
    return PRELUDE + text + "\n"


def scripted(folder: Path, replies: Sequence[str]) -> str:
    """A model that says these."""
    file = folder / "replies.json"
    file.write_text(json.dumps([*replies]))
    return f"scripted://{file}"


def opened(folder: Path, replies: Sequence[str] = ("Hello.",), **where: Any) -> tg.BlockingClient:
    return tg.open(scripted(folder, replies), **AGENT, **where)


def turn(number: int = 1, **fields: Any) -> tg.Turn:
    """A turn that nobody took."""
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


def result(**fields: Any) -> tg.Result:
    """A result that nobody has earned."""
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
        "turns": (turn(),),
        "rows": (row(),),
        "files": {},
        "work": None,
        "logs": {},
        "verifier": "",
        "error": None,
        "notes": (),
        "clamped": (),
    }
    return tg.Result(**{**given, **fields})


def row() -> Sample:
    return Sample(1, np.arange(3, dtype=np.int32), np.array([False, True, True]), np.zeros(3, np.float32), ())
