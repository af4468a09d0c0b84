"""The private host folder of a sandbox on this machine. The sandbox's id is derived from the folder's name.

The file `owner` in the folder names the process that owns the sandbox. `sweep_folders` removes the folders whose owners have ended, and
kills the remaining processes of their sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from turngate.common import owner
from turngate.errors import SandboxError
from turngate.sandboxes import cgroups, supervisor

log = logging.getLogger(__name__)

SANDBOX_ENV = "TURNGATE_SANDBOX"  # set in the environment of every host process that belongs to a sandbox
KILL_TIMEOUT_S = 10.0  # how long killed processes may take to disappear
STALE_S = 3600.0  # creating a folder never takes this long
SLASH = "~"  # replaces slashes of the owner in the name of an unfinished folder


def create_folder(root: Path | None, kind: str, *parts: str) -> Path:
    """Create a sandbox's folder, with a unique name and the subfolders `parts`."""
    name = f"{kind}-{secrets.token_hex(6)}"
    try:
        root = _private_root(root)
        mine = str(owner.current_owner())
        # The name of an unfinished folder contains its owner, so that it can be swept even if we are killed at this point.
        new = root / f".{name} {mine.replace('/', SLASH)}"
        new.mkdir(mode=0o700)
        (new / supervisor.OWNER_FILE).write_text(mine)
        for part in parts:
            (new / part).mkdir(mode=0o700)
        return new.rename(root / name)  # from now on, `sweep_folders` considers it complete
    except OSError as error:
        raise SandboxError(f"cannot create the sandbox's folder: {error}") from error


def _private_root(root: Path | None) -> Path:
    """Return the parent of the sandbox folders. Create it if necessary.

    Raise `SandboxError` if it cannot be created, or if it is not private, because other users could then plant links in it.
    """
    root = root or Path(tempfile.gettempdir()) / f"turngate-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise SandboxError(
            f"cannot create the folder for sandboxes: {error}; check its parent folder, or set TMPDIR to another folder"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SandboxError(
            f"{root} must be a private folder (mode 700, not a link) owned by this user; run `chmod 700 {root}` if only its mode is "
            "wrong, or set TMPDIR to another folder"
        )
    return root


async def sweep_folders(root: Path | None, kind: str) -> int:
    """Remove the folders of sandboxes whose owners have ended. Return how many were removed completely."""
    return await asyncio.to_thread(_sweep_folders, _private_root(root), kind)


def _sweep_folders(root: Path, kind: str) -> int:
    leftovers = [folder for folder in root.glob(f"{kind}-*") if _is_ownerless(folder)]
    removed = 0
    for folder in leftovers:
        try:
            remove_folder(folder)
            removed += 1
        except SandboxError as error:  # continue with the next one
            log.warning("%s", error.message)
    for unfinished in root.glob(f".{kind}-*"):
        if _is_abandoned(unfinished):
            supervisor.remove_folder(str(unfinished))
    return removed


def _is_abandoned(unfinished: Path) -> bool:
    """Return whether an unfinished folder will never be completed.

    A folder created by an older version of Turngate has no owner in its name, and counts as abandoned after `STALE_S` seconds.
    """
    _, _, owner_name = unfinished.name.partition(" ")
    if owner_name:
        return _is_gone(owner_name.replace(SLASH, "/"))
    with suppress(OSError):
        return time.time() - unfinished.lstat().st_mtime > STALE_S
    return False


def _is_ownerless(folder: Path) -> bool:
    try:
        return _is_gone((folder / supervisor.OWNER_FILE).read_text())
    except OSError:  # it is being removed, or it is empty because the process that was removing it was killed
        with suppress(OSError):
            folder.rmdir()
        return False


def _is_gone(text: str) -> bool:
    parsed = owner.parse_owner(text)
    return parsed is not None and parsed.gone


def remove_folder(folder: Path) -> None:
    """Kill the remaining processes of a sandbox and remove its folder.

    Raise `SandboxError` if files remain; a later sweep will try again.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while supervisor.kill_all(lambda: _find_processes(folder.name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    cgroups.remove_group(folder.name)
    if not supervisor.remove_folder(str(folder)):
        raise SandboxError(
            f"the sandbox's folder {folder} could not be removed completely; a later sweep will try again"
        )


def _find_processes(name: str) -> list[int]:
    """Find the processes whose `SANDBOX_ENV` is `name`, and their descendants, which may have removed this environment variable."""
    mark = f"{SANDBOX_ENV}={name}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return [*found, *supervisor.descendants(*found)]
