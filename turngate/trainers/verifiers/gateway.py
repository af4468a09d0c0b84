"""A mixin that sends the model calls of a verifiers harness to the gateway, through prime-rl's rollout API.

The harness's program still runs in verifiers' runtime.

    class GatewayBashConfig(GatewayConfig, BashHarnessConfig): ...
    class GatewayBash(RolloutGatewayMixin[GatewayBashConfig], BashHarness): ...

    register → run the program with the rollout's own URL and key → (cancel) → program ends → unregister → trajectory → graft → hook

- The trajectory is fetched after the last turn, even if the program failed. If the trajectory cannot be fetched
  or is invalid, no turns are added to the trace.
- The hook, `after_rollout`, runs after every rollout that was registered.
- When a rollout is cancelled, it is cancelled at the gateway first, so that generation stops.
- If the program can no longer reach the gateway, the rollout fails with a `TunnelError`.
- `gateway_enabled = false` leaves the harness unchanged, for evaluation with a different endpoint.
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
from turngate.client.retry import retry_while_unreachable
from turngate.common.aio import run_to_completion
from turngate.errors import ConfigError
from turngate.trace.training_report import list_warnings
from turngate.trace.tree import RefusedCalls
from turngate.trainers.verifiers.graft import GraftTurn, graft
from turngate.types import Json, Sampling

log = logging.getLogger("turngate")
GATEWAY = "TURNGATE_GATEWAY"  # environment variable with the default URL
_END_S = 15.0  # how long the gateway may take to cancel a rollout
_RESTART_S = 40.0  # how long to wait for a gateway to restart

ConfigT = TypeVar("ConfigT", bound=vf.HarnessConfig)


class GatewayConfig(vf.HarnessConfig):
    """Settings of the mixin, in addition to those of the harness."""

    gateway: str = ""
    """URL of the gateway. Defaults to $TURNGATE_GATEWAY. The admin key is read from $TURNGATE_ADMIN_KEY."""
    gateway_enabled: bool = True
    """If false, the harness uses the run's own endpoint, as it does without the mixin."""
    public_url: str = ""
    """URL at which the program can reach the gateway, such as a tunnel's URL. Defaults to `gateway`."""
    poll_interval: float = Field(5.0, gt=0)
    """Seconds between checks that the program can still reach the gateway."""
    silence_s: float = Field(60.0, gt=0)
    """Seconds without an answer from the gateway after which the rollout fails."""


# ── prime-rl's API ──────────────────────────────────────────────────────────────────────────────────────────────────


class Registration(msgspec.Struct, frozen=True):
    rollout_id: str
    status: str
    api_key: str


class StepTokens(msgspec.Struct, frozen=True):
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float | None]


class TrajectoryStep(msgspec.Struct, frozen=True):
    prompt: list[Json]
    completion: list[Json]
    tokens: StepTokens
    is_truncated: bool
    extras: dict[str, Json] = {}


class Trajectory(msgspec.Struct, frozen=True):
    """A rollout's trajectory, as returned by the gateway. Other fields of the reply are ignored."""

    rollout_id: str
    status: str
    num_turns: int
    model: str
    is_truncated: bool
    trajectory: list[TrajectoryStep]
    refused: RefusedCalls | None = (
        None  # model calls that the gateway refused and the agent did not repeat successfully
    )


class RolloutApi(AbstractAsyncContextManager["RolloutApi"]):
    """Client for a gateway's `/v1/rollouts/{id}/…` routes.

    A failed request raises `InterceptionError`, because the failure is not the agent's fault.
    """

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {admin_key}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RolloutApi:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def register(self, rollout: str, body: Mapping[str, Json]) -> Registration:
        return _decode(await self._request("POST", rollout, "register", body), Registration)

    async def trajectory(self, rollout: str) -> Trajectory:
        return _decode(await self._request("GET", rollout, "trajectory"), Trajectory)

    async def cancel(self, rollout: str) -> None:
        await self._request("POST", rollout, "cancel", gone=True)

    async def unregister(self, rollout: str) -> None:
        """Make the gateway stop accepting turns of a rollout. Safe to repeat, even if the rollout no longer exists."""
        await self._request("POST", rollout, "unregister", gone=True)

    async def _request(
        self, method: str, rollout: str, verb: str, body: Mapping[str, Json] | None = None, *, gone: bool = False
    ) -> bytes:
        """Send a request. If `gone` is set, accept status 404.

        While the gateway is unreachable or stopping, retry for up to `_RESTART_S` seconds.
        """
        url = f"{self.url}/v1/rollouts/{quote(rollout)}/{verb}"
        unreachable = (aiohttp.ClientError, TimeoutError, OSError)
        try:
            return await retry_while_unreachable(
                lambda: self._send(method, url, body, gone), limit_s=_RESTART_S, unreachable=unreachable
            )
        except unreachable as error:
            why = str(error) or type(error).__name__
            raise vf.InterceptionError(f"the gateway is not available: {method} {url} failed: {why}") from error

    async def _send(self, method: str, url: str, body: Mapping[str, Json] | None, gone: bool) -> bytes:
        assert self._http is not None, "use it as a context manager"
        async with self._http.request(method, url, json=body, allow_redirects=False) as response:
            content = await response.read()
            if response.status == 200 or (gone and response.status == 404):
                return content
            text = content.decode("utf-8", "replace")[:300]
            if response.status == 503:  # the gateway is stopping, and may be restarted
                raise aiohttp.ClientError(f"status 503: {text}")
            raise vf.InterceptionError(f"gateway: {url} returned status {response.status}: {text}")


