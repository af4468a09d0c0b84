"""Tests for the export format `tree`: its rows are exactly those of the format `rows`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import page_kit
from tests.trainers.test_export import Recording, recording, shared_recording  # noqa: F401
from turngate.errors import ConfigError
from turngate.trainers.export import ExportChoices, export
from turngate.trainers.export.files import encode_json
from turngate.trainers.export.tree import decode_tree, rebuild_rows
from turngate.trainers.tree_batch import read_trees


def rebuild(trees: list[Any]) -> list[Any]:
    return [json.loads(encode_json(row)) for tree in trees for row in rebuild_rows(tree)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rebuilt_rows_equal_flat_rows(recording: Recording, suffix: str) -> None:  # noqa: F811
    flat, _ = recording.export("rows", unfinished=True)
    trees, done = recording.export("tree", suffix, unfinished=True)
    assert len(trees) == len({row["session"] for row in flat}) == 7 and done.records == 7
    if suffix == ".parquet":
        trees = [{**tree, "outcome": tree["outcome"] and json.loads(tree["outcome"])} for tree in trees]
    assert rebuild(trees) == flat
    forked = next(tree for tree in trees if tree["session"] == recording.ids["forked"])
    rows = [row for row in flat if row["session"] == recording.ids["forked"]]
    assert len(rows) == 3 and len(forked["ids"]) < sum(len(row["ids"]) for row in rows)
    assert [exported.session for exported in read_trees(recording.out / f"out{suffix}")] == [
        tree["session"] for tree in trees
    ]


def test_long_rollout_with_every_kind_of_branch(tmp_path: Path) -> None:
    """It has a compaction, a retry after an aborted turn, a sub-agent, and a side call."""
    page_kit.add_long_rollout(tmp_path, turns=40, tokens=8000)
    for name in ("rows", "tree"):
        export(tmp_path, tmp_path / f"{name}.jsonl", ExportChoices(format=name))
    flat, trees = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("rows", "tree")
    )
    assert rebuild(trees) == flat and len(flat) > 2
    [tree] = trees
    shared = sum(len(row["ids"]) for row in flat) - len(tree["ids"])
    assert shared >= 8, "the conversation after the compaction begins with the same eight tokens"


Change = Callable[[Any], None]

DAMAGED: list[tuple[str, Change, str]] = [
    ("a missing field", lambda tree: tree.pop("ids"), "missing required field `ids`"),
    ("a short array", lambda tree: tree["mask"].pop(), "mask has length .*, but ids has length"),
    ("a gap", lambda tree: tree["segments"].pop(0), r"segments\[0\].start must be 0"),
    ("a missing end", lambda tree: tree["segments"].pop(), "segments end at token .*, but ids has length"),
    (
        "a later parent",
        lambda tree: tree["segments"][1].update(parent=2),
        r"segments\[1\].parent must be null, 0 or an ancestor",
    ),
    (
        "a wrong position",
        lambda tree: tree["segments"][1].update(position=0),
        r"segments\[1\].position must be .* count up from there",
    ),
    ("a wrong range", lambda tree: tree["segments"][1].update(attends=[]), r"segments\[1\].attends must be the ranges"),
    (
        "a wrong mask",
        lambda tree: tree.update(mask=[True] * len(tree["ids"])),
        r"mask must be false for .* segments\[0\]",
    ),
    (
        "a missing log-probability",
        lambda tree: tree.update(logprobs=[None] * len(tree["ids"])),
        "is trained, but not all of its log-probabilities are finite",
    ),
    ("a broken path", lambda tree: tree["rows"][0]["segments"].pop(0), r"rows\[0\].segments is not a path"),
    ("an empty path", lambda tree: tree["rows"][0]["segments"].clear(), r"rows\[0\].segments is empty"),
    (
        "an unknown row",
        lambda tree: tree["segments"][1]["turn"].update(trained_in=9),
        r"segments\[1\].turn.trained_in must be the index of a row",
    ),
    ("a large id", lambda tree: tree["ids"].__setitem__(0, 2**31), r"Expected `int` <= 2147483647 - at `\$\.ids\[0\]`"),
    ("a large position", lambda tree: tree["positions"].__setitem__(0, 2**31), r"`\$\.positions\[0\]`"),
    ("text that is not JSON", lambda tree: tree.update(rows="{"), "rows cannot be read as JSON"),
    (
        "nested text",
        lambda tree: tree.update(rows="[" * 5000),
        "rows cannot be read as JSON: a value is nested too deeply",
    ),
    (
        "nested side data",
        lambda tree: tree.update(side='{"a": {"b": ' + "[" * 5000),
        "the side data is invalid: it is nested too deeply",
    ),
    ("a lone surrogate", lambda tree: tree.update(side="\ud800"), "the side data is invalid"),
]


@pytest.mark.parametrize(("change", "error"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED])
def test_damaged_tree_is_rejected(recording: Recording, change: Change, error: str) -> None:  # noqa: F811
    [tree], _ = recording.export("tree", sessions=(recording.ids["good"],))
    decode_tree(tree)
    change(tree)
    with pytest.raises(ConfigError, match=error):
        decode_tree(tree)
    with pytest.raises(ConfigError, match=error):
        rebuild_rows(tree)


def test_tree_without_a_column_is_rejected(recording: Recording) -> None:  # noqa: F811
    [tree], _ = recording.export("tree", sessions=(recording.ids["good"],))
    del tree["task"]
    with pytest.raises(ConfigError, match="the record has no field 'task'; export the tree again"):
        rebuild_rows(tree)
    with pytest.raises(ConfigError):
        rebuild_rows({})
