"""The MCP server: lists and calls the service's tools, and reports the progress of long calls.

Invalid arguments are reported as tool errors, which the calling model can read. Problems with a rollout are reported in its result.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from mcp.server import Server, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    ToolAnnotations,
)
from mcp_types import Tool as McpTool

from turngate import __version__
from turngate.common.validation import suggestion
from turngate.errors import TurngateError
from turngate.service.mcp_tools import TOOLS, ServiceTool
from turngate.service.result import RolloutResult
from turngate.service.rollouts import Rollouts

PROGRESS_S = 2.0  # seconds between progress reports
INSTRUCTIONS = (
    "Runs coding agents on tasks in sandboxes, records every token that their model samples, and grades their work. "
    "list_endpoints lists the models. run_rollout does everything in one call; start_rollout, get_state, get_messages, subscribe_events, "
    "abort_rollout and finalize_rollout do it step by step. A rollout continues if the call that waits for it ends early."
)
Context = ServerRequestContext[Any]

log = logging.getLogger("turngate")


def build_server(rollouts: Rollouts) -> Server[Any]:
    """Build an MCP server, which works with any transport and any number of clients."""

    async def list_tools(context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_describe_tool(tool) for tool in TOOLS.values()])

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        return await _call_tool(rollouts, context, params)

    return Server(
        "turngate",
        version=__version__,
        title="Turngate",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema=lambda name: TOOLS[name].input_schema() if name in TOOLS else None,
    )


def _describe_tool(tool: ServiceTool) -> McpTool:
    return McpTool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input_schema(),
        output_schema=tool.output_schema(),
        annotations=ToolAnnotations(
            title=tool.title,
            read_only_hint=tool.is_read_only,
            destructive_hint=tool.is_destructive,
            idempotent_hint=tool.is_idempotent or tool.is_read_only,
            open_world_hint=not tool.is_read_only,
        ),
    )


async def _call_tool(rollouts: Rollouts, context: Context, params: CallToolRequestParams) -> CallToolResult:
    tool = TOOLS.get(params.name)
    if tool is None:
        near = suggestion(params.name, list(TOOLS))
        raise MCPError(INVALID_PARAMS, f"no tool named {params.name[:80]!r}{near}")

    async def wait(rollout_id: str, wait_s: float | None) -> RolloutResult:
        return await _wait_for_result(rollouts, context, rollout_id, wait_s)

    try:
        return _to_call_result(await tool.call(rollouts, params.arguments or {}, wait))
    except TurngateError as error:
        return CallToolResult(content=[TextContent(text=error.message)], is_error=True)
    except Exception:
        # This is a bug. The SDK would send the exception's text to the caller, which may reveal internals.
        log.exception("tool %s failed", tool.name)
        raise MCPError(INTERNAL_ERROR, "the tool failed because of a bug in the server; see the server's log") from None


async def _wait_for_result(
    rollouts: Rollouts, context: Context, rollout_id: str, wait_s: float | None
) -> RolloutResult:
    """Wait for a rollout's result, and report progress to a client that asked for it.

    The first report is sent immediately and contains the rollout's id. Further reports keep the client from timing out. If the call ends
    early, the rollout continues.
    """
    waiting = asyncio.ensure_future(rollouts.finalize(rollout_id, wait_s))
    try:
        while True:
            state = rollouts.state(rollout_id)
            message = f"rollout {rollout_id}: {state.status}, {state.stage}, turns: {state.turns}"
            await context.session.report_progress(state.wall_s, message=message)
            done, _ = await asyncio.wait({waiting}, timeout=PROGRESS_S)
            if done:
                return waiting.result()
    finally:
        waiting.cancel()


def _to_call_result(result: msgspec.Struct) -> CallToolResult:
    """Build an answer that contains the result twice, in structured form and as text, for clients that can read only one of them."""
    text = msgspec.json.encode(result)
    return CallToolResult(content=[TextContent(text=text.decode())], structured_content=msgspec.json.decode(text))
