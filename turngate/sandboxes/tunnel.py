"""A tunnel: a command that prints a public URL and forwards requests from that URL to a local port (cloudflared, ngrok, ssh -R …).

The tunnel is checked from outside, because the command of a dead tunnel often keeps running. A tunnel works if `/health` at its URL answers
with the gateway's header. A tunnel that has ended or stopped answering is replaced, and the URL of the new tunnel is passed to the
listeners (`Tunnel.notify`). Providers limit how often a tunnel may be created, so the pause between attempts grows.

On Linux, the command ends with this process, even if this process is killed. The command inherits our environment, but a variable whose
name looks like that of a secret (`SECRET_NAME`) is passed on only if the name starts with TUNNEL_ or the command's name. For example, ngrok
receives NGROK_AUTHTOKEN and cloudflared receives TUNNEL_TOKEN, but neither receives an admin key.
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
# Matches the end of a variable's name.
SECRET_NAME = re.compile(r"(KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)\Z", re.IGNORECASE)
STOP_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 64 * 1024

UrlListener = Callable[[str], Awaitable[None]]


class Tunnel:
    """A running tunnel, created by `open_tunnel`. `url` is its current URL, and `replaced` counts how often the tunnel was replaced."""

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
        self._listeners: list[UrlListener] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def notify(self, listener: UrlListener) -> AsyncIterator[None]:
        """Call `listener` with each new URL while the block runs. If the listener raises `SandboxError`, it still receives the next URL."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def start(self) -> str:
        """Start the command, wait until it prints its URL, and return the URL."""
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        lines: list[str] = []
        if not shutil.which(self.command[0]):
            raise SandboxError(
                f"cannot start the tunnel: program {self.command[0]} not found; install it, or change the tunnel command"
            )
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *_led_command(self.command),
                env=filter_environment(self.command[0], os.environ),
                stdin=asyncio.subprocess.PIPE,  # never written to; it closes when this process ends
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise SandboxError(f"cannot start the tunnel command {self.command[0]}: {error.strerror}") from error
        assert process.stdout and process.stderr
        self._reading = [
            asyncio.create_task(self._read(stream, lines, found)) for stream in (process.stdout, process.stderr)
        ]
        ended: asyncio.Future[object] = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((found, ended), timeout=self.start_s, return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                await asyncio.wait([found], timeout=0.2)  # its last lines may still arrive
            if not found.done():
                end = f"exited with code {process.returncode}" if ended.done() else f"ran for {self.start_s:.0f} s"
                raise SandboxError(
                    f"the tunnel command {end} without printing a URL; the last lines of its output: "
                    f"{' | '.join(lines[-5:])[-400:] or 'none'}"
                )
        except BaseException:
            await run_to_completion(self.stop())
            raise
        finally:
            ended.cancel()
        self.url = found.result()
        return self.url

    async def _read(self, stream: asyncio.StreamReader, lines: list[str], found: asyncio.Future[str]) -> None:
        """Read a stream of the command to its end, so that its pipe never fills up. Set `found` to the first URL in the output."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # the line is too long to be a URL
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if found.done():
                continue
            lines.append(text)
            if match := self.pattern.search(text):
                found.set_result((match[1] if match.re.groups else match[0]).rstrip("/"))

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # SIGKILL is for the rest of its group
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
                if process.stdin:
                    process.stdin.close()  # also ends processes that have left the group
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def watch(self) -> None:
        """Check the tunnel until this call is cancelled, and replace the tunnel when it is lost."""
        shortest, longest = self.pause_s
        pause = shortest
        while True:
            began = time.monotonic()
            self.log(f"tunnel lost: {await self._wait_until_lost()}")
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
            for listener in list(self._listeners):
                try:
                    await listener(self.url)
                except SandboxError as error:
                    self.log(f"could not write the new URL to a sandbox: {error.message}")

    async def _wait_until_lost(self) -> str:
        """Wait until the tunnel is lost, and return why."""
        lost = 0
        # Use a new connection each time, because an old one may still work in a tunnel that accepts no new ones.
        connector = aiohttp.TCPConnector(force_close=True)
        limit = aiohttp.ClientTimeout(total=self.probe_s)
        async with aiohttp.ClientSession(connector=connector, timeout=limit, trust_env=True) as session:
            while self._process and self._process.returncode is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), self.probe_every_s)
                    break
                reason = await self._probe(session)
                lost = lost + 1 if reason else 0
                if lost >= self.probes_lost:
                    return reason
        return "the command has ended"

    async def _probe(self, session: aiohttp.ClientSession) -> str:
        """Return why the gateway did not answer through the tunnel, or an empty string if it did."""
        try:
            async with session.get(f"{self.url}/health", allow_redirects=False) as reply:
                if GATEWAY_HEADER in reply.headers:
                    return ""
                return f"received a reply with status {reply.status}, but not from the gateway"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


def filter_environment(program: str, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables in `ours` that the tunnel command `program` may see."""
    own = ("TUNNEL_", f"{Path(program).name.upper().replace('-', '_')}_")
    return {name: value for name, value in ours.items() if not SECRET_NAME.search(name) or name.upper().startswith(own)}


def _led_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and ends it when this process ends.

    On systems other than Linux, return `command` itself, which may outlive this process.
    """
    if not sys.platform.startswith("linux"):  # the supervisor needs Linux
        return list(command)
    return [sys.executable, "-I", "-S", supervisor.__file__, "--lead", *command]


@asynccontextmanager
async def open_tunnel(command: str | Sequence[str], url: str, **options: object) -> AsyncIterator[Tunnel]:
    """Keep a tunnel to the local address `url` open while the block runs.

    In the command, `{url}` is replaced with `url`, and `{port}` with its port. `options` are passed to `Tunnel`.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    port = url.rpartition(":")[2].strip("/")
    words = [word.replace("{port}", port).replace("{url}", url) for word in words]
    if not words:
        raise SandboxError("the tunnel command is empty; set it to a command such as `cloudflared tunnel --url {url}`")
    tunnel = Tunnel(words, **options)  # type: ignore[arg-type]
    await tunnel.start()
    watching = asyncio.create_task(tunnel.watch())
    try:
        yield tunnel
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await run_to_completion(tunnel.stop())
