"""Turn rewards and turn advantages in exported records. Both are null if the rollout has no turn rewards."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from turngate.trace.sample import Sample
from turngate.trace.turn_advantage import (
    ScoredRollout,
    TurnAdvantages,
    compute_turn_advantages,
    spread_advantages,
)
from turngate.trace.turn_rewards import spread_rewards
from turngate.trainers.export.base import ExportChoices
from turngate.trainers.export.filters import has_too_large_reward
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout
from turngate.types import Json

_REWARD_COLUMNS = {"turn_rewards": "json", "token_rewards": "logprob[]"}
_CREDIT_COLUMNS = {"turn_advantages": "number[]", "token_advantages": "logprob[]"}


def list_turn_columns(choices: ExportChoices) -> dict[str, str]:
    """Return the columns that `describe_turns` fills, with their types."""
    return (_REWARD_COLUMNS if choices.turn_rewards else {}) | (_CREDIT_COLUMNS if choices.credit else {})


def describe_turns(
    rollout: RecordedRollout, row: Sample, choices: ExportChoices, credited: Mapping[str, TurnAdvantages]
) -> dict[str, Json]:
    """Return the fields for the rewards and for the advantages of a row's turns, if they are requested."""
    fields: dict[str, Json] = {}
    if choices.turn_rewards:
        fields |= describe_rewards(rollout, row, 0, len(row.ids))
    if choices.credit:
        credit = credited[rollout.id]
        advantages = credit.of_row(row)
        fields["turn_advantages"] = None if credit.missing else list(advantages)
        fields["token_advantages"] = None if credit.missing else spread_advantages(len(row.ids), row.spans, advantages)
    return fields


def describe_rewards(rollout: RecordedRollout, row: Sample, start: int, end: int) -> dict[str, Json]:
    """Return all turn rewards of a row as a list, and the rewards of the tokens from `start` to `end`.

    The positions in the list are counted from `start`.
    """
    if rollout.turn_rewards is None:
        return {"turn_rewards": None, "token_rewards": None}
    placed = [
        msgspec.to_builtins(msgspec.structs.replace(one, start=one.start - start, end=one.end - start))
        for one in row.turn_rewards
    ]
    spread: np.ndarray = spread_rewards(len(row.ids), row.turn_rewards)[start:end]
    return {"turn_rewards": placed, "token_rewards": spread}


def count_missing_rewards(
    rollout: RecordedRollout,
    choices: ExportChoices,
    exclusions: Exclusions,
    credited: Mapping[str, TurnAdvantages] | None = None,
) -> None:
    """Count in `exclusions` the requested turn rewards or turn advantages (`credited`) that a rollout lacks."""
    if (choices.turn_rewards or choices.credit) and rollout.turn_rewards is None:
        exclusions.add("the turn rewards of a rollout: its outcome contains none")
    elif credited and (missing := credited[rollout.id].missing):
        exclusions.add(f"the turn advantages of a rollout: {missing}")


def credit_group(group: RecordedGroup, choices: ExportChoices) -> dict[str, TurnAdvantages]:
    """Compute the turn advantages of all rollouts in a group, by session id. Return an empty dictionary if they are not requested."""
    if not choices.credit:
        return {}
    rollouts = [*group.selected, *group.others]
    scored = [
        ScoredRollout(one.rows, one.reward if one.rows and not has_too_large_reward(one) else None, one.turn_rewards)
        for one in rollouts
    ]
    found = compute_turn_advantages(scored, choices.credit, choices.advantage)
    return {rollout.id: credited for rollout, credited in zip(rollouts, found, strict=True)}
