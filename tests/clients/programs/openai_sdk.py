"""OpenAI's SDK: the Chat Completions and Responses APIs, whole and streamed."""

from __future__ import annotations

from functools import partial
from typing import Any

from conversation import MAX_STEPS, MODEL, QUESTIONS, ROOT, SCHEMA, SYSTEM, TOOLS, main, run_tool
from openai import OpenAI

CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA, "strict": True}}
    for name in TOOLS
]
RESPONSES_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": name, "parameters": SCHEMA, "strict": True} for name in TOOLS
]


def chat(key: str, *, stream: bool) -> list[str]:
    completions = OpenAI(api_key=key, base_url=f"{ROOT}/v1").chat.completions
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_STEPS):
            request: Any = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}
            if stream:
                with completions.stream(**request) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = completions.create(**request).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content)
    return answers


def responses(key: str, *, stream: bool, stateful: bool) -> list[str]:
    """`stateful`: send only the new items, after the id of the previous response, instead of all items."""
    client = OpenAI(api_key=key, base_url=f"{ROOT}/v1").responses
    items: list[Any] = []
    previous: dict[str, str] = {}
    answers = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        for _ in range(MAX_STEPS):
            request: Any = {
                "model": MODEL,
                "instructions": SYSTEM,
                "input": items,
                "tools": RESPONSES_TOOLS,
                **previous,
            }
            if stream:
                with client.stream(**request) as events:
                    response: Any = events.get_final_response()
            else:
                response = client.create(**request)
            if stateful:
                items, previous = [], {"previous_response_id": response.id}
            else:
                items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                result = run_tool(call.name, call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                break
        answers.append(response.output_text)
    return answers


main(
    {
        "chat": partial(chat, stream=False),
        "chat streamed": partial(chat, stream=True),
        "responses": partial(responses, stream=False, stateful=False),
        "responses streamed": partial(responses, stream=True, stateful=False),
        "responses by id": partial(responses, stream=False, stateful=True),
        "responses by id streamed": partial(responses, stream=True, stateful=True),
    }
)
