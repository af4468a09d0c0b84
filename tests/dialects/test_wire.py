"""What all dialects read with."""

from __future__ import annotations

import json

import pytest

from turngate.dialects.wire import without_lone_surrogates


@pytest.mark.parametrize(
    ("body", "mended"),
    [
        (rb'"plain"', rb'"plain"'),
        (rb'"a\ud800b"', rb'"a\ufffdb"'),
        (rb'"\uDC00\uD83D"', rb'"\ufffd\ufffd"'),
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\\ud800"', rb'"\\ud800"'),  # a backslash and letters: no escape
        (rb'"\\\ud800"', rb'"\\\ufffd"'),
        (rb'"\\\\ud800 \ud7ff"', rb'"\\\\ud800 \ud7ff"'),
    ],
)
def test_half_of_a_character_becomes_the_replacement_character(body: bytes, mended: bytes) -> None:
    assert without_lone_surrogates(body) == mended
    json.loads(mended).encode()
