"""The ledger of a batch: written lines survive a crash, and only one process can write at a time."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import require
from turngate.errors import ConfigError
from turngate.rollout.ledger import (
    LEDGER_NAME,
    RESERVE_NAME,
    AttemptEnded,
    AttemptStarted,
    FinishedRollout,
    Ledger,
    LedgerEntry,
    LedgerError,
    LedgerHeader,
    read_ledger,
)
from turngate.rollout.results import read_outcome

HEAD = LedgerHeader(batch="b", terms={"n": "2"}, tasks={"t": "1"}, made=1.0)


def make_started(index: int, attempt: int = 1) -> AttemptStarted:
    return AttemptStarted(rollout=f"b.t.{index}", attempt=attempt, session=f"s{index}-{attempt}", at=2.0)


def make_finished(index: int, **fields: object) -> FinishedRollout:
    return FinishedRollout(rollout=f"b.t.{index}", task="t", index=index, kind="graded", at=3.0, **fields)  # type: ignore[arg-type]


async def write_entries(folder: Path, *entries: LedgerEntry) -> None:
    ledger = Ledger.open(folder)
    for entry in entries:
        await ledger.add(entry)
    await ledger.close()


async def test_entries_are_read_back(tmp_path: Path) -> None:
    lost = AttemptEnded(rollout="b.t.1", attempt=1, session="s1-1", why="fault", message="no", at=2.5)
    await write_entries(
        tmp_path, HEAD, make_started(0), make_started(1), make_finished(0, reward=0.0), lost, make_started(1, 2)
    )
    state = read_ledger(tmp_path)
    assert state.head == HEAD
    assert list(state.finished) == ["b.t.0"] and state.finished["b.t.0"].reward == 0.0
    assert state.open == {"b.t.1": make_started(1, 2)}
    assert (state.attempts, state.faults) == ({"b.t.0": 1, "b.t.1": 2}, {"b.t.1": 1})


async def test_stale_attempt_is_not_counted_as_fault(tmp_path: Path) -> None:
    stale = AttemptEnded(rollout="b.t.1", attempt=1, session="s1-1", why="stale", at=2.5)
    await write_entries(tmp_path, HEAD, make_started(1), stale, make_finished(0, round=2))
    state = read_ledger(tmp_path)
    assert (state.faults, state.stale, state.open, state.finished["b.t.0"].round) == ({}, {"b.t.1": 1}, {}, 2)


async def test_unknown_reward_is_not_zero(tmp_path: Path) -> None:
    await write_entries(tmp_path, HEAD, make_finished(0), make_finished(1, reward=0.0))
    found = read_ledger(tmp_path).finished
    assert found["b.t.0"].reward is None and found["b.t.0"].passed is None
    assert found["b.t.1"].reward == 0.0 and found["b.t.1"].passed is False


async def test_ledger_cut_at_any_byte_keeps_earlier_lines(tmp_path: Path) -> None:
    """A kill can cut the last line. Later entries start on a new line."""
    await write_entries(tmp_path, HEAD, make_started(0), make_finished(0, message="ü\n"), make_started(1))
    data = (tmp_path / LEDGER_NAME).read_bytes()
    ends = [n + 1 for n, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(ends[0], len(data) + 1):
        (tmp_path / LEDGER_NAME).write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        await write_entries(tmp_path, make_started(7))
        state = read_ledger(tmp_path)
        assert ("b.t.0" in state.finished, "b.t.1" in state.open) == (whole >= 3, whole >= 4)
        assert state.open["b.t.7"] == make_started(7)


async def test_ledger_cut_in_first_line_is_new(tmp_path: Path) -> None:
    await write_entries(tmp_path, HEAD)
    data = (tmp_path / LEDGER_NAME).read_bytes()
    for cut in (0, 1, len(data) - 1):
        (tmp_path / LEDGER_NAME).write_bytes(data[:cut])
        ledger = Ledger.open(tmp_path)
        assert ledger.state.head is None
        await ledger.close()


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b'{"type":"begun"}\n', b'{"type":"other"}\n'])
async def test_invalid_line_error_names_line_number(line: bytes, tmp_path: Path) -> None:
    await write_entries(tmp_path, HEAD, make_started(0))
    with open(tmp_path / LEDGER_NAME, "ab") as file:
        file.write(line)
    with pytest.raises(LedgerError, match="line 3 is not a valid ledger entry"):
        Ledger.open(tmp_path)


async def test_ledger_without_header_is_error(tmp_path: Path) -> None:
    await write_entries(tmp_path, make_started(0))
    with pytest.raises(LedgerError, match="has no header line that identifies the batch"):
        read_ledger(tmp_path)


async def test_second_runner_in_same_folder_is_refused(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    with pytest.raises(ConfigError, match="a batch is already running in"):
        Ledger.open(tmp_path)
    await ledger.close()
    await write_entries(tmp_path, HEAD)  # the folder is free again


@pytest.mark.process
async def test_folder_is_free_although_a_forked_process_has_a_copy_of_the_file(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        await ledger.close()
        await write_entries(tmp_path, HEAD)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked \(No locks available\); choose a folder on a file system"):
        Ledger.open(tmp_path)


async def test_concurrent_entries_are_all_written(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    await ledger.add(HEAD)
    await asyncio.gather(*(ledger.add(make_started(n)) for n in range(500)))
    assert len(ledger.state.open) == 500
    await ledger.close()
    assert read_ledger(tmp_path).open == ledger.state.open


async def test_cancelled_add_is_still_written(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    await ledger.add(HEAD)
    adding = asyncio.create_task(ledger.add(make_started(0)))
    await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    await ledger.close()
    assert read_ledger(tmp_path).open == {"b.t.0": make_started(0)}


@pytest.mark.process
def test_killed_writer_loses_no_acknowledged_entry(tmp_path: Path) -> None:
    """After `kill -9` at any moment, every acknowledged entry is in the file and the folder is free."""
    program = textwrap.dedent("""
        import asyncio, itertools, sys
        from pathlib import Path
        from tests.batch.test_ledger import HEAD, Ledger, make_started
        async def main():
            ledger = Ledger.open(Path(sys.argv[1]))
            await ledger.add(HEAD)
            for n in itertools.count():
                await ledger.add(make_started(n))
                print(n, flush=True)
        asyncio.run(main())
    """)
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(50)]
    child.send_signal(signal.SIGKILL)
    acknowledged += map(int, child.stdout.read().splitlines())
    child.wait()
    child.stdout.close()
    ledger = Ledger.open(tmp_path)
    os.close(ledger._fd)
    assert set(ledger.state.open) >= {f"b.t.{n}" for n in acknowledged}


# ── a full disk ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A disk of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    require("root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    yield disk  # type: ignore[misc]
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", 0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass


@pytest.mark.process
@pytest.mark.needs("root")
async def test_full_disk_loses_no_entry(small_disk: Path) -> None:
    """Entries go to the reserve on a full disk. When that is used up too, an entry is refused and no part of it is written."""
    ledger = Ledger.open(small_disk / "out")
    await ledger.add(HEAD)
    fill(small_disk)
    written = 0
    with pytest.raises(LedgerError, match="No space left on device"):
        while True:
            await ledger.add(make_finished(written, message="m" * 20_000))
            written += 1
    assert ledger.full and not (small_disk / "out" / RESERVE_NAME).exists()
    assert written > 20
    with pytest.raises(LedgerError):  # later entries are refused even if they would fit
        await ledger.add(make_started(0))
    await ledger.close()
    (small_disk / "filler").unlink()
    await write_entries(small_disk / "out", make_finished(written))
    assert list(read_ledger(small_disk / "out").finished) == [f"b.t.{n}" for n in range(written + 1)]


@pytest.mark.process
@pytest.mark.needs("root")
async def test_full_disk_is_refused_at_start(small_disk: Path) -> None:
    (small_disk / "out").mkdir()
    fill(small_disk)
    with pytest.raises(ConfigError, match=r"disk space cannot be reserved in .* \(No space left on device\)"):
        Ledger.open(small_disk / "out")


@pytest.mark.parametrize("limit", [1000, 5000])
async def test_partial_write_is_rolled_back(limit: int, tmp_path: Path) -> None:
    """A file size limit cuts a line in the middle, as a full disk does."""
    ledger = Ledger.open(tmp_path)
    await ledger.add(HEAD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored: Callable[..., object] | int | None = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(LedgerError, match="File too large"):
            for n in range(1000):
                await ledger.add(make_started(n))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)  # type: ignore[arg-type]
    await ledger.close()
    data = (tmp_path / LEDGER_NAME).read_bytes()
    assert data.endswith(b"}\n") and len(read_ledger(tmp_path).open) == n


def test_incomplete_outcome_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "rollouts" / "s" / "outcome.json"
    file.parent.mkdir(parents=True)
    for content in (b"", b'{"kind": "graded", "rewa'):
        file.write_bytes(content)
        assert read_outcome(tmp_path, "s") is None
