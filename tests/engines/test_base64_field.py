"""Long base64 strings are taken out of replies, wherever the reads end."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.engines.base64_field import Base64Field
from turngate.errors import EngineError


def read_all(field: Base64Field, reply: bytes, sizes: list[int]) -> bytes:
    """Feed a reply in reads of these sizes, and the rest in one."""
    kept, at = [], 0
    for size in [*sizes, len(reply)]:
        kept.append(field.feed(reply[at : at + size]))
        at += size
    return b"".join(kept)


@given(
    st.binary(max_size=60),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.text(max_size=20),
    st.lists(st.integers(1, 40), max_size=12),
)
def test_content_is_removed_and_decoded(content: bytes, spaces: tuple[str, str], text: str, sizes: list[int]) -> None:
    value = {"text": text + '"experts":"', "experts": base64.b64encode(content).decode(), "ids": [1, 2]}
    field = Base64Field("experts", "engine", 1000)
    kept = read_all(field, json.dumps(value, separators=spaces).encode(), sizes)
    assert json.loads(kept) == {**value, "experts": ""}
    assert field.take() == content


@given(st.sampled_from([None, 3, [], {}]), st.lists(st.integers(1, 9), max_size=9))
def test_other_values_are_kept(value: object, sizes: list[int]) -> None:
    field = Base64Field("experts", "engine", 1000)
    reply = json.dumps({"experts": value, "more": "x"}).encode()
    assert read_all(field, reply, sizes) == reply and not field.size


def test_last_content_counts() -> None:
    field = Base64Field("experts", "engine", 1000)
    kept = field.feed(b'data: {"experts":"QUJD"}\n\ndata: {"experts":"REVGRw=="}\n\n')
    assert kept == b'data: {"experts":""}\n\ndata: {"experts":""}\n\n' and field.take() == b"DEFG"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b'{"experts":"QU*D"}', "engine sent experts that cannot be decoded"),
        (b'{"experts":"QUJDR"}', "engine sent experts that cannot be decoded"),
        (b'{"experts":"' + b"QUJD" * 4 + b'"}', "engine sent more than 10 bytes of experts"),
    ],
)
def test_invalid_content_is_rejected(reply: bytes, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        Base64Field("experts", "engine", 10).feed(reply)
