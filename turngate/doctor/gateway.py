"""A gateway that runs: is it there, does it take our key, does a call through it come out exact, and how does it fare?"""

from __future__ import annotations

import math
import re
import time

import aiohttp
import msgspec

from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.protocol import OpenedSession
from turngate.doctor.context import Subject
from turngate.doctor.engine import skew
from turngate.doctor.finding import Seen, failure, ok, unchecked, warning
from turngate.errors import TurngateError, Unauthorized
from turngate.types import Json

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LATE = 0.05  # of looks at the event loop that may be late
_CALL = {"messages": [{"role": "user", "content": "Say any word."}], "max_tokens": 4}


def _client(subject: Subject) -> GatewayClient:
    return GatewayClient(subject.gateway, subject.admin_key)


async def reachable(subject: Subject) -> list[Seen]:
    began = time.perf_counter()
    try:
        async with _client(subject) as client:
            fence = await client.fence()
    except Unauthorized as error:
        return [failure(error.message, "export TURNGATE_ADMIN_KEY, as the gateway has it (DATA/admin-key)")]
    except TurngateError as error:
        return [failure(error.message, "start it (turngate serve), or correct --gateway")]
    took = (time.perf_counter() - began) * 1000
    found = [ok(f"{subject.gateway}: answers in {took:.0f} ms, policy version {fence.version}")]
    if fence.paused:
        found.append(
            warning(
                "it holds all calls for new weights",
                "if no trainer is at it: POST /admin/fence/resume (docs/weights.md)",
            )
        )
    return found


async def engines(subject: Subject) -> list[Seen]:
    """As the gateway sees them."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            http.get(subject.gateway.rstrip("/") + "/health", allow_redirects=False) as response,
        ):
            told = msgspec.json.decode(await response.read(), type=dict[str, Json])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return [unchecked("the gateway does not answer")]
    up, total = told.get("engines", 0), told.get("engines_total", 0)
    if up == total and up:
        return [ok(f"{up} of {total} up")]
    mend = "its log has the reason; POST a call when they are back"
    return [(warning if up else failure)(f"{up} of {total} up: {told.get('status', '')}", mend)]


async def call(subject: Subject) -> list[Seen]:
    """One small model call in a session of its own, which is deleted again."""
    try:
        async with _client(subject) as client:
            if (await client.fence()).paused:
                return [unchecked("it holds all calls for new weights")]
            opened = await client.open({"metadata": {"doctor": True}, "limits": {"turns": 1}})
            try:
                return [await _called(subject, client, opened)]
            finally:
                await client.delete(opened.id)
    except GatewayUnreachable:
        return [unchecked("the gateway does not answer")]
    except Unauthorized:
        return [unchecked("the gateway does not take the key")]
    except TurngateError as error:
        return [failure(error.message, "its log has the details")]


async def _called(subject: Subject, client: GatewayClient, opened: OpenedSession) -> Seen:
    mode = (await client.show(opened.id)).config.mode
    if mode != "exact":
        return unchecked(f"its sessions have mode {mode!r}: a call would cost money, or wait for a trainer")
    names = await client.models()
    began = time.perf_counter()
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
        return failure(f"a model call came to nothing ({type(error).__name__})", "its log has the details")
    if response.status != 200:
        return failure(
            f"a model call was answered with {response.status}: {_message(answer)}", "its log has the details"
        )
    took = time.perf_counter() - began
    rows = await client.samples(opened.id, everything=True)
    trained = sum(sum(row["mask"]) for row in rows)
    known = all(
        value is not None
        for row in rows
        for value, sampled in zip(row["logprobs"], row["mask"], strict=True)
        if sampled
    )
    if not trained or not known:
        return warning("a call was answered, but its tokens cannot be trained", "turngate doctor --engine … says why")
    return ok(
        f"a call in {took:.2f} s: {trained} tokens with log-probabilities, in a row; its session is deleted again"
    )


def _message(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


async def clock(subject: Subject) -> list[Seen]:
    return [await skew(subject.gateway)]


async def load(subject: Subject) -> list[Seen]:
    """What its metrics tell."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            http.get(
                subject.gateway.rstrip("/") + "/metrics",
                headers={"authorization": f"Bearer {subject.admin_key}"},
                allow_redirects=False,
            ) as response,
        ):
            text = (await response.read()).decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError, OSError):
        return [unchecked("the gateway does not answer")]
    if response.status != 200:
        return [unchecked(f"its metrics are answered with {response.status}")]
    found = [_loop(text)]
    silent = _sum(text, "turngate_workers_silent")
    if silent:
        found.append(
            warning(f"{silent:.0f} of its workers do not answer", "its log says whether they are being started again")
        )
    turns, errors = _sum(text, "turngate_turns_total"), _sum(text, "turngate_engine_errors_total")
    if errors > 10 and errors > 0.05 * turns:
        found.append(warning(f"{errors:.0f} engine calls failed, beside {turns:.0f} turns", "its log has the reasons"))
    return found


def _loop(text: str) -> Seen:
    looks, late = _sum(text, "turngate_loop_lag_seconds_count"), 0.0
    for labels, value in _lines(text, "turngate_loop_lag_seconds_bucket"):
        if labels == 'le="0.1"':
            late = looks - value
    if not looks:
        return unchecked("it was started just now")
    open_now, workers = _sum(text, "turngate_sessions_open"), _sum(text, "turngate_workers")
    said = f"{workers:.0f} worker, {open_now:.0f} open sessions, its event loop was late in {late:.0f} of {looks:.0f} looks"
    if late > max(3.0, _LATE * looks):
        return warning(said, "it has too little CPU: give it --workers, or cores of its own (docs/workers.md)")
    return ok(said)


def _sum(text: str, name: str) -> float:
    return math.fsum(value for _, value in _lines(text, name))


def _lines(text: str, name: str) -> list[tuple[str, float]]:
    found = [match for line in text.splitlines() if line.startswith(name) and (match := _LINE.match(line))]
    return [(match[2] or "", float(match[3])) for match in found if match[1] == name]
