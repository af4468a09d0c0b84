"""A process that runs orders on one machine: `python -m turngate.rollout.cluster.order_runner`, started by a cell actor.

    stdin    the settings, then commands (`messages.py`); the process ends when the input ends
    stdout   replies
    stderr   log

This process runs the cell's gateway as a child (`cell_process.py`) and the rollouts in its own event loop. It is a grandchild of the Ray
worker, because Ray kills workers and their children without notice. When the actor is gone, the input ends. This process then cancels its
rollouts, removes their sandboxes and stops the gateway.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec

import turngate
from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion, wait_for_tasks
from turngate.common.database_url import parse_database_url
from turngate.errors import ConfigError, TurngateError
from turngate.rollout.cluster.cell_process import CellProcess
from turngate.rollout.cluster.messages import (
    CancelOrder,
    OrderEnded,
    OrderProgress,
    RunnerCommand,
    RunnerFailed,
    RunnerReady,
    RunnerReply,
    RunnerSettings,
    RunOrder,
)
from turngate.rollout.concurrency import Bounds, Concurrency
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.executor import AttemptResult, LocalExecutor
from turngate.rollout.order import RolloutOrder, decode_order
from turngate.rollout.outcome import RolloutProgress
from turngate.rollout.resolve import MachineResolver
from turngate.sandboxes import get_backend
from turngate.tasks.archive_cache import ArchiveCache

log = logging.getLogger("turngate")
_MAX_LINE_BYTES = 64_000_000
_MAX_ORDERS = 100_000  # no real limit: the driver limits running orders, and only starting and grading are limited here
_MAX_FOLDERS = 1000


class ProjectExecutors:
    """The executors of a cell, one for each project. Their gateway clients are closed with `stack`."""

    def __init__(
        self, cell: CellProcess, resolver: MachineResolver, connector: GatewayConnector, stack: AsyncExitStack
    ) -> None:
        self._cell = cell
        self._resolver = resolver
        self._connector = connector
        self._stack = stack
        self._open: dict[str, LocalExecutor] = {}
        self._lock = asyncio.Lock()

    async def open(self, project: str) -> LocalExecutor:
        """Return the executor of a project, and open it if necessary. An empty name means the project `default`."""
        async with self._lock:
            if project not in self._open:
                client = GatewayClient(self._cell.url, self._cell.admin_key, project)
                gateway = await self._stack.enter_async_context(client)
                # The previous process in this folder left these sessions open. It has ended, together with its agents.
                for session in await gateway.sessions("open"):
                    await gateway.cancel(session)
                self._open[project] = LocalExecutor(self._resolver, gateway, self._connector)
            return self._open[project]


class OrderRunner:
    """Starts the cell's gateway, and runs the orders that the process receives until its input ends."""

    def __init__(self, settings: RunnerSettings, folder: Path, send: Callable[[RunnerReply], None]) -> None:
        self._settings = settings
        self._folder = folder
        self._send = send
        self._running: dict[str, asyncio.Task[AttemptResult]] = {}  # by session
        self._concurrency = Concurrency(Bounds(running=_MAX_ORDERS))

    async def run(self, commands: asyncio.StreamReader) -> None:
        settings = self._settings
        backend = get_backend(settings.sandbox, settings.sandbox_settings)
        await backend.check()
        await backend.sweep()
        config = _write_config(settings, self._folder)
        cell = CellProcess(settings.shared, settings.name, self._folder / "data", config, settings.environment)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(cell.stop)
            await cell.start()
            connector = await stack.enter_async_context(GatewayConnector(cell.url))
            resolver = MachineResolver(self._folder / "rollouts", ArchiveCache())
            executors = ProjectExecutors(cell, resolver, connector, stack)
            await executors.open("")
            stack.push_async_callback(self._end_all)
            self._send(RunnerReady(version=turngate.__version__, url=cell.url, pid=os.getpid()))
            decode = msgspec.json.Decoder(RunnerCommand).decode
            while line := await commands.readline():
                self._handle(decode(line), executors)

    def _handle(self, command: RunnerCommand, executors: ProjectExecutors) -> None:
        match command:
            case RunOrder():
                order = decode_order(bytes(command.order))
                if order.session_id not in self._running:
                    work = asyncio.create_task(self._execute(order, executors))
                    self._running[order.session_id] = work
                    work.add_done_callback(lambda _: self._end(order.session_id, work))
            case CancelOrder():
                if (found := self._running.get(command.session)) is not None:
                    found.cancel()

    async def _execute(self, order: RolloutOrder, executors: ProjectExecutors) -> AttemptResult:
        def watch(progress: RolloutProgress) -> None:
            self._send(OrderProgress(order.session_id, progress.stage, progress.turns, progress.sampled_tokens))

        slot = self._concurrency.new_slot()
        try:
            executor = await executors.open(order.project)
            return await executor.prepare(order, watch, slot).run()
        finally:
            slot.leave()

    def _end(self, session: str, work: asyncio.Task[AttemptResult]) -> None:
        """Report the end of an order, also if it was cancelled before its first step."""
        del self._running[session]
        result: AttemptResult | None = None
        if not work.cancelled():
            if (error := work.exception()) is not None:
                log.error("the order of session %s failed", session, exc_info=error)
            else:
                result = work.result()
        self._send(OrderEnded(session, result))

    async def _end_all(self) -> None:
        """Cancel all rollouts, and wait until their sandboxes are removed."""
        running = list(self._running.values())
        for work in running:
            work.cancel()
        if running:
            await run_to_completion(wait_for_tasks(*running))


