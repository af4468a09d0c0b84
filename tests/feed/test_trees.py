"""Test deliveries as trees: the same rows as without trees, with each shared prefix once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.exact.side_engine import EXPERTS, SCORES, SideEngine
from tests.feed.kit import TrainingGateway, training
from tests.kit import gateway, say
from tests.speed import scaled
from turngate.client.delivery import DamagedDelivery, Delivery, Row, convert_delivery, decode_delivery
from turngate.client.feed import Feed, FeedConfig, FeedForm
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import DeliveryPage, WireDelivery, WireSegment, WireTree
from turngate.trace.sample import RowSpan
from turngate.trace.turn_advantage import TurnCredit
from turngate.trace.turn_rewards import TurnReward


async def fetch(t: TrainingGateway, config: FeedConfig, form: FeedForm) -> Delivery:
    """Return the first delivery of a feed. The same feed can be read in both forms."""
    async with await Feed.open(t.client, "f", config, after=0, form=form) as feed:
        found = await feed.next(scaled(5))
        assert found is not None
        return found


async def record_group(t: TrainingGateway) -> None:
    """Record rollouts with three branches, two turns and one turn, whose turns have rewards, and one that is not trained."""
    for number, branches in enumerate((3, 0, 1)):
        session = await t.g.open(metadata={"group": "g"})
        await (t.branch(session, branches) if branches else t.talk(session, 2))
        turns = [turn["id"] for turn in await t.g.turns(session.id)]
        await t.g.seal(session.id)
        rewards = tuple(TurnReward(turn=turn, value=0.5 * turn, kind="extra") for turn in turns[:2])
        await t.record(session.id, float(number), turn_rewards=rewards)
    await t.rollout(None, kind="invalid task")


def check_equal(found: list[Row], expected: list[Row]) -> None:
    assert len(found) == len(expected)
    for row, flat in zip(found, expected, strict=True):
        for name in ("ids", "mask", "logprobs"):
            one, other = getattr(row, name), getattr(flat, name)
            assert one.dtype == other.dtype and np.array_equal(one, other, equal_nan=name == "logprobs")
        for name in ("spans", "branch", "weight", "advantage", "turn_rewards", "turn_advantages", "unscored"):
            assert getattr(row, name) == getattr(flat, name), name
        assert row.side.keys() == flat.side.keys()
        for name, column in row.side.items():
            assert column.spans == flat.side[name].spans and np.array_equal(column.values, flat.side[name].values)


async def test_rows_of_trees_equal_flat_rows() -> None:
    config = FeedConfig(n=4, advantage="leave_one_out", credit=TurnCredit(), from_start=True)
    async with training() as t:
        await record_group(t)
        flat, found = await fetch(t, config, "rows"), await fetch(t, config, "tree")
    check_equal(found.rows(), flat.rows())
    assert any(row.turn_rewards for row in flat.rows()) and any(row.turn_advantages for row in flat.rows())
    assert all(not rolled.rows for rolled in found.rollouts) and not flat.trees
    assert [rolled.excluded for rolled in found.rollouts] == [rolled.excluded for rolled in flat.rollouts]
    [delivered] = found.trees
    assert [row.rollout for row in delivered.rows] == [0, 0, 0, 1, 2]
    # All rollouts begin with the same message, which the tree has once.
    prompt = flat.rows()[0].spans[0].start
    assert delivered.tree.segments[0].end >= prompt and delivered.tree.segments[0].turn is None
    assert len(delivered.tree.ids) <= sum(len(row.ids) for row in flat.rows()) - 4 * prompt
    # A trained token is in the tree once, and every row trains its own.
    assert delivered.tree.mask.sum() == sum(row.mask.sum() for row in flat.rows())


async def test_side_data_in_trees() -> None:
    config = FeedConfig(n=2, advantage="none", side=(EXPERTS, SCORES), from_start=True)
    engine = SideEngine(lambda request, index: say(f"Answer {index}."))
    async with gateway(engine=engine) as g, GatewayClient(g.root, g.app.admin_key) as client:
        t = TrainingGateway(g, client)
        for reward in (0.0, 1.0):
            session = await t.open_session(turns=2)
            await t.branch(session, 2)
            await t.g.seal(session.id)
            await t.record(session.id, reward)
        flat, found = await fetch(t, config, "rows"), await fetch(t, config, "tree")
    assert any(row.side for row in flat.rows())
    by_branch = {(n, row.branch): row for n, rolled in enumerate(flat.rollouts) for row in rolled.rows}
    rows = [(meta, row) for tree in found.trees for meta, row in zip(tree.rows, tree.rebuild_rows(), strict=True)]
    assert len(by_branch) == len(rows) == 6
    check_equal([row for _, row in rows], [by_branch[meta.rollout, row.branch] for meta, row in rows])


async def fetch_raw(t: TrainingGateway) -> bytes:
    reader = await t.client.take_over_feed("f")
    page: DeliveryPage = await t.client.fetch_deliveries("f", reader, after=0, form="tree")
    return bytes(page.deliveries[0])


async def test_arrays_share_the_memory_of_the_delivery_and_damage_is_rejected() -> None:
    async with training() as t:
        await record_group(t)
        await t.client.open_feed("f", FeedConfig(n=4, from_start=True, credit=TurnCredit()))
        raw = await fetch_raw(t)
    [delivered] = decode_delivery(raw).trees
    assert np.shares_memory(delivered.tree.ids, np.frombuffer(raw, np.uint8))
    wire = msgspec.msgpack.decode(raw, type=WireDelivery)
    assert isinstance(wire.trees, tuple)
    [tree] = wire.trees
    for changes, why in DAMAGED:
        damaged = msgspec.structs.replace(tree, **changes(tree))
        with pytest.raises(DamagedDelivery, match=f"group g, tree 0.*: {why}"):
            convert_delivery(msgspec.structs.replace(wire, trees=(damaged,)))


def change_row(tree: WireTree, **change: Any) -> dict[str, Any]:
    return {"rows": (msgspec.structs.replace(tree.rows[0], **change), *tree.rows[1:])}


OUTSIDE = RowSpan(0, 0, 1000, "main", True, "", 0, 0)
DAMAGED: list[tuple[Any, str]] = [
    (lambda tree: {"ids": tree.ids[4:]}, r"the segments have \d+ tokens, .* but there are \d+ ids and \d+ log"),
    (
        lambda tree: {"logprobs": tree.logprobs[4:]},
        r"the segments have \d+ tokens, .* but there are \d+ ids and \d+ log",
    ),
    (lambda tree: {"segments": (WireSegment(0, None), *tree.segments)}, "segment 0 is empty"),
    (
        lambda tree: {"segments": (WireSegment(3, 5), *tree.segments[1:])},
        "segment 0 has the parent 5, which is not an earlier segment",
    ),
    (lambda tree: {"segments": (), "rows": (), "ids": b"", "logprobs": b""}, "there are no segments"),
    (
        lambda tree: {"segments": (WireSegment(2**60, None), *tree.segments[1:])},
        r"the segments have \d+ tokens, .* but there are \d+ ids and \d+ log",
    ),
    (
        lambda tree: change_row(tree, turn_advantages=(), empty_turns=(OUTSIDE,)),
        "the span of a turn without tokens is not empty",
    ),
    (lambda tree: {"rows": tree.rows[1:]}, r"segments\[\d+\].turn.trained_in must be the index of a row"),
    (lambda tree: change_row(tree, last=-1), "branch .* ends in segment -1"),
    (lambda tree: change_row(tree, rollout=3), "the row belongs to rollout 3, which has no advantage"),
    (lambda tree: change_row(tree, rollout=4), "the row belongs to rollout 4, which does not exist"),
    (
        lambda tree: change_row(tree, turn_advantages=(1.0,)),
        r"the number of turn advantages \(1\) does not match the number of turns \(2\)",
    ),
    (
        lambda tree: {"logprobs": memoryview(np.full(len(tree.logprobs) // 4, np.nan, "<f4").tobytes())},
        r"segments\[1\] is trained, but not all of its log-probabilities are finite",
    ),
]


async def test_teacher_needs_rows() -> None:
    class Teacher:
        async def score(self, delivery: Delivery) -> Delivery:
            return delivery

    async with training() as t:
        with pytest.raises(ValueError, match="with a teacher, 'form' must be 'rows'"):
            await Feed.open(t.client, "f", FeedConfig(n=1), teacher=Teacher(), form="tree")


async def test_gateway_without_trees_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older gateway ignores `form` and delivers rows."""
    async with training() as t:
        await t.rollout(1.0)
        fetch_deliveries = t.client.fetch_deliveries

        async def fetch_rows(*arguments: Any, form: FeedForm, **more: Any) -> DeliveryPage:
            return await fetch_deliveries(*arguments, **more)

        monkeypatch.setattr(t.client, "fetch_deliveries", fetch_rows)
        async with await Feed.open(
            t.client, "f", FeedConfig(n=1, advantage="none", from_start=True), form="tree"
        ) as feed:
            with pytest.raises(DamagedDelivery, match="the gateway is too old to deliver trees; upgrade it"):
                await feed.next(scaled(5))
