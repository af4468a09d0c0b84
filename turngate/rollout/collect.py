"""What an agent left behind: its output, its own transcript and logs, its working folder. Copied to the host, and not trusted there.

<folder>/stdout, stderr     what it printed
<folder>/home/…             its transcript and logs
<folder>/work/…             its working folder
"""

from __future__ import annotations

import asyncio
from pathlib import Path, PurePosixPath

import msgspec

from turngate.agents.launch import Launch
from turngate.errors import SandboxError, SandboxFileMissing
from turngate.sandboxes.base import Sandbox

_MOST_FILES = 500
_LARGEST = 64_000_000
_TAIL = 4000
# Regular files only: a link could lead anywhere. Paths end with a null, since names may hold line ends.
_FIND = 'home=$1; shift; for p in "$@"; do find "$home" -xdev -type f -path "$p" -print0 2>/dev/null; done; exit 0'


class Collected(msgspec.Struct, frozen=True):
    """What there is, and what could not be had."""

    folder: str = ""
    stdout: str = ""  # the end of it
    stderr: str = ""
    files: int = 0
    work: bool = False
    differences: tuple[str, ...] = ()  # where the agent's transcript and the trace disagree
    transcript_turns: int | None = None  # None: the agent keeps none
    missing: tuple[str, ...] = ()


async def collect(sandbox: Sandbox, launch: Launch, folder: Path, *, keep_work: bool) -> Collected:
    """Everything into `folder`. What cannot be had is named; nothing here fails a rollout."""
    missing: list[str] = []
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    said = {name: await _output(sandbox, path, folder / name, missing) for name, path in _outputs(launch).items()}
    patterns = [p.replace("**", "*") for p in (launch.transcript, launch.subagents, *launch.logs) if p]
    files = await _home_files(sandbox, patterns, folder / "home", missing)
    if keep_work:
        try:
            await sandbox.download(sandbox.workdir, folder / "work")
        except SandboxError as error:
            missing.append(f"work: {error.message}")
            keep_work = False
    return Collected(str(folder), said["stdout"], said["stderr"], files, keep_work, missing=tuple(missing))


def _outputs(launch: Launch) -> dict[str, str]:
    return {"stdout": launch.stdout, "stderr": launch.stderr}


async def _output(sandbox: Sandbox, path: str, target: Path, missing: list[str]) -> str:
    try:
        data = await sandbox.read(path, limit=_LARGEST)
    except SandboxFileMissing:
        return ""  # it printed nothing, because it never began
    except SandboxError as error:
        missing.append(f"{target.name}: {error.message}")
        return ""
    await asyncio.to_thread(target.write_bytes, data)
    return data[-_TAIL:].decode("utf-8", "replace")


async def _home_files(sandbox: Sandbox, patterns: list[str], target: Path, missing: list[str]) -> int:
    if not patterns:
        return 0
    found = await sandbox.exec(["sh", "-c", _FIND, "sh", sandbox.home, *patterns], timeout_s=60)
    names = [name.decode("utf-8", "surrogateescape") for name in dict.fromkeys(found.stdout.split(b"\0")) if name]
    if len(names) > _MOST_FILES:
        missing.append(f"home: {len(names) - _MOST_FILES} of {len(names)} transcript and log files are left out")
    kept = 0
    for name in names[:_MOST_FILES]:
        inside = _inside(name, sandbox.home)
        if inside is None:
            missing.append(f"home: {name!r} is no path below the home folder")
            continue
        try:
            data = await sandbox.read(name, limit=_LARGEST)
        except SandboxError as error:
            missing.append(f"home/{inside}: {error.message}")
            continue
        place = target / inside
        await asyncio.to_thread(place.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(place.write_bytes, data)
        kept += 1
    return kept


def _inside(name: str, home: str) -> PurePosixPath | None:
    """The path below the home folder. The list comes from inside the sandbox: it may say anything."""
    path = PurePosixPath(name)
    if not path.is_relative_to(home) or ".." in path.parts or "\0" in name:
        return None
    return path.relative_to(home)
