"""Check side data: the stored values against the turns that list them, and the columns of rows against the stored values.

These checks are omitted for a session without side data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from turngate.types import Ids, RaggedArray
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import SideFacts, StoredSession, StoredSideData, StoredTurn, path

_TYPES = {"uint8": "|u1", "uint16": "<u2", "int32": "<i4", "float32": "<f4"}
_LISTS = (-1,)  # the shape of values that are lists of different lengths
Values = np.ndarray | RaggedArray


class TrainerColumn(Protocol):
    """The side data that a row has under one name, as a trainer receives it."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...
    @property
    def values(self) -> Values: ...


class RowWithSideData(Protocol):
    @property
    def branch(self) -> int: ...
    @property
    def ids(self) -> Ids: ...
    @property
    def side(self) -> Mapping[str, TrainerColumn]: ...


class StoredSideArrays:
    """The stored side data of a session. `unlisted` contains the ids of nodes that have stored side data but list none."""

    def __init__(self, session: StoredSession) -> None:
        self._pieces: dict[tuple[object, object], list[StoredSideData]] = {}
        self._read: dict[tuple[int, str, int], Values | str] = {}
        for piece in session.related.side:
            self._pieces.setdefault((piece.node, piece.name), []).append(piece)
        self.unlisted = {node for node, _ in self._pieces} - {turn.id for turn in session.turns if turn.info.side}

    def read(self, turn: StoredTurn, facts: SideFacts) -> Values | str:
        """Return the values of one array that a turn lists, or a description of what is wrong with them."""
        key = turn.id, facts.name, facts.first
        if key not in self._read:
            self._read[key] = self._join(turn, facts)
        return self._read[key]

    def _join(self, turn: StoredTurn, facts: SideFacts) -> Values | str:
        if facts.dtype not in _TYPES:
            return f"its side data {facts.name} has the unknown type {facts.dtype!r}"
        shape = "x".join(str(n) for n in facts.shape)
        at, parts, sizes = facts.first, [], []
        start = turn.length - len(turn.ids)  # of the reply, on the path
        for piece in self._pieces.get((turn.id, facts.name), ()):
            if not isinstance(piece.first, int) or piece.first != at or at >= facts.first + facts.count:
                continue
            if (piece.dtype, piece.shape) != (facts.dtype, shape):
                stored = f"type {piece.dtype} and shape {piece.shape}"
                return f"its side data {facts.name} is stored with {stored}, but listed with type {facts.dtype} and shape {shape}"
            found = _read_piece(piece.data, facts)
            if found is None:
                return f"its side data {facts.name}, starting at token {start + at} of the path, is not stored as whole values"
            assert isinstance(piece.data, bytes)
            label = f"{piece.node}/{piece.name}/{piece.first}/{piece.dtype}/{piece.shape}".encode()
            if zlib.crc32(label + piece.data) != piece.checksum:
                return f"its side data {facts.name}, starting at token {start + at} of the path, does not match its checksum"
            sizes.append(found[0])
            parts.append(found[1])
            at += len(found[0])
        if not parts or at != facts.first + facts.count:
            return f"it lists side data {facts.name} for {facts.count} tokens, but {at - facts.first} values are stored"
        values = np.concatenate(parts)
        if facts.shape == _LISTS:
            return RaggedArray.from_sizes(np.concatenate(sizes), values)
        try:
            return values.reshape(facts.count, *facts.shape)
        except ValueError:  # it has negative sizes or too many dimensions
            return f"its side data {facts.name} has the invalid shape {shape}"


