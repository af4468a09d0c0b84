"""An agent for property tests: keeps its own history, formats it freely, and calls the real app in process.

`Agent.call` sends one request through the ASGI application, without a socket, and returns the assistant's message. The engine is scripted:
a test queues what the model samples.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from turngate.config import ServeConfig
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.render import Renderer
from turngate.server.app import Gateway
from turngate.trace.session import SessionConfig

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tool {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "number"}}},
        },
    }
    for name in ("read", "write", "run")
]


@dataclass
class World:
    """A gateway whose engine samples what a test queued."""

    gateway: Gateway
    engine: Scripted
    queue: deque[ScriptedTurn] = field(default_factory=deque)

    @classmethod
    @asynccontextmanager
    async def of(cls, folder, renderer: Renderer, certificate=None, engine: type[Scripted] = Scripted, **config: Any):
        queue: deque[ScriptedTurn] = deque()
        engine = engine(lambda request, index: queue.popleft(), keep=10_000, max_context=1_000_000)
        # The renderer is loaded once per test session: reading a vocabulary takes a second.
        gateway = Gateway(
            ServeConfig(data=str(folder), model="m", **config), engine=engine, renderer=(renderer, certificate)
        )
        await gateway.start()
        try:
            yield cls(gateway, engine, queue)
        finally:
            await gateway.stop()

    def agent(self, **config: Any) -> Agent:
        session, key = self.gateway.sessions.open(SessionConfig(**config))
        return Agent(self, session.id, key)


@dataclass
class Reply:
    status: int
    message: dict[str, Any]
    finish: str | None
    error: dict[str, Any] | None = None


class Agent:
    def __init__(self, world: World, session_id: str, key: str) -> None:
        self.world = world
        self.session_id = session_id
        self.key = key
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] | None = TOOLS

    @property
    def session(self):
        sessions, store = self.world.gateway.sessions, self.world.gateway.store
        return sessions.find_live(self.session_id) or store.load(sessions.find_row(self.session_id))

    async def call(
        self,
        turn: ScriptedTurn,
        *,
        stream: bool = False,
        retried: bool = False,
        messages: list[dict[str, Any]] | None = None,
        **body: Any,
    ) -> Reply:
        self.world.queue.append(turn)
        request = {"model": "m", "messages": self.messages if messages is None else messages, "stream": stream, **body}
        if self.tools:
            request["tools"] = self.tools
        headers = [(b"authorization", f"Bearer {self.key}".encode())]
        if retried:
            headers.append((b"x-stainless-retry-count", b"1"))
        status, raw = await asgi(
            self.world.gateway, "POST", "/v1/chat/completions", json.dumps(request).encode(), headers
        )
        return read_stream(status, raw) if stream and status == 200 else _read_reply(status, raw)


async def asgi(app, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    """Send one HTTP request to an ASGI application."""
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    over = asyncio.Event()

    async def receive():
        if incoming:
            return incoming.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": headers,
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def _read_reply(status: int, raw: bytes) -> Reply:
    data = json.loads(raw)
    if status != 200:
        return Reply(status, {}, None, data["error"])
    choice = data["choices"][0]
    message = {k: v for k, v in choice["message"].items() if v is not None and k != "refusal"}
    message.setdefault("content", None)
    return Reply(status, message, choice["finish_reason"])


def read_stream(status: int, raw: bytes) -> Reply:
    events = [line[6:] for line in raw.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-3:]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = None
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for call in delta.get("tool_calls") or []:
                message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
            finish = choice["finish_reason"] or finish
    return Reply(status, message, finish)


def reformat(messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Rewrite a history in other bytes with the same meaning, as agents do."""
    out = []
    for message in messages:
        message = json.loads(json.dumps(message))
        if rng.random() < 0.5:
            message = dict(sorted(message.items()))
        if message["role"] == "assistant":
            for name in ("reasoning", "reasoning_content"):
                if rng.random() < 0.5:
                    message.pop(name, None)
            if not message.get("content"):
                message["content"] = rng.choice([None, ""])
            elif rng.random() < 0.3:
                message["content"] = message["content"].strip()
            for call in message.get("tool_calls", []):
                if rng.random() < 0.3:
                    call["id"] = f"toolu_{rng.getrandbits(40):x}"
                call["function"]["arguments"] = _reformat_json(call["function"]["arguments"], rng)
        if isinstance(message.get("content"), str) and message["content"] and rng.random() < 0.3:
            message["content"] = [{"type": "text", "text": message["content"]}]
        out.append(message)
    before = [c["id"] for m in messages for c in m.get("tool_calls", [])]
    after = [c["id"] for m in out for c in m.get("tool_calls", [])]
    originals = dict(zip(before, after, strict=True))
    for message in out:
        if message["role"] == "tool":
            message["tool_call_id"] = originals.get(message["tool_call_id"], message["tool_call_id"])
    return out


def _reformat_json(text: str, rng: random.Random) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and rng.random() < 0.5:
        value = dict(reversed(value.items()))
    return json.dumps(value, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5)
