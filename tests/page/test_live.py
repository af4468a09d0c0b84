"""The page beside a real `turngate serve`: who may look, what appears as it happens, what can be stopped, a gateway that goes away."""

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
from tests.page.browser import browsing
from tests.speed import scaled

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full]

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


class Served:
    """`turngate serve`, in a process of its own."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self.process = process
        self.admin = {"authorization": f"Bearer {KEY}"}

    async def open(self, **config: Json) -> Json:
        async with httpx.AsyncClient(trust_env=False, timeout=scaled(5)) as http:
            return (await http.post(f"{self.url}/admin/sessions", json=config, headers=self.admin)).json()

    async def say(self, key: str, messages: list[Json]) -> Json:
        """One model call, as an agent makes it; its messages and the answer."""
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
async def serving(data: Path, port: int = 0) -> AsyncIterator[Served]:
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
        yield Served(found[1], child)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_only_the_admin_key_opens_the_page_and_it_is_kept_nowhere(tmp_path: Path, shots: Path) -> None:
    async with serving(tmp_path / "data") as served, browsing(served.url, shots=shots) as web:
        await web.page.goto(served.url)  # people with a browser are led to the page
        await web.page.fill("#key", "not the key")
        await web.press("Enter")
        await web.sees(".login-trouble", "key")
        web.complaints.clear()  # the browser says that it was refused
        assert await web.asks("document.getElementById('bar').hidden")
        await web.page.fill("#key", KEY)
        await web.press("Enter")
        await web.sees(".empty", "No rollouts")
        await web.sees(".empty", "turngate batch")
        kept = await web.asks(
            "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie, location.href]"
        )
        assert all(KEY not in place for place in kept)
        await web.page.reload()
        await web.sees(".empty", "No rollouts")  # the cookie is enough
        await web.page.click("#signout")
        await web.sees(".login-trouble", "signed out")
        await web.page.reload()
        await web.sees("#key")


@pytest.mark.real
async def test_turns_appear_as_they_happen_and_a_rollout_can_be_cancelled(tmp_path: Path, shots: Path) -> None:
    async with serving(tmp_path / "data") as served, browsing(served.url, KEY, shots=shots) as web:
        await web.asks("window.loaded = true")
        opened = await served.open(
            metadata={"task": "look", "group": "g", "rollout": "g.0", "agent": "pi"}, limits={"turns": 9}
        )
        await web.sees(".list-row", "g.0")  # without a reload
        await web.find(".list-row a", "g.0").click()
        await web.sees(".empty", "No messages yet")
        history = await served.say(opened["api_key"], [user("What is in this folder?")])
        await web.sees(".turn.is-sampled", "I look first.")
        await web.sees(".turn.is-context", "What is in this folder?")
        call = await web.sees(".fold.is-call", "bash")
        assert "ls -la /workspace" in await call.inner_text()
        history = await served.say(opened["api_key"], history)
        await web.sees(".turn.is-sampled", "There is one file")
        await web.sees(".fold.is-result", "total 1")
        await web.says(".rollout-head .facts", "2 of 9")
        await served.say(opened["api_key"], [*history[:1], user("And in another one?")])
        await web.sees(".tree-row", "Done: nothing was wrong.")
        assert await web.asks("window.loaded"), "nothing was loaded again"

        await web.page.click("text=Cancel")
        await web.sees("dialog", "Cancel this rollout?")
        await web.press("Escape")
        await web.sees(".badge.is-live", "running")  # nothing was done
        await web.page.click(".actions >> text=Cancel")
        await web.page.click("dialog >> text=Cancel the rollout")
        await web.sees(".view-head .badge", "cancelled")
        await expect(web.find(".actions button", "Cancel")).to_have_count(0)
        async with httpx.AsyncClient(trust_env=False, timeout=scaled(5), headers=served.admin) as http:
            assert (await http.get(f"{served.url}/admin/sessions/{opened['id']}")).json()["status"] == "cancelled"


async def test_a_gateway_that_goes_away_and_comes_back_is_taken_up_again(tmp_path: Path, shots: Path) -> None:
    async with serving(tmp_path / "data") as served:
        opened = await served.open(id="kept")
        history = await served.say(opened["api_key"], [user("What is in this folder?")])
        async with browsing(served.url, KEY, shots=shots) as web:
            await web.go("#/rollout/kept")
            await web.sees(".turn", "I look first.")
            await served.stop()
            await web.sees("#live[data-state=lost]", "disconnected")
            async with serving(tmp_path / "data", int(served.url.rsplit(":", 1)[1])) as again:
                await again.say(opened["api_key"], history)  # before the page knows that it is there
                await web.page.click("#live")
                await web.sees("#live[data-state=live]", "live")
                await web.sees(".turn", "Turn 2")
                await web.page.goto("about:blank")
                web.complaints.clear()  # of the browser, about the time without a gateway
