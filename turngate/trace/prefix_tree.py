"""A tree of segments that stores tokens shared by several rows only once.

    row 0:  A B C          segments   A ─► B ─► C         tokens   A B C D E
    row 1:  A B D                          └──► D
    row 2:  A E                       └──► E

Each segment follows its parent in the rows. The segments are in depth-first order, so the tokens that may attend to a token are one range:
from the token itself to the end of the last segment below it. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from turngate.trace.roles import TurnRole
from turngate.trace.sample import TRAINED_ELSEWHERE, RowSpan, Sample
from turngate.trace.side_data import SideColumn, concatenate_columns
from turngate.types import Ids, Logprobs


class RowRange(msgspec.Struct, frozen=True):
    """Tokens that one or more rows share, as a range of the tokens of one of these rows."""

    row: int
    start: int
    end: int
    parent: int | None  # index of the range before it; None: the range starts its rows


class PrefixLayout(msgspec.Struct, frozen=True):
    """The ranges that rows consist of, in depth-first order, and the indices of the ranges of each row."""

    ranges: tuple[RowRange, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def starts(self) -> list[int]:
        """The index of the first token of each range if the tokens of all ranges are concatenated, and the total at the end."""
        return [0, *np.cumsum([part.end - part.start for part in self.ranges]).tolist()]

    def pack(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate the values of all ranges. `columns` has an array with one value per token for each row."""
        return np.concatenate([columns[part.row][part.start : part.end] for part in self.ranges])

    def positions(self) -> np.ndarray:
        """Return the position of each packed token in its rows."""
        return np.concatenate([np.arange(part.start, part.end) for part in self.ranges])

    def places(self, row: int) -> np.ndarray:
        """Return the index of each token of a row among the packed tokens."""
        starts = self.starts
        return np.concatenate([np.arange(starts[part], starts[part + 1]) for part in self.paths[row]])

    def until(self) -> np.ndarray:
        """Return the end of the range of tokens that may attend to each packed token. The range starts at the token itself."""
        return find_attended_until(self.starts, [part.parent for part in self.ranges])


def find_attended_until(starts: Sequence[int], parents: Sequence[int | None]) -> np.ndarray:
    """Return, for each token of segments in depth-first order, the end of the last segment that may attend to it."""
    ends = list(starts[1:])
    for index in reversed(range(len(ends))):
        parent = parents[index]
        if parent is not None:
            ends[parent] = max(ends[parent], ends[index])
    return np.repeat(np.array(ends, np.int64), np.diff(starts))


class _Node:
    """A node of the tree while it grows."""

    __slots__ = ("children", "end", "parent", "row", "start")

    def __init__(self, row: int, start: int, end: int, parent: _Node | None) -> None:
        self.row, self.start, self.end, self.parent = row, start, end, parent
        self.children: list[_Node] = []


def find_shared_prefixes(
    rows: Sequence[Sequence[np.ndarray]], cuts: Sequence[Sequence[int]] | None = None
) -> PrefixLayout:
    """Find the prefixes that rows share. Tokens are shared if they and all tokens before them are equal in every column.

    Each row is a sequence of columns, which are arrays with one value per token. `cuts` lists, for each row, the tokens at which a
    new range starts even if nothing diverges there.
    """
    top = _Node(-1, 0, 0, None)
    last = [_insert(top, rows, row, cuts[row] if cuts else ()) for row in range(len(rows))]
    index: dict[_Node, int] = {}
    ranges = []
    for node in _walk(top):
        assert node.parent is not None, "only the top has no parent, and it is not visited"
        ranges.append(RowRange(node.row, node.start, node.end, index.get(node.parent)))
        index[node] = len(index)
    return PrefixLayout(tuple(ranges), tuple(tuple(index[node] for node in _path(end)) for end in last))


def _insert(top: _Node, rows: Sequence[Sequence[np.ndarray]], row: int, cuts: Sequence[int]) -> _Node:
    """Add a row to the tree, and return its last node."""
    node = top
    for start, end in pairwise(sorted({0, *cuts, len(rows[row][0])})):
        at = start
        while at < end:
            found = None
            for child in node.children:
                if rows[child.row][0][child.start] != rows[row][0][at]:
                    continue  # fast: most siblings differ in their first token
                size = min(child.end - child.start, end - at)
                if shared := _count_equal(rows[child.row], child.start, rows[row], at, size):
                    found = child if shared == child.end - child.start else _split(child, shared)
                    break
            if found is None:
                found = _Node(row, at, end, node)
                node.children.append(found)
            node, at = found, at + found.end - found.start
    return node


