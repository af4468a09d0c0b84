"""Filter and sort rollouts and groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from operator import itemgetter

import msgspec

from turngate.errors import BadRequest
from turngate.types import Json
from turngate.views.groups import GroupRow
from turngate.views.rollout_index import STATUSES, RolloutEntry, yield_interpreter


class RolloutQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts to list, and in which order. A field with several values matches any of them; an empty one matches all."""

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


def matches(kept: RolloutEntry, wanted: RolloutQuery) -> bool:
    row = kept.row
    return (
        (not wanted.status or row.status in wanted.status)
        and (not wanted.kind or (row.kind or "none") in wanted.kind)
        and (not wanted.group or row.group in wanted.group)
        and (not wanted.task or row.task in wanted.task)
        and (not wanted.agent or row.agent in wanted.agent)
        and (not wanted.model or row.model in wanted.model)
        and (not wanted.mode or row.mode in wanted.mode)
        and (not wanted.text or wanted.text in _search_text(kept))
    )


def _search_text(kept: RolloutEntry) -> str:
    if not kept.found:
        row = kept.row
        parts = (row.id, row.name, row.group, row.task, row.agent, row.model, row.message, row.stop)
        kept.found = "\n".join(dict.fromkeys(parts)).casefold()
    return kept.found


def group_matches(group: GroupRow, wanted: RolloutQuery) -> bool:
    text = f"{group.group}\n{group.agent}\n{group.model}".casefold()
    return (
        (not wanted.task or group.task in wanted.task)
        and (not wanted.agent or group.agent in wanted.agent)
        and (not wanted.model or group.model in wanted.model)
        and (not wanted.text or wanted.text in text)
    )


SORT_KEYS: Mapping[str, Callable[[RolloutEntry], Json]] = {
    "opened": lambda kept: kept.row.opened,
    "closed": lambda kept: kept.row.closed,
    "seen": lambda kept: kept.row.seen,
    "seconds": lambda kept: (kept.row.closed or time.time()) - kept.row.opened,
    "reward": lambda kept: kept.row.reward,
    "turns": lambda kept: kept.row.turns,
    "sampled_tokens": lambda kept: kept.row.sampled_tokens,
    "task": lambda kept: kept.row.task or None,
    "group": lambda kept: kept.row.group or None,
    "status": lambda kept: STATUSES.index(kept.row.status),
    "class": lambda kept: kept.row.kind or None,
    "agent": lambda kept: kept.row.agent or None,
    "model": lambda kept: kept.row.model or None,
    "version": lambda kept: kept.row.version_start,
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
    found: list[Json], how: str, keys: Mapping[str, Callable[[Json], Json]], tie: Callable[[Json], str]
) -> list[Json]:
    """Sort. Unknown values are last in both directions; `tie` orders equal ones, so that pages do not overlap."""
    name = how.removeprefix("-")
    key = keys.get(name)
    if key is None:
        raise BadRequest(f"sort: {name[:100]!r} is not one of {', '.join(keys)}", param="sort")
    down = how.startswith("-")
    yield_interpreter()
    found.sort(key=tie, reverse=down)
    pairs = [(key(one), one) for one in found]
    known = [pair for pair in pairs if pair[0] is not None]
    known.sort(key=itemgetter(0), reverse=down)
    return [one for _, one in known] + [one for value, one in pairs if value is None]
