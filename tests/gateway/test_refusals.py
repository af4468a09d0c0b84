"""Test which errors count as refused model calls."""

from __future__ import annotations

import pytest

from turngate import errors
from turngate.dialects.messages_reply import ThreadsUnsupported
from turngate.dialects.responses import PreviousResponseNotFound
from turngate.gateway.refusals import is_refusal

REFUSALS = (
    errors.BadRequest,
    errors.NotFound,
    errors.Gone,
    errors.TooLarge,
    errors.Unprocessable,
    errors.EngineRejected,
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
