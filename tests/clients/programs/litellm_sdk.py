"""LiteLLM: `completion` with its OpenAI, Anthropic and Gemini providers, whole and streamed."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from conversation import MAX_STEPS, MODEL, QUESTIONS, ROOT, SCHEMA, SYSTEM, TOOLS, main, run_tool

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads a list of prices
import litellm

ENDPOINTS = {
    "chat": {"model": f"openai/{MODEL}", "api_base": f"{ROOT}/v1"},
    "responses": {"model": f"openai/responses/{MODEL}", "api_base": f"{ROOT}/v1"},
    "messages": {"model": f"anthropic/{MODEL}", "api_base": ROOT},
    "gemini": {"model": f"gemini/{MODEL}", "api_base": f"{ROOT}/v1beta/models/{MODEL}"},
}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}} for name in TOOLS
]


def ask(key: str, *, dialect: str, stream: bool) -> list[str]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_STEPS):
            reply: Any = litellm.completion(
                **ENDPOINTS[dialect], api_key=key, messages=messages, tools=FUNCTIONS, stream=stream
            )
            if stream:
                reply = litellm.stream_chunk_builder(list(reply), messages=messages)
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content)
    return answers


main(
    {
        f"{dialect} streamed" if stream else dialect: partial(ask, dialect=dialect, stream=stream)
        for dialect in ENDPOINTS
        for stream in (False, True)
    }
)
