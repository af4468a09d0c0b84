"""Choose the sessions that are old enough to be removed, and remove them.

A session is kept while something may still need it: its runner, the shared store, a feed, or the other rollouts of its group. Groups are
chosen as a whole, so that the advantages in an export do not change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from turngate.errors import ConfigError
from turngate.store.columns import as_name
from turngate.store.connection import FOR_UPDATE, LOCK_FEEDS, Connect, StoreConnection
from turngate.store.events import insert_events, new_event
from turngate.types import Json

_PAGE = 500  # sessions per query
_SESSION_TABLES = (
    *("nodes", "side_data", "preambles", "outcomes", "tool_calls", "replies", "reply_echoes", "refusals", "reshipped"),
)
_FACTS = (
    "SELECT key, id, status, closed, recorded, coalesce((SELECT max(seq) FROM events WHERE events.session=sessions.id), 0),"
    " CAST(config AS BLOB), CAST(outcome AS BLOB) FROM sessions LEFT JOIN outcomes ON outcomes.session=key"
)
_AWAITED = "SELECT session, name, number IS NULL FROM rolled JOIN feeds ON feeds.key=feed WHERE (number IS NULL OR number>committed)"
OPEN = "the session is open"
TOO_NEW = "it ended too recently"
UNSHIPPED = "its latest state is not in the shared store yet"
OTHERS_KEPT = "another rollout of its group is kept"
CHANGED = "it has changed in the meantime"


class OldSession(msgspec.Struct, frozen=True):
    """The state of a session when its removal was planned. The session is removed only if this state has not changed since then."""

    key: int
    id: str
    status: str
    closed: float | None
    recorded: float | None  # when its outcome was recorded
    newest: int  # number of its newest event

    @property
    def is_damaged(self) -> bool:
        """Whether the session's id, status or times have the wrong type. Such a session is kept."""
        times = (self.closed, self.recorded)
        return not all(isinstance(text, str) for text in (self.id, self.status)) or not all(
            when is None or isinstance(when, int | float) for when in times
        )


class RetentionPlan(msgspec.Struct):
    """The sessions to remove, by group, oldest group first, and the number of sessions to keep, by reason."""

    removable: list[list[OldSession]] = []  # a session without a group has a list of its own
    kept: Counter[str] = msgspec.field(default_factory=Counter)
    damaged: list[str] = []  # the reasons that name a damaged session


class _NamedGroup(msgspec.Struct, frozen=True):
    """The part of an outcome, or of a session's metadata, that names the group."""

    group: Json = ""


class _GroupedConfig(msgspec.Struct, frozen=True):
    metadata: _NamedGroup = _NamedGroup()


_outcome = msgspec.json.Decoder(_NamedGroup)
_config = msgspec.json.Decoder(_GroupedConfig)


class Retention:
    """Plans and performs the removal of old sessions."""

    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version

    def claim(self) -> AbstractContextManager[None]:
        """Prevent other processes from removing old sessions at the same time. A data folder needs no claim, because it is locked."""
        return nullcontext()

    def renew_claim(self) -> None:
        """Extend the claim, which would otherwise expire."""

    def plan(self, before: float) -> RetentionPlan:
        """Choose the sessions that ended before the time `before` and are no longer needed."""
        if not self._has_tables:
            raise ConfigError(
                "data: the folder was written by an older version of Turngate; run `turngate serve` on it once to upgrade it",
                param="data",
            )
        plan, groups, kept_groups = RetentionPlan(), dict[str | int, list[OldSession]](), set[str | int]()
        for page in self._read_pages():
            with self._reading() as db:
                reasons = _find_reasons(db, [session.key for session, _ in page])
            for session, group in page:
                reason = reasons.get(session.key, "")
                if not reason and session.is_damaged:
                    reason = f"session {as_name(session.id)}: its session record is damaged on disk"
                    plan.damaged.append(reason)
                reason = reason or _judge_age(session, before)
                if not reason:
                    groups.setdefault(group or session.key, []).append(session)
                    continue
                plan.kept[reason] += 1
                if group:
                    kept_groups.add(group)
        for name, sessions in groups.items():
            if name in kept_groups:
                plan.kept[OTHERS_KEPT] += len(sessions)
            else:
                plan.removable.append(sessions)
        return plan

    def _read_pages(self) -> Iterator[list[tuple[OldSession, str]]]:
        """Yield all sessions with the names of their groups, oldest first, in pages."""
        after = 0
        while True:
            with self._reading() as db:
                rows = db.execute(f"{_FACTS} WHERE key>? ORDER BY key LIMIT ?", (after, _PAGE)).fetchall()
            if not rows:
                return
            yield [(OldSession(*facts), _read_group(config, outcome)) for *facts, config, outcome in rows]
            after = rows[-1][0]

    def count_nodes(self, keys: Sequence[int]) -> dict[int, int]:
        """Return the number of nodes of each session, by key. Sessions without nodes are omitted."""
        marks = ",".join("?" * len(keys))
        with self._reading() as db:
            query = f"SELECT session, count(*) FROM nodes WHERE session IN ({marks}) GROUP BY session"
            return dict(db.execute(query, keys).fetchall())

    def find_reasons(self, sessions: Sequence[OldSession]) -> Counter[str]:
        """Return how many of the sessions are needed again or have changed since the plan, by reason. These sessions must be kept."""
        reasons: Counter[str] = Counter()
        for start in range(0, len(sessions), _PAGE):
            with self._reading() as db:
                reasons.update(_find_new_reasons(db, sessions[start : start + _PAGE]).values())
        return reasons

    def remove(self, sessions: Sequence[OldSession]) -> Counter[str]:
        """Remove sessions in one transaction. Keep those that are needed again or have changed, and return the number kept, by reason."""
        keys = [session.key for session in sessions]
        marks = ",".join("?" * len(keys))
        with self._writing() as db:
            # Locks are taken in the order given in `connection.py`. While the feeds are locked, no feed can begin to need a session.
            db.execute(f"SELECT key FROM sessions WHERE key IN ({marks}) ORDER BY key {FOR_UPDATE}", keys).fetchall()
            ids = [session.id for session in sessions]
            query = f"SELECT rollout FROM attempts WHERE session IN ({marks}) ORDER BY rollout, attempt {FOR_UPDATE}"
            db.execute(query, ids).fetchall()
            db.execute(LOCK_FEEDS).fetchall()
            reasons = _find_new_reasons(db, sessions)
            if gone := [session for session in sessions if session.key not in reasons]:
                _release_attempts(db, [session.id for session in gone])
                self.delete_rows(db, [session.key for session in gone])
                insert_events(db, [new_event(session.id, "deleted", {"reason": "pruned"}) for session in gone])
        return Counter(reasons.values())

    def delete_rows(self, db: StoreConnection, keys: Sequence[int]) -> None:
        """Delete sessions with their recorded data and events, in the caller's transaction. Attempts and feed entries are kept."""
        marks = ",".join("?" * len(keys))
        for table in _SESSION_TABLES:
            db.execute(f"DELETE FROM {table} WHERE session IN ({marks})", keys)
        ids = [name for (name,) in db.execute(f"SELECT id FROM sessions WHERE key IN ({marks})", keys).fetchall()]
        db.execute(f"DELETE FROM sessions WHERE key IN ({marks})", keys)
        if ids:  # events are always changed last
            db.execute(f"DELETE FROM events WHERE session IN ({','.join('?' * len(ids))})", ids)


