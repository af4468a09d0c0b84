"""Accept connections and hand each to the worker of its session. This is the front, the main process of `turngate serve --workers N`.

    accept → read the head of the first request → find the session's worker → pass it the connection and the bytes read so far

From then on, the connection belongs to the worker, so the front adds a cost per connection, not per call. The front holds the data folder's
lock, starts the workers, restarts any that die, and stops them all on a signal. All that it knows about a session is its slot, a
number that is derived from the session's id and determines the worker. To keep the process small, the front imports neither the gateway's
application (`app.py`) nor the renderers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import uvloop

from turngate.common.sharding import slot_from_head
from turngate.config import ServeConfig
from turngate.errors import ConfigError, DataFolderInUse
from turngate.gateway.cell.lease_file import create_lease_file
from turngate.server.auth import admin_key
from turngate.server.bind import (
    check_port,
    has_stale_note,
    open_listener,
    publish_address,
    raise_file_limit,
    startup_message,
)
from turngate.store.lock import lock_folder

log = logging.getLogger("turngate")
HEAD_BYTES = 32 * 1024
HEAD_S = 5.0  # a connection is handed over after this time even if its head is incomplete
WAIT_S = 30.0  # how long a connection waits for its worker to restart
STOP_S = 12.0  # how long a worker may take to stop
LOCK_WAIT_S = 60.0  # how long to wait for the workers of a killed front to exit, even on a busy machine
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)  # delays before restarting a worker that keeps dying
STABLE_S = 10.0  # a worker that ran this long is restarted without delay
PATH_BYTES = 100  # maximum length of a Unix socket's path; the system allows 107


class WorkerStart(msgspec.Struct, frozen=True):
    """Start-up parameters that a worker reads from its standard input."""

    number: int
    workers: int
    run: str  # a secret, new each time the gateway starts
    pair: int  # descriptor of the worker's end of the socket pair
    lock: int  # descriptor of the data folder's lock, which the worker keeps open
    sockets: str  # folder of the workers' private sockets
    config: ServeConfig


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker's report that it is ready or, if `error` is set, that it cannot start."""

    error: str = ""


def run(config: ServeConfig) -> None:
    check_port(config)
    data = Path(config.data)
    raise_file_limit()
    with _lock_data(data) as held:
        admin_key(data)  # created once, for all workers
        if config.shared:
            create_lease_file(data)
        listener = open_listener(config)
        with listener, _socket_folder(data) as sockets, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Front(config, listener, held, sockets).serve())


