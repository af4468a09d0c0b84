"""A tunnel: a command that prints a public URL and leads it to a port of ours, as long as it runs (cloudflared, ngrok, ssh -R …).

Watched from outside, because a dead tunnel often still runs: its URL is asked for `/health` (whatever answers there with the
gateway's header is ours), and a tunnel that has ended or is lost is replaced. A new one has a new URL; who follows the tunnel is
told. Providers limit how often one may be made, so there is a growing pause between tries.

The command ends with us, also where we are killed. It sees our environment without what looks like a secret (`SECRET`), unless
that is named after itself: ngrok gets NGROK_AUTHTOKEN, cloudflared TUNNEL_TOKEN, and neither an admin or an engine's key.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError
from turngate.sandboxes import supervisor
from turngate.sandboxes.relay import GATEWAY_HEADER

URL_PATTERN = r"https?://[A-Za-z0-9.-]+(?::[0-9]+)?[^\s\"'<>|,;)\]}]*"
SECRET_NAME = re.compile(
    r"(KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)\Z", re.IGNORECASE
)  # the end of a variable's name
STOP_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 64 * 1024

UrlListener = Callable[[str], Awaitable[None]]


class Tunnel:
    """Made by `opened`. `url` is the present one; `replaced` counts those before it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pattern: str = URL_PATTERN,
        start_s: float = 60.0,
        probe_every_s: float = 5.0,
        probe_s: float = 10.0,
        probes_lost: int = 3,
        pause_s: tuple[float, float] = (1.0, 60.0),
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.command = command
        self.pattern = re.compile(pattern)
        self.start_s = start_s
        self.probe_every_s = probe_every_s
        self.probe_s = probe_s
        self.probes_lost = probes_lost
        self.pause_s = pause_s
        self.log = log
        self.url = ""
        self.replaced = 0
        self._followers: list[UrlListener] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def followed(self, follower: UrlListener) -> AsyncIterator[None]:
        """Tell `follower` each new URL from now on. One that fails is told again with the next."""
        self._followers.append(follower)
        try:
            yield
        finally:
            self._followers.remove(follower)

    async def start(self) -> str:
        """Run the command until it prints its URL."""
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        said: list[str] = []
        if not shutil.which(self.command[0]):
            raise SandboxError(f"the tunnel's command {self.command[0]} cannot be started: there is no such program")
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *_led_command(self.command),
                env=filter_environment(self.command[0], os.environ),
                stdin=asyncio.subprocess.PIPE,  # held open as long as we live, and never written
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise SandboxError(f"the tunnel's command {self.command[0]} cannot be started: {error.strerror}") from error
        assert process.stdout and process.stderr
        self._reading = [
            asyncio.create_task(self._read(stream, said, found)) for stream in (process.stdout, process.stderr)
        ]
        ended: asyncio.Future[object] = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((found, ended), timeout=self.start_s, return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                await asyncio.wait([found], timeout=0.2)  # what it printed last
            if not found.done():
                end = f"ended with {process.returncode}" if ended.done() else f"took longer than {self.start_s:.0f} s"
                raise SandboxError(f"the tunnel's command {end} without a URL: {' | '.join(said[-5:])[-400:]}")
        except BaseException:
            await run_to_completion(self.stop())
            raise
        finally:
            ended.cancel()
        self.url = found.result()
        return self.url

    async def _read(self, stream: asyncio.StreamReader, said: list[str], found: asyncio.Future[str]) -> None:
        """All that it prints, as long as it runs: nobody else empties the pipe."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # too long to be of interest
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if found.done():
                continue
            said.append(text)
            if match := self.pattern.search(text):
                found.set_result((match[1] if match.re.groups else match[0]).rstrip("/"))

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the last for what is left of its group
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
                if process.stdin:
                    process.stdin.close()  # whatever left the group ends by this
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def keep(self) -> None:
        """Watch it for ever, and replace it when it is lost."""
        shortest, longest = self.pause_s
        pause = shortest
        while True:
            began = time.monotonic()
            self.log(f"tunnel lost: {await self._lost()}")
            if time.monotonic() - began > longest:
                pause = shortest
            await self.stop()
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
                try:
                    await self.start()
                    break
                except SandboxError as error:
                    self.log(error.message)
            self.replaced += 1
            self.log(f"tunnel replaced: {self.url}")
            for follower in list(self._followers):
                try:
                    await follower(self.url)
                except SandboxError as error:
                    self.log(f"a sandbox could not be told the new URL: {error.message}")

    async def _lost(self) -> str:
        """Wait until the tunnel is lost. Why."""
        lost = 0
        # A new connection each time: an old one may live on in a tunnel that takes no others.
        connector = aiohttp.TCPConnector(force_close=True)
        limit = aiohttp.ClientTimeout(total=self.probe_s)
        async with aiohttp.ClientSession(connector=connector, timeout=limit, trust_env=True) as session:
            while self._process and self._process.returncode is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), self.probe_every_s)
                    break
                why = await self._probe(session)
                lost = lost + 1 if why else 0
                if lost >= self.probes_lost:
                    return why
        return "its command has ended"

    async def _probe(self, session: aiohttp.ClientSession) -> str:
        """Why the gateway did not answer; empty when it did."""
        try:
            async with session.get(f"{self.url}/health", allow_redirects=False) as reply:
                return "" if GATEWAY_HEADER in reply.headers else f"{reply.status} that the gateway did not send"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


def filter_environment(program: str, ours: Mapping[str, str]) -> dict[str, str]:
    """What the command may see of our environment."""
    own = ("TUNNEL_", f"{Path(program).name.upper().replace('-', '_')}_")
    return {name: value for name, value in ours.items() if not SECRET_NAME.search(name) or name.upper().startswith(own)}


def _led_command(command: Sequence[str]) -> list[str]:
    """The command under a process that ends it when we end."""
    if not sys.platform.startswith("linux"):  # there it has to end by itself
        return list(command)
    return [sys.executable, "-I", "-S", supervisor.__file__, "--lead", *command]


@asynccontextmanager
async def open_tunnel(command: str | Sequence[str], url: str, **options: object) -> AsyncIterator[Tunnel]:
    """A tunnel to `url`, an address of 127.0.0.1, as long as the block runs.

    `{port}` and `{url}` in the command stand for it. Options: those of `Tunnel`.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    port = url.rpartition(":")[2].strip("/")
    words = [word.replace("{port}", port).replace("{url}", url) for word in words]
    if not words:
        raise SandboxError("the tunnel's command is empty")
    tunnel = Tunnel(words, **options)  # type: ignore[arg-type]
    await tunnel.start()
    watch = asyncio.create_task(tunnel.keep())
    try:
        yield tunnel
    finally:
        watch.cancel()
        await asyncio.wait([watch])
        await run_to_completion(tunnel.stop())
