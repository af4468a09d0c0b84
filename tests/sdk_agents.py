"""Small agents on the official SDKs, one per dialect, with the same interface: for tests that cover every dialect.

    async with agent("messages", root, key, stream=True) as a:
        reply = await a.ask("Hello")
        reply = await a.answer({"read_file": "text"})

Each keeps its history as programs on that SDK do: replies go back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
from google import genai
from google.genai import types

from tests.speed import scaled

Json = Any
SYSTEM = "You are careful."
TOOLS = ("read_file", "list_files")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


class Call(NamedTuple):
    id: str
    name: str
    arguments: Json


class Reply(NamedTuple):
    """A reply as the agent reads it. `finish`: stop, calls or length; `usage`: prompt, sampled and cached tokens."""

    text: str
    thought: str
    calls: list[Call]
    finish: str
    usage: tuple[int, int, int]


class Agent:
    """An agent. `extra`: further fields of the request body; `tools`: names of the tools to offer."""

    model = "m"
    tools: tuple[str, ...] = TOOLS

    def __init__(self, stream: bool, extra: Json) -> None:
        self.stream = stream
        self.extra = extra
        self.history: list[Json] = []
        self.last: Reply | None = None

    async def ask(self, text: str) -> Reply:
        self.add_user(text)
        return await self._next()

    async def answer(self, results: Mapping[str, str]) -> Reply:
        """Send the results of the last turn's calls, by tool."""
        assert self.last is not None
        self.add_results([(call, results[call.name]) for call in self.last.calls])
        return await self._next()

    async def _next(self) -> Reply:
        self.last = await self.turn()
        return self.last

    def add_user(self, text: str) -> None:
        raise NotImplementedError

    def add_results(self, results: list[tuple[Call, str]]) -> None:
        raise NotImplementedError

    async def turn(self) -> Reply:
        raise NotImplementedError


class ChatAgent(Agent):
    def __init__(self, root: str, key: str, http: Any, stream: bool, extra: Json) -> None:
        super().__init__(stream, extra)
        self.client = openai.AsyncOpenAI(
            api_key=key, base_url=f"{root}/v1", http_client=http, max_retries=0, timeout=scaled(60)
        )
        self.history = [{"role": "system", "content": SYSTEM}]

    def add_user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def add_results(self, results: list[tuple[Call, str]]) -> None:
        self.history += [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in results]

    async def turn(self) -> Reply:
        tools = [
            {"type": "function", "function": {"name": n, "description": n, "parameters": SCHEMA}} for n in self.tools
        ]
        request: Json = {
            "model": self.model,
            "messages": self.history,
            "tools": tools or openai.omit,
            "extra_body": self.extra,
        }
        text, thought, finish, usage = "", "", "", None
        made: dict[int, list[str]] = {}
        if self.stream:
            options: Json = {"stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await self.client.chat.completions.create(**request, **options):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    thought += getattr(choice.delta, "reasoning_content", None) or ""
                    finish = choice.finish_reason or finish
                    for part in choice.delta.tool_calls or ():
                        call = made.setdefault(part.index, ["", "", ""])
                        call[0] += part.id or ""
                        call[1] += part.function.name or ""
                        call[2] += part.function.arguments or ""
        else:
            reply = await self.client.chat.completions.create(**request)
            [choice], usage = reply.choices, reply.usage
            text, finish = choice.message.content or "", choice.finish_reason
            thought = getattr(choice.message, "reasoning_content", None) or ""
            for n, c in enumerate(choice.message.tool_calls or ()):
                made[n] = [c.id, c.function.name, c.function.arguments]
        calls = [Call(call_id, name, json.loads(given)) for call_id, name, given in made.values()]
        wire: Json = {"role": "assistant", "content": text or None}
        if thought:
            wire["reasoning_content"] = thought
        if made:
            wire["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": given}}
                for i, name, given in made.values()
            ]
        self.history.append(wire)
        assert usage is not None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        finish = {"tool_calls": "calls"}.get(finish, finish)
        return Reply(text, thought, calls, finish, (usage.prompt_tokens, usage.completion_tokens, cached or 0))


class ResponsesAgent(Agent):
    def __init__(self, root: str, key: str, http: Any, stream: bool, extra: Json) -> None:
        super().__init__(stream, extra)
        self.client = openai.AsyncOpenAI(
            api_key=key, base_url=f"{root}/v1", http_client=http, max_retries=0, timeout=scaled(60)
        )

    def add_user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def add_results(self, results: list[tuple[Call, str]]) -> None:
        self.history += [{"type": "function_call_output", "call_id": call.id, "output": text} for call, text in results]

    async def turn(self) -> Reply:
        request: Json = {
            "model": self.model,
            "instructions": SYSTEM,
            "input": self.history,
            "tools": [
                {"type": "function", "name": n, "description": n, "parameters": SCHEMA, "strict": False}
                for n in self.tools
            ],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "extra_body": self.extra,
        }
        streamed = ""
        if self.stream:
            response: Any = None
            async for event in await self.client.responses.create(**request, stream=True):
                if event.type == "response.output_text.delta":
                    streamed += event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
                assert event.type != "response.failed", event
            assert response is not None and streamed == response.output_text
        else:
            response = await self.client.responses.create(**request)
        self.history += [item.model_dump(exclude_none=True) for item in response.output]
        thought = "".join(s.text for item in response.output if item.type == "reasoning" for s in item.summary)
        calls = [Call(i.call_id, i.name, json.loads(i.arguments)) for i in response.output if i.type == "function_call"]
        finish = "length" if response.status == "incomplete" else "calls" if calls else "stop"
        usage = response.usage
        numbers = (usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens)
        return Reply(response.output_text, thought, calls, finish, numbers)


