"""The parent of several workers: `turngate serve --workers N`. It listens, and hands every connection to the worker whose
sessions it speaks for.

    accept → read the head of the first request → whose is it? → pass the connection itself, with what was read

After that the connection is the worker's; the front sees no byte of it, so it costs per connection and not per call. It holds
the data folder's lock, starts its workers, starts one again that died, and ends them all when it is told to stop. It knows
nothing of sessions but their slots, and imports nothing heavy.
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
from turngate.server.auth import admin_key
from turngate.server.bind import has_stale_note, open_listener, publish_address, raise_file_limit, startup_message
from turngate.store.lock import lock_folder

log = logging.getLogger("turngate")
HEAD_BYTES = 32 * 1024
HEAD_S = 5.0  # a caller whose head takes longer is handed over as far as it came
WAIT_S = 30.0  # how long a connection waits for its worker to be started again
STOP_S = 12.0  # how long a worker may take to stop
LOCK_WAIT_S = 10.0  # how long the workers of a front that was killed may take to be gone
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)  # before each start again of a worker that does not stay up
STABLE_S = 10.0
PATH_BYTES = 100  # of a Unix socket; the system takes 107


class WorkerStart(msgspec.Struct, frozen=True):
    """What a worker is told on its standard input."""

    number: int
    workers: int
    run: str  # another one each time that the gateway is started
    pair: int  # descriptor of its end of the socket pair
    lock: int  # descriptor of the data folder's lock, kept for as long as it lives
    sockets: str  # folder of the workers' own sockets
    config: ServeConfig


class WorkerReport(msgspec.Struct, frozen=True):
    """What a worker tells: that it serves, or why it cannot."""

    wrong: str = ""


def run(config: ServeConfig) -> None:
    data = Path(config.data)
    raise_file_limit()
    with _lock_data(data) as held:
        admin_key(data)  # made here, once, for all of them
        listener = open_listener(config)
        with listener, _socket_folder(data) as sockets, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Front(config, listener, held, sockets).serve())


class Front:
    def __init__(self, config: ServeConfig, listener: socket.socket, held: IO[bytes], sockets: Path) -> None:
        self._config = config
        self._listener = listener
        self.stopping = asyncio.Event()
        run = secrets.token_hex(8)
        self._workers = [WorkerProcess(n, config, held, sockets, run) for n in range(config.workers)]
        self._next = itertools.cycle(self._workers)
        self._arriving: set[PendingConnection] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop)
        lives = [asyncio.create_task(worker.live(self.stopping)) for worker in self._workers]
        try:
            await self._all_ready(lives)
            if self.stopping.is_set():
                return
            log.info("%s", startup_message(self._config, self._listener))
            with publish_address(Path(self._config.data), self._listener):
                self._listener.setblocking(False)
                self._accept_more()
                await self.stopping.wait()
                loop.remove_reader(self._listener)
                self._listener.close()
                for arriving in list(self._arriving):
                    arriving.drop()
                await asyncio.gather(*lives)
        finally:
            self.stopping.set()
            await asyncio.gather(*lives, return_exceptions=True)

    def _told_to_stop(self) -> None:
        if self.stopping.is_set():  # told twice: at once
            for worker in self._workers:
                worker.kill()
        self.stopping.set()

    async def _all_ready(self, lives: list[asyncio.Task[None]]) -> None:
        """Raises what the first worker says that cannot start."""
        everyone = asyncio.create_task(self._each_ready())
        stopped = asyncio.create_task(self.stopping.wait())
        ends: list[asyncio.Task[Any]] = [everyone, stopped, *lives]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for life in lives:
                if life.done():
                    life.result()
        finally:
            everyone.cancel()
            stopped.cancel()
            await asyncio.gather(everyone, stopped, return_exceptions=True)

    async def _each_ready(self) -> None:
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
            except OSError as error:  # out of descriptors: wait for some to come back, rather than try in a circle
                log.warning("no connection can be taken at present: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(0.2, self._accept_more)
                return
            self._arriving.add(PendingConnection(connection, self))

    def assign(self, arriving: PendingConnection, head: bytes) -> None:
        """Give a connection to the worker that has its session, or to the next one if it does not say."""
        self._arriving.discard(arriving)
        slot = slot_from_head(head)
        worker = next(self._next) if slot is None else self._workers[slot % len(self._workers)]
        worker.give(arriving.connection, head)

    def gone(self, arriving: PendingConnection) -> None:
        self._arriving.discard(arriving)
        arriving.connection.close()


class PendingConnection:
    """A connection until its first request's head is there, or has taken too long."""

    def __init__(self, connection: socket.socket, front: Front) -> None:
        self.connection = connection
        self._front = front
        self._head = bytearray()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._read)
        self._late = loop.call_later(HEAD_S, self._enough)

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
            self._enough()

    def _enough(self) -> None:
        self._leave()
        self._front.assign(self, bytes(self._head))

    def drop(self) -> None:
        self._leave()
        self._front.gone(self)

    def _leave(self) -> None:
        self._late.cancel()
        asyncio.get_running_loop().remove_reader(self.connection)


