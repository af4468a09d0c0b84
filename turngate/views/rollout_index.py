"""What is known of every rollout, and how it is kept up to date: sessions, outcomes and events, never a trace."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from turngate.store.outcome import Class
from turngate.store.queries import Fact, SurveyedSession
from turngate.store.sqlite import Store
from turngate.types import BATCH_STREAM, Json, Mode

T = TypeVar("T")
Else = TypeVar("Else")
Status = Literal["starting", "running", "finishing", "done", "cancelled"]
STATUSES: tuple[Status, ...] = ("starting", "running", "finishing", "done", "cancelled")
UNDER_WAY: tuple[Status, ...] = ("starting", "running", "finishing")
DONE = "done"  # the stage that a runner tells last
DAMAGED = "its outcome is damaged on disk"
SPAN_S = 10.0  # of time, in which turns are counted together
SOME = 1000  # rollouts that are looked at in one go
_PAGE = 2000  # sessions or events that are read at once
_SILENT_S = 3600.0  # after which a runner that told no end is taken for gone
_DELIVERIES = 10_000  # that are remembered at most
_LONG = 2000  # characters of a message in a list
_YIELD_S = 0.0002  # between two pieces of work: whoever serves calls comes first


class Row(msgspec.Struct, kw_only=True, rename={"kind": "class"}):
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
    kind: Class | Literal[""] = ""
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


class _Told(msgspec.Struct, frozen=True):
    """What a list needs of an outcome; the rest of it is passed over."""

    kind: Class
    reward: float | None = None
    resolved: bool | None = None
    message: str = ""
    group: str = ""
    task: str = ""
    attempt: int = 1


class _Config(msgspec.Struct, frozen=True):
    """Likewise, of a session's settings."""

    model: str = ""
    mode: Mode = "exact"
    metadata: dict[str, Json] = {}


class _Stage(msgspec.Struct, frozen=True):
    """What runners tell of a stage. Whoever announces may say anything, so nothing is taken for granted."""

    stage: Json = ""
    rollout: Json = ""
    attempt: Json = 1
    task: Json = ""
    group: Json = ""
    agent: Json = ""
    model: Json = ""
    batch: Json = ""
    status: Json = ""
    kind: Annotated[Json, msgspec.Meta(description="of the last one")] = msgspec.field(default=None, name="class")
    message: Json = ""


class _Turn(msgspec.Struct, frozen=True):
    finish: str = ""
    sampled_tokens: int = 0


class _Fence(msgspec.Struct, frozen=True):
    version: int | None = None


class _Delivery(msgspec.Struct, frozen=True):
    feed: str
    number: int
    group: str
    rollouts: int


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    feed: str
    number: int
    group: str
    rollouts: int
    at: float


_told = msgspec.json.Decoder(_Told)
_config = msgspec.json.Decoder(_Config)
_stage = msgspec.json.Decoder(_Stage)
_turn = msgspec.json.Decoder(_Turn)
_fence = msgspec.json.Decoder(_Fence)
_delivery = msgspec.json.Decoder(_Delivery)


class Kept:
    """One rollout: the row, and what it is made of."""

    __slots__ = ("damage", "done", "found", "key", "recorded", "row", "state", "versions_of")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.key = 0  # of its session; 0: none is open yet
        self.state = ""  # of that session
        self.damage = ""  # what of it cannot be read
        self.done = ""  # how its runner said that it ended; empty: it has not said so
        self.recorded: float | None = None  # when its outcome was
        self.versions_of = 0, 0  # turns and tokens, when its versions were looked up
        self.found = ""  # what text is looked for in; empty: to be put together


