"""Pack a task for another machine: its fields as data, and its files as a tar archive named by the SHA-256 of its content.

An archive is deterministic: the same files give the same bytes, whatever their owner, age or location. A symbolic link in a folder stays
a link. Devices, pipes and sockets are left out, as they are when files are uploaded to a sandbox. `archive_cache.py` stores and unpacks
archives.

Values that a task takes from this machine's environment variables (`${NAME}` in a Harbor task) are not packed. The machine that unpacks
the task reads the variables from its own environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from turngate.errors import TaskError
from turngate.tasks.grading.function import find_function_file
from turngate.tasks.host_env import remove_host_values
from turngate.tasks.task import Function, Grader, Rubric, Script, Task, change_graders

TASK_FOLDER = "task"  # the task's own folder, if the archive contains all of it


class PackedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task that does not depend on this machine. The paths in `task` are relative to the archive's root."""

    task: Task
    archive: str = ""  # the archive's SHA-256 in hex; empty if the task has no files


class ArchiveFiles:
    """The files and folders to put into an archive. Each has a name in the archive and a path on this machine."""

    def __init__(self) -> None:
        self.roots: dict[str, Path] = {}

    def add(self, path: Path, name: str) -> Path:
        """Add a file or folder, unless it or a folder that contains it was added before. Return its path in the archive."""
        path = path.absolute()
        for place, root in self.roots.items():
            if path.is_relative_to(root) and ".." not in (inside := path.relative_to(root)).parts:
                return Path(place) / inside
        self.roots[name] = path
        return Path(name)

    def write(self, into: IO[bytes], check: Callable[[tarfile.TarInfo], None] = lambda member: None) -> None:
        """Write the archive to `into`. Call `check` with each member before it is written. Raise `OSError` if a file cannot be read."""
        with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, root in self.roots.items():
                for member, path in _walk(name, root):
                    check(member)
                    if member.isreg():
                        _add_file(tar, member, path)
                    else:
                        tar.addfile(member)

    def digest(self) -> str:
        """Return the SHA-256 of the archive without storing the archive."""
        hasher = _Hasher()
        self.write(hasher)  # type: ignore[arg-type]  # tarfile only writes to it
        return hasher.digest.hexdigest()


class _Hasher:
    """A writable file that keeps only the hash and the size of its content."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size


def pack_task(task: Task) -> PackedTask:
    """Pack a task, but compute only the digest of its archive. This reads all of the task's files."""
    packed, files = lay_out(task)
    if not files.roots:
        return PackedTask(task=packed)
    try:
        return PackedTask(task=packed, archive=files.digest())
    except OSError as error:
        raise unreadable(task, error) from None


class TaskPacker:
    """Packs tasks, and remembers the results, so that each task is packed only once."""

    def __init__(self) -> None:
        self._packed: dict[str, asyncio.Future[PackedTask]] = {}  # by task id

    async def pack(self, task: Task) -> PackedTask:
        """Pack a task in a thread. If packing fails, the next call tries again."""
        packing = self._packed.get(task.id)
        if packing is None:
            packing = self._packed[task.id] = asyncio.ensure_future(asyncio.to_thread(pack_task, task))
        try:
            return await asyncio.shield(packing)
        except Exception:
            self._packed.pop(task.id, None)
            raise


def unreadable(task: Task, error: OSError) -> TaskError:
    """Build the error for a task file that cannot be read."""
    name = error.filename or "one of its files"
    return TaskError(f"task: {task.id}: {name} cannot be read ({error.strerror or error})", param="task")


def lay_out(task: Task) -> tuple[Task, ArchiveFiles]:
    """Assign a path in the archive to each of the task's files. Return the task with these paths, and the files.

    If a grading function is in the task's folder, the archive contains the whole folder, because the function may read other files in it.
    """
    files = ArchiveFiles()
    folder = Path(task.source).absolute() if task.source else None
    modules = (find_function_file(task, name) for name in function_names(task.grader))
    if folder is not None and any(file is not None and folder in file.absolute().parents for file in modules):
        files.add(folder, TASK_FOLDER)

    def move_function(name: str, place: str) -> str:
        file = find_function_file(task, name)
        return name if file is None else f"{files.add(file, f'{place}/{file.name}')}:{name.rpartition(':')[2]}"

    moved = move_paths(remove_host_values(task), files.add, move_function)
    return msgspec.structs.replace(moved, source=""), files


def move_paths(task: Task, move: Callable[[Path, str], Path], move_function: Callable[[str, str], str]) -> Task:
    """Return a copy of the task in which `move` has changed the paths, and `move_function` the names of grading functions.

    The second argument of `move` is a name for the path in the archive. The second argument of `move_function` is a name for the archive
    folder that is to contain the function's file.
    """

    def move_script(script: Script, name: str) -> Script:
        return script if script.files is None else msgspec.structs.replace(script, files=move(script.files, name))

    def rename_function(function: Function, name: str) -> Function:
        return msgspec.structs.replace(function, name=move_function(function.name, name))

    solution = task.solution
    if solution is not None and solution.files is not None:
        solution = msgspec.structs.replace(solution, files=move(solution.files, "solution"))
    return msgspec.structs.replace(
        task,
        files=None if task.files is None else move(task.files, "files"),
        dockerfile=None if task.dockerfile is None else move(task.dockerfile, "environment"),
        grader=change_graders(task.grader, move_script, rename_function),
        solution=solution,
    )


def function_names(grader: Grader | None) -> list[str]:
    """Return the names of all functions in a grader, such as `file.py:grade`."""
    graders = [part.grader for part in grader.parts] if isinstance(grader, Rubric) else [grader]
    return [one.name for one in graders if isinstance(one, Function)]


# ── members of an archive ───────────────────────────────────────────────────────────────────────────────────────────


def _walk(name: str, root: Path) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    """Yield the members of a file or folder, each folder before its content. Folders may be deeply nested, so this is not recursive."""
    waiting = [(name, root, root.stat())]  # the root may be a link
    while waiting:
        name, path, status = waiting.pop()
        member = _build_member(name, path, status)
        if member is None:
            continue
        yield member, path
        if member.isdir():
            with os.scandir(path) as entries:
                below = sorted(entries, key=lambda entry: entry.name, reverse=True)
            waiting += [(f"{name}/{one.name}", path / one.name, one.stat(follow_symlinks=False)) for one in below]


def _build_member(name: str, path: Path, status: os.stat_result) -> tarfile.TarInfo | None:
    member = tarfile.TarInfo(name)
    if stat.S_ISREG(status.st_mode):
        member.size, member.mode = status.st_size, status.st_mode & 0o777 | 0o400
    elif stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, status.st_mode & 0o777 | 0o700
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.mode, member.linkname = tarfile.SYMTYPE, 0o777, str(path.readlink())
    else:
        return None
    return member


def _add_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    with path.open("rb") as file:
        member.size = os.fstat(file.fileno()).st_size
        tar.addfile(member, file)
