"""Check the machine: Python, extras, data folder, disk, keys, port, clock, open files and memory."""

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
from turngate.common.database_url import parse_database_url
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckOutcome, failure, not_checked, ok, warning
from turngate.errors import ConfigError, StoreError
from turngate.server.auth import METRICS_KEY, metrics_key
from turngate.server.bind import find_running_gateway
from turngate.store.location import open_store_for_reading
from turngate.store.store import Store
from turngate.telemetry.spans import is_enabled

# Extra → a module that it installs.
EXTRAS = {
    "families": "renderers",
    "local": "torch",
    "otel": "opentelemetry.sdk",
    "swe": "swebench",
    "parquet": "pyarrow",
    "e2b": "e2b",
    "huggingface": "huggingface_hub",
    "mcp": "mcp",
    "postgres": "psycopg",
    "ray": "ray",
    "openenv": "openenv",
    "trl": "trl",
    "verifiers": "verifiers",
}
_MIN_PYTHON = (3, 11)
_GB = 1e9
_LOW_DISK, _MIN_DISK = 2 * _GB, 0.2 * _GB
_LOW_MEMORY = 0.5 * _GB
_LOW_FILES, _MIN_FILES = 8192, 1024
# On these file systems, locks or SQLite's write-ahead log are unreliable.
_NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
    "ceph",
    "glusterfs",
)


async def check_python(context: DoctorContext) -> list[CheckOutcome]:
    """Check the Python version and the operating system."""
    message = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    if sys.version_info[:2] < _MIN_PYTHON:
        return [failure(message, "install Python 3.11 or newer")]
    if not sys.platform.startswith("linux"):
        return [
            warning(
                message, "use Linux: other systems are not tested, and the local and bubblewrap sandboxes require it"
            )
        ]
    return [ok(message)]


async def check_extras(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the extras that the settings require are installed."""
    installed = {extra for extra, module in EXTRAS.items() if _is_installed(module)}
    needed = {
        "local": context.config.engine == "local",
        "otel": is_enabled(context.config.spans),
        "postgres": bool(context.config.shared) or context.config.is_shared,
        "families": context.config.family not in ("auto", "template"),
        "e2b": "e2b" in context.sandboxes,
        "huggingface": "huggingface" in context.sandboxes,
    }
    missing = [extra for extra, is_needed in needed.items() if is_needed and extra not in installed]
    if missing:
        names = ",".join(missing)
        return [
            failure(
                f"the settings require extras that are not installed: {names}", f"run: pip install 'turngate[{names}]'"
            )
        ]
    absent = ", ".join(extra for extra in EXTRAS if extra not in installed)
    return [
        ok(f"installed: {', '.join(sorted(installed)) or 'none'}" + (f"; not installed: {absent}" if absent else ""))
    ]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the module's parent package is missing
        return False


# ── the data folder ─────────────────────────────────────────────────────────────────────────────────────────────────


async def check_data(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the data folder is writable, that locks and SQLite work there, and that its recordings can be read.

    For a shared store, check only that it can be read.
    """
    if context.config.is_shared:
        return [await asyncio.to_thread(_check_shared_store, context.config.data)]
    return await asyncio.to_thread(_check_data_folder, Path(context.config.data))


def _check_shared_store(data: str) -> CheckOutcome:
    name = parse_database_url(data).name
    try:
        store = open_store_for_reading(data)
    except ConfigError as error:
        return failure(
            error.message,
            "if the database cannot be reached, start PostgreSQL or correct the address in --data; otherwise, do what the message says",
        )
    try:
        return ok(f"{name}: the shared store answers; events so far: {store.events.newest()}")
    except StoreError as error:
        return failure(error.message, "check that PostgreSQL is running, and look for errors in its log")
    finally:
        store.close()


def _check_data_folder(folder: Path) -> list[CheckOutcome]:
    """Check a data folder. Write only to a temporary subfolder, because a gateway may be using the folder itself."""
    parent = _nearest_folder(folder)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".turngate-doctor-", dir=parent)
    except OSError as error:
        return [
            failure(
                f"{parent} cannot be written to ({error.strerror})",
                f"choose a different --data folder, or run as the owner of {parent}",
            )
        ]
    with scratch as path:
        results = [_check_locks(Path(path)), _check_write_ahead_log(Path(path))]
    kind = _file_system(parent)
    if kind in _NETWORK_FILE_SYSTEMS:
        results.append(
            warning(
                f"{parent} is on {kind}, where file locks and SQLite's write-ahead log are unreliable",
                "use a local disk for --data",
            )
        )
    problems = [result for result in results if result.state != "ok"]
    return problems or [_check_store(folder, kind)]


