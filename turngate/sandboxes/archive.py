"""Folders into tar streams and back. What comes out of a sandbox was written by an agent, so nothing in it is believed.

Unpacking opens every folder on the way by itself and follows no link, ever; links are made last, and only those that cannot
lead outside. (`tarfile`'s own filter is not enough: releases of Python in use let crafted link chains through.) Nor can a small
stream become much on the host: hard links stay links, and headers that `tarfile` would hold in memory have a limit.
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
MAX_HEADER_BYTES = 1_000_000  # bytes of a name or of other extended headers
MAX_LINK_BYTES = 4096  # bytes that a link may point to; Linux has no longer ones
MAX_PATH_BYTES = 3000  # bytes of a path: a longer one could not be packed again, here or in another sandbox
MAX_DEPTH = 200  # folders in each other: more is nobody's work, and takes forever to walk
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 600.0
MAX_NAMED = 20  # of what was left out
EXTENDED_HEADERS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
REFUSED_TYPES = (tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE)  # no `tar -c` writes them, and they grow in memory


def pack(folder: Path, into: IO[bytes], exclude: Container[str] = ()) -> None:
    """The content of a folder. Links stay links: what they point to on this machine is nobody's business in there."""

    if not folder.is_dir():
        raise SandboxError(f"{folder} is not a folder")
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
        waiting = ["."]  # no recursion (`tar.add` has it): folders may be deep
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
    """Refuses what would grow in memory, before `tarfile` reads it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if (
            member.type in REFUSED_TYPES
            or (member.type in EXTENDED_HEADERS and member.size > MAX_HEADER_BYTES)
            or member.size < 0
        ):
            raise SandboxTooLarge("the folder did not come through whole: its stream is not one that tar writes")
        return member

    def _proc_gnusparse_10(self, *_: object) -> NoReturn:  # it reads a list of any length
        raise SandboxError("the folder did not come through whole: its stream is not one that tar writes")


class _SkippedFiles:
    """What could not be had: the first few by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.count = 0

    def add(self, name: str, why: str) -> None:
        self.count += 1
        if self.count <= MAX_NAMED:
            self.names.append(f"{name[:200]}: {why}")

    def told(self) -> tuple[str, ...]:
        more = (f"and {self.count - MAX_NAMED} more",) if self.count > MAX_NAMED else ()
        return (*self.names, *more)


