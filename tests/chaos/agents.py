"""Agents that work through faults, and keep their own log of what they received."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gauntlet.clients import CLIENTS
from gauntlet.clients.base import TOOLS, Client, Conversation, Event, Message, ReplyError
from tests.chaos.engine import MODEL, TOOL, read_serials, write_answer, write_thought
from tests.crash.storm import ADMIN

TURNS = 3  # per rollout
_PAUSE_S = 0.03  # between turns, and before a retry


@dataclass
class RolloutLog:
    """What one rollout's agent and runner saw of the gateway."""

    session: str
    reward: float
    received: list[int] = field(default_factory=list)  # serial numbers of the answers, complete, oldest first
    is_recorded: bool = False  # the gateway has confirmed the reward


@dataclass
class CallCounts:
    """How the calls of all agents ended."""

    calls: int = 0
    answered: int = 0
    errors_told: int = 0  # refused or failed, in the caller's wire format
    broken_off: int = 0  # the connection failed, or ended before the reply did
    damaged: int = 0  # complete replies whose text differs from the engine's
    errors_garbled: list[str] = field(
        default_factory=list
    )  # replies that are neither an answer nor an error of the dialect


class CallFailed(Exception):
    """The call has to be repeated."""


class ChaosAgent:
    """One agent and its runner: opens sessions, talks, seals them and records rewards, and repeats what fails."""

    def __init__(
        self,
        name: str,
        base_url: str,
        rng: random.Random,
        counts: CallCounts,
        *,
        give_up_s: float,
        keep_alive: bool = True,
    ) -> None:
        self.name, self._url, self._rng, self._counts = name, base_url, rng, counts
        self._give_up_s, self._keep_alive = give_up_s, keep_alive
        self.rollouts: list[RolloutLog] = []
        self.last_answer = 0.0  # when the call began that was last answered in full
        self._client: Client = CLIENTS[rng.choice(list(CLIENTS))]

    async def work(self, is_over: Callable[[], bool]) -> None:
        """Run rollouts until `is_over`, and finish the last one."""
        timeout = aiohttp.ClientTimeout(total=self._give_up_s)
        connector = aiohttp.TCPConnector(force_close=not self._keep_alive)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._http:
            while not is_over():
                await self._run_rollout()

    async def _run_rollout(self) -> None:
        log = RolloutLog(f"{self.name}-{len(self.rollouts)}", round(self._rng.uniform(-2, 2), 6))
        key = await self._open(log)
        self.rollouts.append(log)
        line = Conversation("Work.", TOOLS, [Message("user", f"Task {log.session}")])
        for turn in range(TURNS):
            message = await self._ask(log, line, key)
            line.messages.append(message)
            line.messages += [Message("tool", f"output {turn}", answers=call) for call in message.calls]
            if not message.calls:
                line.messages.append(Message("user", f"go on {turn}"))
            await asyncio.sleep(self._rng.random() * _PAUSE_S)
        await self._admin("POST", f"/admin/sessions/{log.session}/seal", {})
        outcome = {"kind": "graded", "reward": log.reward, "task": self.name}
        await self._admin("PUT", f"/admin/sessions/{log.session}/outcome", outcome)
        log.is_recorded = True

    async def _open(self, log: RolloutLog) -> str:
        """Open a session. If the reply was lost, the session's secret is lost too, so open another session."""
        attempt = 0
        base = log.session
        while True:
            opened = await self._admin("POST", "/admin/sessions", {"id": log.session})
            if "api_key" in opened:
                return str(opened["api_key"])
            attempt += 1
            log.session = f"{base}-{attempt}"

    async def _admin(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """Send a request until it is answered. A 409 is an answer: an earlier attempt succeeded."""
        headers = {"authorization": f"Bearer {ADMIN}"}
        while True:
            try:
                async with self._http.request(method, self._url + path, json=body, headers=headers) as response:
                    reply = json.loads(await response.read())
                    if response.status < 400 or response.status == 409:
                        return dict(reply)
                    if response.status not in (429, 503):
                        self._counts.errors_garbled.append(f"{method} {path}: {response.status} {reply}")
            except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, log: RolloutLog, line: Conversation, key: str) -> Message:
        """Repeat a call until it returns a complete answer."""
        attempt = 0
        while True:
            began = time.monotonic()
            self._counts.calls += 1
            try:
                message = await self._call(line, key, attempt)
            except CallFailed:
                attempt += 1
                await asyncio.sleep(_PAUSE_S * (1 + self._rng.random()))
                continue
            self._counts.answered += 1
            self.last_answer = began
            log.received += read_answer(message)
            return message

    async def _call(self, line: Conversation, key: str, attempt: int) -> Message:
        stream = self._rng.random() < 0.6
        request = self._client.build_request(line, model=MODEL, key=key, stream=stream)
        headers = {**request.headers, "x-stainless-retry-count": str(attempt)}
        try:
            async with self._http.post(self._url + request.path, json=request.body, headers=headers) as response:
                raw = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._counts.broken_off += 1
            raise CallFailed from None
        if raw == b"Invalid HTTP request received.":  # the request was damaged on the way: it has no dialect
            self._counts.broken_off += 1
            raise CallFailed
        if status != 200:
            self._note_error(status, raw)
        events = _parse_events(raw) if stream else []
        if error := next((e.data for e in events if is_error(self._client.name, e.data)), None):
            self._note_error(status, json.dumps(error).encode())
        try:
            message = self._client.read_events(events) if stream else self._client.read_reply(json.loads(raw))
        except (ReplyError, KeyError, IndexError, TypeError, ValueError):
            self._counts.broken_off += 1
            raise CallFailed from None
        if not is_intact(message):
            self._counts.damaged += 1
            raise CallFailed
        return message

    def _note_error(self, status: int, raw: bytes) -> None:
        try:
            told = is_error(self._client.name, json.loads(raw))
        except ValueError:
            told = False
        if told and b'"internal_error"' not in raw:
            self._counts.errors_told += 1
        else:
            self._counts.errors_garbled.append(f"{self._client.name}: {status} {raw[:300]!r}")
        raise CallFailed