def _nearest_folder(folder: Path) -> Path:
    """Return the folder if it exists, or else its nearest existing parent."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def _check_locks(folder: Path) -> CheckOutcome:
    with open(folder / "lock", "wb") as first, open(folder / "lock", "wb") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return failure(
                f"files in {folder.parent} cannot be locked ({error.strerror})", "use a local disk for --data"
            )
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return ok("locks work")
    return failure(f"locks in {folder.parent} do not exclude other processes", "use a local disk for --data")


def _check_write_ahead_log(folder: Path) -> CheckOutcome:
    """Check that SQLite's write-ahead log works: what one connection writes, another can read."""
    try:
        with (
            closing(sqlite3.connect(folder / "try.db", isolation_level=None)) as writer,
            closing(sqlite3.connect(folder / "try.db", isolation_level=None)) as reader,
        ):
            (mode,) = writer.execute("PRAGMA journal_mode=WAL").fetchone()
            writer.execute("CREATE TABLE t (x)")
            writer.execute("INSERT INTO t VALUES (1)")
            rows = reader.execute("SELECT x FROM t").fetchall()
    except sqlite3.Error as error:
        return failure(f"SQLite cannot write to {folder.parent} ({error})", "use a local disk for --data")
    if mode != "wal" or rows != [(1,)]:
        return failure(
            f"SQLite's write-ahead log does not work in {folder.parent} (journal mode {mode})",
            "use a local disk for --data",
        )
    return ok("the write-ahead log works")


def _check_store(folder: Path, kind: str) -> CheckOutcome:
    message = f"{folder}: writable; locks and SQLite's write-ahead log work" + (f" ({kind})" if kind else "")
    if (running := find_running_gateway(folder)) is not None:
        message += f"; used by the gateway at {running.url} (process {running.pid})"
    if not (folder / "turngate.db").exists():
        return ok(message + "; no recordings yet")
    try:
        Store.reading(folder).close()
    except ConfigError as error:
        return failure(error.message, "do what the message says, or choose a different --data folder")
    return ok(message)


def _file_system(folder: Path) -> str:
    """Return the type of the file system that contains a folder, or an empty string if it is unknown."""
    best, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mounted, mounted_kind, *_ = line.split(" ")
            mount = mounted.replace("\\040", " ")
            if Path(mount) in (folder, *folder.parents) and len(mount) >= len(best):
                best, kind = mount, mounted_kind
    return kind


async def check_disk(context: DoctorContext) -> list[CheckOutcome]:
    """Check that there is enough disk space for the data folder."""
    place = _nearest_folder(context.config.folder)
    free = shutil.disk_usage(place).free
    message = f"{free / _GB:.1f} GB free at {place}"
    if free < _MIN_DISK:
        return [failure(message, "free up disk space: the gateway rejects calls that it cannot record")]
    if free < _LOW_DISK:
        return [warning(message, "free up disk space: a rollout of 100 turns needs about 1 MB, plus the agent's files")]
    return [ok(message)]


async def check_keys(context: DoctorContext) -> list[CheckOutcome]:
    """Check the length of the admin key and the metrics key, and the owner and mode of the file `admin-key`. Keys are never printed."""
    try:
        metrics = "; a separate metrics key is set" if metrics_key() else ""
        if admin_key := read_key(ADMIN_KEY):
            if len(admin_key) < 16:
                return [
                    failure(
                        f"{ADMIN_KEY} has fewer than 16 characters", "set it to the output of: openssl rand -hex 16"
                    )
                ]
            return [ok(f"from {ADMIN_KEY}{metrics}")]
        folder = context.config.folder
        if read_stored_admin_key(folder) is None:
            return [ok(f"no key yet; the gateway creates {folder / 'admin-key'} when it first starts{metrics}")]
    except ConfigError as error:
        fix = (
            f"set {METRICS_KEY} to at least 16 characters"
            if error.param == METRICS_KEY
            else "run chmod 600 on the file if other users can access it; otherwise, delete it, and the gateway creates a new key at its "
            "next start"
            if error.param == "data"
            else "correct the environment variable, or the file that it names"
        )
        return [failure(error.message, fix)]
    file = folder / "admin-key"
    status = file.stat()
    if status.st_uid != os.getuid():
        return [
            warning(
                f"{file} belongs to a different user",
                "start the gateway as that user, or delete the file to get a new key",
            )
        ]
    return [ok(f"{file}, mode {stat.S_IMODE(status.st_mode):04o}{metrics}")]


