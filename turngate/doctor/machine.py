"""The machine: Python, extras, data folder, port, clock, open files, memory, the admin key's file."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import platform
import resource
import shutil
import socket
import sqlite3
import stat
import sys
import tempfile
import time
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

from turngate.client.keys import ADMIN_KEY, read_key, read_stored_admin_key
from turngate.doctor.context import Subject
from turngate.doctor.finding import Seen, failure, ok, unchecked, warning
from turngate.errors import ConfigError
from turngate.server.auth import METRICS_KEY, metrics_key
from turngate.server.bind import find_running_gateway
from turngate.store.sqlite import Store
from turngate.telemetry.spans import is_enabled

# What a module's presence says about an extra.
EXTRAS = {
    "families": "renderers",
    "local": "torch",
    "otel": "opentelemetry.sdk",
    "swe": "swebench",
    "parquet": "pyarrow",
    "e2b": "e2b",
    "huggingface": "huggingface_hub",
    "mcp": "mcp",
    "openenv": "openenv",
    "trl": "trl",
    "verifiers": "verifiers",
}
_OLDEST = (3, 11)
_GB = 1e9
_LITTLE, _TOO_LITTLE = 2 * _GB, 0.2 * _GB  # of disk
_MEMORY = 0.5 * _GB
_FILES, _TOO_FEW = 8192, 1024
# File systems on which locks or a shared write-ahead log are not to be relied on.
_FAR = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs", "ceph", "glusterfs")


async def python(subject: Subject) -> list[Seen]:
    said = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < _OLDEST:
        return [failure(said, "Python 3.11 or newer is needed")]
    if not sys.platform.startswith("linux"):
        return [warning(said, "only Linux is tested; the sandboxes local and bubblewrap need it")]
    return [ok(said)]


async def extras(subject: Subject) -> list[Seen]:
    """What is installed, and what the settings need of it."""
    there = {extra for extra, module in EXTRAS.items() if _has(module)}
    needed = {
        "local": subject.config.engine == "local",
        "otel": is_enabled(subject.config.spans),
        "families": subject.config.family not in ("auto", "template"),
        "e2b": "e2b" in subject.sandboxes,
        "huggingface": "huggingface" in subject.sandboxes,
    }
    missing = [extra for extra, is_needed in needed.items() if is_needed and extra not in there]
    if missing:
        names = ",".join(missing)
        return [failure(f"the settings need {names}, which is not installed", f"pip install 'turngate[{names}]'")]
    absent = ", ".join(extra for extra in EXTRAS if extra not in there)
    return [ok(f"there: {', '.join(sorted(there)) or 'none'}" + (f"; not there: {absent}" if absent else ""))]


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


# ── the data folder ─────────────────────────────────────────────────────────────────────────────────────────────────


async def data(subject: Subject) -> list[Seen]:
    return await asyncio.to_thread(_data, Path(subject.config.data))


def _data(folder: Path) -> list[Seen]:
    """Tried in a folder of its own, which is removed again: a gateway may be writing there."""
    place = _nearest(folder)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".turngate-doctor-", dir=place)
    except OSError as error:
        return [failure(f"{place} cannot be written ({error.strerror})", "choose another --data folder, or its owner")]
    with scratch as made:
        found = [_locks(Path(made)), _log(Path(made))]
    kind = _file_system(place)
    if kind in _FAR:
        found.append(
            warning(f"{place} is on {kind}: locks and SQLite's log are not to be relied on there", "use a local disk")
        )
    wrong = [seen for seen in found if seen.state != "ok"]
    return wrong or [_store(folder, kind)]


def _nearest(folder: Path) -> Path:
    """The folder itself, or the one in which it will be made."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def _locks(folder: Path) -> Seen:
    with open(folder / "lock", "wb") as one, open(folder / "lock", "wb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return failure(
                f"files in {folder.parent} cannot be locked ({error.strerror})", "use a local disk for --data"
            )
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return ok("locks hold")
    return failure(f"locks in {folder.parent} hold nobody off", "use a local disk for --data")


def _log(folder: Path) -> Seen:
    """A write-ahead log, written by one connection and read by another."""
    try:
        with (
            closing(sqlite3.connect(folder / "try.db", isolation_level=None)) as one,
            closing(sqlite3.connect(folder / "try.db", isolation_level=None)) as other,
        ):
            (mode,) = one.execute("PRAGMA journal_mode=WAL").fetchone()
            one.execute("CREATE TABLE t (x)")
            one.execute("INSERT INTO t VALUES (1)")
            seen = other.execute("SELECT x FROM t").fetchall()
    except sqlite3.Error as error:
        return failure(f"SQLite cannot write in {folder.parent} ({error})", "use a local disk for --data")
    if mode != "wal" or seen != [(1,)]:
        return failure(
            f"SQLite has no write-ahead log in {folder.parent} (it has {mode})", "use a local disk for --data"
        )
    return ok("a write-ahead log works")


def _store(folder: Path, kind: str) -> Seen:
    said = f"{folder}: can be written, locks hold, SQLite's write-ahead log works" + (f", {kind}" if kind else "")
    if (running := find_running_gateway(folder)) is not None:
        said += f"; the gateway at {running.url} serves it (process {running.pid})"
    if not (folder / "turngate.db").exists():
        return ok(said + "; nothing is recorded yet")
    try:
        Store.reading(folder).close()
    except ConfigError as error:
        return failure(error.message, "restore it from a backup, or choose another --data folder")
    return ok(said)