class Front:
    """The front process. It accepts connections, and runs the workers that serve them."""

    def __init__(self, config: ServeConfig, listener: socket.socket, held: IO[bytes], sockets: Path) -> None:
        self._config = config
        self._listener = listener
        self.stopping = asyncio.Event()
        run = secrets.token_hex(8)
        self._workers = [WorkerProcess(n, config, held, sockets, run) for n in range(config.workers)]
        self._next = itertools.cycle(self._workers)
        self._pending: set[PendingConnection] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        runs = [asyncio.create_task(worker.run(self.stopping)) for worker in self._workers]
        try:
            await self._wait_until_ready(runs)
            if self.stopping.is_set():
                return
            with publish_address(Path(self._config.data), self._listener):
                log.info("%s", startup_message(self._config, self._listener))
                self._listener.setblocking(False)
                self._accept_more()
                await self.stopping.wait()
                loop.remove_reader(self._listener)
                self._listener.close()
                for pending in list(self._pending):
                    pending.drop()
                await asyncio.gather(*runs)
        finally:
            self.stopping.set()
            await asyncio.gather(*runs, return_exceptions=True)

    def _stop(self) -> None:
        if self.stopping.is_set():  # a second signal kills the workers immediately
            for worker in self._workers:
                worker.kill()
        self.stopping.set()

    async def _wait_until_ready(self, runs: list[asyncio.Task[None]]) -> None:
        """Wait until all workers are ready or the front is stopping. Raise the error of a worker that cannot start."""
        ready = asyncio.create_task(self._wait_for_workers())
        stopped = asyncio.create_task(self.stopping.wait())
        tasks: list[asyncio.Task[Any]] = [ready, stopped, *runs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for run in runs:
                if run.done():
                    run.result()
        finally:
            ready.cancel()
            stopped.cancel()
            await asyncio.gather(ready, stopped, return_exceptions=True)

    async def _wait_for_workers(self) -> None:
        for worker in self._workers:
            await worker.ready.wait()

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def _accept_more(self) -> None:
        if not self.stopping.is_set():
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptors are left: pause instead of spinning
                log.warning("cannot accept connections at the moment: %s; retrying", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(0.2, self._accept_more)
                return
            self._pending.add(PendingConnection(connection, self))

    def assign(self, pending: PendingConnection, head: bytes) -> None:
        """Assign a connection to the worker that owns its session, or to the next worker in turn if the request names no session."""
        self._pending.discard(pending)
        slot = slot_from_head(head)
        worker = next(self._next) if slot is None else self._workers[slot % len(self._workers)]
        worker.give(pending.connection, head)

    def discard(self, pending: PendingConnection) -> None:
        self._pending.discard(pending)
        pending.connection.close()


class PendingConnection:
    """A connection that has not yet sent the complete head of its first request."""

    def __init__(self, connection: socket.socket, front: Front) -> None:
        self.connection = connection
        self._front = front
        self._head = bytearray()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._read)
        self._timer = loop.call_later(HEAD_S, self._hand_over)

    def _read(self) -> None:
        try:
            data = self.connection.recv(HEAD_BYTES - len(self._head))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.drop()
            return
        self._head += data
        if b"\r\n\r\n" in self._head or b"\n\n" in self._head or len(self._head) >= HEAD_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        self._stop_reading()
        self._front.assign(self, bytes(self._head))

    def drop(self) -> None:
        self._stop_reading()
        self._front.discard(self)

    def _stop_reading(self) -> None:
        self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self.connection)


