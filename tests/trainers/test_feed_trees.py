"""Test training on the trees of a feed: the gradients are those of flat rows."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest

from tests.kit import user
from tests.speed import scaled
from tests.trainers.test_grpo import training_gateway
from tests.trainers.test_tree_batch import check_equal, collect
from turngate.client.feed import Feed, FeedConfig, FeedForm
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.turn_advantage import TurnCredit
from turngate.trace.turn_rewards import TurnReward
from turngate.trainers.local.grpo import GrpoSettings, Learner
from turngate.trainers.local.packing import count_packed_tokens, pack_tree
from turngate.trainers.tree_batch import pack_trees

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("advantages", ["rollout", "turn"])
async def test_trees_of_a_feed_have_gradients_of_flat_rows(advantages: Literal["rollout", "turn"]) -> None:
    """The rollouts share a prompt, and the branches of one share a turn."""
    config = FeedConfig(n=2, from_start=True, credit=TurnCredit())
    async with training_gateway() as here:
        for number in range(2):
            session = await here.g.open(metadata={"group": "g"}, sampling={"seed": number})
            said = await here.g.ask(session.key, "Hi", max_tokens=6)
            for branch in range(2):
                await here.g.ask(session.key, [user("Hi"), said.message(), user(f"Way {branch}")], max_tokens=6)
            await here.g.seal(session.id)
            turns = [turn["id"] for turn in await here.g.turns(session.id)]
            rewards = tuple(TurnReward(turn=turn, value=turn * (number + 1.0), kind="extra") for turn in turns)
            await here.client.record(
                session.id,
                RecordedOutcome(kind="graded", reward=float(number), group="g", task="t", turn_rewards=rewards),
            )
        deliveries = {}
        for form in get_args(FeedForm):
            async with await Feed.open(here.client, "f", config, after=0, form=form) as feed:
                deliveries[form] = await feed.next(scaled(10))
    flat, trees = deliveries["rows"].rows(), deliveries["tree"].rows()
    assert len(flat) == len(trees) == 4 and all(row.path is not None for row in trees)
    [delivered] = deliveries["tree"].trees
    # The trainer packs the segments of the delivered tree: their tokens once, and no others.
    assert count_packed_tokens(trees, tree=True) == len(delivered.tree.ids) < sum(row.ids.size for row in flat)
    assert np.array_equal(pack_tree(trees).ids, delivered.tree.ids)
    assert np.array_equal(pack_tree(trees).positions, delivered.tree.positions)
    batch = pack_trees(deliveries["tree"].trees)
    assert batch.row_tokens.tolist() == [int(row.mask.sum()) for row in trees]
    for n, row in enumerate(trees):
        own = (batch.rows == n).numpy()
        assert np.array_equal(batch.turn_advantages.numpy()[own], row.token_advantages()[row.mask])
        assert np.array_equal(batch.turn_rewards.numpy()[own], row.token_rewards()[row.mask])
        assert set(batch.advantages[own].tolist()) == {np.float32(row.advantage)}
        assert set(batch.weights[own].tolist()) == {row.weight}
    assert batch.advantages.isnan().equal(~batch.trained) and batch.weights.isnan().equal(~batch.trained)
    found = []
    for rows, settings in (
        (flat, GrpoSettings(batch_tokens=1, advantages=advantages)),
        (trees, GrpoSettings(prefix_tree=True, batch_tokens=10_000, advantages=advantages)),
        (trees, GrpoSettings(prefix_tree=True, batch_tokens=len(delivered.tree.ids) * 2 // 3, advantages=advantages)),
    ):
        learner = Learner(here.engine.model, settings)
        measured = learner.gradients(rows, version=0)
        assert measured.refused == () and measured.compared == 4
        found.append(collect(here.engine.model))
    for gradient in found[1:]:
        check_equal(gradient, found[0])
