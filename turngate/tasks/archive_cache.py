"""Archives of tasks on this machine, named after their content: `$TURNGATE_CACHE/archives/<sha256>.tar`, unpacked in `<sha256>/`.

Projects do not share archives, because a rollout's order names the archive only by its SHA-256, and a project that knows the SHA-256 but
not the content must not get the content. Archives of the project `default` are in `archives/`, and those of other projects are in
`archives/projects/<name>/`.

Files are written under a temporary name and renamed, so that no process sees an incomplete file. Everything is checked before it is read:
an archive against its name, and an unpacked folder against its archive, because an agent in a local sandbox could have changed a grader in
the folder. An archive is refused if it is too large, or contains an absolute link or a link that could point outside it. The cache folder
may be removed while no rollout is running.

If the cache is larger than `TURNGATE_ARCHIVE_CACHE_GB`, the least recently used archives are removed. Archives in use are kept: every
rollout, in any process, holds a lock on its archive's `<sha256>.lock`. The modification time of the lock file is the time of the last use.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from turngate.agents.install import cache_folder
from turngate.errors import ConfigError, SandboxError, TaskError, TurngateError
from turngate.sandboxes.archive import CHUNK_BYTES, stays_inside, unpack
from turngate.store.projects import DEFAULT_PROJECT, check_project_name
from turngate.tasks.archive import PackedTask, lay_out, move_paths, unreadable
from turngate.tasks.host_env import add_host_values
from turngate.tasks.task import Task

log = logging.getLogger("turngate")
MAX_BYTES = 256_000_000  # maximum size of an archive
_SETTLED_NS = 2_000_000_000  # a later change cannot have the same `ctime` as a change that is older than this
_DIGEST = re.compile(r"[0-9a-f]{64}")
CACHE_VARIABLE = "TURNGATE_ARCHIVE_CACHE_GB"
_CACHE_GB = 20.0
_GRACE_S = 60.0  # how long an archive is kept after its last use, so that it is not removed before its rollout starts
_STALE_S = 86400.0
_NEW, _UNPACK = ".new-", ".unpack-"  # prefixes of temporary files and folders
_PROJECTS = "projects"  # contains a folder for each project except `default`


class ArchiveError(TurngateError):
    """A task's archive is missing on this machine, or cannot be stored or used. The task itself may be valid."""

    kind = "archive_error"


