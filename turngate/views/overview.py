"""Lists and summaries of all rollouts in a data folder. All queries except `damage` read new events before they answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from turngate.errors import NotFound
from turngate.store.store import Store
from turngate.trace.advantage import compute_advantages
from turngate.trace.pass_at_k import pass_curve
from turngate.types import BATCH_STREAM, Json
from turngate.views import trends
from turngate.views.failures import summarize_failures
from turngate.views.filters import GROUP_SORT_KEYS, SORT_KEYS, RolloutQuery, group_matches, matches, sort_by
from turngate.views.groups import last_attempts, rewards_differ, standard_deviation, summarize_group
from turngate.views.rollout_entry import ACTIVE_STATUSES, STATUSES, RolloutRow
from turngate.views.rollout_index import CHUNK, DeliveryRecord, RolloutIndex, yield_interpreter

MOST_NAMES = 200
MOST_CHANGED = 200


class Overview(RolloutIndex):
    """Answers queries about the rollouts of one data folder: lists, groups, changes and trends."""

    def sums(self, store: Store) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        rows = [entry.row for entry in self.all(now)]
        statuses = Counter(row.status for row in rows)
        classes: Counter[str] = Counter(row.kind for row in rows)
        return {
            "now": now,
            "cursor": cursor,
            "rollouts": len(rows),
            "groups": len({row.group for row in rows if row.group}),
            "by_status": {status: statuses[status] for status in STATUSES},
            "by_class": dict(classes),
            "agents": _names(row.agent for row in rows),
            "models": _names(row.model for row in rows),
            "modes": _names(row.mode for row in rows),
            "tasks": len({row.task for row in rows if row.task}),
        }

    def rollouts(self, store: Store, query: RolloutQuery) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        found = [entry for entry in self.all(now) if matches(entry, query)]
        if query.sort.removeprefix("-") == "version":
            for entry in found:
                self.refresh_row(entry, now, store)
        found = sort_by(found, query.sort, SORT_KEYS, lambda entry: entry.row.id)
        page = found[query.offset : query.offset + query.limit]
        return {
            "rollouts": [self.refresh_row(entry, now, store) for entry in page],
            "total": len(found),
            "offset": query.offset,
            "limit": query.limit,
            "cursor": cursor,
        }

    def rollout(self, store: Store, session: str) -> tuple[RolloutRow, int, int]:
        """Return a rollout's row, the key of its session (0 if it has no session), and the number of the last event read."""
        cursor = self.refresh(store)
        entry = self.entries.get(session)
        if entry is None:
            raise NotFound(f"unknown rollout {session!r}")
        return self.refresh_row(entry, time.time(), store), entry.key, cursor

    def damage(self, store: Store, session: str) -> str:
        """Return a description of a rollout's damaged data, or "" if the index has found no damage."""
        entry = self.entries.get(session)
        return "" if entry is None else entry.damage

    def check_retry(self, store: Store, session: str) -> tuple[RolloutRow, str]:
        """Return a rollout's row, and the reason why the rollout cannot be retried, or "" if it can."""
        row, _, _ = self.rollout(store, session)

        def find_last_attempt() -> int:
            return max(entry.row.attempt for entry in self.entries.values() if entry.row.name == row.name)

        return row, explain_no_retry(row, self.damage(store, session), find_last_attempt)

    def list_changes(self, store: Store, after: int) -> dict[str, Json]:
        """Return the rows that have changed since event number `after`, and the ids of rollouts that were deleted since then.

        At most `MOST_CHANGED` rollouts are returned. If there are others, `more` is set, and the caller must load its lists again.
        """
        cursor, now = self.refresh(store), time.time()
        touched = store.queries.list_changed(after, MOST_CHANGED)
        rows = [
            self.refresh_row(self.entries[session], now, store)
            for session in touched[:MOST_CHANGED]
            if session in self.entries
        ]
        gone = [
            session
            for session in touched[:MOST_CHANGED]
            if session not in self.entries and not session.startswith(BATCH_STREAM)
        ]
        return {"cursor": cursor, "rollouts": rows, "gone": gone, "more": len(touched) > MOST_CHANGED}

    def groups(self, store: Store, query: RolloutQuery) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        found = []
        for number, (name, rows) in enumerate(self._members(now).items(), 1):
            group = summarize_group(name, rows)
            if group_matches(group, query):
                found.append(group)
            if number % (CHUNK // 8) == 0:
                yield_interpreter()
        found = sort_by(found, query.sort, GROUP_SORT_KEYS, lambda group: group.group)
        return {
            "groups": found[query.offset : query.offset + query.limit],
            "total": len(found),
            "offset": query.offset,
            "limit": query.limit,
            "cursor": cursor,
        }

    def list_graded(self, store: Store, name: str) -> list[tuple[str, int]]:
        """Return the ids and session keys of a group's rollouts whose rewards count."""
        self.refresh(store)
        return [
            (entry.row.id, entry.key)
            for entry in self.entries.values()
            if entry.row.group == name and entry.key and entry.row.counted_reward is not None
        ]

    def group(self, store: Store, name: str, trains: Mapping[int, bool]) -> dict[str, Json]:
        """Describe a group and its rollouts, with the advantages that a trainer would compute.

        `trains` says, by session key, whether a rollout has trainable tokens. A rollout that is not in `trains` is assumed to have
        trainable tokens if it has sampled tokens.
        """
        cursor, now = self.refresh(store), time.time()
        entries = sorted(
            (entry for entry in self.entries.values() if entry.row.group == name), key=lambda entry: entry.row.opened
        )
        if not entries or not name:
            raise NotFound(f"unknown group {name[:200]!r}; set 'name' to the name of a recorded group", param="name")
        members = [(self.refresh_row(entry, now, store), entry.key) for entry in entries]
        deliveries = [delivery for delivery in self.deliveries if delivery.group == name]
        return {"cursor": cursor, **show_group(name, members, trains, deliveries)}

    def members(self, store: Store, name: str) -> list[tuple[str, int]]:
        """Return the ids and session keys of a group's rollouts that have a session, oldest first. Raise `NotFound` if there are none."""
        self.refresh(store)
        entries = [entry for entry in self.entries.values() if entry.row.group == name] if name else []
        started = sorted((entry.key, entry.row.id) for entry in entries if entry.key)
        if not started:
            raise NotFound(explain_no_members(name, is_known=bool(entries)), param="group")
        return [(session, key) for key, session in started]

    def training(self, store: Store, prefix: str, buckets: int) -> dict[str, Json]:
        return trends.summarize_training(self, store, prefix, buckets)

    def choose_entropy_rollouts(self, store: Store, prefix: str) -> list[tuple[int, str, int]]:
        return trends.choose_entropy_rollouts(self, store, prefix)

    def failures(self, store: Store, prefix: str) -> dict[str, Json]:
        return summarize_failures(self, store, prefix)

    def _members(self, now: float) -> dict[str, list[RolloutRow]]:
        members: dict[str, list[RolloutRow]] = {}
        for entry in self.all(now):
            if entry.row.group:
                members.setdefault(entry.row.group, []).append(entry.row)
        return members


def explain_no_retry(row: RolloutRow, damage: str, find_last_attempt: Callable[[], int]) -> str:
    """Return why a rollout cannot be retried, or "" if it can. `find_last_attempt` returns the rollout's highest attempt number."""
    if row.status in ACTIVE_STATUSES:
        return "it is still running"
    if damage:
        return damage
    if row.kind and row.kind != "infrastructure fault":
        return f"it already has an outcome: {row.kind}"
    if not row.kind and row.status != "cancelled":
        return "it has no outcome, so there is no failure to retry"
    if not row.batch or not row.name:
        return "it does not belong to a batch; run it again the way you first ran it"
    last = find_last_attempt()
    return f"attempt {last} already exists" if last > row.attempt else ""


def explain_no_members(name: str, *, is_known: bool) -> str:
    """Return the error message for a group in which no rollout has a session."""
    if is_known:
        return f"no rollout of group {name[:200]!r} has a session yet; try again after a session has started"
    return f"unknown group {name[:200]!r}; pass the name of a recorded group"


def show_group(
    name: str,
    members: Sequence[tuple[RolloutRow, int]],
    trains: Mapping[int, bool],
    deliveries: Iterable[DeliveryRecord],
) -> dict[str, Json]:
    """Describe a group. `members` contains its rollouts and the keys of their sessions, oldest first. See `Overview.group` for `trains`."""
    rows = [row for row, _ in members]
    # As in a feed, the reward of a rollout without trainable tokens does not count.
    counted = [row.counted_reward if trains.get(key, row.sampled_tokens > 0) else None for row, key in members]
    summed = summarize_group(name, rows)
    known = [reward for row in last_attempts(rows) if (reward := row.counted_reward) is not None]
    advantages = {method: compute_advantages(counted, method) for method in ("normalised", "leave_one_out")}
    return {
        "group": name,
        "task": summed.task,
        "rollouts": [
            {**msgspec.to_builtins(row), "advantage": normal, "leave_one_out": alone}
            for row, normal, alone in zip(rows, advantages["normalised"], advantages["leave_one_out"], strict=True)
        ],
        "mean_reward": summed.mean_reward,
        "std_reward": standard_deviation(known),
        "graded": summed.graded,
        "passed": summed.passed,
        "pass_at": [{"k": k, "estimate": chance} for k, chance in pass_curve(summed.graded, summed.passed)],
        "classes": summed.classes,
        "signal": rewards_differ(counted),
        "deliveries": [
            {"feed": delivery.feed, "number": delivery.number, "at": delivery.at} for delivery in deliveries
        ],
    }


def _names(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name})[:MOST_NAMES]
