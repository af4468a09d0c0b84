"""Encoding line by line with cached lines gives the same ids as encoding a whole text."""

from __future__ import annotations

import itertools

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from turngate.render import tokenizer
from turngate.render.tokenizer import _LINE_SAFE_PATTERNS, _FastEncoder

# One character of every kind that the patterns distinguish.
_CHARACTERS = " \t\n\r\x0b\x0c\x1c\x85\xa0\u2028\u3000aZé1٣.;/'_中\u0301"


def _encoder(pattern: str) -> _FastEncoder:
    """A byte encoder that merges every pair of these characters, so that each piece of a pattern becomes one token."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for first, second in itertools.product(_CHARACTERS, repeat=2):
        pair = (first + second).encode()
        for size in range(2, len(pair) + 1):
            ranks.setdefault(pair[:size], len(ranks))
            ranks.setdefault(pair[-size:], len(ranks))
    encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return _FastEncoder(encoding, list(range(len(ranks))), nfc=False, added={})


_ENCODERS = [_encoder(pattern) for pattern in sorted(_LINE_SAFE_PATTERNS)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("encoder", _ENCODERS, ids=["llama", "qwen"])
@given(text=some.text(_CHARACTERS, max_size=40))
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_line_by_line_encoding_is_the_same(encoder: _FastEncoder, text: str) -> None:
    assert encoder.encode(text) == encoder._encoding.encode_ordinary(text)


def test_pattern_across_lines_is_not_split() -> None:
    gpt2 = _encoder(r"'s| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    assert gpt2.encode("a\n  b\n") == gpt2._encoding.encode_ordinary("a\n  b\n")
    assert not gpt2._lines


def test_line_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_MAX_CACHED_LINES", 10)
    encoder = _encoder(min(_LINE_SAFE_PATTERNS))
    for n in range(100):
        text = f"a{n}\n{'x' * 1000}\nagain\n"
        assert encoder.encode(text) == encoder._encoding.encode_ordinary(text)
        assert len(encoder._lines) <= 10
        assert len(encoder._older_lines) <= 10
    kept = {**encoder._lines, **encoder._older_lines}
    assert "again\n" in kept
    assert all(len(line) <= tokenizer._MAX_CACHED_LINE for line in kept)
