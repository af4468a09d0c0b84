"""Side data: named arrays with one value per token, such as the experts that a mixture-of-experts model chose.

The prompt of each call contains the tokens of the calls before it, so engines report values for the same tokens again. A turn stores only
the values of those prompt and reply tokens that have no value yet on the turn's path. Under each name, a token on a path therefore has at
most one value, from the first call that reported it. Missing values are filled in only by `SideColumn.fill`. No I/O.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from turngate.trace.tree import Node, Sampled, SideRange, path_to
from turngate.types import VARIABLE, RaggedArray, SideArray, SideValues

DTYPES = ("uint8", "uint16", "int32", "float32")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_VALUE_BYTES = 2**20  # per token


class SideColumn(msgspec.Struct, frozen=True, eq=False):
    """The side data of a row under one name. It has a value for each token in `spans`, and none for the other tokens."""

    spans: tuple[tuple[int, int], ...]  # start and end of each span; sorted, and never adjacent
    values: SideValues  # the values of all spans, concatenated

    def cut(self, start: int, end: int) -> SideColumn:
        """Return the column of the tokens from `start` to `end`, renumbered to begin at 0."""
        spans, at = [], 0
        parts: list[SideValues] = [self.values[:0]]
        for first, last in self.spans:
            low, high = max(first, start), min(last, end)
            if low < high:
                spans.append((low - start, high - start))
                parts.append(self.values[at + low - first : at + high - first])
            at += last - first
        return SideColumn(tuple(spans), parts[1] if len(parts) == 2 else concatenate_values(parts))

    def fill(self, tokens: int, missing: float, dtype: str = "") -> np.ndarray:
        """Return an array of `tokens` values, with `missing` for tokens without a value.

        The values must not be lists.
        """
        assert isinstance(self.values, np.ndarray), "the values are lists of different lengths"
        whole = np.full((tokens, *self.values.shape[1:]), missing, dtype or self.values.dtype)
        at = 0
        for start, end in self.spans:
            whole[start:end] = self.values[at : at + end - start]
            at += end - start
        return whole


def concatenate_values(parts: Sequence[SideValues]) -> SideValues:
    """Concatenate `parts`, each with the values of some tokens. Either all parts must be arrays, or all must be lists."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    ragged = [part for part in parts if isinstance(part, RaggedArray)]
    sizes = np.concatenate([part.sizes for part in ragged])
    return RaggedArray.from_sizes(sizes, np.concatenate([part.items for part in ragged]))


def encode_values(values: SideValues) -> memoryview:
    """Return the bytes of values, little-endian. Lists are preceded by their number and their sizes, as 32-bit integers."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
    sizes = np.concatenate(([len(values)], values.sizes)).astype("<u4")
    return memoryview(sizes.tobytes() + encode_values(values.items))


def decode_values(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> SideValues:
    """Decode the result of `encode_values` without copying it.

    Raise `ValueError` if the type or the shape is invalid, or if the bytes do not match them.
    """
    if dtype not in DTYPES:
        raise ValueError(f"type {dtype!r} is not one of {', '.join(DTYPES)}")
    kind = np.dtype(dtype).newbyteorder("<")
    if shape != (VARIABLE,):
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape} is invalid, because a dimension is negative")
        return np.frombuffer(data, kind).reshape(-1, *shape)
    count = int(np.frombuffer(data, "<u4", 1)[0])
    sizes = np.frombuffer(data, "<u4", count, 4)
    items = np.frombuffer(data, kind, offset=4 + 4 * count) if len(data) > 4 + 4 * count else np.empty(0, kind)
    if int(sizes.sum(dtype=np.int64)) != len(items):
        raise ValueError(
            f"the sizes of the lists add up to {sizes.sum(dtype=np.int64)}, but the data contains {len(items)} values"
        )
    return RaggedArray.from_sizes(sizes, items)


class InvalidSideData(ValueError):
    """Side data cannot be recorded, because its name, type, shape or token range is invalid."""


class _Range(NamedTuple):
    start: int
    end: int


def add_array(known: Sequence[SideArray], array: SideArray, parent: Sampled | None, prompt: int) -> list[SideArray]:
    """Return `known`, the arrays that a call has so far, with `array` appended. Raise `InvalidSideData` if `array` is invalid.

    `parent` is the turn that the call continues. `prompt` is the number of tokens in the call's prompt.
    """
    _check_array(array)
    if array.first < -prompt:
        raise InvalidSideData(
            f"{array.name} starts at token {array.first}, but the prompt starts at token {-prompt} (token 0 is the first of the reply)"
        )
    before = [each for each in known if each.name == array.name]
    if before:
        kinds = [_kind(before[-1].values)]
        if array.first < before[-1].end:
            raise InvalidSideData(
                f"{array.name} has a value for token {before[-1].end - 1} and then one for token {array.first}; values must be in token "
                "order, with at most one per token"
            )
    else:
        kinds = [(side.dtype, side.shape) for _, _, side in list_ranges(parent, array.name)]
    _check_same_kind(array, kinds)
    return [*known, array]


def _check_array(array: SideArray) -> None:
    if not _NAME.fullmatch(array.name):
        raise InvalidSideData(
            f"{array.name[:80]!r} is not a valid name; use up to 64 lowercase letters, digits and '_', starting with a letter"
        )
    values = array.values
    if values.dtype.name not in DTYPES:
        raise InvalidSideData(f"{array.name} has type {values.dtype.name}; it must be one of {', '.join(DTYPES)}")
    if not values.shape:
        raise InvalidSideData(f"{array.name} is a single number, not one value per token")
    if isinstance(values, RaggedArray):
        size = values.dtype.itemsize * max(1, int(values.sizes.max(initial=0)))
    else:
        size = values.dtype.itemsize * math.prod(values.shape[1:])
    if not 0 < size <= MAX_VALUE_BYTES:
        raise InvalidSideData(f"{array.name} has {size} bytes per token; it must have 1 to {MAX_VALUE_BYTES}")


def _kind(values: SideValues) -> tuple[str, tuple[int, ...]]:
    return values.dtype.name, values.shape[1:]


def _check_same_kind(array: SideArray, kinds: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise `InvalidSideData` if an array's type or shape differs from those of earlier values. Integer types may differ in size."""
    dtype, shape = _kind(array.values)
    for other, other_shape in kinds:
        if other_shape != shape or (other == "float32") != (dtype == "float32"):
            raise InvalidSideData(
                f"{array.name} has values of type {dtype} and shape {shape}, but earlier values have type {other} and shape {other_shape}"
            )


