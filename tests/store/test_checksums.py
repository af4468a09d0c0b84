"""Checksums under another key equal those computed from the node."""

from __future__ import annotations

import random

import pytest

from turngate.store.checksums import join_fields, key_difference, node_checksum, rekey_checksums


@pytest.mark.parametrize("old, new", [(1, 2), (9, 10), (123_456, 7), (1, 10**15)])
def test_checksums_under_another_key(old: int, new: int) -> None:
    rng = random.Random(old)
    checksums, sizes, expected = [], [], []
    for number, size in enumerate((0, 1, 15, 16, 255, 256, 4_095, 65_536, 1_100_000)):
        parent = None if number == 0 else number - 1
        logprobs = rng.randbytes(size) if number % 2 else None
        node = (number, parent, "sampled", rng.randbytes(size), logprobs, b"info", b"[]")
        data = join_fields(old, *node)
        checksums.append(node_checksum(old, *node))
        sizes.append(len(data) - len(str(old)))
        expected.append(node_checksum(new, *node))
    assert rekey_checksums(checksums, sizes, [key_difference(old, new)] * len(sizes)) == expected


def test_no_nodes_have_no_checksums() -> None:
    assert rekey_checksums([], [], []) == []
