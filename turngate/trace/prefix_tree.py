"""A tree of segments, in which tokens that several rows share are stored only once.

    row 0:  A B C          segments   A ─► B ─► C         tokens   A B C D E
    row 1:  A B D                          └──► D
    row 2:  A E                       └──► E

Each segment follows its parent in the rows. The segments are in depth-first order, so the tokens that may attend to a token are one range:
from the token itself to the end of its segment's subtree. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from turngate.trace.roles import TurnRole
from turngate.trace.sample import TRAINED_ELSEWHERE, RowSpan, Sample
from turngate.trace.side_data import SideColumn, concatenate_columns
from turngate.types import NEUTRAL, VARIABLE, Ids, Logprobs, RaggedArray

_MAX_NODES = 2**32  # of a trace


class RowRange(msgspec.Struct, frozen=True):
    """A run of tokens that one or more rows contain, given as a range within one of these rows."""

    row: int
    start: int
    end: int
    parent: int | None  # index of the range before it; None: the range starts its rows


class PrefixLayout(msgspec.Struct, frozen=True):
    """The ranges that rows consist of, in depth-first order, and the indices of each row's ranges."""

    ranges: tuple[RowRange, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def starts(self) -> list[int]:
        """The index of each range's first token among the concatenated tokens of all ranges, followed by the total number of tokens."""
        return [0, *np.cumsum([part.end - part.start for part in self.ranges]).tolist()]

    def pack(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate the values of all ranges. `columns` contains, for each row, an array with one value per token."""
        return np.concatenate([columns[part.row][part.start : part.end] for part in self.ranges])

    def positions(self) -> np.ndarray:
        """Return the position of each packed token in its rows."""
        return np.concatenate([np.arange(part.start, part.end) for part in self.ranges])

    def places(self, row: int) -> np.ndarray:
        """Return the index of each token of a row among the packed tokens."""
        starts = self.starts
        return np.concatenate([np.arange(starts[part], starts[part + 1]) for part in self.paths[row]])

    def until(self) -> np.ndarray:
        """Return, for each packed token, the end of the range of tokens that may attend to it. The range starts at the token itself."""
        return find_attended_until(self.starts, [part.parent for part in self.ranges])


def find_attended_until(starts: Sequence[int], parents: Sequence[int | None]) -> np.ndarray:
    """Return, for each token, the end of the range of tokens that may attend to it.

    `starts` and `parents` describe the segments, in depth-first order. `starts` has one more element: the total number of tokens.
    """
    ends = list(starts[1:])
    for index in reversed(range(len(ends))):
        parent = parents[index]
        if parent is not None:
            ends[parent] = max(ends[parent], ends[index])
    return np.repeat(np.array(ends, np.int64), np.diff(starts))


class _Node:
    """A node of the tree while the tree is being built."""

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
                    continue  # a fast check: most siblings differ in their first token
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
    """Move the first `size` tokens of a node to a new parent, and return the parent. The node keeps the remaining tokens."""
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


class SegmentTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The turn that a segment belongs to."""

    node: int
    role: TurnRole
    trained_in: int | None  # index of the only row that trains the segment; None: no row trains it
    reason: str  # why no row trains it; empty if one does
    version_start: int
    version_end: int
    version_runs: tuple[tuple[int, int], ...] = ()  # of the whole turn, as in `RowSpan`
    temperature: float = NEUTRAL.temperature  # at which the turn was sampled; left out of exported trees if it is 1


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens that are the same in all rows that contain them. They are sampled tokens of one turn, or context."""

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
    """The rows of one or more rollouts as a tree. Each array has one value per token, in the order of the segments."""

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
            # Node ids increase along a path.
            tuple(sorted([*_rebuild_spans(index, path), *row.empty_turns], key=lambda span: span.node)),
            side,
        )


class TreePath(msgspec.Struct, frozen=True, eq=False):
    """A row of a tree, given by the indices of its segments."""

    tree: PrefixTree
    segments: tuple[int, ...]


def lay_out_paths(paths: Sequence[TreePath]) -> PrefixLayout:
    """Return the layout of rows from one or more trees. The layout contains each segment of these rows once."""
    index_of: dict[tuple[int, int], int] = {}  # by tree and segment
    ranges: list[RowRange] = []
    for key, tree in {id(path.tree): path.tree for path in paths}.items():
        row_of: dict[int, int] = {}
        for row, path in enumerate(paths):
            if path.tree is tree:
                row_of |= dict.fromkeys(path.segments, row)
        for number in sorted(row_of):  # parents first, as in the tree
            segment = tree.segments[number]
            parent = None if segment.parent is None else index_of[key, segment.parent]
            index_of[key, number] = len(ranges)
            end = segment.position + segment.end - segment.start
            ranges.append(RowRange(row_of[number], segment.position, end, parent))
    return PrefixLayout(
        tuple(ranges), tuple(tuple(index_of[id(path.tree), number] for number in path.segments) for path in paths)
    )


class UnequalSideData(ValueError):
    """Side data with the same name has different types or shapes in different rows, so one array cannot hold it."""


def build_tree(rows: Sequence[Sample], rollouts: Sequence[int] | None = None) -> PrefixTree:
    """Build the tree of the rows of one or more rollouts.

    `rollouts` contains one integer per row, which identifies the row's rollout. If it is None, all rows belong to the same rollout.

    Rows share tokens if these tokens and all tokens before them have the same ids, turns and side data. Different turns never share tokens,
    because each turn has its own log-probabilities.
    """
    columns = [
        [row.ids, _turn_column(row, rollout)] for row, rollout in zip(rows, rollouts or [0] * len(rows), strict=True)
    ]
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


def _turn_column(row: Sample, rollout: int) -> np.ndarray:
    """Return, for each token, a number that identifies its turn among all rollouts, or -1 for context."""
    turns = np.full(len(row.ids), -1, np.int64)
    for span in row.spans:
        turns[span.start : span.end] = span.node + rollout * _MAX_NODES
    return turns


def _side_columns(rows: Sequence[Sample], name: str) -> Iterator[list[np.ndarray]]:
    """Yield two columns for each row: whether each token has a value, and the values, with 0 where there is none.

    If the values are lists of variable length, a number represents each distinct list.
    """
    kinds = {(row.side[name].values.shape[1:], row.side[name].values.dtype) for row in rows if name in row.side}
    if len(kinds) > 1:
        raise UnequalSideData(f"its side data {name} differs in type or shape between branches")
    [(shape, _)] = kinds
    numbers: dict[bytes, int] = {}  # of each distinct list, so that lists can be compared as numbers
    for row in rows:
        tokens = len(row.ids)
        column = row.side.get(name)
        if column is not None and isinstance(column.values, RaggedArray):
            lists = [numbers.setdefault(each.tobytes(), len(numbers)) for each in column.values.lists()]
            column = SideColumn(column.spans, np.array(lists, np.int64))
        if column is None and shape == (VARIABLE,):
            yield [np.zeros(tokens, np.bool_), np.zeros(tokens, np.int64)]
        elif column is None:
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
    versions = span.version_start, span.version_end, span.version_runs
    return SegmentTurn(span.node, span.role, trained_in, reason, *versions, span.temperature)


def _rebuild_spans(index: int, path: Sequence[Segment]) -> Iterator[RowSpan]:
    """Yield the spans of a row, one per turn. Side data can divide a turn into several segments, which are joined here."""
    turn: SegmentTurn | None = None
    start = end = 0
    for segment in [*path, None]:
        new = None if segment is None else segment.turn
        if turn is not None and (new is None or new.node != turn.node):
            trained = turn.trained_in == index
            reason = "" if trained else turn.reason or TRAINED_ELSEWHERE
            versions = turn.version_start, turn.version_end, turn.version_runs
            yield RowSpan(turn.node, start, end, turn.role, trained, reason, *versions, turn.temperature)
            turn = None
        if segment is not None:
            if turn is None:
                turn, start = new, segment.position
            end = segment.position + segment.end - segment.start


# ── checking trees that were received ───────────────────────────────────────────────────────────────────────────────


class InvalidTree(ValueError):
    """The parts of a tree contradict each other, or one of its rows is empty. `field` is the name of the field that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_tree(tree: PrefixTree) -> None:
    """Raise `InvalidTree` if the parts of a tree contradict each other, or if one of its rows is empty."""
    _check_arrays(tree)
    _check_segments(tree)
    _check_rows(tree)


def _check_arrays(tree: PrefixTree) -> None:
    tokens = len(tree.ids)
    for name in ("positions", "mask", "logprobs"):
        if len(getattr(tree, name)) != tokens:
            raise InvalidTree(name, f"{name} has length {len(getattr(tree, name))}, but ids has length {tokens}")
    for name, column in tree.side.items():
        if column.spans and column.spans[-1][1] > tokens:
            raise InvalidTree(
                "side", f"side.{name}.spans must end within the tree's {tokens} tokens, not at {column.spans[-1][1]}"
            )


def _check_segments(tree: PrefixTree) -> None:
    """Raise `InvalidTree` if the segments are not a tree in depth-first order, or contradict the arrays."""
    end = 0
    path: list[int] = []  # from the root to the previous segment
    for index, segment in enumerate(tree.segments):
        where = f"segments[{index}]"
        if segment.start != end or segment.end <= segment.start:
            raise InvalidTree("segments", f"{where}.start must be {end}, and {where}.end must be greater than {end}")
        while path and path[-1] != segment.parent:
            path.pop()
        if segment.parent is not None and not path:
            allowed = f"null, {index - 1} or an ancestor of segments[{index - 1}]" if index else "null"
            raise InvalidTree("segments", f"{where}.parent must be {allowed}")
        above = tree.segments[path[-1]] if path else None
        first = 0 if above is None else above.position + above.end - above.start
        positions = np.arange(first, first + segment.end - segment.start)
        if segment.position != first or not np.array_equal(tree.positions[segment.start : segment.end], positions):
            raise InvalidTree(
                "segments",
                f"{where}.position must be {first}, and the positions of its tokens must count up from there",
            )
        if segment.attends != list_attended(tree.segments, segment.parent):
            raise InvalidTree("segments", f"{where}.attends must be the ranges of its ancestors' tokens")
        trained = segment.turn is not None and segment.turn.trained_in is not None
        if (tree.mask[segment.start : segment.end] != trained).any():
            raise InvalidTree("mask", f"mask must be {str(trained).lower()} for all tokens of {where}")
        if trained and (above is None or not np.isfinite(tree.logprobs[segment.start : segment.end]).all()):
            problem = "has no prompt" if above is None else "not all of its log-probabilities are finite"
            raise InvalidTree("logprobs", f"{where} is trained, but {problem}")
        path.append(index)
        end = segment.end
    if end != len(tree.ids):
        raise InvalidTree("segments", f"the segments end at token {end}, but ids has length {len(tree.ids)}")


def _check_rows(tree: PrefixTree) -> None:
    for number, row in enumerate(tree.rows):
        above = None
        for index in row.segments:
            if not 0 <= index < len(tree.segments) or tree.segments[index].parent != above:
                raise InvalidTree("rows", f"rows[{number}].segments is not a path from a root")
            above = index
        if above is None:
            raise InvalidTree("rows", f"rows[{number}].segments is empty")
    for index, segment in enumerate(tree.segments):
        trained_in = None if segment.turn is None else segment.turn.trained_in
        if trained_in is not None and not (
            0 <= trained_in < len(tree.rows) and index in tree.rows[trained_in].segments
        ):
            raise InvalidTree(
                "segments",
                f"segments[{index}].turn.trained_in must be the index of a row that contains the segment",
            )
