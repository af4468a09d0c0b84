"""Our own training rows, whole: ids, mask, log-probabilities, spans with roles and policy versions, reward, advantage, weight."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from turngate.trace.advantage import compute_advantages, is_too_large, row_weight
from turngate.trace.sample import Sample
from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.filters import TOO_LARGE
from turngate.trainers.export.source import Group, Left, Rollout
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


class Rows:
    name = "rows"
    whole_groups = True  # the baseline is over all of a group, whichever of them are asked for

    def checked(self, choices: Choices) -> Choices:
        return only(choices, "advantage")

    def layout(self, choices: Choices) -> Layout:
        return Layout(what="rows", columns=_COLUMNS)

    def lost(self, choices: Choices) -> tuple[str, ...]:
        return ("branches in which nothing may be trained, and the words behind the ids",)

    def scored(self, record: Record) -> str:
        return str(record["session"])

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        every = [*group.wanted, *group.others]
        # As a feed counts: a rollout of which nothing can be trained has no say.
        found = compute_advantages([one.reward if one.rows else None for one in every], choices.advantage)
        for rollout, advantage in zip(group.wanted, found, strict=False):
            if not rollout.rows:
                left.out("nothing of it may be trained")
            elif rollout.reward is not None and is_too_large(rollout.reward):
                left.out(TOO_LARGE)
                continue
            for row in rollout.rows:
                yield _record(rollout, row, advantage)


def _record(rollout: Rollout, row: Sample, advantage: float | None) -> Record:
    stored, outcome = rollout.row, rollout.outcome
    return {
        **about(rollout),
        "advantage": advantage,
        "weight": row_weight(len(rollout.rows)),
        "truncated": rollout.truncated,
        "stop": rollout.session.stop,
        "model": stored.config.model,
        "agent": rollout.metadata("agent"),
        "branch": row.branch,
        "ids": row.ids,
        "mask": row.mask,
        "logprobs": row.logprobs,
        **versions(row),
        "spans": msgspec.to_builtins(row.spans),
        "outcome": None if outcome is None else outcome.data,
        "vocabulary": stored.vocabulary,
        "opened": stored.opened,
        "closed": stored.closed,
    }


def about(rollout: Rollout) -> dict[str, Json]:
    """By what a record is known again. A reward that is not known is null."""
    return {
        "session": rollout.id,
        "group": rollout.group,
        "task": rollout.task,
        "attempt": 1 if rollout.outcome is None else rollout.outcome.attempt,
        "kind": rollout.kind or None,
        "reward": rollout.reward,
        "resolved": rollout.resolved,
    }


def versions(row: Sample) -> dict[str, int]:
    """Of the policy, at the first and the last of the trained tokens."""
    trained = [span for span in row.spans if span.trained]
    return {
        "version_start": min(span.version_start for span in trained),
        "version_end": max(span.version_end for span in trained),
    }
