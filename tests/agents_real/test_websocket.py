"""Codex over the WebSocket of the Responses API, through the relay of a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.agents_real.kit import agent, findings
from tests.speed import scaled
from turngate.agents.spec import AgentSpec
from turngate.rollout.agent_check import CheckOptions, prepare_check
from turngate.sandboxes.base import Backend
from turngate.server.asgi import App, Message, Receive, Scope, Send


def with_websockets(spec: AgentSpec) -> AgentSpec:
    """Return a description of Codex whose provider supports WebSockets."""
    files = tuple(
        msgspec.structs.replace(
            file,
            content=file.content.replace(
                'wire_api = "responses"', 'wire_api = "responses"\nsupports_websockets = true'
            ),
        )
        for file in spec.files
    )
    assert files != spec.files
    return msgspec.structs.replace(spec, files=files)


@pytest.mark.full
@pytest.mark.needs("agent:codex", "bubblewrap")
async def test_codex_over_websocket_is_fully_captured(backend: Callable[[str], Backend], tmp_path: Path) -> None:
    kinds: list[str] = []
    events: list[str] = []

    def around(app: App) -> App:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def receive_and_note() -> Message:
                message = await receive()
                if message["type"] == "websocket.receive":
                    events.append(message.get("text") or "")
                return message

            if scope["path"].endswith("/responses"):
                kinds.append(scope["type"])
            await app(scope, receive_and_note, send)

        return serve

    spec, installed = agent("codex")
    options = CheckOptions(around=around, timeout_s=scaled(240))
    async with prepare_check(with_websockets(spec), installed, backend("bubblewrap"), tmp_path, options) as check:
        report = await check.run()
    assert report.passed, findings(report)
    assert report.outcome.roles == {"main": 5} and not report.outcome.notes
    assert set(kinds) == {"websocket"}, "Codex fell back to HTTP"
    assert len(report.samples) == 1 and "exec_command" in report.tools
    continued = [event for event in events if '"previous_response_id":"resp_' in event]
    assert len(continued) >= 4, "Codex did not continue its responses"
