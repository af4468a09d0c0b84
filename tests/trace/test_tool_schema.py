"""Check the arguments of host tools against their schemas."""

from __future__ import annotations

import pytest

from turngate.errors import BadRequest
from turngate.trace.tool_schema import build_checker


@pytest.mark.parametrize(
    "reference",
    ["#/$defs/missing", "#missing", "other.json#/a", "#/" + "x" * 5000],
    ids=["pointer", "anchor", "file", "long"],
)
def test_error_about_a_missing_reference_does_not_repeat_the_schema(reference: str) -> None:
    long = {"description": "a description of this argument"}
    check = build_checker({"type": "object", "properties": {"a": {"$ref": reference}, **dict.fromkeys("bcd", long)}})
    with pytest.raises(BadRequest, match="has a reference that cannot be resolved") as raised:
        check({"a": 1})
    assert reference[:20].lstrip("#") in raised.value.message
    assert "description" not in raised.value.message and len(raised.value.message) < 500
