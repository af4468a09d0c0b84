"""Test explanations of validation errors: the field, its valid values and a suggestion."""

from __future__ import annotations

from typing import Literal

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
        ({"name": 1}, "name: Expected `str`, got `int`", "name"),
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
