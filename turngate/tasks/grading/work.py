"""Collect the agent's work: copy its working folder to the host after all of its processes have ended.

The agent controls the content of this folder. Devices, pipes, absolute links, and links that could point outside the folder are left out
and reported, so that they cannot make a rollout fail. Unless a grader needs it, the agent's `.git` is left out, because its hooks,
filters and settings can make git run the agent's code.
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
# Restore permissions that the agent removed, because the files are still part of its work.
_OPEN = 'PATH="/usr/bin:/bin:$PATH"; [ -L "$1" ] || chmod -R u+rwX -- "$1" 2>/dev/null; true'
_OPEN_S = 120.0


async def collect_work(
    sandbox: Sandbox, folder: Path, *, git: bool = False, answers: Sequence[Mapping[str, object]] = ()
) -> Work:
    """Copy the sandbox's working folder to the new host folder `folder`, including its `.git` if `git` is set.

    Raise `SandboxError` if the sandbox fails. If the working folder no longer exists, the work is empty, and `left_out` says so. If the
    working folder exceeds a limit, such as the limit on its size, the agent is at fault: the work is empty, and `lost` says why.
    """
    lost, skipped = "", tuple[str, ...]()
    try:
        await sandbox.exec(["/bin/sh", "-c", _OPEN, "sh", sandbox.workdir], cwd="/", timeout_s=_OPEN_S)
        skipped = await sandbox.download(sandbox.workdir, folder, exclude=() if git else (GIT,))
    except SandboxFileMissing:
        skipped = ("the working folder no longer exists",)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    except SandboxTooLarge as error:
        lost = f"the agent's working folder is too large to copy: {error.message}"
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    return Work(folder=folder, left_out=format_names(skipped), lost=lost, answers=tuple(answers))


def needs_git(task: Task) -> bool:
    """Return whether a grader of the task needs the agent's `.git`."""
    graders = [part.grader for part in task.grader.parts] if isinstance(task.grader, Rubric) else [task.grader]
    return any(isinstance(grader, Script) and grader.git for grader in graders)


def format_names(lines: Sequence[str]) -> tuple[str, ...]:
    """Format names for display: limit their number and length, and replace unprintable characters."""
    short = [make_encodable("".join(c if c.isprintable() else "�" for c in line[:300])) for line in lines[:_MOST_NAMED]]
    more = [f"and {len(lines) - _MOST_NAMED} more"] if len(lines) > _MOST_NAMED else []
    return (*short, *more)
