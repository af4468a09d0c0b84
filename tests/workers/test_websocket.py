"""WebSockets and stored responses with real workers behind the front, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import openai
import pytest
import websockets
from websockets.sync.client import ClientConnection, connect

from tests.speed import scaled
from tests.workers.test_processes import ServeProcess, data, start_serve, wait_until, write_script

__all__ = ["data"]  # a fixture
pytestmark = [pytest.mark.process, pytest.mark.full]


def ask(serving: ServeProcess, key: str, *requests: Any) -> list[Any]:
    """Send requests over one connection and return the last event of each reply. Connect again if a worker ends before it answers."""
    last = []
    headers = {"Authorization": f"Bearer {key}"}
    url = serving.url.replace("http", "ws") + "/v1/responses"
    with connect_again(url, headers) as connection:
        previous = None
        for request in requests:
            event = {"type": "response.create", "model": "m", "previous_response_id": previous, **request}
            connection.send(json.dumps(event))
            while (frame := json.loads(connection.recv(scaled(20))))["type"] not in ("response.completed", "error"):
                pass
            last.append(frame)
            previous = frame["response"]["id"] if "response" in frame else previous
    return last


def connect_again(url: str, headers: dict[str, str]) -> ClientConnection:
    """Connect as an agent does: a connection that a killed worker had taken is closed without an answer, and is tried again."""
    for _ in range(4):
        try:
            return connect(url, additional_headers=headers, proxy=None, open_timeout=scaled(20))
        except websockets.InvalidMessage:
            time.sleep(0.5)
    raise AssertionError("four connections were closed without an answer")


def test_connection_reaches_its_worker_and_responses_survive_its_death(data: Any) -> None:
    script = write_script(data.with_name("script.json"), ["One.", "Two."])
    with start_serve(data, "--script", script, "--model", "m") as serving:
        owner = 1
        opened = serving.open(owner)
        frames = ask(serving, opened["api_key"], {"input": "Hi"}, {"input": "More", "store": False})
        assert [frame["type"] for frame in frames] == ["response.completed"] * 2
        stored, unstored = (frame["response"]["id"] for frame in frames)
        before = serving.workers
        os.kill(before[owner], signal.SIGKILL)
        wait_until(lambda: len(serving.workers) == 2 and serving.workers[owner] != before[owner])
        [again] = ask(serving, opened["api_key"], {"input": "Again", "previous_response_id": stored})
        assert again["response"]["previous_response_id"] == stored
        [lost] = ask(serving, opened["api_key"], {"input": "Again", "previous_response_id": unstored})
        assert lost["error"]["code"] == "previous_response_not_found"
        client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=opened["api_key"], timeout=scaled(60))
        with client:  # a restarted worker begins its script again
            assert client.responses.retrieve(again["response"]["id"]).output_text == "One."
        trace = serving.ask("GET", f"/admin/sessions/{opened['id']}/trace")
        assert sum(node["kind"] == "sampled" for node in trace["nodes"]) == 3
        with pytest.raises(websockets.InvalidStatus) as refused:
            ask(serving, "tg-wrong", {"input": "Hi"})
        assert refused.value.response.status_code == 401
