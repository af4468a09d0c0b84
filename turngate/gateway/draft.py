"""A turn while it is being sampled: the call, its prompt and the tokens so far."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import numpy as np

from turngate.common import clock
from turngate.engines.base import RelayChunk, VersionRuns
from turngate.errors import EngineError
from turngate.gateway.prompt import Prompt
from turngate.telemetry.metrics import CallTiming
from turngate.trace.session import Session
from turngate.trace.side_data import InvalidSideData, add_array, select_new
from turngate.types import (
    ID_DTYPE,
    LOGPROB_DTYPE,
    LOGPROB_TOLERANCE,
    Call,
    CallDelta,
    Capture,
    Delta,
    Ids,
    Logprobs,
    Message,
    ReplyEvent,
    Sampling,
    SideArray,
    TokenScore,
    Usage,
)

log = logging.getLogger("turngate")
_LOWEST = float(np.finfo(LOGPROB_DTYPE).min)
# Sends a batch of events that arrived together, and returns when they are on their way to the agent. An exception ends the turn.
Emit = Callable[[Sequence[ReplyEvent]], Awaitable[None]]


class TurnDraft:
    """A turn while it is being sampled.

    Only drafts change `session.live_tokens`. Call `settle` when the tokens have been recorded or discarded.
    """

    __slots__ = (
        "_live",
        "begun_at",
        "biases",
        "cached",
        "call",
        "capture",
        "emit",
        "engine",
        "ids",
        "logprobs",
        "lost",
        "prompt",
        "sampling",
        "scores",
        "session",
        "side",
        "started",
        "timing",
        "verbatim",
        "version_end",
        "version_runs",
        "version_start",
    )

    def __init__(
        self,
        session: Session,
        call: Call,
        prompt: Prompt,
        sampling: Sampling,
        version: int,
        emit: Emit,
        timing: CallTiming,
    ) -> None:
        self.session = session
        self.call = call
        self.prompt = prompt
        self.sampling = sampling
        self.emit = emit
        self.timing = timing
        self.ids: list[int] = []
        self.logprobs: list[float | None] | None = []
        self.started = clock.now()
        self.begun_at = version  # the policy version at the start of the call
        self.version_start = version
        self.version_end = version
        self.version_runs: VersionRuns = ()  # of the tokens so far, if the engine reports them
        self.cached = -1  # prompt tokens that the engine had in its cache; -1: not reported
        self.capture: Capture = "tokens"
        self.biases: tuple[str, ...] = ()  # in addition to the biases of the sampling parameters
        self.engine = ""  # the endpoint, in observe mode
        self.lost: tuple[str, ...] = ()  # parameters of the call that were not sent to the endpoint
        self.verbatim = b""
        self.scores: list[TokenScore] = []  # if the agent requested them
        self.side: Sequence[SideArray] = ()  # as the engine reported it
        self._live = 0  # this draft's share of `session.live_tokens`

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float | None] | None, first: int, last: int | None = None
    ) -> None:
        """Append tokens. `first` is the policy version of the first token, and `last` that of the last one (None: the same)."""
        if not self.ids:
            self.version_start = first
        self.version_end = first if last is None else last
        self.ids.extend(ids)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None  # one chunk has none: drop all, since a partial list would look complete
        else:
            self.logprobs.extend(logprobs)
        self._live += len(ids)
        self.session.live_tokens += len(ids)

    def note_report(self, cached: int | None, runs: VersionRuns | None) -> None:
        """Store what the engine reports: the number of cached prompt tokens, and the policy versions of all tokens so far."""
        if cached is not None:
            self.cached = cached
        if runs is not None:
            self.version_runs = runs

    def add_side(self, arrays: Sequence[SideArray]) -> None:
        """Add side data. Raise `EngineError` if it is invalid."""
        for array in arrays:
            try:
                self.side = add_array(self.side, array, self.prompt.parent, len(self.prompt.ids))
            except InvalidSideData as error:
                raise EngineError(f"the engine returned invalid side data: {error}") from None

    def select_side(self) -> tuple[SideArray, ...]:
        """Return the side data to store: only values for tokens that have no stored values yet."""
        if not self.side:
            return ()
        return tuple(select_new(self.side, self.prompt.parent, len(self.prompt.ids), len(self.ids)))

    def read_versions(self) -> tuple[int, int, VersionRuns]:
        """Return the policy versions of the first and last token, and those of all tokens if the engine reported them."""
        runs = cut_runs(self.version_runs, len(self.ids))
        return (runs[0][0], runs[-1][0], runs) if runs else (self.version_start, self.version_end, ())

    def settle(self) -> None:
        """Stop counting the tokens as live. Safe to call twice."""
        self.session.live_tokens -= self._live
        self._live = 0

    def build_logprobs(self) -> Logprobs | None:
        """Return the log-probabilities to store, with NaN for missing and invalid ones. Return None if a chunk had no log-probabilities."""
        if self.logprobs is None:
            return None
        given = cast("Sequence[float]", self.logprobs)
        if None in given:
            given = [np.nan if value is None else value for value in given]
        # NaN values are kept. They do not hide invalid values: `min` and `max` ignore NaN unless it comes first, and then this test fails.
        if given and min(given) >= _LOWEST and max(given) <= LOGPROB_TOLERANCE:
            return np.array(given, LOGPROB_DTYPE)
        with np.errstate(over="ignore"):  # values too large for 32 bits become infinite
            logprobs = np.array(given, LOGPROB_DTYPE)
        invalid = np.isinf(logprobs) | (logprobs > LOGPROB_TOLERANCE)
        if invalid.any():
            example = given[int(invalid.argmax())]
            log.warning("the engine returned an invalid log-probability (%r); the turn is not trained", example)
            logprobs[invalid] = np.nan
        return logprobs


def cut_runs(runs: VersionRuns, size: int) -> VersionRuns:
    """Return the version runs of the first `size` tokens of a reply, or an empty tuple if `runs` covers fewer tokens."""
    cut: list[tuple[int, int]] = []
    left = size
    for version, count in runs:
        if left:
            cut.append((version, min(count, left)))
            left -= cut[-1][1]
    return () if left else tuple(cut)


class ObservedReply:
    """The reply of an observed endpoint, collected from its chunks."""

    def __init__(self) -> None:
        self.prompt: Ids | None = None  # as reported by the endpoint
        self.usage: Usage | None = None
        self.stopped_by = ""
        self.fault = ""
        self._text: dict[str, list[str]] = {"content": [], "reasoning": [], "signature": []}
        self._calls: list[CallDelta] = []
        self._has_gaps = False  # some text arrived without its ids

    def add(self, chunk: RelayChunk) -> None:
        for event in chunk.events:
            if isinstance(event, Delta):
                self._text[event.kind].append(event.text)
            else:
                self._calls.append(event)
        if chunk.prompt is not None:
            self.prompt = np.asarray(chunk.prompt, ID_DTYPE)
        self._has_gaps = self._has_gaps or bool(chunk.events and chunk.ids is None)
        self.usage = chunk.usage or self.usage
        self.stopped_by = chunk.stopped_by or self.stopped_by
        self.fault = chunk.fault or self.fault

    @property
    def is_empty(self) -> bool:
        return not (self._calls or self._text["content"] or self._text["reasoning"])

    def build_message(self) -> Message:
        calls = tuple(event.call for event in self._calls)
        content, reasoning, signature = ("".join(self._text[kind]) for kind in ("content", "reasoning", "signature"))
        return Message("assistant", content, reasoning, calls, signature=signature)

    def is_complete(self, ids: Sequence[int]) -> bool:
        """Return whether `ids` are all the sampled ids of this reply and the ids of the prompt are known too."""
        counted = self.usage is None or self.usage.completion_tokens == len(ids)
        return self.prompt is not None and not self._has_gaps and counted
