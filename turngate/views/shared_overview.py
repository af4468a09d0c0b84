"""Lists and summaries of all rollouts in a shared store, read mostly from the tables that `store/shared/rollout_list.py` maintains."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum

import msgspec

from turngate.errors import BadRequest, NotFound
from turngate.store.shared.rollout_list import ListedDelivery, ListedRollout
from turngate.store.shared.rollout_pages import GROUP_SORTS, SORTS, ListFilter, TrendPoint
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store
from turngate.types import BATCH_STREAM, Json
from turngate.views import trends
from turngate.views.failures import EXAMPLES, MOST_MESSAGES
from turngate.views.filters import RolloutQuery
from turngate.views.groups import GroupRow
from turngate.views.improvement import (
    ENTROPY_ROLLOUTS,
    ENTROPY_VERSIONS,
    RewardedRollout,
    RewardTotal,
    choose_evenly,
    summarize_improvement,
)
from turngate.views.overview import MOST_CHANGED, MOST_NAMES, explain_no_members, explain_no_retry, show_group
from turngate.views.rollout_entry import STATUSES, RolloutRow
from turngate.views.rollout_index import BUCKET_S, DeliveryRecord
from turngate.views.shared_index import ListUpdater, to_row

_UPDATE_S = 0.3  # how long a request may add new events to the lists; the remaining events are added in the background
_BACKGROUND_S = 0.2
_SILENCE_CHECK_S = 30.0  # interval of updates without new events, which find rollouts with silent runners


class SharedOverview:
    """Answers queries about the rollouts of one shared store: lists, groups, changes and trends. It keeps no rollouts in memory."""

    def __init__(self) -> None:
        self._updater: ListUpdater | None = None
        self._updated = 0.0

    def close(self) -> None:
        if self._updater is not None:
            self._updater.close()
            self._updater = None

    # ── updates ─────────────────────────────────────────────────────────────────────────────────────────────────

    def update(self, store: Store) -> bool:
        """Update the lists from new events, for about `_BACKGROUND_S` seconds. Return whether the lists are up to date."""
        shared = _require_shared(store)
        state, newest = shared.rollout_pages.state()
        is_due = time.monotonic() > self._updated + _SILENCE_CHECK_S
        if state.filled is None and state.newest >= newest and not is_due:
            return True
        self._updated = time.monotonic()
        return self._update(shared, _BACKGROUND_S)

    def refresh(self, store: Store) -> int:
        """Update the lists from new events, for about `_UPDATE_S` seconds. Return the number of the last event that the lists include."""
        pages = _require_shared(store).rollout_pages
        state, newest = pages.state()
        if state.filled is not None or state.newest < newest:
            self._update(_require_shared(store), _UPDATE_S)
            state, _ = pages.state()
        return state.newest

    def _update(self, store: SharedStore, seconds: float) -> bool:
        if self._updater is None:
            self._updater = ListUpdater(store.open_again())
        return self._updater.update(seconds)

    # ── rollouts ────────────────────────────────────────────────────────────────────────────────────────────────

    def sums(self, store: Store) -> dict[str, Json]:
        cursor, pages = self.refresh(store), _require_shared(store).rollout_pages
        counts, (groups, tasks) = pages.counts(), pages.count_names()
        statuses, classes = counts.get("status", {}), counts.get("class", {})
        state, newest = pages.state()
        return {
            "now": time.time(),
            "cursor": cursor,
            "rollouts": sum(statuses.values()),
            "groups": groups,
            "by_status": {status: statuses.get(status, 0) for status in STATUSES},
            "by_class": classes,
            "agents": _names(counts.get("agent", {})),
            "models": _names(counts.get("model", {})),
            "modes": _names(counts.get("mode", {})),
            "tasks": tasks,
            "incomplete": state.filled is not None,
            "behind": newest - state.newest,
        }

    def rollouts(self, store: Store, query: RolloutQuery) -> dict[str, Json]:
        cursor, now, pages = self.refresh(store), time.time(), _require_shared(store).rollout_pages
        filter = _build_filter(query)
        sort, descending = _parse_sort(query, SORTS)
        page, total = pages.page(filter, sort, descending=descending, offset=query.offset, limit=query.limit)
        return {
            "rollouts": [to_row(listed, now) for listed in page],
            "total": total,
            "offset": query.offset,
            "limit": query.limit,
            "cursor": cursor,
        }

    def rollout(self, store: Store, session: str) -> tuple[RolloutRow, int, int]:
        """Return a rollout's row, the key of its session (0 if it has none), and the number of the last event that the lists reflect."""
        cursor = self.refresh(store)
        listed = self._find(store, session)
        return to_row(listed, time.time()), listed.key, cursor

    def _find(self, store: Store, session: str) -> ListedRollout:
        found = _require_shared(store).rollout_pages.find([session])
        if not found:
            raise NotFound(f"unknown rollout {session!r}")
        return found[0]

    def damage(self, store: Store, session: str) -> str:
        """Return a description of a rollout's damaged data, or "" if no damage was found."""
        return self._find(store, session).damage

    def check_retry(self, store: Store, session: str) -> tuple[RolloutRow, str]:
        """Return a rollout's row, and the reason why the rollout cannot be retried, or "" if it can."""
        self.refresh(store)
        listed = self._find(store, session)
        row = to_row(listed, time.time())
        pages = _require_shared(store).rollout_pages
        return row, explain_no_retry(row, listed.damage, lambda: pages.last_attempt(row.name))

    def list_changes(self, store: Store, after: int) -> dict[str, Json]:
        """Return the rows that have changed since event number `after`, and the ids of rollouts that were deleted since then.

        At most `MOST_CHANGED` rollouts are returned. If there are others, `more` is set, and the caller must load its lists again.
        """
        cursor, now, pages = self.refresh(store), time.time(), _require_shared(store).rollout_pages
        touched = pages.find_changed(after, cursor, MOST_CHANGED)
        shown = touched[:MOST_CHANGED]
        listed = {row.id: row for row in pages.find(shown)}
        gone = [session for session in shown if session not in listed and not session.startswith(BATCH_STREAM)]
        rows = [to_row(listed[session], now) for session in shown if session in listed]
        return {"cursor": cursor, "rollouts": rows, "gone": gone, "more": len(touched) > MOST_CHANGED}

    # ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────

    def groups(self, store: Store, query: RolloutQuery) -> dict[str, Json]:
        cursor, pages = self.refresh(store), _require_shared(store).rollout_pages
        filter = ListFilter({"task": query.task, "agent": query.agent, "model": query.model}, query.text)
        sort, descending = _parse_sort(query, GROUP_SORTS)
        page = pages.groups(filter, sort, descending=descending, offset=query.offset, limit=query.limit)
        return {
            "groups": [msgspec.json.decode(summary, type=GroupRow) for summary in page],
            "total": pages.count_groups(filter),
            "offset": query.offset,
            "limit": query.limit,
            "cursor": cursor,
        }

    def list_graded(self, store: Store, name: str) -> list[tuple[str, int]]:
        """Return the ids and session keys of a group's rollouts whose rewards count."""
        self.refresh(store)
        now, rows = time.time(), _require_shared(store).rollout_pages.group([name])
        return [(row.id, row.key) for row in rows if row.key and to_row(row, now).counted_reward is not None]

    def group(self, store: Store, name: str, trains: Mapping[int, bool]) -> dict[str, Json]:
        """Describe a group and its rollouts, with the advantages that a trainer would compute. See `Overview.group` for `trains`."""
        cursor, now, pages = self.refresh(store), time.time(), _require_shared(store).rollout_pages
        rows = pages.group([name]) if name else []
        if not rows:
            raise NotFound(f"unknown group {name[:200]!r}; set 'name' to the name of a recorded group", param="name")
        members = [(to_row(row, now), row.key) for row in rows]
        return {"cursor": cursor, **show_group(name, members, trains, map(_to_record, pages.deliveries(name)))}

    def members(self, store: Store, name: str) -> list[tuple[str, int]]:
        """Return the ids and session keys of a group's rollouts that have a session, oldest first."""
        self.refresh(store)
        rows = _require_shared(store).rollout_pages.group([name]) if name else []
        members = sorted((row.key, row.id) for row in rows if row.key)
        if not members:
            raise NotFound(explain_no_members(name, is_known=bool(rows)), param="group")
        return [(session, key) for key, session in members]

    # ── trends ──────────────────────────────────────────────────────────────────────────────────────────────────

    def training(self, store: Store, prefix: str, buckets: int) -> dict[str, Json]:
        cursor, now, pages = self.refresh(store), time.time(), _require_shared(store).rollout_pages
        first = pages.first_opened(prefix) or now
        width = trends.bucket_width((now - first) / buckets)
        versions = sorted(pages.versions())
        before = None if store.events.last_pruned() else 0  # the version before the first update that is known

        def version_at(at: float) -> int | None:
            place = bisect_right(versions, at, key=lambda change: change[0])
            return versions[place - 1][1] if place else before

        points = pages.trends(prefix, width, versions, before)
        deliveries = pages.last_deliveries(prefix, trends.MOST_DELIVERIES)
        return {
            "cursor": cursor,
            "now": now,
            "first": first,
            "bucket_s": width,
            "time": [
                {
                    "at": number * width,
                    "mean": _mean(at),
                    "low": _lowest(at),
                    "high": _highest(at),
                    "count": _count_graded(at),
                }
                for number, at in _group_points(points, lambda point: point.interval)
                if _count_graded(at)
            ],
            "version": [
                {"version": version, "mean": _mean(of), "count": _count_graded(of)}
                for version, of in _group_points(points, lambda point: point.version)
                if _count_graded(of)
            ],
            "improvement": summarize_improvement(
                [
                    RewardTotal(task=task, kind=kind, version=version, total=total, graded=graded)
                    for task, kind, version, total, graded in pages.reward_totals(prefix)
                ],
                lambda task, version: [
                    RewardedRollout(*rewarded) for rewarded in pages.rewards_of(prefix, task, version)
                ],
            ),
            "throughput": trends.compute_throughput(pages.throughput(BUCKET_S, width), first, now, width),
            "staleness": [
                {"behind": behind, "rollouts": sum(point.rollouts for point in of)}
                for behind, of in _group_points(points, lambda point: point.behind)
            ],
            "deliveries": [
                trends.describe_delivery(_to_record(one.delivery), version_at(one.delivery.at), one.oldest, one.mean)
                for one in deliveries
            ],
            "versions": trends.list_versions(versions),
            "feeds": trends.list_feeds(store),
            "mismatch": trends.list_mismatches(store),
        }

    def choose_entropy_rollouts(self, store: Store, prefix: str) -> list[tuple[int, str, int]]:
        """Choose the rollouts whose traces are used to estimate the entropy, as `trends.choose_entropy_rollouts` does."""
        self.refresh(store)
        pages = _require_shared(store).rollout_pages
        versions = choose_evenly(pages.list_ended_versions(prefix), ENTROPY_VERSIONS)
        return pages.find_first_ended(prefix, versions, ENTROPY_ROLLOUTS)

    def failures(self, store: Store, prefix: str) -> dict[str, Json]:
        """Return the failures of groups whose names start with `prefix`, by class and message, most frequent first."""
        cursor, pages = self.refresh(store), _require_shared(store).rollout_pages
        totals, failures = pages.failures(prefix, MOST_MESSAGES, EXAMPLES)
        newest = {row.id: row for row in pages.find([failure.examples[0] for failure in failures if failure.examples])}
        messages: dict[str, list[Json]] = {}
        for failure in failures:
            row = newest.get(failure.examples[0]) if failure.examples else None
            message = failure.text if row is None else row.message or row.stop or failure.text
            messages.setdefault(failure.kind, []).append(
                {"message": message, "count": failure.rollouts, "rollouts": failure.examples}
            )
        classes = [{"class": kind, "count": totals[kind], "messages": found} for kind, found in messages.items()]
        return {"classes": classes, "cursor": cursor}


