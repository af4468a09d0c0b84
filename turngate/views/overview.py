"""Answers about all rollouts of a data folder. Each answer is brought up to date first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from turngate.errors import NotFound
from turngate.store.sqlite import Store
from turngate.trace.advantage import compute_advantages
from turngate.trace.pass_at_k import pass_curve
from turngate.types import BATCH_STREAM, Json
from turngate.views import trends
from turngate.views.filters import GROUP_SORT_KEYS, SORT_KEYS, RolloutQuery, group_matches, matches, sort_by
from turngate.views.groups import last_attempts, standard_deviation, summarize_group
from turngate.views.rollout_index import ACTIVE_STATUSES, CHUNK, STATUSES, RolloutIndex, RolloutRow, yield_interpreter

_MOST_NAMES = 200
_MOST_CHANGED = 200


class Overview(RolloutIndex):
    """The rollouts of one data folder: lists, groups, changes."""

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
        """A rollout's row, the key of its session (0 if it has none), and the cursor."""
        cursor = self.refresh(store)
        entry = self.entries.get(session)
        if entry is None:
            raise NotFound(f"there is no rollout {session!r}")
        return self.refresh_row(entry, time.time(), store), entry.key, cursor

    def damage(self, session: str) -> str:
        """What of a rollout cannot be read; empty if all of it can, as far as the index knows."""
        entry = self.entries.get(session)
        return "" if entry is None else entry.damage

    def check_retry(self, store: Store, session: str) -> tuple[RolloutRow, str]:
        """A rollout's row, and why it cannot be tried again; empty if it can."""
        row, _, _ = self.rollout(store, session)
        if row.status in ACTIVE_STATUSES:
            return row, "it is still running"
        if damage := self.damage(session):
            return row, damage
        if row.kind and row.kind != "infrastructure fault":
            return row, f"it has been judged: {row.kind}"
        if not row.kind and row.status != "cancelled":
            return row, "nothing failed: it was not to be graded"
        if not row.batch or not row.name:
            return row, "it belongs to no batch; run it again where it was run"
        later = max(entry.row.attempt for entry in self.entries.values() if entry.row.name == row.name)
        return row, f"attempt {later} of it is there already" if later > row.attempt else ""

    def list_changes(self, store: Store, after: int) -> dict[str, Json]:
        """The changes after a cursor: the rows that changed, and the rollouts that were deleted."""
        cursor, now = self.refresh(store), time.time()
        touched = store.queries.list_changed(after, _MOST_CHANGED)
        rows = [
            self.refresh_row(self.entries[one], now, store) for one in touched[:_MOST_CHANGED] if one in self.entries
        ]
        gone = [one for one in touched[:_MOST_CHANGED] if one not in self.entries and not one.startswith(BATCH_STREAM)]
        return {"cursor": cursor, "rollouts": rows, "gone": gone, "more": len(touched) > _MOST_CHANGED}

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
        """Ids and session keys of the graded rollouts of a group."""
        self.refresh(store)
        return [
            (one.row.id, one.key)
            for one in self.entries.values()
            if one.row.group == name and one.key and one.row.reward is not None
        ]

    def group(self, store: Store, name: str, trains: Mapping[int, bool]) -> dict[str, Json]:
        """Its rollouts, with what a trainer would make of their rewards. `trains`: by session key, whether anything of it can be
        trained; of those that are not in it, whatever has sampled tokens counts."""
        cursor, now = self.refresh(store), time.time()
        entries = sorted(
            (one for one in self.entries.values() if one.row.group == name), key=lambda one: one.row.opened
        )
        if not entries or not name:
            raise NotFound("name: there is no such group", param="name")
        rows = [self.refresh_row(one, now, store) for one in entries]
        # As in a feed: a rollout without anything to train does not count.
        counted = [one.row.reward if trains.get(one.key, one.row.sampled_tokens > 0) else None for one in entries]
        summed = summarize_group(name, rows)
        known = [row.reward for row in last_attempts(rows) if row.reward is not None]
        ways = {how: compute_advantages(counted, how) for how in ("normalised", "leave_one_out")}
        estimates = [{"k": k, "estimate": chance} for k, chance in pass_curve(summed.graded, summed.passed)]
        return {
            "group": name,
            "task": summed.task,
            "cursor": cursor,
            "rollouts": [
                {**msgspec.to_builtins(row), "advantage": normal, "leave_one_out": alone}
                for row, normal, alone in zip(rows, ways["normalised"], ways["leave_one_out"], strict=True)
            ],
            "mean_reward": summed.mean_reward,
            "std_reward": standard_deviation(known),
            "graded": summed.graded,
            "passed": summed.passed,
            "pass_at": estimates,
            "classes": summed.classes,
            "signal": summed.signal,
            "deliveries": [
                {"feed": one.feed, "number": one.number, "at": one.at} for one in self.deliveries if one.group == name
            ],
        }

    def members(self, store: Store, name: str) -> list[tuple[str, int]]:
        """Ids and session keys of the rollouts of a group that have a session, oldest first."""
        self.refresh(store)
        entries = [one for one in self.entries.values() if one.row.group == name and one.key]
        if not entries or not name:
            raise NotFound("group: there is no such group, or none of it has begun", param="group")
        return [(one.row.id, one.key) for one in sorted(entries, key=lambda one: one.key)]

    def training(self, store: Store, prefix: str, buckets: int) -> dict[str, Json]:
        return trends.summarize_training(self, store, prefix, buckets)

    def failures(self, store: Store, prefix: str) -> dict[str, Json]:
        return trends.summarize_failures(self, store, prefix)

    def _members(self, now: float) -> dict[str, list[RolloutRow]]:
        found: dict[str, list[RolloutRow]] = {}
        for entry in self.all(now):
            if entry.row.group:
                found.setdefault(entry.row.group, []).append(entry.row)
        return found


def _names(found: Iterable[str]) -> list[str]:
    return sorted({name for name in found if name})[:_MOST_NAMES]
