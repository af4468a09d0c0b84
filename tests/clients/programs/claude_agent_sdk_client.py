"""The Claude Agent SDK: a `ClaudeSDKClient` with tools of an in-process MCP server. It runs the Claude Code that it brings along."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import conversation
from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    TextBlock,
    create_sdk_mcp_server,
    tool,
)
from conversation import MAX_STEPS, MODEL, QUESTIONS, ROOT, SYSTEM, main


def _make_tool(name: str) -> Any:
    @tool(name, name, {"path": str})
    async def call(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": conversation.run_tool(name, arguments)}]}

    return call


async def messages(key: str, *, stream: bool) -> list[str]:
    """`stream`: also read the partial messages. Claude Code itself always streams."""
    with tempfile.TemporaryDirectory() as folder:
        options = ClaudeAgentOptions(
            system_prompt=SYSTEM,
            model=MODEL,
            tools=[],  # none of Claude Code's own
            mcp_servers={
                "files": create_sdk_mcp_server("files", tools=[_make_tool(name) for name in conversation.TOOLS])
            },
            allowed_tools=[f"mcp__files__{name}" for name in conversation.TOOLS],
            max_turns=MAX_STEPS,
            cwd=folder,
            setting_sources=[],
            include_partial_messages=stream,
            env={
                "HOME": folder,
                "ANTHROPIC_BASE_URL": ROOT,
                "ANTHROPIC_API_KEY": key,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "PATH": os.environ["PATH"],
            },
        )
        answers = []
        async with ClaudeSDKClient(options) as client:
            for question in QUESTIONS:
                await client.query(question)
                text = ""
                async for message in client.receive_response():
                    if isinstance(message, AssistantMessage):
                        blocks = [block.text for block in message.content if isinstance(block, TextBlock)]
                        text = "".join(blocks) or text
                    elif isinstance(message, ResultMessage) and message.is_error:
                        raise RuntimeError(message.result)
                answers.append(text)
        return answers


main({"messages": partial(messages, stream=False), "messages streamed": partial(messages, stream=True)})