def _count_equal(
    one: Sequence[np.ndarray], start: int, other: Sequence[np.ndarray], other_start: int, size: int
) -> int:
    """Return how many of `size` tokens are equal before the first difference."""
    differs = np.zeros(size, np.bool_)
    for a, b in zip(one, other, strict=True):
        unequal = a[start : start + size] != b[other_start : other_start + size]
        differs |= unequal.reshape(size, -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else size


def _split(node: _Node, size: int) -> _Node:
    """Move the first `size` tokens of a node to a new parent, and return the parent. The node keeps the other tokens."""
    above = node.parent
    assert above is not None, "the top has no tokens to split"
    head = _Node(node.row, node.start, node.start + size, above)
    above.children[above.children.index(node)] = head
    head.children.append(node)
    node.start, node.parent = head.end, head
    return head


def _walk(top: _Node) -> Iterator[_Node]:
    """Yield all nodes below `top`, depth first, parents before their children."""
    waiting = [*reversed(top.children)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


def _path(node: _Node) -> list[_Node]:
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


# ── the tree of a rollout ───────────────────────────────────────────────────────────────────────────────────────────


class SegmentTurn(msgspec.Struct, frozen=True):
    """The turn that a segment belongs to."""

    node: int
    role: TurnRole
    trained_in: int | None  # index of the only row that trains the segment; None: no row trains it
    reason: str  # why no row trains it; empty if one does
    version_start: int
    version_end: int


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens that are the same in all rows that contain them, from one turn or from the context between turns."""

    start: int  # first token, as an index into the arrays of the tree
    end: int
    parent: int | None  # index of the segment before it; None: it starts its rows
    position: int  # of its first token in its rows
    # The tokens of its ancestors, as ranges. A token attends to these and to the tokens of its own segment up to itself.
    attends: tuple[tuple[int, int], ...]
    turn: SegmentTurn | None  # None: context


class RowPath(msgspec.Struct, frozen=True):
    """The segments that a row consists of."""

    branch: int
    segments: tuple[int, ...]
    empty_turns: tuple[RowSpan, ...] = ()  # turns without tokens, which have no segment


class PrefixTree(msgspec.Struct, frozen=True, eq=False):
    """The rows of a rollout as a tree. Each array has one value per token of all segments, in their order."""

    ids: Ids
    positions: np.ndarray
    mask: np.ndarray  # whether a row trains the token; no more than one row does
    logprobs: Logprobs
    segments: tuple[Segment, ...]
    rows: tuple[RowPath, ...]
    side: Mapping[str, SideColumn] = {}

    def rebuild_rows(self) -> list[Sample]:
        """Return the rows that the tree was built from, without their turn rewards."""
        return [self._rebuild_row(index, row) for index, row in enumerate(self.rows)]

    def _rebuild_row(self, index: int, row: RowPath) -> Sample:
        path = [self.segments[number] for number in row.segments]
        places = np.concatenate([np.arange(segment.start, segment.end) for segment in path])
        trained = [segment.turn is not None and segment.turn.trained_in == index for segment in path]
        side = {}
        for name, column in self.side.items():
            joined = concatenate_columns(
                [(column.cut(segment.start, segment.end), segment.end - segment.start) for segment in path]
            )
            if joined.spans:
                side[name] = joined
        return Sample(
            row.branch,
            self.ids[places],
            np.repeat(trained, [segment.end - segment.start for segment in path]),
            self.logprobs[places],
            # The nodes of a path are numbered in its order.
            tuple(sorted([*_rebuild_spans(index, path), *row.empty_turns], key=lambda span: span.node)),
            side,
        )


class UnequalSideData(ValueError):
    """Side data of the same name has different types or shapes in different rows, so one array cannot hold it."""


def build_tree(rows: Sequence[Sample]) -> PrefixTree:
    """Build the tree of a rollout's rows.

    Rows share tokens with the same ids, turn and side data. Different turns never share tokens, because each has its own log-probabilities.
    """
    columns = [[row.ids, _turn_column(row)] for row in rows]
    for name in dict.fromkeys(name for row in rows for name in row.side):
        for column, values in zip(columns, _side_columns(rows, name), strict=True):
            column += values
    layout = find_shared_prefixes(
        columns, [[at for span in row.spans for at in (span.start, span.end)] for row in rows]
    )
    starts = layout.starts
    # Each trained token is trained in one row only (`sample.py`).
    trained_in = {
        index: row
        for row, path in enumerate(layout.paths)
        for index in path
        if rows[row].mask[layout.ranges[index].start]
    }
    segments: list[Segment] = []
    for index, part in enumerate(layout.ranges):
        turn = _find_turn(rows[part.row], part, trained_in.get(index))
        attends = list_attended(segments, part.parent)
        segments.append(Segment(starts[index], starts[index + 1], part.parent, part.start, attends, turn))
    trained = [segment.turn is not None and segment.turn.trained_in is not None for segment in segments]
    return PrefixTree(
        ids=layout.pack([row.ids for row in rows]),
        positions=layout.positions().astype(np.int32),
        mask=np.repeat(trained, np.diff(starts)),
        logprobs=layout.pack([row.logprobs for row in rows]),
        segments=tuple(segments),
        rows=tuple(
            RowPath(row.branch, path, tuple(span for span in row.spans if span.start == span.end))
            for row, path in zip(rows, layout.paths, strict=True)
        ),
        side=_pack_side(rows, layout),
    )


def list_attended(segments: Sequence[Segment], parent: int | None) -> tuple[tuple[int, int], ...]:
    """Return the tokens of a segment's ancestors as ranges, given all earlier segments and the index of its parent."""
    if parent is None:
        return ()
    above = segments[parent]
    if above.attends and above.attends[-1][1] == above.start:
        return (*above.attends[:-1], (above.attends[-1][0], above.end))
    return (*above.attends, (above.start, above.end))


def _turn_column(row: Sample) -> np.ndarray:
    """Return the node of each token's turn, or -1 for context."""
    turns = np.full(len(row.ids), -1, np.int64)
    for span in row.spans:
        turns[span.start : span.end] = span.node
    return turns


def _side_columns(rows: Sequence[Sample], name: str) -> Iterator[list[np.ndarray]]:
    """Yield two columns for each row: whether each token has a value, and the values, with 0 where there is none."""
    kinds = {(row.side[name].values.shape[1:], row.side[name].values.dtype) for row in rows if name in row.side}
    if len(kinds) > 1:
        raise UnequalSideData(f"its {name} have different types or shapes in different branches")
    [(shape, _)] = kinds
    for row in rows:
        tokens = len(row.ids)
        column = row.side.get(name)
        if column is None:
            yield [np.zeros(tokens, np.bool_), np.zeros((tokens, *shape), np.uint8)]
        else:
            present = np.zeros(tokens, np.bool_)
            for start, end in column.spans:
                present[start:end] = True
            yield [present, column.fill(tokens, 0)]


def _pack_side(rows: Sequence[Sample], layout: PrefixLayout) -> dict[str, SideColumn]:
    """Return the side data of all segments."""
    packed = {}
    for name in dict.fromkeys(name for row in rows for name in row.side):
        empty = next(row.side[name] for row in rows if name in row.side).cut(0, 0)
        packed[name] = concatenate_columns(
            [
                (rows[part.row].side.get(name, empty).cut(part.start, part.end), part.end - part.start)
                for part in layout.ranges
            ]
        )
    return packed


def _find_turn(row: Sample, part: RowRange, trained_in: int | None) -> SegmentTurn | None:
    """Return the turn of a range of `row`, or None if the range is context."""
    span = next((span for span in row.spans if span.start <= part.start < span.end), None)
    if span is None:
        return None
    reason = span.reason if trained_in is None else ""
    return SegmentTurn(span.node, span.role, trained_in, reason, span.version_start, span.version_end)


def _rebuild_spans(index: int, path: Sequence[Segment]) -> Iterator[RowSpan]:
    """Yield the spans of a row. Side data can divide a turn into several segments."""
    turn: SegmentTurn | None = None
    start = end = 0
    for segment in [*path, None]:
        new = None if segment is None else segment.turn
        if turn is not None and (new is None or new.node != turn.node):
            trained = turn.trained_in == index
            reason = "" if trained else turn.reason or TRAINED_ELSEWHERE
            yield RowSpan(turn.node, start, end, turn.role, trained, reason, turn.version_start, turn.version_end)
            turn = None
        if segment is not None:
            if turn is None:
                turn, start = new, segment.position
            end = segment.position + segment.end - segment.start
