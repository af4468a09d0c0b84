"""Hugging Face sandboxes, through the official `huggingface_hub` SDK: one Job on its own machine per sandbox.

The SDK blocks, so each call runs in a thread. To keep calls short, a command that may run for long is started in the
background and polled until it ends.
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

from turngate.errors import SandboxError, SandboxFileMissing, SandboxGone, SandboxUnavailable
from turngate.sandboxes.base import Resources, Sandbox, SandboxSpec
from turngate.sandboxes.shell import (
    SCRIPT_TIMEOUT_S,
    RequestLost,
    ShellSandbox,
    describe_error,
    host_label,
    is_abandoned,
    owner_labels,
)
from turngate.types import Json

if TYPE_CHECKING:
    import huggingface_hub

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_IMAGE = "python:3.12"  # the SDK's default
ENDED_STAGES = ("COMPLETED", "CANCELED", "ERROR", "DELETED")  # stages of a Job
POLLS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # pauses between polls of a command; the last one repeats


class NotFoundError(SandboxError):
    """The service returned status 404.

    If the request was to a sandbox, either a file or the sandbox itself does not exist. The status does not distinguish the two.
    """


class HuggingFaceBackend:
    """Creates Hugging Face sandboxes with the token in `HF_TOKEN`, by default in the namespace of the token's user."""

    name = "huggingface"
    relocates = True
    has_host_programs = False

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
        self._lease_s = lease_s  # the service ends a sandbox that is idle for this long
        self._start_s = start_s
        self._patience_s = patience_s  # how long a running command may be unreachable
        self._thread_count = threads
        self._threads = ThreadPoolExecutor(threads, "huggingface")
        # A separate pool, because creating a sandbox blocks for a long time and other calls must not wait for it.
        self._creators = ThreadPoolExecutor(threads, "huggingface-make")
        self._warned = False

    @property
    def settings(self) -> Mapping[str, Json]:
        return {
            "flavor": self._flavor,
            "namespace": self._namespace,
            "lease_s": self._lease_s,
            "start_s": self._start_s,
            "patience_s": self._patience_s,
            "threads": self._thread_count,
        }

    async def check(self) -> None:
        try:
            await self._resolve_namespace(_create_api())
        except RequestLost as error:
            raise SandboxUnavailable(
                f"{error.message}; check this machine's network connection, or try again later"
            ) from None

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """List the parts of a spec that Hugging Face does not apply."""
        network = ("network",) if spec.network == "none" else ()
        return (*network, *(name for name, value in msgspec.structs.asdict(spec.resources).items() if value))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        hub, api = _import_sdk(), _create_api()
        if spec.dockerfile:
            raise SandboxUnavailable(
                "Hugging Face cannot build from a Dockerfile; build an image, push it to a registry, and pass the image's name"
            )
        if spec.network == "none" and not self._warned:
            self._warned = True
            log.warning("Hugging Face sandboxes cannot block network access: agents in them can reach the internet")
        if spec.resources != Resources():
            log.warning("the requested resources are not applied: a Hugging Face sandbox has the size of its flavor")
        namespace = await self._resolve_namespace(api)
        ends = time.monotonic() + spec.life_s
        creation = self._creators.submit(
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
        with _map_errors("create a sandbox"):
            try:
                sandbox = await asyncio.wrap_future(creation)
            except asyncio.CancelledError:
                creation.add_done_callback(_kill_unwanted)  # the thread cannot be stopped, but its sandbox can be
                raise
        connection = HuggingFaceConnection(sandbox, api, namespace, self._threads, self._lease_s, self._patience_s)
        return await ShellSandbox.create(connection, spec, ends)

    async def sweep(self) -> int:
        api = _create_api()
        namespace = await self._resolve_namespace(api)

        def find_abandoned() -> list[str]:
            jobs = api.list_jobs(status=["RUNNING", "SCHEDULING"], labels=host_label(), namespace=namespace)
            return [job.id for job in jobs if is_abandoned(job.labels or {})]

        abandoned = await _call_in_thread(self._threads, "list the sandboxes", find_abandoned)
        for job in abandoned:
            await _call_in_thread(self._threads, "remove a sandbox", api.cancel_job, job_id=job, namespace=namespace)
        return len(abandoned)

    async def _resolve_namespace(self, api: huggingface_hub.HfApi) -> str:
        if not self._namespace:
            self._namespace = str((await _call_in_thread(self._threads, "read the account's name", api.whoami))["name"])
        return self._namespace


class HuggingFaceConnection:
    """A connection to one Hugging Face sandbox."""

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
        result = await self._request(
            "run a command", self._sandbox.run, ["/bin/sh", "-c", script], timeout=SCRIPT_TIMEOUT_S, check=False
        )
        if result.exit_code is None or result.timed_out:
            why = f"it took longer than {SCRIPT_TIMEOUT_S:g} s" if result.timed_out else "it was killed"
            raise SandboxError(f"Hugging Face could not run a command: {why}")
        return result.exit_code, result.stdout + (result.stderr if result.exit_code else "")

    async def spawn(self, script: str, env: Mapping[str, str]) -> Callable[[], Awaitable[None]]:
        process = await self._request(
            "start a command", self._sandbox.run, ["/bin/sh", "-c", script], env=dict(env), background=True
        )
        return partial(self._wait_for_exit, str(process.id))

    async def _wait_for_exit(self, process: str) -> None:
        """Poll with growing pauses until a command has ended. The service has no stream for background commands.

        Raise `RequestLost` if the service does not respond for `patience_s` seconds.
        """
        polls, lost_at = 0, 0.0
        while True:
            await asyncio.sleep(POLLS_S[min(polls, len(POLLS_S) - 1)])
            polls += 1
            try:
                processes = await self._request("list the commands", self._sandbox.processes)
            except RequestLost:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self._patience_s:
                    raise
                continue
            lost_at = 0.0
            if not any(each.id == process and each.running for each in processes):
                return

    async def put(self, path: str, data: bytes | Path) -> None:
        if isinstance(data, bytes):
            await self._request(f"write {path}", self._sandbox.files.write, path, data)
        else:
            await self._request(f"write {path}", self._sandbox.files.upload, data, path)

    async def get(self, path: str, limit: int) -> bytes:
        entry = await self._request(f"read {path}", self._sandbox.files.stat, path)
        if entry.type == "dir":
            raise SandboxError(f"{path} in the sandbox is a folder, not a file")
        if entry.size > limit:
            raise SandboxError(f"{path} in the sandbox is larger than {limit} bytes")
        return await self._request(f"read {path}", self._sandbox.files.read, path)

    async def fetch(self, path: str, target: Path) -> None:
        await self._request(f"read {path}", self._sandbox.files.download, path, target)

    async def renew(self, seconds: float) -> None:
        await self._request("renew the lease", self._sandbox.processes)  # any call counts as use

    async def remove(self) -> None:
        if self._removed:
            return
        try:
            # `Sandbox.kill` would only log a failure.
            await _call_in_thread(
                self._threads, "remove a sandbox", self._api.cancel_job, job_id=self.id, namespace=self._namespace
            )
        except SandboxError:
            if await self._is_alive():
                raise
        self._removed = True
        self._sandbox.close()

    async def _request(self, action: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._removed:
            raise SandboxGone(f"Hugging Face could not {action}: the sandbox was stopped")
        try:
            return await _call_in_thread(self._threads, action, call, *args, **kwargs)
        except (RequestLost, NotFoundError) as error:
            if not await self._is_alive():
                raise SandboxGone(f"{error.message} (the sandbox has ended)") from None
            if isinstance(error, NotFoundError):
                raise SandboxFileMissing(error.message) from None
            raise

    async def _is_alive(self) -> bool:
        """Return False only if the service reports that the sandbox has ended."""
        try:
            job = await _call_in_thread(
                self._threads, "inspect a sandbox", self._api.inspect_job, job_id=self.id, namespace=self._namespace
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

        huggingface_hub.Sandbox  # noqa: B018  (missing in older releases)
    except (ImportError, AttributeError):
        raise SandboxUnavailable(
            "the Hugging Face SDK is not installed or is too old; run `pip install 'turngate[huggingface]'`"
        ) from None
    return huggingface_hub


def _create_api() -> huggingface_hub.HfApi:
    hub, token = _import_sdk(), os.environ.get("HF_TOKEN", "")
    if not token:
        raise SandboxUnavailable("Hugging Face needs a token; set HF_TOKEN")
    api: huggingface_hub.HfApi = hub.HfApi(token=token)
    return api


def _kill_unwanted(creation: Future[huggingface_hub.Sandbox]) -> None:
    with suppress(Exception):  # it may not have been created; a sandbox that cannot be removed ends when it is idle
        creation.result().kill()


async def _call_in_thread(
    threads: ThreadPoolExecutor, action: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    with _map_errors(action):
        return await asyncio.get_running_loop().run_in_executor(threads, partial(call, *args, **kwargs))


@contextmanager
def _map_errors(action: str) -> Iterator[None]:
    """Convert the SDK's exceptions to `SandboxError`s whose messages do not contain the token. `action` says what failed."""
    errors = _import_sdk().errors
    try:
        yield
    except SandboxError:
        raise
    except (errors.SandboxError, errors.HfHubHTTPError, OSError, ValueError, RuntimeError, _http_error_type()) as error:
        message = f"Hugging Face could not {action}: {describe_error(error, os.environ.get('HF_TOKEN', ''))}"
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
        if kind is SandboxUnavailable:
            message += "; check HF_TOKEN and its account's permissions and credit"
        raise kind(message) from None


def _http_error_type() -> type[Exception]:
    import httpx2  # the SDK's HTTP library, whose errors it does not catch

    return httpx2.HTTPError
