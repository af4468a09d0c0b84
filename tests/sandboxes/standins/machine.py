"""The common parts of both stand-ins: a folder with processes, injected faults, and an HTTP server."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Machine:
    """One sandbox: its home folder and every process started in it."""

    def __init__(self, folder: Path) -> None:
        self.id = uuid.uuid4().hex[:20]
        self.folder = folder / self.id
        self.folder.mkdir(parents=True)
        self.labels: dict[str, str] = {}
        self.create_body: dict[str, object] = {}  # the body of the request that created it
        self.processes: dict[int, Process] = {}
        self.alive = True

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        base = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "USER": "user", "MACHINE": self.id}
        return {**base, **env}

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> Process:
        process = Process(
            await asyncio.create_subprocess_exec(
                *argv,
                env=self.environ(env),
                cwd=cwd or self.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            ),
            list(argv),
        )
        self.processes[process.pid] = process
        return process

    def pids(self) -> list[int]:
        mark, found = f"MACHINE={self.id}".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    async def destroy(self) -> None:
        self.alive = False
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        for process in self.processes.values():
            await process.ended
        shutil.rmtree(self.folder, ignore_errors=True)


class Process:
    """A process with its output, for any number of listeners at any time."""

    def __init__(self, process: asyncio.subprocess.Process, argv: list[str]) -> None:
        self.pid = process.pid
        self.argv = argv
        self.id = uuid.uuid4().hex
        self.events: list[tuple[str, bytes]] = []
        self.changed = asyncio.Event()
        self.ended = asyncio.ensure_future(self._run(process))

    async def _run(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout and process.stderr
        await asyncio.gather(self._read("stdout", process.stdout), self._read("stderr", process.stderr))
        code = await process.wait()
        self.changed.set()
        return code

    async def _read(self, name: str, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(32768):
            self.events.append((name, chunk))
            self.changed.set()

    async def output(self, seen: int = 0) -> AsyncIterator[tuple[str, bytes]]:
        while True:
            while seen < len(self.events):
                yield self.events[seen]
                seen += 1
            if self.ended.done():
                return
            self.changed.clear()
            waiting = asyncio.ensure_future(self.changed.wait())
            await asyncio.wait({waiting, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    def kill(self) -> bool:
        if self.ended.done():
            return False
        os.killpg(self.pid, signal.SIGKILL)
        return True


@dataclass
class Fault:
    """A fault of the next `times` requests whose method and path match `where`.

    `status`: reply with it, and do nothing. `lose`: handle the request, and cut the connection before the reply. `cut_s`: cut the
    connection this long after a stream has started. `wait_s`: delay the reply.
    """

    where: str
    times: int = 1
    status: int = 0
    body: str = '{"message": "a fault of the test"}'
    lose: bool = False
    cut_s: float | None = None
    wait_s: float = 0.0


FAULT = web.RequestKey("fault", Fault)


@dataclass
class StandIn:
    """A server with machines. Subclasses add the protocol."""

    folder: Path
    url: str = ""
    machines: dict[str, Machine] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def fail(self, fault: Fault) -> None:
        self.faults.append(fault)

    def fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.where, f"{request.method} {request.path}"):
                fault.times -= 1
                return fault
        return None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        fault = self.fault(request)
        if fault:
            await asyncio.sleep(fault.wait_s)
            if fault.status:
                await request.read()
                return web.Response(status=fault.status, text=fault.body, content_type="application/json")
            request[FAULT] = fault
        response = await self.respond(request)
        if fault and fault.lose:
            cut(request)
        return response

    async def respond(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    async def close(self) -> None:
        for machine in self.machines.values():
            if machine.alive:
                await machine.destroy()


def cut(request: web.Request) -> None:
    assert request.transport
    request.transport.abort()


def fault_of(request: web.Request) -> Fault:
    return request.get(FAULT) or Fault("")


@asynccontextmanager
async def serving(standin: StandIn) -> AsyncIterator[None]:
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", standin.handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        standin.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        await web.SockSite(runner, listening).start()
        try:
            yield
        finally:
            await standin.close()
            await runner.cleanup()
