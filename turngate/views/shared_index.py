"""Update the shared store's lists of rollouts and groups from its events, in short transactions. Only one gateway at a time does so."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import cast

import msgspec

from turngate.store.outcomes import OutcomeClass
from turngate.store.queries import EventTotals, RawEvent
from turngate.store.shared import rollout_list
from turngate.store.shared.database import SharedConnection
from turngate.store.shared.rollout_list import ListedDelivery, ListedGroup, ListedRollout, ListState
from turngate.store.shared.store import SharedStore
from turngate.trace.advantage import is_too_large
from turngate.trace.tree import SampledInfo
from turngate.views.failures import remove_numbers
from turngate.views.groups import summarize_group
from turngate.views.rollout_entry import SILENT_S, RolloutEntry, RolloutRow, Status, decode_or
from turngate.views.rollout_index import DeliveryEvent, FenceEvent

_EVENTS = 10_000  # events per transaction
_SESSIONS = 200  # sessions per transaction while the lists are being filled
_LONG = 500  # maximum characters of a message by which failures are counted
_INDEXED = frozenset({"name", "team", "task", "agent", "model", "mode"})  # columns with names that runners choose
_MAX_INDEXED = 500  # maximum characters of an indexed name; PostgreSQL limits an index entry to about 2,700 bytes
_delivery_decoder = msgspec.json.Decoder(DeliveryEvent)
_fence_decoder = msgspec.json.Decoder(FenceEvent)
_info_decoder = msgspec.msgpack.Decoder(SampledInfo)


class ListUpdater:
    """Updates the shared store's lists of rollouts and groups. It has its own connection, so it never delays the gateway's other writes."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    def close(self) -> None:
        self._store.close()

    def update(self, seconds: float) -> bool:
        """Add new events to the lists until the lists are up to date or `seconds` have passed. Return whether they are up to date.

        If another process is updating the lists, return False immediately.
        """
        end = time.monotonic() + seconds
        while True:
            with self._store.database.writing() as db:
                assert isinstance(db, SharedConnection)
                state = rollout_list.claim_lists(db)
                if state is None:
                    return False
                is_complete = self._update(db, state)
            if is_complete or time.monotonic() >= end:
                return is_complete

    def _update(self, db: SharedConnection, state: ListState) -> bool:
        newest = self._store.events.newest()
        if state.newest < self._store.events.last_pruned() and state.newest < newest:  # some events were never read
            rollout_list.clear_lists(db)
            state = ListState(newest, 0)
        if state.filled is not None:
            return self._fill(db, state)
        last = min(newest, state.newest + _EVENTS)
        changed = rollout_list.find_changed(db, state.newest, last)
        self._list(db, [*changed, *rollout_list.find_silent(db, time.time() - SILENT_S)])
        self._list_gateway_events(db, rollout_list.find_gateway_events(db, state.newest, last))
        if last > state.newest:
            rollout_list.set_state(db, ListState(last, None))
        return last == newest

    def _fill(self, db: SharedConnection, state: ListState) -> bool:
        """Add the next sessions to lists that are being filled. Return whether the lists are up to date.

        Events that are written in the meantime are read once all sessions have been added.
        """
        assert state.filled is not None
        if not state.filled:
            self._list_gateway_events(db, rollout_list.find_gateway_events(db, 0, state.newest))
            self._list(db, rollout_list.find_unopened(db))
        page = rollout_list.find_sessions_after(db, state.filled, _SESSIONS)
        self._list(db, [session for _, session in page])
        rollout_list.set_state(db, ListState(state.newest, page[-1][0] if page else None))
        return not page and state.newest == self._store.events.newest()

    def _list(self, db: SharedConnection, ids: Sequence[str]) -> None:
        """Recompute the rows of these rollouts and of their groups."""
        if not ids:
            return
        unique = sorted(set(ids))
        groups = rollout_list.replace_rollouts(db, unique, self._build_rows(db, unique))
        if groups:
            members = rollout_list.read_groups(db, groups)
            rollout_list.replace_groups(
                db, groups, (_build_group(team, rows) for team, rows in groupby(members, lambda row: row.team))
            )

    def _build_rows(self, db: SharedConnection, ids: Sequence[str]) -> list[ListedRollout]:
        store, now = self._store, time.time()
        sessions = {session.id: session for session in store.queries.find_sessions(ids)}
        keys = [session.key for session in sessions.values()]
        outcomes, excluded = store.queries.outcomes(keys), store.attempts.explain_exclusions(keys)
        totals, stages = rollout_list.sum_sessions(db, ids), rollout_list.find_stages(db, ids)
        deleted, turn_ends = rollout_list.find_deleted(db, ids), rollout_list.find_turn_ends(db, keys)
        oldest = store.queries.oldest() if store.events.last_pruned() else None
        rows = []
        for name in ids:
            session = sessions.get(name)
            entry = RolloutEntry(RolloutRow(id=name))
            if session is not None:
                entry.row.excluded = excluded.get(session.key, "")
                entry.use_session(session, outcomes.get(session.key))
                self._use_totals(entry, totals.get(name), oldest)
                entry.row.version_start, entry.row.version_end = _read_versions(turn_ends.get(session.key))
            elif name in deleted or name not in stages:
                continue
            else:
                entry.use_first_stage(stages[name][0])
            if name in stages:
                entry.use_stage(stages[name][1])
            entry.row.status = entry.status_at(now)
            rows.append(_to_listed(entry))
        return rows

    def _use_totals(self, entry: RolloutEntry, totals: EventTotals | None, oldest: float | None) -> None:
        row = entry.row
        if totals is not None:
            row.turns, row.sampled_tokens, row.seen = totals.turns, totals.sampled_tokens, max(row.seen, totals.at)
        if oldest is not None and row.opened < oldest:  # some of its events were pruned
            counted = self._store.queries.count_turns(entry.key)
            row.turns, row.sampled_tokens = counted.turns, counted.sampled_tokens

    def _list_gateway_events(self, db: SharedConnection, events: Iterable[RawEvent]) -> None:
        for event in events:
            if event.kind == "delivery":
                delivery = decode_or(_delivery_decoder, event.data, None)
                if delivery is not None:
                    rollout_list.add_delivery(
                        db,
                        ListedDelivery(
                            event.seq,
                            delivery.feed,
                            delivery.number,
                            _fit_text("team", delivery.group),
                            delivery.rollouts,
                            event.time,
                        ),
                    )
            else:
                version = decode_or(_fence_decoder, event.data, FenceEvent()).version
                if version is not None:
                    rollout_list.add_version(db, version, event.time)