def _require_shared(store: Store) -> SharedStore:
    assert isinstance(store, SharedStore)
    return store


def _build_filter(query: RolloutQuery) -> ListFilter:
    values = {
        "status": query.status,
        "class": tuple("" if kind == "none" else kind for kind in query.kind),
        "team": query.group,
        "task": query.task,
        "agent": query.agent,
        "model": query.model,
        "mode": query.mode,
    }
    return ListFilter(values, query.text)


def _parse_sort(query: RolloutQuery, known: Mapping[str, str]) -> tuple[str, bool]:
    name = query.sort.removeprefix("-")
    if name not in known:
        raise BadRequest(f"'sort' must be one of {', '.join(known)}, not {name[:100]!r}", param="sort")
    return name, query.sort.startswith("-")


def _to_record(delivery: ListedDelivery) -> DeliveryRecord:
    return DeliveryRecord(
        feed=delivery.feed,
        number=delivery.number,
        group=delivery.team,
        rollouts=delivery.rollouts,
        at=delivery.at,
    )


def _group_points(
    points: Iterable[TrendPoint], key: Callable[[TrendPoint], int | None]
) -> list[tuple[int, list[TrendPoint]]]:
    """Group points by a key, in ascending order of the key. Points with the key None are omitted."""
    grouped: dict[int, list[TrendPoint]] = {}
    for point in points:
        if (value := key(point)) is not None:
            grouped.setdefault(value, []).append(point)
    return sorted(grouped.items())


def _count_graded(points: Iterable[TrendPoint]) -> int:
    return sum(point.graded for point in points)


def _mean(points: Sequence[TrendPoint]) -> float:
    return fsum(point.total for point in points if point.total is not None) / _count_graded(points)


def _lowest(points: Iterable[TrendPoint]) -> float:
    return min(point.low for point in points if point.low is not None)


def _highest(points: Iterable[TrendPoint]) -> float:
    return max(point.high for point in points if point.high is not None)


def _names(counts: Mapping[str, int]) -> list[str]:
    return sorted(name for name in counts if name)[:MOST_NAMES]
