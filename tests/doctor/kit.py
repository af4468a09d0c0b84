"""A stand-in for vLLM as `turngate doctor` asks it: it samples, tokenises and renders with a tokenizer of its own, and can be wrong in
every way that the doctor has to notice."""

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
    """`shift`: added to every id it tokenises to. `prefix`: what its template says before everything."""

    def __init__(
        self,
        *,
        mode: Mode = "processed",
        logprobs: bool = True,
        shift: int = 0,
        prefix: str = "",
        tokenises: bool = True,
        date: str = "",
        status: int = 200,
    ) -> None:
        self.mode, self.logprobs, self.shift, self.prefix = mode, logprobs, shift, prefix
        self.tokenises, self.date, self.status = tokenises, date, status
        cards = {"data": [{"id": MODEL, "max_model_len": 4096}]}
        self.server = StandIn(self._answer, {"/health": {}, "/v1/models": cards})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(self.server.bodies[-1])
        if self.status != 200:
            return web.json_response(
                {"error": {"message": f"no, not with {request.headers.get('authorization')}"}}, status=self.status
            )
        if request.path == "/v1/completions":
            return await self._sampled(request, asked)
        if not self.tokenises:
            return web.Response(status=404, text="Not Found")
        if request.path == "/detokenize":
            return web.json_response({"prompt": renderer().tokenizer.decode([i + self.shift for i in asked["tokens"]])})
        ids = self._rendered(asked) if "messages" in asked else renderer().tokenizer.encode(asked["prompt"])
        return web.json_response({"tokens": [i + self.shift for i in ids], "count": len(ids), "max_model_len": 4096})

    def _rendered(self, asked: dict[str, Any]) -> list[int]:
        messages = [_message(wire) for wire in asked["messages"]]
        tools = [Tool(wire["function"]["name"], wire) for wire in asked.get("tools", ())]
        ids = renderer().render(messages, tools, {})
        return [*renderer().tokenizer.encode(self.prefix), *ids] if self.prefix else ids

    async def _sampled(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        ids = renderer().tokenizer.encode("one two three four five")[: asked["max_tokens"]]
        values = [self._logprob(asked) for _ in ids]
        given = {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": values if self.logprobs else [None] * len(ids),
        }
        choice: dict[str, Any] = {"text": "x", "logprobs": given, "finish_reason": "length"}
        if asked.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": asked["prompt"]}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"choices": [choice]}) + DONE)
        return response

    def _logprob(self, asked: dict[str, Any]) -> float:
        """Of the likelier of two tokens, whose logits are 1 apart."""
        heat = 1.0 if self.mode == "raw" else asked["temperature"]
        if self.mode == "processed" and asked["top_k"] == 1:
            return 0.0
        return -math.log(1 + math.exp(-1 / heat))


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
async def engine(**wrong: Any) -> AsyncIterator[ServeConfig]:
    """Settings of a gateway in front of such an engine."""
    made = Engine(**wrong)
    async with serving(made.server) as server:
        yield ServeConfig(engine="vllm", engine_url=[server.url], model=MODEL, tokenizer=str(BUILTIN_TOKENIZER))


async def found(config: ServeConfig, *only: str, **subject: Any) -> list[Finding]:
    return await diagnose(DoctorContext(config, **subject), only)


async def one(config: ServeConfig, only: str, **subject: Any) -> Finding:
    [finding] = await found(config, only, **subject)
    return finding


def text(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{finding.message} {finding.fix}" for finding in findings)


def settings(folder: Path, **more: Any) -> ServeConfig:
    return ServeConfig(data=str(folder), **more)