def _judge_age(session: OldSession, before: float) -> str:
    """Return why a session must be kept (open or too new), or an empty string if it ended before the time `before`."""
    if session.status == "open":
        return OPEN
    ended = max(session.closed or 0.0, session.recorded or 0.0)
    return "" if ended < before else TOO_NEW


def _find_new_reasons(db: StoreConnection, sessions: Sequence[OldSession]) -> dict[int, str]:
    """Return why sessions of a plan must be kept after all, by key: they are needed again, or they have changed since the plan."""
    keys = [session.key for session in sessions]
    found = db.execute(f"{_FACTS} WHERE key IN ({','.join('?' * len(keys))})", keys).fetchall()
    now = {row[0]: OldSession(*row[:-2]) for row in found}
    changed = {session.key: CHANGED for session in sessions if now.get(session.key) != session}
    return changed | _find_reasons(db, keys)


def _find_reasons(db: StoreConnection, keys: Sequence[int]) -> dict[int, str]:
    """Return, by session key, why a session is still needed: for a feed, or because its latest state has not been shipped.

    Other sessions are omitted.
    """
    marks = ",".join("?" * len(keys))
    filling = db.execute("SELECT name FROM filling JOIN feeds ON feeds.key=feed LIMIT 1").fetchone()
    if filling is not None:
        return dict.fromkeys(keys, f"feed {filling[0]!r} is still being filled with earlier outcomes")
    reasons = {
        key: f"it is waiting for the rest of its group in feed {feed!r}"
        if is_waiting
        else f"the trainer of feed {feed!r} has not committed it"
        for key, feed, is_waiting in db.execute(f"{_AWAITED} AND session IN ({marks})", keys).fetchall()
    }
    unshipped = db.execute(f"SELECT session FROM outbox WHERE session IN ({marks})", keys).fetchall()
    return reasons | {key: UNSHIPPED for (key,) in unshipped}


def _release_attempts(db: StoreConnection, ids: Sequence[str]) -> None:
    """For sessions that are being removed, delete the attempts whose rollouts have no name, and detach all other attempts.

    A settled attempt at a named rollout stays settled, so that the rollout is not run again. A running one is superseded.
    """
    marks = ",".join("?" * len(ids))
    db.execute(f"DELETE FROM attempts WHERE session IN ({marks}) AND rollout=session", ids)
    query = f"UPDATE attempts SET state='superseded', ended=? WHERE session IN ({marks}) AND state='running'"
    db.execute(query, (time.time(), *ids))
    db.execute(f"UPDATE attempts SET session='' WHERE session IN ({marks})", ids)


def _read_group(config: bytes, outcome: bytes | None) -> str:
    """Return the name of a session's group, or an empty string if it has none or the name cannot be read."""
    try:
        group = _config.decode(config).metadata.group if outcome is None else _outcome.decode(outcome).group
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
    return group if isinstance(group, str) else ""
