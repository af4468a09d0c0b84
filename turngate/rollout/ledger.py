"""The durable record of a batch: `ledger.jsonl` in its folder.

    {"type":"batch", …}      the first line, which identifies the batch
    {"type":"begun", …}      an attempt is starting; written before its session is opened, with the session's id
    {"type":"ended", …}      an attempt ended and its rollout may run again: infrastructure fault, cancelled, stale, or lost
    {"type":"unrecorded", …} a rollout is done, but the gateway has not recorded its outcome yet
    {"type":"finished", …}   a rollout is finished
    {"type":"reopened", …}   a finished rollout will run again, because someone requested a retry

Lines are only appended, and each is synced to disk. A JSON Lines file is sufficient, because the runner reads it only once, at the start.
People and programs can read it while the batch runs. A last line without a newline is incomplete and is ignored. The file is locked, so
that two runners cannot use the same folder. Some disk space is reserved, so that finished rollouts can be written even if the disk is full.
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
_RESERVED_BYTES = 1_000_000  # enough for the last lines of a few thousand rollouts
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OTHER_FOLDER = "restore the file from a backup, or choose a different folder"


class LedgerHeader(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """The identity of a batch. A folder that contains one batch is never used for another."""

    batch: str
    terms: Mapping[str, str]  # setting → value, for the settings that must not change between runs of the batch
    tasks: Mapping[str, str]  # task id → digest of the task
    made: float


class AttemptStarted(msgspec.Struct, frozen=True, kw_only=True, tag="begun", omit_defaults=True):
    """The start of an attempt. It is written before the attempt's session is opened."""

    rollout: str
    round: int = 0
    attempt: int
    session: str
    at: float


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended", omit_defaults=True):
    """An attempt that ended without finishing its rollout."""

    rollout: str
    attempt: int
    session: str
    # A fault uses up one of the plan's `retries`, and `stale` one of its `stale_retries`. `cancelled` and `lost` use up neither.
    why: Literal["fault", "cancelled", "lost", "stale"]
    message: str = ""
    at: float


