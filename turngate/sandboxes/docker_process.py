"""Run the `docker` command, and map its failures to `SandboxError`s."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxUnavailable

STEP_TIMEOUT_S = 120.0  # time limit of one docker command


async def run_docker(*arguments: str, stdin: bytes = b"", timeout_s: float = STEP_TIMEOUT_S) -> str:
    """Run a docker command and return its output. Raise `SandboxError` if it fails."""
    code, out, err = await try_docker(*arguments, stdin=stdin, timeout_s=timeout_s)
    if code:
        raise SandboxError(f"`docker {arguments[0]}` failed: {err.strip()[-500:] or f'exit code {code}'}")
    return out


async def try_docker(*arguments: str, stdin: bytes = b"", timeout_s: float = STEP_TIMEOUT_S) -> tuple[int, str, str]:
    """Run a docker command and return its exit code, output and error messages.

    Raise `SandboxError` if it cannot be started or takes longer than `timeout_s`.
    """
    process = await spawn_docker(
        "docker",
        *arguments,
        env=os.environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
    except TimeoutError as error:
        raise SandboxError(f"`docker {arguments[0]}` took longer than {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await run_to_completion(process.wait())
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


async def spawn_docker(
    *command: str, env: Mapping[str, str], stdin: int, stdout: int, stderr: int, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a docker command. Raise `SandboxError` if that fails."""
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C in our terminal must not reach it
        )
    except FileNotFoundError as error:
        raise SandboxUnavailable(
            "docker is not installed; run `apt-get install docker.io`, or see https://docs.docker.com"
        ) from error
    except (OSError, ValueError) as error:
        raise SandboxError(f"cannot run the `docker` command: {error}") from error
