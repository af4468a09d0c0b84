"""Copy an agent's working folder out of its sandbox. If that fails, determine whether the agent is at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.errors import SandboxError, SandboxGone
from turngate.sandboxes.base import Sandbox
from turngate.tasks.grading.types import Work
from turngate.tasks.grading.work import collect_work, needs_git
from turngate.tasks.task import Task

# Works with every implementation of tar, and needs no disk space.
_PACK = 'PATH="/usr/bin:/bin:$PATH"; exec tar -cf - -C /proc version 2>/dev/null'
_PACKED = b"version"


class WorkCopy(msgspec.Struct, frozen=True):
    """The host's copy of an agent's work, and a list of what is missing from it."""

    work: Work | None  # None if it could not be copied and the agent is not at fault
    missing: tuple[str, ...] = ()

    @property
    def is_gradable(self) -> bool:
        return self.work is not None and not self.work.lost


async def copy_work(
    sandbox: Sandbox,
    folder: Path,
    task: Task,
    read_answers: Callable[[], Awaitable[Sequence[Mapping[str, object]]]],
    limit_s: float,
) -> WorkCopy:
    """Copy the agent's working folder to `folder`. `read_answers` returns the agent's calls to host tools, which are part of the work."""
    try:
        async with asyncio.timeout(limit_s):
            work = await collect_work(sandbox, folder, git=needs_git(task), answers=await read_answers())
    except TimeoutError:
        return WorkCopy(None, (f"work: copying took longer than {limit_s:.0f} s",))
    except SandboxError as error:
        message = make_encodable(error.message)
        blames_agent = sandbox.shared is not None and (isinstance(error, SandboxGone) or await is_broken(sandbox))
        lost = Work(folder=folder, lost="the agent broke its own sandbox: " + message) if blames_agent else None
        return WorkCopy(lost, (f"work: {message}",))
    lost_lines = (work.lost,) if work.lost else ()
    return WorkCopy(work, tuple(f"work: {line}" for line in (*lost_lines, *work.left_out)))


async def is_broken(sandbox: Sandbox) -> bool:
    """Return whether tar no longer works in the sandbox. Every sandbox must have tar, so the agent is assumed to have broken it.

    Return False if the sandbox does not respond, because that may not be the agent's fault.
    """
    try:
        done = await sandbox.exec(["/bin/sh", "-c", _PACK], cwd="/", timeout_s=60)
    except SandboxError:
        return False
    return not done.timed_out and not done.stdout.startswith(_PACKED)
