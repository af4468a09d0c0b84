"""An index of all rollouts, built from sessions, outcomes and events, never from a trace."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from turngate.store.outcomes import OutcomeClass
from turngate.store.queries import RawEvent, RawSession
from turngate.store.sqlite import Store
from turngate.types import BATCH_STREAM, Json, Mode

T = TypeVar("T")
Else = TypeVar("Else")
Status = Literal["starting", "running", "finishing", "done", "cancelled"]
STATUSES: tuple[Status, ...] = ("starting", "running", "finishing", "done", "cancelled")
ACTIVE_STATUSES: tuple[Status, ...] = ("starting", "running", "finishing")
DONE = "done"  # the last stage that a runner reports
DAMAGED = "its outcome is damaged on disk"
BUCKET_S = 10.0  # of time, in which turns are counted together
CHUNK = 1000  # rollouts between two pauses for other threads
_PAGE = 2000  # sessions or events that are read at once
_SILENT_S = 3600.0  # after which a runner that reported no end counts as gone
_DELIVERIES = 10_000  # that are remembered at most
_LONG = 2000  # characters of a message in a list
_YIELD_S = 0.0002  # between two pieces of work: serving calls comes first


class RolloutRow(msgspec.Struct, kw_only=True, rename={"kind": "class"}):
    """One rollout in a list."""

    id: str
    name: str = ""
    group: str = ""
    task: str = ""
    batch: str = ""
    agent: str = ""
    agent_version: str = ""
    model: str = ""
    mode: str = ""
    sandbox: str = ""
    attempt: int = 1
    status: Status = "starting"
    stage: str = ""
    kind: OutcomeClass | Literal[""] = ""
    reward: float | None = None
    resolved: bool | None = None
    stop: str = ""
    message: str = ""
    opened: float = 0.0
    closed: float | None = None
    seen: float = 0.0
    seconds: float = 0.0
    turns: int = 0
    sampled_tokens: int = 0
    version_start: int | None = None
    version_end: int | None = None


class _OutcomeSummary(msgspec.Struct, frozen=True):
    """The fields of an outcome that a list needs; decoding skips the rest."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    message: str = ""
    group: str = ""
    task: str = ""
    attempt: int = 1


class _SessionSettings(msgspec.Struct, frozen=True):
    """The settings of a session that a list needs."""

    model: str = ""
    mode: Mode = "exact"
    metadata: dict[str, Json] = {}


class _StageEvent(msgspec.Struct, frozen=True):
    """A runner's report of a stage. Any client may send one with any content, so every field is optional."""

    stage: Json = ""
    rollout: Json = ""
    attempt: Json = 1
    task: Json = ""
    group: Json = ""
    agent: Json = ""
    model: Json = ""
    batch: Json = ""
    status: Json = ""
    kind: Annotated[Json, msgspec.Meta(description="of the last stage")] = msgspec.field(default=None, name="class")
    message: Json = ""


class _TurnEvent(msgspec.Struct, frozen=True):
    finish: str = ""
    sampled_tokens: int = 0


class _FenceEvent(msgspec.Struct, frozen=True):
    version: int | None = None


class _DeliveryEvent(msgspec.Struct, frozen=True):
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


_outcome_decoder = msgspec.json.Decoder(_OutcomeSummary)
_settings_decoder = msgspec.json.Decoder(_SessionSettings)
_stage_decoder = msgspec.json.Decoder(_StageEvent)
_turn_decoder = msgspec.json.Decoder(_TurnEvent)
_fence_decoder = msgspec.json.Decoder(_FenceEvent)
_delivery_decoder = msgspec.json.Decoder(_DeliveryEvent)


class RolloutEntry:
    """One rollout: its row, and what the row is computed from."""

    __slots__ = ("damage", "done", "found", "key", "recorded", "row", "state", "versions_of")

    def __init__(self, row: RolloutRow) -> None:
        self.row = row
        self.key = 0  # of its session; 0: it has none yet
        self.state = ""  # of that session
        self.damage = ""  # what of it cannot be read
        self.done = ""  # the end that its runner reported; empty: none yet
        self.recorded: float | None = None  # the time of its outcome
        self.versions_of = 0, 0  # turns and tokens at the time when its versions were read
        self.found = ""  # the text to search in; empty: not built yet


