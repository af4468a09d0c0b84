"""An in-memory index of all rollouts, built from sessions, outcomes and events. Whole traces are read only if events are missing."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from turngate.store.queries import RawEvent, RawSession
from turngate.store.store import Store
from turngate.types import BATCH_STREAM
from turngate.views.rollout_entry import RolloutEntry, RolloutRow, decode_or

BUCKET_S = 10.0  # turns are counted per interval of this length
CHUNK = 1000  # rollouts to process before yielding to other threads
_PAGE = 2000  # sessions or events per query
_DELIVERIES = 10_000  # maximum number kept
_YIELD_S = 0.0002  # pause that lets the thread that serves calls run


class _TurnEvent(msgspec.Struct, frozen=True):
    finish: str = ""
    sampled_tokens: int = 0


class FenceEvent(msgspec.Struct, frozen=True):
    version: int | None = None


class DeliveryEvent(msgspec.Struct, frozen=True):
    feed: str
    number: int
    group: str
    rollouts: int


class DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True):
    feed: str
    number: int
    group: str
    rollouts: int
    at: float


_turn_decoder = msgspec.json.Decoder(_TurnEvent)
_fence_decoder = msgspec.json.Decoder(FenceEvent)
_delivery_decoder = msgspec.json.Decoder(DeliveryEvent)


class RolloutIndex:
    """The rollouts of one data folder.

    The first `refresh` reads everything. Later ones read only new events and the sessions that these events changed, unless some events
    were pruned before they were read, or the newest events were lost, for example because the store was restored from a backup.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._cursor = -1  # number of the last event that was read; -1 before the first `refresh`
        self.entries: dict[str, RolloutEntry] = {}
        self.spans: dict[int, list[int]] = {}  # turns, tokens and outcomes by time interval
        self.versions: list[tuple[float, int]] = []  # time at which each version became active
        self.deliveries: list[DeliveryRecord] = []
        self.whole = True  # whether all events still exist; see `_is_whole`
        self._gone: set[str] = set()  # ids of deleted sessions that no new session uses

    # ── updates ────────────────────────────────────────────────────────────────────────────────────────────────

    def refresh(self, store: Store) -> int:
        """Read new events, and return the number of the last event."""
        with store.snapshot():
            newest = store.events.newest()
            # Rebuild the index if the newest events were lost, or if events were pruned before they were read.
            if self._cursor < 0 or newest < self._cursor or self._cursor < store.events.last_pruned():
                self._clear()
                self._build(store)
                self._cursor = newest
            else:
                self._follow(store)
        return self._cursor

    def _build(self, store: Store) -> None:
        survey = store.queries
        oldest = survey.oldest()
        self._load_sessions(store)
        self.whole = self._is_whole(store)
        self._gone = {session for session in survey.list_deleted() if session not in self.entries}
        for totals in survey.sum_events():
            entry = self.entries.get(totals.session)
            if entry is not None:
                entry.row.turns, entry.row.sampled_tokens = totals.turns, totals.sampled_tokens
                entry.row.seen = max(entry.row.seen, totals.at)
        if not self.whole:
            self._count_pruned_turns(store, oldest)
        yield_interpreter()
        for number, event in enumerate(survey.last_stages()):
            if number % _PAGE == 0:
                yield_interpreter()
            self._apply_stage(event, store)
        for moment in survey.bucket_events(BUCKET_S):
            self.spans[moment.number] = [moment.turns, moment.sampled_tokens, moment.outcomes]
        for event in survey.list_gateway_events(("fence", "delivery")):
            self._apply_gateway_event(event)

    def _is_whole(self, store: Store) -> bool:
        """Return whether all events still exist, except those of deleted sessions. Old events may have been pruned.

        In a data folder that an older version created, some events are always missing, because that version did not write events.
        """
        oldest = min(self.entries.values(), key=lambda entry: entry.key, default=None)
        return not store.events.last_pruned() and (oldest is None or store.queries.has_opened_event(oldest.row.id))

    def _count_pruned_turns(self, store: Store, oldest: float | None) -> None:
        """Count the turns and sampled tokens in the traces of the sessions whose first events are missing."""
        for entry in self.entries.values():
            if entry.key and (oldest is None or entry.row.opened < oldest):
                yield_interpreter()
                counted = store.queries.count_turns(entry.key)
                entry.row.turns, entry.row.sampled_tokens = counted.turns, counted.sampled_tokens

    def _follow(self, store: Store) -> None:
        changed: dict[str, None] = {}  # sessions to read again
        while page := store.queries.list_events_after(self._cursor, _PAGE):
            for event in page:
                self._apply(event, changed, store)
            self._cursor = page[-1].seq
            if len(page) < _PAGE:
                break
            yield_interpreter()
        if changed:
            sessions = store.queries.find_sessions(list(changed))
            existing = {session.id for session in sessions}
            for gone in changed.keys() - existing:
                if (entry := self.entries.get(gone)) is not None and entry.key:
                    del self.entries[gone]
            self._update_sessions(sessions, store)

    def _apply(self, event: RawEvent, changed: dict[str, None], store: Store) -> None:
        entry = self.entries.get(event.session)
        if entry is None and event.kind == "opened":  # its first turn may be counted before the session is read
            entry = self.entries[event.session] = RolloutEntry(RolloutRow(id=event.session, opened=event.time))
            self._gone.discard(event.session)
        if entry is not None:
            entry.row.seen = max(entry.row.seen, event.time)
        match event.kind:
            case "turn":
                turn = decode_or(_turn_decoder, event.data, _TurnEvent(finish="abort"))
                counts = turn.finish != "abort"
                if entry is not None:
                    entry.row.turns += counts
                    entry.row.sampled_tokens += turn.sampled_tokens
                span = self._span(event.time)
                span[0] += counts
                span[1] += turn.sampled_tokens
            case "stage":
                self._apply_stage(event, store)
            case "opened" | "sealed" | "cancelled" | "superseded" | "limit":
                changed[event.session] = None
            case "outcome":
                changed[event.session] = None
                self._span(event.time)[2] += 1
            case "deleted":
                self.entries.pop(event.session, None)
                changed.pop(event.session, None)
                self._gone.add(event.session)
            case "fence" | "delivery":
                self._apply_gateway_event(event)

    def _span(self, at: float) -> list[int]:
        return self.spans.setdefault(int(at / BUCKET_S), [0, 0, 0])

    def _load_sessions(self, store: Store) -> None:
        after = 0
        while page := store.queries.sessions(after, _PAGE):
            self._update_sessions(page, store)
            after = page[-1].key
            yield_interpreter()

    def _update_sessions(self, sessions: Sequence[RawSession], store: Store) -> None:
        keys = [session.key for session in sessions]
        outcomes, excluded = store.queries.outcomes(keys), store.attempts.explain_exclusions(keys)
        for session in sessions:
            entry = self.entries.get(session.id)
            if entry is None or entry.key not in (0, session.key):  # an id may be reused after its session was deleted
                entry = self.entries[session.id] = RolloutEntry(RolloutRow(id=session.id))
            entry.row.excluded = excluded.get(session.key, "")
            entry.use_session(session, outcomes.get(session.key))

    def _apply_stage(self, event: RawEvent, store: Store) -> None:
        if not event.session or event.session.startswith(BATCH_STREAM):
            return  # not a rollout's event
        entry = self.entries.get(event.session)
        if entry is None and event.session in self._gone:
            return  # its runner still reports stages, but its session was deleted
        if entry is None:
            entry = self.entries[event.session] = RolloutEntry(RolloutRow(id=event.session, opened=event.time))
            first = store.queries.first_stage(event.session)
            if first is not None:
                entry.use_first_stage(first)
        entry.use_stage(event)

    def _apply_gateway_event(self, event: RawEvent) -> None:
        if event.kind == "fence":
            version = decode_or(_fence_decoder, event.data, FenceEvent()).version
            if version is not None and (not self.versions or version > self.versions[-1][1]):
                self.versions.append((event.time, version))
            return
        delivery = decode_or(_delivery_decoder, event.data, None)
        if delivery is None:
            return
        self.deliveries.append(
            DeliveryRecord(
                feed=delivery.feed,
                number=delivery.number,
                group=delivery.group,
                rollouts=delivery.rollouts,
                at=event.time,
            )
        )
        if len(self.deliveries) > _DELIVERIES:
            del self.deliveries[: _DELIVERIES // 2]

    # ── one row ─────────────────────────────────────────────────────────────────────────────────────────────────

    def refresh_row(self, entry: RolloutEntry, now: float, store: Store) -> RolloutRow:
        """Update a rollout's row and return it. Only this method reads the policy versions, because that takes one query per rollout."""
        row = entry.row
        row.status = entry.status_at(now)
        row.seconds = round(max(0.0, (row.closed or now) - row.opened), 3)
        sampled = row.turns, row.sampled_tokens  # an aborted turn adds tokens but is not counted as a turn
        if entry.key and sampled != entry.versions_of:
            versions = store.queries.versions(entry.key)
            row.version_start, row.version_end = versions or (None, None)
            entry.versions_of = sampled
        return row

    def all(self, now: float) -> Iterator[RolloutEntry]:
        """Yield all rollouts with their status at the time `now`. Pause regularly, so that calls are served."""
        for number, entry in enumerate(self.entries.values(), 1):
            entry.row.status = entry.status_at(now)
            yield entry
            if number % CHUNK == 0:
                yield_interpreter()

    def version_at(self, at: float) -> int | None:
        """Return the policy version that was active at a given time, or None if it is no longer known."""
        place = bisect_right(self.versions, at, key=lambda change: change[0])
        if place:
            return self.versions[place - 1][1]
        return 0 if self.whole else None

    def by_group(self) -> dict[str, list[RolloutEntry]]:
        groups: dict[str, list[RolloutEntry]] = {}
        for entry in self.entries.values():
            if entry.row.group:
                groups.setdefault(entry.row.group, []).append(entry)
        return groups


def yield_interpreter() -> None:
    """Let the thread that serves calls run. Without such pauses, it would run only every few milliseconds."""
    time.sleep(_YIELD_S)
