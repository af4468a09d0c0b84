"""Test how trainers report their log-probabilities: over the feed client and HTTP, into events, metrics and the page."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec import structs

from tests.feed.kit import training
from tests.server.test_page import fetch, log_in
from turngate.client.feed import BlockingFeed, Feed, FeedConfig, Row, TakenOver
from turngate.client.gateway import RequestRejected
from turngate.client.protocol import MismatchReport
from turngate.client.transport import GatewayUnreachable
from turngate.config import ServeConfig
from turngate.errors import BadRequest, ConfigError
from turngate.store.events import new_event
from turngate.trace.mismatch import LagMismatch, MismatchAlarm, MismatchMeter


def recorded(rows: list[Row], shift: float) -> list[np.ndarray]:
    return [row.logprobs[row.mask] + np.float32(shift) for row in rows]


def measure(difference: float) -> LagMismatch:
    """Return the statistics of one token whose log-probability differs by this much."""
    meter = MismatchMeter()
    meter.add(np.array([difference]), np.zeros(1), np.zeros(1, np.int64), 0)
    [lag] = meter.summarize()
    return lag


async def test_report_causes_alarms_events_metrics_and_page() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=2)) as feed:
        for reward in (0.0, 1.0):
            await t.rollout(reward)
        delivery = await feed.next(10)
        assert delivery is not None
        rows = delivery.rows()
        assert await feed.report_mismatch(1, 0, rows, recorded(rows, 0.0)) == ()
        assert await feed.report_lags(1, 0, ()) == ()  # nothing was compared, so nothing is reported
        alarms = await feed.report_mismatch(1, 0, rows, recorded(rows, -0.3))
        assert [alarm.kind for alarm in alarms] == ["difference", "kl"]
        later = await feed.report_mismatch(1, 2, rows, recorded(rows, -0.3))  # with the weights of two versions later
        assert later == ()

        reports = [event async for event in t.client.events(wait=False) if event.kind == "mismatch"]
        assert [len(event.data["alarms"]) for event in reports] == [0, 2, 0]
        assert [[one["lag"] for one in event.data["lags"]] for event in reports] == [[0], [0], [2]]
        assert {(event.session, event.data["feed"], event.data["number"]) for event in reports} == {("", "f", 1)}
        tokens = sum(int(row.mask.sum()) for row in rows)
        metrics = (await t.g.admin.get("/metrics")).text
        assert f'turngate_mismatch_tokens_total{{weights="same"}} {2 * tokens}' in metrics
        assert f'turngate_mismatch_over_total{{weights="same"}} {tokens}' in metrics
        assert 'turngate_mismatch_alarms_total{kind="difference"} 1' in metrics

        page = (await fetch(await log_in(t.g), "training"))["mismatch"]
        [newest] = page["newest"]
        assert (newest["version"], newest["alarms"], newest["lags"][0]["lag"]) == (2, [], 2)
        assert len(newest["lags"][0]["counts"]) == len(page["edges"]) + 1
        assert [one["alarms"] for one in page["trend"]] == [0, 2, 0]
        assert page["trend"][0]["mean"] == 0.0 and page["trend"][1]["mean"] == pytest.approx(0.3, abs=1e-3)
        assert page["trend"][2]["mean"] is None  # all tokens were sampled with older weights


async def test_page_orders_reports_by_feed_and_forgets_deleted_feeds() -> None:
    config = FeedConfig(n=1, advantage="none", from_start=True)
    async with (
        training() as t,
        await Feed.open(t.client, "a", config) as a,
        await Feed.open(t.client, "b", config) as b,
    ):
        for _ in range(3):
            await t.rollout(1.0)
        for feed in (a, b):
            rows = [delivery.rows() for delivery in [await feed.next(10) for _ in range(3)] if delivery is not None]
            for number in (1, 2, 3, 2):  # the trainer of each feed resumes from a checkpoint
                await feed.report_mismatch(number, 0, rows[number - 1], recorded(rows[number - 1], 0.0))
        page = await log_in(t.g)
        trend = (await fetch(page, "training"))["mismatch"]["trend"]
        assert [(one["feed"], one["number"]) for one in trend] == [(f, n) for f in "ab" for n in (1, 2, 2)]
        await t.client.delete_feed("a")
        left = (await fetch(page, "training"))["mismatch"]
        assert {one["feed"] for one in (*left["newest"], *left["trend"])} == {"b"}


async def test_report_whose_reply_was_lost_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed:
        await t.rollout(1.0)
        delivery = await feed.next(10)
        assert delivery is not None
        rows, send, replies = delivery.rows(), t.client.report_mismatch, []

        async def lose_first_reply(name: str, report: MismatchReport) -> tuple[MismatchAlarm, ...]:
            replies.append(await send(name, report))
            if len(replies) == 1:
                raise GatewayUnreachable("the connection was closed")
            return replies[-1]

        monkeypatch.setattr(t.client, "report_mismatch", lose_first_reply)
        alarms = await feed.report_mismatch(1, 0, rows, recorded(rows, -0.3))
        assert len(replies) == 2 and replies[0] == replies[1] == alarms != ()
        await feed.report_mismatch(1, 0, rows, recorded(rows, 0.0))  # another report of the same update
        reports = [event async for event in t.client.events(wait=False) if event.kind == "mismatch"]
        assert [len(event.data["alarms"]) for event in reports] == [2, 0]
        tokens = sum(int(row.mask.sum()) for row in rows)
        assert (
            f'turngate_mismatch_tokens_total{{weights="same"}} {2 * tokens}' in (await t.g.admin.get("/metrics")).text
        )
        await t.client.delete_feed("f")
        assert t.g.rows("SELECT count(*) FROM settings WHERE name LIKE 'mismatch%'") == [(0,)]


async def test_id_of_another_report_is_rejected() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed:
        await t.rollout(1.0)
        assert await feed.next(10) is not None
        report = MismatchReport(reader=feed._reader, number=1, version=0, lags=(measure(0.0),), id="step-1")
        worse = structs.replace(report, lags=(measure(-0.3),))
        assert await t.client.report_mismatch("f", report) == await t.client.report_mismatch("f", report) == ()
        with pytest.raises(
            RequestRejected, match="different report with the id 'step-1'; give each report"
        ) as rejected:
            await t.client.report_mismatch("f", worse)
        assert (rejected.value.answered, rejected.value.param) == (409, "id")
        assert len(await t.client.report_mismatch("f", structs.replace(worse, id="step-2"))) == 2
        reports = [event async for event in t.client.events(wait=False) if event.kind == "mismatch"]
        assert [len(event.data["alarms"]) for event in reports] == [0, 2]


async def test_report_kept_by_an_earlier_version_is_not_counted_again() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed:
        await t.rollout(1.0)
        row = t.g.app.store.feeds.find("f")
        assert await feed.next(10) is not None and row is not None
        kept = '[{"kind":"kl","message":"m"}]'  # without a digest
        assert t.g.app.store.feeds.add_report(row.key, "old", kept, new_event("", "mismatch", {})) is None
        report = MismatchReport(reader=feed._reader, number=1, version=0, lags=(measure(0.0),), id="old")
        assert await t.client.report_mismatch("f", report) == (MismatchAlarm("kl", "m"),)


async def test_only_the_latest_reports_are_remembered() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")):
        feeds = t.g.app.store.feeds
        row = feeds.find("f")
        assert row is not None
        event = new_event("", "mismatch", {})
        assert [feeds.add_report(row.key, f"r{n}", f"result {n}", event) for n in range(20)] == [None] * 20
        assert feeds.add_report(row.key, "r19", "other", event) == "result 19"
        assert feeds.add_report(row.key, "r4", "other", event) == "result 4"
        assert feeds.add_report(row.key, "r3", "other", event) is None


async def test_limits_are_settings() -> None:
    async with (
        training(mismatch_difference=0.5, mismatch_kl=0.0) as t,
        await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed,
    ):
        await t.rollout(1.0)
        delivery = await feed.next(10)
        assert delivery is not None
        rows = delivery.rows()
        assert await feed.report_mismatch(1, 0, rows, recorded(rows, -0.3)) == ()
        [alarm] = await feed.report_mismatch(1, 0, rows, recorded(rows, -0.7))
        assert "more than 0.5 nats" in alarm.message


async def test_wrong_reports_are_rejected() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed:
        await t.rollout(1.0)
        delivery = await feed.next(10)
        assert delivery is not None
        rows = delivery.rows()
        with pytest.raises(BadRequest, match="pass one value per trained token"):
            await feed.report_mismatch(1, 0, rows, [np.zeros(1)])
        with pytest.raises(BadRequest, match=r"one array for each row \(arrays: 0, rows: 1\)"):
            await feed.report_mismatch(1, 0, rows, [])
        with pytest.raises(RequestRejected, match="number 2 was never handed out"):
            await feed.report_mismatch(2, 0, rows, recorded(rows, 0.0))
        reply = await t.g.admin.post(
            "/admin/feeds/f/mismatch",
            json={"reader": feed._reader, "number": 1, "version": 0, "lags": [{"lag": 0, "tokens": 1}]},
        )
        assert reply.status_code == 400 and "counts" in reply.text
        await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none"))
        with pytest.raises(TakenOver):
            await feed.report_mismatch(1, 0, rows, recorded(rows, 0.0))
        assert not [event async for event in t.client.events(wait=False) if event.kind == "mismatch"]


async def test_blocking_feed_reports() -> None:
    async with training() as t:
        await t.rollout(1.0)
        config = FeedConfig(n=1, advantage="none", from_start=True)

        def train() -> list[str]:
            with BlockingFeed(t.g.root, t.g.app.admin_key, "f", config) as feed:
                delivery = feed.next(10)
                assert delivery is not None
                rows = delivery.rows()
                return [alarm.kind for alarm in feed.report_mismatch(1, 0, rows, recorded(rows, -0.3))]

        assert await asyncio.to_thread(train) == ["difference", "kl"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"mismatch_difference": 0.3}, "mismatch_difference must be one of 0.001, 0.01, .*, 5, not 0.3"),
        ({"mismatch_share": -0.1}, r"mismatch_share must be between 0 \(no alarm\) and 1 \(all tokens\), not -0.1"),
        ({"mismatch_share": 5.0}, "mismatch_share must be between 0 .* not 5.0"),
        ({"stale_kl": float("nan")}, "stale_kl must be 0"),
    ],
)
def test_invalid_limits_are_rejected(setting: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServeConfig(**setting).check()
