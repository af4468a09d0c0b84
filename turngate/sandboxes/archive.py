"""Folders into tar streams and back. What comes out of a sandbox was written by an agent, so nothing in it is believed.

Unpacking opens every folder on the way by itself and follows no link, ever; links are made last, and only those that cannot
lead outside. (`tarfile`'s own filter is not enough: releases of Python in use let crafted link chains through.)
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import IO

from turngate.errors import SandboxError

MEMBERS = 1_000_000


def pack(folder: Path, into: IO[bytes]) -> None:
    """The content of a folder. Links stay links: what they point to on this machine is nobody's business in there."""
    if not folder.is_dir():
        raise SandboxError(f"{folder} is not a folder")
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(folder, arcname=".", filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= 0o777
    return member


def unpack(stream: IO[bytes], folder: Path, *, limit: int) -> None:
    """Into a folder of the host, which is made where it is missing. Devices and pipes are left out, and links that lead outside."""
    folder.mkdir(parents=True, exist_ok=True)
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    links: list[tuple[list[str], str]] = []
    size = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for count, member in enumerate(tar):
                size += member.size
                if size > limit or count > MEMBERS:
                    raise SandboxError(f"the folder is larger than {limit} bytes, or has more than {MEMBERS} entries")
                path = _path(member.name)
                if member.isdir():
                    os.close(_folder(root, path))
                elif member.issym():
                    links.append((path, member.linkname))
                elif member.islnk():
                    with _opened(root, _path(member.linkname)) as source:
                        _write(root, path, source, member.mode)
                elif member.isfile() and (content := tar.extractfile(member)) is not None:
                    _write(root, path, content, member.mode)
        for path, target in links:
            if path and _stays_inside(len(path) - 1, target):
                _link(root, path, target)
    except tarfile.TarError as error:
        raise SandboxError(f"the folder did not come through whole: {error}") from error
    except OSError as error:
        raise SandboxError(f"the folder cannot be written: {error.strerror}") from error
    finally:
        os.close(root)


def _path(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise SandboxError("a file's name leads out of its folder")
    return parts


def _stays_inside(depth: int, target: str) -> bool:
    """Whether a link that lies `depth` folders deep stays inside: up by real folders only, and then down."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and ups <= depth and ".." not in parts[ups:]


def _folder(root: int, path: list[str]) -> int:
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


def _opened(root: int, path: list[str]) -> IO[bytes]:
    folder = _folder(root, path[:-1])
    try:
        return os.fdopen(os.open(path[-1], os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb")
    finally:
        os.close(folder)


def _write(root: int, path: list[str], content: IO[bytes], mode: int) -> None:
    if not path:
        raise SandboxError("a file has no name")
    folder = _folder(root, path[:-1])
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path[-1], flags, mode & 0o755 | 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(fd, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        os.fchmod(file.fileno(), mode & 0o755 | 0o600)


def _link(root: int, path: list[str], target: str) -> None:
    folder = _folder(root, path[:-1])
    try:
        os.symlink(target, path[-1], dir_fd=folder)
    except FileExistsError:  # of an earlier download
        if os.readlink(path[-1], dir_fd=folder) != target:
            raise
    finally:
        os.close(folder)
