"""The log of an agent's calls: what it asked for, in every dialect, and what the gateway refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from turngate.rollout.call_log import CallLog, LoggedCall

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "description": "", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Hi"}]


def log_call(path: str, body: Any, *, method: str = "POST", status: int = 200, reply: bytes = b"{}") -> LoggedCall:
    """Send one request through a log to an application that reads it and replies."""
    parts = [json.dumps(body).encode()[:10], json.dumps(body).encode()[10:]]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": reply})

    log = CallLog()
    scope = {"type": "http", "method": method, "path": path, "headers": [(b"x-session-id", b"s")], "query_string": b""}
    asyncio.run(log.wrap(app)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return log.calls[0]


@pytest.mark.parametrize(
    ("path", "body", "dialect"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [CHAT_TOOL]}, "chat"),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}]},
            "responses",
        ),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "bash", "input_schema": SCHEMA}]},
            "messages",
        ),
    ],
)
def test_tools_and_sampling_in_every_dialect(path: str, body: dict[str, Any], dialect: str) -> None:
    call = log_call(path, {"model": "m", "temperature": 0, **body})
    assert (call.dialect, call.model, call.status, call.samples) == (dialect, "m", 200, True)
    assert [tool.name for tool in call.tools] == ["bash"]
    assert call.sampling["temperature"] == 0
    assert call.headers == ("x-session-id",)


def test_gemini_names_model_in_path() -> None:
    tools = [{"functionDeclarations": [{"name": "bash", "parameters": SCHEMA}]}]
    body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], "tools": tools}
    call = log_call("/v1beta/models/m:generateContent", {**body, "generationConfig": {"temperature": 0}})
    assert (call.dialect, call.model, [tool.name for tool in call.tools]) == ("gemini", "m", ["bash"])
    assert call.sampling["temperature"] == 0


def test_refusal_keeps_message() -> None:
    reply = json.dumps({"error": {"message": "model x is not served", "type": "not_found"}}).encode()
    call = log_call("/v1/chat/completions", {"model": "x", "messages": MESSAGES}, status=404, reply=reply)
    assert call.is_refused and call.error == "model x is not served"
    log = CallLog()
    log.calls = [call, call]
    assert log.describe_refusals() == "2 refused; the first: 404 model x is not served"


@pytest.mark.parametrize(
    ("method", "path", "status", "samples", "refused"),
    [
        ("GET", "/v1/models", 200, False, False),
        ("POST", "/v1/unknown", 404, False, False),  # not a model call
        ("POST", "/v1/messages/count_tokens", 200, False, False),
        ("POST", "/v1/chat/completions", 500, True, False),
        ("POST", "/v1/chat/completions", 400, True, True),
    ],
)
def test_what_counts_as_model_call(method: str, path: str, status: int, samples: bool, refused: bool) -> None:
    call = log_call(path, {"model": "m", "messages": MESSAGES}, method=method, status=status)
    assert (call.samples, call.is_refused) == (samples, refused)


def test_invalid_body_is_logged_without_details() -> None:
    call = log_call("/v1/chat/completions", {"messages": 3}, status=400, reply=b"no JSON")
    assert (call.dialect, call.model, call.tools, call.error) == ("chat", "", (), "no JSON")


def log_socket(events: list[Any], frames: list[Any]) -> list[LoggedCall]:
    """Send events over a WebSocket through a log. The application answers each with a frame, or not at all if the frame is None."""
    messages = [{"type": "websocket.receive", "text": json.dumps(event)} for event in events]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for frame in frames:
            await receive()
            if frame is not None:
                await send({"type": "websocket.send", "text": json.dumps(frame, separators=(",", ":"))})

    log = CallLog()
    scope = {"type": "websocket", "path": "/v1/responses", "headers": [], "query_string": b""}
    asyncio.run(log.wrap(app)(scope, receive, send))
    return log.calls


def test_events_of_websocket_are_calls() -> None:
    tool = {"type": "function", "name": "bash", "parameters": SCHEMA}
    event = {"type": "response.create", "model": "m", "temperature": 0, "input": "Hi", "tools": [tool]}
    error = {"type": "error", "status": 400, "message": "no such field"}
    warm_up, first, second, refused = log_socket(
        [{**event, "input": [], "generate": False}, event, {**event, "previous_response_id": "resp_1"}, event],
        [{"type": "response.created"}] * 3 + [error],
    )
    assert (warm_up.samples, warm_up.dialect) == (False, "responses")
    for call in (first, second):
        assert (call.dialect, call.model, call.samples, call.is_refused) == ("responses", "m", True, False)
        assert [tool.name for tool in call.tools] == ["bash"] and call.sampling == {"temperature": 0}
    assert (refused.is_refused, refused.error) == (True, "no such field")


def test_event_without_a_reply_is_not_a_successful_call() -> None:
    event = {"type": "response.create", "model": "m", "input": "Hi"}
    answered, lost = log_socket([event, event], [{"type": "response.created"}, None])
    assert (answered.status, lost.status) == (200, 0)
    delta = {"type": "response.output_text.delta", "delta": "Hi"}
    assert [call.status for call in log_socket([event] * 2, [{"type": "response.created"}, delta])] == [200, 0]


def test_replies_belong_to_the_lane_of_the_event() -> None:
    event = {"type": "response.create", "model": "m", "input": "Hi"}
    events = [{**event, "stream_id": lane} for lane in "abab"]
    error = {"type": "error", "status": 503, "message": "stopping", "stream_id": "a"}
    created = {"type": "response.created", "stream_id": "b"}
    calls = log_socket(events, [None, None, created, error])
    assert [(call.status, call.error) for call in calls] == [(503, "stopping"), (200, ""), (0, ""), (0, "")]
