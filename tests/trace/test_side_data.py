"""Side data: which values a turn stores, and how rows get them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.trace.sample import TrainingPolicy, build_samples
from turngate.trace.side_data import (
    InvalidSideData,
    SideColumn,
    add_array,
    describe_arrays,
    find_first_missing,
    join_columns,
    select_new,
)
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo, SideRange, Trace, path_to
from turngate.types import SideArray


def array(first: int, *values: int, name: str = "experts", dtype: str = "uint8") -> SideArray:
    return SideArray(name, first, np.array(values, dtype))


class Tree:
    """A trace whose turns record side data as the gateway does. Every context has `prompt` tokens, every reply `reply`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.arrays: dict[int, list[SideArray]] = {}

    def call(
        self,
        parent: Sampled | None,
        *reported: SideArray,
        prompt: int = 3,
        reply: int = 2,
        context: Context | None = None,
    ) -> Sampled:
        if context is None:
            ids = np.arange(prompt, dtype=np.int32)
            context = Context(self.trace.reserve_id(), parent, ids, ContextInfo(b"p", b"m" * 16, "u", False))
            self.trace.add_context(context)
        known: list[SideArray] = []
        for one in reported:
            known = add_array(known, one, parent, context.length)
        kept = select_new(known, parent, context.length, reply)
        info = SampledInfo(b"m", b"", b"", "stop", 0, 0, 0.0, 1.0, side=describe_arrays(kept))
        ids, logprobs = np.arange(reply, dtype=np.int32), np.zeros(reply, np.float32)
        turn = Sampled(self.trace.reserve_id(), context, ids, logprobs, info)
        self.trace.add_sampled(turn)
        self.arrays[turn.id] = kept
        return turn

    def row(self, leaf: Sampled, name: str = "experts") -> dict[int, int]:
        """The value of each token of the row that ends with `leaf`, by position."""
        column = join_columns(path_to(leaf), self.arrays).get(name, SideColumn((), np.empty(0)))
        tokens = [token for start, end in column.spans for token in range(start, end)]
        return dict(zip(tokens, column.values.tolist(), strict=True))


def test_first_call_that_reported_a_value_wins() -> None:
    tree = Tree()
    one = tree.call(None, array(-3, 10, 11, 12, 13))
    two = tree.call(one, array(-8, 20, 21, 22, 23, 24, 25, 26, 27, 28))
    assert one.info.side == (SideRange("experts", -3, 4, "uint8", ()),)
    # The last sampled token of the first turn was not an input yet, so it has the value of the second call.
    assert two.info.side == (SideRange("experts", -4, 5, "uint8", ()),)
    assert tree.row(two) == {0: 10, 1: 11, 2: 12, 3: 13, 4: 24, 5: 25, 6: 26, 7: 27, 8: 28}


def test_branches_have_their_own_values() -> None:
    tree = Tree()
    root = tree.call(None, array(-3, 10, 11, 12, 13))
    left = tree.call(root, array(-4, 1, 2, 3, 4, 5))
    right = tree.call(root, array(-4, 6, 7, 8, 9, 10))
    again = tree.call(root, array(-4, 50, 51, 52, 53, 54), context=left.parent)  # the same prompt, sampled again
    shared = {0: 10, 1: 11, 2: 12, 3: 13}
    assert tree.row(left) == shared | {4: 1, 5: 2, 6: 3, 7: 4, 8: 5}
    assert tree.row(right) == shared | {4: 6, 5: 7, 6: 8, 7: 9, 8: 10}
    assert tree.row(again) == shared | {4: 50, 5: 51, 6: 52, 7: 53, 8: 54}


def test_later_call_fills_what_an_earlier_one_did_not_report() -> None:
    tree = Tree()
    one = tree.call(None)  # aborted, for example
    two = tree.call(one, array(-8, *range(8)))
    three = tree.call(two, array(-4, 70, 71, 72, 73, 74))
    assert find_first_missing(None, "experts") == find_first_missing(one, "experts") == 0
    assert (find_first_missing(two, "experts"), find_first_missing(three, "experts")) == (8, 8)
    assert find_first_missing(three, "other") == 0
    # No call reported tokens 8 and 14, so they have no values.
    assert tree.row(three) == {n: n for n in range(8)} | {9: 70, 10: 71, 11: 72, 12: 73, 13: 74}


def test_values_after_the_end_of_a_cut_reply_are_dropped() -> None:
    tree = Tree()
    turn = tree.call(None, array(-3, 1, 2, 3, 4, 5, 6, 7))
    assert tree.row(turn) == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}


def test_chunks_of_a_stream_are_joined() -> None:
    tree = Tree()
    turn = tree.call(None, array(0, 1), array(1, 2, 3), array(4, 9), reply=5)
    assert [(side.first, side.count) for side in turn.info.side] == [(0, 3), (4, 1)]
    assert tree.row(turn) == {3: 1, 4: 2, 5: 3, 7: 9}


def test_integers_of_different_size_are_joined_without_loss() -> None:
    tree = Tree()
    one = tree.call(None, array(-3, 1, 2, 3, 4))
    two = tree.call(one, array(-4, 300, 301, 302, dtype="uint16"))
    assert tree.row(two) == {0: 1, 1: 2, 2: 3, 3: 4, 4: 300, 5: 301, 6: 302}


