"""Test requests that are still running when shutdown times out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from turngate.server.asgi import GATEWAY_HEADER, Receive, Scope, Send, respond
from turngate.server.run import answer_when_stopping

SCOPE = {"type": "http", "method": "PUT", "path": "/admin/sessions/a/outcome", "headers": [], "query_string": b""}


async def disconnected() -> MutableMapping[str, Any]:
    return {"type": "http.disconnect"}


class RecordingSend:
    """Collect ASGI messages and reject a second response start, as uvicorn does."""

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if self.messages and message["type"] == "http.response.start":
            raise RuntimeError("a reply has begun")
        self.messages.append(message)


async def run_and_cancel(app: Any, scope: Scope, sent: RecordingSend) -> None:
    task = asyncio.ensure_future(answer_when_stopping(app)(scope, disconnected, sent))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def test_cancelled_request_gets_gateway_stopping() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(60)

    sent = RecordingSend()
    await run_and_cancel(slow, SCOPE, sent)
    start, body = sent.messages
    assert start["status"] == 503 and GATEWAY_HEADER in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "gateway_stopping"


async def test_started_reply_is_cut_off() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, b"{}")
        await asyncio.sleep(60)

    sent = RecordingSend()
    with pytest.raises(asyncio.CancelledError):
        await run_and_cancel(slow, SCOPE, sent)
    assert [message.get("status") for message in sent.messages] == [200, None]
