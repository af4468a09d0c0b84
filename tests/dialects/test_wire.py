"""Test wire helpers shared by all dialects."""

from __future__ import annotations

import json

import pytest

from turngate.dialects.wire import without_lone_surrogates


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (rb'"plain"', rb'"plain"'),
        (rb'"a\ud800b"', rb'"a\ufffdb"'),
        (rb'"\uDC00\uD83D"', rb'"\ufffd\ufffd"'),
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\\ud800"', rb'"\\ud800"'),  # an escaped backslash, not an escape
        (rb'"\\\ud800"', rb'"\\\ufffd"'),
        (rb'"\\\\ud800 \ud7ff"', rb'"\\\\ud800 \ud7ff"'),
    ],
)
def test_lone_surrogate_becomes_replacement_character(body: bytes, expected: bytes) -> None:
    assert without_lone_surrogates(body) == expected
    json.loads(expected).encode()
