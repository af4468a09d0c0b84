"""Convert a feed's deliveries to TRL's rows, with their model versions and metrics, and queue them for TRL's trainer.

TRL's loss is a mean over all trained tokens of a batch, so the weight of a rollout does not depend on its number of rows. Every row
therefore has the advantage of its rollout, scaled if `weigh` is "rollouts". The feed's `weight` (1/K for each of K rows) is not used.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

try:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"TRL is not installed, or its version is not supported ({error}); run `pip install 'turngate[trl]'`",
        name=error.name,
    ) from None

from turngate.client.feed import DeliveredRollout, Delivery, Row

Weighting = Literal["tokens", "rollouts"]
DropReason = Literal["stale", "too_long"]
RowName = tuple[str, int]  # session and branch, which are stable across restarts


class QueuedRow(msgspec.Struct, frozen=True):
    """A row that is queued for TRL's trainer."""

    number: int  # number of the row's delivery
    name: RowName
    sample: RolloutSample


class DeliveryRows(msgspec.Struct, frozen=True):
    """The rows that are built from one delivery."""

    items: tuple[QueuedRow, ...]
    too_long: int  # rows left out because of their length


def build_items(
    delivery: Delivery, base: int, *, weigh: Weighting = "tokens", longest: int | None = None
) -> DeliveryRows:
    """Build the rows of a delivery, leaving out rows with more than `longest` tokens.

    `base` is the gateway's policy version that corresponds to TRL's version 0. `weigh` determines whether all trained tokens or all
    rollouts have the same weight.
    """
    kept = [
        (rolled, [row for row in rolled.rows if longest is None or len(row.ids) <= longest])
        for rolled in delivery.rollouts
    ]
    kept = [(rolled, rows) for rolled, rows in kept if rows]
    spread = _reward_deviation(delivery)
    shares = _advantage_factors([sum(int(row.mask.sum()) for row in rows) for _, rows in kept], weigh)
    rows_built = tuple(
        QueuedRow(
            delivery.number, (rolled.session, row.branch), _build_sample(delivery, rolled, row, share, spread, base)
        )
        for (rolled, rows), share in zip(kept, shares, strict=True)
        for row in rows
    )
    return DeliveryRows(rows_built, len(delivery.rows()) - len(rows_built))


def _advantage_factors(tokens: list[int], weigh: Weighting) -> list[float]:
    """Compute a factor for the advantage of each rollout, so that a mean over tokens gives every token or every rollout the same weight."""
    if weigh == "tokens" or not tokens:
        return [1.0] * len(tokens)
    mean = sum(tokens) / len(tokens)
    return [mean / count for count in tokens]


def _reward_deviation(delivery: Delivery) -> float:
    """Compute the standard deviation of the rewards of rollouts with an advantage, for TRL's logs."""
    rewards = [
        rolled.reward for rolled in delivery.rollouts if rolled.advantage is not None and rolled.reward is not None
    ]
    return float(np.std(rewards)) if rewards else float("nan")


def _build_sample(
    delivery: Delivery, rolled: DeliveredRollout, row: Row, share: float, spread: float, base: int
) -> RolloutSample:
    """Build a TRL sample. Its text is left out, because TRL only prints it and the trace already contains it."""
    assert rolled.reward is not None, "a rollout without a reward has no rows"
    oldest = min(span.version_start for span in row.spans if span.trained)
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=row.ids.astype(np.int64),
        completion_mask=row.mask.astype(np.int64),
        # TRL requires a number for untrained tokens, but ignores it.
        old_log_probs=np.where(row.mask, row.logprobs, np.float32(0)),
        advantage=row.advantage * share,
        model_version=oldest - base,
        group_id=delivery.number,
        metrics={"reward": rolled.reward, "reward_std": spread},
        enqueued_at=time.time(),
    )


class RowBuffer(queue.Queue[QueuedRow]):
    """The queue that TRL's trainer reads. It remembers which rows the trainer has taken, so that a checkpoint can list the trained ones.

    It drops rows that have become stale in the queue or are too long for a batch. TRL would drop them too, but without reporting which
    ones.
    """

    def __init__(self, on_taken: Callable[[], None], on_dropped: Callable[[DropReason], None]) -> None:
        super().__init__()
        self.version = 0  # TRL's model version
        self.bound: int | None = None  # maximum staleness of a row
        self.longest: int | None = None  # maximum tokens of a row
        self._on_taken, self._on_dropped = on_taken, on_dropped
        self._lock = threading.Lock()
        self._given: deque[QueuedRow] = deque()  # rows taken by the trainer, but not yet trained
        self._open: dict[int, int] = {}  # number of rows per delivery that are neither trained nor dropped
        self._done = 0  # all deliveries up to this one are trained or dropped
        self._newest = 0
        self._trained: dict[int, list[RowName]] = {}

    def begin(self, done: int) -> None:
        """Start after delivery `done`. All deliveries up to it are committed or covered by the trainer's checkpoint."""
        self._done = self._newest = done

    def add(self, number: int, rows: tuple[QueuedRow, ...], trained: list[RowName]) -> None:
        """Add the rows of a delivery that are not trained yet. `trained` names the delivery's rows that are already trained."""
        with self._lock:
            self._open[number] = len(rows)
            self._newest = number
            if trained:
                self._trained[number] = list(trained)
            self._settle()
        for item in rows:
            self.put_nowait(item)

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = None if end is None else max(0.0, end - time.monotonic())
            item = super().get(block, remaining)
            reason = self._drop_reason(item.sample)
            with self._lock:
                if reason is None:
                    self._given.append(item)
                else:
                    self._finish(item)
            self._on_taken()
            if reason is None:
                return item.sample
            self._on_dropped(reason)

    def discard(self) -> None:
        """Discard the waiting rows. They are not marked as trained, so they are delivered again after a restart."""
        with self.mutex:
            self.queue.clear()

    def mark_trained(self, rows: int) -> None:
        """Mark rows as trained, in the order in which the trainer took them. `rows` is the number of rows to mark."""
        with self._lock:
            for _ in range(rows):
                item = self._given.popleft()
                self._trained.setdefault(item.number, []).append(item.name)
                self._finish(item)

    def state(self) -> tuple[int, dict[int, list[RowName]]]:
        """Return the number of the last delivery up to which all rows are trained or dropped, and the trained rows of later deliveries."""
        with self._lock:
            return self._done, {number: list(names) for number, names in self._trained.items() if number > self._done}

    @property
    def consumed(self) -> int:
        """The number of the last delivery up to which no rows are waiting in the queue."""
        with self._lock, self.mutex:
            return self.queue[0].number - 1 if self.queue else self._newest

    def _drop_reason(self, sample: RolloutSample) -> DropReason | None:
        if self.bound is not None and self.version - sample.model_version > self.bound:
            return "stale"
        return "too_long" if self.longest is not None and len(sample.input_ids) > self.longest else None

    def _finish(self, item: QueuedRow) -> None:
        self._open[item.number] -= 1
        self._settle()

    def _settle(self) -> None:
        while self._open.get(self._done + 1) == 0:
            self._done += 1
            del self._open[self._done]
            self._trained.pop(self._done, None)
