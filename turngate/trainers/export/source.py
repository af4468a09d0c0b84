"""Rollouts of a data folder, group by group, the oldest group first; of those that are wanted.

The folder is read as `turngate show` does, so a gateway may serve it meanwhile. What is known of every session at once is its key, its
group and whether it is wanted; traces are read one group at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from turngate.errors import ConfigError, StoreError
from turngate.store.outcomes import DAMAGED_OUTCOME, NO_REWARD, RecordedOutcome
from turngate.store.sqlite import SessionRow, Store
from turngate.trace.sample import Sample, build_samples
from turngate.trace.session import Session
from turngate.trace.tree import Context, Node, Sampled

_PAGE = 500


class Left:
    """What was left out, and why."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def out(self, why: str, count: int = 1) -> None:
        if count:
            self._counts[why] += count

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts.most_common())

    def __str__(self) -> str:
        return ", ".join(f"{count} × {why}" for why, count in self.counts.items())


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts. Names may have * and ? in them; several are any of them; nothing given is all."""

    groups: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    min_reward: float | None = None
    resolved: bool = False  # only those
    unscored: Literal["keep", "drop"] = "keep"  # those whose reward is not known
    unfinished: bool = False  # also sessions that are open, or were cancelled

    def __post_init__(self) -> None:
        for field in ("groups", "tasks", "sessions"):
            if isinstance(given := getattr(self, field), str):
                raise ConfigError(f"{field}: {given!r} is one name; give a tuple of them, ({given!r},)", param=field)

    @property
    def filters(self) -> list[str]:
        """Those that are given, as flags."""
        names = (("group", self.groups), ("task", self.tasks), ("session", self.sessions))
        return [
            *(f"--{flag} {pattern}" for flag, patterns in names for pattern in patterns),
            *([] if self.min_reward is None else [f"--min-reward {self.min_reward:g}"]),
            *(["--resolved"] if self.resolved else []),
            *(["--unscored drop"] if self.unscored == "drop" else []),
        ]

    def may_fit(self, row: SessionRow, outcome: RecordedOutcome | None) -> bool:
        """One that is damaged: as far as it is known."""
        named = ((group_of(row, outcome), self.groups), (task_of(row, outcome), self.tasks))
        return _like(row.id, self.sessions) and all(not name or _like(name, patterns) for name, patterns in named)

    def fits(self, row: SessionRow, outcome: RecordedOutcome | None) -> bool:
        reward = None if outcome is None else outcome.reward
        return (
            _like(row.id, self.sessions)
            and _like(group_of(row, outcome), self.groups)
            and _like(task_of(row, outcome), self.tasks)
            and (reward is not None or (self.unscored == "keep" and self.min_reward is None))
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (not self.resolved or (outcome is not None and outcome.resolved is True))
        )


class Rollout:
    """One session with its trace and its outcome."""

    def __init__(self, store: Store, row: SessionRow, session: Session, outcome: RecordedOutcome | None) -> None:
        self._store = store
        self.row = row
        self.session = session
        self.outcome = outcome
        self.id = row.id
        self.reward = None if outcome is None else outcome.reward
        self.resolved = None if outcome is None else outcome.resolved
        self.kind = "" if outcome is None else outcome.kind
        self.group = group_of(row, outcome)
        self.task = task_of(row, outcome)

    @cached_property
    def rows(self) -> list[Sample]:
        """What a trainer is handed: each with something to train."""
        return build_samples(self.session.trace, self.session.config.policy)

    @cached_property
    def branches(self) -> list[Sample]:
        """Every one, also those in which nothing may be trained."""
        return build_samples(self.session.trace, self.session.config.policy, keep_empty=True)

    @cached_property
    def nodes(self) -> dict[int, Node]:
        return {node.id: node for node in self.session.trace.nodes}

    def turn(self, node: int) -> Sampled:
        found = self.nodes[node]
        assert isinstance(found, Sampled), "only turns have spans"
        return found

    @cached_property
    def messages(self) -> Mapping[int, bytes]:
        return self._store.messages(self.row.key)

    @cached_property
    def _preambles(self) -> Mapping[bytes, tuple[bytes, bytes]]:
        return self._store.preambles(self.row.key)

    def tools(self, context: Context) -> bytes:
        """JSON, as the agent sent them."""
        return self._preambles.get(context.info.preamble, (b"[]", b""))[0]

    @property
    def agents_fault_at_most(self) -> bool:
        """Nothing but the agent decided how it went, as far as anybody said."""
        return self.kind not in NO_REWARD

    def metadata(self, name: str) -> str:
        return _text(self.row.config.metadata.get(name))

    @property
    def truncated(self) -> bool:
        """A limit ended it, or its time, or a turn was cut short."""
        status = self.outcome.data.get("status") if self.outcome and isinstance(self.outcome.data, dict) else None
        return self.session.truncated or status in ("limit", "timed out")


class Group:
    """The rollouts of one group. `wanted` is what to write; `others` are there where a format looks at whole groups."""

    def __init__(self, name: str, wanted: list[Rollout], others: list[Rollout]) -> None:
        self.name = name  # empty: a rollout that is of none
        self.wanted = wanted
        self.others = others


class Source(AbstractContextManager["Source"]):
    def __init__(self, data: Path, wanted: Wanted, left: Left, *, whole: bool = False) -> None:
        self._wanted = wanted
        self._left = left
        self._whole = whole
        self._seen = 0  # sessions that are there, wanted or not
        self._store = Store.reading(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()

    def groups(self) -> Iterator[Group]:
        found = self._index()
        if not any(fits for members in found.values() for _, fits in members):
            raise ConfigError(f"data: {self._nothing()}", param="data")
        for (name, _), members in found.items():
            if not any(fits for _, fits in members):
                continue
            wanted = [one for key, fits in members if fits and (one := self._load(key)) is not None]
            others = [one for key, fits in members if self._whole and not fits and (one := self._load(key)) is not None]
            yield Group(name, wanted, others)

    def _index(self) -> dict[tuple[str, int], list[tuple[int, bool]]]:
        """By group the keys of its sessions, and whether each is wanted. A session that is of no group has one of its own."""
        found: dict[tuple[str, int], list[tuple[int, bool]]] = {}
        before: int | None = None
        newest_first = []
        while page := self._store.sessions(before=before, limit=_PAGE):
            before = page[-1].key
            outcomes = self._store.outcomes.read(page[-1].key, page[0].key)
            self._seen += len(page)
            for row in page:
                outcome = outcomes.get(row.key)
                if row.damaged:
                    if self._wanted.may_fit(row, outcome):
                        self._left.out(row.damaged)
                    continue
                fits = self._wanted.fits(row, outcome)
                if row.status != "sealed" and not self._wanted.unfinished:
                    if fits:
                        self._left.out(f"its session is {row.status} (--unfinished takes it)")
                    continue
                newest_first.append((group_of(row, outcome), row.key, fits))
        for name, key, fits in reversed(newest_first):
            found.setdefault((name, 0 if name else key), []).append((key, fits))
        return found

    def _load(self, key: int) -> Rollout | None:
        row = self._store.find_key(key)
        if row is None:  # it was deleted meanwhile
            self._left.out("its session was deleted meanwhile")
            return None
        outcomes = self._store.outcomes.read(key, key)
        outcome = outcomes.get(key)
        if outcome is None and outcomes:  # since it was looked at first
            self._left.out(DAMAGED_OUTCOME)
            return None
        try:
            session = self._store.load(row)
        except StoreError:
            self._left.out("its trace is damaged on disk")
            return None
        return Rollout(self._store, row, session, outcome)

    def _nothing(self) -> str:
        """Why nothing is left to write."""
        if not self._seen:
            return "no rollout was recorded there; give the --data folder of a gateway that served some"
        filters, left = self._wanted.filters, str(self._left)
        if not filters:
            return f"none of {counted(self._seen)} there is taken; left out: {left}"
        hint = f"left out: {left}" if left else "ask for others, or look with `turngate show`"
        return f"none of {counted(self._seen)} there fits {' '.join(filters)}; {hint}"


def counted(rollouts: int) -> str:
    return f"{rollouts:,} rollout{'' if rollouts == 1 else 's'}"


def group_of(row: SessionRow, outcome: RecordedOutcome | None) -> str:
    return outcome.group if outcome is not None else _text(row.config.metadata.get("group"))


def task_of(row: SessionRow, outcome: RecordedOutcome | None) -> str:
    told = "" if outcome is None else outcome.task
    return told or _text(row.config.metadata.get("task"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _like(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
