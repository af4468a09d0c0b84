"""A fresh sandbox for a grader, and the agent's work laid down in it. No agent has ever been there.

    async with opened(task, ground) as sandbox:      # the task as an agent finds it
        notes = await lay(sandbox, work.folder)      # and now as the agent left it

`script.py`, `swe.py` and `function.py` stand on this. Whatever happens, the sandbox is removed.
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

TESTS, LOGS = "/tests", "/logs"  # where Harbor has them
OUTPUT_LIMIT = 32_000_000  # bytes of a grader's output: its beginning and its end
DEFAULT_PIDS = 1024  # the most processes of a grader, where nobody says
CREATE_TIMEOUT_S = 900.0  # images may have to be built
STEP_TIMEOUT_S = 600.0  # for one of our own steps in the sandbox
PYTHON_CACHE = "__pycache__"
SCRATCH_KIND = "grading"  # the kind of our folders on the host
SPARE_LIFE_S = 1800.0  # of a sandbox's life, beyond what the grader has
SYSTEM_PATH = 'PATH="/usr/bin:/bin:/usr/sbin:/sbin:$PATH"'  # first: a PATH may lead into the agent's work

# $1 the working folder, $2 our own, $3 what of the working folder stays as it is.
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
# Links of the task's own that lead out of the folder are in no work; they are put back where nothing else lies.
_RESTORE = f"""{SYSTEM_PATH}
cd -- "$1" && tar -xof "$2/held.tar" || exit 1
tar -xokf "$2/links.tar" 2>/dev/null
rm -rf -- "$2"
"""


_swept: list[int] = []  # once per process: how many there were


@asynccontextmanager
async def open_sandbox(task: Task, ground: GradingEnvironment, *, life_s: float) -> AsyncIterator[Sandbox]:
    """A sandbox without a network, with the task laid out in it. `life_s`: what the grader may take there."""
    backend = ground.backend
    needed = staging.build_sandbox_spec(task, backend, image=ground.image, resources=ground.resources)
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
        raise SandboxError(f"a sandbox to grade in was not made within {CREATE_TIMEOUT_S:.0f} s") from None
    try:
        await staging.upload_files(sandbox, task)
        await staging.run_setup(sandbox, task)
        yield sandbox
    finally:
        await run_to_completion(_stop_sandbox(sandbox))


async def _stop_sandbox(sandbox: Sandbox) -> None:
    """What cannot be cleaned up is told, but no grade changes for that."""
    try:
        await sandbox.stop()
    except SandboxError as error:
        log.warning("a grader's sandbox could not be removed: %s", error.message)


def tests_and_logs(sandbox: Sandbox, ground: GradingEnvironment) -> tuple[str, str]:
    """Where tests and logs lie: /tests and /logs, but for a sandbox that shares the host's file system."""
    if ground.backend.relocates:
        return TESTS, LOGS
    return f"{sandbox.home}/grading{TESTS}", f"{sandbox.home}/grading{LOGS}"


async def lay_work(
    sandbox: Sandbox, folder: Path, *, exclude: Collection[str] = (), held: Sequence[str] = ()
) -> tuple[str, ...]:
    """The working folder becomes what the agent left: deletions too, and all but `.git` where the work has none.

    Python's caches are no work, and may not be of it: one that was made in the second in which its source was changed is taken for the
    new source's, if that is as long as the old one was. A right answer would be graded by the wrong one's code.

    `exclude`: what of the work stays behind. `held`: files of the fresh folder that stay as they are. Returns what could not be laid.
    """
    ours = await upload_private_files(sandbox, {"held": b"".join(os.fsencode(f"./{path}") + b"\0" for path in held)})
    spared = "/" if (folder / GIT).exists() and GIT not in exclude else GIT  # no name is "/"
    rest = await run_step(sandbox, _CLEAR, sandbox.workdir, ours, spared)
    left_behind = {*exclude, *held, *await asyncio.to_thread(_find_blocking_paths, folder, held)}
    left_behind |= await asyncio.to_thread(_find_caches, folder)
    notes: tuple[str, ...] = ()
    try:
        await sandbox.upload(folder, sandbox.workdir, exclude=left_behind)
    except SandboxGone:
        raise
    except SandboxError:
        # Some of the task's files belong to another user: they could not be removed, and the agent could not change them either.
        if not rest.stdout.strip():
            raise
        await sandbox.upload(folder, f"{ours}/work", exclude=left_behind)
        copied = await run_step(sandbox, _COPY, sandbox.workdir, ours)
        notes = format_names([f"{line} (stays as the task has it)" for line in parse_tar_errors(copied.stderr)])
    await run_step(sandbox, _RESTORE, sandbox.workdir, ours)
    return notes


def _find_blocking_paths(folder: Path, held: Sequence[str]) -> set[str]:
    """What of the work is no folder, and has to be one for files that are held."""
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
    """A folder of the host's for what a grader needs on the way. What a killed process left of them is removed by the next."""
    if not _swept:
        _swept.append(await folders.sweep_folders(None, SCRATCH_KIND))
    made = await asyncio.to_thread(folders.create_folder, None, SCRATCH_KIND, "files")
    try:
        yield made / "files"
    finally:
        await run_to_completion(asyncio.to_thread(supervisor.remove_folder, str(made)))


async def upload_private_files(sandbox: Sandbox, files: Mapping[str, bytes]) -> str:
    """Small files of our own, in one go. The folder they are in, which nobody knows before."""
    ours = f"{sandbox.home}/.{secrets.token_hex(8)}"
    async with scratch_folder() as folder:
        await asyncio.to_thread(_write_files, folder, files)
        await sandbox.upload(folder, ours)
    return ours


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


async def run_step(sandbox: Sandbox, script: str, *words: str, stdin: bytes = b"") -> ExecResult:
    """A small script of our own. That it fails is the sandbox's fault."""
    done = await sandbox.exec(["/bin/sh", "-c", script, "sh", *words], cwd="/", stdin=stdin, timeout_s=STEP_TIMEOUT_S)
    if done.timed_out or done.exit_code:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise SandboxError(f"the work could not be laid down: {said or f'exit code {done.exit_code}'}")
    return done
