"""Limit the disk space of a sandbox on this machine.

The kernel limits the size of each file (`RLIMIT_FSIZE`) and of memory-backed folders. Quotas for whole folders need a file system that was
set up for them, so a `DiskWatch` measures the sandbox's disk use instead. Measuring a large folder takes seconds. Therefore only the free
space of the file system is checked every second. The sandbox is measured about once a minute, and sooner if it could have exceeded its
limit or the disk is nearly full.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from turngate.errors import SandboxError, SandboxTooLarge

log = logging.getLogger(__name__)

DEFAULT_DISK_MB = 16_384
# The minimum size counted for a file or folder: ext4 has one inode per 16 KB, and inodes can run out, too.
ENTRY_BYTES = 16_384
SHM_BYTES = 1 << 30  # size of /dev/shm, which is in memory
RESERVE_BYTES = 1 << 30  # if less is free on the machine, the commands of sandboxes that use more than this are killed
CHECK_S = 1.0
# The longest time between two measurements. Free space alone is not enough: other programs may free as much as the sandbox uses.
MEASURE_S = 60.0
MAX_SHARE = 0.1  # largest share of the time that measuring may take, unless the use has grown by MIN_GROWTH
MIN_GROWTH = 0.1  # as a share of the limit


class FreeSpace(msgspec.Struct, frozen=True):
    """The free space of a file system."""

    bytes: int
    entries: int  # 0 if the file system does not limit them

    @classmethod
    def read(cls, folder: Path) -> FreeSpace:
        found = os.statvfs(folder)
        return cls(found.f_bavail * found.f_frsize, found.f_ffree)

    def used_since(self, before: FreeSpace) -> int:
        """Estimate how many bytes have been used since `before`. Each new file or folder counts as `ENTRY_BYTES` plus its content."""
        entries = max(0, before.entries - self.entries)
        return max(0, before.bytes - self.bytes) + entries * ENTRY_BYTES


class DiskWatch:
    """Measures one sandbox's disk use, and calls `on_exceeded` with an error if the sandbox uses more than `limit` bytes.

    After each call of `on_exceeded`, the sandbox may use another `limit` bytes, because its files are still there. While the machine's
    disk is nearly full, the sandbox may use only `RESERVE_BYTES` in total. `folder` is on the file system that the sandbox uses.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        measure: Callable[[], Awaitable[int]],
        on_exceeded: Callable[[SandboxError], Awaitable[None]],
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._allowed = limit
        self._measure = measure
        self._on_exceeded = on_exceeded
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        used, before, took = 0, FreeSpace.read(self._folder), 0.0
        measured = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                free = FreeSpace.read(self._folder)
            except OSError:  # in `local`, an agent can remove its own folder
                continue
            began = time.monotonic()
            since = free.used_since(before)
            is_due = used + since > self._allowed or free.bytes < RESERVE_BYTES or began - measured > MEASURE_S
            if not is_due or (since < self._limit * MIN_GROWTH and began - measured < took / MAX_SHARE):
                continue
            try:
                used = await self._measure()
            except SandboxTooLarge:  # too deep to measure: assume that the sandbox used all the space that is gone
                used += since
            except SandboxError as error:
                log.warning("the disk use of the sandbox in %s could not be measured: %s", self._folder, error.message)
            measured, before = time.monotonic(), free
            took = measured - began
            if (verdict := self._judge(used, free)) is not None:
                self._allowed = used + self._limit
                log.warning("killing the commands of a sandbox: %s", verdict.message)
                with suppress(SandboxError):  # the sandbox has already ended
                    await self._on_exceeded(verdict)

    def _judge(self, used: int, free: FreeSpace) -> SandboxError | None:
        """Return why the sandbox's commands must be killed, or None if they may continue."""
        uses = f"the sandbox uses {used >> 20} MB of disk space"
        if used > self._allowed:
            return SandboxTooLarge(f"{uses}, but its limit is {self._limit >> 20} MB; raise disk_mb (--disk-mb)")
        if free.bytes < RESERVE_BYTES < used:
            return SandboxError(f"{uses}, and the machine has only {free.bytes >> 20} MB left; free up disk space")
        return None


def measure_folder(folder: Path, processes: Iterable[int] = ()) -> int:
    """Return the disk space that a folder uses, in bytes, including deleted files that `processes` still have open.

    The agent may be changing the folder during the measurement. If it replaces a subfolder with a link, the link is not followed. Raise
    `SandboxTooLarge` if folders are nested too deeply to be measured.
    """
    seen: set[tuple[int, int]] = set()  # files with several names, or open in several processes
    used = 0
    top = os.path.realpath(folder)
    waiting = [top]
    while waiting:
        place = waiting.pop()
        try:
            with _open_inside(place, top) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        used += _count(status, seen)
                        if stat.S_ISDIR(status.st_mode):
                            waiting.append(f"{place}/{entry.name}")
        except OSError as error:  # the folder was removed, or can no longer be read
            if error.errno == errno.ENAMETOOLONG:
                raise SandboxTooLarge("the sandbox's folders are nested too deeply") from None
    for process in processes:
        used += _count_deleted_files(process, seen)
    return used


@contextmanager
def _open_inside(place: str, top: str) -> Iterator[int]:
    """Open a folder at or below `top`. Raise `OSError` if it is now a link, or if a link on its path leads outside `top`."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not f"{os.readlink(f'/proc/self/fd/{fd}')}/".startswith(f"{top}/"):  # noqa: PTH115
            raise NotADirectoryError(errno.ENOTDIR, "a link on the path leads outside the measured folder", place)
        yield fd
    finally:
        os.close(fd)


def measure_deleted_files(process: int) -> int:
    """Return the size of the deleted files that processes in the process namespace of `process` still have open.

    Only root can see the files of other users' processes.
    """
    seen: set[tuple[int, int]] = set()
    used = 0
    with suppress(OSError):
        namespace = os.readlink(f"/proc/{process}/ns/pid")  # noqa: PTH115
        for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
            with suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == namespace:  # noqa: PTH115
                    used += _count_deleted_files(int(name), seen)
    return used


def _count_deleted_files(process: int, seen: set[tuple[int, int]]) -> int:
    used = 0
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):  # noqa: PTH208  much faster than pathlib
            with suppress(OSError):
                status = os.stat(f"/proc/{process}/fd/{name}")  # noqa: PTH116
                if stat.S_ISREG(status.st_mode) and not status.st_nlink and (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    used += status.st_blocks * 512
    return used


def _count(status: os.stat_result, seen: set[tuple[int, int]]) -> int:
    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
        if (status.st_dev, status.st_ino) in seen:
            return 0
        seen.add((status.st_dev, status.st_ino))
    return max(status.st_blocks * 512, ENTRY_BYTES)
