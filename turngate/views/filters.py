"""Filter and sort rollouts and groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from operator import itemgetter

import msgspec

from turngate.errors import BadRequest
from turngate.types import Json
from turngate.views.groups import GroupRow
from turngate.views.rollout_entry import STATUSES, RolloutEntry
from turngate.views.rollout_index import yield_interpreter


class RolloutQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A filter, a sort order and a page for a list of rollouts.

    A field with several values matches any of them. An empty field matches everything.
    """

    status: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    text: str = ""
    sort: str = "-opened"
    offset: int = 0
    limit: int = 50


def matches(entry: RolloutEntry, query: RolloutQuery) -> bool:
    row = entry.row
    return (
        (not query.status or row.status in query.status)
        and (not query.kind or (row.kind or "none") in query.kind)
        and (not query.group or row.group in query.group)
        and (not query.task or row.task in query.task)
        and (not query.agent or row.agent in query.agent)
        and (not query.model or row.model in query.model)
        and (not query.mode or row.mode in query.mode)
        and (not query.text or query.text in entry.build_search_text())
    )


def group_matches(group: GroupRow, query: RolloutQuery) -> bool:
    text = f"{group.group}\n{group.agent}\n{group.model}".casefold()
    return (
        (not query.task or group.task in query.task)
        and (not query.agent or group.agent in query.agent)
        and (not query.model or group.model in query.model)
        and (not query.text or query.text in text)
    )


SORT_KEYS: Mapping[str, Callable[[RolloutEntry], Json]] = {
    "opened": lambda entry: entry.row.opened,
    "closed": lambda entry: entry.row.closed,
    "seen": lambda entry: entry.row.seen,
    "seconds": lambda entry: (entry.row.closed or time.time()) - entry.row.opened,
    "reward": lambda entry: entry.row.reward,
    "turns": lambda entry: entry.row.turns,
    "sampled_tokens": lambda entry: entry.row.sampled_tokens,
    "task": lambda entry: entry.row.task or None,
    "group": lambda entry: entry.row.group or None,
    "status": lambda entry: STATUSES.index(entry.row.status),
    "class": lambda entry: entry.row.kind or None,
    "agent": lambda entry: entry.row.agent or None,
    "model": lambda entry: entry.row.model or None,
    "version": lambda entry: entry.row.version_start,
}
GROUP_SORT_KEYS: Mapping[str, Callable[[GroupRow], Json]] = {
    "latest": lambda group: group.latest,
    "opened": lambda group: group.opened,
    "group": lambda group: group.group,
    "task": lambda group: group.task,
    "rollouts": lambda group: group.rollouts,
    "running": lambda group: group.running,
    "mean_reward": lambda group: group.mean_reward,
    "pass_at_1": lambda group: group.pass_at_1,
}


def sort_by(
    items: list[Json], order: str, keys: Mapping[str, Callable[[Json], Json]], tie: Callable[[Json], str]
) -> list[Json]:
    """Sort items by the key that `order` names, in descending order if `order` starts with `-`.

    Items without a value come last in both directions. `tie` orders items with equal values, so that pages do not overlap.
    """
    name = order.removeprefix("-")
    key = keys.get(name)
    if key is None:
        raise BadRequest(f"'sort' must be one of {', '.join(keys)}, not {name[:100]!r}", param="sort")
    descending = order.startswith("-")
    yield_interpreter()
    items.sort(key=tie, reverse=descending)
    pairs = [(key(item), item) for item in items]
    known = [pair for pair in pairs if pair[0] is not None]
    known.sort(key=itemgetter(0), reverse=descending)
    return [item for _, item in known] + [item for value, item in pairs if value is None]
