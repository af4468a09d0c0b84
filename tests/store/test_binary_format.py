"""Values and rows in PostgreSQL's binary format."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from turngate.store.binary_format import encode_nodes, encode_value, make_bytes_array


def _read_copy_rows(data: bytes) -> list[list[bytes | None]]:
    """Read rows in the format of COPY BINARY. The values stay encoded."""
    rows, at = [], 0
    while at < len(data):
        (columns,) = struct.unpack_from(">h", data, at)
        at += 2
        row: list[bytes | None] = []
        for _ in range(columns):
            (size,) = struct.unpack_from(">i", data, at)
            at += 4
            row.append(None if size < 0 else data[at : at + size])
            at += max(0, size)
        rows.append(row)
    return rows


def _int8(value: int) -> bytes:
    return struct.pack(">q", value)


@pytest.mark.parametrize("count", [0, 1, 16, 17, 40])
def test_nodes_are_encoded_with_new_key_and_checksums(count: int) -> None:
    nodes: list[tuple[Any, ...]] = []
    for n in range(count):
        parent, logprobs = (n - 1 if n else None), (b"%d" % n * n if n % 2 else None)
        nodes.append((n, parent, n % 2, b"ids" * n, logprobs, b"info", b"[%d]" % n, n % 3 > 0, -1))
    checksums = [2**31 + n for n in range(count)]
    rows = _read_copy_rows(b"".join(encode_nodes(99, nodes, checksums)))
    assert len(rows) == count
    for row, node, checksum in zip(rows, nodes, checksums, strict=True):
        number, parent, kind, ids, logprobs, info, messages, delivered, _ = node
        assert row == [
            _int8(99),
            _int8(number),
            None if parent is None else _int8(parent),
            b"sampled" if kind else b"context",
            ids,
            logprobs,
            info,
            messages,
            _int8(delivered),
            _int8(checksum),
        ]


@pytest.mark.parametrize(
    "values, oid, flags, elements",
    [
        ([], 1009, 0, []),
        (["a", "é"], 1009, 0, [b"a", "é".encode()]),
        ([1, 2], 1016, 0, [_int8(1), _int8(2)]),
        ([0.5], 1022, 0, [struct.pack(">d", 0.5)]),
        ([b"", b"\0"], 1001, 0, [b"", b"\0"]),
        ([None, 2], 1016, 1, [None, _int8(2)]),
        ([None], 1009, 1, [None]),
    ],
)
def test_lists_are_arrays(values: list[Any], oid: int, flags: int, elements: list[bytes | None]) -> None:
    data, found = encode_value(values)
    assert data is not None and found == oid
    dimensions, has_null, _ = struct.unpack_from(">iiI", data)
    assert (dimensions, has_null) == (1 if elements else 0, flags)
    parts = b"".join(struct.pack(">i", -1 if e is None else len(e)) + (e or b"") for e in elements)
    assert data[12:] == (struct.pack(">ii", len(elements), 1) + parts if elements else b"")


def test_array_of_bytes_equals_encoded_list() -> None:
    array = make_bytes_array([b"a", b"bc"])
    assert (array.data, array.oid) == encode_value([b"a", b"bc"])