class MessagesAgent(Agent):
    def __init__(self, root: str, key: str, http: Any, stream: bool, extra: Json) -> None:
        super().__init__(stream, extra)
        self.client = anthropic.AsyncAnthropic(
            api_key=key,
            base_url=root,
            http_client=http,
            max_retries=0,
            timeout=scaled(60),
            default_headers={"anthropic-beta": "b-1"},
        )

    def add_user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def add_results(self, results: list[tuple[Call, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call, text in results]
        self.history.append({"role": "user", "content": blocks})

    async def turn(self) -> Reply:
        request: Json = {
            "model": self.model,
            "max_tokens": 2000,
            "system": SYSTEM,
            "messages": self.history,
            "tools": [{"name": n, "description": n, "input_schema": SCHEMA} for n in self.tools],
            "thinking": {"type": "adaptive"},
            "extra_body": self.extra,
        }
        if self.stream:
            async with self.client.messages.stream(**request) as stream:
                message = await stream.get_final_message()
        else:
            message = await self.client.messages.create(**request)
        self.history.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
        )
        text = "".join(block.text for block in message.content if block.type == "text")
        thought = "".join(block.thinking for block in message.content if block.type == "thinking")
        calls = [Call(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
        finish = {"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}[message.stop_reason or ""]
        usage, cached = message.usage, message.usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        return Reply(text, thought, calls, finish, (prompt, usage.output_tokens, cached))


class GeminiAgent(Agent):
    """Keeps its history as Gemini CLI does: text joined, thoughts dropped, signatures kept in place."""

    def __init__(self, root: str, key: str, session: aiohttp.ClientSession, stream: bool, extra: Json) -> None:
        super().__init__(stream, extra)
        options = types.HttpOptions(base_url=root, aiohttp_client=session, extra_body=extra or None)
        self.client = genai.Client(api_key=key, http_options=options)

    def add_user(self, text: str) -> None:
        self.history.append(types.UserContent(text))

    def add_results(self, results: list[tuple[Call, str]]) -> None:
        parts = [
            types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": text}))
            for call, text in results
        ]
        self.history.append(types.Content(role="user", parts=parts))

    async def turn(self) -> Reply:
        declared = [types.FunctionDeclaration(name=n, description=n, parameters_json_schema=SCHEMA) for n in self.tools]
        config = types.GenerateContentConfig(
            system_instruction=SYSTEM,
            tools=[types.Tool(function_declarations=declared)] if declared else None,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )
        request: Json = {"model": self.model, "contents": self.history, "config": config}
        if self.stream:
            chunks = [chunk async for chunk in await self.client.aio.models.generate_content_stream(**request)]
        else:
            chunks = [await self.client.aio.models.generate_content(**request)]
        parts = [
            p for c in chunks if c.candidates and c.candidates[0].content for p in c.candidates[0].content.parts or ()
        ]
        text = "".join(p.text for p in parts if p.text and not p.thought)
        thought = "".join(p.text for p in parts if p.text and p.thought)
        kept = [types.Part(text=text)] if text else []
        kept += [p for p in parts if p.function_call or (p.thought_signature and not p.thought)]
        self.history.append(types.Content(role="model", parts=kept))
        calls = [
            Call(p.function_call.id or "", p.function_call.name or "", p.function_call.args)
            for p in parts
            if p.function_call
        ]
        last = chunks[-1]
        assert last.candidates and last.usage_metadata
        reason = last.candidates[0].finish_reason
        finish = (
            "length" if reason == "MAX_TOKENS" else "calls" if calls else "stop" if reason == "STOP" else str(reason)
        )
        usage = last.usage_metadata
        sampled = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        numbers = (usage.prompt_token_count or 0, sampled, usage.cached_content_token_count or 0)
        return Reply(text, thought, calls, finish, numbers)


DIALECTS = ("chat", "responses", "messages", "gemini")


@asynccontextmanager
async def agent(
    dialect: str, root: str, key: str, *, stream: bool = True, extra: Json = None, **other: Any
) -> AsyncIterator[Agent]:
    """Start an agent without retries and without TLS, since loading certificates takes 50 ms."""
    async with AsyncExitStack() as stack:
        made: Agent
        match dialect:
            case "chat" | "responses":
                http = await stack.enter_async_context(openai.DefaultAsyncHttpxClient(verify=False, trust_env=False))
                kind = ChatAgent if dialect == "chat" else ResponsesAgent
                made = kind(root, key, http, stream, extra or {})
            case "messages":
                bare = await stack.enter_async_context(anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False))
                made = MessagesAgent(root, key, bare, stream, extra or {})
            case _:
                session = await stack.enter_async_context(aiohttp.ClientSession())
                made = GeminiAgent(root, key, session, stream, extra or {})
        for name, value in other.items():
            setattr(made, name, value)
        yield made
