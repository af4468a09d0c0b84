"""The benchmark's agents and their HTTP client. Used by `overhead.py`.

An agent behaves like a coding agent built on the openai package: it keeps its messages, sends all of them each turn, and appends the
assistant's message and a tool result. Messages are serialized once, when they are appended, so that the driver is not the bottleneck.
"""

from __future__ import annotations

import argparse as code_1
import asyncio
import asyncio.base_events as code_2
import inspect
import json
import tarfile as code_3
import time
from typing import Any

from turngate.types import Message, Tool, ToolCall

SYSTEM_BYTES, TASK_BYTES, RESULT_BYTES, TOOL_BYTES = 6_000, 14_500, 1_800, 600
_CODE = "\n".join(inspect.getsource(module) for module in (code_1, code_2, code_3))
_FILE_TOOLS = ("read_file", "write_file", "edit_file", "list_folder", "find_files")
_OTHER_TOOLS = ("search_text", "run_command", "run_tests", "show_changes", "search_web")


class Http:
    """One persistent connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Http:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))

    async def send(self, method: str, path: str, body: bytes = b"", key: str = "") -> tuple[int, bytes]:
        """Send a request, and return the status and the body. A chunked body is joined."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\naccept: application/json\r\n"
            f"content-type: application/json\r\nuser-agent: OpenAI/Python\r\nx-stainless-retry-count: 0\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        fields = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(fields.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in fields:
            return status, await self._chunks()
        length = int(fields.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        return status, await self._reader.readexactly(length)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return b"".join(parts)

    def close(self) -> None:
        self._writer.close()


class Agent:
    """The agent of one session.

    `conversation` includes all reasoning, for checking. `sizes` is the number of bytes of each request.
    """

    def __init__(self, http: Http, session: str, key: str, *, stream: bool, seed: int) -> None:
        self.session = session
        self._http, self._key, self._stream = http, key, stream
        self._seed = seed
        self.conversation = [Message("system", system_prompt()), Message("user", task(seed))]
        self._messages = [_dumps({"role": m.role, "content": m.content}) for m in self.conversation]
        self._tail = b'],"model":"bench","max_tokens":4096,"stream":%b,"temperature":1.0,"tools":%b}' % (
            b"true" if stream else b"false",
            _dumps([tool.wire for tool in tools()]),
        )
        self.sizes: list[int] = []
        self.latencies: list[float] = []

    async def turn(self) -> None:
        self._accept(*await self._call())

    async def _call(self) -> tuple[int, bytes]:
        body = b'{"messages":[' + b",".join(self._messages) + self._tail
        self.sizes.append(len(body))
        began = time.perf_counter()
        status, reply = await self._http.send("POST", "/v1/chat/completions", body, self._key)
        self.latencies.append(time.perf_counter() - began)
        return status, reply

    def _accept(self, status: int, reply: bytes) -> None:
        if status != 200:
            raise SystemExit(f"bench: the gateway answered {status}: {reply[:500]!r}")
        self._append_reply(_collect_stream(reply) if self._stream else json.loads(reply)["choices"][0])

    def _append_reply(self, choice: dict[str, Any]) -> None:
        message = choice["message"]
        calls = message.get("tool_calls") or []
        if choice["finish_reason"] != "tool_calls" or len(calls) != 1 or calls[0]["function"]["name"] != "read_file":
            raise SystemExit(f"bench: the reply is not the tool call that was sampled: {choice}")
        result = self._run_tool()
        function = calls[0]["function"]
        call = ToolCall(calls[0]["id"], function["name"], function["arguments"])
        self.conversation += [
            Message("assistant", message.get("content") or "", message["reasoning_content"], (call,)),
            Message("tool", result, tool_call_id=call.id),
        ]
        if self._stream:  # an agent that joins a stream keeps only the fields it knows, without reasoning
            message = {"role": "assistant", "content": message["content"], "tool_calls": calls}
        self._messages.append(_dumps(message))
        self._messages.append(_dumps({"role": "tool", "tool_call_id": call.id, "content": result}))

    def _run_tool(self) -> str:
        return tool_result(self._seed, len(self.sizes))

    def close(self) -> None:
        self._http.close()


def _collect_stream(reply: bytes) -> dict[str, Any]:
    """Join a streamed reply into a choice."""
    text: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: list[Any] = []
    finish = None
    for event in reply.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        choice = json.loads(event[6:])["choices"][0]
        finish = choice["finish_reason"] or finish
        for field in text:
            text[field] += choice["delta"].get(field) or ""
        calls += [{k: v for k, v in call.items() if k != "index"} for call in choice["delta"].get("tool_calls", ())]
    if not reply.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"bench: the stream did not end: {reply[-200:]!r}")
    return {"finish_reason": finish, "message": {**text, "content": text["content"] or None, "tool_calls": calls}}


def system_prompt() -> str:
    rules = (
        "You are a coding agent. Work in small steps, read before you write, run the tests, and explain nothing twice. "
    )
    return (rules + inspect.getdoc(code_1.ArgumentParser) + " " + rules * 60)[:SYSTEM_BYTES]


def task(seed: int) -> str:
    head = f"Task {seed}: the tests in tests/test_module_{seed}.py fail since the last release. Find out why and fix it.\n\n"
    return head + _code(seed * 31, TASK_BYTES)


def tool_result(seed: int, turn: int) -> str:
    """Return about 2 KB of code (as JSON), different for every session and turn."""
    return _code(1 + seed * 101 + turn * 7, RESULT_BYTES)


def tools() -> tuple[Tool, ...]:
    return tuple(_tool(name) for name in (*_FILE_TOOLS, *_OTHER_TOOLS))


def _tool(name: str) -> Tool:
    text = {"type": "string", "description": f"What {name} is about: a path relative to the root of the repository."}
    number = {"type": "integer", "description": "At most this many lines, from the first one on.", "minimum": 1}
    function = {
        "name": name,
        "description": "",
        "parameters": {"type": "object", "properties": {"path": text, "limit": number}, "required": ["path"]},
    }
    wire = {"type": "function", "function": function}
    description = (
        f"{name.replace('_', ' ').capitalize()}, and say what came of it. Use it rather than a shell where it will do. "
        * 9
    )
    function["description"] = description[: TOOL_BYTES - len(_dumps(wire))]
    return Tool(name, wire)


def _code(index: int, size: int) -> str:
    start = index * 1_777 % (len(_CODE) - size)
    return _CODE[start : start + size]


def _dumps(value: Any) -> bytes:
    """Encode JSON as httpx does for the openai package."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
