"""Query the lists of rollouts and groups, one page at a time. PostgreSQL sorts and filters them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from turngate.store.connection import Connect
from turngate.store.shared.rollout_list import COLUMNS, ListedDelivery, ListedRollout, ListState

_DELIVERY = ", ".join(ListedDelivery.__struct_fields__)
_STATUS_ORDER = (
    "CASE status WHEN 'starting' THEN 0 WHEN 'running' THEN 1 WHEN 'finishing' THEN 2 WHEN 'done' THEN 3 ELSE 4 END"
)
# The expression to sort by, by its name in the API. Rows in which it is NULL come last in both directions.
SORTS = {
    "opened": "opened",
    "closed": "closed",
    "seen": "seen",
    "seconds": "coalesce(closed, EXTRACT(EPOCH FROM now())::float8)-opened",
    "reward": "reward",
    "turns": "turns",
    "sampled_tokens": "sampled_tokens",
    "task": "nullif(task, '')",
    "group": "nullif(team, '')",
    "status": _STATUS_ORDER,
    "class": "nullif(class, '')",
    "agent": "nullif(agent, '')",
    "model": "nullif(model, '')",
    "version": "version_start",
}
GROUP_SORTS = {
    "latest": "latest",
    "opened": "opened",
    "group": "team",
    "task": "task",
    "rollouts": "rollouts",
    "running": "running",
    "mean_reward": "mean_reward",
    "pass_at_1": "pass_at_1",
}
_ENDED = "key<>0 AND status IN ('done', 'cancelled')"
# Sorted without NULLS LAST, so that PostgreSQL can use indexes.
_NEVER_NULL = ("opened", "seen", "turns", "sampled_tokens", "latest", "team", "rollouts", "running")


class ListFilter(msgspec.Struct, frozen=True):
    """A filter for a list: the accepted values of each column, and a text to search for. An empty filter matches all rows."""

    values: Mapping[str, Sequence[str]] = {}
    text: str = ""

    def conditions(self) -> tuple[str, list[Any]]:
        wheres: list[str] = []
        values: list[Any] = []
        for column, wanted in self.values.items():
            if wanted:
                wheres.append(f"{column}=ANY(?)")
                values.append(list(wanted))
        if self.text:
            wheres.append("strpos(search_text, ?)>0")
            values.append(self.text)
        return (f"WHERE {' AND '.join(wheres)}" if wheres else ""), values


class TrendPoint(msgspec.Struct, frozen=True):
    """Totals of the rollouts with the same policy version, staleness (`behind`) and time interval.

    A rollout belongs to the interval in which its outcome was recorded.
    """

    interval: int
    version: int | None
    behind: int | None
    total: float | None  # sum of the rewards
    low: float | None
    high: float | None
    graded: int
    rollouts: int


class DeliverySummary(msgspec.Struct, frozen=True):
    """A delivery, with the oldest policy version and the mean reward of the rollouts that its group had at the time of the delivery."""

    delivery: ListedDelivery
    oldest: int | None
    mean: float | None


class FailureCount(msgspec.Struct, frozen=True):
    """How many rollouts failed with the same class and text, and the ids of the newest of them."""

    kind: str
    text: str
    rollouts: int
    examples: list[str]


class RolloutPages:
    """Reads the lists of rollouts and groups. Other processes may be updating them at the same time.

    A method with a `prefix` covers only groups with names that start with this prefix. An empty prefix means all rollouts.
    """

    def __init__(self, reading: Connect) -> None:
        self._reading = reading

    def state(self) -> tuple[ListState, int]:
        """Return how far the lists have been filled, and the number of the newest event in the store."""
        query = "SELECT rollout_list_state.newest, filled, event_counter.newest FROM rollout_list_state, event_counter"
        with self._reading() as db:
            listed, filled, newest = db.execute(query).fetchone()
        return ListState(listed, filled), newest

    # ── rollouts ────────────────────────────────────────────────────────────────────────────────────────────────

    def page(
        self, filter: ListFilter, sort: str, *, descending: bool, offset: int, limit: int
    ) -> tuple[list[ListedRollout], int]:
        """Return one page of the matching rollouts, and how many rollouts match in total. Only the rows on the page are read in full."""
        where, values = filter.conditions()
        order = _order(SORTS[sort], "id", descending=descending)
        total = self._count_by_value(filter)
        if total is None:  # count and sort in one pass
            query = (
                f"WITH found AS MATERIALIZED (SELECT id, row_number() OVER (ORDER BY {order}) AS place FROM rollout_list {where})"
                f" SELECT {COLUMNS}, (SELECT count(*) FROM found) FROM rollout_list JOIN found USING (id)"
                " WHERE place>? AND place<=? ORDER BY place"
            )
            with self._reading() as db:
                rows = db.execute(query, (*values, offset, offset + limit)).fetchall()
            if not rows:
                return [], int(self._one(f"SELECT count(*) FROM rollout_list {where}", values)[0]) if offset else 0
            return [ListedRollout(*row[:-1]) for row in rows], rows[0][-1]
        query = (
            f"SELECT {COLUMNS} FROM rollout_list WHERE id IN"
            f" (SELECT id FROM rollout_list {where} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}"
        )
        return self._rollouts(query, (*values, limit, offset)), total

    def _count_by_value(self, filter: ListFilter) -> int | None:
        """Return how many rollouts match, from the stored counts. Return None if the counts do not cover this filter."""
        used = [(column, list(wanted)) for column, wanted in filter.values.items() if wanted]
        if filter.text or len(used) > 1 or (used and used[0][0] == "team"):  # the values of `team` are not counted
            return None
        query = "SELECT coalesce(sum(rollouts), 0)::int8 FROM rollout_counts WHERE field=?"
        if not used:
            return int(self._one(query, ("status",))[0])
        return int(self._one(f"{query} AND value=ANY(?)", used[0])[0])

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of rollouts by column and value. The column `task` is omitted."""
        query = "SELECT field, value, rollouts FROM rollout_counts WHERE field<>'task' ORDER BY field, value"
        found: dict[str, dict[str, int]] = {}
        with self._reading() as db:
            for field, value, rollouts in db.execute(query).fetchall():
                found.setdefault(field, {})[value] = rollouts
        return found

    def count_names(self) -> tuple[int, int]:
        """Return the number of groups and the number of tasks."""
        tasks = "SELECT count(*) FROM rollout_counts WHERE field='task' AND value<>''"
        row = self._one(f"SELECT (SELECT count(*) FROM group_list), ({tasks})", ())
        return int(row[0]), int(row[1])

    def find(self, ids: Sequence[str]) -> list[ListedRollout]:
        return self._rollouts(f"SELECT {COLUMNS} FROM rollout_list WHERE id=ANY(?)", (list(ids),))

    def last_attempt(self, name: str) -> int:
        """Return the highest attempt number that the list has for a rollout, or 0 if the rollout is not listed."""
        return int(self._one("SELECT coalesce(max(attempt), 0) FROM rollout_list WHERE name=?", (name,))[0])

    def find_changed(self, after: int, last: int, limit: int) -> list[str]:
        """Return the ids of the sessions, and the names (`batch:ID`) of the batches, that have events numbered from `after` + 1 to `last`.

        At most `limit` + 1 values are returned: the extra one shows that there are more than `limit`. Only the first 20,000 of these events
        are read.
        """
        query = (
            "SELECT DISTINCT session FROM"
            " (SELECT session FROM events WHERE seq>? AND seq<=? AND session<>'' ORDER BY seq LIMIT 20000) AS recent LIMIT ?"
        )
        with self._reading() as db:
            return [session for (session,) in db.execute(query, (after, last, limit + 1)).fetchall()]

    # ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────

    def groups(self, filter: ListFilter, sort: str, *, descending: bool, offset: int, limit: int) -> list[bytes]:
        """Return the JSON summaries of one page of the matching groups."""
        where, values = filter.conditions()
        order = _order(GROUP_SORTS[sort], "team", descending=descending)
        query = f"SELECT summary FROM group_list {where} ORDER BY {order} LIMIT ? OFFSET ?"
        with self._reading() as db:
            return [bytes(summary) for (summary,) in db.execute(query, (*values, limit, offset)).fetchall()]

    def count_groups(self, filter: ListFilter) -> int:
        where, values = filter.conditions()
        return int(self._one(f"SELECT count(*) FROM group_list {where}", values)[0])

    def group(self, names: Sequence[str]) -> list[ListedRollout]:
        """Return the rollouts of the groups with these names, oldest first."""
        query = f"SELECT {COLUMNS} FROM rollout_list WHERE team=ANY(?) ORDER BY opened, id"
        return self._rollouts(query, (list(names),))

    def deliveries(self, group: str) -> list[ListedDelivery]:
        return self._deliveries("WHERE team=? ORDER BY seq", (group,))

    def last_deliveries(self, prefix: str, limit: int) -> list[DeliverySummary]:
        """Return the last `limit` deliveries, oldest first.

        A group may be delivered in parts. A summary also covers the rollouts of earlier parts, but not those whose outcomes were recorded
        after the delivery.
        """
        where, values = _starting_with(prefix)
        query = (
            f"SELECT {_DELIVERY}, oldest, mean FROM (SELECT * FROM delivery_list WHERE {where} ORDER BY seq DESC LIMIT ?) AS last,"
            " LATERAL (SELECT min(version_start) AS oldest, avg(usable_reward) AS mean FROM rollout_list"
            "  WHERE rollout_list.team=last.team AND coalesce(recorded, 0)<=last.at) AS members ORDER BY seq"
        )
        with self._reading() as db:
            rows = db.execute(query, (*values, limit)).fetchall()
        return [DeliverySummary(ListedDelivery(*row[:-2]), row[-2], row[-1]) for row in rows]

    # ── trends ──────────────────────────────────────────────────────────────────────────────────────────────────

    def versions(self) -> list[tuple[float, int]]:
        """Return (time, version) for each policy version that became active, oldest first."""
        with self._reading() as db:
            return [
                (at, version) for at, version in db.execute("SELECT at, version FROM version_list ORDER BY version")
            ]

    def first_opened(self, prefix: str) -> float | None:
        where, values = _starting_with(prefix)
        found: float | None = self._one(f"SELECT min(opened) FROM rollout_list WHERE {where}", values)[0]
        return found

    def trends(
        self, prefix: str, width: float, versions: Sequence[tuple[float, int]], first: int | None
    ) -> list[TrendPoint]:
        """Return totals of the rollouts with an outcome, in intervals of `width` seconds.

        `versions` has (time, version) for each policy version that became active. `first` is the version that was active before these, or
        None if it is unknown.
        """
        where, values = _starting_with(prefix)
        times, numbers = [at for at, _ in versions], [first, *(version for _, version in versions)]
        active = "(?::int8[])[1]" if not times else "(?::int8[])[width_bucket(recorded, ?::float8[])+1]"
        bounds = [numbers, times] if times else [numbers]
        query = (
            f"SELECT floor(recorded/?)::int8, version_start, {active}-version_start, sum(usable_reward), min(usable_reward),"
            " max(usable_reward), count(usable_reward), count(*)"
            f" FROM rollout_list WHERE recorded IS NOT NULL AND {where} GROUP BY 1, 2, 3"
        )
        with self._reading() as db:
            rows = db.execute(query, (float(width), *bounds, *values)).fetchall()
        return [TrendPoint(*row) for row in rows]

    def reward_totals(self, prefix: str) -> list[tuple[str, str, int, float, int]]:
        """Return (task, kind of task, policy version, sum of the rewards, number of graded rollouts) for each task and version.

        The version is the one with which a rollout started.
        """
        where, values = _starting_with(prefix)
        query = (
            "SELECT task, task_kind, version_start, sum(usable_reward), count(*) FROM rollout_list"
            f" WHERE usable_reward IS NOT NULL AND recorded IS NOT NULL AND version_start IS NOT NULL AND {where} GROUP BY 1, 2, 3"
        )
        with self._reading() as db:
            return db.execute(query, values).fetchall()

    def rewards_of(self, prefix: str, task: str, version: int) -> list[tuple[str, float]]:
        """Return the ids and rewards of a task's graded rollouts that started with policy version `version`, oldest first."""
        where, values = _starting_with(prefix)
        query = (
            "SELECT id, usable_reward FROM rollout_list WHERE usable_reward IS NOT NULL AND recorded IS NOT NULL"
            f" AND task=? AND version_start=? AND {where} ORDER BY opened, id"
        )
        with self._reading() as db:
            return db.execute(query, (task, version, *values)).fetchall()

    def list_ended_versions(self, prefix: str) -> list[int]:
        """Return the policy versions with which ended rollouts started, oldest first."""
        where, values = _starting_with(prefix)
        query = f"SELECT DISTINCT version_start FROM rollout_list WHERE version_start IS NOT NULL AND {_ENDED} AND {where} ORDER BY 1"
        with self._reading() as db:
            return [version for (version,) in db.execute(query, values).fetchall()]

    def find_first_ended(self, prefix: str, versions: Sequence[int], most: int) -> list[tuple[int, str, int]]:
        """Return (version, id, session key) of the oldest ended rollouts that started with these versions, up to `most` per version."""
        where, values = _starting_with(prefix)
        query = (
            "SELECT version_start, id, key FROM (SELECT version_start, id, key, opened,"
            " row_number() OVER (PARTITION BY version_start ORDER BY opened, id) AS place FROM rollout_list"
            f" WHERE version_start=ANY(?) AND {_ENDED} AND {where}) AS ended WHERE place<=? ORDER BY version_start, opened, id"
        )
        with self._reading() as db:
            return db.execute(query, (list(versions), *values, most)).fetchall()

    def throughput(self, bucket_s: float, width: float) -> list[tuple[int, list[int]]]:
        """Return the number of turns, sampled tokens and outcomes in each interval of `width` seconds.

        `bucket_s` is the length of the stored intervals, which are added up.
        """
        query = (
            "SELECT floor(number*?/?)::int8, sum(turns)::int8, sum(sampled_tokens)::int8, sum(outcomes)::int8"
            " FROM bucket_totals GROUP BY 1"
        )
        with self._reading() as db:
            return [(number, counts) for number, *counts in db.execute(query, (float(bucket_s), float(width)))]

    def failures(self, prefix: str, limit: int, examples: int) -> tuple[dict[str, int], list[FailureCount]]:
        """Return the number of failures of each class, and the `limit` most frequent texts of each class.

        Each text comes with its number of rollouts, and with the ids of up to `examples` of these rollouts, newest first.
        """
        where, values = _starting_with(prefix)
        query = (
            "SELECT failure, failure_text, rollouts, total,"
            f" ARRAY(SELECT id FROM rollout_list AS one WHERE one.failure=found.failure AND one.failure_text=found.failure_text AND {where}"
            "        ORDER BY opened DESC, id DESC LIMIT ?)"
            " FROM (SELECT failure, failure_text, count(*) AS rollouts, sum(count(*)) OVER (PARTITION BY failure)::int8 AS total,"
            "  row_number() OVER (PARTITION BY failure ORDER BY count(*) DESC, failure_text) AS place"
            f"  FROM rollout_list WHERE failure<>'' AND {where} GROUP BY failure, failure_text) AS found"
            " WHERE place<=? ORDER BY total DESC, failure, rollouts DESC, failure_text"
        )
        with self._reading() as db:
            rows = db.execute(query, (*values, examples, *values, limit)).fetchall()
        totals = {kind: total for kind, _, _, total, _ in rows}
        return totals, [FailureCount(kind, text, count, list(ids)) for kind, text, count, _, ids in rows]

    def _rollouts(self, query: str, values: Sequence[Any]) -> list[ListedRollout]:
        with self._reading() as db:
            return [ListedRollout(*row) for row in db.execute(query, values).fetchall()]

    def _deliveries(self, where: str, values: Sequence[Any]) -> list[ListedDelivery]:
        with self._reading() as db:
            rows = db.execute(f"SELECT {_DELIVERY} FROM delivery_list {where}", values).fetchall()
        return [ListedDelivery(*row) for row in rows]

    def _one(self, query: str, values: Sequence[Any]) -> Any:
        with self._reading() as db:
            return db.execute(query, values).fetchone()


def _order(expression: str, tie: str, *, descending: bool) -> str:
    """Return the ORDER BY expression of a list. The column `tie` orders rows with equal values, so that pages do not overlap."""
    direction = "DESC" if descending else "ASC"
    nulls = "" if expression in _NEVER_NULL else " NULLS LAST"
    return f"{expression} {direction}{nulls}, {tie} {direction}"


def _starting_with(prefix: str) -> tuple[str, list[str]]:
    """Return an SQL condition for groups with names that start with `prefix`, and its values.

    The condition compares names by code points, so that PostgreSQL can use an index.
    """
    return ("team>=? AND team<?", [prefix, prefix + chr(0x10FFFF)]) if prefix else ("TRUE", [])
