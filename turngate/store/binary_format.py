"""Encode values and rows in PostgreSQL's binary format, for the shared store.

This takes a fraction of the CPU time that psycopg would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any

import msgspec
import numpy as np

Row = tuple[Any, ...]
COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_node_start = Struct(">hiqiqiqi7si").pack  # 10 columns; session, id, parent, kind, and the length of the ids
_root_start = Struct(">hiqiqii7si").pack  # the same, for a node without a parent
_length = Struct(">i").pack
_node_end = Struct(">iqiq").pack  # delivered, checksum
_KINDS = (b"context", b"sampled")
# About 70 kB. Larger pieces take more CPU time, because they do not fit into the processor's cache.
_NODES_AT_ONCE = 16
_array_start = Struct(">iiIii").pack  # 1 dimension, no NULL, type of the elements, their number, first index
_array_empty = Struct(">iiI").pack
_int8, _float8 = Struct(">q").pack, Struct(">d").pack
_TEXT, _BYTES, _FLOAT, _INT = 25, 17, 701, 20  # oids of text, bytea, float8 and int8
_ARRAYS = {_TEXT: 1009, _BYTES: 1001, _FLOAT: 1022, _INT: 1016}  # oids of their arrays
_FLOATS = np.dtype([("length", ">i4"), ("value", ">f8")])


class EncodedArray(msgspec.Struct, frozen=True):
    """An array in PostgreSQL's binary format."""

    data: bytes
    oid: int  # PostgreSQL's number for the array type


def encode_text(value: str | bytes) -> bytes:
    """Encode a string, given as `str` or as UTF-8 bytes, as an element of a text array."""
    data = value.encode() if isinstance(value, str) else value
    return _length(len(data)) + data


def make_text_array(elements: Sequence[bytes], count: int) -> EncodedArray:
    """Build a text array of `count` encoded elements. An item of `elements` can be several encoded elements joined together."""
    return EncodedArray(b"".join((_array_start(1, 0, _TEXT, count, 1), *elements)), _ARRAYS[_TEXT])


def make_bytes_array(values: Sequence[bytes]) -> EncodedArray:
    return EncodedArray(_join_array(_BYTES, values), _ARRAYS[_BYTES])


def make_float_array(values: Sequence[float]) -> EncodedArray:
    elements = np.empty(len(values), _FLOATS)
    elements["length"] = 8
    elements["value"] = values
    return EncodedArray(_array_start(1, 0, _FLOAT, len(values), 1) + elements.tobytes(), _ARRAYS[_FLOAT])


def _join_array(oid: int, elements: Sequence[bytes]) -> bytes:
    """Build an array from encoded elements. `oid` is the oid of the elements' type."""
    parts = [_array_start(1, 0, oid, len(elements), 1)] * (1 + 2 * len(elements))
    parts[1::2] = map(_length, map(len, elements))
    parts[2::2] = elements
    return b"".join(parts)


def _encode_list(values: list[Any]) -> tuple[bytes, int]:
    """Encode a list as an array, and return it with the oid of its type. All elements except None must have the same type."""
    types = set(map(type, values))
    if len(types) == 1 and (found := _ELEMENTS.get(types.pop())) is not None:
        encode, oid = found
        return _join_array(oid, list(map(encode, values))), _ARRAYS[oid]
    elements = [encode_value(value) for value in values]
    oid = next((of for _, of in elements if of), _TEXT)
    parts = [_array_start(1, 1, oid, len(elements), 1) if elements else _array_empty(0, 0, oid)]
    for data, _ in elements:
        parts += (_NULL,) if data is None else (_length(len(data)), data)
    return b"".join(parts), _ARRAYS[oid]


_ELEMENTS: dict[type, tuple[Callable[[Any], bytes], int]] = {
    int: (_int8, _INT),
    float: (_float8, _FLOAT),
    str: (str.encode, _TEXT),
    bytes: (bytes, _BYTES),
}
_ENCODERS: dict[type, Callable[[Any], tuple[bytes | None, int]]] = {
    int: lambda value: (_int8(value), _INT),
    float: lambda value: (_float8(value), _FLOAT),
    str: lambda value: (value.encode(), _TEXT),
    bytes: lambda value: (value, _BYTES),
    list: _encode_list,
    EncodedArray: lambda value: (value.data, value.oid),
    type(None): lambda value: (None, 0),
}


def encode_value(value: Any) -> tuple[bytes | None, int]:
    """Encode a value, and return its bytes with the oid of its type. None becomes NULL."""
    return _ENCODERS[type(value)](value)


def encode_nodes(session: int, nodes: Sequence[Row], checksums: Sequence[int]) -> Iterator[bytes]:
    """Encode rows of the nodes table for PostgreSQL's COPY, a few at a time. `session` is the key of the session.

    Each row has the columns `NODE_COLUMNS`, with the kind as 1 (sampled) or 0 (context). `checksums` replaces the last column.
    """
    for start in range(0, len(nodes), _NODES_AT_ONCE):
        parts: list[bytes] = []
        some = slice(start, start + _NODES_AT_ONCE)
        for row, checksum in zip(nodes[some], checksums[some], strict=True):
            node, parent, kind, ids, logprobs, info, messages, delivered, _ = row
            parts += (
                _root_start(10, 8, session, 8, node, -1, 7, _KINDS[kind], len(ids))
                if parent is None
                else _node_start(10, 8, session, 8, node, 8, parent, 7, _KINDS[kind], len(ids)),
                ids,
                _NULL if logprobs is None else _length(len(logprobs)),
                logprobs or b"",
                _length(len(info)),
                info,
                _length(len(messages)),
                messages,
                _node_end(8, delivered, 8, checksum),
            )
        yield b"".join(parts)
