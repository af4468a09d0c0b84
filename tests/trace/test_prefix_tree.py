"""Test prefix trees: rows rebuilt from a tree equal the rows that it was built from, and shared tokens are stored once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.kit import Call, Recorder, assistant, user
from tests.trace.test_samples import CASES, FIRST, WORK
from tests.trace.test_side_data import Tree, array
from turngate.trace.prefix_tree import PrefixTree, UnequalSideData, build_tree, find_shared_prefixes
from turngate.trace.roles import ROLES
from turngate.trace.sample import Sample, TrainingPolicy, build_samples
from turngate.trace.tree import Sampled
from turngate.types import SideArray

EVERY_ROLE = TrainingPolicy(roles=ROLES)


def check_tree(rows: Sequence[Sample]) -> PrefixTree:
    """Build the tree of rows, and check everything in it against the rows."""
    tree = build_tree(rows)
    for row, rebuilt in zip(rows, tree.rebuild_rows(), strict=True):
        for field in ("ids", "mask", "logprobs"):
            expected, found = getattr(row, field), getattr(rebuilt, field)
            assert np.array_equal(found, expected, equal_nan=field == "logprobs") and found.dtype == expected.dtype
        assert rebuilt.spans == row.spans and rebuilt.branch == row.branch
        assert rebuilt.side.keys() == row.side.keys()
        for name, column in row.side.items():
            assert rebuilt.side[name].spans == column.spans
            assert np.array_equal(rebuilt.side[name].values, column.values)
    assert tree.mask.sum() == sum(row.trained_tokens for row in rows), "each trained token is in the tree once"
    for row in tree.rows:
        before: list[tuple[int, int]] = []
        for segment in (tree.segments[index] for index in row.segments):
            assert _tokens(segment.attends) == _tokens(before), "a segment attends to its ancestors"
            size = segment.end - segment.start
            assert tree.positions[segment.start : segment.end].tolist() == [
                *range(segment.position, segment.position + size)
            ]
            before.append((segment.start, segment.end))
    return tree


def _tokens(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [token for start, end in ranges for token in range(start, end)]


@pytest.mark.parametrize(("calls", "policy"), [case[1:3] for case in CASES[1:]], ids=[case[0] for case in CASES[1:]])
def test_rows_are_rebuilt(calls: list[Call], policy: TrainingPolicy | None) -> None:
    rows = build_samples(Recorder(calls).trace, policy, keep_empty=True)
    check_tree(rows)
    if trained := build_samples(Recorder(calls).trace, policy):
        check_tree(trained)


def test_turn_without_tokens_is_kept() -> None:
    calls = [Call(FIRST, assistant("On it."), size=0), WORK[1], Call([*FIRST, assistant("On it."), user("Why?")])]
    rows = build_samples(Recorder(calls).trace)
    assert [span.end - span.start for span in rows[0].spans] == [0, 2]
    check_tree(rows)


def add_turn(tree: Tree, parent: Sampled | None, prompt: list[int], reply: list[int]) -> Sampled:
    """Record a call. Its new ids are `prompt`, and the model samples `reply`."""
    turn = tree.call(parent, prompt=len(prompt), reply=len(reply))
    turn.parent._array, turn._array = np.array(prompt, np.int32), np.array(reply, np.int32)
    return turn


def test_sub_agents_share_tokens_of_their_prompts() -> None:
    """Sub-agents are conversations of their own, whose prompts begin with the same tokens."""
    tree = Tree()
    for number in range(8):
        add_turn(tree, None, [1, 2, 3, 4, 100 + number], [9, 9])
    found = check_tree(build_samples(tree.trace, EVERY_ROLE))
    assert len(found.ids) == 4 + 8 * 3
    assert [segment.parent for segment in found.segments if segment.turn is None] == [None, *[0] * 8]


def test_shared_tokens_are_trained_in_one_row() -> None:
    tree = Tree()
    first = add_turn(tree, None, [1, 2], [3, 4])
    add_turn(tree, first, [5, 6], [7])
    add_turn(tree, first, [5, 8], [9])
    found = check_tree(build_samples(tree.trace, EVERY_ROLE))
    assert found.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6]
    assert [segment.parent for segment in found.segments] == [None, 0, 1, 2, 3, 2, 5]
    assert found.segments[-1].attends == ((0, 5), (7, 8))
    assert [segment.turn.trained_in for segment in found.segments if segment.turn] == [0, 0, 1]


def test_equal_ids_of_different_turns_are_not_shared() -> None:
    """Two answers to one request have their own log-probabilities, even if their ids are equal."""
    tree = Tree()
    first = add_turn(tree, None, [1, 2], [3, 4])
    tree.call(None, context=first.parent)
    tree.trace.nodes[-1]._array = np.array([3, 4], np.int32)
    found = check_tree(build_samples(tree.trace, EVERY_ROLE))
    assert found.ids.tolist() == [1, 2, 3, 4, 3, 4] and found.mask.sum() == 4


def test_tokens_with_different_side_data_are_not_shared() -> None:
    tree = Tree()
    first = tree.call(None, array(-3, 1, 2, 3, 4))
    tree.call(None, array(-3, 1, 2, 7, 8), context=first.parent)
    found = check_tree(build_samples(tree.trace, EVERY_ROLE, side=tree.arrays))
    assert found.segments[0].end == 2 and len(found.ids) == 2 + 3 + 3


def test_side_data_can_divide_a_turn() -> None:
    tree = Tree()
    first = tree.call(None, array(-3, 1, 2, 3, 4))  # the engine does not report the last token of a reply
    for value in (5, 6):
        tree.call(first, array(-4, value, 1, 1, 1, 1))  # but the next call does
    found = check_tree(build_samples(tree.trace, EVERY_ROLE, side=tree.arrays))
    turns = [segment.turn for segment in found.segments if segment.turn and segment.turn.node == first.id]
    assert [turn.trained_in for turn in turns] == [0, 0, None], "the first token, and two versions of the second"


def test_side_data_of_different_shapes_is_rejected() -> None:
    tree = Tree()
    tree.call(None, array(-3, 1, 2, 3, 4))
    tree.call(None, SideArray("experts", -3, np.ones((4, 1), np.uint8)))
    with pytest.raises(UnequalSideData, match="experts differs in type or shape between branches"):
        build_tree(build_samples(tree.trace, EVERY_ROLE, side=tree.arrays))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=9)
)
def test_random_traces_are_rebuilt(steps: list[tuple[int, int, bool, int]]) -> None:
    """Each step continues an earlier turn or starts a conversation, or answers an earlier prompt again."""
    tree = Tree()
    turns: list[Sampled] = []
    for choice, size, again, value in steps:
        parent = turns[choice] if choice < len(turns) else None
        reported = [array(-1, *[value] * (size + 1))] if value else []
        context = parent.parent if parent is not None and again else None
        above = parent if context is None else context.parent
        turns.append(tree.call(above, *reported, prompt=1 + size, reply=size, context=context))
    for side in (None, tree.arrays):
        check_tree(build_samples(tree.trace, EVERY_ROLE, keep_empty=True, side=side))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_layout_is_the_smallest(rows: list[list[int]]) -> None:
    layout = find_shared_prefixes([[np.array(row)] for row in rows])
    assert layout.starts[-1] == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    packed, until = layout.pack([np.array(row) for row in rows]), layout.until()
    for number, row in enumerate(rows):
        places = layout.places(number)
        assert packed[places].tolist() == row and layout.positions()[places].tolist() == [*range(len(row))]
        last = places[-1]
        assert [key for key in range(last + 1) if last < until[key]] == places.tolist(), "it attends to its row only"
