"""The `rows` format: complete training rows with ids, mask, log-probabilities, spans, reward, advantage and weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec
import numpy as np

from turngate.trace.advantage import compute_advantages, row_weight
from turngate.trace.sample import UNKNOWN_VERSION, Sample
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import TOO_LARGE, has_too_large_reward
from turngate.trainers.export.side_data import encode_columns
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout
from turngate.trainers.export.teacher import add_scores, describe_teacher, encode_scores
from turngate.trainers.export.turn_rewards import (
    count_missing_rewards,
    credit_group,
    describe_turns,
    list_turn_columns,
)
from turngate.types import Json

_COLUMNS = {
    "session": "text",
    "group": "text",
    "task": "text",
    "attempt": "int",
    "kind": "text",
    "reward": "number",
    "resolved": "flag",
    "advantage": "number",
    "weight": "number",
    "truncated": "flag",
    "stop": "text",
    "model": "text",
    "agent": "text",
    "branch": "int",
    "ids": "id[]",
    "mask": "flag[]",
    "logprobs": "logprob[]",
    "version_start": "int",
    "version_end": "int",
    "spans": "json",
    "outcome": "json",
    "vocabulary": "text",
    "opened": "number",
    "closed": "number",
}
_ROW_COLUMNS = frozenset({"branch", "ids", "mask", "logprobs", "version_start", "version_end", "spans"})
# Columns with the same value in all rows of a rollout.
ROLLOUT_COLUMNS = {name: kind for name, kind in _COLUMNS.items() if name not in _ROW_COLUMNS}


class Rows:
    name = "rows"
    whole_groups = True  # the baseline covers the whole group, including rollouts that are not selected

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices, "advantage", "side", "turn_rewards", "credit", "teacher")

    def layout(self, choices: ExportChoices) -> RecordLayout:
        columns = _COLUMNS | list_side_columns(choices) | list_turn_columns(choices)
        return RecordLayout(what="rows", columns=columns)

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return ("branches with nothing to train on, and the text that the ids encode",)

    def find_scored_session(self, record: Record) -> str:
        return str(record["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        credited = credit_group(group, choices)
        for rollout, advantage in compute_group_advantages(group, choices, exclusions):
            count_missing_rewards(rollout, choices, exclusions, credited)
            shared = describe_training(rollout, advantage)
            for row, unscored in add_scores(rollout, choices, exclusions):
                record = describe_row(shared, row)
                if list_side_columns(choices):
                    record["side"] = encode_columns(row.side, choices.side, exclusions) | encode_scores(row)
                turns = describe_turns(rollout, row, choices, credited)
                yield {**record, **turns, **describe_teacher(rollout.teacher, unscored)}


def list_side_columns(choices: ExportChoices) -> dict[str, str]:
    """Return the columns for side data and for a teacher's scores, if they were requested."""
    side = {"side": "json"} if choices.side or choices.teacher is not None else {}
    return side | ({"teacher": "json"} if choices.teacher is not None else {})


def compute_group_advantages(
    group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions
) -> Iterator[tuple[RecordedRollout, float | None]]:
    """Yield each selected rollout with its advantage.

    Rollouts that have no rows, or whose reward is too large, are counted in `exclusions` and not yielded.
    """
    rollouts = [*group.selected, *group.others]
    # As in a feed, the baseline ignores rollouts with nothing to train on.
    rewards = [rollout.reward if rollout.rows else None for rollout in rollouts]
    computed = compute_advantages(rewards, choices.advantage)
    for rollout, advantage in zip(group.selected, computed, strict=False):
        if not rollout.rows:
            exclusions.add(rollout.explain_untrained())
        elif has_too_large_reward(rollout):
            exclusions.add(TOO_LARGE)
        else:
            yield rollout, advantage


def describe_training(rollout: RecordedRollout, advantage: float | None) -> dict[str, Json]:
    """Return the fields that are the same in all rows of a rollout."""
    stored, outcome = rollout.row, rollout.outcome
    return {
        **describe_rollout(rollout),
        "advantage": advantage,
        "weight": row_weight(len(rollout.rows)),
        "truncated": rollout.truncated,
        "stop": rollout.session.stop,
        "model": stored.config.model,
        "agent": rollout.metadata("agent"),
        "outcome": None if outcome is None else outcome.data,
        "vocabulary": stored.vocabulary,
        "opened": stored.opened,
        "closed": stored.closed,
    }


def describe_row(rollout: Mapping[str, Json], row: Sample) -> dict[str, Json]:
    """Return the record of a row without optional fields, such as side data. `rollout` contains the rollout's fields."""
    fields = {
        **rollout,
        "branch": row.branch,
        "ids": row.ids,
        "mask": row.mask,
        "logprobs": row.logprobs,
        **version_range(row),
        "spans": msgspec.to_builtins(row.spans),
    }
    return {name: fields[name] for name in _COLUMNS}


def describe_rollout(rollout: RecordedRollout) -> dict[str, Json]:
    """Return the fields that identify a rollout and describe its outcome. An unknown reward is null."""
    return {
        "session": rollout.id,
        "group": rollout.group,
        "task": rollout.task,
        "attempt": 1 if rollout.outcome is None else rollout.outcome.attempt,
        "kind": rollout.kind or None,
        "reward": rollout.reward,
        "resolved": rollout.resolved,
    }


def version_range(row: Sample) -> dict[str, int]:
    """Return the lowest and highest policy version of the trained tokens."""
    trained = [span for span in row.spans if span.trained]
    return {
        "version_start": min(span.version_start for span in trained),
        "version_end": max(span.version_end for span in trained),
    }


def describe_versions(row: Sample, start: int, end: int) -> dict[str, Json]:
    """Return the policy versions of the trained tokens from `start` to `end`, for formats without a per-token version field.

    `token_versions` lists runs of trained tokens as [first, end, version], with positions counted from `start`. The version is None if it
    is unknown. `version_start` and `version_end` are those of the whole row.
    """
    versions, trained = row.token_versions()[start:end], row.mask[start:end]
    edges = np.flatnonzero(np.diff(versions) | np.diff(trained.astype(np.int8))) + 1
    runs = pairwise([0, *edges.tolist(), len(versions)])
    known = [
        [first, last, None if versions[first] == UNKNOWN_VERSION else int(versions[first])]
        for first, last in runs
        if first < last and trained[first]
    ]
    return {**version_range(row), "token_versions": known}
