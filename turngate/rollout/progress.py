"""How far a batch has come, for whoever watches it while it runs."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from turngate.rollout.concurrency import SlotState
from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.outcome import RolloutClass

_WINDOW_S = 30.0  # over which tokens per second are counted


class BatchProgress(msgspec.Struct, kw_only=True):
    total: int
    before: int = 0  # finished in an earlier run of the same batch
    done: int = 0  # all that are finished, those included
    kinds: Counter[RolloutClass] = msgspec.field(default_factory=Counter)
    graded: int = 0
    passed: int = 0
    reward: float = 0.0  # the sum of those that are known
    states: Counter[SlotState] = msgspec.field(default_factory=Counter)
    retrying: int = 0  # wait for their next attempt
    round: int = 0  # of the group that was begun last
    held: bool = False  # the next group may not begin yet
    sampled_tokens: int = 0  # by agents of this run
    started: float = msgspec.field(default_factory=time.monotonic)
    notes: list[str] = []  # what happened to the batch as a whole, oldest first
    recent: deque[tuple[float, int]] = msgspec.field(default_factory=deque)

    def add(self, one: FinishedRollout) -> None:
        self.done += 1
        self.kinds[one.kind] += 1
        if one.reward is not None:
            self.graded += 1
            self.reward += one.reward
            self.passed += bool(one.passed)

    def remove(self, one: FinishedRollout) -> None:
        """It is to be done again."""
        self.done -= 1
        self.kinds[one.kind] -= 1
        if one.reward is not None:
            self.graded -= 1
            self.reward -= one.reward
            self.passed -= bool(one.passed)

    def add_tokens(self, tokens: int) -> None:
        self.sampled_tokens += tokens
        now = time.monotonic()
        self.recent.append((now, tokens))
        while self.recent[0][0] < now - _WINDOW_S:
            self.recent.popleft()

    @property
    def pass_rate(self) -> float | None:
        return self.passed / self.graded if self.graded else None

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.graded if self.graded else None

    @property
    def tokens_per_s(self) -> float:
        now = time.monotonic()
        span = min(_WINDOW_S, now - self.started)
        return sum(tokens for at, tokens in self.recent if at >= now - _WINDOW_S) / max(span, 1.0)

    @property
    def remaining_s(self) -> float | None:
        """By the pace of this run so far; None: it cannot be told yet."""
        new = self.done - self.before
        return (self.total - self.done) * (time.monotonic() - self.started) / new if new > 0 else None


BatchProgressCallback = Callable[[BatchProgress], None]
