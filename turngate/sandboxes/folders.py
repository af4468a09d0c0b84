"""The folder that a sandbox on this machine has on the host: private, named like the sandbox, with the name of its owner in it.

Used by local, bubblewrap and docker. `sweep` removes the folders of owners that are no more, and kills what they left running.
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

from turngate.errors import SandboxError
from turngate.sandboxes import cgroups, owner, supervisor

log = logging.getLogger(__name__)

SANDBOX_ENV = "TURNGATE_SANDBOX"  # in the environment of every process that belongs to a sandbox on the host
KILL_TIMEOUT_S = 10.0  # for a killed process to be gone
STALE_S = 3600.0  # a folder that has no owner yet is being made, but not for so long


def create_folder(root: Path | None, kind: str, *parts: str) -> Path:
    """A new sandbox's folder with some folders in it. Its name is the sandbox's id."""
    name = f"{kind}-{secrets.token_hex(6)}"
    try:
        root = _private_root(root)
        new = root / f".{name}"
        new.mkdir(mode=0o700)
        # First, so that it is swept where we are killed over the rest.
        (new / supervisor.OWNER_FILE).write_text(str(owner.current_owner()))
        for part in parts:
            (new / part).mkdir(mode=0o700)
        return new.rename(root / name)  # with an owner from the first moment that `sweep` can see it
    except OSError as error:
        raise SandboxError(f"a sandbox's folder cannot be made: {error}") from error


def _private_root(root: Path | None) -> Path:
    """The folder of all folders: ours alone, or somebody else on this machine has laid a trap."""
    root = root or Path(tempfile.gettempdir()) / f"turngate-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SandboxError(f"{root} must be a folder that only this user can enter (chmod 700)")
    return root


async def sweep_folders(root: Path | None, kind: str) -> int:
    return await asyncio.to_thread(_sweep_folders, _private_root(root), kind)


def _sweep_folders(root: Path, kind: str) -> int:
    left = [folder for folder in root.glob(f"{kind}-*") if _is_ownerless(folder)]
    for folder in left:
        try:
            remove_folder(folder)
        except SandboxError as error:  # the next one may be removed all the same
            log.warning("%s", error.message)
    for unmade in root.glob(f".{kind}-*"):
        with suppress(OSError):
            if _is_ownerless(unmade) or time.time() - unmade.stat().st_mtime > STALE_S:
                supervisor.remove_folder(str(unmade))
    return len(left)


def _is_ownerless(folder: Path) -> bool:
    try:
        known = owner.parse_owner((folder / supervisor.OWNER_FILE).read_text())
    except OSError:  # it is being removed right now
        return False
    return known is not None and known.gone


def remove_folder(folder: Path) -> None:
    """Kill whatever still belongs to a sandbox, and remove its folder. Raises where some of it is left; it is swept later."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while supervisor.kill_all(lambda: _find_processes(folder.name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    cgroups.remove_group(folder.name)
    if not supervisor.remove_folder(str(folder)):
        raise SandboxError(f"some of the sandbox's folder {folder} could not be removed")


def _find_processes(name: str) -> list[int]:
    """Those with a sandbox's mark, and their children: who throws the mark away is still the supervisor's child."""
    mark = f"{SANDBOX_ENV}={name}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return [*found, *supervisor.descendants(*found)]
