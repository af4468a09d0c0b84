"""A fresh sandbox for a grader, into which the agent's work is copied. No agent ever runs in it.

    async with open_sandbox(task, environment, life_s=900) as sandbox:      # the task as the agent found it
        notes = await upload_work(sandbox, work.folder)                     # the task as the agent left it

The sandbox is removed after the block, even if the block fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

import msgspec

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxGone
from turngate.sandboxes import folders, supervisor
from turngate.sandboxes.archive import parse_tar_errors
from turngate.sandboxes.base import ExecResult, Sandbox
from turngate.tasks import staging
from turngate.tasks.grading.types import GradingEnvironment
from turngate.tasks.grading.work import GIT, format_names
from turngate.tasks.task import Task

log = logging.getLogger(__name__)

TESTS, LOGS = "/tests", "/logs"  # as in Harbor
OUTPUT_LIMIT = 32_000_000  # bytes of a grader's output to keep, from its start and its end
DEFAULT_PIDS = 1024  # process limit of a grader's sandbox if none is set
CREATE_TIMEOUT_S = 900.0  # the image may need to be built
STEP_TIMEOUT_S = 600.0  # time limit of each of our own steps in the sandbox
PYTHON_CACHE = "__pycache__"
SCRATCH_KIND = "grading"  # the kind of host folder that graders use
SPARE_LIFE_S = 1800.0  # added to the time limits of the setup and the grader to get a sandbox's lifetime
SYSTEM_PATH = (
    'PATH="/usr/bin:/bin:/usr/sbin:/sbin:$PATH"'  # system folders first, because PATH may point into the agent's work
)

# $1: the working folder; $2: our own folder; $3: the name in the working folder to keep.
_CLEAR = f"""{SYSTEM_PATH}
mkdir -p -- "$1" && cd -- "$1" || exit 1
find . -path ./{GIT} -prune -o -type l -print | while IFS= read -r link; do
  case "$(readlink -- "$link")" in /*|*..*) printf '%s\\0' "$link";; esac
done >"$2/links"
tar -cf "$2/held.tar" --null -T "$2/held" && tar -cf "$2/links.tar" --null -T "$2/links" || exit 1
find . -mindepth 1 -maxdepth 1 ! -name "$3" -exec rm -rf -- {{}} + 2>/dev/null
find . -mindepth 1 -maxdepth 1 ! -name "$3" | head -n 1
"""
_COPY = f"""{SYSTEM_PATH}
tar -cf - -C "$2/work" . | tar -xof - -C "$1"
true
"""
# Links of the task that point outside the working folder are never part of the work. Restore them unless something else is in their place.
_RESTORE = f"""{SYSTEM_PATH}
cd -- "$1" && tar -xof "$2/held.tar" || exit 1
tar -xokf "$2/links.tar" 2>/dev/null
rm -rf -- "$2"
"""


_swept: list[int] = []  # not empty once this process has removed old scratch folders


@asynccontextmanager
async def open_sandbox(task: Task, environment: GradingEnvironment, *, life_s: float) -> AsyncIterator[Sandbox]:
    """Create a sandbox, set up the task in it, and stop the sandbox after the block.

    The sandbox has no network access, unless its backend cannot block it. `life_s` is the grader's time limit in seconds. The sandbox's
    lifetime also includes time for the setup and a reserve.
    """
    backend = environment.backend
    needed = staging.build_sandbox_spec(task, backend, image=environment.image, resources=environment.resources)
    limits = needed.resources
    spec = msgspec.structs.replace(
        needed,
        network="none",
        folders=(TESTS, LOGS) if backend.relocates else (),
        resources=msgspec.structs.replace(limits, pids=limits.pids or DEFAULT_PIDS),
        life_s=life_s + task.setup_timeout_s + SPARE_LIFE_S,
        labels={**needed.labels, "for": "grading"},
    )
    try:
        async with asyncio.timeout(CREATE_TIMEOUT_S):
            sandbox = await backend.create(spec)
    except TimeoutError:
        raise SandboxError(f"the grader's sandbox was not ready within {CREATE_TIMEOUT_S:.0f} s") from None
    try:
        await staging.upload_files(sandbox, task)
        await staging.run_setup(sandbox, task)
        yield sandbox
    finally:
        await run_to_completion(_stop_sandbox(task, sandbox))


async def _stop_sandbox(task: Task, sandbox: Sandbox) -> None:
    """Stop a sandbox. If that fails, only log the error, because the grade is still valid."""
    try:
        await sandbox.stop()
    except SandboxError as error:
        log.warning("task %s: could not remove the grader's sandbox: %s", task.id, error.message)


def tests_and_logs(sandbox: Sandbox, environment: GradingEnvironment) -> tuple[str, str]:
    """Return the folders for tests and logs: /tests and /logs, or folders below $HOME if the sandbox shares the host's file system."""
    if environment.backend.relocates:
        return TESTS, LOGS
    return f"{sandbox.home}/grading{TESTS}", f"{sandbox.home}/grading{LOGS}"


async def upload_work(
    sandbox: Sandbox, folder: Path, *, git: bool = False, exclude: Collection[str] = (), held: Sequence[str] = ()
) -> tuple[str, ...]:
    """Replace the content of the sandbox's working folder with the agent's work.

    The original `.git` is kept, unless `git` is set and the work includes a `.git`. All graders of a rubric get the same copy of the work,
    which may include a `.git` that this grader does not need.

    Files that the agent deleted are deleted in the sandbox too. Python caches are not copied: Python accepts an outdated cache if the
    source changed within the same second and kept its length, so the work could otherwise be graded with outdated code.

    `exclude` lists the paths in the work that are not copied. `held` lists the original files in the sandbox that are kept unchanged.
    Return notes on the files that could not be copied.
    """
    private = await upload_private_files(sandbox, {"held": b"".join(os.fsencode(f"./{path}") + b"\0" for path in held)})
    kept = "/" if git and (folder / GIT).exists() else GIT  # "/" matches no file
    remaining = await run_step(sandbox, _CLEAR, sandbox.workdir, private, kept)
    left_behind = {*exclude, *held, *await asyncio.to_thread(_find_blocking_paths, folder, held)}
    left_behind |= await asyncio.to_thread(_find_caches, folder)
    left_behind |= set() if git else {GIT}
    notes: tuple[str, ...] = ()
    try:
        await sandbox.upload(folder, sandbox.workdir, exclude=left_behind)
    except SandboxGone:
        raise
    except SandboxError:
        # Some of the task's files belong to a different user and could not be removed. The agent could not change them either.
        if not remaining.stdout.strip():
            raise
        await sandbox.upload(folder, f"{private}/work", exclude=left_behind)
        copied = await run_step(sandbox, _COPY, sandbox.workdir, private)
        notes = format_names([f"{line} (the task's own file is kept)" for line in parse_tar_errors(copied.stderr)])
    await run_step(sandbox, _RESTORE, sandbox.workdir, private)
    return notes


def _find_blocking_paths(folder: Path, held: Sequence[str]) -> set[str]:
    """Return the paths in the work that are not folders, although a held file needs a folder there."""
    found = set()
    for path in held:
        for parent in PurePosixPath(path).parents:
            place = folder / parent
            if str(parent) != "." and (place.is_symlink() or (place.exists() and not place.is_dir())):
                found.add(str(parent))
    return found


def _find_caches(folder: Path) -> set[str]:
    found = set()
    for where, below, _ in os.walk(folder):
        if PYTHON_CACHE in below:
            found.add((Path(where) / PYTHON_CACHE).relative_to(folder).as_posix())
            below.remove(PYTHON_CACHE)
    return found


@asynccontextmanager
async def scratch_folder() -> AsyncIterator[Path]:
    """Create a host folder for a grader's intermediate files, and remove it after the block.

    The first call also removes folders that killed processes left behind.
    """
    if not _swept:
        _swept.append(await folders.sweep_folders(None, SCRATCH_KIND))
    folder = await asyncio.to_thread(folders.create_folder, None, SCRATCH_KIND, "files")
    try:
        yield folder / "files"
    finally:
        await run_to_completion(asyncio.to_thread(supervisor.remove_folder, str(folder)))


async def upload_private_files(sandbox: Sandbox, files: Mapping[str, bytes]) -> str:
    """Upload our own small files into a new folder of the sandbox. Return the folder, whose name cannot be guessed."""
    private = f"{sandbox.home}/.{secrets.token_hex(8)}"
    async with scratch_folder() as folder:
        await asyncio.to_thread(_write_files, folder, files)
        await sandbox.upload(folder, private)
    return private


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


async def run_step(sandbox: Sandbox, script: str, *words: str, stdin: bytes = b"") -> ExecResult:
    """Run one of our own small scripts in a sandbox. Raise `SandboxError` if it fails, because then the sandbox is at fault."""
    done = await sandbox.exec(["/bin/sh", "-c", script, "sh", *words], cwd="/", stdin=stdin, timeout_s=STEP_TIMEOUT_S)
    if done.timed_out or done.exit_code:
        stderr = done.stderr.decode("utf-8", "replace").strip()[-300:]
        failed = stderr or f"exit code {done.exit_code}"
        reason = f"it took longer than {STEP_TIMEOUT_S:g} s" if done.timed_out else failed
        raise SandboxError(f"could not prepare the grader's sandbox: {reason}")
    return done
