"""Encode values and rows in PostgreSQL's binary format, for the tables with the most rows.

This takes a fraction of the CPU time that psycopg would need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import msgspec
import numpy as np

COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_node_start = Struct(">hiqiqiqi7si").pack  # 10 columns; session, id, parent, kind, and the length of the ids
_root_start = Struct(">hiqiqii7si").pack  # the same, for a node without a parent
_length = Struct(">i").pack
_node_end = Struct(">iqiq").pack  # delivered, checksum
_SESSION_AT, _CHECKSUM_AT = np.arange(6, 14), np.arange(-8, 0)  # in an encoded node, from its start and its end
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
    """Encode a string, or the UTF-8 of one, as an element of a text array."""
    data = value.encode() if isinstance(value, str) else value
    return _length(len(data)) + data


def make_text_array(elements: Sequence[bytes], count: int) -> EncodedArray:
    """Build a text array of `count` encoded elements. Each item of `elements` may contain several of them."""
    return EncodedArray(b"".join((_array_start(1, 0, _TEXT, count, 1), *elements)), _ARRAYS[_TEXT])


def make_bytes_array(values: Sequence[bytes]) -> EncodedArray:
    parts = [_array_start(1, 0, _BYTES, len(values), 1)]
    for value in values:
        parts += (_length(len(value)), value)
    return EncodedArray(b"".join(parts), _ARRAYS[_BYTES])


def make_float_array(values: Sequence[float]) -> EncodedArray:
    elements = np.empty(len(values), _FLOATS)
    elements["length"] = 8
    elements["value"] = values
    return EncodedArray(_array_start(1, 0, _FLOAT, len(values), 1) + elements.tobytes(), _ARRAYS[_FLOAT])


def _encode_list(values: list[Any]) -> tuple[bytes, int]:
    """Encode a list as an array, and return it with the oid of its type. All elements except None must have the same type."""
    elements = [encode_value(value) for value in values]
    oid = next((of for _, of in elements if of), _TEXT)
    has_null = any(data is None for data, _ in elements)
    parts = [_array_start(1, has_null, oid, len(elements), 1) if elements else _array_empty(0, 0, oid)]
    for data, _ in elements:
        parts += (_NULL,) if data is None else (_length(len(data)), data)
    return b"".join(parts), _ARRAYS[oid]


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


def encode_node(
    session: int,
    node: int,
    parent: int | None,
    kind: bytes,
    ids: bytes,
    logprobs: bytes | None,
    info: bytes,
    messages: bytes,
    delivered: int,
    checksum: int,
) -> bytes:
    """Encode a row of the nodes table for COPY. `kind` has seven letters: context or sampled."""
    return b"".join(
        (
            _root_start(10, 8, session, 8, node, -1, 7, kind, len(ids))
            if parent is None
            else _node_start(10, 8, session, 8, node, 8, parent, 7, kind, len(ids)),
            ids,
            _NULL if logprobs is None else _length(len(logprobs)),
            logprobs or b"",
            _length(len(info)),
            info,
            _length(len(messages)),
            messages,
            _node_end(8, delivered, 8, checksum),
        )
    )


def rekey_nodes(rows: bytearray, ends: Sequence[int], session: int, checksums: Sequence[int]) -> None:
    """Replace the session's key and the checksums in encoded rows of the nodes table. `ends` are the offsets at which the rows end."""
    data, last = np.frombuffer(rows, np.uint8), np.array(ends, np.int64)
    first = np.array([0, *ends][:-1], np.int64)
    data[first[:, None] + _SESSION_AT] = np.frombuffer(_int8(session), np.uint8)
    data[last[:, None] + _CHECKSUM_AT] = np.array(checksums, ">i8").view(np.uint8).reshape(-1, 8)