def unpack(
    stream: IO[bytes],
    folder: Path,
    *,
    limit: int,
    within_s: float = TIMEOUT_S,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Into a folder of the host, which is made where it is missing. Devices and pipes are left out, and links that lead outside.

    Returns what could not be had. Raises nothing but `SandboxError`. `stopped`: asked all the time whether to give up.
    """
    deadline = time.monotonic() + within_s

    def go_on() -> None:
        if stopped() or time.monotonic() > deadline:
            raise SandboxError(f"the folder took longer than {within_s:.0f} s to copy")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _unpack(stream, root, limit, go_on)
        finally:
            os.close(root)
    except OSError as error:
        raise SandboxError(f"the folder cannot be written: {error.strerror or error}") from error
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise SandboxError(f"the folder did not come through whole: {error or type(error).__name__}") from error


def _unpack(stream: IO[bytes], root: int, limit: int, go_on: Callable[[], None]) -> tuple[str, ...]:
    links: dict[tuple[str, ...], str] = {}
    special: set[tuple[str, ...]] = set()
    left = _SkippedFiles()
    size = count = 0
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep them all
            go_on()
            size, count = size + member.size, count + 1
            if member.size < 0 or size > limit or count > MAX_ENTRIES:
                raise SandboxTooLarge(
                    f"the folder is larger than {limit} bytes, or has more than {MAX_ENTRIES} entries"
                )
            if len(os.fsencode(member.name)) > MAX_PATH_BYTES:
                left.add(member.name, "too long a path")
                continue
            path = _split_path(member.name)
            if len(path) > MAX_DEPTH:
                left.add(member.name, f"more than {MAX_DEPTH} folders deep")
            elif member.isdir():
                os.close(_open_folder(root, path))
            elif member.issym():
                if len(member.linkname) > MAX_LINK_BYTES:
                    left.add(member.name, "points to too long a path")
                else:
                    links[tuple(path)] = member.linkname
            elif member.islnk():
                source = _split_path(member.linkname)
                if tuple(source) in links:
                    links[tuple(path)] = links[tuple(source)]
                elif tuple(source) in special:
                    special.add(tuple(path))
                elif why := _make_hard_link(root, source, path):
                    left.add(member.name, why)
            elif member.isfile() and (content := tar.extractfile(member)) is not None:
                _write_file(root, path, content, member.mode, go_on)
            else:
                special.add(tuple(path))
                left.add(member.name, "neither a file nor a folder")
    for place, target in links.items():
        if place and _stays_inside(len(place) - 1, target):
            _make_symlink(root, list(place), target)
        else:
            left.add("/".join(place), "a link that leads out of the folder")
    return left.told()


def is_complete(tar: IO[bytes]) -> bool:
    """Whether a tar file has its end: then whoever wrote it went on after what it complained about."""
    end = tar.seek(0, os.SEEK_END)
    if end < 1024 or end % 512:
        return False
    tar.seek(end - 1024)
    return tar.read(1024) == bytes(1024)


def parse_tar_errors(said: bytes) -> tuple[str, ...]:
    """tar's own words about what it left out."""
    left = _SkippedFiles()
    for line in said.decode(errors="replace").splitlines():
        text = line.strip().removeprefix("tar: ")
        if text and not text.startswith("Exiting with failure"):
            name, _, why = text.partition(": ")
            left.add(name, why or "left out")
    return left.told()


def _split_path(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise SandboxError("a file's name leads out of its folder")
    return parts


def _stays_inside(depth: int, target: str) -> bool:
    """Whether a link that lies `depth` folders deep stays inside: up by real folders only, and then down."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and ups <= depth and ".." not in parts[ups:]


def _open_folder(root: int, path: list[str]) -> int:
    """A descriptor of the folder at `path`, made where it is missing."""
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
    """A second name for a file that is there. Why not, where that cannot be."""
    if not source or not path:
        return "a link without a name"
    if len(source) > MAX_DEPTH:
        return "a link to something that was left out"
    there = here = -1
    try:
        there, here = _open_folder(root, source[:-1]), _open_folder(root, path[:-1])
        # Regular files only: the same symbolic link may lead outside from another place.
        if not stat.S_ISREG(os.stat(source[-1], dir_fd=there, follow_symlinks=False).st_mode):
            return "a link to something that is no file"
        if source != path:
            _remove_file(path[-1], here)
            os.link(source[-1], path[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
    except OSError as error:
        return f"cannot be linked: {error.strerror}"
    finally:
        for fd in (there, here):
            if fd >= 0:
                os.close(fd)
    return ""


def _remove_file(name: str, folder: int) -> None:
    """What an earlier download left. Never written into: it may have other names."""
    try:
        if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _write_file(root: int, path: list[str], content: IO[bytes], mode: int, go_on: Callable[[], None]) -> None:
    if not path:
        raise SandboxError("a file has no name")
    folder = _open_folder(root, path[:-1])
    try:
        _remove_file(path[-1], folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(path[-1], flags, mode & 0o755 | 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(fd, "wb") as file:
        while piece := content.read(CHUNK_BYTES):
            go_on()
            file.write(piece)
        os.fchmod(file.fileno(), mode & 0o755 | 0o600)


def _make_symlink(root: int, path: list[str], target: str) -> None:
    folder = _open_folder(root, path[:-1])
    try:
        os.symlink(target, path[-1], dir_fd=folder)
    except FileExistsError:  # of an earlier download
        if os.readlink(path[-1], dir_fd=folder) != target:
            raise
    finally:
        os.close(folder)