def test_names_are_independent() -> None:
    tree = Tree()
    turn = tree.call(None, array(-3, 1, 2, 3, 4), array(0, 8, 9, name="mask", dtype="int32"))
    assert tree.row(turn) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert tree.row(turn, "mask") == {3: 8, 4: 9}


@pytest.mark.parametrize(
    ("reported", "problem"),
    [
        (array(-4, 1), "starts at token -4, but the prompt starts at token -3"),
        (array(0, 1, name="Experts"), "'Experts' is not a valid name"),
        (array(0, 1, dtype="int64"), "has type int64; it must be one of uint8, uint16, int32, float32"),
        (SideArray("experts", 0, np.zeros((1, 2**21), np.uint8)), "has 2097152 bytes per token"),
        (SideArray("experts", 0, np.zeros((1, 0), np.uint8)), "has 0 bytes per token"),
        (SideArray("experts", 0, np.uint8(3)), "is a single number"),
    ],
)
def test_invalid_array_is_rejected(reported: SideArray, problem: str) -> None:
    with pytest.raises(InvalidSideData, match=problem):
        add_array([], reported, None, 3)


def test_two_values_for_one_token_are_rejected() -> None:
    with pytest.raises(InvalidSideData, match="has a value for token 1 and then one for token 1"):
        add_array([array(0, 1, 2)], array(1, 3), None, 3)


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.uint8), np.zeros(2, np.float32)])
def test_another_kind_of_values_is_rejected(other: np.ndarray) -> None:
    tree = Tree()
    one = tree.call(None, array(-3, 1, 2, 3))
    with pytest.raises(InvalidSideData, match=r"but earlier values have type uint8 and shape \(\)"):
        tree.call(one, SideArray("experts", 0, other))


def test_column_is_cut_and_filled() -> None:
    column = SideColumn(((1, 3), (5, 8)), np.array([[1], [2], [5], [6], [7]], np.uint8))
    assert column.fill(9, 255).ravel().tolist() == [255, 1, 2, 255, 255, 5, 6, 7, 255]
    assert column.fill(9, -1, "int16").ravel().tolist() == [-1, 1, 2, -1, -1, 5, 6, 7, -1]
    part = column.cut(2, 6)
    assert part.spans == ((0, 1), (3, 4)) and part.values.tolist() == [[2], [5]]
    assert column.cut(3, 5).spans == () and column.cut(3, 5).values.shape == (0, 1)


def test_rows_without_side_data_have_no_columns() -> None:
    tree = Tree()
    tree.call(None, array(-3, 1, 2, 3, 4))
    policy = TrainingPolicy(roles=("main", "unknown"))
    [row] = build_samples(tree.trace, policy)
    assert row.side == {}
    [row] = build_samples(tree.trace, policy, side=tree.arrays)
    assert row.side["experts"].spans == ((0, 4),)


CALLS = st.lists(
    st.tuples(
        st.integers(0, 100),  # the turn that it continues, or a new root
        st.booleans(),  # whether it repeats the context of that turn
        st.integers(1, 5),
        st.integers(0, 5),
        st.sampled_from(["all", "from the first missing", "reply", "none", "stream"]),
        st.integers(0, 3),  # values that are missing at the end
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(CALLS)
def test_every_value_is_at_its_own_token(calls: list[tuple[int, bool, int, int, str, int]]) -> None:
    """Each call reports (call, position); a token has the pair with its own position from the first call that reported it."""
    tree = Tree()
    turns: list[Sampled] = []
    due: dict[int, dict[int, int]] = {}  # by turn: the call from which each token of its path has its value
    for number, (which, repeats, prompt, reply, how, missing) in enumerate(calls):
        at = which % (len(turns) + 1)
        context = turns[at].parent if at < len(turns) and repeats else None
        parent = context.parent if context is not None else turns[at] if at < len(turns) else None
        size = context.length if context is not None else (parent.length if parent else 0) + prompt
        start = {"reply": size, "stream": size, "from the first missing": find_first_missing(parent, "experts")}.get(
            how, 0
        )
        end = start if how == "none" else max(start, size + reply - missing)
        pairs = [[number, position] for position in range(start, end)]
        step = 2 if how == "stream" else len(pairs) or 1
        reported = [
            SideArray("experts", start + n - size, np.array(pairs[n : n + step], np.uint8))
            for n in range(0, len(pairs), step)
        ]
        turn = tree.call(parent, *reported, prompt=prompt, reply=reply, context=context)
        known = due[parent.id] if parent is not None else {}
        due[turn.id] = dict.fromkeys(range(start, end), number) | known
        turns.append(turn)
    for turn in turns:
        column = join_columns(path_to(turn), tree.arrays).get("experts")
        tokens = [] if column is None else [token for span in column.spans for token in range(*span)]
        values = [] if column is None else column.values.tolist()
        expected = {position: [number, position] for position, number in due[turn.id].items() if position < turn.length}
        assert dict(zip(tokens, values, strict=True)) == expected
