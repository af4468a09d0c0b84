"""Pack folders into tar streams and unpack them. The content of a sandbox is written by an agent, so it is not trusted.

Unpacking opens each folder of a path separately and never follows a link. Symbolic links are created last, and only if they cannot point
outside the folder. (`tarfile`'s own filter is not enough: in some supported Python releases, it accepts crafted chains of links.) A small
stream cannot expand into large data on the host: hard links stay links, zeros become holes, and the size of the headers that `tarfile`
keeps in memory is limited.
"""

from __future__ import annotations

import os
import stat
import tarfile
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import IO, NoReturn

from turngate.errors import SandboxError, SandboxTooLarge

MAX_ENTRIES = 1_000_000
MAX_HEADER_BYTES = 1_000_000  # of an extended header, such as a long name
MAX_LINK_BYTES = 4096  # of a link's target; the maximum on Linux
MAX_PATH_BYTES = 3000  # a longer path could not be packed again, here or in a sandbox
MAX_DEPTH = 200  # of nested folders; real work is shallower, and deeper trees take very long to walk
CHUNK_BYTES = 1 << 16
TIMEOUT_S = 600.0
MAX_NAMED = 20  # how many skipped files are named; the others are only counted
EXTENDED_HEADERS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
# `tar -c` never writes these types, and they can use a lot of memory.
REFUSED_TYPES = (tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE)
_UNSUPPORTED_HEADER = "the folder was not copied completely: its tar stream has a header that is not supported"


def pack(folder: Path, into: IO[bytes], exclude: Container[str] = ()) -> None:
    """Pack the content of a folder into the file `into`, except for the paths in `exclude`, which are relative to the folder.

    Symbolic links stay links, so files outside the folder are not copied. Devices, pipes and sockets are left out.
    """
    if not folder.is_dir():
        raise SandboxError(f"{folder} cannot be copied, because it is not a folder")
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
        waiting = ["."]  # a loop, not a recursion like `tar.add`, because folders may be deeply nested
        while waiting:
            name = waiting.pop()
            member = None if name.removeprefix("./") in exclude else _sanitize(tar.gettarinfo(folder / name, name))
            if member is None:
                continue
            if not member.isreg():
                tar.addfile(member)
            else:
                with (folder / name).open("rb") as content:
                    tar.addfile(member, content)
            if member.isdir():
                below = sorted((entry.name for entry in (folder / name).iterdir()), reverse=True)
                waiting += [f"{name}/{entry}" for entry in below]


def _sanitize(member: tarfile.TarInfo | None) -> tarfile.TarInfo | None:
    if member is None or not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= 0o777
    return member


class _Member(tarfile.TarInfo):
    """A member of a tar stream. If reading it could use too much memory, it is rejected as soon as its header is parsed."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if (
            member.type in REFUSED_TYPES
            or (member.type in EXTENDED_HEADERS and member.size > MAX_HEADER_BYTES)
            or member.size < 0
        ):
            raise SandboxTooLarge(_UNSUPPORTED_HEADER)
        return member

    def _proc_gnusparse_10(self, *_: object) -> NoReturn:  # the original reads a list of any length
        raise SandboxTooLarge(_UNSUPPORTED_HEADER)


class _SkippedFiles:
    """Counts the files that were not copied. For the first few, it also keeps the name and the reason."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.count = 0

    def add(self, name: str, why: str) -> None:
        self.count += 1
        if self.count <= MAX_NAMED:
            self.names.append(f"{name[:200]}: {why}")

    def summary(self) -> tuple[str, ...]:
        more = (f"and {self.count - MAX_NAMED} more",) if self.count > MAX_NAMED else ()
        return (*self.names, *more)


