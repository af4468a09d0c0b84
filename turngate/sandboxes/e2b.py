"""E2B sandboxes, through the official `e2b` SDK."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxFileMissing, SandboxGone, SandboxUnavailable
from turngate.sandboxes.base import Resources, Sandbox, SandboxSpec
from turngate.sandboxes.shell import (
    SCRIPT_TIMEOUT_S,
    RequestLost,
    ShellSandbox,
    as_coroutine,
    describe_error,
    host_label,
    is_abandoned,
    owner_labels,
)
from turngate.types import Json

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

log = logging.getLogger(__name__)

RECONNECT_S = 1.0
OUTPUT_MARKER = "--- turngate"  # E2B runs a login shell, whose profile may print something before our script


class ProcessNotFound(SandboxError):
    """E2B reports that something other than a file or a sandbox does not exist, usually a process that has ended."""


class E2BBackend:
    """Creates E2B sandboxes with the API key in `E2B_API_KEY`. The image of a spec is the name of an E2B template."""

    name = "e2b"
    relocates = True
    has_host_programs = False

    def __init__(self, *, reachable: Sequence[str] = (), lease_s: float = 3600.0, patience_s: float = 120.0) -> None:
        self._reachable = list(reachable)  # hosts reachable with network "none", in addition to a spec's
        self._lease_s = lease_s  # an hour is the longest lease available to every E2B account
        self._patience_s = patience_s  # how long a running command may be unreachable

    @property
    def settings(self) -> Mapping[str, Json]:
        return {"reachable": self._reachable, "lease_s": self._lease_s, "patience_s": self._patience_s}

    async def check(self) -> None:
        try:
            await self._list_sandboxes({}, limit=1)
        except RequestLost as error:
            raise SandboxUnavailable(
                f"{error.message}; check this machine's network connection, or try again later"
            ) from None

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """List the parts of a spec that E2B does not apply."""
        return tuple(name for name, value in msgspec.structs.asdict(spec.resources).items() if value)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        e2b = _import_sdk()
        if spec.dockerfile:
            raise SandboxUnavailable(
                "E2B cannot build from a Dockerfile; build an E2B template from it, and pass the template's name as the image"
            )
        if spec.resources != Resources():
            log.warning("the requested resources are not applied: an E2B sandbox has the size of its template")
        closed = spec.network == "none"
        reachable = [*self._reachable, *spec.reachable]
        ends = time.monotonic() + spec.life_s
        creating = asyncio.ensure_future(
            e2b.AsyncSandbox.create(
                template=spec.image or None,
                timeout=math.ceil(min(spec.life_s, self._lease_s)),
                metadata={**spec.labels, **owner_labels()},
                allow_internet_access=None if not closed or reachable else False,
                network={"deny_out": ["0.0.0.0/0"], "allow_out": reachable} if closed and reachable else None,
                lifecycle={"on_timeout": "kill"},
                idempotency_key=str(uuid.uuid4()),  # the SDK retries when the service is busy
            )
        )
        with _map_errors("create a sandbox"):
            try:
                sandbox = await asyncio.shield(creating)
            except asyncio.CancelledError:  # wait until the sandbox exists, so that it can be removed
                with suppress(Exception):
                    await (await run_to_completion(as_coroutine(creating))).kill()
                raise
        return await ShellSandbox.create(E2BConnection(sandbox, self._lease_s, self._patience_s), spec, ends)

    async def sweep(self) -> int:
        e2b = _import_sdk()
        removed = 0
        for sandbox, labels in await self._list_sandboxes(host_label()):
            if is_abandoned(labels):
                with _map_errors("remove a sandbox"):
                    removed += await e2b.AsyncSandbox.kill(sandbox)
        return removed

    async def _list_sandboxes(
        self, labels: dict[str, str], limit: int | None = None
    ) -> list[tuple[str, dict[str, str]]]:
        e2b = _import_sdk()
        sandboxes: list[tuple[str, dict[str, str]]] = []
        with _map_errors("list the sandboxes"):
            pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata=labels or None), limit=limit)
            while pages.has_next and (limit is None or len(sandboxes) < limit):
                sandboxes += [(each.sandbox_id, each.metadata) for each in await pages.next_items()]
        return sandboxes


class E2BConnection:
    """A connection to one E2B sandbox."""

    def __init__(self, sandbox: AsyncSandbox, lease_s: float, patience_s: float) -> None:
        self._sandbox = sandbox
        self._patience_s = patience_s
        self.lease_s = lease_s

    @property
    def id(self) -> str:
        return self._sandbox.sandbox_id

    async def shell(self, script: str) -> tuple[int, str]:
        e2b = _import_sdk()
        with _map_errors("run a command"):
            try:
                result = await self._sandbox.commands.run(f"echo {OUTPUT_MARKER}\n{script}", timeout=SCRIPT_TIMEOUT_S)
            except e2b.CommandExitException as ended:
                result = ended
        return result.exit_code, result.stdout.partition(f"{OUTPUT_MARKER}\n")[2] + (
            result.stderr if result.exit_code else ""
        )

    async def spawn(self, script: str, env: Mapping[str, str]) -> Callable[[], Awaitable[None]]:
        with _map_errors("start a command"):
            handle = await self._sandbox.commands.run(
                script, background=True, envs=dict(env), timeout=0, retain_output=False
            )
        return lambda: self._wait_for_exit(handle)

    async def _wait_for_exit(self, handle: AsyncCommandHandle[None]) -> None:
        """Follow a command's output stream to its end, and reconnect if the stream breaks.

        Raise `RequestLost` if reconnecting fails for longer than `patience_s` seconds.
        """
        e2b = _import_sdk()
        pid, lost_at = handle.pid, 0.0
        stream: AsyncCommandHandle[None] | None = handle
        try:
            while True:
                try:
                    with _map_errors("follow a command"), suppress(e2b.CommandExitException):
                        if stream is None:
                            stream = await self._sandbox.commands.connect(pid, timeout=0, retain_output=False)
                        lost_at = 0.0
                        await stream.wait()
                    return
                except ProcessNotFound:  # the command ended while we were disconnected
                    return
                except RequestLost:
                    lost_at = lost_at or time.monotonic()
                    if time.monotonic() - lost_at > self._patience_s:
                        raise
                    stream = None
                    await asyncio.sleep(RECONNECT_S)
        finally:
            if stream is not None:
                await stream.disconnect()

    async def put(self, path: str, data: bytes | Path) -> None:
        with _map_errors(f"write {path}"):
            if isinstance(data, bytes):
                await self._sandbox.files.write(path, data, request_timeout=SCRIPT_TIMEOUT_S)
            else:
                with data.open("rb") as file:
                    await self._sandbox.files.write(path, file)

    async def get(self, path: str, limit: int) -> bytes:
        data = bytearray()
        with _map_errors(f"read {path}"):
            async with await self._sandbox.files.read(path, format="stream") as chunks:
                async for chunk in chunks:
                    data += chunk
                    if len(data) > limit:
                        raise SandboxError(f"{path} in the sandbox is larger than {limit} bytes")
        return bytes(data)

    async def fetch(self, path: str, target: Path) -> None:
        with target.open("wb") as file, _map_errors(f"read {path}"):
            async with await self._sandbox.files.read(path, format="stream") as chunks:
                async for chunk in chunks:
                    file.write(chunk)

    async def renew(self, seconds: float) -> None:
        with _map_errors("renew the lease"):
            await self._sandbox.set_timeout(math.ceil(seconds))

    async def remove(self) -> None:
        with _map_errors("remove a sandbox"):
            await self._sandbox.kill()


def _import_sdk() -> ModuleType:
    if not os.environ.get("E2B_API_KEY"):
        raise SandboxUnavailable("E2B needs an API key; set E2B_API_KEY")
    try:
        import e2b
    except ImportError:
        raise SandboxUnavailable("the E2B SDK is not installed; run `pip install 'turngate[e2b]'`") from None
    return e2b


@contextmanager
def _map_errors(action: str) -> Iterator[None]:
    """Convert all exceptions to `SandboxError`s whose messages do not contain the API key. `action` says what failed."""
    e2b = _import_sdk()
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:  # the SDK also raises bare `Exception`s and errors of three HTTP libraries
        message = f"E2B could not {action}: {describe_error(error, os.environ.get('E2B_API_KEY', ''))}"
        status = error.status_code if isinstance(error, e2b.SandboxException) else None
        kind: type[SandboxError]
        match error:
            case e2b.FileNotFoundException():
                kind = SandboxFileMissing
            case e2b.SandboxNotRunningException() | e2b.SandboxNotFoundException():
                kind = SandboxGone
            case e2b.NotFoundException():
                kind = ProcessNotFound
            case e2b.AuthenticationException():
                kind = SandboxUnavailable
                message += "; check E2B_API_KEY"
            case e2b.InvalidArgumentException() | e2b.NotEnoughSpaceException():
                kind = SandboxError
            case _ if status is not None and 400 <= status < 500 and status != 429:
                kind = SandboxUnavailable
            case _:
                kind = RequestLost
        raise kind(message) from None
