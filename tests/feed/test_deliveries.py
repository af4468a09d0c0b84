"""Tests for deliveries: rows, advantages and excluded rollouts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.feed.kit import TrainingGateway, training
from tests.speed import scaled
from turngate.client.delivery import convert_delivery, decode_delivery
from turngate.client.feed import DamagedDelivery, Delivery, Feed
from turngate.client.protocol import FeedConfig, WireColumn, WireDelivery, WireRollout, WireRow
from turngate.trace.advantage import EPSILON
from turngate.trace.sample import RowSpan


async def first_delivery(t: TrainingGateway, config: FeedConfig, name: str = "f") -> Delivery:
    """Open a feed and return its first delivery."""
    async with await Feed.open(t.client, name, config) as feed:
        found = await feed.next(scaled(5))
        assert found is not None
        return found


async def test_rows_equal_trace() -> None:
    async with training() as t:
        session = await t.g.open()
        await t.branch(session, 2)
        await t.g.seal(session.id)
        await t.record(session.id, 1.0, data={"status": "finished", "mine": [1, None, "é"]}, resolved=True, attempt=3)
        found = await first_delivery(t, FeedConfig(n=1, advantage="none", from_start=True))
        assert (found.number, found.group, found.task, found.version) == (1, "g", "t", 0)
        [rollout] = found.rollouts
        assert (rollout.session, rollout.task, rollout.attempt, rollout.kind) == (session.id, "t", 3, "graded")
        assert (rollout.reward, rollout.resolved, rollout.advantage, rollout.excluded) == (1.0, True, 1.0, "")
        assert rollout.data == {"status": "finished", "mine": [1, None, "é"]} and not rollout.truncated
        shown = await t.g.show(session.id)
        assert (rollout.turns, rollout.sampled_tokens) == (shown["turns"], shown["sampled_tokens"])
        expected = await t.g.samples(session.id)
        assert len(found.rows()) == len(expected) == 2
        for row, sample in zip(found.rows(), expected, strict=True):
            assert row.ids.dtype == np.int32 and row.ids.tolist() == sample["ids"]
            assert row.mask.dtype == np.bool_ and row.mask.tolist() == sample["mask"]
            assert row.logprobs.dtype == np.float32
            theirs = np.array([np.nan if x is None else x for x in sample["logprobs"]], np.float32)
            assert np.array_equal(row.logprobs, theirs, equal_nan=True)
            assert [span.node for span in row.spans] == [span["node"] for span in sample["spans"]]
            assert (row.branch, row.advantage) == (sample["branch"], 1.0)


async def test_multi_row_rollout_counts_once() -> None:
    """Rewards 1, 0, 0 of rollouts with 1, 3 and 1 rows: the mean over rollouts is 1/3, not 1/5."""
    async with training() as t:
        for reward, branches in ((1.0, 0), (0.0, 3), (0.0, 0)):
            session = await t.g.open()
            await (t.branch(session, branches) if branches else t.talk(session))
            await t.g.seal(session.id)
            await t.record(session.id, reward)
        found = await first_delivery(t, FeedConfig(n=3, from_start=True))
        # mean 1/3; squared deviations 4/9, 1/9, 1/9: the standard deviation is sqrt(2/9)
        deviation = np.sqrt(2 / 9) + EPSILON
        assert [r.advantage for r in found.rollouts] == pytest.approx([2 / 3 / deviation, *[-1 / 3 / deviation] * 2])
        assert [[row.weight for row in r.rows] for r in found.rollouts] == [[1.0], [1 / 3] * 3, [1.0]]
        assert {row.advantage for row in found.rollouts[1].rows} == {found.rollouts[1].advantage}
        sampled = [row.mask.sum() for row in found.rollouts[1].rows]
        assert sum(sampled) == found.rollouts[1].sampled_tokens  # each sampled token counts once

        other = await first_delivery(t, FeedConfig(n=3, advantage="leave_one_out", from_start=True), "loo")
        assert [r.advantage for r in other.rollouts] == pytest.approx([1.0, -0.5, -0.5])
        plain = await first_delivery(t, FeedConfig(n=3, advantage="none", from_start=True), "plain")
        assert [r.advantage for r in plain.rollouts] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("advantage", ["normalised", "leave_one_out", "none"])
async def test_excluded_rollouts_have_reason_and_no_weight(advantage: Any) -> None:
    async with training() as t:
        graded = [await t.rollout(4.0), await t.rollout(1.0), await t.rollout(1.0)]
        failed = await t.rollout(None, kind="agent failed", message="it left nothing")
        invalid = await t.rollout(None, kind="invalid task")
        silent = await t.g.open()
        await t.g.seal(silent.id)
        await t.record(silent.id, 100.0)
        absurd = await t.rollout(-1e300)
        deleted = await t.rollout(100.0)
        await t.g.admin.delete(f"/admin/sessions/{deleted}")
        found = await first_delivery(t, FeedConfig(n=7, advantage=advantage, from_start=True))
        assert found.number == 1 and len(found.rollouts) == 7  # a session deleted before the feed started is not in it
        by_id = {r.session: r for r in found.rollouts}
        root = np.sqrt(2) + EPSILON
        expected = {
            "normalised": [2 / root, -1 / root, -1 / root],
            "leave_one_out": [3.0, -1.5, -1.5],
            "none": [4.0, 1.0, 1.0],
        }
        assert [by_id[s].advantage for s in graded] == pytest.approx(expected[advantage])
        assert by_id[failed].excluded == "no reward: agent failed (it left nothing)"
        assert by_id[invalid].excluded == "no reward: invalid task"
        assert by_id[silent.id].excluded == "it has no trainable turns: no model call by the agent was answered"
        assert by_id[absurd].excluded == "its reward of -1e+300 is too large for computing advantages"
        for session in (failed, invalid, silent.id, absurd):
            assert by_id[session].advantage is None and not by_id[session].rows
        assert len(found.rows()) == 3


async def test_deleted_session_is_excluded() -> None:
    async with training() as t:
        async with await Feed.open(t.client, "f", FeedConfig(n=3)) as feed:
            first, second = await t.rollout(1.0), await t.rollout(0.0)
            assert (await t.g.admin.delete(f"/admin/sessions/{first}")).is_success  # while its group is incomplete
            third = await t.rollout(0.5)
            found = await feed.next(scaled(5))
            assert found is not None and [r.session for r in found.rollouts] == [first, second, third]
            assert found.rollouts[0].excluded == "its session was deleted" and found.rollouts[0].reward == 1.0
            assert [r.advantage for r in found.rollouts[1:]] == pytest.approx([-1.0, 1.0], rel=1e-4)
        again = await t.g.open(id=first)  # a new session with the same id is unrelated
        await t.talk(again)
        await t.g.seal(first)
        async with await Feed.open(t.client, "f", FeedConfig(n=3)) as feed:
            found = await feed.next(scaled(5))
            assert found is not None and found.rollouts[0].excluded == "its session was deleted"


async def test_damaged_trace_is_excluded() -> None:
    async with training() as t:
        bad, good = await t.rollout(1.0), await t.rollout(0.0)
        with t.g.app.store._writing() as db:
            db.execute("UPDATE nodes SET ids=zeroblob(8) WHERE session=1 AND kind='sampled'")
        found = await first_delivery(t, FeedConfig(n=2, advantage="none", from_start=True))
        assert [r.session for r in found.rollouts] == [bad, good]
        assert "damaged" in found.rollouts[0].excluded and found.rollouts[1].advantage == 0.0


async def test_advantages_in_group_of_one() -> None:
    async with training() as t:
        await t.rollout(0.7)
        normalised = await first_delivery(t, FeedConfig(n=1, from_start=True), "a")
        assert normalised.rollouts[0].advantage == 0.0 and len(normalised.rows()) == 1
        alone = await first_delivery(t, FeedConfig(n=1, advantage="leave_one_out", from_start=True), "b")
        assert alone.rollouts[0].advantage is None and "no other rollout" in alone.rollouts[0].excluded
        assert alone.rows() == []
        plain = await first_delivery(t, FeedConfig(n=1, advantage="none", from_start=True), "c")
        assert plain.rollouts[0].advantage == 0.7


@pytest.mark.parametrize("how", ["limit", "length", "status", "time"])
async def test_truncated_rollouts_follow_policy(how: str) -> None:
    """Rewards 1 and 0, and a truncated rollout with reward 1."""
    async with training() as t:
        await t.rollout(1.0)
        await t.rollout(0.0)
        limits = {"limit": {"limits": {"turns": 1}}, "length": {"max_tokens": 2}, "time": {}, "status": {}}[how]
        session = await t.g.open(**limits)
        await t.talk(session, 2 if how == "limit" else 1)
        await t.client.seal(session.id, "timed out" if how == "time" else "")
        status = {"status": "limit", "time": "timed out"}.get(how, "finished")
        await t.record(session.id, 1.0, data={"status": status})
        third = 2 / 3
        normal = [(1 - third), -third, (1 - third)] / (np.sqrt(2 / 9) + EPSILON)
        of_two = [0.5 / (0.5 + EPSILON), -0.5 / (0.5 + EPSILON)]
        name = "on_timeout" if how == "time" else "on_truncated"
        other = "on_truncated" if how == "time" else "on_timeout"

        trained = await first_delivery(t, FeedConfig(n=3, from_start=True, **{other: "exclude"}), "train")
        assert [r.advantage for r in trained.rollouts] == pytest.approx(list(normal))
        assert [r.truncated for r in trained.rollouts] == [False, False, True]
        assert trained.rollouts[2].timed_out == (how == "time")

        masked = await first_delivery(t, FeedConfig(n=3, from_start=True, **{name: "mask"}), "mask")
        assert [r.advantage for r in masked.rollouts[:2]] == pytest.approx(list(normal[:2]))
        assert masked.rollouts[2].advantage is None and "masked" in masked.rollouts[2].excluded
        assert len(masked.rows()) == 2

        excluded = await first_delivery(t, FeedConfig(n=3, from_start=True, **{name: "exclude"}), "exclude")
        assert [r.advantage for r in excluded.rollouts[:2]] == pytest.approx(of_two)
        assert (
            excluded.rollouts[2].advantage is None and "excluded by the feed's policy" in excluded.rollouts[2].excluded
        )


async def test_truncated_title_does_not_truncate_rollout() -> None:
    """Only trained turns count; agents request short titles."""
    async with training() as t:
        session = await t.g.open(policy={"roles": ["main"]})
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        await t.g.ask(session.key, "Title?", max_tokens=1)
        await t.g.ask(session.key, "Hi", tools=tools)
        await t.g.seal(session.id)
        await t.record(session.id, 1.0)
        assert {turn["finish"] for turn in await t.g.turns(session.id)} == {"length", "stop"}
        found = await first_delivery(t, FeedConfig(n=1, advantage="none", on_truncated="exclude", from_start=True))
        assert not found.rollouts[0].truncated and len(found.rows()) == 1


def wire(**change: Any) -> WireDelivery:
    """Make a delivery with one row of four tokens, the last two sampled."""
    row: dict[str, Any] = {
        "branch": 2,
        "ids": np.arange(4, dtype="<i4").tobytes(),
        "mask": np.packbits([0, 0, 1, 1]).tobytes(),
        "logprobs": np.array([-1.0, -2.0], "<f4").tobytes(),
        "spans": (RowSpan(2, 2, 4, "main", True, "", 0, 0),),
        "weight": 1.0,
    }
    rollout: dict[str, Any] = {"advantage": 1.0}
    for name, value in change.items():
        (rollout if name in rollout else row)[name] = value
    made = WireRollout(
        session="s",
        task="t",
        attempt=1,
        kind="graded",
        reward=1.0,
        resolved=None,
        excluded="",
        truncated=False,
        timed_out=False,
        turns=1,
        sampled_tokens=2,
        data=b"null",
        rows=(WireRow(**row),),
        **rollout,
    )
    return WireDelivery(number=1, group="g", task="t", version=0, rollouts=(made,))


def test_row_has_the_version_of_each_token() -> None:
    span = RowSpan(2, 2, 4, "main", True, "", 3, 5, ((3, 1), (5, 1)))
    raw = msgspec.msgpack.encode(wire(spans=(span,)))
    [row] = decode_delivery(raw).rows()
    assert row.token_versions().tolist() == [-1, -1, 3, 5]


def column(**change: Any) -> WireColumn:
    """Side data of two tokens of a row."""
    fields = {"name": "experts", "dtype": "uint8", "shape": (2,), "spans": ((1, 3),), "data": memoryview(b"abcd")}
    return WireColumn(**{**fields, **change})


def test_side_data_is_decoded_without_a_copy() -> None:
    raw = msgspec.msgpack.encode(wire(side=(column(),)))
    [row] = decode_delivery(raw).rows()
    found = row.side["experts"]
    assert found.spans == ((1, 3),) and found.values.tolist() == [[97, 98], [99, 100]]
    assert np.shares_memory(found.values, np.frombuffer(raw, np.uint8))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logprobs": np.array([-1.0, np.nan], "<f4").tobytes()}, "has a missing or non-finite log-probability"),
        ({"logprobs": b"\0" * 4}, "log-probabilities .* does not match the number of tokens in the row's spans"),
        ({"logprobs": b"\0" * 9}, "the log-probabilities have 9 bytes, which is not a multiple of 4"),
        ({"ids": b"\0" * 15}, "the token ids have 15 bytes, which is not a multiple of 4"),
        ({"mask": b""}, "the mask has 0 bytes, but 4 tokens need 1, with one bit per token"),
        ({"mask": np.packbits([0, 1, 1, 1]).tobytes()}, "mask does not match the trained turns"),
        ({"spans": ()}, "log-probabilities .* does not match the number of tokens in the row's spans"),
        (
            {"ids": np.arange(3, dtype="<i4").tobytes()},
            "a turn spans tokens 2 to 4, but the row has 3 tokens",
        ),
        ({"spans": (RowSpan(2, 2, 4, "main", True, "", 3, 5, ((3, 1), (5, 2))),)}, "versions of turn 2 do not cover"),
        ({"advantage": None}, "no advantage"),
        ({"side": (column(dtype="float64"),)}, "experts has the unknown type 'float64'"),
        (
            {"side": (column(spans=((1, 5),)),)},
            "the spans of the side data experts, .*, overlap, are out of order, or lie outside the 4 tokens",
        ),
        ({"side": (column(spans=((2, 3), (0, 1))),)}, "the spans of the side data experts, .*, are out of order"),
        ({"side": (column(spans=((1, 2),)),)}, r"experts in bytes \(4\) does not match the number of values \(1\)"),
        ({"side": (column(shape=(3,)),)}, r"experts in bytes \(4\) does not match the number of values \(2\)"),
    ],
)
def test_damaged_row_is_rejected(change: Any, why: str) -> None:
    assert convert_delivery(wire()).rows()[0].logprobs.tolist()[2:] == [-1.0, -2.0]
    with pytest.raises(DamagedDelivery, match=why):
        convert_delivery(wire(**change))