class Known:
    """Of one data folder. Made empty; `refresh` reads what there is, and then what happened since."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._cursor = -1  # -1: nothing was read yet
        self.kept: dict[str, Kept] = {}
        self.spans: dict[int, list[int]] = {}  # turns, tokens, outcomes
        self.versions: list[tuple[float, int]] = []  # when each came into force
        self.deliveries: list[Delivered] = []
        self.whole = True  # events go back to the beginning
        self._gone: set[str] = set()  # ids whose session was deleted, and that nobody has taken again

    # ── being up to date ────────────────────────────────────────────────────────────────────────────────────────

    def refresh(self, store: Store) -> int:
        """The cursor of what it knows now."""
        with store.at_once():
            newest = store.events.newest()
            # What was removed before it was followed is never told again.
            if self._cursor < 0 or newest < self._cursor or self._cursor < store.events.pruned():
                self._clear()
                self._build(store)
                self._cursor = newest
            else:
                self._follow(store)
        return self._cursor

    def _build(self, store: Store) -> None:
        survey = store.survey
        oldest = survey.oldest()
        self._take_sessions(store)
        self.whole = self._is_whole(store)
        self._gone = {session for session in survey.deleted() if session not in self.kept}
        for heard in survey.heard():
            kept = self.kept.get(heard.session)
            if kept is not None:
                kept.row.turns, kept.row.sampled_tokens = heard.turns, heard.sampled_tokens
                kept.row.seen = max(kept.row.seen, heard.at)
        if not self.whole:
            self._count_old(store, oldest)
        breathe()
        for number, fact in enumerate(survey.last_stages()):
            if number % _PAGE == 0:
                breathe()
            self._take_stage(fact, store)
        for moment in survey.moments(SPAN_S):
            self.spans[moment.number] = [moment.turns, moment.sampled_tokens, moment.outcomes]
        for fact in survey.of_kinds(("fence", "delivery")):
            self._take_gateway(fact)

    def _is_whole(self, store: Store) -> bool:
        """Whether nothing was removed for its age. What went with a deleted session is missed by nobody; a folder of an older version
        has sessions that nothing was told of."""
        oldest = min(self.kept.values(), key=lambda one: one.key, default=None)
        return not store.events.pruned() and (oldest is None or store.survey.was_told_of(oldest.row.id))

    def _count_old(self, store: Store, oldest: float | None) -> None:
        """Of sessions whose first events were removed, turns are counted in the trace."""
        for kept in self.kept.values():
            if kept.key and (oldest is None or kept.row.opened < oldest):
                breathe()
                counted = store.survey.counted(kept.key)
                kept.row.turns, kept.row.sampled_tokens = counted.turns, counted.sampled_tokens

    def _follow(self, store: Store) -> None:
        changed: dict[str, None] = {}  # sessions that are to be read again
        while page := store.survey.past(self._cursor, _PAGE):
            for fact in page:
                self._take(fact, changed, store)
            self._cursor = page[-1].seq
            if len(page) < _PAGE:
                break
            breathe()
        if changed:
            sessions = store.survey.named(list(changed))
            there = {session.id for session in sessions}
            for gone in changed.keys() - there:
                if (kept := self.kept.get(gone)) is not None and kept.key:
                    del self.kept[gone]
            self._take_in(sessions, store)

    def _take(self, fact: Fact, changed: dict[str, None], store: Store) -> None:
        kept = self.kept.get(fact.session)
        if kept is None and fact.kind == "opened":  # its first turn may come before it is read
            kept = self.kept[fact.session] = Kept(Row(id=fact.session, opened=fact.time))
            self._gone.discard(fact.session)
        if kept is not None:
            kept.row.seen = max(kept.row.seen, fact.time)
        match fact.kind:
            case "turn":
                turn = _read(_turn, fact.data, _Turn(finish="abort"))
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
                self.kept.pop(fact.session, None)
                changed.pop(fact.session, None)
                self._gone.add(fact.session)
            case "fence" | "delivery":
                self._take_gateway(fact)

    def _span(self, at: float) -> list[int]:
        return self.spans.setdefault(int(at / SPAN_S), [0, 0, 0])

    def _take_sessions(self, store: Store) -> None:
        after = 0
        while page := store.survey.sessions(after, _PAGE):
            self._take_in(page, store)
            after = page[-1].key
            breathe()

    def _take_in(self, sessions: Sequence[SurveyedSession], store: Store) -> None:
        outcomes = store.survey.outcomes([session.key for session in sessions])
        for session in sessions:
            kept = self.kept.get(session.id)
            if kept is None or kept.key not in (0, session.key):  # an id is used again when its session was deleted
                kept = self.kept[session.id] = Kept(Row(id=session.id))
            self._settle(kept, session, outcomes.get(session.key))

    def _settle(self, kept: Kept, session: SurveyedSession, outcome: tuple[float, bytes] | None) -> None:
        row = kept.row
        kept.key, kept.state, kept.found = session.key, session.status, ""
        row.opened, row.closed, row.stop = session.opened, session.closed, session.stop
        row.seen = max(row.seen, session.closed or session.opened)
        config = _read(_config, session.config, _Config())
        told = config.metadata
        row.model, row.mode = config.model, config.mode
        row.name = _text(told.get("rollout")) or row.name
        row.group, row.task = _text(told.get("group")) or row.group, _text(told.get("task")) or row.task
        row.agent, row.agent_version = _text(told.get("agent")), _text(told.get("agent_version"))
        row.sandbox, row.batch = _text(told.get("sandbox")), _text(told.get("batch")) or row.batch
        row.attempt = _count(told.get("attempt"))
        if outcome is not None:
            kept.recorded, written = outcome
            row.seen = max(row.seen, kept.recorded)
            recorded = _read(_told, written, None)
            if recorded is None:  # nobody knows any more how it was judged
                row.kind, row.reward, row.resolved = "", None, None
                row.message = kept.damage = DAMAGED
                return
            kept.damage = ""
            row.kind, row.reward, row.resolved = recorded.kind, recorded.reward, recorded.resolved
            row.message, row.attempt = recorded.message[:_LONG], recorded.attempt
            row.group, row.task = recorded.group or row.group, recorded.task or row.task

    def _take_stage(self, fact: Fact, store: Store) -> None:
        if not fact.session or fact.session.startswith(BATCH_STREAM):
            return  # of no rollout
        told = _read(_stage, fact.data, _Stage())
        kept = self.kept.get(fact.session)
        if kept is None and fact.session in self._gone:
            return  # its runner goes on telling; there is nothing to show any more
        if kept is None:
            kept = self.kept[fact.session] = Kept(Row(id=fact.session, opened=fact.time))
            begun = store.survey.first_stage(fact.session)
            if begun is not None:
                kept.row.opened = begun.time
                self._describe(kept.row, _read(_stage, begun.data, _Stage()))
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

    def _describe(self, row: Row, told: _Stage) -> None:
        """What a runner says of a rollout whose session is not open, and may never be."""
        row.name = row.name or _text(told.rollout)
        row.task, row.agent, row.model = (
            row.task or _text(told.task),
            row.agent or _text(told.agent),
            row.model or _text(told.model),
        )
        row.group, row.batch = row.group or _text(told.group), row.batch or _text(told.batch)
        row.attempt = max(row.attempt, _count(told.attempt))

    def _take_gateway(self, fact: Fact) -> None:
        if fact.kind == "fence":
            version = _read(_fence, fact.data, _Fence()).version
            if version is not None and (not self.versions or version > self.versions[-1][1]):
                self.versions.append((fact.time, version))
            return
        one = _read(_delivery, fact.data, None)
        if one is None:
            return
        self.deliveries.append(
            Delivered(feed=one.feed, number=one.number, group=one.group, rollouts=one.rollouts, at=fact.time)
        )
        if len(self.deliveries) > _DELIVERIES:
            del self.deliveries[: _DELIVERIES // 2]

    # ── one row ─────────────────────────────────────────────────────────────────────────────────────────────────

    def shown(self, kept: Kept, now: float, store: Store) -> Row:
        """Its row as of now, with the versions, which are looked up only for what is looked at."""
        row = kept.row
        row.status = _status(kept, now)
        row.seconds = round(max(0.0, (row.closed or now) - row.opened), 3)
        sampled = row.turns, row.sampled_tokens  # of what was cut short there are tokens, and no turn
        if kept.key and sampled != kept.versions_of:
            found = store.survey.versions(kept.key)
            row.version_start, row.version_end = found or (None, None)
            kept.versions_of = sampled
        return row

    def all(self, now: float) -> Iterator[Kept]:
        """Each with its status as of now. Some at a time: whoever serves calls comes in between."""
        for number, kept in enumerate(self.kept.values(), 1):
            kept.row.status = _status(kept, now)
            yield kept
            if number % SOME == 0:
                breathe()

    def in_force(self, at: float) -> int | None:
        """The policy's version at a moment; None: nobody knows any more."""
        place = bisect_right(self.versions, at, key=lambda one: one[0])
        if place:
            return self.versions[place - 1][1]
        return 0 if self.whole else None

    def by_group(self) -> dict[str, list[Kept]]:
        found: dict[str, list[Kept]] = {}
        for kept in self.kept.values():
            if kept.row.group:
                found.setdefault(kept.row.group, []).append(kept)
        return found


def _status(kept: Kept, now: float) -> Status:
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


def _read(decoder: msgspec.json.Decoder[T], written: bytes, otherwise: Else) -> T | Else:
    """`otherwise`: it is damaged on disk, and the list goes on without."""
    try:
        return decoder.decode(written)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return otherwise


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Json) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def breathe() -> None:
    """Let the thread that serves calls go on: this one would otherwise be asked for the interpreter only every few milliseconds."""
    time.sleep(_YIELD_S)
