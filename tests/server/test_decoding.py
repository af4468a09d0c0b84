"""Parameters and bodies of requests: which texts are read, how deep they may be nested, and what an error says."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from starlette.datastructures import QueryParams

from turngate.errors import BadRequest
from turngate.server.decoding import MAX_DEPTH, Seconds, Whole, decode_query, find_too_deep


class ExampleQuery(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    name: str = ""
    number: Whole = 7
    other: Whole | None = None
    wait: Seconds = 0.0
    flag: bool = False
    order: Literal["asc", "desc"] = "desc"
    kind: tuple[Literal["a", "b"], ...] = ()


class RequiredQuery(msgspec.Struct, frozen=True):
    rollout: str


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ExampleQuery()),
        ("unknown=1", ExampleQuery()),
        ("name=a%20b&number=0&other=999999999999999999", ExampleQuery("a b", 0, 10**18 - 1)),
        ("wait=1.5&order=asc", ExampleQuery(wait=1.5, order="asc")),
        ("number=1&number=2", ExampleQuery(number=2)),
        ("class=a&class=&class=b", ExampleQuery(kind=("a", "b"))),
        *((f"flag={text}", ExampleQuery(flag=True)) for text in ("1", "true", "True", "yes", "on")),
        *((f"flag={text}", ExampleQuery(flag=False)) for text in ("", "0", "false", "no", "off")),
    ],
)
def test_texts_that_are_read(text: str, expected: ExampleQuery) -> None:
    assert decode_query(QueryParams(text), ExampleQuery) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number=x", "number must be a non-negative integer of at most 18 digits, not 'x'"),
        ("number=-1", "number must be a non-negative integer of at most 18 digits, not '-1'"),
        (
            "number=1000000000000000000",
            "number must be a non-negative integer of at most 18 digits, not '1000000000000000000'",
        ),
        ("number=%D9%A3", "number must be a non-negative integer of at most 18 digits, not '٣'"),
        ("other=", "other must be a non-negative integer of at most 18 digits, not ''"),
        ("wait=nan", "wait must be a finite number of seconds, 0 or more, not 'nan'"),
        ("wait=inf", "wait must be a finite number of seconds, 0 or more, not 'inf'"),
        ("flag=maybe", "flag must be 1 or 0, not 'maybe'"),
        ("order=up", "order must be 'asc' or 'desc', not 'up'"),
        ("class=a&class=c", "class must be 'a' or 'b', not 'c'"),
        ("order=" + "x" * 200, f"order must be 'asc' or 'desc', not '{'x' * 100}'"),
    ],
)
def test_errors_name_the_parameter(text: str, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        decode_query(QueryParams(text), ExampleQuery)
    assert error.value.message == message
    assert error.value.param == text.partition("=")[0]


def test_missing_parameter_is_named() -> None:
    with pytest.raises(BadRequest, match="rollout is missing; add it to the URL"):
        decode_query(QueryParams(""), RequiredQuery)


@pytest.mark.parametrize("end", [b"", b"\\", b'"'])
def test_depth_of_a_body_with_an_unterminated_string_is_found_in_one_pass(end: bytes) -> None:
    """The time for an unterminated string grew with the square of its length, to hours for 1 MB."""
    flat = b"[]" * (MAX_DEPTH + 1)
    assert find_too_deep(flat + b'"' + b'\\"' * 500_000 + end) is None
    assert find_too_deep(flat + b'"' + b"[" * 500_000 + end) is None
    assert find_too_deep(b'{"a": "]]", "b": ' + b"[" * MAX_DEPTH) == "b"
