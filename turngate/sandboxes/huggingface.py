"""Hugging Face's sandboxes, over the official `huggingface_hub` SDK: one Job, a machine of its own, per sandbox.

The SDK blocks, so each call runs in a thread, and only short ones are made: a command is started in the background and
asked about until it has ended. What a command does is in `ShellSandbox`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from turngate.errors import SandboxError, SandboxFileMissing, SandboxUnavailable
from turngate.sandboxes.base import Sandbox, SandboxSpec
from turngate.sandboxes.shell import (
    SCRIPT_TIMEOUT_S,
    Gone,
    RequestLost,
    ShellSandbox,
    describe_error,
    host_label,
    is_abandoned,
    owner_labels,
)

if TYPE_CHECKING:
    import huggingface_hub

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_IMAGE = "python:3.12"  # the SDK's own default
ENDED_STAGES = ("COMPLETED", "CANCELED", "ERROR", "DELETED")  # stages of a Job
POLLS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # between two questions whether a command has ended; the last one repeats


class NotFoundError(SandboxError):
    """A 404. Of a file, or of the sandbox it lay in: the Jobs proxy does not tell them apart."""


class HuggingFaceBackend:
    """Makes Hugging Face sandboxes, with the token in `HF_TOKEN`, in that user's namespace unless one is given."""

    name = "huggingface"
    relocates = True

    def __init__(
        self,
        *,
        flavor: str = "cpu-basic",
        namespace: str = "",
        lease_s: float = 900.0,
        start_s: float = 300.0,
        patience_s: float = 120.0,
        threads: int = 32,
    ) -> None:
        self._flavor = flavor
        self._namespace = namespace
        self._lease_s = lease_s  # the service ends a sandbox that was idle for this long
        self._start_s = start_s
        self._patience_s = patience_s  # how long a running command may be out of reach before we give up
        self._threads = ThreadPoolExecutor(threads, "huggingface")
        self._makers = ThreadPoolExecutor(
            threads, "huggingface-make"
        )  # these block for long; others must not wait for them
        self._warned = False

    async def check(self) -> None:
        try:
            await self._where(_create_api())
        except RequestLost as error:
            raise SandboxUnavailable(f"Hugging Face cannot be reached: {error}") from None

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """What a spec asks for and the service does not apply."""
        network = ("network",) if spec.network == "none" else ()
        return (*network, *(name for name, value in msgspec.structs.asdict(spec.resources).items() if value))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        hub, api = _import_sdk(), _create_api()
        if spec.dockerfile:
            raise SandboxUnavailable("Hugging Face builds no Dockerfile here: push an image and name that")
        if spec.network == "none" and not self._warned:
            self._warned = True
            log.warning("Hugging Face sandboxes have no way to close the network: agents in them reach the internet")
        if spec.resources.cpus or spec.resources.memory_mb or spec.resources.pids:
            log.warning("a Hugging Face sandbox is as large as its flavor; the resources asked for are not applied")
        namespace = await self._where(api)
        ends = time.monotonic() + spec.life_s
        made = self._makers.submit(
            partial(
                hub.Sandbox.create,
                spec.image or DEFAULT_IMAGE,
                flavor=self._flavor,
                idle_timeout=max(1, int(self._lease_s)),
                labels={**spec.labels, **owner_labels()},
                namespace=namespace,
                start_timeout=self._start_s,
                token=api.token,
            )
        )
        with _map_errors("make a sandbox"):
            try:
                sandbox = await asyncio.wrap_future(made)
            except asyncio.CancelledError:
                made.add_done_callback(_kill_unwanted)  # the thread cannot be stopped; what it makes can
                raise
        wire = HuggingFaceConnection(sandbox, api, namespace, self._threads, self._lease_s, self._patience_s)
        return await ShellSandbox.on(wire, spec, ends)

    async def sweep(self) -> int:
        api = _create_api()
        namespace = await self._where(api)

        def left_behind() -> list[str]:
            jobs = api.list_jobs(status=["RUNNING", "SCHEDULING"], labels=host_label(), namespace=namespace)
            return [job.id for job in jobs if is_abandoned(job.labels or {})]

        found = await _call_in_thread(self._threads, "list the sandboxes", left_behind)
        for job in found:
            await _call_in_thread(self._threads, "remove a sandbox", api.cancel_job, job_id=job, namespace=namespace)
        return len(found)

    async def _where(self, api: huggingface_hub.HfApi) -> str:
        if not self._namespace:
            self._namespace = str((await _call_in_thread(self._threads, "say who we are", api.whoami))["name"])
        return self._namespace


