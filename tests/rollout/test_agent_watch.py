"""Watching a command: marks in its address and key are removed before the gateway sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turngate.rollout.agent_watch import _Marks


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_marks_are_removed_and_noted(kind: str) -> None:
    marks, seen = _Marks("tg-key"), []
    scope = {
        "type": kind,
        "path": "/from/OPENAI_BASE_URL/v1/responses",
        "headers": [(b"authorization", b"Bearer " + marks.mark_key("OPENAI_API_KEY").encode())],
        "query_string": b"",
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["headers"][0][1]))

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    asyncio.run(marks.wrap(app)(scope, nothing, nothing))  # type: ignore[func-returns-value,arg-type]
    assert seen == [("/v1/responses", b"Bearer tg-key")]
    assert list(marks.seen) == ["OPENAI_BASE_URL", "OPENAI_API_KEY"]
