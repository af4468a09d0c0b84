"""The OpenAI Agents SDK: `Runner` with both of OpenAI's APIs, whole and streamed."""

from __future__ import annotations

from functools import partial
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conversation import MODEL, QUESTIONS, ROOT, SYSTEM, TOOLS, main
from openai import AsyncOpenAI

set_tracing_disabled(True)
MODELS: dict[str, Any] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def ask(key: str, *, dialect: str, stream: bool, stateful: bool = False) -> list[str]:
    """`stateful`: send only the new items, after the id of the previous response, instead of all items."""
    model = MODELS[dialect](MODEL, AsyncOpenAI(api_key=key, base_url=f"{ROOT}/v1"))
    agent = Agent(name="Careful", instructions=SYSTEM, model=model, tools=[function_tool(f) for f in TOOLS.values()])
    history: list[Any] = []
    previous: dict[str, Any] = {"auto_previous_response_id": True} if stateful else {}
    answers = []
    for question in QUESTIONS:
        asked = [*history, {"role": "user", "content": question}]
        if stream:
            result: Any = Runner.run_streamed(agent, asked, **previous)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked, **previous)
        if stateful:
            previous = {"previous_response_id": result.last_response_id, "auto_previous_response_id": True}
        else:
            history = result.to_input_list()
        answers.append(result.final_output)
    return answers


main(
    {
        "chat": partial(ask, dialect="chat", stream=False),
        "chat streamed": partial(ask, dialect="chat", stream=True),
        "responses": partial(ask, dialect="responses", stream=False),
        "responses streamed": partial(ask, dialect="responses", stream=True),
        "responses by id": partial(ask, dialect="responses", stream=False, stateful=True),
        "responses by id streamed": partial(ask, dialect="responses", stream=True, stateful=True),
    }
)
