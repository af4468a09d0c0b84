"""The `tree` format: the rows of a rollout as one tree, in which each shared prefix is stored once.

`decode_tree` reads a record, and `rebuild_rows` converts it to the records that `turngate export rows` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from turngate.common.validation import parse_json
from turngate.errors import ConfigError
from turngate.trace.prefix_tree import (
    InvalidTree,
    PrefixTree,
    RowPath,
    Segment,
    UnequalSideData,
    build_tree,
    check_tree,
)
from turngate.trace.sample import Sample
from turngate.trace.turn_advantage import spread_advantages
from turngate.trace.turn_rewards import RowReward, spread_rewards
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.rows import (
    ROLLOUT_COLUMNS,
    compute_group_advantages,
    describe_row,
    describe_training,
    list_side_columns,
)
from turngate.trainers.export.side_data import count_missing, decode_columns, encode_column
from turngate.trainers.export.source import Exclusions, RecordedGroup
from turngate.trainers.export.teacher import add_scores, describe_teacher
from turngate.trainers.export.turn_rewards import (
    count_missing_rewards,
    credit_group,
    describe_turns,
    list_turn_columns,
)
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Json, TokenId

_TREE_COLUMNS = {
    "ids": "id[]",
    "positions": "id[]",
    "mask": "flag[]",
    "logprobs": "logprob[]",
    "segments": "json",
    "rows": "json",
}


_TURN_COLUMNS = frozenset({"turn_rewards", "turn_advantages"})  # lists by row; values per token follow from them


class Tree:
    name = "tree"
    whole_groups = True  # as in `rows`

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices, "advantage", "side", "turn_rewards", "credit", "teacher")

    def layout(self, choices: ExportChoices) -> RecordLayout:
        turns = {name: "json" for name in list_turn_columns(choices) if name in _TURN_COLUMNS}
        return RecordLayout(what="trees", columns=ROLLOUT_COLUMNS | _TREE_COLUMNS | list_side_columns(choices) | turns)

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return ("branches with nothing to train on, and the text that the ids encode",)

    def find_scored_session(self, record: Record) -> str:
        return str(record["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        credited = credit_group(group, choices)
        for rollout, advantage in compute_group_advantages(group, choices, exclusions):
            scored = add_scores(rollout, choices, exclusions)
            rows = [row for row, _ in scored]
            try:
                tree = build_tree(rows)
            except UnequalSideData as error:
                exclusions.add(f"a rollout: {error}, so one tree cannot hold the data; use the format `rows`")
                continue
            count_missing_rewards(rollout, choices, exclusions, credited)
            for row in rows:
                count_missing(row.side, choices.side, exclusions)
            record = {**describe_training(rollout, advantage), **_describe_tree(tree)}
            if list_side_columns(choices):
                record["side"] = {name: encode_column(column) for name, column in tree.side.items()}
            turns = [describe_turns(rollout, row, choices, credited) for row in rows]
            for name in _TURN_COLUMNS & turns[0].keys():  # null for all rows of a rollout, or for none
                record[name] = None if turns[0][name] is None else [fields[name] for fields in turns]
            unscored = {str(row.branch): reason for row, reason in scored if reason}
            yield {**record, **describe_teacher(rollout.teacher, unscored)}


def _describe_tree(tree: PrefixTree) -> dict[str, Json]:
    return {
        "ids": tree.ids,
        "positions": tree.positions,
        "mask": tree.mask,
        "logprobs": tree.logprobs,
        "segments": msgspec.to_builtins(tree.segments),
        "rows": msgspec.to_builtins(tree.rows),
    }


class ExportedTree(msgspec.Struct, frozen=True, eq=False):
    """The tree of an exported rollout, and the advantage and the weight of its rows."""

    session: str
    advantage: float | None  # None: the reward is unknown, or there is no other reward to compare it with
    weight: float  # of each row
    tree: PrefixTree
    # By row, as in `Row`. None: they were not exported, or the rollout has none.
    turn_rewards: tuple[tuple[RowReward, ...], ...] | None = None
    turn_advantages: tuple[tuple[float | None, ...], ...] | None = None


class _TreeRecord(msgspec.Struct, frozen=True):
    """The fields of a record that `decode_tree` reads."""

    session: str
    advantage: float | None
    weight: float
    ids: list[TokenId]
    positions: list[TokenId]  # the same range
    mask: list[bool]
    logprobs: list[float | None]
    segments: tuple[Segment, ...]
    rows: tuple[RowPath, ...]
    turn_rewards: tuple[tuple[RowReward, ...], ...] | None = None
    turn_advantages: tuple[tuple[float | None, ...], ...] | None = None


def decode_tree(record: Record) -> ExportedTree:
    """Decode a record from a JSON Lines or Parquet file. If it is not a valid tree, raise a `ConfigError` that names the invalid field."""
    # In a Parquet file, these fields are text.
    names = ("segments", "rows", *_TURN_COLUMNS)
    nested = {name: _parse(name, record[name]) for name in names if isinstance(record.get(name), str)}
    try:
        fields = msgspec.convert({**record, **nested}, _TreeRecord)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the record is not a tree that `turngate export tree` wrote: {error}") from None
    tree = PrefixTree(
        np.array(fields.ids, ID_DTYPE),
        np.array(fields.positions, ID_DTYPE),
        np.array(fields.mask, np.bool_),
        np.array([np.nan if p is None else p for p in fields.logprobs], LOGPROB_DTYPE),
        fields.segments,
        fields.rows,
        decode_columns(record.get("side") or {}),
    )
    try:
        check_tree(tree)
    except InvalidTree as error:
        raise ConfigError(str(error), param=error.field) from None
    exported = ExportedTree(
        fields.session, fields.advantage, fields.weight, tree, fields.turn_rewards, fields.turn_advantages
    )
    _check_turn_values(exported)
    return exported


def _check_turn_values(exported: ExportedTree) -> None:
    rows = exported.tree.rebuild_rows() if exported.turn_rewards or exported.turn_advantages else []
    for name in _TURN_COLUMNS:
        values = getattr(exported, name)
        if values is not None and len(values) != len(exported.tree.rows):
            raise ConfigError(
                f"{name} has length {len(values)}, but 'rows' has length {len(exported.tree.rows)}", param=name
            )
    for number, row in enumerate(rows):
        rewards = exported.turn_rewards[number] if exported.turn_rewards else ()
        if any(not 0 <= reward.start < reward.end <= len(row.ids) for reward in rewards):
            raise ConfigError(
                f"turn_rewards[{number}] has a reward whose 'start' and 'end' are not a valid range within the row's {len(row.ids)} tokens",
                param="turn_rewards",
            )
        if exported.turn_advantages and len(exported.turn_advantages[number]) != len(row.spans):
            raise ConfigError(
                f"turn_advantages[{number}] must have one value per turn (turns: {len(row.spans)})",
                param="turn_advantages",
            )


def _parse(name: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read as JSON: {error}", param=name) from None


def rebuild_rows(record: Record) -> list[Record]:
    """Return the records that `turngate export rows` writes for the rollout of a tree. Ids, mask and log-probabilities are arrays."""
    exported = decode_tree(record)
    for name in ROLLOUT_COLUMNS:
        if name not in record:
            raise ConfigError(f"the record has no field {name!r}; export the tree again", param=name)
    shared = {name: record[name] for name in ROLLOUT_COLUMNS}
    return [
        {
            **describe_row(shared, row),
            **_rebuild_extras(record, row),
            **_rebuild_turn_values(record, exported, number, row),
        }
        for number, row in enumerate(exported.tree.rebuild_rows())
    ]


def _rebuild_turn_values(record: Record, exported: ExportedTree, number: int, row: Sample) -> dict[str, Json]:
    """Return the fields for the rewards and for the advantages of a row's turns, if the record contains them."""
    fields: dict[str, Json] = {}
    if "turn_rewards" in record:
        rewards = None if exported.turn_rewards is None else exported.turn_rewards[number]
        fields["turn_rewards"] = None if rewards is None else msgspec.to_builtins(rewards)
        fields["token_rewards"] = None if rewards is None else spread_rewards(len(row.ids), rewards)
    if "turn_advantages" in record:
        values = None if exported.turn_advantages is None else exported.turn_advantages[number]
        fields["turn_advantages"] = None if values is None else list(values)
        fields["token_advantages"] = None if values is None else spread_advantages(len(row.ids), row.spans, values)
    return fields


def _rebuild_extras(record: Record, row: Sample) -> dict[str, Json]:
    """Return the fields `side` and `teacher` of a row, which are present only if they were requested."""
    extras: dict[str, Json] = {}
    if "side" in record:
        extras["side"] = {name: encode_column(column) for name, column in row.side.items()}
    if "teacher" in record:
        teacher = record["teacher"]
        teacher = _parse("teacher", teacher) if isinstance(teacher, str) else teacher
        extras["teacher"] = {**teacher, "unscored": teacher["unscored"].get(str(row.branch), "")}
    return extras
