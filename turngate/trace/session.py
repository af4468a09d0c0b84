"""A session, which is one agent run as the gateway sees it: settings, counters and trace."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from turngate.errors import BadRequest, Boundary, Conflict, LeaseLapsed, Stopping
from turngate.trace.sample import TrainingPolicy
from turngate.trace.signals import Signals
from turngate.trace.tool_schema import HostTool
from turngate.trace.tree import Sampled, Trace
from turngate.types import Json, Limits, Mode

Status = Literal["open", "sealed", "cancelled"]
MAX_ATTEMPT = 2**31 - 1
MAX_ROLLOUT_CHARS = 512
_CALL_COPIES = 3  # a call in flight keeps its body, its messages, and the request to the engine
LAPSED = "lapsed"  # calls are aborted because the cell may not serve at the moment; the session continues once it may serve again
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class LimitReached(Exception):
    """Raised when a session has reached a limit. This is a normal end of a session, not an error."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class CallError(msgspec.Struct, frozen=True):
    """A failed call that was not the agent's fault."""

    boundary: Boundary
    kind: str
    message: str


class EngineSilence:
    """Measures how long calls have been waiting since the engine last sent data or an error.

    The clock runs only while at least one call is in flight. The time that a call waited counts even if its caller gave up.
    """

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
    """Return the text that answers a call made after a limit was reached. The text is not sampled, so the trace does not record it."""
    return f"This session has reached its limit ({limit.replace('_', ' ')}). No further work is possible; stop here."


def raise_if_paused(ending: str) -> None:
    """Raise a retryable error if `ending` is temporary: the gateway is stopping, or the cell may not serve calls at the moment."""
    if ending == "stopping":
        raise Stopping("the gateway is stopping; retry this call in a moment") from None
    if ending == LAPSED:
        raise LeaseLapsed(
            "this cell could not confirm with the shared store that it may serve calls; retry this call in a moment"
        ) from None


class SessionConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings of a session. They are fixed when the session is opened."""

    model: str = ""  # the model name that the agent must send; empty: any name
    mode: Mode = "exact"
    limits: Limits = Limits()
    sampling: dict[str, Json] = {}  # fields of `Sampling` that override the agent's values
    bias: Literal["neutral", "record"] = (
        "neutral"  # neutral: ignore the agent's top-p, penalties …; record: apply and record them
    )
    # Thinking from past turns. keep: it stays in the context; drop: the template decides, which causes forks.
    thinking: Literal["keep", "drop"] = "keep"
    policy: TrainingPolicy = TrainingPolicy()
    template_kwargs: dict[str, Json] = {}
    metadata: dict[str, Json] = {}
    rollout: str = ""  # name of the rollout that the session is an attempt at; empty: the session's id
    attempt: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPT)] = 1  # only the highest attempt at a rollout is trained
    max_tokens: int | None = None  # per turn; overrides the agent's value
    at_limit: Literal["final_message", "conflict"] = "final_message"  # how calls after a limit are answered
    signals: Signals = Signals()  # where to find the purpose of a call in the agent's requests
    tools: tuple[HostTool, ...] = ()  # host tools that the agent may call
    show_logprobs: bool = False  # whether the agent may request the log-probabilities of its replies


def check_session_id(session_id: str, param: str) -> None:
    """Raise `BadRequest` if a session id is invalid. `param` is the name of the field that contains the id."""
    if not _SESSION_ID.fullmatch(session_id):
        raise BadRequest(
            f"{param} must be 1 to 128 letters, digits, '-', '_', '.' or ':', starting with a letter or digit",
            param=param,
        )


def check_rollout(name: str) -> None:
    """Raise `BadRequest` if a rollout name is invalid."""
    if len(name) > MAX_ROLLOUT_CHARS or not name.isprintable():
        raise BadRequest(f"'rollout' must be at most {MAX_ROLLOUT_CHARS} printable characters", param="rollout")


class CacheUse(msgspec.Struct, frozen=True):
    """How many prompt tokens were in the engine's cache, summed over the turns for which the engine reported this."""

    cached_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class Session:
    """A session in memory. Its counters are derived from the trace, so they are the same after the session is reloaded.

    Between calls, the trace may be evicted from memory. It is loaded again when it is needed.
    """

    def __init__(self, session_id: str, key: int, config: SessionConfig, opened: float) -> None:
        self.id = session_id
        self.key = key  # its key in the store
        self.config = config
        self.opened = opened
        self.last_used = opened
        self.status: Status = "open"
        self.stop = ""  # why it ended, or which limit it reached
        self._trace: Trace | None = Trace()
        self._load_trace: Callable[[], Trace] = Trace
        self.revision = 0  # changes if a trace that is being loaded is no longer the latest one
        self.turns = 0
        self.aborted = 0  # turns that were cut short after the agent may have read some tokens
        self.sampled_tokens = 0
        self.cache = CacheUse()
        self.truncated = False
        self.last_error: CallError | None = None  # set if the latest call failed; it may explain why the agent ended
        self.engine_silence = EngineSilence()
        self.in_flight = 0
        self.waiting_for_trace = 0  # number of requests
        self._call_bytes = 0  # size of the bodies of the calls in flight
        self.idle = asyncio.Event()
        self.idle.set()
        self.calls: set[asyncio.Task[object]] = set()  # the tasks that serve the calls in flight
        self.ending = ""  # why calls were aborted; if set, new calls are refused
        self.ending_lock = asyncio.Lock()
        self.pending_tool_calls: dict[int, asyncio.Future[bytes]] = {}  # the host's replies, by call number
        self.limits_announced: set[str] = set()  # limits for which an event was sent
        self.live_tokens = 0  # sampled by calls in flight and not yet stored; only `TurnDraft` changes it
        self.vocabulary = ""  # digest of the tokenizer used for recording

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
        """Whether a model call or a host-tool call is in flight, or a request is waiting for the trace to be loaded."""
        return bool(self.in_flight or self.pending_tool_calls or self.waiting_for_trace)

    def evict(self, load_trace: Callable[[], Trace]) -> None:
        """Drop the trace from memory. `load_trace` loads it again from the store, which contains the whole trace."""
        assert not self.busy
        if self._trace is not None:
            self._trace.free()
        self._trace, self._load_trace = None, load_trace
        self.revision += 1

    def restore(self, trace: Trace) -> None:
        """Put `trace`, which was loaded from the store, back into this evicted session."""
        assert self._trace is None
        self._trace = trace

    def outdate_load(self) -> None:
        """Mark a trace load in progress as out of date, so that it is repeated.

        Call this if the stored trace of an evicted session changes.
        """
        self.revision += 1

    def count_turn(self, turn: Sampled) -> None:
        """Add a stored turn to the counters."""
        if turn.info.finish != "abort":
            self.turns += 1
        elif turn.size:
            self.aborted += 1
        self.sampled_tokens += turn.size
        if turn.info.cached >= 0:
            self.cache = CacheUse(
                self.cache.cached_tokens + turn.info.cached, self.cache.prompt_tokens + turn.parent.length
            )
        self.truncated = self.truncated or turn.info.finish == "length"

    def estimate_call_bytes(self) -> int:
        """Estimate the memory that the calls in flight take, apart from the trace."""
        return self._call_bytes * _CALL_COPIES

    def begin_call(self, task: asyncio.Task[object], size: int) -> None:
        """Count a call as in flight. `size` is the size of its body in bytes."""
        self.in_flight += 1
        self._call_bytes += size
        self.engine_silence.begin()
        self.idle.clear()
        self.calls.add(task)

    def end_call(self, task: asyncio.Task[object], size: int, now: float) -> None:
        self.calls.discard(task)
        self.in_flight -= 1
        self._call_bytes -= size
        self.engine_silence.end()
        self.last_used = now
        if not self.in_flight:
            self.idle.set()

    def require_open(self) -> None:
        raise_if_paused(self.ending)
        if self.status == "open" and self.ending:
            raise Conflict(f"this session is {self.ending}; open a new one")
        if self.status != "open":
            reason = f" ({self.stop})" if self.stop not in ("", self.status) else ""
            raise Conflict(f"this session is {self.status}{reason}; open a new one")

    @property
    def tokens_left(self) -> int | None:
        """The number of tokens that all calls together may still sample, or None if there is no limit."""
        limit = self.config.limits.sampled_tokens
        return None if limit is None else max(0, limit - self.sampled_tokens - self.live_tokens)

    def require_within_limits(self, now: float, others: int) -> None:
        """Raise `LimitReached` if no further turn may start while `others` turns are in flight."""
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
        """Abort all calls in flight, and wait until the model calls have recorded their partial results. New calls are refused."""
        self.ending = reason
        for task in list(self.calls):
            task.cancel()
        for pending in self.pending_tool_calls.values():
            pending.cancel()
        await self.idle.wait()

    async def interrupt_calls(self) -> None:
        """Abort the model calls in flight with an error that makes agents retry them. The session stays open."""
        async with self.ending_lock:
            if self.ending or not self.calls:
                return
            self.ending = LAPSED
            for task in list(self.calls):
                task.cancel()
            await self.idle.wait()
            self.ending = ""
