"""One agent run as the gateway sees it: its settings, its counters, its trace."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from turngate.errors import Conflict, Stopping
from turngate.trace.host_tools import HostTool
from turngate.trace.sample import TrainingPolicy
from turngate.trace.signals import Signals
from turngate.trace.tree import Sampled, Trace
from turngate.types import Json, Limits, Mode

Status = Literal["open", "sealed", "cancelled"]
SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class LimitReached(Exception):
    """The session has used up what it may: no error, but the end of its work."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class CallError(msgspec.Struct, frozen=True):
    """A call that the agent could not be answered, through nobody's fault or the engine's."""

    boundary: str
    kind: str
    message: str


class EngineSilence:
    """How long calls have waited since the engine last said anything to them, a first byte or a refusal. Time in which no call
    waits does not count; a call that was given up unanswered does, whoever made it again."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._since = 0.0
        self._calls = 0

    def begin(self) -> None:
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1

    def end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._waited += time.monotonic() - self._since

    def reset(self) -> None:
        self._waited, self._since = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self._waited + (time.monotonic() - self._since if self._calls else 0.0)


def limit_message(limit: str) -> str:
    """What an agent is told in place of an answer when a limit is met. Nobody sampled it, so no trace has it."""
    return f"This session has reached its limit ({limit.replace('_', ' ')}). No further work is possible; stop here."


class SessionConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is chosen when a session is opened."""

    model: str = ""  # the name the agent will send; empty: any
    mode: Mode = "exact"
    limits: Limits = Limits()
    sampling: dict[str, Json] = {}  # Sampling fields that override the agent's
    bias: Literal["neutral", "record"] = "neutral"  # neutral: the agent's top-p, penalties … are not applied
    thinking: Literal["keep", "drop"] = (
        "keep"  # what past turns' thinking becomes; drop: as the template has it, with forks
    )
    policy: TrainingPolicy = TrainingPolicy()
    template_kwargs: dict[str, Json] = {}
    metadata: dict[str, Json] = {}
    max_tokens: int | None = None  # per turn; overrides the agent's
    at_limit: Literal["final_message", "conflict"] = "final_message"  # how a call past a limit is answered
    signals: Signals = Signals()  # where the agent's program tells what a call is for
    tools: tuple[HostTool, ...] = ()  # that the agent may call at the gateway, and the host handles


class Session:
    """A live session. Counters follow from the trace, so that a reloaded session has the same ones.

    Between two calls its trace may be evicted from memory, until it is needed.
    """

    def __init__(self, session_id: str, key: int, config: SessionConfig, opened: float) -> None:
        self.id = session_id
        self.key = key  # the store's number for it
        self.config = config
        self.opened = opened
        self.last_used = opened
        self.status: Status = "open"
        self.stop = ""  # why it ended, or which limit was met
        self._trace: Trace | None = Trace()
        self._load_trace: Callable[[], Trace] = Trace
        self.turns = 0
        self.aborted = 0  # calls that were cut short after something was sampled: it may have been read
        self.sampled_tokens = 0
        self.truncated = False
        self.last_error: CallError | None = (
            None  # how the newest call failed, if it did: who runs the agent has to know why it ended
        )
        self.engine_silence = EngineSilence()
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.calls: set[asyncio.Task[object]] = set()  # the tasks that serve the calls in flight
        self.ending = ""  # why those were aborted, if they were; no more are let in
        self.ending_lock = asyncio.Lock()
        self.pending_tool_calls: dict[
            int, asyncio.Future[bytes]
        ] = {}  # calls of host tools that wait for the host, by number
        self.limits_announced: set[str] = set()  # that a call has met
        self.live_tokens = 0  # sampled by calls in flight, not stored yet
        self.vocabulary = ""  # digest of the tokenizer it is recorded with

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            self._trace = self._load_trace()
        return self._trace

    @property
    def is_evicted(self) -> bool:
        return self._trace is None

    @property
    def busy(self) -> bool:
        """Whether a call is under way, to the model or to a tool of the host."""
        return bool(self.in_flight or self.pending_tool_calls)

    def evict(self, load_trace: Callable[[], Trace]) -> None:
        """Drop the trace from memory. All of it is in the store, where `load_trace` finds it."""
        assert not self.busy
        if self._trace is not None:
            self._trace.cut()
        self._trace, self._load_trace = None, load_trace

    def count_turn(self, turn: Sampled) -> None:
        """Take a stored turn into account."""
        if turn.info.finish != "abort":
            self.turns += 1
        elif turn.size:
            self.aborted += 1
        self.sampled_tokens += turn.size
        self.truncated = self.truncated or turn.info.finish == "length"

    def begin_call(self, task: asyncio.Task[object]) -> None:
        self.in_flight += 1
        self.engine_silence.begin()
        self.idle.clear()
        self.calls.add(task)

    def end_call(self, task: asyncio.Task[object], now: float) -> None:
        self.calls.discard(task)
        self.in_flight -= 1
        self.engine_silence.end()
        self.last_used = now
        if not self.in_flight:
            self.idle.set()

    def require_open(self) -> None:
        if self.ending == "stopping":
            raise Stopping("the gateway is being stopped; repeat this call in a moment")
        if self.status == "open" and self.ending:
            raise Conflict(f"this session is {self.ending}; open a new one")
        if self.status != "open":
            raise Conflict(f"this session is {self.status}{f' ({self.stop})' if self.stop else ''}; open a new one")

    @property
    def tokens_left(self) -> int | None:
        """How many more tokens may be sampled, by all calls together; None: no limit."""
        limit = self.config.limits.sampled_tokens
        return None if limit is None else max(0, limit - self.sampled_tokens - self.live_tokens)

    def require_within_limits(self, now: float, others: int) -> None:
        """Raises if there may not be another turn, beside `others` that are in flight."""
        limits = self.config.limits
        if limits.turns is not None and self.turns + self.aborted + others >= limits.turns:
            raise LimitReached("turns")
        if self.tokens_left == 0:
            raise LimitReached("sampled_tokens")
        if limits.seconds is not None and now - self.opened >= limits.seconds:
            raise LimitReached("seconds")

    def deadline(self) -> float | None:
        seconds = self.config.limits.seconds
        return None if seconds is None else self.opened + seconds

    async def abort_calls(self, reason: str) -> None:
        """End every call in flight; returns when each has recorded what it had."""
        self.ending = reason
        for task in list(self.calls):
            task.cancel()
        for asked in self.pending_tool_calls.values():
            asked.cancel()
        await self.idle.wait()
