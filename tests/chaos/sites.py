"""Where faults are injected: a live gateway between the two fault proxies, with agents on one side and the engine on the other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.engine import MODEL, ChaosEngine, serve_engine
from tests.chaos.fault_proxy import FaultProxy, open_proxy
from tests.chaos.invariants import RecordedRollout
from tests.crash.storm import ADMIN, Server, children
from tests.postgres import CutOffProxy, PostgresServer, start_postgres
from tests.speed import scaled
from turngate.render import BUILTIN_TOKENIZER

SILENCE_S = 1.5  # the gateway fails a call whose engine is silent for this long
LEASE_S = 3.0
DISK_MB = 48
_CLOCK = Path(__file__).with_name("clock")  # on the path of the gateways: their wall clock can be moved
_ENGINE = ["--engine", "vllm", "--model", MODEL, "--tokenizer", str(BUILTIN_TOKENIZER), "--alive-s", "1"]
_ENGINE += ["--engine-silence-s", str(SILENCE_S), "--engine-wait-s", "2", "--rest-s", "1"]


class Site:
    """One live gateway, and everything around it that faults act on."""

    def __init__(self, server: Server, engine: ChaosEngine, rng: random.Random) -> None:
        self.server, self.engine, self.rng = server, engine, rng
        self.engine_side: FaultProxy
        self.client_side: FaultProxy
        self.reader: Server = server  # the gateway that shows what was recorded
        self.postgres: PostgresServer | None = None
        self.postgres_side: CutOffProxy | None = None
        self.disk: LoopDisk | None = None
        self.clock: Path = server.folder / "clock"

    @property
    def pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    @property
    def pids(self) -> list[int]:
        """The processes of the gateway: the front and its workers."""
        return [self.pid, *children(self.pid)]

    async def restart(self, number: int = signal.SIGKILL) -> None:
        """End the gateway with a signal and start it again."""
        assert self.server.process is not None
        self.server.process.send_signal(number)
        await asyncio.to_thread(self.server.process.wait)
        self.server.start()

    async def ensure_running(self) -> None:
        """Start the gateway again if the fault has ended it, as systemd would."""
        assert self.server.process is not None
        if self.server.process.poll() is not None:
            self.server.start()

    async def read_rollouts(self, sessions: Sequence[str]) -> dict[str, RecordedRollout]:
        """Read what was recorded. A session that is not there is left out."""
        headers = {"authorization": f"Bearer {ADMIN}"}
        found = {}
        async with httpx.AsyncClient(base_url=self.reader.url, headers=headers, timeout=scaled(30)) as client:
            for session in sessions:
                shown = await _get(client, f"/admin/sessions/{session}")
                if shown is not None:
                    trace = await _get(client, f"/admin/sessions/{session}/trace")
                    rows = await _get(client, f"/admin/sessions/{session}/samples?all=1")
                    found[session] = RecordedRollout(trace, rows["samples"], shown["outcome"])
        return found


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    """Get a document, or None if there is none. Retry while a worker starts."""
    async with asyncio.timeout(scaled(30)):
        while True:
            try:
                response = await client.get(path)
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            if response.status_code == 404:
                return None
            if response.status_code != 503:
                assert response.status_code == 200, response.text
                return response.json()
            await asyncio.sleep(0.1)


def open_single(rng: random.Random) -> AbstractAsyncContextManager[Site]:
    return _open_site(rng, ["--echo-prompt"])


def open_workers(rng: random.Random) -> AbstractAsyncContextManager[Site]:
    return _open_site(rng, ["--engine-api", "generate"], workers=2)


def open_on_disk(rng: random.Random) -> AbstractAsyncContextManager[Site]:
    return _open_site(rng, disk=True)


@asynccontextmanager
async def _open_site(
    rng: random.Random, arguments: Sequence[str] = (), *, workers: int = 1, disk: bool = False
) -> AsyncIterator[Site]:
    """Start an engine, the proxies and `turngate serve`. With `disk`, its data folder is a small file system of its own."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-chaos-")))
        engine = await stack.enter_async_context(serve_engine(rng))
        engine_side = await stack.enter_async_context(open_proxy(_port(engine.url), rng))
        mounted = stack.enter_context(LoopDisk.mount(folder / "data")) if disk else None
        durability = "disk" if disk else "process"
        options = [*_ENGINE, "--engine-url", engine_side.url, *arguments]
        server = Server(folder, durability, workers, options, env=_clock_env(folder))
        site = Site(server, engine, rng)
        site.engine_side, site.disk = engine_side, mounted
        site.client_side = await stack.enter_async_context(open_proxy(server.port, rng))
        await _start(stack, server)
        yield site