def claim_folder(place: str, shared: str) -> Path:
    """Lock a folder below `place` that no other process on this machine uses, and return it. It stays locked until this process ends.

    A new cell on the same machine gets the folder of a cell that has ended, and ships the sessions that the old cell could not ship. Each
    shared store has separate folders, so that every session is shipped to the store of its batch. Raise `ConfigError` if no
    folder can be locked.
    """
    root = Path(place).expanduser() / parse_database_url(shared).folder.name
    for number in range(1, _MAX_FOLDERS + 1):
        folder = root / f"cell-{number}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{root} cannot be written to ({error.strerror}); restart Ray on the node with TURNGATE_CELL_DATA set to a writable "
                "folder"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder
        except BlockingIOError:
            os.close(lock)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"{root} cannot be locked ({error.strerror}); restart Ray on the node with TURNGATE_CELL_DATA set to a folder on a "
                "file system that supports locks"
            ) from None
    raise ConfigError(
        f"{root}: all {_MAX_FOLDERS} folders for cells are in use on this machine; stop cells that are no longer needed"
    )


def _write_config(settings: RunnerSettings, folder: Path) -> Path:
    """Write the gateway's settings and the script of the scripted engine, if any, to `folder`. Return the path of the settings file."""
    values = dict(settings.gateway)
    if settings.script:
        script = folder / "script.json"
        script.write_text(settings.script)
        values["script"] = str(script)
    lines = [f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in values.items() if value is not None]
    path = folder / "gateway.toml"
    path.write_text("".join(lines))
    return path


async def _read_commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _run() -> int:
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints go to the log, so that the actor receives only replies

    def send(reply: RunnerReply) -> None:
        with suppress(BrokenPipeError):  # the actor is gone; this process will end with its input
            output.write(msgspec.json.encode(reply) + b"\n")
            output.flush()

    commands = await _read_commands()
    try:
        settings = msgspec.json.decode(await commands.readline(), type=RunnerSettings)
        folder = await asyncio.to_thread(claim_folder, settings.folder, settings.shared)
        log.info("running orders in %s", folder)
        await OrderRunner(settings, folder, send).run(commands)
    except TurngateError as error:
        send(RunnerFailed(error.message))
        return 1
    return 0


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends with its input, not on Ctrl-C
    if child := os.fork():  # Ray kills the children of a worker, but not its grandchildren
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return asyncio.run(_run())


if __name__ == "__main__":
    sys.exit(main())