def select_new(arrays: Sequence[SideArray], parent: Sampled | None, prompt: int, reply: int) -> list[SideArray]:
    """Return the parts of a call's arrays that its turn stores: the values of tokens that have none yet on the turn's path.

    `prompt` and `reply` are token counts. The gateway may have cut the reply short; values after its end are dropped.
    """
    kept: list[SideArray] = []
    for name in dict.fromkeys(array.name for array in arrays):
        covered = [_Range(start, end) for start, end, _ in list_ranges(parent, name)]
        for array in _merge([array for array in arrays if array.name == name]):
            limits = _Range(prompt + array.first, prompt + min(array.end, reply))
            kept += [array.cut(start - prompt, end - prompt) for start, end in _subtract(limits, covered)]
    return kept


def _merge(arrays: Sequence[SideArray]) -> list[SideArray]:
    """Join adjacent arrays, such as those from the chunks of a stream."""
    runs: list[list[SideArray]] = []
    for array in arrays:
        if runs and array.first == runs[-1][-1].end:
            runs[-1].append(array)
        else:
            runs.append([array])
    return [
        run[0]
        if len(run) == 1
        else SideArray(run[0].name, run[0].first, concatenate_values([each.values for each in run]))
        for run in runs
    ]


def list_ranges(node: Sampled | None, name: str) -> list[tuple[int, int, SideRange]]:
    """Return (start, end, range) for each range of tokens with values on the path to `node`. Start and end are counted from the root."""
    found = []
    for turn in path_to(node):
        if isinstance(turn, Sampled) and turn.info.side:
            start = turn.length - turn.size
            found += [(start + s.first, start + s.first + s.count, s) for s in turn.info.side if s.name == name]
    return found


def find_first_missing(node: Sampled | None, name: str) -> int:
    """Return the index of the first token without a value on the path to `node`, or the path's length if all tokens have one."""
    at = 0
    for start, end, _ in sorted(list_ranges(node, name), key=lambda found: found[:2]):
        if start > at:
            break
        at = max(at, end)
    return at


def describe_arrays(arrays: Iterable[SideArray]) -> tuple[SideRange, ...]:
    """Describe a turn's arrays for the node of the turn. The arrays themselves are stored separately."""
    return tuple(
        SideRange(array.name, array.first, len(array.values), array.values.dtype.name, array.values.shape[1:])
        for array in arrays
    )


def join_columns(nodes: Sequence[Node], arrays: Mapping[int, Sequence[SideArray]]) -> dict[str, SideColumn]:
    """Join the arrays of the turns on a path into the columns of the path's row. `arrays` maps the node id of each turn to its arrays."""
    parts: dict[str, list[tuple[_Range, SideValues]]] = {}
    start = 0
    for node in nodes:
        for array in arrays.get(node.id, ()) if isinstance(node, Sampled) else ():
            known = parts.setdefault(array.name, [])
            limits = _Range(start + array.first, start + array.end)
            for low, high in _subtract(limits, [where for where, _ in known]):
                known.append((_Range(low, high), array.cut(low - start, high - start).values))
        start += node.size
    return {name: _build_column(sorted(found, key=lambda part: part[0])) for name, found in parts.items()}


def concatenate_columns(columns: Sequence[tuple[SideColumn, int]]) -> SideColumn:
    """Join the columns of consecutive ranges of tokens. Each column comes with the number of tokens in its range."""
    parts: list[tuple[_Range, SideValues]] = []
    offset = 0
    for column, tokens in columns:
        at = 0
        for start, end in column.spans:
            parts.append((_Range(offset + start, offset + end), column.values[at : at + end - start]))
            at += end - start
        offset += tokens
    return _build_column(parts) if parts else columns[0][0].cut(0, 0)


def _build_column(parts: Sequence[tuple[_Range, SideValues]]) -> SideColumn:
    spans: list[tuple[int, int]] = []
    for start, end in (where for where, _ in parts):
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    values = parts[0][1] if len(parts) == 1 else concatenate_values([values for _, values in parts])
    return SideColumn(tuple(spans), values)


def _subtract(limits: _Range, covered: Iterable[_Range]) -> list[_Range]:
    """Return the ranges within `limits` that `covered` does not cover, in ascending order."""
    uncovered, at = [], limits.start
    for start, end in sorted(covered):
        if start >= limits.end:
            break
        if start > at:
            uncovered.append(_Range(at, start))
        at = max(at, end)
    if at < limits.end:
        uncovered.append(_Range(at, limits.end))
    return uncovered
