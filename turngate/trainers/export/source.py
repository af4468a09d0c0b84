"""Read the rollouts in a data folder or a shared store group by group, oldest group first.

Reading works even while a gateway uses the store. Traces are read one group at a time. Only the key and the group of each session, and
whether it matches the filter, stay in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from turngate.errors import ConfigError, StoreError
from turngate.store.location import open_store_for_reading
from turngate.store.outcomes import NO_REWARD, DamagedOutcome, RecordedOutcome
from turngate.store.store import SessionRow, Store
from turngate.trace.roles import assign_roles
from turngate.trace.sample import Sample, add_turn_rewards, build_samples, find_exclusion
from turngate.trace.session import Session
from turngate.trace.training_report import report_training
from turngate.trace.tree import Context, Node, Sampled
from turngate.trace.turn_rewards import TurnReward
from turngate.trainers.teacher.scoring import Teacher

_PAGE = 500


class Exclusions:
    """Counts, by reason, what an export left out: rollouts, rows, pairs, groups, and parts of records."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        if count:
            self._counts[reason] += count

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts.most_common())

    def __str__(self) -> str:
        return ", ".join(f"{count} × {reason}" for reason, count in self.counts.items())


class RolloutFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects rollouts by name and by outcome. Names may contain the wildcards '*' and '?'.

    A tuple of names selects the rollouts that match at least one of the names. An empty tuple selects all rollouts.
    """

    groups: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    min_reward: float | None = None
    resolved: bool = False  # only resolved rollouts
    unscored: Literal["keep", "drop"] = "keep"  # rollouts without a known reward
    unfinished: bool = False  # include open, cancelled and superseded sessions

    def __post_init__(self) -> None:
        for field in ("groups", "tasks", "sessions"):
            if isinstance(value := getattr(self, field), str):
                raise ConfigError(f"{field} must be a tuple of names, such as ({value!r},), not a string", param=field)

    @property
    def name_filters(self) -> dict[str, tuple[str, str]]:
        """The filters on names. Each key is a filter as written on the command line. The value is the flag's name and the pattern."""
        names = (("group", self.groups), ("task", self.tasks), ("session", self.sessions))
        return {f"--{flag} {pattern}": (flag, pattern) for flag, patterns in names for pattern in patterns}

    @property
    def filters(self) -> list[str]:
        """The active filters, as flags of `turngate export`."""
        return [
            *self.name_filters,
            *([] if self.min_reward is None else [f"--min-reward {self.min_reward:g}"]),
            *(["--resolved"] if self.resolved else []),
            *(["--unscored drop"] if self.unscored == "drop" else []),
        ]

    def may_match(self, row: SessionRow, outcome: RecordedOutcome | None) -> bool:
        """Return whether a damaged session could match the filter, based on the fields that can still be read."""
        names = ((find_group(row, outcome), self.groups), (find_task(row, outcome), self.tasks))
        return _matches(row.id, self.sessions) and all(not name or _matches(name, patterns) for name, patterns in names)

    def matches(self, row: SessionRow, outcome: RecordedOutcome | None) -> bool:
        reward = None if outcome is None else outcome.reward
        return (
            _matches(row.id, self.sessions)
            and _matches(find_group(row, outcome), self.groups)
            and _matches(find_task(row, outcome), self.tasks)
            and (reward is not None or (self.unscored == "keep" and self.min_reward is None))
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (not self.resolved or (outcome is not None and outcome.resolved is True))
        )