class HuggingFaceConnection:
    """One Hugging Face sandbox."""

    def __init__(
        self,
        sandbox: huggingface_hub.Sandbox,
        api: huggingface_hub.HfApi,
        namespace: str,
        threads: ThreadPoolExecutor,
        lease_s: float,
        patience_s: float,
    ) -> None:
        self._sandbox = sandbox
        self._api = api
        self._namespace = namespace
        self._threads = threads
        self._patience_s = patience_s
        self._removed = False
        self.lease_s = lease_s

    @property
    def id(self) -> str:
        return str(self._sandbox.id)

    async def shell(self, script: str) -> tuple[int, str]:
        result = await self._ask(
            "run a command", self._sandbox.run, ["/bin/sh", "-c", script], timeout=SCRIPT_TIMEOUT_S, check=False
        )
        if result.exit_code is None or result.timed_out:
            raise SandboxError("Hugging Face could not run a command: it was killed")
        return result.exit_code, result.stdout + (result.stderr if result.exit_code else "")

    async def spawn(self, script: str, env: Mapping[str, str]) -> Callable[[], Awaitable[None]]:
        process = await self._ask(
            "start a command", self._sandbox.run, ["/bin/sh", "-c", script], env=dict(env), background=True
        )
        return partial(self._over, str(process.id))

    async def _over(self, process: str) -> None:
        """The service keeps no stream for a command in the background: ask, less and less often."""
        asked, lost_at = 0, 0.0
        while True:
            await asyncio.sleep(POLLS_S[min(asked, len(POLLS_S) - 1)])
            asked += 1
            try:
                known = await self._ask("list the commands", self._sandbox.processes)
            except RequestLost:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self._patience_s:
                    raise
                continue
            lost_at = 0.0
            if not any(each.id == process and each.running for each in known):
                return

    async def put(self, path: str, data: bytes | Path) -> None:
        if isinstance(data, bytes):
            await self._ask(f"write {path}", self._sandbox.files.write, path, data)
        else:
            await self._ask(f"write {path}", self._sandbox.files.upload, data, path)

    async def get(self, path: str, limit: int) -> bytes:
        entry = await self._ask(f"read {path}", self._sandbox.files.stat, path)
        if entry.type == "dir":
            raise SandboxError(f"{path} is a folder")
        if entry.size > limit:
            raise SandboxError(f"{path} is larger than {limit} bytes")
        return await self._ask(f"read {path}", self._sandbox.files.read, path)

    async def fetch(self, path: str, target: Path) -> None:
        await self._ask(f"read {path}", self._sandbox.files.download, path, target)

    async def renew(self, seconds: float) -> None:
        await self._ask("renew a sandbox", self._sandbox.processes)  # any call counts as use

    async def remove(self) -> None:
        if self._removed:
            return
        try:
            # Not `Sandbox.kill`, which only logs that it failed.
            await _call_in_thread(
                self._threads, "remove a sandbox", self._api.cancel_job, job_id=self.id, namespace=self._namespace
            )
        except SandboxError:
            if await self._lives():
                raise
        self._removed = True
        self._sandbox.close()

    async def _ask(self, doing: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._removed:
            raise Gone(f"Hugging Face could not {doing}: the sandbox was stopped")
        try:
            return await _call_in_thread(self._threads, doing, call, *args, **kwargs)
        except (RequestLost, NotFoundError) as error:
            if not await self._lives():
                raise Gone(f"{error.message} (the sandbox has ended)") from None
            if isinstance(error, NotFoundError):
                raise SandboxFileMissing(error.message) from None
            raise

    async def _lives(self) -> bool:
        """False only where the service says so."""
        try:
            job = await _call_in_thread(
                self._threads, "look at a sandbox", self._api.inspect_job, job_id=self.id, namespace=self._namespace
            )
        except NotFoundError:
            return False
        except SandboxError:
            return True
        return job.status.stage not in ENDED_STAGES


def _import_sdk() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors

        huggingface_hub.Sandbox  # noqa: B018  (older releases have none)
    except (ImportError, AttributeError):
        raise SandboxUnavailable(
            "Hugging Face's SDK is not installed, or too old: pip install 'turngate[huggingface]'"
        ) from None
    return huggingface_hub


def _create_api() -> huggingface_hub.HfApi:
    hub, token = _import_sdk(), os.environ.get("HF_TOKEN", "")
    if not token:
        raise SandboxUnavailable("Hugging Face needs a token: set HF_TOKEN")
    api: huggingface_hub.HfApi = hub.HfApi(token=token)
    return api


def _kill_unwanted(made: Future[huggingface_hub.Sandbox]) -> None:
    with suppress(Exception):  # it was not made; and what cannot be removed ends when it was idle
        made.result().kill()


async def _call_in_thread(
    threads: ThreadPoolExecutor, doing: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    with _map_errors(doing):
        return await asyncio.get_running_loop().run_in_executor(threads, partial(call, *args, **kwargs))


@contextmanager
def _map_errors(doing: str) -> Iterator[None]:
    """The SDK's exceptions become ours, in this one place, and never carry the token on."""
    errors = _import_sdk().errors
    try:
        yield
    except SandboxError:
        raise
    except (errors.SandboxError, errors.HfHubHTTPError, OSError, ValueError, RuntimeError, _http_error_type()) as error:
        said = f"Hugging Face could not {doing}: {describe_error(error, os.environ.get('HF_TOKEN', ''))}"
        status = None
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
        elif isinstance(error, errors.SandboxError):
            status = error.status_code
        kind: type[SandboxError]
        match status:
            case 404:
                kind = NotFoundError
            case 401 | 402 | 403:
                kind = SandboxUnavailable
            case int() if 400 <= status < 500 and status != 429:
                kind = SandboxError
            case _:
                kind = RequestLost
        raise kind(said) from None


def _http_error_type() -> type[Exception]:
    import httpx2  # the SDK's HTTP library; it lets that one's errors through

    return httpx2.HTTPError
