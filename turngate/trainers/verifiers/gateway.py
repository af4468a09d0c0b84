"""A mixin for verifiers' harnesses: the program runs in verifiers' runtime, and its model calls come here, by prime-rl's rollout API.

    class GatewayBashConfig(GatewayConfig, BashHarnessConfig): ...
    class GatewayBash(RolloutGatewayMixin[GatewayBashConfig], BashHarness): ...

    register → run the program with the rollout's own URL and key → (cancel) → it is stopped → unregister → trajectory → graft → hook

In the spirit of the RolloutGatewayMixin that was proposed for verifiers, with its faults mended: the trajectory is asked for when no
more turns can come, and kept however the program ended; a reply that lacks a field changes nothing; the hook always runs;
cancelling is told to the gateway first, so that a generation ends; a way to the gateway that is gone fails the rollout, as nobody's
fault, and is not replaced by one that the running program never learns; what is not configured is told by name.
`gateway_enabled = false` leaves the harness as it is, for evaluating at any other endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
import verifiers.v1 as vf
from pydantic import Field

from turngate.client.keys import read_admin_key
from turngate.common.aio import run_to_completion
from turngate.errors import ConfigError
from turngate.trainers.verifiers.graft import Turn, graft
from turngate.types import Json, Sampling

log = logging.getLogger("turngate")
GATEWAY = "TURNGATE_GATEWAY"  # where it is, if the configuration does not say
_END_S = 15.0  # for the gateway to end a rollout
_BACK_S = 40.0  # for a gateway that is being started again

ConfigT = TypeVar("ConfigT", bound=vf.HarnessConfig)


class GatewayConfig(vf.HarnessConfig):
    """What a harness with the mixin is told, beside its own settings."""

    gateway: str = ""
    """URL of the gateway; else $TURNGATE_GATEWAY. Its admin key comes from $TURNGATE_ADMIN_KEY."""
    gateway_enabled: bool = True
    """Off: the harness talks to the run's own endpoint, as it does without the mixin."""
    public_url: str = ""
    """Where the program reaches the gateway, if not at `gateway`: a tunnel's address, a name inside of a network."""
    poll_interval: float = Field(5.0, gt=0)
    """Seconds between looks at whether the program's way to the gateway still leads there."""
    silence_s: float = Field(60.0, gt=0)
    """Seconds without an answer on that way after which the rollout has failed."""


# ── prime-rl's API ──────────────────────────────────────────────────────────────────────────────────────────────────


class Registered(msgspec.Struct, frozen=True):
    rollout_id: str
    status: str
    api_key: str


class Tokens(msgspec.Struct, frozen=True):
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float | None]


class Step(msgspec.Struct, frozen=True):
    prompt: list[Json]
    completion: list[Json]
    tokens: Tokens
    is_truncated: bool
    extras: dict[str, Json] = {}


class Trajectory(msgspec.Struct, frozen=True):
    """What is needed of the reply. A reply without one of these is none."""

    rollout_id: str
    status: str
    num_turns: int
    model: str
    is_truncated: bool
    trajectory: list[Step]


