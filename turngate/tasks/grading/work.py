"""The agent's work: its working folder, copied to the host when nothing of the agent runs any more. The rollout calls `take`.

What is copied was written by an agent. Links that lead out, devices and pipes are left out and named; nothing in it can fail a rollout.
Its `.git` stays behind: hooks, filters and settings in there are programs that run when somebody uses git.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from turngate.common.safe_text import make_encodable
from turngate.errors import SandboxFileMissing, SandboxTooLarge
from turngate.sandboxes.base import Sandbox
from turngate.tasks.grading.types import Work
from turngate.tasks.task import Rubric, Script, Task

GIT = ".git"
_MOST_NAMED = 50
# Its own files may be closed to it. They are the work all the same.
_OPEN = 'PATH="/usr/bin:/bin:$PATH"; [ -L "$1" ] || chmod -R u+rwX -- "$1" 2>/dev/null; true'
_OPEN_S = 120.0


async def collect_work(
    sandbox: Sandbox, folder: Path, *, git: bool = False, answers: Sequence[Mapping[str, object]] = ()
) -> Work:
    """Copy the working folder into `folder`, which is made. `git`: with its `.git`.

    Raises `SandboxError` where the sandbox failed. More than can be taken is the agent's own doing, and told in the work.
    """
    lost, left = "", tuple[str, ...]()
    try:
        await sandbox.exec(["/bin/sh", "-c", _OPEN, "sh", sandbox.workdir], cwd="/", timeout_s=_OPEN_S)
        left = await sandbox.download(sandbox.workdir, folder, exclude=() if git else (GIT,))
    except SandboxFileMissing:
        left = ("the working folder itself: it is not there any more",)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    except SandboxTooLarge as error:
        lost = f"the agent left more in its working folder than can be taken: {error.message}"
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    return Work(folder=folder, left_out=format_names(left), lost=lost, answers=tuple(answers))


def needs_git(task: Task) -> bool:
    """Whether the agent's own `.git` is part of a task's work."""
    graders = [part.grader for part in task.grader.parts] if isinstance(task.grader, Rubric) else [task.grader]
    return any(isinstance(grader, Script) and grader.git for grader in graders)


def format_names(lines: Sequence[str]) -> tuple[str, ...]:
    """Names for people: not too many, none too long, none that a terminal would take for a command."""
    short = [make_encodable("".join(c if c.isprintable() else "�" for c in line[:300])) for line in lines[:_MOST_NAMED]]
    more = [f"and {len(lines) - _MOST_NAMED} more"] if len(lines) > _MOST_NAMED else []
    return (*short, *more)