class FinishedRollout(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """A finished rollout and its class. It has a reward only if the grader or the end policy assigned one."""

    rollout: str
    task: str
    round: int = 0
    index: int  # position within the group
    kind: RolloutClass
    reward: float | None = None  # None means unknown, which is not 0
    resolved: bool | None = None
    attempt: int = 0  # number of the last attempt; 0 if the rollout was skipped
    session: str = ""
    status: Status | None = None  # how the agent ended
    turns: int = 0
    sampled_tokens: int = 0
    rows: int | None = None
    trained_tokens: int | None = None  # None if the gateway did not report it
    warnings: tuple[str, ...] = ()  # about the training data
    refused_calls: int = 0
    seconds: Mapping[str, float] = {}  # duration of each stage
    stage: str = ""  # the stage that failed
    boundary: Boundary | Literal[""] = ""  # the boundary at fault
    message: str = ""
    at: float

    @property
    def passed(self) -> bool | None:
        """Whether the rollout passed, or None if that is unknown."""
        return has_passed(self.reward, self.resolved)


class ReopenedRollout(msgspec.Struct, frozen=True, kw_only=True, tag="reopened"):
    """A finished rollout that will run again, because someone requested a retry."""

    rollout: str
    attempt: int  # number of the last attempt
    at: float


class UnrecordedRollout(msgspec.Struct, frozen=True, kw_only=True, tag="unrecorded"):
    """A rollout that is done, but whose outcome the gateway has not recorded yet.

    Resuming the batch records the outcome without running the agent again, if the gateway accepts the outcome.
    """

    finished: FinishedRollout
    recorded: RecordedOutcome  # must not change: the gateway may already have it, and would reject a different record
    why: str


LedgerEntry = LedgerHeader | AttemptStarted | AttemptEnded | UnrecordedRollout | FinishedRollout | ReopenedRollout


class LedgerError(TurngateError):
    """The ledger is invalid or cannot be written to. After a failed write, earlier lines stay valid, so the batch can be resumed later."""

    boundary = "store"
    kind = "ledger_error"


class LedgerState(msgspec.Struct):
    """The state of a batch, built by applying the entries of its ledger. The dictionaries are keyed by rollout."""

    head: LedgerHeader | None = None
    finished: dict[str, FinishedRollout] = {}
    open: dict[str, AttemptStarted] = {}  # attempts that have not ended
    unrecorded: dict[str, UnrecordedRollout] = {}
    attempts: dict[str, int] = {}  # number of the last attempt
    faults: dict[str, int] = {}  # number of infrastructure faults
    stale: dict[str, int] = {}  # number of stale attempts

    def apply(self, entry: LedgerEntry) -> None:
        """Update the state with an entry."""
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
    """The ledger of a running batch. Call `open` to create it. `state` reflects the entries on disk."""

    def __init__(self, folder: Path, fd: int, state: LedgerState, size: int) -> None:
        self.folder = folder
        self.state = state
        self.full = False  # whether the disk is full, so that the reserved space is in use
        self._fd = fd
        self._size = size
        self._waiting: list[tuple[LedgerEntry, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._broken: LedgerError | None = None

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """Open and lock the ledger of a folder. Create the folder if necessary."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(folder / LEDGER_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(
                f"out: {folder} cannot be written to ({error.strerror}); choose a different folder", param="out"
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
        """Write an entry, and return when it is on disk. Raise `LedgerError` if this or an earlier write fails.

        Cancelling does not undo the write.
        """
        if self._broken is not None:
            raise self._broken
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(done)

    async def close(self) -> None:
        """Write the waiting entries, and close the file."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        for _, done in self._waiting:
            done.cancel()
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(
                    self._fd, fcntl.LOCK_UN
                )  # also releases the copy of a process that was forked at this moment
            os.close(self._fd)
            self._fd = -1

    async def _write(self) -> None:
        """Write the waiting entries. Entries that are added during a sync are written together afterwards, with a single sync."""
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
                        done.exception()  # mark the exception as retrieved, since the caller may have been cancelled
                continue
            for entry, done in batch:
                self.state.apply(entry)
                if not done.done():
                    done.set_result(None)

    def _append(self, data: bytes) -> None:
        """Append all lines or none. If the disk is full, use the reserved space.

        After a failed write, the file is truncated to its previous size.
        """
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
            raise LedgerError(
                f"{self.folder / LEDGER_NAME} cannot be written to ({error.strerror}); fix the cause, then resume the batch",
                param="out",
            ) from None

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
    except BlockingIOError:
        raise ConfigError(
            f"out: a batch is already running in {folder}; wait until it ends, or choose a different folder",
            param="out",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"out: {folder} cannot be locked ({error.strerror}); choose a folder on a file system that supports locks",
            param="out",
        ) from None


def _reserve(folder: Path) -> None:
    """Reserve disk space in a separate file, which is deleted when the disk is full."""
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
            f"out: disk space cannot be reserved in {folder} ({error.strerror}); free up space, or choose a different folder",
            param="out",
        ) from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_complete_lines(fd: int) -> bytes:
    """Return all complete lines, and remove an incomplete last line from the file."""
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
            raise LedgerError(
                f"{path}: line {number} is not a valid ledger entry: {error}; {_OTHER_FOLDER}", param="out"
            ) from None
    if data and known.head is None:
        raise LedgerError(f"{path} has no header line that identifies the batch; {_OTHER_FOLDER}", param="out")
    return known


def read_ledger(folder: Path) -> LedgerState:
    """Read the state of a batch, which may be running."""
    path = folder / LEDGER_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"out: {path} cannot be read ({error.strerror}); check the file's permissions, or choose a different folder",
            param="out",
        ) from None
    return _parse_ledger(data[: data.rfind(b"\n") + 1], path)


def timestamp() -> float:
    return round(time.time(), 3)