def unpack(
    stream: IO[bytes],
    folder: Path,
    *,
    limit: int,
    timeout_s: float = TIMEOUT_S,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Unpack a tar stream into a host folder, which is created if necessary. Return the skipped entries with reasons.

    Skip devices, pipes, symbolic links that could point outside the folder, hard links that cannot be created, and entries whose path or
    link target is too long or too deep. At most `MAX_NAMED` skipped entries are named; the others are only counted.

    Raise `SandboxTooLarge` if the content exceeds `limit` bytes or `MAX_ENTRIES` entries, or if a header is not supported. Raise
    `SandboxError` if the stream is malformed, after a file-system error, after `timeout_s` seconds, or when `is_cancelled`, which is
    polled, returns true.
    """
    deadline = time.monotonic() + timeout_s

    def check_deadline() -> None:
        if is_cancelled():
            raise SandboxError("copying the folder was cancelled")
        if time.monotonic() > deadline:
            raise SandboxError(f"the folder took longer than {timeout_s:.0f} s to copy")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _unpack(stream, root, limit, check_deadline)
        finally:
            os.close(root)
    except OSError as error:
        raise SandboxError(f"cannot copy the folder to {folder}: {error.strerror or error}") from error
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise SandboxError(f"the folder was not copied completely: {str(error) or type(error).__name__}") from error


def _unpack(stream: IO[bytes], root: int, limit: int, check_deadline: Callable[[], None]) -> tuple[str, ...]:
    links: dict[tuple[str, ...], str] = {}
    special: set[tuple[str, ...]] = set()
    skipped = _SkippedFiles()
    size = count = 0
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all members in memory
            check_deadline()
            size, count = size + member.size, count + 1
            if member.size < 0 or size > limit or count > MAX_ENTRIES:
                raise SandboxTooLarge(
                    f"the folder is larger than {limit} bytes, or has more than {MAX_ENTRIES} entries"
                )
            if len(os.fsencode(member.name)) > MAX_PATH_BYTES:
                skipped.add(member.name, "the path is too long")
                continue
            path = _split_path(member.name)
            if len(path) > MAX_DEPTH:
                skipped.add(member.name, f"more than {MAX_DEPTH} folders deep")
            elif member.isdir():
                os.close(_open_folder(root, path))
            elif member.issym():
                if len(member.linkname) > MAX_LINK_BYTES:
                    skipped.add(member.name, "the link's target is too long")
                else:
                    links[tuple(path)] = member.linkname
            elif member.islnk():
                source = _split_path(member.linkname)
                if tuple(source) in links:
                    links[tuple(path)] = links[tuple(source)]
                elif tuple(source) in special:
                    special.add(tuple(path))
                elif why := _make_hard_link(root, source, path):
                    skipped.add(member.name, why)
            elif member.isfile() and (content := tar.extractfile(member)) is not None:
                _write_file(root, path, content, member.mode, check_deadline)
            else:
                special.add(tuple(path))
                skipped.add(member.name, "not a file or folder")
    for place, target in links.items():
        if place and stays_inside(len(place) - 1, target):
            _make_symlink(root, list(place), target)
        else:
            skipped.add("/".join(place), "the link could point outside the folder")
    return skipped.summary()


def is_complete(tar: IO[bytes]) -> bool:
    """Return whether a tar file ends with the end marker. If so, tar continued to the end despite any errors that it reported."""
    end = tar.seek(0, os.SEEK_END)
    if end < 1024 or end % 512:
        return False
    tar.seek(end - 1024)
    return tar.read(1024) == bytes(1024)


def parse_tar_errors(stderr: bytes) -> tuple[str, ...]:
    """List the files that tar reported as left out, with reasons."""
    skipped = _SkippedFiles()
    for line in stderr.decode(errors="replace").splitlines():
        text = line.strip().removeprefix("tar: ")
        if text and not text.startswith("Exiting with failure"):
            name, _, reason = text.partition(": ")
            skipped.add(name, reason or "left out")
    return skipped.summary()


def _split_path(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise SandboxError("the folder contains an entry whose path is absolute or contains '..' or a NUL character")
    return parts


def stays_inside(depth: int, target: str) -> bool:
    """Return whether a link `depth` folders below the root stays inside the root.

    The target must be relative, and may contain `..` only at the start. For other targets, return False.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and ups <= depth and ".." not in parts[ups:]


def _open_folder(root: int, path: list[str]) -> int:
    """Open the folder at `path` and return its descriptor. Create missing folders."""
    here = os.dup(root)
    for part in path:
        try:
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=here)
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _make_hard_link(root: int, source: list[str], path: list[str]) -> str:
    """Create a hard link to an extracted file. Return why that is impossible, or "" on success."""
    if not source or not path:
        return "the link or its target has no name"
    if len(source) > MAX_DEPTH:
        return "the link's target was left out"
    there = here = -1
    try:
        there, here = _open_folder(root, source[:-1]), _open_folder(root, path[:-1])
        # Regular files only, because a symbolic link could point outside from its new location.
        if not stat.S_ISREG(os.stat(source[-1], dir_fd=there, follow_symlinks=False).st_mode):
            return "the link's target is not a file"
        if source != path:
            _remove_file(path[-1], here)
            os.link(source[-1], path[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
    except OSError as error:
        return f"the link cannot be created: {error.strerror}"
    finally:
        for fd in (there, here):
            if fd >= 0:
                os.close(fd)
    return ""


def _remove_file(name: str, folder: int) -> None:
    """Remove an existing regular file, such as one from an earlier download. Overwriting it would also change its hard links."""
    try:
        if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _write_file(root: int, path: list[str], content: IO[bytes], mode: int, check_deadline: Callable[[], None]) -> None:
    if not path:
        raise SandboxError("a file in the folder has no name")
    folder = _open_folder(root, path[:-1])
    try:
        _remove_file(path[-1], folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(path[-1], flags, mode & 0o755 | 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(fd, "wb") as file:
        while chunk := content.read(CHUNK_BYTES):
            check_deadline()
            write_sparse(file, chunk)
        file.truncate()
        os.fchmod(file.fileno(), mode & 0o755 | 0o600)


def write_sparse(file: IO[bytes], data: bytes) -> None:
    """Append data to a file, but leave a hole if the data is all zeros, so that an agent's sparse file stays small on the host.

    After the last call, the caller must truncate the file at its current position.
    """
    if data.count(0) == len(data):
        file.seek(len(data), os.SEEK_CUR)
    else:
        file.write(data)


def _make_symlink(root: int, path: list[str], target: str) -> None:
    folder = _open_folder(root, path[:-1])
    try:
        os.symlink(target, path[-1], dir_fd=folder)
    except FileExistsError:  # from an earlier download
        if os.readlink(path[-1], dir_fd=folder) != target:
            raise
    finally:
        os.close(folder)
