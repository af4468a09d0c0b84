"""The gateway of a cell as a child process: start `turngate cell`, wait until it responds, restart it if it ends, and stop it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.keys import read_stored_admin_key
from turngate.errors import TurngateError

log = logging.getLogger("turngate")
_START_S = 120.0  # a large tokenizer takes a while
_STOP_S = 30.0  # time to ship the last sessions
_RESTART_PAUSE_S = 1.0
_TAIL_CHARS = 2000
_SET_PARENT_DEATH_SIGNAL = 1  # option of prctl(2)


class CellFailed(TurngateError):
    """The gateway of the cell did not start."""

    kind = "cell_failed"


class CellProcess:
    """A process that runs `turngate cell`. If it ends unexpectedly, it is restarted on the same port, so that its URL stays valid."""

    def __init__(self, shared: str, name: str, data: Path, config: Path, environment: Mapping[str, str] = {}) -> None:
        """Choose a free port for the gateway. The cell's process gets the current environment variables and those in `environment`."""
        self._environment = {**os.environ, **environment}
        self._arguments = ["--shared", shared, "--cell-name", name, "--data", str(data), "--config", str(config)]
        self._data = data
        self._log = data.parent / "cell.log"
        self._port = _find_free_port()
        self._process: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def admin_key(self) -> str:
        return read_stored_admin_key(self._data) or ""

    async def start(self) -> None:
        """Start the gateway, and wait until it answers. Raise `CellFailed` if it exits or takes too long."""
        await self._launch()
        try:
            async with asyncio.timeout(_START_S):
                while not await self._answers():
                    if self._process is not None and self._process.returncode is not None:
                        raise CellFailed(
                            f"`turngate cell` exited with status {self._process.returncode}; the end of its log: {self._tail()}"
                        )
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise CellFailed(
                f"`turngate cell` did not answer within {_START_S:.0f} s; the end of its log: {self._tail()}"
            ) from None
        self._supervising = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Stop the gateway. Before it ends, it ships as many recorded sessions to the shared store as it can."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        process = self._process
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
                    return

    async def _launch(self) -> None:
        command = [sys.executable, "-m", "turngate", "cell", "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,  # so that Ctrl-C in a terminal reaches only the driver
                preexec_fn=_end_with_parent,
            )

    async def _supervise(self) -> None:
        while True:
            assert self._process is not None
            status = await self._process.wait()
            log.warning(
                "`turngate cell` exited with status %d and is being restarted; the end of its log: %s",
                status,
                self._tail(),
            )
            await asyncio.sleep(_RESTART_PAUSE_S)
            await self._launch()

    async def _answers(self) -> bool:
        if not self.admin_key:
            return False
        try:
            async with GatewayClient(self.url, self.admin_key) as client:
                await client.check()
        except (GatewayUnreachable, OSError):
            return False
        return True

    def _tail(self) -> str:
        with suppress(OSError):
            return self._log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
        return f"{self._log} cannot be read"


def _end_with_parent() -> None:
    """Make this process end when its parent is killed. Otherwise, the cell would keep its lease forever without running anything."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