def _read_versions(ends: tuple[bytes, bytes] | None) -> tuple[int | None, int | None]:
    """Return the policy versions at the start of the first turn and at the end of the last turn.

    `ends` is the stored info of these two turns, or None if there are no turns. Without turns, or if the info of either turn is damaged,
    return None for both versions.
    """
    if ends is None:
        return None, None
    try:
        first, last = _info_decoder.decode(ends[0]), _info_decoder.decode(ends[1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, None
    return first.version_start, last.version_end


def _to_listed(entry: RolloutEntry) -> ListedRollout:
    row, (failure, message) = entry.row, entry.failure
    reward = row.counted_reward
    listed = ListedRollout(
        id=row.id,
        key=entry.key,
        name=row.name,
        team=row.group,
        task=row.task,
        task_kind=row.task_kind,
        batch=row.batch,
        agent=row.agent,
        agent_version=row.agent_version,
        model=row.model,
        mode=row.mode,
        sandbox=row.sandbox,
        attempt=row.attempt,
        status=row.status,
        stage=row.stage,
        kind=row.kind,
        reward=row.reward,
        resolved=row.resolved,
        stop=row.stop,
        message=row.message,
        warning=row.warning,
        excluded=row.excluded,
        opened=row.opened,
        closed=row.closed,
        seen=row.seen,
        turns=row.turns,
        sampled_tokens=row.sampled_tokens,
        version_start=row.version_start,
        version_end=row.version_end,
        recorded=entry.recorded,
        usable_reward=None if reward is None or is_too_large(reward) else reward,
        damage=entry.damage,
        failure=failure,
        failure_text=remove_numbers(message)[:_LONG],
        search_text=entry.build_search_text(),
    )
    fields = msgspec.structs.asdict(listed)
    fitting = {name: _fit_text(name, value) for name, value in fields.items() if isinstance(value, str)}
    return msgspec.structs.replace(listed, **fitting)


def _fit_text(field: str, text: str) -> str:
    """Return `text` as PostgreSQL can store it in this column: without null characters and, if the column is indexed, shortened."""
    return text.replace("\0", "\ufffd")[: _MAX_INDEXED if field in _INDEXED else None]


def to_row(listed: ListedRollout, now: float) -> RolloutRow:
    """Convert a listed rollout to the row that the web page shows."""
    return RolloutRow(
        id=listed.id,
        name=listed.name,
        group=listed.team,
        task=listed.task,
        task_kind=listed.task_kind,
        batch=listed.batch,
        agent=listed.agent,
        agent_version=listed.agent_version,
        model=listed.model,
        mode=listed.mode,
        sandbox=listed.sandbox,
        attempt=listed.attempt,
        status=cast("Status", listed.status),
        stage=listed.stage,
        kind=cast("OutcomeClass", listed.kind),
        reward=listed.reward,
        resolved=listed.resolved,
        stop=listed.stop,
        message=listed.message,
        warning=listed.warning,
        excluded=listed.excluded,
        opened=listed.opened,
        closed=listed.closed,
        seen=listed.seen,
        seconds=round(max(0.0, (listed.closed or now) - listed.opened), 3),
        turns=listed.turns,
        sampled_tokens=listed.sampled_tokens,
        version_start=listed.version_start,
        version_end=listed.version_end,
    )


def _build_group(team: str, members: Iterable[ListedRollout]) -> ListedGroup:
    group = summarize_group(team, [to_row(member, member.seen) for member in members])
    return ListedGroup(
        team=team,
        task=group.task,
        agent=group.agent,
        model=group.model,
        rollouts=group.rollouts,
        running=group.running,
        mean_reward=group.mean_reward,
        pass_at_1=group.pass_at_1,
        opened=group.opened,
        latest=group.latest,
        search_text=f"{team}\n{group.agent}\n{group.model}".casefold(),
        summary=msgspec.json.encode(group),
    )
