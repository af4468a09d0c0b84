"""The Ray actor of a cell: passes orders to the process that runs them (`order_runner.py`), and returns their results.

An order is identified by its session and runs only once, even if `run` is called several times. After `cancel`, it does not start any more,
even if `run` is called later. A driver can therefore safely repeat a failed call.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from turngate.errors import TurngateError
from turngate.rollout.cluster.messages import (
    CancelOrder,
    OrderEnded,
    OrderProgress,
    RunnerFailed,
    RunnerReady,
    RunnerReply,
    RunnerSettings,
    RunOrder,
)
from turngate.rollout.order import decode_order
from turngate.store.projects import DEFAULT_PROJECT
from turngate.tasks.archive_cache import ArchiveCache

DATA_FOLDER = "TURNGATE_CELL_DATA"  # environment variable that sets the folder for a node's cells
DEFAULT_FOLDER = "~/.local/share/turngate/cells"
_MAX_LINE_BYTES = 64_000_000
_KEPT_RESULTS = 10_000  # how many results are kept for repeated calls
_CLOSE_S = 120.0


class CellUnusable(TurngateError):
    """The cell on this node has exited, so it cannot run orders."""

    boundary = "sandbox"
    kind = "cell_unusable"


class CellActor:
    """One cell, as a Ray actor. The driver of a batch calls its methods."""

    def __init__(self, settings: bytes) -> None:
        values = msgspec.json.decode(settings, type=RunnerSettings)
        folder = os.environ.get(DATA_FOLDER) or values.folder or DEFAULT_FOLDER
        name = values.name or socket.gethostname()
        self._settings = msgspec.structs.replace(values, folder=folder, name=name)
        self._archives = ArchiveCache()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[RunnerReady | RunnerFailed] | None = None
        self._results: OrderedDict[str, asyncio.Future[OrderEnded]] = OrderedDict()  # by session
        self._sent: set[str] = set()  # the sessions of the orders that the process has and that have not ended
        self._progress: dict[str, OrderProgress] = {}  # by session: changes since `progress` was last called

    async def start(self) -> bytes:
        """Start the cell unless it has been started. Return an encoded `RunnerReady` once it is ready, or `RunnerFailed` if it fails."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "turngate.rollout.cluster.order_runner",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=await asyncio.to_thread(self._open_log),
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
            self._reading = asyncio.create_task(self._read_replies())
            self._write(msgspec.json.encode(self._settings))
        return msgspec.json.encode(await asyncio.shield(self._ready))

    async def run(self, order: bytes, archive: list[Any]) -> bytes:
        """Run an order to its end, and return an encoded `OrderEnded`. Raise `CellUnusable` if the cell exits first.

        `archive` is a list with the Ray reference to the task's archive. It is empty if the task has no archive.
        """
        parsed = decode_order(order)
        session = parsed.session_id
        ended = self._results.get(session)
        if ended is None:
            ended = self._add_result(session)
            try:
                if archive:
                    archives = self._archives.open_project(parsed.project or DEFAULT_PROJECT)
                    if not archives.has(parsed.task.archive):
                        await asyncio.to_thread(archives.add, parsed.task.archive, await archive[0])
                if not ended.done():  # otherwise the order was cancelled, or the process has exited
                    self._write(msgspec.json.encode(RunOrder(msgspec.Raw(order))))
                    self._sent.add(session)
            except BaseException as error:
                if not ended.done():
                    del self._results[session]
                    if isinstance(error, Exception):  # a repeated call that waits for this one fails like it
                        ended.set_exception(error)
                        ended.exception()  # mark it as retrieved: there may be no repeated call
                    else:
                        ended.cancel()
                raise
        return msgspec.json.encode(await asyncio.shield(ended))

    async def cancel(self, session: str) -> None:
        """Cancel an order, and wait until it has ended. Calls to `run` then return an `OrderEnded` without a result.

        An order that the process does not have yet does not start.
        """
        ended = self._results.get(session) or self._add_result(session)
        if session in self._sent:
            self._write(msgspec.json.encode(CancelOrder(session)))
        elif not ended.done():
            ended.set_result(OrderEnded(session, None))
        await asyncio.shield(ended)

    async def progress(self) -> bytes:
        """Return the latest progress of each running order that has advanced since this method was last called."""
        found, self._progress = list(self._progress.values()), {}
        return msgspec.json.encode(found)

    async def close(self) -> None:
        """Cancel all orders, remove their sandboxes, ship the recorded sessions to the shared store, and end the process."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await process.wait()

    def _add_result(self, session: str) -> asyncio.Future[OrderEnded]:
        ended = self._results[session] = asyncio.get_running_loop().create_future()
        while len(self._results) > _KEPT_RESULTS and next(iter(self._results.values())).done():
            self._results.popitem(last=False)
        return ended

    def _open_log(self) -> int:
        folder = Path(self._settings.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(folder / "runner.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write(self, line: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing() or process.returncode is not None:
            raise CellUnusable(
                f"the cell on {self._settings.name} has exited; see its log, {self._settings.folder}/runner.log"
            )
        process.stdin.write(line + b"\n")

    async def _read_replies(self) -> None:
        assert self._process is not None and self._process.stdout is not None and self._ready is not None
        decode = msgspec.json.Decoder(RunnerReply).decode
        failed = RunnerFailed(f"the cell's process exited; see its log, {self._settings.folder}/runner.log")
        while line := await self._process.stdout.readline():
            match reply := decode(line):
                case RunnerReady():
                    self._ready.set_result(reply)
                case RunnerFailed():
                    failed = reply
                case OrderProgress():
                    self._progress[reply.session] = reply
                case OrderEnded():
                    self._progress.pop(reply.session, None)
                    self._sent.discard(reply.session)
                    if (waiting := self._results.get(reply.session)) is not None and not waiting.done():
                        waiting.set_result(reply)
        if not self._ready.done():
            self._ready.set_result(failed)
        for waiting in self._results.values():
            if not waiting.done():
                waiting.set_exception(CellUnusable(f"the cell on {self._settings.name} has failed: {failed.message}"))
                waiting.exception()  # mark the exception as retrieved, since perhaps no call is waiting for it
