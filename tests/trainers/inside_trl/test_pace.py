"""How many groups of a plan begin before the trainer has taken any row of them, whatever the feed has held before."""

from __future__ import annotations

import asyncio

import pytest

from turngate.rollout.ledger import FinishedRollout
from turngate.trainers.trl.throttle import DeliveryThrottle

pytestmark = pytest.mark.process


class Trainer:
    """Takes nothing by itself."""

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed

    async def row_taken(self) -> None:
        await asyncio.Event().wait()


def done(pace: DeliveryThrottle, group: str) -> None:
    """A group of one rollout."""
    pace.record_finished(FinishedRollout(rollout=f"{group}.0", task="t", index=0, kind="graded", session="s", at=0.0))


async def begun(pace: DeliveryThrottle, first: int = 0, *, without: tuple[int, ...] = ()) -> int:
    """How many groups may begin from here on, before it has to be waited."""
    count, number = 0, first
    while count < 50:
        if number not in without:
            try:
                async with asyncio.timeout(0.02):
                    await pace(number)
            except TimeoutError:
                return count
            count += 1
        number += 1
    return count


async def test_a_new_plan_on_an_old_feed_runs_no_further_ahead_than_on_a_new_one() -> None:
    assert await begun(DeliveryThrottle(Trainer(), n=1, ahead=2, newest=0)) == 2
    assert await begun(DeliveryThrottle(Trainer(50), n=1, ahead=2, newest=50)) == 2


async def test_deliveries_that_nobody_has_read_yet_come_first() -> None:
    trainer = Trainer(48)
    pace = DeliveryThrottle(trainer, n=1, ahead=2, newest=50)
    assert await begun(pace) == 0
    trainer.consumed = 50
    assert await begun(pace) == 2


async def test_groups_from_before_the_feed_are_never_waited_for() -> None:
    pace = DeliveryThrottle(Trainer(), n=1, ahead=2, newest=0)
    for number in range(10):
        done(pace, f"b.t@{number}")
    assert await begun(pace, 10) == 2


async def test_a_group_that_was_complete_before_an_earlier_one_holds_nobody_up() -> None:
    trainer = Trainer(1)
    pace = DeliveryThrottle(trainer, n=1, ahead=1, newest=1)
    done(pace, "b.t@1")  # in an earlier run, and delivered; the first group is not done yet
    assert await begun(pace, without=(1,)) == 1
    done(pace, "b.t")
    pace.record_delivery(2, "b.t")
    trainer.consumed = 2
    assert await begun(pace, 2) == 1


async def test_deliveries_of_others_and_late_ones_let_nobody_begin() -> None:
    trainer = Trainer(0)
    pace = DeliveryThrottle(trainer, n=1, ahead=2, newest=0)
    done(pace, "b.t")  # complete in an earlier run, but delivered only now
    assert await begun(pace, 1) == 2
    pace.record_delivery(1, "b.t")
    for number in range(2, 40):
        pace.record_delivery(number, "another.t")
    trainer.consumed = 39
    assert await begun(pace, 3) == 0
    pace.record_delivery(40, "b.t@1")
    trainer.consumed = 40
    assert await begun(pace, 3) == 0  # its runner has not said that it is its own
    done(pace, "b.t@1")
    assert await begun(pace, 3) == 1