# ── port ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def check_port(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the port is free, or used by the gateway of this data folder."""
    config = context.config
    if not config.port:
        return [ok("port 0: the gateway chooses a free port")]
    where = f"{config.host}:{config.port}"
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
            return [ok(f"{where} is free")]
        except OSError as error:
            bind_error = error
    if bind_error.errno != errno.EADDRINUSE:
        fix = (
            "choose a --port above 1023, or run as root"
            if bind_error.errno == errno.EACCES
            else "set --host to an address of this machine"
        )
        return [failure(f"{where}: {bind_error.strerror}", fix)]
    running = find_running_gateway(config.folder)
    if running is not None and running.url.endswith(f":{config.port}"):
        return [ok(f"{where} is used by the gateway of this data folder (process {running.pid})")]
    owner = await asyncio.to_thread(_listener, config.port)
    return [
        failure(f"{where} is used by {owner or 'another program'}", "stop that program, or choose a different --port")
    ]


def _listener(port: int) -> str:
    """Return the name and process id of the program that listens on a port, or an empty string if this user cannot see it."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{name} (process {process.name})"
    return ""


def _inodes(port: int) -> list[str]:
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.append(fields[9])
    return inodes


# ── clock, limits ───────────────────────────────────────────────────────────────────────────────────────────────────


async def check_clock(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the wall clock does not jump relative to the monotonic clock, and that its date is plausible."""
    offsets = []
    for _ in range(6):
        before, now, after = time.monotonic(), time.time(), time.monotonic()
        if after - before < 0.005:  # otherwise, this process was suspended between the calls
            offsets.append(now - (before + after) / 2)
        await asyncio.sleep(0.05)
    jump = max(offsets, default=0.0) - min(offsets, default=0.0)
    if jump > 0.02:
        return [
            warning(
                f"the wall clock moved by {jump * 1000:.0f} ms relative to the monotonic clock",
                "configure the time service to slew the clock instead of stepping it",
            )
        ]
    if time.time() < 1_704_067_200:  # 2024
        return [
            failure(
                f"the clock is set to {time.strftime('%Y-%m-%d')}", "set the clock: recordings use it for their dates"
            )
        ]
    return [ok(f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, steady")]


async def check_open_files(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the hard limit on open files is high enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = f"limit on open files: {_format_limit(hard)}"
    if soft != hard:
        message += f" (the gateway raises its soft limit of {_format_limit(soft)} to this hard limit)"
    if hard != resource.RLIM_INFINITY and hard < _MIN_FILES:
        return [
            failure(message, "raise the hard limit (ulimit -Hn, LimitNOFILE=): an active session needs two open files")
        ]
    if hard != resource.RLIM_INFINITY and hard < _LOW_FILES:
        return [
            warning(
                message,
                f"raise the hard limit (LimitNOFILE=): it allows fewer than {hard // 2:,} concurrent sessions",
            )
        ]
    return [ok(message)]


def _format_limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


async def check_memory(context: DoctorContext) -> list[CheckOutcome]:
    """Check that enough memory is available."""
    free = _available_memory()
    if free is None:
        return [not_checked("the available memory cannot be read from /proc/meminfo")]
    message = f"{free / _GB:.1f} GB available"
    if free < _LOW_MEMORY:
        return [
            warning(
                message,
                "free up memory: a worker needs 0.2 GB plus 1 MB per session of 100 turns, and an agent up to 1 GB",
            )
        ]
    return [ok(message)]


def _available_memory() -> float | None:
    """Return how many bytes of memory are available on the machine or in this container, whichever is less. None means unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    with suppress(OSError, ValueError):  # cgroup v2 may not be mounted
        limit, used = (
            Path("/sys/fs/cgroup", name).read_text(encoding="ascii") for name in ("memory.max", "memory.current")
        )
        free = min(free, float(limit) - float(used)) if limit.strip() != "max" else free
    return free