class RecordedRollout:
    """A session with its trace and its outcome. `teacher`, if any, provides the scores of the session's rows.

    With `masks`, the export includes sampling masks, so turns that need them are trained.
    """

    def __init__(
        self,
        store: Store,
        row: SessionRow,
        session: Session,
        outcome: RecordedOutcome | None,
        teacher: Teacher | None = None,
        masks: bool = False,
    ) -> None:
        self._store = store
        self._masks = masks
        self.teacher = teacher
        self.row = row
        self.session = session
        self.outcome = outcome
        self.id = row.id
        self.reward = None if outcome is None else outcome.reward
        self.resolved = None if outcome is None else outcome.resolved
        self.kind = "" if outcome is None else outcome.kind
        self.group = find_group(row, outcome)
        self.task = find_task(row, outcome)

    @cached_property
    def rows(self) -> list[Sample]:
        """The rows with at least one trained token."""
        return self._add_rewards(build_samples(self.session.trace, self.session.config.policy, masks=self._masks))

    def rows_with(self, side: Collection[str]) -> list[Sample]:
        """Return `rows` with the side data named in `side`. The result is not cached, because side data may be large."""
        if not side:
            return self.rows
        arrays = self._store.side_data.load(self.session, side)
        return self._add_rewards(build_samples(self.session.trace, self.session.config.policy, side=arrays))

    @property
    def turn_rewards(self) -> tuple[TurnReward, ...] | None:
        """The rewards of the rollout's turns, or None if none were given."""
        rewards = msgspec.UNSET if self.outcome is None else self.outcome.turn_rewards
        return None if isinstance(rewards, msgspec.UnsetType) else rewards

    def _add_rewards(self, rows: list[Sample]) -> list[Sample]:
        return add_turn_rewards(rows, self.turn_rewards or ())

    @cached_property
    def branches(self) -> list[Sample]:
        """The rows of all branches, including branches with nothing to train on."""
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
        """Return the tools of a context as the JSON that the agent sent."""
        return self._preambles.get(context.info.preamble, (b"[]", b""))[0]

    @property
    def is_excluded(self) -> bool:
        """Whether a refused call excludes the whole rollout from training."""
        return bool(find_exclusion(self.session.trace.refused, self.session.config.policy))

    def explain_untrained(self) -> str:
        """Return why no token of the rollout is trained, and what to change, as a reason for `Exclusions`."""
        trace = self.session.trace
        masked = None if self._masks else ()
        report = report_training(trace, assign_roles(trace), self.session.config.policy, masked=masked)
        return f"a rollout with nothing to train on: {report.reason}; {report.fix}"

    @property
    def has_valid_outcome(self) -> bool:
        """Whether the outcome is neither an invalid task nor an infrastructure fault. Also true without an outcome."""
        return self.kind not in NO_REWARD

    def metadata(self, name: str) -> str:
        return _text(self.row.config.metadata.get(name))

    @property
    def truncated(self) -> bool:
        """Whether a limit or a timeout ended the rollout, or a turn ended at its token limit."""
        status = self.outcome.data.get("status") if self.outcome and isinstance(self.outcome.data, dict) else None
        return self.session.truncated or status in ("limit", "timed out")


class RecordedGroup:
    """The rollouts of a group. `selected` contains those that match the filter.

    `others` contains the remaining rollouts if the format needs whole groups, and is empty otherwise.
    """

    def __init__(self, name: str, selected: list[RecordedRollout], others: list[RecordedRollout]) -> None:
        self.name = name  # empty for a rollout without a group
        self.selected = selected
        self.others = others


