"""The progress of a batch while it runs: counts, rates such as tokens per second, and the time left."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from turngate.rollout.concurrency import SlotState
from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.outcome import RolloutClass

_WINDOW_S = 30.0  # period over which tokens per second are averaged


class BatchProgress(msgspec.Struct, kw_only=True):
    """Counters that show the progress of a batch. The batch updates them, and passes the same object to every progress callback."""

    total: int
    before: int = 0  # rollouts that finished in earlier runs of the same batch
    done: int = 0  # finished rollouts, including those of earlier runs
    kinds: Counter[RolloutClass] = msgspec.field(default_factory=Counter)
    graded: int = 0  # finished rollouts with a reward
    passed: int = 0
    reward: float = 0.0  # the sum of the known rewards
    states: Counter[SlotState] = msgspec.field(default_factory=Counter)
    retrying: int = 0  # rollouts that are waiting for their next attempt
    round: int = 0  # round of the group that started last
    held: bool = False  # the throttle is holding back the next group
    sampled_tokens: int = 0  # in this run
    started: float = msgspec.field(default_factory=time.monotonic)
    notes: list[str] = []  # messages about the batch and its rollouts, oldest first
    recent: deque[tuple[float, int]] = msgspec.field(default_factory=deque)

    def add(self, finished: FinishedRollout) -> None:
        """Count a finished rollout."""
        self.done += 1
        self.kinds[finished.kind] += 1
        if finished.reward is not None:
            self.graded += 1
            self.reward += finished.reward
            self.passed += bool(finished.passed)

    def remove(self, finished: FinishedRollout) -> None:
        """Subtract a finished rollout that will run again."""
        self.done -= 1
        self.kinds[finished.kind] -= 1
        if finished.reward is not None:
            self.graded -= 1
            self.reward -= finished.reward
            self.passed -= bool(finished.passed)

    def add_tokens(self, tokens: int) -> None:
        """Count newly sampled tokens."""
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
        """How many more seconds the batch will take at this run's average speed, or None if no rollout has finished in this run."""
        new = self.done - self.before
        elapsed = time.monotonic() - self.started
        return (self.total - self.done) * elapsed / new if new > 0 else None


BatchProgressCallback = Callable[[BatchProgress], None]