class Rollouts(AbstractAsyncContextManager["Rollouts"]):
    """`/v1/rollouts/{id}/…` of one gateway. What fails is an `InterceptionError`: it was not the agent."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {admin_key}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Rollouts:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def register(self, rollout: str, body: Mapping[str, Json]) -> Registered:
        return _read(await self._ask("POST", rollout, "register", body), Registered)

    async def trajectory(self, rollout: str) -> Trajectory:
        return _read(await self._ask("GET", rollout, "trajectory"), Trajectory)

    async def cancel(self, rollout: str) -> None:
        await self._ask("POST", rollout, "cancel", gone=True)

    async def unregister(self, rollout: str) -> None:
        """No more turns. Twice is fine, and so is a rollout that is gone."""
        await self._ask("POST", rollout, "unregister", gone=True)

    async def _ask(
        self, method: str, rollout: str, verb: str, body: Mapping[str, Json] | None = None, *, gone: bool = False
    ) -> bytes:
        """A gateway that is being started again is waited for."""
        deadline = time.monotonic() + _BACK_S
        while True:
            try:
                return await self._answer(method, f"{self.url}/v1/rollouts/{quote(rollout)}/{verb}", body, gone)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if time.monotonic() > deadline:
                    why = str(error) or type(error).__name__
                    raise vf.InterceptionError(f"gateway {self.url} cannot be reached to {verb}: {why}") from error
                await asyncio.sleep(0.5)

    async def _answer(self, method: str, url: str, body: Mapping[str, Json] | None, gone: bool) -> bytes:
        assert self._http is not None, "use it as a context manager"
        async with self._http.request(method, url, json=body, allow_redirects=False) as response:
            answered = await response.read()
            if response.status == 200 or (gone and response.status == 404):
                return answered
            said = answered.decode("utf-8", "replace")[:300]
            raise vf.InterceptionError(f"gateway: {url} answered {response.status}: {said}")


T = TypeVar("T", Registered, Trajectory)


def _read(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:  # a field that is missing, too
        raise vf.InterceptionError(f"gateway: the reply is no {kind.__name__.lower()}: {error}") from None


def turns_of(told: Trajectory) -> list[Turn]:
    """The turns of a trajectory. Which goes on from which is told by the ids: a prompt begins with all that its parent was."""
    found: list[Turn] = []
    whole: list[list[int]] = []  # of each step, its prompt and its answer
    for index, step in enumerate(told.trajectory):
        tokens = step.tokens
        parent = _parent(tokens.prompt_ids, whole)
        said = 0 if parent is None else len(told.trajectory[parent].prompt) + 1
        before = 0 if parent is None else len(whole[parent])
        trained = any(tokens.completion_mask)
        logprobs = [value for value in tokens.completion_logprobs if value is not None]
        if len(tokens.completion_mask) != len(tokens.completion_ids) or (
            trained and len(logprobs) != len(tokens.completion_ids)
        ):
            raise vf.InterceptionError(
                f"gateway: step {index}: {len(tokens.completion_ids)} tokens, {len(tokens.completion_mask)} in the mask, "
                f"{len(logprobs)} log-probabilities"
            )
        whole.append([*tokens.prompt_ids, *tokens.completion_ids])
        found.append(
            Turn(
                id=index,
                parent=parent,
                first=True,
                messages=step.prompt[said:],
                tools=(),
                context=tokens.prompt_ids[before:],
                ids=tokens.completion_ids,
                logprobs=logprobs if trained else None,
                untrained="" if trained else str(step.extras.get("untrained") or "masked by the gateway"),
                message=step.completion[0] if step.completion else {"role": "assistant", "content": ""},
                finish="length" if step.is_truncated else "stop",
                model=told.model,
            )
        )
    return found


def _parent(prompt: list[int], whole: list[list[int]]) -> int | None:
    """The step that a prompt goes on from: of those that it begins with, the longest."""
    longest_first = sorted(range(len(whole)), key=lambda j: len(whole[j]), reverse=True)
    return next((j for j in longest_first if prompt[: len(whole[j])] == whole[j]), None)


# ── the mixin ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RolloutGatewayMixin(Generic[ConfigT]):
    """Put it before a `Harness`. `after_rollout` is for subclasses."""

    config: Any  # a GatewayConfig, and the harness's own

    async def after_rollout(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Called once per rollout when its turns are in the trace, however the program ended."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **more: Any,
    ) -> vf.ProgramResult:
        launch = super().launch  # type: ignore[misc]  # the harness's
        if not self.config.gateway_enabled:
            return await launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more)
        async with Rollouts(gateway_url(self.config), _admin_key()) as rollouts:
            registered = await rollouts.register(trace.id, _registration(ctx, trace))
            way = self.config.public_url.rstrip("/") or runtime.host_url(rollouts.url)
            # As verifiers' own server spells it: harnesses of other dialects take the last part off, or put theirs behind it.
            base_url = f"{way}/v1/rollouts/{quote(trace.id)}/v1"
            running = launch(ctx, trace, runtime, base_url, registered.api_key, mcp_urls, data, **more)
            try:
                result = await self._watched(running, way, rollouts, trace.id)
            except BaseException as error:
                await run_to_completion(self._over(rollouts, trace, runtime, error))
                raise
            await run_to_completion(self._over(rollouts, trace, runtime, None))
            return result

    async def _watched(
        self, running: Coroutine[Any, Any, vf.ProgramResult], way: str, rollouts: Rollouts, rollout: str
    ) -> vf.ProgramResult:
        """The program, until it ends or its way to the gateway does. It is over when this returns."""
        program = asyncio.ensure_future(running)
        watching = asyncio.ensure_future(self._way_is_lost(way))
        try:
            await asyncio.wait({program, watching}, return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            raise vf.TunnelError(watching.result())
        except asyncio.CancelledError:
            # First of all: what is being generated for nobody ends, and no call of a dying program becomes a turn.
            await run_to_completion(_within(_END_S, rollouts.cancel(rollout)))
            raise
        finally:
            watching.cancel()
            program.cancel()
            await run_to_completion(_gathered(program, watching))

    async def _way_is_lost(self, way: str) -> str:
        """Returns when the gateway has not answered there for too long. The address stays what the program was told."""
        heard = time.monotonic()
        fresh = aiohttp.TCPConnector(force_close=True)  # a connection that is still open says nothing about a new one
        timeout = aiohttp.ClientTimeout(total=self.config.poll_interval + 5)
        async with aiohttp.ClientSession(connector=fresh, timeout=timeout) as http:
            while time.monotonic() - heard <= self.config.silence_s:
                await asyncio.sleep(self.config.poll_interval)
                try:
                    async with http.get(way + "/", allow_redirects=False) as response:
                        if "x-turngate" in response.headers:
                            heard = time.monotonic()
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
        return f"{way} has not led to the gateway for {self.config.silence_s:.0f} s; the rollout cannot go on"

    async def _over(
        self, rollouts: Rollouts, trace: vf.Trace, runtime: vf.Runtime, error: BaseException | None
    ) -> None:
        """No more turns; those that there are go into the trace; the hook. An error that came before stays the one that is told."""
        try:
            await rollouts.unregister(trace.id)
            told = turns_of(await rollouts.trajectory(trace.id))
            graft(trace, told)
        except vf.InterceptionError as lost:
            if error is None:
                await self._after(trace, runtime, lost)
                raise
            trace.info["turngate_lost"] = str(lost)
            log.warning("rollout %s: its turns could not be fetched: %s", trace.id, lost)
        await self._after(trace, runtime, error)

    async def _after(self, trace: vf.Trace, runtime: vf.Runtime, error: BaseException | None) -> None:
        try:
            await self.after_rollout(trace, runtime)
        except Exception:  # it is somebody's code
            if error is None:
                raise
            log.exception("rollout %s: after_rollout failed, after %r", trace.id, error)


def gateway_url(config: Any) -> str:
    url: str = config.gateway or os.environ.get(GATEWAY, "")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        told = f"{url!r} is not an http(s) URL" if url else "is not set"
        raise vf.InterceptionError(
            f"gateway: {told}; set harness.gateway, or {GATEWAY}, to where `turngate serve` runs"
        )
    return url


def _admin_key() -> str:
    try:
        return read_admin_key()
    except ConfigError as error:
        raise vf.InterceptionError(error.message) from None


def _registration(ctx: vf.ModelContext, trace: vf.Trace) -> dict[str, Json]:
    """The run's sampling and limits, which verifiers' own server would have seen to."""
    agent = trace.agent.config
    known = {field.name for field in msgspec.structs.fields(Sampling)} | {"max_tokens"}
    sampling = {k: v for k, v in ctx.sampling.model_dump(exclude_none=True).items() if k in known}
    return {
        "model": ctx.model,
        "sampling_params": sampling,
        "max_turns": -1 if agent.max_turns is None else agent.max_turns,
        "max_seq_len": agent.max_total_tokens,
    }


async def _gathered(*tasks: asyncio.Future[Any]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except (vf.InterceptionError, TimeoutError) as error:
        log.warning("the gateway could not be told that a rollout was cancelled: %s", error)
