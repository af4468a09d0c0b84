"""The `tree` format: the rows of a rollout as one tree, in which each prefix that they share is stored once.

`decode_tree` reads a record, and `rebuild_rows` converts it to the records that `turngate export rows` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from turngate.errors import ConfigError
from turngate.trace.prefix_tree import PrefixTree, RowPath, Segment, UnequalSideData, build_tree, list_attended
from turngate.trace.sample import Sample
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
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Json

_TREE_COLUMNS = {
    "ids": "id[]",
    "positions": "id[]",
    "mask": "flag[]",
    "logprobs": "logprob[]",
    "segments": "json",
    "rows": "json",
}


class Tree:
    name = "tree"
    whole_groups = True  # as in `rows`

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices, "advantage", "side", "teacher")

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="trees", columns=ROLLOUT_COLUMNS | _TREE_COLUMNS | list_side_columns(choices))

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return ("branches with nothing to train on, and the text that the ids encode",)

    def find_scored_session(self, record: Record) -> str:
        return str(record["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        for rollout, advantage in compute_group_advantages(group, choices, exclusions):
            scored = add_scores(rollout, choices, exclusions)
            rows = [row for row, _ in scored]
            try:
                tree = build_tree(rows)
            except UnequalSideData as error:
                exclusions.add(f"{error}, which one tree cannot hold; use the format rows")
                continue
            for row in rows:
                count_missing(row.side, choices.side, exclusions)
            record = {**describe_training(rollout, advantage), **_describe_tree(tree)}
            if list_side_columns(choices):
                record["side"] = {name: encode_column(column) for name, column in tree.side.items()}
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


class _TreeRecord(msgspec.Struct, frozen=True):
    """The fields of a record that `decode_tree` reads."""

    session: str
    advantage: float | None
    weight: float
    ids: list[int]
    positions: list[int]
    mask: list[bool]
    logprobs: list[float | None]
    segments: tuple[Segment, ...]
    rows: tuple[RowPath, ...]


def decode_tree(record: Record) -> ExportedTree:
    """Decode a record of a JSON Lines or Parquet file. Raise `ConfigError`, which names the field, if it is not a valid tree."""
    # A Parquet file has these as text.
    nested = {name: _parse(name, record[name]) for name in ("segments", "rows") if isinstance(record.get(name), str)}
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
    _check_arrays(tree)
    _check_segments(tree)
    _check_rows(tree)
    return ExportedTree(fields.session, fields.advantage, fields.weight, tree)


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}", param=name) from None


def _check_arrays(tree: PrefixTree) -> None:
    tokens = len(tree.ids)
    for name in ("positions", "mask", "logprobs"):
        if len(getattr(tree, name)) != tokens:
            raise ConfigError(f"{name} has {len(getattr(tree, name))} values, but ids has {tokens}", param=name)
    for name, column in tree.side.items():
        if column.spans and column.spans[-1][1] > tokens:
            raise ConfigError(f"side.{name}.spans ends after the last of {tokens} tokens", param="side")


def _check_segments(tree: PrefixTree) -> None:
    """Raise `ConfigError` if the segments are not a tree in depth-first order, or contradict the arrays."""
    end = 0
    path: list[int] = []  # from the root to the segment before
    for index, segment in enumerate(tree.segments):
        where = f"segments[{index}]"
        if segment.start != end or segment.end <= segment.start:
            raise ConfigError(f"{where}.start must be {end}, and {where}.end must be greater", param="segments")
        while path and path[-1] != segment.parent:
            path.pop()
        if segment.parent is not None and not path:
            raise ConfigError(f"{where}.parent must be {index - 1} or one of its ancestors", param="segments")
        above = tree.segments[path[-1]] if path else None
        first = 0 if above is None else above.position + above.end - above.start
        positions = np.arange(first, first + segment.end - segment.start)
        if segment.position != first or not np.array_equal(tree.positions[segment.start : segment.end], positions):
            raise ConfigError(
                f"{where}.position must be {first}, and the positions of its tokens must count up from there",
                param="segments",
            )
        if segment.attends != list_attended(tree.segments, segment.parent):
            raise ConfigError(f"{where}.attends must be the tokens of its ancestors", param="segments")
        trained = segment.turn is not None and segment.turn.trained_in is not None
        if (tree.mask[segment.start : segment.end] != trained).any():
            raise ConfigError(f"mask must be {str(trained).lower()} for all tokens of {where}", param="mask")
        if trained and (above is None or not np.isfinite(tree.logprobs[segment.start : segment.end]).all()):
            raise ConfigError(f"{where} is trained, but has no prompt or lacks log-probabilities", param="logprobs")
        path.append(index)
        end = segment.end
    if end != len(tree.ids):
        raise ConfigError(f"segments cover {end} tokens, but ids has {len(tree.ids)}", param="segments")


def _check_rows(tree: PrefixTree) -> None:
    for number, row in enumerate(tree.rows):
        above = None
        for index in row.segments:
            if not 0 <= index < len(tree.segments) or tree.segments[index].parent != above:
                raise ConfigError(f"rows[{number}].segments is not a path from the root", param="rows")
            above = index
        if above is None:
            raise ConfigError(f"rows[{number}].segments is empty", param="rows")
    for index, segment in enumerate(tree.segments):
        trained_in = None if segment.turn is None else segment.turn.trained_in
        if trained_in is not None and not (
            0 <= trained_in < len(tree.rows) and index in tree.rows[trained_in].segments
        ):
            raise ConfigError(
                f"segments[{index}].turn.trained_in must be the index of a row that contains the segment",
                param="segments",
            )


def rebuild_rows(record: Record) -> list[Record]:
    """Return the records that `turngate export rows` writes for the rollout of a tree. Ids, mask and log-probabilities are arrays."""
    shared = {name: record[name] for name in ROLLOUT_COLUMNS}
    rows = decode_tree(record).tree.rebuild_rows()
    return [{**describe_row(shared, row), **_rebuild_extras(record, row)} for row in rows]


def _rebuild_extras(record: Record, row: Sample) -> dict[str, Json]:
    """Return the fields that a row has only if they were requested: its side data and its teacher."""
    extras: dict[str, Json] = {}
    if "side" in record:
        extras["side"] = {name: encode_column(column) for name, column in row.side.items()}
    if "teacher" in record:
        teacher = record["teacher"]
        teacher = _parse("teacher", teacher) if isinstance(teacher, str) else teacher
        extras["teacher"] = {**teacher, "unscored": teacher["unscored"].get(str(row.branch), "")}
    return extras