@asynccontextmanager
async def open_cell(rng: random.Random) -> AsyncIterator[Site]:
    """Start PostgreSQL, a cell that ships to it through a proxy, and a gateway on the shared store, which shows what was shipped."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-chaos-")))
        (folder / "reader").mkdir()
        postgres = await asyncio.to_thread(stack.enter_context, start_postgres())
        url = postgres.create_database()
        postgres_side = CutOffProxy(url)
        stack.callback(postgres_side.close)
        engine = await stack.enter_async_context(serve_engine(rng))
        engine_side = await stack.enter_async_context(open_proxy(_port(engine.url), rng))
        options = [*_ENGINE, "--engine-url", engine_side.url, "--shared", postgres_side.url, "--lease-s", str(LEASE_S)]
        server = Server(folder, "process", 1, [*options, "--cell-name", "chaos"], "cell", env=_clock_env(folder))
        site = Site(server, engine, rng)
        site.engine_side, site.postgres, site.postgres_side = engine_side, postgres, postgres_side
        site.client_side = await stack.enter_async_context(open_proxy(server.port, rng))
        await _start(stack, server)
        site.reader = Server(folder / "reader", "process", 1, [], data=url)
        await _start(stack, site.reader)
        yield site


async def _start(stack: AsyncExitStack, server: Server) -> None:
    server.start()
    stack.callback(_end, server)
    await server.ready()


def _end(server: Server) -> None:
    assert server.process is not None
    for pid in [server.process.pid, *_children(server.process.pid)]:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
    server.kill()


def _children(pid: int) -> list[int]:
    try:
        return children(pid)
    except OSError:
        return []


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _clock_env(folder: Path) -> dict[str, str]:
    (folder / "clock").write_text("0")
    path = os.pathsep.join([str(_CLOCK), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "TURNGATE_CHAOS_CLOCK": str(folder / "clock")}


class LoopDisk:
    """A small ext4 file system in a file, which can be filled, frozen or made to fail. It needs root."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder = image, folder

    @classmethod
    @contextmanager
    def mount(cls, folder: Path) -> Iterator[LoopDisk]:
        image = folder.with_suffix(".img")
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(DISK_MB << 20)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        disk = cls(image, folder)
        with ExitStack() as stack:
            disk.attach()
            stack.callback(disk.detach)
            folder.chmod(0o700)
            yield disk

    def attach(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.folder))

    def detach(self) -> None:
        _run("umount", "--lazy", str(self.folder))

    def fill(self) -> Path:
        """Fill the disk, and return the file that fills it."""
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file:
            size = 1 << 20
            while size >= 512:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2
            os.fsync(file.fileno())
        return filler

    async def freeze(self, seconds: float, times: int = 1) -> None:
        """Make the disk stop responding, `times` times. A separate process thaws it, even if this one is killed."""
        script = f"for n in $(seq {times}); do fsfreeze -f $0; sleep {seconds}; fsfreeze -u $0; sleep 0.1; done"
        process = await asyncio.create_subprocess_exec("sh", "-c", script, str(self.folder), start_new_session=True)
        assert await process.wait() == 0, "the disk could not be frozen"

    def fail(self) -> None:
        """Report an I/O error to the file system, which then becomes read-only, as with a broken disk."""
        device = _run("findmnt", "-no", "SOURCE", str(self.folder)).strip()
        Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("chaos")

    def repair(self) -> None:
        """Check the file system and mount it again. Nothing may use it."""
        _run("umount", str(self.folder))
        subprocess.run(["fsck.ext4", "-fp", str(self.image)], capture_output=True, check=False)
        self.attach()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