class RolloutSource(AbstractContextManager["RolloutSource"]):
    def __init__(
        self, data: str | Path, filter: RolloutFilter, exclusions: Exclusions, *, whole_groups: bool = False
    ) -> None:
        self.teacher: Teacher | None = None  # has scores of the rollouts' rows, if the export has a teacher
        self.masks = False  # whether the export includes sampling masks
        self._filter = filter
        self._exclusions = exclusions
        self._whole_groups = whole_groups
        self._seen = 0  # sessions in the store
        self.unmatched = (
            filter.name_filters
        )  # filters that match no session; complete once `groups` has read all sessions
        self.store = open_store_for_reading(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()

    def groups(self) -> Iterator[RecordedGroup]:
        found = self._index()
        if not any(matches for members in found.values() for _, matches in members):
            raise ConfigError(f"data: {self._explain_empty()}", param="data")
        for (name, _), members in found.items():
            if not any(matches for _, matches in members):
                continue
            selected = [loaded for key, matches in members if matches and (loaded := self._load(key)) is not None]
            others = [
                loaded
                for key, matches in members
                if self._whole_groups and not matches and (loaded := self._load(key)) is not None
            ]
            yield RecordedGroup(name, selected, others)

    def _index(self) -> dict[tuple[str, int], list[tuple[int, bool]]]:
        """Map each group to the keys of its sessions and whether each session matches the filter.

        A session without a group forms its own group.
        """
        found: dict[tuple[str, int], list[tuple[int, bool]]] = {}
        before: int | None = None
        newest_first = []
        while page := self.store.sessions(before=before, limit=_PAGE):
            before = page[-1].key
            keys = [row.key for row in page]
            outcomes, excluded = self.store.outcomes.read(keys), self.store.attempts.explain_exclusions(keys)
            self._seen += len(page)
            for row in page:
                stored = outcomes.get(row.key)
                outcome = stored if isinstance(stored, RecordedOutcome) else None
                self._note_matches(row, outcome)
                if row.damaged:
                    if self._filter.may_match(row, outcome):
                        self._exclusions.add(f"a rollout: {row.damaged}")
                    continue
                matches = self._filter.matches(row, outcome)
                why = excluded.get(row.key) or ("" if row.status == "sealed" else f"its session is {row.status}")
                if why and not self._filter.unfinished:
                    if matches:
                        self._exclusions.add(f"a rollout: {why} (--unfinished includes it)")
                    continue
                newest_first.append((find_group(row, outcome), row.key, matches))
        for name, key, matches in reversed(newest_first):
            found.setdefault((name, 0 if name else key), []).append((key, matches))
        return found

    def _note_matches(self, row: SessionRow, outcome: RecordedOutcome | None) -> None:
        """Remove from `unmatched` the filters that match a session."""
        if self.unmatched:
            names = {"group": find_group(row, outcome), "task": find_task(row, outcome), "session": row.id}
            self.unmatched = {
                text: (flag, pattern)
                for text, (flag, pattern) in self.unmatched.items()
                if not fnmatchcase(names[flag], pattern)
            }

    def _load(self, key: int) -> RecordedRollout | None:
        row = self.store.find_key(key)
        if row is None:
            self._exclusions.add("a rollout whose session was deleted during the export")
            return None
        outcome = self.store.outcomes.find(key)
        if isinstance(outcome, DamagedOutcome):  # damaged since the index was built
            self._exclusions.add(f"a rollout: {outcome.message}")
            return None
        try:
            session = self.store.load(row)
        except StoreError:
            self._exclusions.add("a rollout whose trace is damaged on disk")
            return None
        return RecordedRollout(self.store, row, session, outcome, self.teacher, self.masks)

    def _explain_empty(self) -> str:
        """Explain why no rollout can be exported."""
        if not self._seen:
            return "no rollouts are recorded in this store; pass the --data of a gateway that has recorded some"
        filters, left = self._filter.filters, str(self._exclusions)
        if not filters:
            return f"no rollout can be exported (recorded: {count_rollouts(self._seen)}); left out: {left}"
        hint = f"left out: {left}" if left else "change the filters, or leave them out"
        return f"no rollout can be exported with {' '.join(filters)} (recorded: {count_rollouts(self._seen)}); {hint}"


def count_rollouts(rollouts: int) -> str:
    return f"{rollouts:,} rollout{'' if rollouts == 1 else 's'}"


def find_group(row: SessionRow, outcome: RecordedOutcome | None) -> str:
    return outcome.group if outcome is not None else _text(row.config.metadata.get("group"))


def find_task(row: SessionRow, outcome: RecordedOutcome | None) -> str:
    recorded = "" if outcome is None else outcome.task
    return recorded or _text(row.config.metadata.get("task"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
