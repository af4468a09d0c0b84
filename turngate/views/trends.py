"""Trends over time: rewards, staleness and throughput."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum

import msgspec

from turngate.store.store import Store
from turngate.trace.advantage import is_too_large
from turngate.trace.mismatch import MISMATCH_EDGES, LagMismatch, MismatchAlarm
from turngate.types import Json
from turngate.views.groups import mean
from turngate.views.improvement import (
    ENTROPY_ROLLOUTS,
    ENTROPY_VERSIONS,
    RewardedRollout,
    RewardTotal,
    choose_evenly,
    summarize_improvement,
)
from turngate.views.rollout_entry import RolloutEntry, RolloutRow, decode_or
from turngate.views.rollout_index import BUCKET_S, CHUNK, DeliveryRecord, RolloutIndex, yield_interpreter

MOST_DELIVERIES = 500
MOST_REPORTS = 200


class MismatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a `mismatch` event: a trainer's report on how recomputed and recorded log-probabilities differ."""

    feed: str
    number: int
    version: int
    lags: tuple[LagMismatch, ...]
    alarms: tuple[MismatchAlarm, ...]


_mismatch_decoder = msgspec.json.Decoder(MismatchEvent)


def summarize_training(index: RolloutIndex, store: Store, prefix: str, buckets: int) -> dict[str, Json]:
    cursor, now = index.refresh(store), time.time()
    entries = [entry for entry in index.entries.values() if entry.row.group.startswith(prefix)]
    for number, entry in enumerate(entries):
        if number % (CHUNK // 2) == 0:
            yield_interpreter()
        index.refresh_row(entry, now, store)
    first = min((entry.row.opened for entry in entries), default=now)
    width = bucket_width((now - first) / buckets)
    graded = [
        (entry.recorded, entry.row)
        for entry in entries
        if entry.recorded is not None
        and entry.row.reward is not None
        and not entry.row.excluded
        and not is_too_large(entry.row.reward)
    ]
    return {
        "cursor": cursor,
        "now": now,
        "first": first,
        "bucket_s": width,
        "time": _rewards_over_time(graded, width),
        "version": _rewards_by_version([row for _, row in graded]),
        "improvement": _improvement([row for _, row in graded]),
        "throughput": compute_throughput(
            ((int(number * BUCKET_S // width), counted) for number, counted in index.spans.items()), first, now, width
        ),
        "staleness": _staleness(index, entries),
        "deliveries": _list_deliveries(index, prefix),
        "versions": list_versions(index.versions),
        "feeds": list_feeds(store),
        "mismatch": list_mismatches(store),
    }


def list_versions(versions: Sequence[tuple[float, int]]) -> list[Json]:
    return [{"version": version, "at": at} for at, version in versions[-MOST_DELIVERIES:]]


def list_feeds(store: Store) -> list[Json]:
    return [
        {
            "name": feed.name,
            "newest": feed.newest,
            "handed": feed.handed,
            "committed": feed.committed,
            "read": bool(feed.reader),
            "waiting": len(store.feeds.waiting(feed.key, 1000)),
        }
        for feed in store.feeds.listing()
    ]


def list_mismatches(store: Store) -> dict[str, Json]:
    """Return the trainers' newest reports on how recomputed and recorded log-probabilities differ (`trace/mismatch.py`).

    `newest` contains the last of these reports for each feed. `trend` contains, for each report, statistics of the tokens that were
    sampled with the weights that the trainer used (lag 0), or None if there are no such tokens. Within a feed, `trend` is ordered by
    delivery number. If a trainer went back to an earlier delivery, its new reports replace those of later deliveries. Deleted feeds are
    omitted.
    """
    newest: dict[str, dict[str, Json]] = {}
    trends: dict[str, list[dict[str, Json]]] = {feed.name: [] for feed in store.feeds.listing()}
    for event in store.queries.last_gateway_events("mismatch", MOST_REPORTS):
        report = decode_or(_mismatch_decoder, event.data, None)
        if report is None or report.feed not in trends:
            continue
        newest[report.feed] = {"at": event.time, **msgspec.to_builtins(report)}
        same = next((one for one in report.lags if one.lag == 0), None)
        trend = trends[report.feed]
        while trend and trend[-1]["number"] > report.number:
            trend.pop()
        trend.append(
            {
                "feed": report.feed,
                "number": report.number,
                "mean": None if same is None else same.mean,
                "k3": None if same is None else same.k3,
                "alarms": len(report.alarms),
            }
        )
    points = [point for trend in trends.values() for point in trend]
    return {"edges": MISMATCH_EDGES, "newest": list(newest.values()), "trend": points}


def compute_throughput(
    counts: Iterable[tuple[int, Sequence[int]]], first: float, now: float, width: float
) -> list[Json]:
    """Return the rates of turns, tokens and rollouts, over all groups, in each interval from `first` to `now`.

    Interval `i` starts at time `i * width`, where `width` is in seconds. Each item of `counts` is a pair: the index of an interval, and the
    turns, tokens and outcomes to add to it.
    """
    start, end = int(first // width), int(now // width)
    sums = {number: [0, 0, 0] for number in range(start, end + 1)}
    for number, counted in counts:
        totals = sums.get(number)
        if totals is not None:
            for place in range(3):
                totals[place] += counted[place]
    points = []
    for number, (turns, tokens, outcomes) in sums.items():
        # The first and last intervals are incomplete.
        lasted = min(now, (number + 1) * width) - max(first - first % BUCKET_S, number * width)
        lasted = max(lasted, BUCKET_S)
        points.append(
            {
                "at": number * width,
                "turns_s": round(turns / lasted, 4),
                "tokens_s": round(tokens / lasted, 3),
                "rollouts_min": round(outcomes * 60 / lasted, 3),
            }
        )
    return points


def _list_deliveries(index: RolloutIndex, prefix: str) -> list[Json]:
    members = index.by_group()
    newest = [delivery for delivery in index.deliveries if delivery.group.startswith(prefix)][-MOST_DELIVERIES:]
    points = []
    for delivery in newest:
        # A group may be delivered in parts. Each delivery is described by the rollouts of the group recorded before it.
        rows = [entry.row for entry in members.get(delivery.group, ()) if (entry.recorded or 0) <= delivery.at]
        sampled = [row.version_start for row in rows if row.version_start is not None]
        rewards = [reward for row in rows if (reward := row.counted_reward) is not None]
        version, oldest = index.version_at(delivery.at), min(sampled, default=None)
        points.append(describe_delivery(delivery, version, oldest, mean(rewards)))
    return points


def describe_delivery(
    delivery: DeliveryRecord, version: int | None, oldest: int | None, mean: float | None
) -> dict[str, Json]:
    """Describe a delivery.

    `version` is the policy version at the time of the delivery. `oldest` and `mean` are the oldest policy version and the mean reward of
    the group's rollouts whose outcomes were recorded by then.
    """
    return {
        "feed": delivery.feed,
        "number": delivery.number,
        "group": delivery.group,
        "at": delivery.at,
        "version": version,
        "oldest": oldest,
        "behind": None if version is None or oldest is None else version - oldest,
        "mean": mean,
        "rollouts": delivery.rollouts,
    }


def _staleness(index: RolloutIndex, entries: Iterable[RolloutEntry]) -> list[Json]:
    """Count rollouts by staleness: the number of policy versions from their first token to the time when their outcome was recorded."""
    behind: Counter[int] = Counter()
    for entry in entries:
        if entry.recorded is not None and entry.row.version_start is not None:
            version = index.version_at(entry.recorded)
            if version is not None:
                behind[version - entry.row.version_start] += 1
    return [{"behind": gap, "rollouts": behind[gap]} for gap in sorted(behind)]


def _rewards_over_time(graded: Sequence[tuple[float, RolloutRow]], width: float) -> list[Json]:
    spans: dict[int, list[float]] = {}
    for at, row in graded:
        assert row.reward is not None
        spans.setdefault(int(at // width), []).append(row.reward)
    return [
        {"at": number * width, "mean": mean(known), "low": min(known), "high": max(known), "count": len(known)}
        for number, known in sorted(spans.items())
    ]


def _rewards_by_version(rows: Iterable[RolloutRow]) -> list[Json]:
    """Return the mean reward of rollouts by the policy version of their first token."""
    rewards: dict[int, list[float]] = {}
    for row in rows:
        if row.version_start is not None and row.reward is not None:
            rewards.setdefault(row.version_start, []).append(row.reward)
    return [
        {"version": version, "mean": mean(known), "count": len(known)} for version, known in sorted(rewards.items())
    ]


def _improvement(rows: Sequence[RolloutRow]) -> dict[str, Json] | None:
    found: dict[tuple[str, str, int], list[float]] = {}
    rollouts: dict[tuple[str, int], list[RewardedRollout]] = {}
    for row in sorted(rows, key=lambda row: (row.opened, row.id)):
        if row.version_start is not None and row.reward is not None:
            found.setdefault((row.task, row.task_kind, row.version_start), []).append(row.reward)
            rollouts.setdefault((row.task, row.version_start), []).append(RewardedRollout(row.id, row.reward))
    totals = [
        RewardTotal(task=task, kind=kind, version=version, total=fsum(rewards), graded=len(rewards))
        for (task, kind, version), rewards in found.items()
    ]
    return summarize_improvement(totals, lambda task, version: rollouts[task, version])


def choose_entropy_rollouts(index: RolloutIndex, store: Store, prefix: str) -> list[tuple[int, str, int]]:
    """Choose the rollouts whose traces are used to estimate the entropy. Return the version, id and session key of each.

    `choose_evenly` chooses the versions. For each of them, the oldest ended rollouts are chosen.
    """
    index.refresh(store)
    now = time.time()
    by_version: dict[int, list[RolloutEntry]] = {}
    for entry in index.all(now):
        if entry.key and entry.row.group.startswith(prefix) and entry.row.status in ("done", "cancelled"):
            version = index.refresh_row(entry, now, store).version_start
            if version is not None:
                by_version.setdefault(version, []).append(entry)
    return [
        (version, entry.row.id, entry.key)
        for version in choose_evenly(sorted(by_version), ENTROPY_VERSIONS)
        for entry in sorted(by_version[version], key=lambda entry: (entry.row.opened, entry.row.id))[:ENTROPY_ROLLOUTS]
    ]


def bucket_width(least: float) -> float:
    """Return the length of an interval for a chart: a round number of seconds that is at least `least`."""
    for width in (10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400):
        if width >= least:
            return float(width)
    return 86400.0 * (int(least // 86400) + 1)
