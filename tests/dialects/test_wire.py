"""Test what all dialects share: wire helpers, and the choice of a dialect for stored messages and tools."""

from __future__ import annotations

import json
import sys
from types import FrameType

import pytest

from turngate.dialects import DIALECTS, Dialect, WireRequest, decode_stored_messages, decode_stored_tools
from turngate.dialects.responses_socket import decode_event
from turngate.dialects.wire import without_lone_surrogates
from turngate.errors import BadRequest


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


def test_lone_surrogate_is_replaced_although_another_field_is_not_utf_8() -> None:
    """msgspec does not decode fields that it ignores, so such a request is accepted."""
    body = b'{"ignored": "\xff", "text": "\\ud800"}'
    assert without_lone_surrogates(body) == body.replace(b"ud800", b"ufffd")


@pytest.mark.parametrize("text", [rb"\ud83d\ude00", rb"\ud83d", rb"\ude00", rb"\\", rb"\ud83dx\\"])
def test_long_text_calls_no_function_for_each_character(text: bytes) -> None:
    """A text of 60,000 pairs blocked the event loop for over 50 ms."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        without_lone_surrogates(b'"%b\\ud800"' % (text * 1000))
    finally:
        sys.setprofile(None)
    assert len(calls) < 100, calls[:20]  # one for each piece of text would be 1000 or more


def test_unknown_dialect_of_stored_data_is_named() -> None:
    for decode in (decode_stored_messages, decode_stored_tools):
        with pytest.raises(BadRequest, match="unknown dialect 'morse'"):
            decode("morse", b"[{}]")


@pytest.mark.parametrize("dialect", [dialect.name for dialect in DIALECTS])
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"allowed_tools":3}', id="object"),
        pytest.param(b'[{"role":', id="truncated"),
        pytest.param(b'"x"', id="string"),
        pytest.param(b"[" * 3000 + b"]" * 3000, id="nested"),
    ],
)
def test_invalid_stored_data_is_a_bad_request(dialect: str, raw: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_stored_messages(dialect, raw)
    with pytest.raises(BadRequest):
        decode_stored_tools(dialect, raw)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_deeply_nested_body_is_not_called_invalid_json(dialect: Dialect) -> None:
    body = b'{"ignored": %b}' % (b"[" * 3000 + b"]" * 3000)
    with pytest.raises(BadRequest, match=r"^[Tt]he body.* nested too deeply; use fewer than 200 levels$"):
        dialect.decode(WireRequest(body))


def test_deeply_nested_socket_event_is_not_called_invalid_json() -> None:
    event = b'{"type": "response.create", "ignored": %b}' % (b"[" * 3000 + b"]" * 3000)
    with pytest.raises(BadRequest, match=r"^The event is nested too deeply; use fewer than 200 levels$"):
        decode_event(event)
