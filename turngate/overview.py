"""All rollouts at a glance: lists with filters and sorting, groups, rewards and throughput over time, failures. For the web page.

Kept in memory by whoever looks, and brought up to date from the stream of events before every answer: the first look reads what there is (a
second for ten thousand rollouts), each further one only what happened since. No trace is read for a list, and no turn pays for one. Each
worker makes its own from the store that they share. Everything runs in the thread of one `Apart`, so nothing here is locked.
`server/page.py` calls it.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import fsum, sqrt
from operator import itemgetter
from typing import Annotated, Literal

import msgspec

from turngate.errors import BadRequest, NotFound
from turngate.events import OF_A_BATCH
from turngate.store.outcome import Class
from turngate.store.sqlite import Store
from turngate.store.survey import Fact, SurveyedSession
from turngate.trace.advantage import advantages
from turngate.trace.passes import has_passed, pass_at_k
from turngate.types import Json, Mode

Status = Literal["starting", "running", "finishing", "done", "cancelled"]
STATUSES: tuple[Status, ...] = ("starting", "running", "finishing", "done", "cancelled")
UNDER_WAY: tuple[Status, ...] = ("starting", "running", "finishing")
DONE = "done"  # the stage that a runner tells last
_PAGE = 2000  # sessions or events that are read at once
_SOME = 1000  # rollouts that are looked at in one go
_SPAN_S = 10.0  # of time, in which turns are counted together
_SILENT_S = 3600.0  # after which a runner that told no end is taken for gone
_MOST_NAMES = 200
_MOST_REWARDS = 128
_MOST_DELIVERIES = 500
_MOST_MESSAGES = 50
_EXAMPLES = 5
_MOST_CHANGED = 200
_LONG = 2000  # characters of a message in a list
_YIELD_S = 0.0002  # between two pieces of work: whoever serves calls comes first
_DIGITS = re.compile(r"\d+|0x[0-9a-f]+|\b[0-9a-f]{8,}\b")


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


class GroupRow(msgspec.Struct, kw_only=True):
    group: str
    task: str
    agent: str
    model: str
    batch: str
    rollouts: int
    running: int
    graded: int
    passed: int
    mean_reward: float | None
    pass_at_1: float | None
    rewards: list[float | None]
    classes: dict[str, int]
    signal: bool | None  # None: fewer than two rewards are known
    opened: float
    latest: float


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts, in which order. Several values of one field: any of them; none: all."""

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


class _Kept:
    """One rollout: the row, and what it is made of."""

    __slots__ = ("done", "found", "key", "recorded", "row", "state", "versions_of")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.key = 0  # of its session; 0: none is open yet
        self.state = ""  # of that session
        self.done = ""  # how its runner said that it ended; empty: it has not said so
        self.recorded: float | None = None  # when its outcome was
        self.versions_of = 0  # turns, when its versions were looked up
        self.found = ""  # what text is looked for in; empty: to be put together


