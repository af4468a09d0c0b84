"""One delivery of a feed as TRL's rows, and the queue that TRL's trainer takes them from. For `worker.py`.

TRL's loss is a mean over all trained tokens of a batch, whatever row they are in: a rollout that comes as K rows counts no more than the
same tokens in one row would. So its rows carry its advantage as it is, and the feed's `weight` of 1/K has nothing to undo here.
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
    raise ModuleNotFoundError(f"TRL is not there ({error}): pip install 'turngate[trl]'", name=error.name) from None

from turngate.client.feed import DeliveredRollout, Delivery, Row

Weigh = Literal["tokens", "rollouts"]
Dropped = Literal["stale", "too_long"]
RowName = tuple[str, int]  # session and branch: the same each time that a delivery is handed out


class Item(msgspec.Struct, frozen=True):
    """A row in the queue."""

    number: int  # of its delivery
    name: RowName
    sample: RolloutSample


class Made(msgspec.Struct, frozen=True):
    """What became of a delivery."""

    items: tuple[Item, ...]
    too_long: int  # rows that were left out


def items(delivery: Delivery, base: int, *, weigh: Weigh = "tokens", longest: int | None = None) -> Made:
    """The rows. `base`: what TRL's version 0 is at the gateway; `longest`: tokens, past which a row is left out."""
    kept = [
        (rolled, [row for row in rolled.rows if longest is None or len(row.ids) <= longest])
        for rolled in delivery.rollouts
    ]
    kept = [(rolled, rows) for rolled, rows in kept if rows]
    spread = _spread(delivery)
    shares = _shares([sum(int(row.mask.sum()) for row in rows) for _, rows in kept], weigh)
    made = tuple(
        Item(delivery.number, (rolled.session, row.branch), _sample(delivery, rolled, row, share, spread, base))
        for (rolled, rows), share in zip(kept, shares, strict=True)
        for row in rows
    )
    return Made(made, len(delivery.rows()) - len(made))


def _shares(tokens: list[int], weigh: Weigh) -> list[float]:
    """By what an advantage is multiplied, so that under a mean over tokens every token counts the same, or every rollout."""
    if weigh == "tokens" or not tokens:
        return [1.0] * len(tokens)
    mean = sum(tokens) / len(tokens)
    return [mean / count for count in tokens]


def _spread(delivery: Delivery) -> float:
    """For TRL's logs: the standard deviation of the rewards that are trained on."""
    rewards = [
        rolled.reward for rolled in delivery.rollouts if rolled.advantage is not None and rolled.reward is not None
    ]
    return float(np.std(rewards)) if rewards else float("nan")


def _sample(
    delivery: Delivery, rolled: DeliveredRollout, row: Row, share: float, spread: float, base: int
) -> RolloutSample:
    """The words are left out: they are in the trace, and TRL only prints them."""
    assert rolled.reward is not None, "a rollout without a reward has no rows"
    oldest = min(span.version_start for span in row.spans if span.trained)
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=row.ids.astype(np.int64),
        completion_mask=row.mask.astype(np.int64),
        # Where nothing is trained TRL wants a 0 and looks at none of it.
        old_log_probs=np.where(row.mask, row.logprobs, np.float32(0)),
        advantage=row.advantage * share,
        model_version=oldest - base,
        group_id=delivery.number,
        metrics={"reward": rolled.reward, "reward_std": spread},
        enqueued_at=time.time(),
    )


class Buffer(queue.Queue[Item]):
    """What TRL's trainer drains. It remembers what it gave, in order, so that a checkpoint can say what is trained.

    A row that became too old while it lay here, or is too long for a batch, is not given: TRL would drop it too, but nobody would
    learn which.
    """

    def __init__(self, taken: Callable[[], None], dropped: Callable[[Dropped], None]) -> None:
        super().__init__()
        self.version = 0  # TRL's
        self.bound: int | None = None  # how much older a row may be
        self.longest: int | None = None  # tokens of a row
        self._taken, self._dropped = taken, dropped
        self._lock = threading.Lock()
        self._given: deque[Item] = deque()  # to the trainer, not yet trained
        self._open: dict[int, int] = {}  # by delivery, rows that are neither trained nor dropped
        self._done = 0  # all deliveries up to this one are
        self._newest = 0
        self._trained: dict[int, list[RowName]] = {}

    def begin(self, done: int) -> None:
        """From here on: all deliveries up to this one are in the trainer's checkpoint."""
        self._done = self._newest = done

    def add(self, number: int, rows: tuple[Item, ...], trained: list[RowName]) -> None:
        """One whole delivery, less the rows of it that are trained already."""
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
            left = None if end is None else max(0.0, end - time.monotonic())
            item = super().get(block, left)
            why = self._unfit(item.sample)
            with self._lock:
                if why is None:
                    self._given.append(item)
                else:
                    self._ended(item)
            self._taken()
            if why is None:
                return item.sample
            self._dropped(why)

    def discard(self) -> None:
        """Nobody will take what waits here. It stays untrained, and is delivered again to whoever goes on."""
        with self.mutex:
            self.queue.clear()

    def trained(self, rows: int) -> None:
        """The trainer has trained so many more of those that it was given, the oldest first."""
        with self._lock:
            for _ in range(rows):
                item = self._given.popleft()
                self._trained.setdefault(item.number, []).append(item.name)
                self._ended(item)

    def state(self) -> tuple[int, dict[int, list[RowName]]]:
        """Up to which delivery all is trained, and of those past it which rows are."""
        with self._lock:
            return self._done, {number: list(names) for number, names in self._trained.items() if number > self._done}

    @property
    def consumed(self) -> int:
        """The newest delivery of which no row waits here any more."""
        with self._lock, self.mutex:
            return self.queue[0].number - 1 if self.queue else self._newest

    def _unfit(self, sample: RolloutSample) -> Dropped | None:
        if self.bound is not None and self.version - sample.model_version > self.bound:
            return "stale"
        return "too_long" if self.longest is not None and len(sample.input_ids) > self.longest else None

    def _ended(self, item: Item) -> None:
        self._open[item.number] -= 1
        self._settle()

    def _settle(self) -> None:
        while self._open.get(self._done + 1) == 0:
            self._done += 1
            del self._open[self._done]
            self._trained.pop(self._done, None)
