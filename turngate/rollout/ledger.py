"""The durable record of a batch: `ledger.jsonl` in its folder.

    {"type":"batch", …}      what the batch is; the first line
    {"type":"begun", …}      an attempt, with the id of its session: written before that session is opened
    {"type":"ended", …}      an attempt that decided nothing: an infrastructure fault, it was cancelled, its runner died, or it was stale
    {"type":"unrecorded", …} a rollout that is done, but the gateway has not recorded its outcome yet
    {"type":"finished", …}   a rollout that is done
    {"type":"reopened", …}   a finished rollout that was not judged runs again, because somebody asked

Lines are only appended, and each is synced to the disk. They are JSON lines and not a database: they are read once at the start, a torn
last line is recognised by its missing end, and people and programs can read them while the batch runs. The file is locked, so that two
runners cannot use one folder. Some disk space is reserved, so that what is done can be written even if the disk is full.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from turngate.errors import Boundary, ConfigError, TurngateError
from turngate.rollout.outcome import RolloutClass, Status
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.pass_at_k import has_passed

LEDGER_NAME = "ledger.jsonl"
RESERVE_NAME = "ledger.reserve"
_RESERVED_BYTES = 1_000_000  # room for the last lines of some thousand rollouts
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LedgerHeader(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """Identifies the batch. Its folder is never used for another one."""

    batch: str
    terms: Mapping[str, str]  # by name: what must not change between two runs of it
    tasks: Mapping[str, str]  # by id: a digest of the task
    made: float


class AttemptStarted(msgspec.Struct, frozen=True, kw_only=True, tag="begun", omit_defaults=True):
    rollout: str
    round: int = 0
    attempt: int
    session: str
    at: float


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended", omit_defaults=True):
    """An attempt after which the rollout still has to be done."""

    rollout: str
    attempt: int
    session: str
    why: Literal["fault", "cancelled", "lost", "stale"]  # only faults use up retries
    message: str = ""
    at: float


class FinishedRollout(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """A rollout that is done. It is in exactly one class, and has a reward only if a grader or the policy gave one."""

    rollout: str
    task: str
    round: int = 0
    index: int  # in its group
    kind: RolloutClass
    reward: float | None = None  # None: unknown, which is not 0
    resolved: bool | None = None
    attempt: int = 0  # 0: it was not run
    session: str = ""
    status: Status | None = None  # how the agent ended
    turns: int = 0
    sampled_tokens: int = 0
    rows: int | None = None
    seconds: Mapping[str, float] = {}  # per stage
    stage: str = ""  # which stage failed, and who is to blame
    boundary: Boundary | Literal[""] = ""
    message: str = ""
    at: float

    @property
    def passed(self) -> bool | None:
        """None: unknown."""
        return has_passed(self.reward, self.resolved)


class ReopenedRollout(msgspec.Struct, frozen=True, kw_only=True, tag="reopened"):
    """A rollout that was finished without having been judged, and runs again."""

    rollout: str
    attempt: int  # its last one
    at: float


class UnrecordedRollout(msgspec.Struct, frozen=True, kw_only=True, tag="unrecorded"):
    """A rollout that is done, but not finished until the gateway has recorded its outcome. Its agent does not run again."""

    finished: FinishedRollout
    recorded: RecordedOutcome  # exactly: the gateway may have it after all, and then rejects one that differs
    why: str


LedgerEntry = LedgerHeader | AttemptStarted | AttemptEnded | UnrecordedRollout | FinishedRollout | ReopenedRollout


class LedgerError(TurngateError):
    """The ledger cannot be written or read. Its lines are still valid; the batch can be resumed when that is fixed."""

    boundary = "store"
    kind = "ledger_error"


class LedgerState(msgspec.Struct):
    """What the lines add up to."""

    head: LedgerHeader | None = None
    finished: dict[str, FinishedRollout] = {}  # by rollout
    open: dict[str, AttemptStarted] = {}  # attempts without an end
    unrecorded: dict[str, UnrecordedRollout] = {}
    attempts: dict[str, int] = {}  # the number of the last one
    faults: dict[str, int] = {}  # infrastructure faults
    stale: dict[str, int] = {}  # stale attempts

    def apply(self, entry: LedgerEntry) -> None:
        match entry:
            case LedgerHeader():
                self.head = entry
            case AttemptStarted():
                self.open[entry.rollout] = entry
                self.attempts[entry.rollout] = entry.attempt
            case AttemptEnded():
                self.open.pop(entry.rollout, None)
                self.unrecorded.pop(entry.rollout, None)
                if entry.why == "fault":
                    self.faults[entry.rollout] = self.faults.get(entry.rollout, 0) + 1
                elif entry.why == "stale":
                    self.stale[entry.rollout] = self.stale.get(entry.rollout, 0) + 1
            case UnrecordedRollout():
                self.open.pop(entry.finished.rollout, None)
                self.unrecorded[entry.finished.rollout] = entry
            case FinishedRollout():
                self.open.pop(entry.rollout, None)
                self.unrecorded.pop(entry.rollout, None)
                self.finished[entry.rollout] = entry
            case ReopenedRollout():
                self.finished.pop(entry.rollout, None)


class Ledger:
    """Create it with `open`. `state` is what is on the disk."""

    def __init__(self, folder: Path, fd: int, state: LedgerState, size: int) -> None:
        self.folder = folder
        self.state = state
        self.full = False  # the disk is, and the reserve is in use
        self._fd = fd
        self._size = size
        self._waiting: list[tuple[LedgerEntry, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._broken: LedgerError | None = None

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """Open and lock the ledger of a folder, which is created if necessary."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(folder / LEDGER_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(
                f"out: {folder} cannot be written ({error.strerror}); choose another --out folder", param="out"
            ) from None
        try:
            _lock(fd, folder)
            _reserve(folder)
            data = _read_complete_lines(fd)
            return cls(folder, fd, _parse_ledger(data, folder / LEDGER_NAME), len(data))
        except BaseException:
            os.close(fd)
            raise

    async def add(self, entry: LedgerEntry) -> None:
        """Write an entry. It is on the disk when this returns; a cancellation does not undo it."""
        if self._broken is not None:
            raise self._broken
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(done)

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        for _, done in self._waiting:
            done.cancel()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _write(self) -> None:
        """Write all waiting entries together: one sync for all lines that arrived during the last one."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            data = b"".join(msgspec.json.encode(entry) + b"\n" for entry, _ in batch)
            try:
                if self._broken is not None:
                    raise self._broken
                await asyncio.to_thread(self._append, data)
            except LedgerError as error:
                self._broken = error
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                        done.exception()  # mark it as retrieved: its writer may have been cancelled
                continue
            for entry, done in batch:
                self.state.apply(entry)
                if not done.done():
                    done.set_result(None)

    def _append(self, data: bytes) -> None:
        """Write whole lines or nothing: a failed write is truncated."""
        try:
            try:
                self._write_and_sync(data)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self.full = True
                (self.folder / RESERVE_NAME).unlink(missing_ok=True)
                self._write_and_sync(data)
        except OSError as error:
            raise LedgerError(f"{self.folder / LEDGER_NAME} cannot be written: {error.strerror}", param="out") from None

    def _write_and_sync(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fdatasync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"out: another batch is running in {folder}; wait for it, or choose another --out folder", param="out"
        ) from None


def _reserve(folder: Path) -> None:
    """Reserve disk space, which is freed when the disk is full."""
    try:
        fd = os.open(folder / RESERVE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _RESERVED_BYTES)
        finally:
            os.close(fd)
        _sync_folder(folder)
    except OSError as error:
        (folder / RESERVE_NAME).unlink(missing_ok=True)
        raise ConfigError(
            f"out: {folder} has no space ({error.strerror}); free some, or choose another --out folder", param="out"
        ) from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_complete_lines(fd: int) -> bytes:
    """Read all complete lines, and cut off a last one that was not written to its end."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.ftruncate(fd, len(whole))
    return whole


def _parse_ledger(data: bytes, path: Path) -> LedgerState:
    known = LedgerState()
    decode = msgspec.json.Decoder(LedgerEntry).decode
    for number, line in enumerate(data.splitlines(), 1):
        try:
            known.apply(decode(line))
        except msgspec.MsgspecError as error:
            raise LedgerError(f"{path}: line {number} is not a line of a ledger: {error}", param="out") from None
    if data and known.head is None:
        raise LedgerError(f"{path}: has no line that says which batch it is", param="out")
    return known


def read_ledger(folder: Path) -> LedgerState:
    """Read what a batch has done so far, also while it runs."""
    path = folder / LEDGER_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"out: {path} cannot be read ({error.strerror})", param="out") from None
    return _parse_ledger(data[: data.rfind(b"\n") + 1], path)


def timestamp() -> float:
    return round(time.time(), 3)
