"""Keep lists of rollouts and groups in the shared store, so that PostgreSQL can sort, filter and paginate them.

Gateways update the lists from the events (`views/shared_index.py`), one gateway at a time. The table `rollout_list_state` holds the
number of the newest event that the lists include.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from turngate.store.connection import StoreConnection
from turngate.store.queries import EventTotals, RawEvent
from turngate.store.shared.database import SharedConnection
from turngate.types import BATCH_STREAM

COUNTED = ("status", "class", "agent", "model", "mode", "task")  # columns whose values are counted in `rollout_counts`
_LISTS = ("rollout_list", "group_list", "rollout_counts", "delivery_list", "version_list")
_COUNT = (
    "INSERT INTO rollout_counts AS old SELECT * FROM unnest(?::text[], ?::text[], ?::int8[])"
    " ON CONFLICT (field, value) DO UPDATE SET rollouts=old.rollouts+excluded.rollouts"
)
_UPDATE_GROUP = (
    "INSERT INTO group_list VALUES (?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (team) DO UPDATE SET task=excluded.task,"
    " agent=excluded.agent, model=excluded.model, rollouts=excluded.rollouts, running=excluded.running,"
    " mean_reward=excluded.mean_reward, pass_at_1=excluded.pass_at_1, opened=excluded.opened, latest=excluded.latest,"
    " search_text=excluded.search_text, summary=excluded.summary"
)


class ListedRollout(msgspec.Struct, frozen=True):
    """One row of `rollout_list`."""

    id: str
    key: int  # key of its session; 0: it has no session
    name: str
    team: str  # name of its group
    task: str
    task_kind: str
    batch: str
    agent: str
    agent_version: str
    model: str
    mode: str
    sandbox: str
    attempt: int
    status: str
    stage: str
    kind: str
    reward: float | None
    resolved: bool | None
    stop: str
    message: str
    warning: str
    excluded: str
    opened: float
    closed: float | None
    seen: float
    turns: int
    sampled_tokens: int
    version_start: int | None
    version_end: int | None
    recorded: float | None
    usable_reward: float | None  # None: the reward does not count, or is too large for a trainer
    damage: str
    failure: str  # class under which its failure is listed; empty: it did not fail
    failure_text: str  # its message without numbers, by which equal failures are counted
    search_text: str


_POSTGRES_TYPES = {"str": "text", "int": "int8", "float": "float8", "bool": "bool"}
_TYPES = [_POSTGRES_TYPES[str(kind).split()[0]] for kind in ListedRollout.__annotations__.values()]
COLUMNS = ", ".join("class" if field == "kind" else field for field in ListedRollout.__struct_fields__)


class ListedGroup(msgspec.Struct, frozen=True):
    """One row of `group_list`."""

    team: str
    task: str
    agent: str
    model: str
    rollouts: int
    running: int
    mean_reward: float | None
    pass_at_1: float | None
    opened: float
    latest: float
    search_text: str
    summary: bytes  # JSON of `GroupRow`


class ListedDelivery(msgspec.Struct, frozen=True):
    """One row of `delivery_list`."""

    seq: int
    feed: str
    number: int
    team: str
    rollouts: int
    at: float


class ListState(msgspec.Struct, frozen=True):
    newest: int  # number of the newest event that the lists include
    filled: int | None  # while the lists are being filled: key of the last session in them


# ── in the transaction that updates the lists ───────────────────────────────────────────────────────────────────────


def claim_lists(db: StoreConnection) -> ListState | None:
    """Lock the lists until the transaction ends, and return their state. Return None if another process is updating them."""
    row = db.execute("SELECT newest, filled FROM rollout_list_state FOR UPDATE SKIP LOCKED").fetchone()
    return None if row is None else ListState(*row)


def set_state(db: StoreConnection, state: ListState) -> None:
    db.execute("UPDATE rollout_list_state SET newest=?, filled=?", (state.newest, state.filled))


def clear_lists(db: StoreConnection) -> None:
    for table in _LISTS:
        db.execute(f"DELETE FROM {table}")


def find_changed(db: StoreConnection, after: int, last: int) -> list[str]:
    """Return the ids of sessions with events numbered from `after` + 1 to `last`."""
    query = f"SELECT DISTINCT session FROM events WHERE seq>? AND seq<=? AND session<>'' AND NOT starts_with(session, '{BATCH_STREAM}')"
    return [session for (session,) in db.execute(query, (after, last)).fetchall()]


def find_unopened(db: StoreConnection) -> list[str]:
    """Return the ids of rollouts that have reported stages but have no session."""
    query = (
        "SELECT session FROM session_totals WHERE stages>0 AND NOT EXISTS (SELECT 1 FROM sessions WHERE id=session)"
        f" AND NOT starts_with(session, '{BATCH_STREAM}')"
    )
    return [session for (session,) in db.execute(query).fetchall()]


def find_silent(db: StoreConnection, before: float) -> list[str]:
    """Return the ids of up to 1000 starting or finishing rollouts that have reported nothing since the time `before`."""
    query = "SELECT id FROM rollout_list WHERE status IN ('starting', 'finishing') AND seen<? LIMIT 1000"
    return [session for (session,) in db.execute(query, (before,)).fetchall()]


def find_gateway_events(db: StoreConnection, after: int, last: int) -> list[RawEvent]:
    """Return the delivery and fence events numbered from `after` + 1 to `last`."""
    query = (
        "SELECT seq, time, session, kind, data FROM events WHERE seq>? AND seq<=? AND session=''"
        " AND kind IN ('fence', 'delivery') ORDER BY seq"
    )
    return [RawEvent(*row) for row in db.execute(query, (after, last)).fetchall()]


def find_sessions_after(db: StoreConnection, key: int, limit: int) -> list[tuple[int, str]]:
    """Return the keys and ids of up to `limit` sessions with keys above `key`, oldest first."""
    return db.execute("SELECT key, id FROM sessions WHERE key>? ORDER BY key LIMIT ?", (key, limit)).fetchall()


def sum_sessions(db: StoreConnection, ids: Sequence[str]) -> dict[str, EventTotals]:
    query = "SELECT session, newest, at, turns, sampled_tokens, stages FROM session_totals WHERE session=ANY(?)"
    return {row[0]: EventTotals(*row) for row in db.execute(query, (list(ids),)).fetchall()}


def find_stages(db: StoreConnection, ids: Sequence[str]) -> dict[str, tuple[RawEvent, RawEvent]]:
    """Return the first and the last stage event of each session that has any, by session id."""
    one = "(SELECT seq FROM events WHERE session=wanted.id AND kind='stage' ORDER BY seq {} LIMIT 1)"
    query = (
        f"SELECT seq, time, session, kind, data FROM events WHERE seq IN (SELECT {one.format('')} FROM unnest(?::text[]) AS wanted(id)"
        f" UNION ALL SELECT {one.format('DESC')} FROM unnest(?::text[]) AS wanted(id)) ORDER BY seq"
    )
    found: dict[str, tuple[RawEvent, RawEvent]] = {}
    for row in db.execute(query, (list(ids), list(ids))).fetchall():
        event = RawEvent(*row)
        found[event.session] = (found[event.session][0] if event.session in found else event, event)
    return found


def find_deleted(db: StoreConnection, ids: Sequence[str]) -> set[str]:
    query = "SELECT DISTINCT session FROM events WHERE kind='deleted' AND session=ANY(?)"
    return {session for (session,) in db.execute(query, (list(ids),)).fetchall()}


def find_turn_ends(db: StoreConnection, keys: Sequence[int]) -> dict[int, tuple[bytes, bytes]]:
    """Return the info of the first and the last turn of each session that has any, by session key."""
    one = "(SELECT info FROM nodes WHERE session=wanted.key AND kind='sampled' ORDER BY id {} LIMIT 1)"
    query = f"SELECT key, {one.format('')}, {one.format('DESC')} FROM unnest(?::int8[]) AS wanted(key)"
    return {key: (first, last) for key, first, last in db.execute(query, (list(keys),)).fetchall() if first is not None}


def replace_rollouts(db: SharedConnection, ids: Sequence[str], rows: Iterable[ListedRollout]) -> set[str]:
    """Replace the rows of the rollouts `ids` with `rows`, and update the counts. Return the names of the groups that changed."""
    counts: Counter[tuple[str, str]] = Counter()
    query = f"DELETE FROM rollout_list WHERE id=ANY(?) RETURNING team, {', '.join(COUNTED)}"
    groups = set()
    for team, *values in db.execute(query, (list(ids),)).fetchall():
        groups.add(team)
        counts.subtract(zip(COUNTED, values, strict=True))
    rows = list(rows)
    for row in rows:
        groups.add(row.team)
        counts.update(zip(COUNTED, (row.status, row.kind, row.agent, row.model, row.mode, row.task), strict=True))
    if rows:
        db.copy_rows("rollout_list", COLUMNS.split(", "), _TYPES, [msgspec.structs.astuple(row) for row in rows])
    changes = sorted((field, value, number) for (field, value), number in counts.items() if number)
    if changes:
        db.execute(_COUNT, [list(column) for column in zip(*changes, strict=True)])
        db.execute("DELETE FROM rollout_counts WHERE rollouts=0")
    return groups - {""}


def read_groups(db: StoreConnection, groups: Iterable[str]) -> list[ListedRollout]:
    """Return the rollouts of the given groups, oldest first within each group."""
    query = f"SELECT {COLUMNS} FROM rollout_list WHERE team=ANY(?) ORDER BY team, opened"
    return [ListedRollout(*row) for row in db.execute(query, (sorted(groups),)).fetchall()]


def replace_groups(db: StoreConnection, groups: Iterable[str], rows: Iterable[ListedGroup]) -> None:
    left = set(groups)
    for row in rows:
        left.discard(row.team)
        db.execute(_UPDATE_GROUP, msgspec.structs.astuple(row))
    if left:
        db.execute("DELETE FROM group_list WHERE team=ANY(?)", (sorted(left),))


def add_delivery(db: StoreConnection, delivery: ListedDelivery) -> None:
    values: tuple[Any, ...] = msgspec.structs.astuple(delivery)
    db.execute("INSERT INTO delivery_list VALUES (?,?,?,?,?,?) ON CONFLICT DO NOTHING", values)


def add_version(db: StoreConnection, version: int, at: float) -> None:
    """Record when a policy version became active. Ignore a version that is not newer than the last recorded one."""
    query = "INSERT INTO version_list SELECT ?::int8, ?::float8 WHERE NOT EXISTS (SELECT 1 FROM version_list WHERE version>=?)"
    db.execute(query, (version, at, version))