def is_error(dialect: str, body: Any) -> bool:
    """Return whether a body or an event is an error in the format of the dialect."""
    error = body.get("error") if isinstance(body, dict) else None
    if dialect == "responses" and isinstance(body, dict) and body.get("type") in ("response.failed", "error"):
        error = error or (body.get("response") or {}).get("error") or body
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return False
    match dialect:
        case "messages":
            return body.get("type") == "error" and isinstance(error.get("type"), str)
        case "gemini":
            return isinstance(error.get("code"), int) and isinstance(error.get("status"), str)
        case _:
            return "code" in error


def is_intact(message: Message) -> bool:
    """Return whether a message is exactly one answer of the engine. If the agent sent a damaged one back, it would edit the history."""
    try:
        serials = read_answer(message)
    except ValueError:
        return False
    if len(serials) != 1:
        return False
    answer, thought = write_answer(serials[0]), write_thought(serials[0])
    items = message.opaque.get("reasoning")  # of Responses, which has the text twice: as content and as summary
    thoughts = (thought * 2, thought, "(encrypted)", "") if isinstance(items, dict) else (thought, "")
    names = {call.name for call in message.calls}
    return message.text.strip() in (answer, "") and message.reasoning.strip() in thoughts and names <= {TOOL}


def read_answer(message: Message) -> list[int]:
    """Return the serial number of an intact answer."""
    arguments = [json.loads(call.arguments).get("path", "") for call in message.calls]
    return read_serials(" ".join([message.text, *arguments]))


def _parse_events(raw: bytes) -> list[Event]:
    """Parse server-sent events, up to one that was damaged on the way. Gemini sends an error as a bare object."""
    events = []
    for block in raw.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line for line in block.split(b"\n") if not line.startswith((b":", b"event:"))]
        data = b"".join(line.removeprefix(b"data:").strip() for line in lines)
        if data and data != b"[DONE]":
            try:
                events.append(Event("", json.loads(data)))
            except ValueError:
                return events
    return events