class WorkerProcess:
    """One worker process, as the front sees it, through all its lives."""

    def __init__(self, number: int, config: ServeConfig, held: IO[bytes], sockets: Path, run: str) -> None:
        self._number = number
        self._config = config
        self._held = held
        self._sockets = sockets
        self._run = run
        self.ready = asyncio.Event()
        self._pair: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: deque[tuple[socket.socket, bytes, float]] = deque()  # connections that it has not been given
        self._wrong = ""

    async def live(self, stopping: asyncio.Event) -> None:
        """Start it, and again whenever it dies, until the front stops. Raises if it cannot be started the first time."""
        short = 0  # lives in a row that were
        first = True
        while not stopping.is_set():
            began = time.monotonic()
            try:
                code = await self._once(stopping)
            except OSError as error:
                code, self._wrong = 1, f"it cannot be started: {error.strerror}"
            if stopping.is_set():
                return
            if first and not self.ready.is_set():
                raise ConfigError(self._wrong or f"worker {self._number} ended with {code} before it was ready")
            first = False
            self.ready.clear()
            short = 0 if time.monotonic() - began > STABLE_S else short + 1
            pause = BACK_OFF_S[min(short, len(BACK_OFF_S) - 1)]
            why = self._wrong or (f"signal {-code}" if code < 0 else f"exit code {code}")
            log.warning(
                "worker %d ended (%s); it is started again%s", self._number, why, f" in {pause} s" * bool(pause)
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause)

    async def _once(self, stopping: asyncio.Event) -> int:
        """One life: its exit code."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._wrong = ""
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
                "-P",  # nothing is imported from the current folder, where an agent may be able to write
                "-m",
                "turngate.server.workers.worker",
                str(self._number),  # for whoever reads a list of processes
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(start.pair, start.lock),
            )
        self._process = process
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(stopping.wait())
        try:
            loop.add_reader(ours, self._hear, ours)
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(msgspec.json.encode(start))
                await process.stdin.drain()
            process.stdin.close()
            await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._end(process, ended)
            return await ended
        finally:
            self._pair = None
            self._process = None
            loop.remove_reader(ours)
            loop.remove_writer(ours)
            ours.close()
            stopped.cancel()

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait([ended], timeout=STOP_S)
        if not ended.done():
            log.warning("worker %d did not stop within %d s and is killed", self._number, STOP_S)
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _hear(self, ours: socket.socket) -> None:
        try:
            said = ours.recv(64 * 1024)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if not said:  # its process ends, or has ended
            asyncio.get_running_loop().remove_reader(ours)
            self._pair = None
            return
        self._wrong = msgspec.json.decode(said, type=WorkerReport).wrong
        if not self._wrong:
            self._pair = ours
            self.ready.set()
            self._pass_on()

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def give(self, connection: socket.socket, head: bytes) -> None:
        self._waiting.append((connection, head, time.monotonic()))
        if self._pair is not None:
            self._pass_on()
        else:
            asyncio.get_running_loop().call_later(WAIT_S, self._give_up)

    def _pass_on(self) -> None:
        """As many as it takes at present. The rest follows when it has taken those."""
        loop, pair = asyncio.get_running_loop(), self._pair
        while self._waiting and pair is not None:
            connection, head, _ = self._waiting[0]
            try:
                socket.send_fds(pair, [b"+", head], [connection.fileno()])
            except (BlockingIOError, InterruptedError):
                loop.add_writer(pair, self._pass_on)
                return
            except (BrokenPipeError, ConnectionResetError):  # it just died; they wait for its next life
                self._pair = None
                loop.call_later(WAIT_S, self._give_up)
                return
            except OSError as error:  # too many connections are on their way at present
                log.warning("a connection cannot be handed over at present: %s", error.strerror)
                loop.call_later(0.1, self._pass_on)
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
    """The data folder, for this front alone. Workers of one that was killed hold it until they are gone: they are waited for."""
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            held = lock_folder(data)
            break
        except DataFolderInUse:
            if not has_stale_note(data) or time.monotonic() > end:
                raise
            time.sleep(0.1)
    with held:
        yield held


@contextmanager
def _socket_folder(data: Path) -> Iterator[Path]:
    """A folder for the workers' own sockets that only this user can enter."""
    folder = (data / "sockets").absolute()
    if len(os.fsencode(folder)) > PATH_BYTES - 5:
        folder = Path(tempfile.mkdtemp(prefix="turngate-"))
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
