"""Check a running gateway: whether it responds, accepts the admin key and records a call exactly, and how high its load is."""

from __future__ import annotations

import math
import re
import time

import aiohttp
import msgspec

from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.protocol import OpenedSession
from turngate.doctor.context import DoctorContext
from turngate.doctor.engine import measure_skew
from turngate.doctor.finding import CheckOutcome, failure, not_checked, ok, warning
from turngate.errors import TurngateError, Unauthorized
from turngate.types import Json

_METRIC_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_MAX_LATE = 0.05  # maximum share of the measurements in which the event loop may be late
_CALL = {"messages": [{"role": "user", "content": "Say any word."}], "max_tokens": 4}


def _client(context: DoctorContext) -> GatewayClient:
    return GatewayClient(context.gateway, context.admin_key)


async def check_reachable(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the gateway responds, accepts the admin key, and is not holding all calls at its fence."""
    start = time.perf_counter()
    try:
        async with _client(context) as client:
            fence = await client.fence()
    except Unauthorized as error:
        return [failure(error.message, "set TURNGATE_ADMIN_KEY to the gateway's admin key (DATA/admin-key)")]
    except TurngateError as error:
        return [failure(error.message, "start the gateway (turngate serve), or correct --gateway")]
    took = (time.perf_counter() - start) * 1000
    results = [ok(f"{context.gateway}: responded in {took:.0f} ms, policy version {fence.version}")]
    if fence.paused:
        results.append(
            warning(
                "the gateway is holding all calls, for a weight update or because it is a cell without a lease",
                "if no trainer is updating weights, send POST /admin/fence/resume (docs/weights.md); "
                "for a cell, check that it can reach the shared store",
            )
        )
    return results


async def check_engines(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the gateway's engines are up."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            http.get(context.gateway.rstrip("/") + "/health", allow_redirects=False) as response,
        ):
            health = msgspec.json.decode(await response.read(), type=dict[str, Json])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return [not_checked("GET /health returned no valid response")]
    up, total = health.get("engines", 0), health.get("engines_total", 0)
    if up == total and up:
        return [ok(f"{up} of {total} up")]
    fix = "find the reason in the gateway's log, and restart the engines"
    return [(warning if up else failure)(f"{up} of {total} up; status: {health.get('status', 'unknown')}", fix)]


async def check_call(context: DoctorContext) -> list[CheckOutcome]:
    """Check that a small model call in a new session produces trainable tokens. The session is deleted afterwards."""
    try:
        async with _client(context) as client:
            if (await client.fence()).paused:
                return [
                    not_checked(
                        "the gateway is holding all calls, for a weight update or because it is a cell without a lease"
                    )
                ]
            opened = await client.open({"metadata": {"doctor": True}, "limits": {"turns": 1}})
            try:
                return [await _make_call(context, client, opened)]
            finally:
                await client.delete(opened.id)
    except GatewayUnreachable:
        return [not_checked("the gateway does not respond")]
    except Unauthorized:
        return [not_checked("the gateway rejected the key")]
    except TurngateError as error:
        return [failure(error.message, "check the gateway's log")]


async def _make_call(context: DoctorContext, client: GatewayClient, opened: OpenedSession) -> CheckOutcome:
    mode = (await client.show(opened.id)).config.mode
    if mode != "exact":
        return not_checked(
            f"the gateway's sessions use mode {mode!r}, in which a call would cost money or wait for a trainer"
        )
    names = await client.models()
    start = time.perf_counter()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
            http.post(
                f"{client.url}/v1/chat/completions",
                json={"model": names[0] if names else "any", **_CALL},
                headers={"authorization": f"Bearer {opened.key}"},
            ) as response,
        ):
            answer = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return failure(f"a model call failed ({type(error).__name__})", "check the gateway's log")
    if response.status != 200:
        return failure(
            f"a model call failed with status {response.status}{_error_message(answer)}", "check the gateway's log"
        )
    took = time.perf_counter() - start
    rows = await client.samples(opened.id, everything=True)
    trained = sum(sum(row.mask) for row in rows)
    known = all(
        value is not None for row in rows for value, sampled in zip(row.logprobs, row.mask, strict=True) if sampled
    )
    if not trained or not known:
        return warning(
            "a call succeeded, but its tokens cannot be used for training",
            "to find the reason, run turngate doctor on the gateway's machine, with the gateway's settings and without --gateway",
        )
    return ok(f"a call took {took:.2f} s; trainable tokens: {trained}; the call's session was deleted")


def _error_message(answer: bytes) -> str:
    try:
        return f": {msgspec.json.decode(answer)['error']['message']}"[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


async def check_clock(context: DoctorContext) -> list[CheckOutcome]:
    """Compare this machine's clock with the gateway's."""
    return [await measure_skew(context.gateway)]


async def check_load(context: DoctorContext) -> list[CheckOutcome]:
    """Check the gateway's load, as shown by its metrics: the event loop, the workers and failed engine calls."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            http.get(
                context.gateway.rstrip("/") + "/metrics",
                headers={"authorization": f"Bearer {context.admin_key}"},
                allow_redirects=False,
            ) as response,
        ):
            text = (await response.read()).decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError, OSError):
        return [not_checked("the gateway does not respond")]
    if response.status != 200:
        return [not_checked(f"GET /metrics failed with status {response.status}")]
    results = [_check_loop_lag(text)]
    silent = _sum_metric(text, "turngate_workers_silent")
    if silent:
        results.append(
            warning(
                f"gateway workers that do not respond: {silent:.0f}",
                "check the gateway's log to see whether they are restarting",
            )
        )
    turns, errors = _sum_metric(text, "turngate_turns_total"), _sum_metric(text, "turngate_engine_errors_total")
    if errors > 10 and errors > 0.05 * turns:
        results.append(
            warning(
                f"engine calls that failed: {errors:.0f}; turns that were recorded: {turns:.0f}",
                "see the gateway's log for the reasons",
            )
        )
    return results


def _check_loop_lag(text: str) -> CheckOutcome:
    measured, late = _sum_metric(text, "turngate_loop_lag_seconds_count"), 0.0
    for labels, value in _parse_metric(text, "turngate_loop_lag_seconds_bucket"):
        if labels == 'le="0.1"':
            late = measured - value
    if not measured:
        return not_checked("the gateway has not measured its event loop yet")
    open_now, workers = _sum_metric(text, "turngate_sessions_open"), _sum_metric(text, "turngate_workers")
    message = f"workers: {workers:.0f}, open sessions: {open_now:.0f}, event loop late in {late:.0f} of {measured:.0f} measurements"
    if late > max(3.0, _MAX_LATE * measured):
        return warning(
            message, "give the gateway more CPU: increase --workers (docs/workers.md), or reserve cores for the gateway"
        )
    return ok(message)


def _sum_metric(text: str, name: str) -> float:
    return math.fsum(value for _, value in _parse_metric(text, name))


def _parse_metric(text: str, name: str) -> list[tuple[str, float]]:
    matches = [match for line in text.splitlines() if line.startswith(name) and (match := _METRIC_LINE.match(line))]
    return [(match[2] or "", float(match[3])) for match in matches if match[1] == name]
