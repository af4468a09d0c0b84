"""Test which errors count as refused model calls, and which calls ask the same."""

from __future__ import annotations

import json

import pytest

from tests.kit import Json
from turngate import errors
from turngate.dialects.messages_reply import ThreadsUnsupported
from turngate.dialects.responses import PreviousResponseNotFound
from turngate.gateway.refusals import digest_request, is_refusal

REFUSALS = (
    errors.BadRequest,
    errors.NotFound,
    errors.Gone,
    errors.TooLarge,
    errors.Unprocessable,
    errors.EngineRejected,
    errors.EngineNotFound,
)
OTHERS = (
    errors.ContextOverflow,
    PreviousResponseNotFound,
    ThreadsUnsupported,
    errors.Unauthorized,
    errors.Forbidden,
    errors.TooManyRequests,
    errors.UpgradeRefused,
    errors.Conflict,
    errors.Busy,
    errors.Stopping,
    errors.EngineError,
    errors.EngineBusy,
    errors.EngineUnavailable,
    errors.EngineTimeout,
    errors.StoreError,
    errors.TurngateError,
)


@pytest.mark.parametrize("error", [*REFUSALS, *OTHERS])
def test_what_counts(error: type[errors.TurngateError]) -> None:
    assert is_refusal(error("no")) == (error in REFUSALS)


def digest(**body: Json) -> bytes | None:
    return digest_request(json.dumps(body).encode())


@pytest.mark.parametrize("field", ["messages", "input", "contents"])
@pytest.mark.parametrize(
    "context", ["system", "instructions", "systemInstruction", "system_instruction", "previous_response_id"]
)
def test_digest_covers_the_conversation(field: str, context: str) -> None:
    asked: Json = {field: "Hi", context: "one"}
    assert digest(**asked) == digest(model="m", n=2, tools=[], **asked)
    others: list[Json] = [{field: "Hi"}, {field: "Hi", context: "two"}, {field: "Ho", context: "one"}]
    assert digest(**asked) not in [digest(**other) for other in others]


def test_digest_separates_fields() -> None:
    assert digest(input="Hi", instructions=None) == digest(input="Hi") != digest(messages="Hi")
    assert digest(input="Hi", instructions="x") != digest(input="Hi", system="x")


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'{"system": "x"}'])
def test_digest_needs_messages(body: bytes) -> None:
    assert digest_request(body) is None