class Overview:
    """Of one data folder. Made empty; every question brings it up to date first."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._cursor = -1  # -1: nothing was read yet
        self._kept: dict[str, _Kept] = {}
        self._spans: dict[int, list[int]] = {}  # turns, tokens, outcomes
        self._versions: list[tuple[float, int]] = []  # when each came into force
        self._deliveries: list[Delivered] = []
        self._whole = True  # events go back to the beginning

    # ── being up to date ────────────────────────────────────────────────────────────────────────────────────────

    def refresh(self, store: Store) -> int:
        """The cursor of what it knows now."""
        with store.at_once():
            newest = store.events.newest()
            if self._cursor < 0 or newest < self._cursor:
                self._clear()
                self._build(store)
                self._cursor = newest
            else:
                self._follow(store)
        return self._cursor

    def _build(self, store: Store) -> None:
        survey = store.survey
        oldest = survey.oldest()
        first = store.events.page("", 0, 1)
        self._whole = first[0].seq == 1 if first else not store.events.newest()
        self._take_sessions(store)
        for heard in survey.heard():
            kept = self._kept.get(heard.session)
            if kept is not None:
                kept.row.turns, kept.row.sampled_tokens = heard.turns, heard.sampled_tokens
                kept.row.seen = max(kept.row.seen, heard.at)
        if not self._whole:
            self._count_old(store, oldest)
        _breathe()
        for number, fact in enumerate(survey.last_stages()):
            if number % _PAGE == 0:
                _breathe()
            self._take_stage(fact, store)
        for moment in survey.moments(_SPAN_S):
            self._spans[moment.number] = [moment.turns, moment.sampled_tokens, moment.outcomes]
        for fact in survey.of_kinds(("fence", "delivery")):
            self._take_gateway(fact)

    def _count_old(self, store: Store, oldest: float | None) -> None:
        """Of sessions whose first events were removed, turns are counted in the trace."""
        for kept in self._kept.values():
            if kept.key and (oldest is None or kept.row.opened < oldest):
                _breathe()
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
            _breathe()
        if changed:
            sessions = store.survey.named(list(changed))
            there = {session.id for session in sessions}
            for gone in changed.keys() - there:
                if (kept := self._kept.get(gone)) is not None and kept.key:
                    del self._kept[gone]
            self._take_in(sessions, store)

    def _take(self, fact: Fact, changed: dict[str, None], store: Store) -> None:
        kept = self._kept.get(fact.session)
        if kept is None and fact.kind == "opened":  # its first turn may come before it is read
            kept = self._kept[fact.session] = _Kept(Row(id=fact.session, opened=fact.time))
        if kept is not None:
            kept.row.seen = max(kept.row.seen, fact.time)
        match fact.kind:
            case "turn":
                turn = _turn.decode(fact.data)
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
                self._kept.pop(fact.session, None)
                changed.pop(fact.session, None)
            case "fence" | "delivery":
                self._take_gateway(fact)

    def _span(self, at: float) -> list[int]:
        return self._spans.setdefault(int(at / _SPAN_S), [0, 0, 0])

    def _take_sessions(self, store: Store) -> None:
        after = 0
        while page := store.survey.sessions(after, _PAGE):
            self._take_in(page, store)
            after = page[-1].key
            _breathe()

    def _take_in(self, sessions: Sequence[SurveyedSession], store: Store) -> None:
        outcomes = store.survey.outcomes([session.key for session in sessions])
        for session in sessions:
            kept = self._kept.get(session.id)
            if kept is None or kept.key not in (0, session.key):  # an id is used again when its session was deleted
                kept = self._kept[session.id] = _Kept(Row(id=session.id))
            self._settle(kept, session, outcomes.get(session.key))

    def _settle(self, kept: _Kept, session: SurveyedSession, outcome: tuple[float, bytes] | None) -> None:
        row = kept.row
        kept.key, kept.state, kept.found = session.key, session.status, ""
        row.opened, row.closed, row.stop = session.opened, session.closed, session.stop
        row.seen = max(row.seen, session.closed or session.opened)
        try:
            config = _config.decode(session.config)
        except msgspec.DecodeError:  # damaged on disk: the list goes on without it
            config = _Config()
        told = config.metadata
        row.model, row.mode = config.model, config.mode
        row.name = _text(told.get("rollout")) or row.name
        row.group, row.task = _text(told.get("group")) or row.group, _text(told.get("task")) or row.task
        row.agent, row.agent_version = _text(told.get("agent")), _text(told.get("agent_version"))
        row.sandbox, row.batch = _text(told.get("sandbox")), _text(told.get("batch")) or row.batch
        row.attempt = _count(told.get("attempt"))
        if outcome is not None:
            kept.recorded, written = outcome
            recorded = _told.decode(written)
            row.kind, row.reward, row.resolved = recorded.kind, recorded.reward, recorded.resolved
            row.message, row.attempt = recorded.message[:_LONG], recorded.attempt
            row.group, row.task = recorded.group or row.group, recorded.task or row.task
            row.seen = max(row.seen, kept.recorded)

    def _take_stage(self, fact: Fact, store: Store) -> None:
        told = _decoded_stage(fact.data)
        kept = self._kept.get(fact.session)
        if kept is None:
            kept = self._kept[fact.session] = _Kept(Row(id=fact.session, opened=fact.time))
            begun = store.survey.first_stage(fact.session)
            if begun is not None:
                kept.row.opened = begun.time
                self._describe(kept.row, _decoded_stage(begun.data))
        kept.row.stage, kept.row.seen, kept.found = _text(told.stage), max(kept.row.seen, fact.time), ""
        self._describe(kept.row, told)
        if told.stage == DONE:
            kept.done = _text(told.status) or "finished"
            if not kept.key:
                kept.row.closed = fact.time
            if not kept.row.kind and told.kind in ("graded", "agent failed", "invalid task", "infrastructure fault"):
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
            version = _fence.decode(fact.data).version
            if version is not None and (not self._versions or version > self._versions[-1][1]):
                self._versions.append((fact.time, version))
            return
        one = _delivery.decode(fact.data)
        self._deliveries.append(
            Delivered(feed=one.feed, number=one.number, group=one.group, rollouts=one.rollouts, at=fact.time)
        )
        if len(self._deliveries) > 20 * _MOST_DELIVERIES:
            del self._deliveries[: 10 * _MOST_DELIVERIES]

    # ── one row ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _shown(self, kept: _Kept, now: float, store: Store) -> Row:
        """Its row as of now, with the versions, which are looked up only for what is looked at."""
        row = kept.row
        row.status = _status(kept, now)
        row.seconds = round(max(0.0, (row.closed or now) - row.opened), 3)
        if kept.key and row.turns != kept.versions_of:
            found = store.survey.versions(kept.key)
            row.version_start, row.version_end = found or (None, None)
            kept.versions_of = row.turns
        return row

    def _all(self, now: float) -> Iterator[_Kept]:
        """Each with its status as of now. Some at a time: whoever serves calls comes in between."""
        for number, kept in enumerate(self._kept.values(), 1):
            kept.row.status = _status(kept, now)
            yield kept
            if number % _SOME == 0:
                _breathe()

    # ── questions ───────────────────────────────────────────────────────────────────────────────────────────────

    def sums(self, store: Store) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        rows = [kept.row for kept in self._all(now)]
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

    def rollouts(self, store: Store, wanted: Wanted) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        found = [kept for kept in self._all(now) if _fits(kept, wanted)]
        if wanted.sort.removeprefix("-") == "version":
            for kept in found:
                self._shown(kept, now, store)
        found = _sorted(found, wanted.sort, _KEYS, lambda kept: kept.row.id)
        page = found[wanted.offset : wanted.offset + wanted.limit]
        return {
            "rollouts": [self._shown(kept, now, store) for kept in page],
            "total": len(found),
            "offset": wanted.offset,
            "limit": wanted.limit,
            "cursor": cursor,
        }

    def rollout(self, store: Store, session: str) -> tuple[Row, int, int]:
        """Its row, the key of its session (0: it has none), and the cursor."""
        cursor = self.refresh(store)
        kept = self._kept.get(session)
        if kept is None:
            raise NotFound(f"there is no rollout {session!r}")
        return self._shown(kept, time.time(), store), kept.key, cursor

    def no_retry(self, store: Store, session: str) -> tuple[Row, str]:
        """Why a rollout cannot be tried again; empty if it can, where its batch agrees."""
        row, _, _ = self.rollout(store, session)
        if row.status in UNDER_WAY:
            return row, "it is still at work"
        if row.kind and row.kind != "infrastructure fault":
            return row, f"it has been judged: {row.kind}"
        if not row.kind and row.status != "cancelled":
            return row, "nothing failed: nobody was asked to grade it"
        if not row.batch or not row.name:
            return row, "it is of no batch: whoever ran it has to run it again"
        later = max(kept.row.attempt for kept in self._kept.values() if kept.row.name == row.name)
        return row, f"attempt {later} of it is there already" if later > row.attempt else ""

    def changed(self, store: Store, after: int) -> dict[str, Json]:
        """What happened past a cursor: the rows that are other ones since, and who is gone."""
        cursor, now = self.refresh(store), time.time()
        touched = store.survey.touched(after, _MOST_CHANGED)
        rows = [self._shown(self._kept[one], now, store) for one in touched[:_MOST_CHANGED] if one in self._kept]
        gone = [one for one in touched[:_MOST_CHANGED] if one not in self._kept and not one.startswith(OF_A_BATCH)]
        return {"cursor": cursor, "rollouts": rows, "gone": gone, "more": len(touched) > _MOST_CHANGED}

    def groups(self, store: Store, wanted: Wanted) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        found = []
        for number, (name, rows) in enumerate(self._members(now).items(), 1):
            group = _group(name, rows)
            if _group_fits(group, wanted):
                found.append(group)
            if number % (_SOME // 8) == 0:
                _breathe()
        found = _sorted(found, wanted.sort, _GROUP_KEYS, lambda group: group.group)
        return {
            "groups": found[wanted.offset : wanted.offset + wanted.limit],
            "total": len(found),
            "offset": wanted.offset,
            "limit": wanted.limit,
            "cursor": cursor,
        }

    def group(self, store: Store, name: str) -> dict[str, Json]:
        """Its rollouts, with what a trainer would make of their rewards."""
        cursor, now = self.refresh(store), time.time()
        kept = sorted((one for one in self._kept.values() if one.row.group == name), key=lambda one: one.row.opened)
        if not kept or not name:
            raise NotFound("name: there is no such group", param="name")
        rows = [self._shown(one, now, store) for one in kept]
        rewards = [row.reward for row in rows]
        summed = _group(name, rows)
        known = [reward for reward in rewards if reward is not None]
        ways = {how: advantages(rewards, how) for how in ("normalised", "leave_one_out")}
        estimates = [{"k": k, "estimate": pass_at_k(summed.graded, summed.passed, k)} for k in range(1, len(known) + 1)]
        return {
            "group": name,
            "task": summed.task,
            "cursor": cursor,
            "rollouts": [
                {**msgspec.to_builtins(row), "advantage": normal, "leave_one_out": alone}
                for row, normal, alone in zip(rows, ways["normalised"], ways["leave_one_out"], strict=True)
            ],
            "mean_reward": summed.mean_reward,
            "std_reward": _deviation(known),
            "graded": summed.graded,
            "passed": summed.passed,
            "pass_at": estimates,
            "classes": summed.classes,
            "signal": summed.signal,
            "deliveries": [
                {"feed": one.feed, "number": one.number, "at": one.at} for one in self._deliveries if one.group == name
            ],
        }

    def members(self, store: Store, name: str) -> list[tuple[str, int]]:
        """Ids and session keys of a group's rollouts, oldest first; only those that have a session."""
        self.refresh(store)
        kept = [one for one in self._kept.values() if one.row.group == name and one.key]
        if not kept or not name:
            raise NotFound("group: there is no such group, or none of it has begun", param="group")
        return [(one.row.id, one.key) for one in sorted(kept, key=lambda one: one.key)]

    def training(self, store: Store, prefix: str, buckets: int) -> dict[str, Json]:
        cursor, now = self.refresh(store), time.time()
        mine = [one for one in self._kept.values() if one.row.group.startswith(prefix)]
        for number, one in enumerate(mine):
            if number % 500 == 0:
                _breathe()
            self._shown(one, now, store)
        first = min((one.row.opened for one in mine), default=now)
        width = _width((now - first) / buckets)
        graded = [(one.recorded, one.row) for one in mine if one.recorded is not None and one.row.reward is not None]
        return {
            "cursor": cursor,
            "now": now,
            "first": first,
            "bucket_s": width,
            "time": _over_time(graded, width),
            "version": _over_versions([row for _, row in graded]),
            "throughput": self._throughput(first, now, width),
            "staleness": self._staleness(mine),
            "deliveries": self._delivered(prefix),
            "versions": [{"version": version, "at": at} for at, version in self._versions[-_MOST_DELIVERIES:]],
            "feeds": [
                {
                    "name": feed.name,
                    "newest": feed.newest,
                    "handed": feed.handed,
                    "committed": feed.committed,
                    "read": bool(feed.reader),
                    "waiting": len(store.feeds.waiting(feed.key, 1000)),
                }
                for feed in store.feeds.listing()
            ],
        }

    def _throughput(self, first: float, now: float, width: float) -> list[Json]:
        """Of the whole gateway, without gaps."""
        start, end = int(first // width), int(now // width)
        sums = {number: [0, 0, 0] for number in range(start, end + 1)}
        for number, counted in self._spans.items():
            into = sums.get(int(number * _SPAN_S // width))
            if into is not None:
                for place in range(3):
                    into[place] += counted[place]
        told = []
        for number, (turns, tokens, outcomes) in sums.items():
            # The first and the last are not whole.
            lasted = min(now, (number + 1) * width) - max(first - first % _SPAN_S, number * width)
            lasted = max(lasted, _SPAN_S)
            told.append(
                {
                    "at": number * width,
                    "turns_s": round(turns / lasted, 4),
                    "tokens_s": round(tokens / lasted, 3),
                    "rollouts_min": round(outcomes * 60 / lasted, 3),
                }
            )
        return told

    def _in_force(self, at: float) -> int | None:
        """The policy's version at a moment; None: nobody knows any more."""
        place = bisect_right(self._versions, at, key=lambda one: one[0])
        if place:
            return self._versions[place - 1][1]
        return 0 if self._whole else None

    def _delivered(self, prefix: str) -> list[Json]:
        members = self._by_group()
        newest = [one for one in self._deliveries if one.group.startswith(prefix)][-_MOST_DELIVERIES:]
        told = []
        for one in newest:
            # A group may be handed out in parts: what was recorded by then was in it.
            rows = [kept.row for kept in members.get(one.group, ()) if (kept.recorded or 0) <= one.at]
            sampled = [row.version_start for row in rows if row.version_start is not None]
            known = [row.reward for row in rows if row.reward is not None]
            version, oldest = self._in_force(one.at), min(sampled, default=None)
            told.append(
                {
                    "feed": one.feed,
                    "number": one.number,
                    "group": one.group,
                    "at": one.at,
                    "version": version,
                    "oldest": oldest,
                    "behind": None if version is None or oldest is None else version - oldest,
                    "mean": _mean(known),
                    "rollouts": one.rollouts,
                }
            )
        return told

    def _staleness(self, kept: Iterable[_Kept]) -> list[Json]:
        """Of each rollout that has an outcome, by how many versions the policy had moved on by then."""
        behind: Counter[int] = Counter()
        for one in kept:
            if one.recorded is not None and one.row.version_start is not None:
                version = self._in_force(one.recorded)
                if version is not None:
                    behind[version - one.row.version_start] += 1
        return [{"behind": gap, "rollouts": behind[gap]} for gap in sorted(behind)]

    def failures(self, store: Store, prefix: str) -> dict[str, Json]:
        """By class, what was said, most frequent first. Numbers in it do not make two messages of one."""
        cursor, now = self.refresh(store), time.time()
        said: dict[str, dict[str, list[Row]]] = {}
        for kept in self._all(now):
            row = kept.row
            kind: str = row.kind or ("cancelled" if row.status == "cancelled" else "")
            if kind in ("", "graded") or not row.group.startswith(prefix):
                continue
            message = row.message or row.stop or kept.done
            said.setdefault(kind, {}).setdefault(_DIGITS.sub("#", message), []).append(row)
        classes = []
        for kind, messages in sorted(said.items(), key=lambda one: -sum(map(len, one[1].values()))):
            told = sorted(messages.values(), key=len, reverse=True)[:_MOST_MESSAGES]
            classes.append(
                {
                    "class": kind,
                    "count": sum(map(len, messages.values())),
                    "messages": [
                        {
                            "message": rows[-1].message or rows[-1].stop,
                            "count": len(rows),
                            "rollouts": [row.id for row in rows[: -_EXAMPLES - 1 : -1]],
                        }
                        for rows in told
                    ],
                }
            )
        return {"classes": classes, "cursor": cursor}

    def _members(self, now: float) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for kept in self._all(now):
            if kept.row.group:
                found.setdefault(kept.row.group, []).append(kept.row)
        return found

    def _by_group(self) -> dict[str, list[_Kept]]:
        found: dict[str, list[_Kept]] = {}
        for kept in self._kept.values():
            if kept.row.group:
                found.setdefault(kept.row.group, []).append(kept)
        return found


def _status(kept: _Kept, now: float) -> Status:
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


def _fits(kept: _Kept, wanted: Wanted) -> bool:
    row = kept.row
    return (
        (not wanted.status or row.status in wanted.status)
        and (not wanted.kind or (row.kind or "none") in wanted.kind)
        and (not wanted.group or row.group in wanted.group)
        and (not wanted.task or row.task in wanted.task)
        and (not wanted.agent or row.agent in wanted.agent)
        and (not wanted.model or row.model in wanted.model)
        and (not wanted.mode or row.mode in wanted.mode)
        and (not wanted.text or wanted.text in _found_in(kept))
    )


def _found_in(kept: _Kept) -> str:
    if not kept.found:
        row = kept.row
        parts = (row.id, row.name, row.group, row.task, row.agent, row.model, row.message, row.stop)
        kept.found = "\n".join(dict.fromkeys(parts)).casefold()
    return kept.found


def _group_fits(group: GroupRow, wanted: Wanted) -> bool:
    text = f"{group.group}\n{group.agent}\n{group.model}".casefold()
    return (
        (not wanted.task or group.task in wanted.task)
        and (not wanted.agent or group.agent in wanted.agent)
        and (not wanted.model or group.model in wanted.model)
        and (not wanted.text or wanted.text in text)
    )


_KEYS: Mapping[str, Callable[[_Kept], Json]] = {
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
_GROUP_KEYS: Mapping[str, Callable[[GroupRow], Json]] = {
    "latest": lambda group: group.latest,
    "opened": lambda group: group.opened,
    "group": lambda group: group.group,
    "task": lambda group: group.task,
    "rollouts": lambda group: group.rollouts,
    "running": lambda group: group.running,
    "mean_reward": lambda group: group.mean_reward,
    "pass_at_1": lambda group: group.pass_at_1,
}


def _sorted(
    found: list[Json], how: str, keys: Mapping[str, Callable[[Json], Json]], tie: Callable[[Json], str]
) -> list[Json]:
    """Unknown values last, whichever way; equal ones always in the same order, so that pages do not overlap."""
    name = how.removeprefix("-")
    key = keys.get(name)
    if key is None:
        raise BadRequest(f"sort: {name[:100]!r} is not one of {', '.join(keys)}", param="sort")
    down = how.startswith("-")
    _breathe()
    found.sort(key=tie, reverse=down)
    pairs = [(key(one), one) for one in found]
    known = [pair for pair in pairs if pair[0] is not None]
    known.sort(key=itemgetter(0), reverse=down)
    return [one for _, one in known] + [one for value, one in pairs if value is None]


def _group(name: str, rows: Sequence[Row]) -> GroupRow:
    rows = sorted(rows, key=lambda row: row.opened)
    rewards = [row.reward for row in rows]
    known = [reward for reward in rewards if reward is not None]
    passed = sum(bool(has_passed(row.reward, row.resolved)) for row in rows)
    classes: Counter[str] = Counter(row.kind for row in rows)
    return GroupRow(
        group=name,
        task=rows[0].task,
        agent=rows[0].agent,
        model=rows[0].model,
        batch=rows[0].batch,
        rollouts=len(rows),
        running=sum(row.status in UNDER_WAY for row in rows),
        graded=len(known),
        passed=passed,
        mean_reward=_mean(known),
        pass_at_1=passed / len(known) if known else None,
        rewards=rewards[:_MOST_REWARDS],
        classes=dict(classes),
        signal=None if len(known) < 2 else min(known) != max(known),
        opened=rows[0].opened,
        latest=max(row.seen for row in rows),
    )


def _over_time(graded: Sequence[tuple[float, Row]], width: float) -> list[Json]:
    spans: dict[int, list[float]] = {}
    for at, row in graded:
        assert row.reward is not None
        spans.setdefault(int(at // width), []).append(row.reward)
    return [
        {"at": number * width, "mean": _mean(known), "low": min(known), "high": max(known), "count": len(known)}
        for number, known in sorted(spans.items())
    ]


def _over_versions(rows: Iterable[Row]) -> list[Json]:
    """By the version at a rollout's first token."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.version_start is not None and row.reward is not None:
            found.setdefault(row.version_start, []).append(row.reward)
    return [{"version": version, "mean": _mean(known), "count": len(known)} for version, known in sorted(found.items())]


def _width(least: float) -> float:
    """Of a bucket: a round number of seconds."""
    for width in (10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400):
        if width >= least:
            return float(width)
    return 86400.0 * (int(least // 86400) + 1)


def _mean(known: Sequence[float]) -> float | None:
    return fsum(known) / len(known) if known else None


def _deviation(known: Sequence[float]) -> float | None:
    mean = _mean(known)
    return None if mean is None else sqrt(fsum((one - mean) ** 2 for one in known) / len(known))


def _names(found: Iterable[str]) -> list[str]:
    return sorted({name for name in found if name})[:_MOST_NAMES]


def _decoded_stage(data: bytes) -> _Stage:
    return _stage.decode(data)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Json) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _breathe() -> None:
    """Let the thread that serves calls go on: this one would otherwise be asked for the interpreter only every few milliseconds."""
    time.sleep(_YIELD_S)
