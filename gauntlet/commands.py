"""Run a command and return its output."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class CommandError(Exception):
    """A command could not be started, failed, or did not finish in time. `detail` is the end of its output, or else the message."""

    def __init__(self, message: str, errors: str = "", out: str = "") -> None:
        super().__init__(message)
        self.errors = errors
        self.detail = (errors or out)[-300:] or message


@dataclass(frozen=True)
class CommandOutput:
    out: str
    errors: str


async def run_command(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_s: float | None = None,
) -> CommandOutput:
    """Run a command with additional environment variables. If it takes too long or this call is cancelled, kill it.

    It has a process group of its own, so Ctrl-C does not end it before this program notices the interrupt.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(variables or {})},
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from None
    try:
        async with asyncio.timeout(limit_s):
            out, errors = await process.communicate()
    except TimeoutError:
        raise CommandError(f"did not finish within {limit_s:.0f} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    done = CommandOutput(out.decode(errors="replace"), errors.decode(errors="replace").strip())
    if process.returncode:
        last = (done.errors.splitlines() or ["no output"])[-1]
        raise CommandError(f"failed with exit code {process.returncode}: {last}", done.errors, done.out.strip())
    return done
