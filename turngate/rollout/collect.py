"""Copy an agent's output, transcript and logs out of its sandbox. The names and contents of these files are untrusted.

<folder>/stdout, stderr     the agent's output
<folder>/home/…             its transcript and logs
<folder>/work/…             its working folder (copied by `work.py`)
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

_MAX_FILES = 500
_MAX_FILE_BYTES = 64_000_000
_MAX_BYTES = 512_000_000  # total size of transcripts and logs
_MAX_LIST_BYTES = 4_000_000  # total size of the names of these files
_TAIL_BYTES = 4000  # how many bytes from the end of each output the outcome includes
# Regular files only: a link could point anywhere. Paths are separated by null bytes, because names may contain newlines.
_FIND = """
PATH="$PATH:/usr/bin:/bin"; most=$1 home=$2; shift 2
for p in "$@"; do find "$home" -xdev -type f -path "$p" -print0 2>/dev/null; done | head -c "$most"; exit 0
"""
_READ_TAIL = 'PATH="$PATH:/usr/bin:/bin"; [ -f "$1" ] && exec tail -c "$2" -- "$1"'


class Collected(msgspec.Struct, frozen=True):
    """The output and files copied from a sandbox, what is missing, and how the agent's transcript differs from the trace."""

    folder: str = ""
    stdout: str = ""  # only the end
    stderr: str = ""  # only the end
    files: int = 0
    work: bool = False
    differences: tuple[str, ...] = ()  # where the agent's transcript and the trace disagree
    transcript_turns: int | None = None  # None if no transcript was compared
    missing: tuple[str, ...] = ()


async def collect(
    sandbox: Sandbox, launch: Launch, folder: Path, redact: Callable[[bytes], bytes] = bytes
) -> Collected:
    """Copy the agent's output, transcript and logs to `folder`. The result's `missing` field says what could not be copied, and why.

    `redact` removes secrets from the agent's output. Raise `TurngateError` if `folder` cannot be created.
    """
    missing: list[str] = []
    try:
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TurngateError(
            f"out: {folder} cannot be created ({error.strerror}); choose a different folder", param="out"
        ) from None
    output = {
        name: await _collect_output(sandbox, path, folder / name, missing, redact)
        for name, path in _output_paths(launch).items()
    }
    patterns = [p.replace("**", "*") for p in (launch.transcript, launch.subagents, *launch.logs) if p]
    files = await _collect_home_files(sandbox, patterns, folder / "home", missing)
    return Collected(
        str(folder), output["stdout"], output["stderr"], files, missing=tuple(map(make_encodable, missing))
    )


def _output_paths(launch: Launch) -> dict[str, str]:
    return {"stdout": launch.stdout, "stderr": launch.stderr}


async def _collect_output(
    sandbox: Sandbox, path: str, target: Path, missing: list[str], redact: Callable[[bytes], bytes]
) -> str:
    try:
        data = await sandbox.read(path, limit=_MAX_FILE_BYTES)
    except SandboxFileMissing:
        return ""  # the agent was never started
    except SandboxError as error:
        # The file is probably too large. Its end is the most useful part.
        data = b""
        with suppress(SandboxError):  # the sandbox may be gone
            tail = await sandbox.exec(
                ["/bin/sh", "-c", _READ_TAIL, "sh", path, str(_MAX_FILE_BYTES)], cwd="/", timeout_s=60
            )
            data = tail.stdout[-_MAX_FILE_BYTES:]
        missing.append(f"{target.name}: {error.message}" + ("; only its end was copied" if data else ""))
    data = redact(data)
    await _write_file(target, data, missing)
    return data[-_TAIL_BYTES:].decode("utf-8", "replace")


async def _collect_home_files(sandbox: Sandbox, patterns: list[str], target: Path, missing: list[str]) -> int:
    if not patterns:
        return 0
    command = ["/bin/sh", "-c", _FIND, "sh", str(_MAX_LIST_BYTES), sandbox.home, *patterns]
    try:
        found = await sandbox.exec(command, cwd="/", timeout_s=60)
    except SandboxError as error:
        missing.append(f"home: {error.message}")
        return 0
    listed, _, rest = found.stdout.rpartition(b"\0")
    if rest or len(found.stdout) >= _MAX_LIST_BYTES:
        missing.append("home: too many transcript and log files to list; some may not have been copied")
    names = [name.decode("utf-8", "surrogateescape") for name in dict.fromkeys(listed.split(b"\0")) if name]
    if len(names) > _MAX_FILES:
        missing.append(
            f"home: skipped {len(names) - _MAX_FILES} of {len(names)} transcript and log files, because at most {_MAX_FILES} are copied"
        )
    copied, remaining = 0, _MAX_BYTES
    for name in names[:_MAX_FILES]:
        inside = _relative_to_home(name, sandbox.home)
        if inside is None:
            missing.append(f"home: skipped {name!r}, because it is outside the home folder")
            continue
        try:
            data = await sandbox.read(name, limit=min(_MAX_FILE_BYTES, remaining))
        except SandboxError as error:
            missing.append(f"home/{inside}: {error.message}")
            continue
        remaining -= len(data)
        copied += await _write_file(target / inside, data, missing)
    return copied


async def _write_file(target: Path, data: bytes, missing: list[str]) -> bool:
    """Write a file on the host, and return whether that succeeded.

    The write can fail because of the file's name, which comes from the sandbox and may conflict with another file's name.
    """
    try:
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)
    except OSError as error:
        missing.append(f"{target.name} could not be written: {error.strerror}")
        return False
    return True


def _relative_to_home(name: str, home: str) -> PurePosixPath | None:
    """Return an untrusted path relative to the home folder, or None if it is not inside that folder."""
    path = PurePosixPath(name)
    if not path.is_relative_to(home) or ".." in path.parts or "\0" in name or str(path) == home:
        return None
    return path.relative_to(home)
