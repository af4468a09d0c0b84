"""Test rewards and advantages of turns in deliveries."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.feed.kit import TrainingGateway, training
from tests.feed.test_deliveries import first_delivery
from turngate.client.delivery import DamagedDelivery, convert_delivery
from turngate.client.protocol import FeedConfig, WireDelivery, WireRollout, WireRow
from turngate.trace.sample import RowSpan
from turngate.trace.turn_advantage import NO_TURN_REWARDS, TurnCredit
from turngate.trace.turn_rewards import RowReward, TurnReward


async def rewarded(t: TrainingGateway, reward: float, *earned: float, **more: Any) -> str:
    """Record a rollout whose turns have these extra rewards."""
    session = await t.open_session(turns=len(earned))
    turns = [turn["id"] for turn in await t.g.turns(session.id)]
    await t.g.seal(session.id)
    given = tuple(TurnReward(turn=turn, value=value, kind="extra") for turn, value in zip(turns, earned, strict=True))
    await t.record(session.id, reward, turn_rewards=given, **more)
    return session.id


async def test_rewards_and_advantages_are_delivered() -> None:
    async with training() as t:
        await rewarded(t, 2.0, 1.0, 0.0)  # returns 3, 2
        await rewarded(t, 1.0, 0.0, 0.0)  # returns 1, 1
        await rewarded(t, 1.0, 1.0)  # return 2
        config = FeedConfig(n=3, advantage="leave_one_out", credit=TurnCredit(), from_start=True)
        found = await first_delivery(t, config)
        assert [rollout.uncredited for rollout in found.rollouts] == ["", "", ""]
        assert [rollout.rows[0].turn_advantages for rollout in found.rollouts] == [(1.5, 1.0), (-1.5, -1.0), (0.0,)]
        assert [rollout.advantage for rollout in found.rollouts] == [1.0, -0.5, -0.5]  # of the rollouts, as before
        [row] = found.rollouts[0].rows
        rewards, advantages = row.token_rewards(), row.token_advantages()
        first, second = row.spans
        assert rewards.dtype == advantages.dtype == np.float32
        assert rewards[first.end - 1] == 1.0 and rewards.sum() == 1.0
        assert (advantages[first.start : first.end] == 1.5).all() and (
            advantages[second.start : second.end] == 1.0
        ).all()
        assert np.array_equal(np.isfinite(advantages), row.mask)
        discounted = await first_delivery(
            t, FeedConfig(n=3, advantage="none", credit=TurnCredit(gamma=0.5), from_start=True), "d"
        )
        assert [rollout.rows[0].turn_advantages for rollout in discounted.rollouts] == [(2.0, 2.0), (0.5, 1.0), (2.0,)]


async def test_each_branch_has_the_rewards_of_the_turns_it_trains() -> None:
    async with training() as t:
        session = await t.g.open(metadata={"group": "g"})
        await t.branch(session, 2)
        turns = [turn["id"] for turn in await t.g.turns(session.id)]
        await t.g.seal(session.id)
        given = tuple(TurnReward(turn=turn, value=float(n), kind="extra") for n, turn in enumerate(turns, 1))
        await t.record(session.id, 0.0, turn_rewards=given)
        found = await first_delivery(t, FeedConfig(n=1, advantage="none", credit=TurnCredit(), from_start=True))
        rows = found.rows()
        assert sorted((reward.node, reward.value) for row in rows for reward in row.turn_rewards) == [
            (turn, float(n)) for n, turn in enumerate(turns, 1)
        ]
        for row in rows:
            shared = row.spans[0]
            assert (row.turn_advantages[0] is None) == (not shared.trained)
            assert np.array_equal(np.isfinite(row.token_advantages()), row.mask)


async def test_rollout_without_turn_rewards_is_marked() -> None:
    async with training() as t:
        await rewarded(t, 1.0, 0.5)
        await rewarded(t, 0.0, 0.0)
        await t.rollout(1.0)
        config = FeedConfig(n=3, credit=TurnCredit(), advantage="none", from_start=True)
        found = await first_delivery(t, config)
        assert [rollout.uncredited for rollout in found.rollouts] == ["", "", NO_TURN_REWARDS]
        without = found.rollouts[2]
        assert without.rows and without.advantage == 1.0  # its own advantage is not affected
        assert without.rows[0].turn_advantages == () and np.isnan(without.rows[0].token_advantages()).all()
        # Without the setting, rewards are delivered, and nothing else changes.
        plain = await first_delivery(t, FeedConfig(n=3, advantage="none", from_start=True), "plain")
        assert [row.turn_advantages for row in plain.rows()] == [()] * 3
        assert [[r.value for r in row.turn_rewards] for row in plain.rows()] == [[0.5], [0.0], []]


async def test_superseded_attempt_is_not_delivered() -> None:
    async with training() as t:
        sessions = [await t.open_session(rollout="r", attempt=attempt) for attempt in (1, 2)]
        for session, value in zip(sessions, (5.0, 7.0), strict=True):
            [turn] = [turn["id"] for turn in await t.g.turns(session.id)]
            await t.g.seal(session.id)
            await t.record(session.id, 1.0, turn_rewards=(TurnReward(turn=turn, value=value, kind="extra"),))
        found = await first_delivery(t, FeedConfig(n=1, advantage="none", from_start=True))
        assert [[r.value for r in row.turn_rewards] for row in found.rows()] == [[7.0]]


def test_a_row_without_turn_rewards_has_the_same_bytes_as_before() -> None:
    row = WireRow(1, b"", b"", b"", (), 1.0)
    assert set(msgspec.msgpack.decode(msgspec.msgpack.encode(row))) == {
        "branch",
        "ids",
        "mask",
        "logprobs",
        "spans",
        "weight",
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"turn_rewards": (RowReward(2, 0, 9, "", 1.0, "extra"),)}, "outside the row"),
        ({"turn_rewards": (RowReward(2, 1, 1, "", 1.0, "extra"),)}, "outside the row"),
        ({"turn_advantages": (1.0, 2.0)}, r"turn advantages \(2\) does not match the number of turns \(1\)"),
    ],
)
def test_damaged_turn_rewards_are_refused(change: dict[str, Any], text: str) -> None:
    span = RowSpan(2, 0, 2, "main", True, "", 0, 0)
    row = WireRow(
        2, np.array([1, 2], "<i4").tobytes(), b"\xc0", np.array([-0.5, -0.5], "<f4").tobytes(), (span,), 1.0, **change
    )
    rollout = WireRollout(
        session="s",
        task="t",
        attempt=1,
        kind="graded",
        reward=1.0,
        resolved=None,
        advantage=1.0,
        excluded="",
        truncated=False,
        timed_out=False,
        turns=1,
        sampled_tokens=2,
        data=b"null",
        rows=(row,),
    )
    with pytest.raises(DamagedDelivery, match=text):
        convert_delivery(WireDelivery(number=1, group="g", task="t", version=0, rollouts=(rollout,)))
