"""Test explanations of validation errors: the field, its valid values and a suggestion."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from turngate.common.validation import explain_error


class Server(msgspec.Struct, forbid_unknown_fields=True):
    port: int = 80
    mode: Literal["fast", "safe"] = "safe"


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    first: Server | None = None
    listed: list[Server] = []
    named: dict[str, Server] = {}


@pytest.mark.parametrize(
    ("given", "message", "field"),
    [
        ({}, "name is missing", "name"),
        ({"name": 1}, "name must be a string, not an integer", "name"),
        ({"name": "a", "nmae": 1}, "nmae is not a known field; did you mean name?", "nmae"),
        ({"name": "a", "zzz": 1}, "zzz is not a known field; available: name, first, listed, named", "zzz"),
        ({"name": "a", "first": {"prot": 1}}, "first.prot is not a known field; did you mean port?", "first.prot"),
        ({"name": "a", "first": {"mode": "x"}}, "first.mode must be one of fast, safe, not 'x'", "first.mode"),
        (
            {"name": "a", "listed": [{}, {"prot": 1}]},
            "listed[1].prot is not a known field; did you mean port?",
            "listed[1].prot",
        ),
        (
            {"name": "a", "named": {"b": {"mode": "x"}}},
            "named[...].mode must be one of fast, safe, not 'x'",
            "named[...].mode",
        ),
    ],
)
def test_explanation_names_field_and_fix(given: object, message: str, field: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, Settings)
    assert explain_error(caught.value, Settings) == (message, field)


class Limits(msgspec.Struct):
    seconds: float | None = None
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=3, pattern="^a")] = "a"
    urls: Annotated[list[str], msgspec.Meta(max_length=1)] = []
    pair: tuple[int, int] = (1, 2)
    named: Annotated[dict[str, int], msgspec.Meta(max_length=2)] = {}
    open: bool = False
    stop: str | list[str] | None = None
    mode: Literal["fast", "safe"] | None = None
    data: bytes = b""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": "soon"}, "seconds must be a number, not a string"),
        ({"count": 1.5}, "count must be an integer, not a decimal number"),
        ({"count": None}, "count must be an integer, not null"),
        ({"count": True}, "count must be an integer, not a boolean"),
        ({"count": 0}, "count must be an integer of at least 1"),
        ({"share": 0}, "share must be a number greater than 0"),
        ({"share": 2}, "share must be a number of at most 1"),
        ({"id": ""}, "id must have at least 1 character"),
        ({"id": "abcd"}, "id must have at most 3 characters"),
        ({"id": "b"}, "id must match the regular expression '^a'"),
        ({"urls": "http://x"}, "urls must be a list, not a string"),
        ({"urls": ["x", 1]}, "urls must have at most 1 item"),
        ({"urls": [1]}, "urls[0] must be a string, not an integer"),
        ({"pair": [1]}, "pair must have exactly 2 items"),
        ({"named": []}, "named must be an object, not a list"),
        ({"named": {"a": 1, "b": 2, "c": 3}}, "named must have at most 2 entries"),
        ({"open": 1}, "open must be true or false, not an integer"),
        ({"stop": 1}, "stop must be a string or a list, not an integer"),
        ({"mode": 1}, "mode must be one of fast, safe, not an integer"),
        ({"data": "@"}, "data: Invalid base64 encoded string"),
    ],
)
def test_explanation_is_plain_english(given: object, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, Limits)
    assert explain_error(caught.value, Limits)[0] == message
