"""Tests for the delivery throttle: how many groups may start ahead of the trainer."""

from __future__ import annotations

import asyncio

import pytest

from turngate.rollout.ledger import FinishedRollout
from turngate.trainers.trl.throttle import DeliveryThrottle

pytestmark = pytest.mark.process


class Trainer:
    """A trainer that never takes a row."""

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed

    async def row_taken(self) -> None:
        await asyncio.Event().wait()


def finish_group(throttle: DeliveryThrottle, group: str) -> None:
    """Finish a group of one rollout."""
    throttle.record_finished(
        FinishedRollout(rollout=f"{group}.0", task="t", index=0, kind="graded", session="s", at=0.0)
    )


async def count_started(throttle: DeliveryThrottle, first: int = 0, *, without: tuple[int, ...] = ()) -> int:
    """Count the groups that may start before the throttle blocks."""
    count, number = 0, first
    while count < 50:
        if number not in without:
            try:
                async with asyncio.timeout(0.02):
                    await throttle(number)
            except TimeoutError:
                return count
            count += 1
        number += 1
    return count


async def test_lead_is_the_same_on_old_and_new_feeds() -> None:
    assert await count_started(DeliveryThrottle(Trainer(), n=1, ahead=2, newest=0)) == 2
    assert await count_started(DeliveryThrottle(Trainer(50), n=1, ahead=2, newest=50)) == 2


async def test_unread_deliveries_count_against_lead() -> None:
    trainer = Trainer(48)
    throttle = DeliveryThrottle(trainer, n=1, ahead=2, newest=50)
    assert await count_started(throttle) == 0
    trainer.consumed = 50
    assert await count_started(throttle) == 2


async def test_groups_finished_before_feed_do_not_block() -> None:
    throttle = DeliveryThrottle(Trainer(), n=1, ahead=2, newest=0)
    for number in range(10):
        finish_group(throttle, f"b.t@{number}")
    assert await count_started(throttle, 10) == 2


async def test_group_finished_out_of_order_does_not_block() -> None:
    trainer = Trainer(1)
    throttle = DeliveryThrottle(trainer, n=1, ahead=1, newest=1)
    finish_group(throttle, "b.t@1")  # done and delivered in an earlier run; the first group is not done yet
    assert await count_started(throttle, without=(1,)) == 1
    finish_group(throttle, "b.t")
    throttle.record_delivery(2, "b.t")
    trainer.consumed = 2
    assert await count_started(throttle, 2) == 1


async def test_foreign_and_late_deliveries_start_no_groups() -> None:
    trainer = Trainer(0)
    throttle = DeliveryThrottle(trainer, n=1, ahead=2, newest=0)
    finish_group(throttle, "b.t")  # done in an earlier run, delivered only now
    assert await count_started(throttle, 1) == 2
    throttle.record_delivery(1, "b.t")
    for number in range(2, 40):
        throttle.record_delivery(number, "another.t")
    trainer.consumed = 39
    assert await count_started(throttle, 3) == 0
    throttle.record_delivery(40, "b.t@1")
    trainer.consumed = 40
    assert await count_started(throttle, 3) == 0  # its runner has not reported it finished yet
    finish_group(throttle, "b.t@1")
    assert await count_started(throttle, 3) == 1
