"""LangChain: `create_agent` with the chat models of OpenAI, Anthropic and Google, invoked and streamed."""

from __future__ import annotations

from functools import partial
from typing import Any

from conversation import MODEL, QUESTIONS, ROOT, SYSTEM, TOOLS, main
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_openai import ChatOpenAI

MODELS: dict[str, Any] = {
    "chat": lambda key: ChatOpenAI(model=MODEL, base_url=f"{ROOT}/v1", api_key=key),
    "responses": lambda key: ChatOpenAI(model=MODEL, base_url=f"{ROOT}/v1", api_key=key, use_responses_api=True),
    "messages": lambda key: ChatAnthropic(model=MODEL, base_url=ROOT, api_key=key),
    "gemini": lambda key: ChatGoogleGenerativeAI(model=MODEL, base_url=ROOT, api_key=key),
}


def ask(key: str, *, dialect: str, stream: bool) -> list[str]:
    agent: Any = create_agent(MODELS[dialect](key), list(TOOLS.values()), system_prompt=SYSTEM)
    state: Any = {"messages": []}
    answers = []
    for question in QUESTIONS:
        asked = {"messages": [*state["messages"], {"role": "user", "content": question}]}
        if stream:
            for mode, part in agent.stream(asked, stream_mode=["messages", "values"]):
                state = part if mode == "values" else state
        else:
            state = agent.invoke(asked)
        answers.append(state["messages"][-1].text)
    return answers


main(
    {
        f"{dialect} streamed" if stream else dialect: partial(ask, dialect=dialect, stream=stream)
        for dialect in MODELS
        for stream in (False, True)
    }
)
