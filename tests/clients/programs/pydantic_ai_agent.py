"""Pydantic AI: an `Agent` with the models of OpenAI, Anthropic and Google, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterable
from functools import partial
from typing import Any

from conversation import MODEL, QUESTIONS, ROOT, SYSTEM, TOOLS, main
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider

MODELS: dict[str, Any] = {
    "chat": lambda key: OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{ROOT}/v1", api_key=key)),
    "responses": lambda key: OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{ROOT}/v1", api_key=key)),
    "messages": lambda key: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT, api_key=key)),
    "gemini": lambda key: GoogleModel(MODEL, provider=GoogleProvider(base_url=ROOT, api_key=key)),
}


async def read_events(_: Any, events: AsyncIterable[Any]) -> None:
    """Read the events of a streamed reply. Passing this to a run makes the agent stream."""
    async for _event in events:
        pass


async def ask(key: str, *, dialect: str, stream: bool) -> list[str]:
    agent: Any = Agent(MODELS[dialect](key), instructions=SYSTEM, tools=list(TOOLS.values()))
    history: list[Any] = []
    answers = []
    for question in QUESTIONS:
        result = await agent.run(
            question, message_history=history, event_stream_handler=read_events if stream else None
        )
        history = result.all_messages()
        answers.append(result.output)
    return answers


main(
    {
        f"{dialect} streamed" if stream else dialect: partial(ask, dialect=dialect, stream=stream)
        for dialect in MODELS
        for stream in (False, True)
    }
)