class RolloutIndex:
    """The rollouts of one data folder. `refresh` reads everything at first, and then only new events."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._cursor = -1  # -1: nothing was read yet
        self.entries: dict[str, RolloutEntry] = {}
        self.spans: dict[int, list[int]] = {}  # turns, tokens, outcomes
        self.versions: list[tuple[float, int]] = []  # when each came into force
        self.deliveries: list[DeliveryRecord] = []
        self.whole = True  # events go back to the beginning
        self._gone: set[str] = set()  # ids of deleted sessions that no other session has

    # ── being up to date ────────────────────────────────────────────────────────────────────────────────────────

    def refresh(self, store: Store) -> int:
        """Read what is new. Returns the number of the last event that was read."""
        with store.snapshot():
            newest = store.events.newest()
            # Events that were removed before they were read are lost: build it again.
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
        self._take_sessions(store)
        self.whole = self._is_whole(store)
        self._gone = {session for session in survey.list_deleted() if session not in self.entries}
        for heard in survey.sum_events():
            kept = self.entries.get(heard.session)
            if kept is not None:
                kept.row.turns, kept.row.sampled_tokens = heard.turns, heard.sampled_tokens
                kept.row.seen = max(kept.row.seen, heard.at)
        if not self.whole:
            self._count_old(store, oldest)
        yield_interpreter()
        for number, fact in enumerate(survey.last_stages()):
            if number % _PAGE == 0:
                yield_interpreter()
            self._take_stage(fact, store)
        for moment in survey.bucket_events(BUCKET_S):
            self.spans[moment.number] = [moment.turns, moment.sampled_tokens, moment.outcomes]
        for fact in survey.list_gateway_events(("fence", "delivery")):
            self._take_gateway(fact)

    def _is_whole(self, store: Store) -> bool:
        """Whether no event was removed for its age. Events of deleted sessions do not count; a folder of an older version has sessions
        without events."""
        oldest = min(self.entries.values(), key=lambda one: one.key, default=None)
        return not store.events.last_pruned() and (oldest is None or store.queries.has_opened_event(oldest.row.id))

    def _count_old(self, store: Store, oldest: float | None) -> None:
        """Count the turns of sessions whose first events were removed, in their traces."""
        for kept in self.entries.values():
            if kept.key and (oldest is None or kept.row.opened < oldest):
                yield_interpreter()
                counted = store.queries.count_turns(kept.key)
                kept.row.turns, kept.row.sampled_tokens = counted.turns, counted.sampled_tokens

    def _follow(self, store: Store) -> None:
        changed: dict[str, None] = {}  # sessions to read again
        while page := store.queries.list_events_after(self._cursor, _PAGE):
            for fact in page:
                self._take(fact, changed, store)
            self._cursor = page[-1].seq
            if len(page) < _PAGE:
                break
            yield_interpreter()
        if changed:
            sessions = store.queries.find_sessions(list(changed))
            there = {session.id for session in sessions}
            for gone in changed.keys() - there:
                if (kept := self.entries.get(gone)) is not None and kept.key:
                    del self.entries[gone]
            self._take_in(sessions, store)

    def _take(self, fact: RawEvent, changed: dict[str, None], store: Store) -> None:
        kept = self.entries.get(fact.session)
        if kept is None and fact.kind == "opened":  # its first turn may come before the session is read
            kept = self.entries[fact.session] = RolloutEntry(RolloutRow(id=fact.session, opened=fact.time))
            self._gone.discard(fact.session)
        if kept is not None:
            kept.row.seen = max(kept.row.seen, fact.time)
        match fact.kind:
            case "turn":
                turn = _decode_or(_turn_decoder, fact.data, _TurnEvent(finish="abort"))
                counts = turn.finish != "abort"
                if kept is not None:
                    kept.row.turns += counts
                    kept.row.sampled_tokens += turn.sampled_tokens
                span = self._span(fact.time)
                span[0] += counts
                span[1] += turn.sampled_tokens
            case "stage":
                self._take_stage(fact, store)
            case "opened" | "sealed" | "cancelled" | "limit":
                changed[fact.session] = None
            case "outcome":
                changed[fact.session] = None
                self._span(fact.time)[2] += 1
            case "deleted":
                self.entries.pop(fact.session, None)
                changed.pop(fact.session, None)
                self._gone.add(fact.session)
            case "fence" | "delivery":
                self._take_gateway(fact)

    def _span(self, at: float) -> list[int]:
        return self.spans.setdefault(int(at / BUCKET_S), [0, 0, 0])

    def _take_sessions(self, store: Store) -> None:
        after = 0
        while page := store.queries.sessions(after, _PAGE):
            self._take_in(page, store)
            after = page[-1].key
            yield_interpreter()

    def _take_in(self, sessions: Sequence[RawSession], store: Store) -> None:
        outcomes = store.queries.outcomes([session.key for session in sessions])
        for session in sessions:
            kept = self.entries.get(session.id)
            if kept is None or kept.key not in (0, session.key):  # an id may be reused after its session was deleted
                kept = self.entries[session.id] = RolloutEntry(RolloutRow(id=session.id))
            self._settle(kept, session, outcomes.get(session.key))

    def _settle(self, kept: RolloutEntry, session: RawSession, outcome: tuple[float, bytes] | None) -> None:
        row = kept.row
        kept.key, kept.state, kept.found = session.key, session.status, ""
        row.opened, row.closed, row.stop = session.opened, session.closed, session.stop
        row.seen = max(row.seen, session.closed or session.opened)
        config = _decode_or(_settings_decoder, session.config, _SessionSettings())
        told = config.metadata
        row.model, row.mode = config.model, config.mode
        row.name = _text(told.get("rollout")) or row.name
        row.group, row.task = _text(told.get("group")) or row.group, _text(told.get("task")) or row.task
        row.agent, row.agent_version = _text(told.get("agent")), _text(told.get("agent_version"))
        row.sandbox, row.batch = _text(told.get("sandbox")), _text(told.get("batch")) or row.batch
        row.attempt = _positive_int(told.get("attempt"))
        if outcome is not None:
            kept.recorded, written = outcome
            row.seen = max(row.seen, kept.recorded)
            recorded = _decode_or(_outcome_decoder, written, None)
            if recorded is None:  # its grade is lost
                row.kind, row.reward, row.resolved = "", None, None
                row.message = kept.damage = DAMAGED
                return
            kept.damage = ""
            row.kind, row.reward, row.resolved = recorded.kind, recorded.reward, recorded.resolved
            row.message, row.attempt = recorded.message[:_LONG], recorded.attempt
            row.group, row.task = recorded.group or row.group, recorded.task or row.task

    def _take_stage(self, fact: RawEvent, store: Store) -> None:
        if not fact.session or fact.session.startswith(BATCH_STREAM):
            return  # not of a rollout
        told = _decode_or(_stage_decoder, fact.data, _StageEvent())
        kept = self.entries.get(fact.session)
        if kept is None and fact.session in self._gone:
            return  # its runner goes on reporting, but its session was deleted
        if kept is None:
            kept = self.entries[fact.session] = RolloutEntry(RolloutRow(id=fact.session, opened=fact.time))
            begun = store.queries.first_stage(fact.session)
            if begun is not None:
                kept.row.opened = begun.time
                self._describe(kept.row, _decode_or(_stage_decoder, begun.data, _StageEvent()))
        kept.row.stage, kept.row.seen, kept.found = _text(told.stage), max(kept.row.seen, fact.time), ""
        self._describe(kept.row, told)
        if told.stage == DONE:
            kept.done = _text(told.status) or "finished"
            if not kept.key:
                kept.row.closed = fact.time
            if (
                not kept.row.kind
                and not kept.damage
                and told.kind in ("graded", "agent failed", "invalid task", "infrastructure fault")
            ):
                kept.row.kind = told.kind
            kept.row.message = kept.row.message or _text(told.message)[:_LONG]

    def _describe(self, row: RolloutRow, told: _StageEvent) -> None:
        """Fill in what a runner reports of a rollout that has no session yet, and may never have one."""
        row.name = row.name or _text(told.rollout)
        row.task, row.agent, row.model = (
            row.task or _text(told.task),
            row.agent or _text(told.agent),
            row.model or _text(told.model),
        )
        row.group, row.batch = row.group or _text(told.group), row.batch or _text(told.batch)
        row.attempt = max(row.attempt, _positive_int(told.attempt))

    def _take_gateway(self, fact: RawEvent) -> None:
        if fact.kind == "fence":
            version = _decode_or(_fence_decoder, fact.data, _FenceEvent()).version
            if version is not None and (not self.versions or version > self.versions[-1][1]):
                self.versions.append((fact.time, version))
            return
        one = _decode_or(_delivery_decoder, fact.data, None)
        if one is None:
            return
        self.deliveries.append(
            DeliveryRecord(feed=one.feed, number=one.number, group=one.group, rollouts=one.rollouts, at=fact.time)
        )
        if len(self.deliveries) > _DELIVERIES:
            del self.deliveries[: _DELIVERIES // 2]

    # ── one row ─────────────────────────────────────────────────────────────────────────────────────────────────

    def refresh_row(self, kept: RolloutEntry, now: float, store: Store) -> RolloutRow:
        """Bring a rollout's row up to date and return it. Its versions are read only here, since few rows are shown."""
        row = kept.row
        row.status = _status(kept, now)
        row.seconds = round(max(0.0, (row.closed or now) - row.opened), 3)
        sampled = row.turns, row.sampled_tokens  # an aborted turn has tokens but does not count as a turn
        if kept.key and sampled != kept.versions_of:
            found = store.queries.versions(kept.key)
            row.version_start, row.version_end = found or (None, None)
            kept.versions_of = sampled
        return row

    def all(self, now: float) -> Iterator[RolloutEntry]:
        """All rollouts with their current status. Pauses in between, so that calls are served."""
        for number, kept in enumerate(self.entries.values(), 1):
            kept.row.status = _status(kept, now)
            yield kept
            if number % CHUNK == 0:
                yield_interpreter()

    def version_at(self, at: float) -> int | None:
        """The policy version at a time; None if it is no longer known."""
        place = bisect_right(self.versions, at, key=lambda one: one[0])
        if place:
            return self.versions[place - 1][1]
        return 0 if self.whole else None

    def by_group(self) -> dict[str, list[RolloutEntry]]:
        found: dict[str, list[RolloutEntry]] = {}
        for kept in self.entries.values():
            if kept.row.group:
                found.setdefault(kept.row.group, []).append(kept)
        return found


def _status(kept: RolloutEntry, now: float) -> Status:
    if not kept.key:
        if kept.done:
            return "cancelled" if kept.done == "cancelled" else "done"
        return "starting" if now - kept.row.seen < _SILENT_S else "done"
    if kept.state == "open":
        return "running"
    if kept.state == "cancelled":
        return "cancelled"
    told_all = kept.recorded is not None or kept.done or not kept.row.stage
    return "done" if told_all or now - kept.row.seen > _SILENT_S else "finishing"


def _decode_or(decoder: msgspec.json.Decoder[T], written: bytes, otherwise: Else) -> T | Else:
    """Decode stored JSON. Returns `otherwise` if it is damaged on disk, so that the list goes on without it."""
    try:
        return decoder.decode(written)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return otherwise


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _positive_int(value: Json) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def yield_interpreter() -> None:
    """Let the thread that serves calls run. Without this, it would get the interpreter only every few milliseconds."""
    time.sleep(_YIELD_S)
