"""What an agent left behind: its output, its own transcript and logs, its working folder. Copied to the host, and not trusted there.

<folder>/stdout, stderr     what it printed
<folder>/home/…             its transcript and logs
<folder>/work/…             its working folder, by `tasks/grading/work.py`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from turngate.agents.launch import Launch
from turngate.common.safe_text import make_encodable
from turngate.errors import SandboxError, SandboxFileMissing, TurngateError
from turngate.sandboxes.base import Sandbox

_MOST_FILES = 500
_LARGEST = 64_000_000  # bytes of a file
_MOST = 512_000_000  # bytes of all transcripts and logs together
_MOST_NAMES = 4_000_000  # bytes of the list of them
_TAIL = 4000
# Regular files only: a link could lead anywhere. Paths end with a null, since names may hold line ends.
_FIND = """
PATH="$PATH:/usr/bin:/bin"; most=$1 home=$2; shift 2
for p in "$@"; do find "$home" -xdev -type f -path "$p" -print0 2>/dev/null; done | head -c "$most"; exit 0
"""
_END_OF = 'PATH="$PATH:/usr/bin:/bin"; [ -f "$1" ] && exec tail -c "$2" -- "$1"'


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


async def collect(sandbox: Sandbox, launch: Launch, folder: Path, hide: Callable[[bytes], bytes] = bytes) -> Collected:
    """Everything but the work into `folder`. What cannot be had is named; nothing an agent left can fail a rollout. `hide`: takes
    secrets out of what it printed."""
    missing: list[str] = []
    try:
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TurngateError(f"{folder} cannot be made: {error.strerror}; choose another --out", param="out") from None
    said = {
        name: await _collect_output(sandbox, path, folder / name, missing, hide)
        for name, path in _output_paths(launch).items()
    }
    patterns = [p.replace("**", "*") for p in (launch.transcript, launch.subagents, *launch.logs) if p]
    files = await _collect_home_files(sandbox, patterns, folder / "home", missing)
    return Collected(str(folder), said["stdout"], said["stderr"], files, missing=tuple(map(make_encodable, missing)))


def _output_paths(launch: Launch) -> dict[str, str]:
    return {"stdout": launch.stdout, "stderr": launch.stderr}


async def _collect_output(
    sandbox: Sandbox, path: str, target: Path, missing: list[str], hide: Callable[[bytes], bytes]
) -> str:
    try:
        data = await sandbox.read(path, limit=_LARGEST)
    except SandboxFileMissing:
        return ""  # it printed nothing, because it never began
    except SandboxError as error:
        # Too much of it: the end is what tells how it went.
        data = b""
        with suppress(SandboxError):  # the sandbox has ended, maybe by the agent's own doing
            tail = await sandbox.exec(["/bin/sh", "-c", _END_OF, "sh", path, str(_LARGEST)], cwd="/", timeout_s=60)
            data = tail.stdout[-_LARGEST:]
        missing.append(f"{target.name}: {error.message}" + ("; its end is kept" if data else ""))
    data = hide(data)
    await _write_file(target, data, missing)
    return data[-_TAIL:].decode("utf-8", "replace")


async def _collect_home_files(sandbox: Sandbox, patterns: list[str], target: Path, missing: list[str]) -> int:
    if not patterns:
        return 0
    look = ["/bin/sh", "-c", _FIND, "sh", str(_MOST_NAMES), sandbox.home, *patterns]
    try:
        found = await sandbox.exec(look, cwd="/", timeout_s=60)
    except SandboxError as error:
        missing.append(f"home: {error.message}")
        return 0
    listed, _, rest = found.stdout.rpartition(b"\0")
    if rest or len(found.stdout) >= _MOST_NAMES:
        missing.append("home: there are more transcript and log files than can be listed")
    names = [name.decode("utf-8", "surrogateescape") for name in dict.fromkeys(listed.split(b"\0")) if name]
    if len(names) > _MOST_FILES:
        missing.append(f"home: {len(names) - _MOST_FILES} of {len(names)} transcript and log files are left out")
    kept, left = 0, _MOST
    for name in names[:_MOST_FILES]:
        inside = _relative_to_home(name, sandbox.home)
        if inside is None:
            missing.append(f"home: {name!r} is no path below the home folder")
            continue
        try:
            data = await sandbox.read(name, limit=min(_LARGEST, left))
        except SandboxError as error:
            missing.append(f"home/{inside}: {error.message}")
            continue
        left -= len(data)
        kept += await _write_file(target / inside, data, missing)
    return kept


async def _write_file(place: Path, data: bytes, missing: list[str]) -> bool:
    """Write a file of the host's. The list of names comes from inside, and need not fit together."""
    try:
        await asyncio.to_thread(place.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(place.write_bytes, data)
    except OSError as error:
        missing.append(f"{place.name}: cannot be written: {error.strerror}")
        return False
    return True


def _relative_to_home(name: str, home: str) -> PurePosixPath | None:
    """The path below the home folder. The list comes from inside the sandbox: it may say anything."""
    path = PurePosixPath(name)
    if not path.is_relative_to(home) or ".." in path.parts or "\0" in name or str(path) == home:
        return None
    return path.relative_to(home)