class WorkerProcess:
    """One worker as the front sees it. This object is kept when the worker's process is restarted."""

    def __init__(self, number: int, config: ServeConfig, held: IO[bytes], sockets: Path, run: str) -> None:
        self._number = number
        self._config = config
        self._held = held
        self._sockets = sockets
        self._run = run
        self.ready = asyncio.Event()
        self._pair: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        # Connections that have not been handed over yet, each with its head and its time of arrival.
        self._waiting: deque[tuple[socket.socket, bytes, float]] = deque()
        self._error = ""

    async def run(self, stopping: asyncio.Event) -> None:
        """Run the process until the front stops, and restart it whenever it dies. Raise `ConfigError` if the first start fails."""
        short_runs = 0  # number of consecutive short runs
        first = True
        while not stopping.is_set():
            began = time.monotonic()
            try:
                code = await self._run_process(stopping)
            except OSError as error:
                code, self._error = 1, f"the worker's process cannot be started: {error.strerror}"
            if stopping.is_set():
                return
            why = self._error or (f"signal {-code}" if code < 0 else f"exit code {code}")
            if first and not self.ready.is_set():
                raise ConfigError(
                    self._error
                    or f"worker {self._number} exited before it was ready ({why}); see the gateway's log for the cause"
                )
            first = False
            self.ready.clear()
            short_runs = 0 if time.monotonic() - began > STABLE_S else short_runs + 1
            pause = BACK_OFF_S[min(short_runs, len(BACK_OFF_S) - 1)]
            log.warning("worker %d is down (%s); restarting%s", self._number, why, f" in {pause} s" * bool(pause))
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause)

    async def _run_process(self, stopping: asyncio.Event) -> int:
        """Run the process until it exits, or terminate it once `stopping` is set. Return its exit code."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._error = ""
        with theirs:
            start = WorkerStart(
                number=self._number,
                workers=self._config.workers,
                run=self._run,
                pair=theirs.fileno(),
                lock=self._held.fileno(),
                sockets=str(self._sockets),
                config=self._config,
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no imports from the current folder, which an agent may be able to write to
                "-m",
                "turngate.server.workers.worker",
                str(self._number),  # shown in process lists
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(start.pair, start.lock),
            )
        self._process = process
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(stopping.wait())
        try:
            loop.add_reader(ours, self._read_report, ours)
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(msgspec.json.encode(start))
                await process.stdin.drain()
            process.stdin.close()
            await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._terminate(process, ended)
            return await ended
        finally:
            self._pair = None
            self._process = None
            loop.remove_reader(ours)
            loop.remove_writer(ours)
            ours.close()
            stopped.cancel()

    async def _terminate(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait([ended], timeout=STOP_S)
        if not ended.done():
            log.warning("worker %d did not stop within %d s; killing it", self._number, STOP_S)
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _read_report(self, ours: socket.socket) -> None:
        try:
            message = ours.recv(64 * 1024)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            message = b""
        if not message:  # the process is ending
            asyncio.get_running_loop().remove_reader(ours)
            self._pair = None
            return
        self._error = msgspec.json.decode(message, type=WorkerReport).error
        if not self._error:
            self._pair = ours
            self.ready.set()
            self._hand_over_waiting()

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def give(self, connection: socket.socket, head: bytes) -> None:
        self._waiting.append((connection, head, time.monotonic()))
        if self._pair is not None:
            self._hand_over_waiting()
        else:
            asyncio.get_running_loop().call_later(WAIT_S, self._give_up)

    def _hand_over_waiting(self) -> None:
        """Hand over as many connections as the socket to the worker accepts now, and the rest when the socket is writable again."""
        loop, pair = asyncio.get_running_loop(), self._pair
        while self._waiting and pair is not None:
            connection, head, _ = self._waiting[0]
            try:
                socket.send_fds(pair, [b"+", head], [connection.fileno()])
            except (BlockingIOError, InterruptedError):
                loop.add_writer(pair, self._hand_over_waiting)
                return
            except (BrokenPipeError, ConnectionResetError):  # the process has died; wait for the restarted one
                self._pair = None
                loop.call_later(WAIT_S, self._give_up)
                return
            except OSError as error:  # too many file descriptors are in transit
                log.warning("cannot hand over a connection at the moment: %s; retrying", error.strerror)
                loop.call_later(0.1, self._hand_over_waiting)
                return
            self._waiting.popleft()
            connection.close()
        if pair is not None:
            loop.remove_writer(pair)

    def _give_up(self) -> None:
        now = time.monotonic()
        while self._waiting and now - self._waiting[0][2] >= WAIT_S - 0.1:
            self._waiting.popleft()[0].close()


@contextmanager
def _lock_data(data: Path) -> Iterator[IO[bytes]]:
    """Lock the data folder. If a front was killed, wait up to `LOCK_WAIT_S` for its workers, which hold the lock until they exit."""
    end = time.monotonic() + LOCK_WAIT_S
    waiting = False
    while True:
        try:
            held = lock_folder(data)
            break
        except DataFolderInUse:
            if not has_stale_note(data) or time.monotonic() > end:
                raise
            if not waiting:
                waiting = True
                log.warning("the workers of a killed gateway are still using the data folder; waiting until they exit")
            time.sleep(0.1)
    with held:
        yield held


@contextmanager
def _socket_folder(data: Path) -> Iterator[Path]:
    """Create a folder for the workers' private sockets, accessible only to this user. Remove it after the block."""
    folder = (data / "sockets").absolute()
    if len(os.fsencode(folder)) > PATH_BYTES - 5:
        folder = Path(tempfile.mkdtemp(prefix="turngate-"))
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
