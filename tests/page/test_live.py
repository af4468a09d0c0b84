"""The page with a real `turngate serve`: login, live updates, cancelling and reconnecting."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from playwright.async_api import expect

from tests.kit import calls, tool, user
from tests.page.browser import Chromium, open_browser
from tests.speed import scaled

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

Json = Any
ROOT = Path(__file__).parents[2]
KEY = "the-admin-key-of-this-test"
BASH = tool("bash", command={"type": "string"})
SCRIPT = [
    "I look first.\n" + calls(("bash", {"command": "ls -la /workspace"})),
    "There is one file; I read it.\n" + calls(("bash", {"command": "cat a.py"})),
    "Done: nothing was wrong.",
    "A fourth answer.",
]


class ServeProcess:
    """A running `turngate serve` process."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self.process = process
        self.admin = {"authorization": f"Bearer {KEY}"}

    async def open(self, **config: Json) -> Json:
        async with httpx.AsyncClient(trust_env=False, timeout=scaled(5)) as http:
            return (await http.post(f"{self.url}/admin/sessions", json=config, headers=self.admin)).json()

    async def say(self, key: str, messages: list[Json]) -> Json:
        """Send one model call and return the history with the reply and tool results."""
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http
        ) as client:
            reply = await client.chat.completions.create(model="m", messages=messages, tools=[BASH])
        message = reply.choices[0].message.model_dump(exclude_none=True)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "total 1\n-rw-r--r-- a.py\n"}
            for call in message.get("tool_calls", [])
        ]
        return [*messages, message, *results]

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        await self.process.wait()


@asynccontextmanager
async def start_serve(data: Path, port: int = 0) -> AsyncIterator[ServeProcess]:
    script = data.with_name("script.json")
    script.write_text(json.dumps(SCRIPT))
    log = data.with_name("serve.log")
    command = ["serve", "--port", str(port), "--data", str(data), "--script", str(script), "--model", "m"]
    with log.open("w") as stderr:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "turngate",
            *command,
            stderr=stderr,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "TURNGATE_ADMIN_KEY": KEY},
        )
    try:
        async with asyncio.timeout(scaled(30)):
            while not (found := re.search(r"listens on (http://\S+)", log.read_text())):
                assert child.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield ServeProcess(found[1], child)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_admin_key_is_required_and_not_stored(tmp_path: Path, chromium: Chromium) -> None:
    async with start_serve(tmp_path / "data") as served, open_browser(served.url, chromium=chromium) as web:
        await web.page.goto(served.url)  # redirects browsers to the page
        await web.page.fill("#key", "not the key")
        await web.press("Enter")
        await web.wait_for(".login-trouble", "key")
        web.problems.clear()  # the browser reports the 401
        assert await web.evaluate("document.getElementById('bar').hidden")
        await web.page.fill("#key", KEY)
        await web.press("Enter")
        await web.wait_for(".empty", "No rollouts")
        await web.wait_for(".empty", "turngate batch")
        stored = await web.evaluate(
            "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie, location.href]"
        )
        assert all(KEY not in place for place in stored)
        await web.page.reload()
        await web.wait_for(".empty", "No rollouts")  # the cookie is enough
        await web.page.click("#signout")
        await web.wait_for(".login-trouble", "signed out")
        await web.page.reload()
        await web.wait_for("#key")


@pytest.mark.real
async def test_live_turns_and_cancel(tmp_path: Path, chromium: Chromium) -> None:
    async with start_serve(tmp_path / "data") as served, open_browser(served.url, KEY, chromium=chromium) as web:
        await web.evaluate("window.loaded = true")
        opened = await served.open(
            metadata={"task": "look", "group": "g", "rollout": "g.0", "agent": "pi"}, limits={"turns": 9}
        )
        await web.wait_for(".list-row", "g.0")  # without a reload
        await web.find(".list-row a", "g.0").click()
        await web.wait_for(".empty", "No messages yet")
        history = await served.say(opened["api_key"], [user("What is in this folder?")])
        await web.wait_for(".turn.is-sampled", "I look first.")
        await web.wait_for(".turn.is-context", "What is in this folder?")
        call = await web.wait_for(".fold.is-call", "bash")
        assert "ls -la /workspace" in await call.inner_text()
        history = await served.say(opened["api_key"], history)
        await web.wait_for(".turn.is-sampled", "There is one file")
        await web.wait_for(".fold.is-result", "total 1")
        await web.wait_for_text(".rollout-head .facts", "2 of 9")
        await served.say(opened["api_key"], [*history[:1], user("And in another one?")])
        await web.wait_for(".tree-row", "Done: nothing was wrong.")
        assert await web.evaluate("window.loaded"), "the page was reloaded"

        await web.page.click("text=Cancel")
        await web.wait_for("dialog", "Cancel this rollout?")
        await web.press("Escape")
        await web.wait_for(".badge.is-live", "running")  # not cancelled
        await web.page.click(".actions >> text=Cancel")
        await web.page.click("dialog >> text=Cancel the rollout")
        await web.wait_for(".view-head .badge", "cancelled")
        await expect(web.find(".actions button", "Cancel")).to_have_count(0)
        async with httpx.AsyncClient(trust_env=False, timeout=scaled(5), headers=served.admin) as http:
            assert (await http.get(f"{served.url}/admin/sessions/{opened['id']}")).json()["status"] == "cancelled"


async def test_page_reconnects_after_gateway_restart(tmp_path: Path, chromium: Chromium) -> None:
    async with start_serve(tmp_path / "data") as served:
        opened = await served.open(id="kept")
        history = await served.say(opened["api_key"], [user("What is in this folder?")])
        async with open_browser(served.url, KEY, chromium=chromium) as web:
            await web.go("#/rollout/kept")
            await web.wait_for(".turn", "I look first.")
            await served.stop()
            await web.wait_for("#live[data-state=lost]", "disconnected")
            async with start_serve(tmp_path / "data", int(served.url.rsplit(":", 1)[1])) as again:
                await again.say(opened["api_key"], history)  # before the page reconnects
                await web.page.click("#live")
                await web.wait_for("#live[data-state=live]", "live")
                await web.wait_for(".turn", "Turn 2")
                await web.page.goto("about:blank")
                web.problems.clear()  # the browser reports failed requests