def _read_piece(data: object, facts: SideFacts) -> tuple[np.ndarray, np.ndarray] | None:
    """Decode some consecutive values of an array, as stored in one row of the `side_data` table.

    Return how many numbers each value has, and the numbers of all values. Return None if the row has no data or a value is incomplete.
    """
    dtype = np.dtype(_TYPES[facts.dtype])
    if not isinstance(data, bytes) or not data:
        return None
    if facts.shape == _LISTS:
        count = int.from_bytes(data[:4], "little")
        sizes = np.frombuffer(data[4 : 4 + len(data[4:]) // 4 * 4], "<u4")[:count].astype(np.int64)
        rest = data[4 + 4 * count :]
        if not count or len(sizes) != count or len(rest) != dtype.itemsize * int(sizes.sum()):
            return None
        return sizes, np.frombuffer(rest, dtype)
    each = math.prod(facts.shape)
    if each <= 0 or len(data) % (each * dtype.itemsize):
        return None
    numbers = np.frombuffer(data, dtype)
    return np.full(len(numbers) // each, each, np.int64), numbers


def has_side_data(session: StoredSession) -> bool:
    return bool(session.related.side) or any(turn.info.side for turn in session.turns)


def check_side_data(session: StoredSession, results: CheckResults) -> None:
    """Check that all side data is stored unchanged, and that each token on a path has at most one value under each name."""
    if not has_side_data(session):
        return
    stored = StoredSideArrays(session)
    with results.check(
        "structure", "side data", "all side data is stored unchanged, and no token has two values under one name"
    ) as check:
        for turn in session.turns:
            for facts in turn.info.side:
                _check_place(turn, facts, check)
                values = stored.read(turn, facts)
                check.expect(not isinstance(values, str), values if isinstance(values, str) else "", node=turn.id)
                if isinstance(values, np.ndarray) and values.dtype.kind == "f":
                    check.expect(
                        bool(np.isfinite(values).all()),
                        f"its side data {facts.name} has values that are not finite",
                        node=turn.id,
                    )
    if stored.unlisted:
        nodes = ", ".join(sorted(map(str, stored.unlisted)))
        results.note(
            "side data",
            f"no turn lists the side data of these nodes: {nodes}; a crash may have prevented a turn from being written",
        )


def _check_place(turn: StoredTurn, facts: SideFacts, check: VerifyCheck) -> None:
    start = turn.length - len(turn.ids)
    first, last = start + facts.first, start + facts.first + facts.count
    inside = 0 <= first < last <= turn.length
    check.expect(
        inside,
        f"its side data {facts.name} covers tokens {first} to {last - 1} of the path, which has length {turn.length}",
        node=turn.id,
    )
    for other in path(turn):
        for known in other.info.side if isinstance(other, StoredTurn) else ():
            if known is facts or known.name != facts.name:
                continue
            begin = other.length - len(other.ids) + known.first
            apart = begin >= last or begin + known.count <= first
            check.expect(apart, f"its side data {facts.name} overlaps that of turn {other.id}", node=turn.id)


def check_columns(session: StoredSession, every: Sequence[RowWithSideData], results: CheckResults) -> None:
    """Check that each row has the stored side data, at the tokens for which it was recorded."""
    if not has_side_data(session):
        return
    stored, leaves = StoredSideArrays(session), {leaf.id: leaf for leaf in session.leaves}
    with results.check(
        "rows", "side data", "every value of side data is at the token that it belongs to; nothing is filled in"
    ) as check:
        for row in every:
            if row.branch in leaves:
                _check_row(row, leaves[row.branch], stored, check)


def _check_row(row: RowWithSideData, leaf: StoredTurn, stored: StoredSideArrays, check: VerifyCheck) -> None:
    turns = [node for node in path(leaf) if isinstance(node, StoredTurn)]
    names = {facts.name for turn in turns for facts in turn.info.side}
    check.expect(
        set(row.side) == names,
        f"its row has the side data {sorted(row.side)}, but {sorted(names)} were recorded",
        node=leaf.id,
    )
    for name in sorted(names & set(row.side)):
        _check_column(name, row.side[name], len(row.ids), turns, stored, check, leaf.id)


def _check_column(
    name: str,
    column: TrainerColumn,
    size: int,
    turns: Sequence[StoredTurn],
    stored: StoredSideArrays,
    check: VerifyCheck,
    leaf: int,
) -> None:
    values, given = _make_comparable(column.values), np.zeros(size, bool)
    for start, end in column.spans:
        given[start:end] = True
    whole = int(given.sum()) == sum(end - start for start, end in column.spans) == len(values)
    if not check.expect(
        whole,
        f"its side data {name} does not have exactly one value for each token of its spans (values: {len(values)}, spans: {column.spans})",
        node=leaf,
    ):
        return
    due, recorded = np.zeros((size, *values.shape[1:]), values.dtype), np.zeros(size, bool)
    for turn, facts in ((each, facts) for each in turns for facts in each.info.side if facts.name == name):
        read = stored.read(turn, facts)
        if isinstance(read, str):
            continue  # reported by the structure check
        found = _make_comparable(read)
        same = read.shape[1:] == column.values.shape[1:] and np.can_cast(read.dtype, column.values.dtype)
        if not check.expect(
            same, f"its side data {name} differs in type or shape from the side data of turn {turn.id}", node=leaf
        ):
            return
        begin = turn.length - len(turn.ids) + facts.first
        due[begin : begin + len(found)], recorded[begin : begin + len(found)] = found, True
    missing = np.flatnonzero(recorded != given)
    first = missing[0] if len(missing) else 0
    is_extra = bool(given[missing[:1]].any())
    problem = f"has side data {name} that was not recorded" if is_extra else f"lacks the recorded side data {name}"
    if check.expect(not len(missing), f"token {first} of its row {problem}", node=leaf):
        wrong = np.flatnonzero((due[given] != values).any(axis=tuple(range(1, values.ndim))))
        at = int(np.flatnonzero(given)[wrong[0]]) if len(wrong) else 0
        check.expect(not len(wrong), f"token {at} of its row does not have the recorded side data {name}", node=leaf)


def _make_comparable(values: Values) -> np.ndarray:
    """Return values that can be compared with `!=`: an array unchanged, or the bytes of each list.

    The numbers of a list become 64-bit floats, which can represent all stored types exactly.
    """
    if isinstance(values, np.ndarray):
        return values
    return np.array([each.astype(np.float64).tobytes() for each in values.lists()], object)
