"""Anthropic's SDK: its own tool loop, whole and streamed."""

from __future__ import annotations

from functools import partial
from typing import Any

import conversation
from anthropic import Anthropic, beta_tool
from conversation import MODEL, QUESTIONS, ROOT, SYSTEM, main

TOOLS = [beta_tool(tool) for tool in conversation.TOOLS.values()]


def messages(key: str, *, stream: bool) -> list[str]:
    client = Anthropic(api_key=key, base_url=ROOT)
    history: list[Any] = []
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        runner: Any = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=2000, system=SYSTEM, messages=history, tools=TOOLS, stream=stream
        )
        for turn in runner:
            message = turn.get_final_message() if stream else turn
            history.append({"role": "assistant", "content": message.content})
            if (results := runner.generate_tool_call_response()) is not None:
                history.append(results)
        answers.append("".join(block.text for block in message.content if block.type == "text"))
    return answers


main({"messages": partial(messages, stream=False), "messages streamed": partial(messages, stream=True)})
