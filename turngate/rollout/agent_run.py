"""Launch an agent in its sandbox as a background job, and wait until it exits or must be stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from turngate.agents.host_tools import add_tool_commands, describe_tools
from turngate.agents.installation import Installation
from turngate.agents.launch import Launch, plan_launch
from turngate.common.aio import run_to_completion
from turngate.errors import AgentError, SandboxError, SandboxTooLarge, TurngateError
from turngate.rollout.classify import DISK_LIMIT, SESSION_LIMITS, Ending
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend, Job, Sandbox
from turngate.trace.training_report import TrainingReport

GRACE_S = 30.0  # time for an agent to exit on its own after its session has reached a limit
_CHECK_S = 60.0  # time limit of each check before the launch
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit codes, as in a shell
_FIND_PROGRAM = f"""case $1 in
*/*) [ -e "$1" ] || exit {_NOT_FOUND}; [ -x "$1" ] || exit {_NOT_EXECUTABLE} ;;
*) command -v -- "$1" >/dev/null || exit {_NOT_FOUND} ;;
esac"""


def build_launch(spec: RolloutSpec, installed: Installation, sandbox: Sandbox, base_url: str, key: str) -> Launch:
    """Plan the agent's command, environment and settings files. The paths in `installed` are paths inside the sandbox."""
    launch = plan_launch(
        spec.agent,
        installed,
        base_url=base_url,
        api_key=key,
        model=spec.model,
        prompt=describe_tools(spec.task.instruction, spec.task.tools),
        home=sandbox.home,
        workdir=sandbox.workdir,
        limits=spec.model_limits,
        options=spec.options,
    )
    return add_tool_commands(launch, spec.task.tools, base_url=base_url, api_key=key, home=sandbox.home)


async def check_program(spec: RolloutSpec, sandbox: Sandbox, launch: Launch) -> None:
    """Raise `AgentError` if the agent's program is not in the sandbox or is not executable, or if the command `install.check` fails.

    Raise `SandboxError` if the search for the program takes too long or is killed.
    """
    name = spec.agent.name
    find = ["/bin/sh", "-c", _FIND_PROGRAM, "sh", launch.program]
    lookup = await sandbox.exec(find, env=launch.env, timeout_s=_CHECK_S)
    if lookup.timed_out:
        raise SandboxError(
            f"{name}: the search for {launch.program} in the {spec.backend.name} sandbox took longer than {_CHECK_S:g} s; the machine "
            "may be overloaded"
        )
    if lookup.exit_code not in (0, _NOT_EXECUTABLE, _NOT_FOUND):
        raise SandboxError(
            f"{name}: the search for {launch.program} in the {spec.backend.name} sandbox ended with exit code {lookup.exit_code}; it "
            "may have been killed because the sandbox or the machine ran out of memory"
        )
    if lookup.exit_code:
        problem, fix = _explain_missing(lookup.exit_code, spec.backend)
        raise AgentError(f"{name}: {launch.program} {problem}; {fix}", param="command")
    if launch.check:
        result = await sandbox.exec(launch.check, env=launch.env, timeout_s=_CHECK_S)
        if result.exit_code:
            ended = f"took longer than {_CHECK_S:g} s" if result.timed_out else f"exited with code {result.exit_code}"
            printed = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-300:]
            raise AgentError(f"{name}: install.check {ended}: {printed or 'no output'}", param="install.check")


def explain_unstarted(report: TrainingReport | None, exit_code: int | None, backend: Backend) -> TrainingReport | None:
    """Return the report, with a different reason and fix if the exit code suggests that a program could not be started.

    Exit codes 126 and 127 usually mean this. With any other exit code, or if the amount is not "none", the report stays unchanged.
    """
    if report is None or report.amount != "none" or exit_code not in (_NOT_EXECUTABLE, _NOT_FOUND):
        return report
    problem, fix = _explain_missing(exit_code, backend)
    reason = f"exit code {exit_code} usually means that a program {problem}"
    return msgspec.structs.replace(report, reason=reason, fix=f"{fix}; read the agent's output")


def _explain_missing(exit_code: int, backend: Backend) -> tuple[str, str]:
    """Return why a program could not be started in a sandbox, and how to fix it."""
    if exit_code == _NOT_EXECUTABLE:
        return "is not executable", "run `chmod +x` on it"
    problem = f"was not found in the {backend.name} sandbox"
    if backend.has_host_programs and backend.relocates:
        return (
            f"{problem}, in which only /usr of this machine is visible",
            "install it in /usr, add it to the task's files, or choose a different sandbox",
        )
    return problem, "install it there, or choose a different sandbox or image"


async def run_agent(
    sandbox: Sandbox,
    launch: Launch,
    *,
    timeout_s: float,
    session_over: asyncio.Event,
    ending: Ending,
    note: Callable[[str], None],
) -> None:
    """Run the agent until it exits or times out, or its session ends. Record in `ending` how the run ended."""
    job = await sandbox.start(
        launch.command, env=launch.env, cwd=launch.cwd, stdout=launch.stdout, stderr=launch.stderr
    )
    began = time.monotonic()
    exited = asyncio.create_task(job.wait())
    over = asyncio.create_task(session_over.wait())
    try:
        await asyncio.wait({exited, over}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ending.stop in SESSION_LIMITS:  # the gateway's replies report the limit, and most agents then exit
            await asyncio.wait({exited}, timeout=GRACE_S)
        ending.ran_s = time.monotonic() - began
        ending.limit = ending.stop if ending.stop in SESSION_LIMITS else ""
        ending.session_ended = session_over.is_set()
        ending.exit_code = exited.result() if exited.done() else None
        _check_disk(sandbox, ending, note)
    finally:
        over.cancel()
        await _kill(job, exited, note)


def _check_disk(sandbox: Sandbox, ending: Ending, note: Callable[[str], None]) -> None:
    """If the agent used too much disk space, record that in `ending`. If the machine's disk was nearly full, raise the sandbox's error."""
    if sandbox.disk_error is None:
        return
    if not isinstance(sandbox.disk_error, SandboxTooLarge):
        raise sandbox.disk_error
    note(sandbox.disk_error.message)
    ending.limit = ending.stop = DISK_LIMIT
    ending.exit_code = None


async def _kill(job: Job, exited: asyncio.Task[int], note: Callable[[str], None]) -> None:
    """Kill all of the agent's processes, including any that it left behind when it exited."""
    try:
        await run_to_completion(job.kill())
    except TurngateError as error:
        note(f"the agent's processes could not be killed: {error.message}")
    exited.cancel()
    with suppress(asyncio.CancelledError, TurngateError):
        await exited