def _file_system(folder: Path) -> str:
    """Its kind, as the kernel has it; empty where that cannot be told."""
    best, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mounted, of, *_ = line.split(" ")
            place = mounted.replace("\\040", " ")
            if Path(place) in (folder, *folder.parents) and len(place) >= len(best):
                best, kind = place, of
    return kind


async def disk(subject: Subject) -> list[Seen]:
    place = _nearest(Path(subject.config.data))
    free = shutil.disk_usage(place).free
    said = f"{free / _GB:.1f} GB free at {place}"
    if free < _TOO_LITTLE:
        return [failure(said, "make room: a turn that cannot be recorded is refused")]
    if free < _LITTLE:
        return [warning(said, "make room: a rollout of 100 turns takes about 1 MB, and what its agent left more")]
    return [ok(said)]


async def key(subject: Subject) -> list[Seen]:
    """The admin key, and the one for metrics; never what they are."""
    try:
        metrics = "; one for the metrics alone is set" if metrics_key() else ""
        if given := read_key(ADMIN_KEY):
            if len(given) < 16:
                return [failure(f"{ADMIN_KEY} has fewer than 16 characters", "export one of: openssl rand -hex 16")]
            return [ok(f"from {ADMIN_KEY}{metrics}")]
        place = Path(subject.config.data)
        if read_stored_admin_key(place) is None:
            return [ok(f"none yet: it is made on first start, in {place / 'admin-key'}{metrics}")]
    except ConfigError as error:
        mend = (
            f"export a {METRICS_KEY} of at least 16 characters"
            if error.param == METRICS_KEY
            else "chmod 600 it, or delete it"
        )
        return [failure(error.message, mend)]
    owner = (place / "admin-key").stat()
    if owner.st_uid != os.getuid():
        return [warning(f"{place / 'admin-key'} is another user's", "start the gateway as its owner, or delete it")]
    return [ok(f"{place / 'admin-key'}, mode {stat.S_IMODE(owner.st_mode):04o}{metrics}")]


# ── port ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def port(subject: Subject) -> list[Seen]:
    config = subject.config
    if not config.port:
        return [ok("any free one is taken (port 0)")]
    where = f"{config.host}:{config.port}"
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
            return [ok(f"{where} is free")]
        except OSError as error:
            wrong = error
    if wrong.errno != errno.EADDRINUSE:
        mend = (
            "ports below 1024 are root's"
            if wrong.errno == errno.EACCES
            else "--host has to be an address of this machine"
        )
        return [failure(f"{where}: {wrong.strerror}", mend)]
    running = find_running_gateway(Path(config.data))
    if running is not None and running.url.endswith(f":{config.port}"):
        return [ok(f"{where} is this data folder's own gateway's (process {running.pid})")]
    who = await asyncio.to_thread(_listener, config.port)
    return [failure(f"{where} is taken by {who or 'another program'}", "stop that, or choose another --port")]


def _listener(port: int) -> str:
    """Who listens on a port, as far as we may see."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{name} (process {process.name})"
    return ""


def _inodes(port: int) -> list[str]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


# ── clock, limits ───────────────────────────────────────────────────────────────────────────────────────────────────


async def clock(subject: Subject) -> list[Seen]:
    """Whether the wall clock goes on as the monotonic one does. Sessions' time limits and events go by it."""
    apart = []
    for _ in range(6):
        before, now, after = time.monotonic(), time.time(), time.monotonic()
        if after - before < 0.005:  # else we were not running in between
            apart.append(now - (before + after) / 2)
        await asyncio.sleep(0.05)
    jump = max(apart, default=0.0) - min(apart, default=0.0)
    if jump > 0.02:
        return [
            warning(
                f"the wall clock moved by {jump * 1000:.0f} ms against the monotonic one", "have it slewed, not set"
            )
        ]
    if time.time() < 1_704_067_200:  # 2024
        return [failure(f"the clock says {time.strftime('%Y-%m-%d')}", "set it: dates of what is recorded go by it")]
    return [ok(f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, steady")]


async def files(subject: Subject) -> list[Seen]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    said = f"{most} open files are allowed (a gateway raises its own limit of {soft:,} to that)"
    if hard != resource.RLIM_INFINITY and hard < _TOO_FEW:
        return [failure(said, "raise the hard limit (ulimit -Hn, LimitNOFILE=): a live session takes two")]
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        return [warning(said, f"fewer than {hard // 2:,} sessions at once; raise the hard limit (LimitNOFILE=)")]
    return [ok(said)]


async def memory(subject: Subject) -> list[Seen]:
    free = _available()
    if free is None:
        return [unchecked("there is no /proc/meminfo here")]
    said = f"{free / _GB:.1f} GB can be had"
    if free < _MEMORY:
        return [warning(said, "a worker takes 0.2 GB and 1 MB per session of 100 turns, an agent up to 1 GB")]
    return [ok(said)]


def _available() -> float | None:
    """Of the machine, or of the container where that has less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    with suppress(OSError, ValueError):  # "max": no bound
        most, used = (
            Path("/sys/fs/cgroup", name).read_text(encoding="ascii") for name in ("memory.max", "memory.current")
        )
        free = min(free, float(most) - float(used)) if most.strip() != "max" else free
    return free