class ArchiveCache:
    """The archives of one project, in a folder that several processes may use at the same time."""

    def __init__(
        self,
        folder: Path | None = None,
        max_bytes: int = MAX_BYTES,
        cache_bytes: float | None = None,
        project: str = DEFAULT_PROJECT,
    ) -> None:
        """Open a cache. `max_bytes` limits the size of one archive, and `cache_bytes` that of all projects' archives and unpacked folders.

        If `cache_bytes` is None, the limit is read from the environment variable `TURNGATE_ARCHIVE_CACHE_GB`.
        """
        check_project_name(project, "project")
        self._root = folder or cache_folder() / "archives"
        self._folder = self._root if project == DEFAULT_PROJECT else self._root / _PROJECTS / project
        self._max_bytes = max_bytes
        self._cache_bytes = read_cache_bytes(os.environ) if cache_bytes is None else cache_bytes
        self._unpacking = threading.Lock()
        self._checked: dict[str, bytes] = {}  # the state of each folder when it last matched its archive

    def open_project(self, project: str) -> ArchiveCache:
        """Open another project's archives in the same folder. All projects share the limit on the total size of their archives."""
        return ArchiveCache(self._root, self._max_bytes, self._cache_bytes, project)

    def store(self, task: Task) -> PackedTask:
        """Pack a task and, if it has files, store an archive of them.

        Raise `TaskError` if its files cannot be read, exceed the size limit, or include an absolute link or a link that could point outside
        them. Raise `ArchiveError` if the archive cannot be written.
        """
        packed, files = lay_out(task)
        if not files.roots:
            return PackedTask(task=packed)

        def check(member: tarfile.TarInfo) -> None:
            if member.issym() and not stays_inside(member.name.count("/"), member.linkname):
                raise TaskError(
                    f"task: {task.id}: {member.name} is a link to {member.linkname}, which might not work on another machine; use a "
                    "relative link to one of the task's files, with '..' only at its start, or replace the link with a copy of its target",
                    param="task",
                )

        with self._write_file() as new:
            writer = _BoundedWriter(new, self._max_bytes, task.id)
            try:
                files.write(writer, check)  # type: ignore[arg-type]  # tarfile only writes to it
            except OSError as error:
                raise unreadable(task, error) from None
            digest = writer.digest.hexdigest()
            self._keep(new, digest)
        self._evict()
        return PackedTask(task=packed, archive=digest)

    def has(self, digest: str) -> bool:
        """Return whether an archive is in the cache, without checking whether the archive is damaged."""
        return self._path(digest).is_file()

    def read(self, digest: str) -> bytes:
        """Return the content of an archive, for sending it to another machine. Raise `ArchiveError` if it is missing or damaged."""
        with self._open(digest) as file:
            return file.read()

    def add(self, digest: str, data: bytes) -> None:
        """Store an archive that was received from another machine. Raise `ArchiveError` if it is too large or damaged."""
        if len(data) > self._max_bytes:
            raise ArchiveError(f"archive {digest[:12]} has {len(data)} bytes; the limit is {self._max_bytes}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise ArchiveError(f"archive {digest[:12]} arrived damaged: its content does not match its SHA-256")
        with self._write_file() as new:
            new.write(data)
            self._keep(new, digest)
        self._evict()

    @contextmanager
    def hold(self, digest: str) -> Iterator[None]:
        """Keep an archive and its folder in the cache while the block runs. Do nothing if `digest` is empty."""
        if not digest:
            yield
            return
        with _open_lock(self._path(digest)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(lock.fileno())
            try:
                yield
            finally:
                os.utime(lock.fileno())

    def open_task(self, packed: PackedTask, environment: Mapping[str, str]) -> Task:
        """Return a packed task with paths on this machine and values from `environment`. Unpack its archive if necessary."""
        task = add_host_values(packed.task, environment)
        root = self._unpack(packed.archive) if packed.archive else None

        def move(path: Path, _: str) -> Path:
            if root is None:
                raise ArchiveError(f"task {task.id} refers to {path}, but the rollout's order specifies no archive")
            if path.is_absolute() or ".." in path.parts:
                raise ArchiveError(
                    f"task {task.id} refers to {path}, but a packed task may refer only to paths inside its archive, without '..'"
                )
            return root / path

        def move_function(name: str, _: str) -> str:
            location, _, attribute = name.rpartition(":")
            return f"{move(Path(location), '')}:{attribute}" if location.endswith(".py") else name

        return move_paths(task, move, move_function)

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ArchiveError(f"{digest[:80]!r} is not a valid archive name: it must be a SHA-256 in hex")
        return self._folder / f"{digest}.tar"

    @contextmanager
    def _write_file(self) -> Iterator[IO[bytes]]:
        """Create a temporary file that `_keep` can move into place. If it was not moved, it is removed after the block."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_NEW, delete=False) as new:
                try:
                    yield new
                finally:
                    Path(new.name).unlink(missing_ok=True)
        except OSError as error:
            raise ArchiveError(f"{self._folder} cannot be written to ({error.strerror})") from None

    def _keep(self, new: IO[bytes], digest: str) -> None:
        new.flush()
        Path(new.name).rename(self._path(digest))

    @contextmanager
    def _open(self, digest: str) -> Iterator[IO[bytes]]:
        """Open an archive after checking that its content matches its name. Remove a damaged archive, so that it is fetched again."""
        path = self._path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise ArchiveError(f"archive {digest[:12]} is not in {self._folder}") from None
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read ({error.strerror})") from None
        with file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                path.unlink(missing_ok=True)
                raise ArchiveError(f"{path} was damaged and has been removed: its content did not match its SHA-256")
            file.seek(0)
            yield file

    # ── eviction ────────────────────────────────────────────────────────────────────────────────────────────────

    def _evict(self) -> None:
        """Remove the least recently used archives of all projects until the remaining ones fit the limit.

        Keep archives that are in use or were used recently.
        """
        now, entries = time.time(), []
        for folder in (self._root, *self._root.glob(f"{_PROJECTS}/*")):
            for path in folder.glob(".*"):  # left behind by a process that was killed
                if path.name.startswith((_NEW, _UNPACK)) and now - _last_use(path) > _STALE_S:
                    _remove(path)
            for path in folder.glob("*.tar"):
                if _DIGEST.fullmatch(path.stem):
                    used = max(_last_use(path), _last_use(path.with_suffix(".lock")))
                    entries.append((used, path, _measure(path)))
        size = sum(entry[2] for entry in entries)
        for used, path, freed in sorted(entries):
            if size <= self._cache_bytes or now - used < _GRACE_S:
                return
            try:
                if _remove_unused(path):
                    size -= freed
            except OSError as error:
                log.warning("%s cannot be removed from the cache (%s); check its permissions", path, error.strerror)

    # ── unpacking ───────────────────────────────────────────────────────────────────────────────────────────────

    def _unpack(self, digest: str) -> Path:
        """Return the folder with an archive's content. If the folder is missing or differs from the archive, unpack the archive."""
        folder = self._folder / digest
        before = _read_state(folder)
        if before is not None and self._checked.get(digest) == before:
            return folder
        with self._open(digest) as file:
            if not _matches(file, folder):
                with self._unpacking:
                    if not _matches(file, folder):  # another thread may have been faster
                        self._replace(file, folder)
            elif before is not None:
                self._checked[digest] = before
        return folder

    def _replace(self, file: IO[bytes], folder: Path) -> None:
        scratch = Path(tempfile.mkdtemp(prefix=_UNPACK, dir=self._folder))
        try:
            file.seek(0)
            if skipped := unpack(file, scratch / "new", limit=self._max_bytes):
                raise ArchiveError(f"archive {folder.name[:12]} cannot be unpacked completely: {'; '.join(skipped)}")
            _set_modes(file, scratch / "new")
            if folder.exists():
                folder.rename(scratch / "old")
            (scratch / "new").rename(folder)
        except SandboxError as error:
            raise ArchiveError(f"archive {folder.name[:12]} cannot be unpacked: {error.message}") from None
        except OSError as error:
            if not _matches(file, folder):  # otherwise another process was faster
                raise ArchiveError(f"{folder} cannot be written to ({error.strerror})") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def read_cache_bytes(environment: Mapping[str, str]) -> float:
    """Return the maximum size of the cache in bytes. A value of 0 in the environment means no limit."""
    text = environment.get(CACHE_VARIABLE) or str(_CACHE_GB)
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not size >= 0:
        raise ConfigError(
            f"{CACHE_VARIABLE} must be 0 (no limit) or a positive number of gigabytes, such as 20, not {text!r}",
            param=CACHE_VARIABLE,
        )
    return size * 1e9 or math.inf


def _remove_unused(archive: Path) -> bool:
    """Remove an archive and its unpacked folder. Return False if a rollout is using them."""
    with _open_lock(archive) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        archive.unlink(missing_ok=True)
        _remove(archive.with_suffix(""))
        return True


def _open_lock(archive: Path) -> IO[bytes]:
    path = archive.with_suffix(".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written ({error.strerror})") from None


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _measure(archive: Path) -> int:
    """Return the approximate disk usage of an archive and its unpacked folder. The folder is assumed to be as large as the archive."""
    try:
        return archive.stat().st_size * (2 if archive.with_suffix("").is_dir() else 1)
    except OSError:
        return 0  # another process has removed it


def _remove(path: Path) -> None:
    """Remove a folder or a file, as far as possible. What remains does not prevent the use of other archives."""
    if path.is_dir() and not path.is_symlink():
        for place, folders, _ in os.walk(path):  # a task may have read-only folders
            for name in folders:
                if not (folder := Path(place, name)).is_symlink():
                    with suppress(OSError):
                        folder.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


class _BoundedWriter:
    """Writes data to a file and hashes it.

    Raises `TaskError` if the data exceeds `limit` bytes, and `ArchiveError` if the file cannot be written.
    """

    def __init__(self, file: IO[bytes], limit: int, task: str) -> None:
        self._file, self._limit, self._task = file, limit, task
        self._size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._size += len(data)
        if self._size > self._limit:
            raise TaskError(
                f"task: {self._task}: its files exceed {self._limit / 1e6:.0f} MB, so the task cannot be sent to another "
                "machine; put large files into an image",
                param="task",
            )
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:  # not the task's fault
            raise ArchiveError(f"{self._file.name} cannot be written ({error.strerror})") from None

    def tell(self) -> int:
        return self._size


def _read_members(file: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            yield tar, member


def _set_modes(file: IO[bytes], folder: Path) -> None:
    """Set the permissions that `unpack` does not preserve. The folder is new, so no other process has changed it."""
    for _, member in _read_members(file):
        if member.isreg() or member.isdir():
            (folder / member.name).chmod(member.mode)


def _read_state(folder: Path) -> bytes | None:
    """Return a hash of a folder's state, without reading its files. Every change in the folder changes the hash.

    The hash includes the change time of each file (`ctime`), which programs cannot set. The clock may be coarse, so two changes in quick
    succession can have the same time. Therefore, return None if the folder has just changed. Also return None if the folder cannot be read.
    """
    settled_ns = time.time_ns() - _SETTLED_NS
    state = hashlib.sha256()
    waiting = [str(folder)]
    try:
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_ctime_ns > settled_ns:
                        return None
                    line = (entry.path, status.st_ino, status.st_mode, status.st_size, status.st_ctime_ns)
                    state.update(repr(line).encode())
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    except OSError:
        return None
    return state.digest()


def _matches(file: IO[bytes], folder: Path) -> bool:
    """Return whether a folder contains exactly the content of an archive."""
    if not folder.is_dir():
        return False
    expected: set[Path] = set()
    for tar, member in _read_members(file):
        path = folder / member.name
        expected.update((path, *(parent for parent in path.parents if folder in parent.parents)))
        if not _is_same(tar, member, path):
            return False
    found = {Path(place, name) for place, folders, names in os.walk(folder) for name in (*folders, *names)}
    return found == expected


def _is_same(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bool:
    try:
        status = path.lstat()
        if member.issym():
            return stat.S_ISLNK(status.st_mode) and str(path.readlink()) == member.linkname
        if stat.S_IMODE(status.st_mode) != member.mode:
            return False
        if member.isdir():
            return stat.S_ISDIR(status.st_mode)
        content = tar.extractfile(member)
        if content is None or not stat.S_ISREG(status.st_mode) or status.st_size != member.size:
            return False
        with path.open("rb") as file:
            while chunk := content.read(CHUNK_BYTES):
                if file.read(CHUNK_BYTES) != chunk:
                    return False
        return True
    except OSError:
        return False
