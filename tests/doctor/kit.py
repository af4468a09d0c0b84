"""A stand-in for vLLM with its own tokenizer, which can have every fault that `turngate doctor` detects."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from tests.engines.standins import DONE, StandIn, event, serving
from tests.kit import renderer
from turngate.config import ServeConfig
from turngate.doctor import DoctorContext, Finding, diagnose
from turngate.render import BUILTIN_TOKENIZER
from turngate.types import Message, Tool, ToolCall

MODEL = "tiny"
Mode = Literal["processed", "raw", "heated"]


class Engine:
    """`answer` is what it samples. `shift` is added to every token id. `prefix` is text that the template puts before the conversation."""

    def __init__(
        self,
        *,
        mode: Mode = "processed",
        logprobs: bool = True,
        answer: str = "one two three four five",
        shift: int = 0,
        prefix: str = "",
        tokenises: bool = True,
        date: str = "",
        status: int = 200,
    ) -> None:
        self.mode, self.logprobs, self.shift, self.prefix = mode, logprobs, shift, prefix
        self.answer = answer
        self.tokenises, self.date, self.status = tokenises, date, status
        cards = {"data": [{"id": MODEL, "max_model_len": 4096}]}
        self.server = StandIn(self._respond, {"/health": {}, "/v1/models": cards})

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(self.server.bodies[-1])
        if self.status != 200:
            return web.json_response(
                {"error": {"message": f"no, not with {request.headers.get('authorization')}"}}, status=self.status
            )
        if request.path == "/v1/completions":
            return await self._sample(request, body)
        if not self.tokenises:
            return web.Response(status=404, text="Not Found")
        if request.path == "/detokenize":
            return web.json_response({"prompt": renderer().tokenizer.decode([i + self.shift for i in body["tokens"]])})
        ids = self._render(body) if "messages" in body else renderer().tokenizer.encode(body["prompt"])
        return web.json_response({"tokens": [i + self.shift for i in ids], "count": len(ids), "max_model_len": 4096})

    def _render(self, body: dict[str, Any]) -> list[int]:
        messages = [_message(wire) for wire in body["messages"]]
        tools = [Tool(wire["function"]["name"], wire) for wire in body.get("tools", ())]
        ids = renderer().render(messages, tools, {})
        return [*renderer().tokenizer.encode(self.prefix), *ids] if self.prefix else ids

    async def _sample(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ids = renderer().tokenizer.encode(self.answer)[: body["max_tokens"]]
        values = [self._logprob(body) for _ in ids]
        logprobs = {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": values if self.logprobs else [None] * len(ids),
        }
        choice: dict[str, Any] = {"text": "x", "logprobs": logprobs, "finish_reason": "length"}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"choices": [choice]}) + DONE)
        return response

    def _logprob(self, body: dict[str, Any]) -> float:
        """Return the log-probability of the likelier of two tokens whose logits are 1 apart."""
        temperature = 1.0 if self.mode == "raw" else body["temperature"]
        if self.mode == "processed" and body["top_k"] == 1:
            return 0.0
        return -math.log(1 + math.exp(-1 / temperature))


def _message(wire: dict[str, Any]) -> Message:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in wire.get("tool_calls", ())
    )
    return Message(
        wire["role"],
        wire["content"] or "",
        tool_calls=calls,
        tool_call_id=wire.get("tool_call_id", ""),
        name=wire.get("name", ""),
    )


@asynccontextmanager
async def engine(**faults: Any) -> AsyncIterator[ServeConfig]:
    """Serve an engine with the given faults, and yield the settings of a gateway in front of it."""
    stand_in = Engine(**faults)
    async with serving(stand_in.server) as server:
        yield ServeConfig(engine="vllm", engine_url=[server.url], model=MODEL, tokenizer=str(BUILTIN_TOKENIZER))


async def run_checks(config: ServeConfig, *only: str, **context_fields: Any) -> list[Finding]:
    return await diagnose(DoctorContext(config, **context_fields), only)


async def run_check(config: ServeConfig, only: str, **context_fields: Any) -> Finding:
    [finding] = await run_checks(config, only, **context_fields)
    return finding


def findings_text(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{finding.message} {finding.fix}" for finding in findings)


def settings(folder: Path, **more: Any) -> ServeConfig:
    return ServeConfig(data=str(folder), **more)