T = TypeVar("T", Registration, Trajectory)


def _decode(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:  # includes missing fields
        raise vf.InterceptionError(f"gateway: the reply is not a valid {kind.__name__.lower()}: {error}") from None


def turns_from_trajectory(reply: Trajectory) -> list[GraftTurn]:
    """Convert a trajectory to turns.

    The parent of a turn is the earlier step whose prompt and answer together are the longest prefix of the turn's prompt.
    """
    turns: list[GraftTurn] = []
    sequences: list[list[int]] = []  # prompt and answer of each step
    for index, step in enumerate(reply.trajectory):
        tokens = step.tokens
        parent = _find_parent(tokens.prompt_ids, sequences)
        known = 0 if parent is None else len(reply.trajectory[parent].prompt) + 1
        before = 0 if parent is None else len(sequences[parent])
        trained = any(tokens.completion_mask)
        logprobs = [value for value in tokens.completion_logprobs if value is not None]
        if len(tokens.completion_mask) != len(tokens.completion_ids):
            raise vf.InterceptionError(
                f"gateway: the mask of step {index} has length {len(tokens.completion_mask)}, but the completion of that step has "
                f"{len(tokens.completion_ids)} tokens"
            )
        if trained and len(logprobs) != len(tokens.completion_ids):
            raise vf.InterceptionError(
                f"gateway: the mask of step {index} selects tokens to train on, so each token of the completion needs a log-probability, "
                f"but the completion has {len(tokens.completion_ids)} tokens and {len(logprobs)} log-probabilities"
            )
        sequences.append([*tokens.prompt_ids, *tokens.completion_ids])
        turns.append(
            GraftTurn(
                id=index,
                parent=parent,
                first=True,
                messages=step.prompt[known:],
                tools=(),
                context=tokens.prompt_ids[before:],
                ids=tokens.completion_ids,
                logprobs=logprobs if trained else None,
                untrained="" if trained else str(step.extras.get("untrained") or "masked by the gateway"),
                message=step.completion[0] if step.completion else {"role": "assistant", "content": ""},
                finish="length" if step.is_truncated else "stop",
                model=reply.model,
            )
        )
    return turns


def _find_parent(prompt: list[int], sequences: list[list[int]]) -> int | None:
    """Return the index of the longest sequence that is a prefix of `prompt`, or None if no sequence is."""
    longest_first = sorted(range(len(sequences)), key=lambda j: len(sequences[j]), reverse=True)
    return next((j for j in longest_first if prompt[: len(sequences[j])] == sequences[j]), None)


# ── the mixin ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RolloutGatewayMixin(Generic[ConfigT]):
    """A mixin for a verifiers `Harness` that sends its model calls to the gateway.

    List it as the first base class. Subclasses may override `after_rollout`.
    """

    config: Any  # both a GatewayConfig and the harness's own config

    async def after_rollout(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """A hook that is called after each registered rollout, even if the program failed. It does nothing by default.

        The trace contains the rollout's turns, if they could be fetched.
        """

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
        launch = super().launch  # type: ignore[misc]  # the harness's own
        if not self.config.gateway_enabled:
            return await launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more)
        async with RolloutApi(gateway_url(self.config), _admin_key()) as rollouts:
            registered = await rollouts.register(trace.id, _registration(ctx, trace))
            base = self.config.public_url.rstrip("/") or runtime.host_url(rollouts.url)
            # The URL has the form of verifiers' own server, because harnesses for other dialects strip or extend its last part.
            base_url = f"{base}/v1/rollouts/{quote(trace.id)}/v1"
            running = launch(ctx, trace, runtime, base_url, registered.api_key, mcp_urls, data, **more)
            try:
                result = await self._watch(running, base, rollouts, trace.id)
            except BaseException as error:
                await run_to_completion(self._finish(rollouts, trace, runtime, error))
                raise
            await run_to_completion(self._finish(rollouts, trace, runtime, None))
            return result

    async def _watch(
        self, running: Coroutine[Any, Any, vf.ProgramResult], base: str, rollouts: RolloutApi, rollout: str
    ) -> vf.ProgramResult:
        """Run the program until it ends or can no longer reach the gateway. The program has always ended when this returns or raises."""
        program = asyncio.ensure_future(running)
        watching = asyncio.ensure_future(self._wait_until_lost(base))
        try:
            await asyncio.wait({program, watching}, return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            raise vf.TunnelError(watching.result())
        except asyncio.CancelledError:
            # Cancel at the gateway first, so that generation stops and no further call of the program becomes a turn.
            await run_to_completion(_cancel_rollout(rollouts, rollout))
            raise
        finally:
            watching.cancel()
            program.cancel()
            await run_to_completion(_wait_all(program, watching))

    async def _wait_until_lost(self, base: str) -> str:
        """Wait until the gateway at `base` has not answered for `silence_s` seconds, and return an error message.

        The rollout then cannot continue, because a running program cannot switch to another URL.
        """
        answered = time.monotonic()
        fresh = aiohttp.TCPConnector(force_close=True)  # an open connection does not prove that new ones work
        timeout = aiohttp.ClientTimeout(total=self.config.poll_interval + 5)
        async with aiohttp.ClientSession(connector=fresh, timeout=timeout) as http:
            while time.monotonic() - answered <= self.config.silence_s:
                await asyncio.sleep(self.config.poll_interval)
                try:
                    async with http.get(base + "/", allow_redirects=False) as response:
                        if "x-turngate" in response.headers:
                            answered = time.monotonic()
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
        return f"the gateway at {base} has not answered for {self.config.silence_s:.0f} s; the rollout cannot continue"

    async def _finish(
        self, rollouts: RolloutApi, trace: vf.Trace, runtime: vf.Runtime, failure: BaseException | None
    ) -> None:
        """Stop recording, add the turns to the trace, and call the hook. An earlier error (`failure`) takes precedence over a new one.

        Raise `HarnessError` if the gateway refused a model call that the agent did not repeat successfully, because such a rollout must
        not be rewarded.
        """
        error = failure
        try:
            await rollouts.unregister(trace.id)
            reply = await rollouts.trajectory(trace.id)
            graft(trace, turns_from_trajectory(reply))
            if reply.refused is not None and error is None:
                error = vf.HarnessError(f"the rollout is excluded: {'; '.join(list_warnings(None, reply.refused))}")
        except vf.InterceptionError as fetch_error:
            if error is None:
                await self._call_after_rollout(trace, runtime, fetch_error)
                raise
            trace.info["turngate_lost"] = str(fetch_error)
            log.warning("rollout %s: its turns were not added to the trace: %s", trace.id, fetch_error)
        await self._call_after_rollout(trace, runtime, error)
        if error is not None and error is not failure:
            raise error

    async def _call_after_rollout(self, trace: vf.Trace, runtime: vf.Runtime, error: BaseException | None) -> None:
        try:
            await self.after_rollout(trace, runtime)
        except Exception:  # the hook is a subclass's code
            if error is None:
                raise
            log.exception("rollout %s: after_rollout failed after an earlier error (%r)", trace.id, error)


def gateway_url(config: Any) -> str:
    url: str = config.gateway or os.environ.get(GATEWAY, "")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        problem = f"gateway must be an http(s) URL, not {url!r}" if url else "gateway is not set"
        raise vf.InterceptionError(f"{problem}; set harness.gateway or {GATEWAY} to the URL of `turngate serve`")
    return url


def _admin_key() -> str:
    try:
        return read_admin_key()
    except ConfigError as error:
        raise vf.InterceptionError(error.message) from None


def _registration(ctx: vf.ModelContext, trace: vf.Trace) -> dict[str, Json]:
    """Build the body of a registration request from the run's sampling settings and limits."""
    agent = trace.agent.config
    known = {field.name for field in msgspec.structs.fields(Sampling)} | {"max_tokens"}
    sampling = {k: v for k, v in ctx.sampling.model_dump(exclude_none=True).items() if k in known}
    return {
        "model": ctx.model,
        "sampling_params": sampling,
        "max_turns": -1 if agent.max_turns is None else agent.max_turns,
        "max_seq_len": agent.max_total_tokens,
    }


async def _wait_all(*tasks: asyncio.Future[Any]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel_rollout(rollouts: RolloutApi, rollout: str) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await rollouts.cancel(rollout)
    except (vf.InterceptionError, TimeoutError) as error:
        why = str(error) or f"no answer within {_END_S:g} s"
        log.warning("rollout %s: could not cancel it at the gateway: %s", rollout, why)
