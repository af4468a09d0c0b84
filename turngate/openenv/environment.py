"""One OpenEnv session with a client: `reset`, `step` and `state`. A step calls a tool or lists the tools.

The tools come from the service (`service/mcp_tools.py`). OpenEnv's server also offers them at `/mcp`, where a call is not a step and
returns only the tool's result. All sessions share one service, so a rollout can outlive the session that started it, and any session can
access the rollout by its id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional
from uuid import uuid4

import msgspec
from fastmcp import FastMCP
from fastmcp.tools import Tool, ToolResult
from mcp.types import TextContent, ToolAnnotations
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, ToolError, ToolErrorType
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation
from openenv.core.utils import run_async_safely
from pydantic import PrivateAttr

from turngate import __version__
from turngate.common.validation import suggestion
from turngate.errors import BadRequest, TurngateError
from turngate.openenv.models import ReadyObservation, TurngateObservation, TurngateState
from turngate.openenv.service_host import ServiceHost
from turngate.service.mcp_tools import TOOLS, Arguments
from turngate.service.result import RolloutResult, RolloutState
from turngate.service.rollouts import Rollouts

NAME = "turngate_env"
ABOUT = (
    "Runs coding agents (Claude Code, Codex, OpenCode, Pi, Gemini CLI, Qwen Code, mini-SWE-agent) on tasks in sandboxes, records every "
    "token that their model samples, and grades their work."
)
_START_TOOLS = ("run_rollout", "run_swe_rollout", "start_rollout")


class TurngateEnvironment(MCPEnvironment):
    """The environment of one session, or of one request without a session. It is cheap to create.

    All environments share `tools`, the server from `build_mcp_server`.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, service: ServiceHost, tools: FastMCP[Any]) -> None:
        super().__init__(tools)
        self._service = service
        self._state = TurngateState(episode_id=uuid4().hex)

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **unknown: Any) -> ReadyObservation:
        return run_async_safely(self.reset_async(seed, episode_id, **unknown))

    async def reset_async(
        self, seed: Optional[int] = None, episode_id: Optional[str] = None, **unknown: Any
    ) -> ReadyObservation:
        """Start a new episode. Running rollouts continue. OpenEnv's `seed` is ignored, because the engine does the sampling."""
        if unknown:
            raise BadRequest(
                f"{next(iter(unknown))} is not an argument of reset, which accepts only episode_id and seed; pass a rollout's "
                "arguments to run_rollout",
                param=next(iter(unknown)),
            )

        async def catalog(rollouts: Rollouts) -> list[dict[str, Any]]:
            return [msgspec.to_builtins(endpoint) for endpoint in rollouts.catalog()]

        endpoints = await self._service.call(catalog)
        self._state = TurngateState(episode_id=episode_id or uuid4().hex)
        return ReadyObservation(endpoints=endpoints)

    def step(self, action: Action, timeout_s: Optional[float] = None, **kwargs: Any) -> Observation:
        return run_async_safely(self.step_async(action, timeout_s, **kwargs))

    async def step_async(self, action: Action, timeout_s: Optional[float] = None, **kwargs: Any) -> Observation:
        """Carry out an action: call a tool, or list the tools.

        If the tool waits for a rollout that has not ended after `timeout_s` seconds, return the rollout's id with `done` false. The rollout
        continues.
        """
        state = self._state
        state.step_count += 1
        if not isinstance(action, CallToolAction):
            return await super().step_async(action, timeout_s, **kwargs)
        observation = await _call_tool(self._service, action, timeout_s)
        started = action.tool_name in _START_TOOLS and observation.rollout_id
        if started:
            state.rollouts = [*state.rollouts, observation.rollout_id]
        if started or observation.status:
            state.last_rollout, state.last_status = observation.rollout_id, observation.status
            state.last_reward = observation.result.get("reward")
        return observation

    def _step_impl(self, action: Action, timeout_s: Optional[float] = None, **kwargs: Any) -> Observation:
        raise BadRequest(
            f"action {type(action).__name__} is not supported; use call_tool or list_tools", param="action"
        )

    @property
    def state(self) -> TurngateState:
        return self._state

    @property
    def supports_code_mode(self) -> bool:
        """Always False, because code mode would run the caller's Python code in the server."""
        return False

    def execute_code(self, code: str) -> Observation:
        raise BadRequest(
            "execute_code is not supported, because the code would run in the environment's server; use the tools",
            param="code",
        )

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name=NAME, description=ABOUT, version=__version__)

    def _get_server_tools(self, mcp_server: Any) -> dict[str, Any]:
        """Return the tools directly. OpenEnv's own implementation would start a thread and an event loop for each session."""
        return dict(TOOLS)


async def _call_tool(service: ServiceHost, action: CallToolAction, timeout_s: float | None) -> TurngateObservation:
    name = action.tool_name
    if name not in TOOLS:
        near = suggestion(name, list(TOOLS))
        error = ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message=f"unknown tool_name {name[:80]!r}{near}")
        return TurngateObservation(tool_name=name, error=error, metadata={"param": "tool_name", "kind": "not_found"})
    try:
        answer = await call_service_tool(service, name, action.arguments, math.inf if timeout_s is None else timeout_s)
    except TurngateError as error:
        return TurngateObservation(tool_name=name, error=_to_tool_error(error), metadata=_error_metadata(error))
    value = msgspec.to_builtins(answer)
    observation = TurngateObservation(tool_name=name, result=value, rollout_id=value.get("rollout_id", ""))
    if isinstance(answer, RolloutResult | RolloutState):
        observation.status = answer.status
    if isinstance(answer, RolloutResult) and answer.done:
        observation.done, observation.reward = True, answer.reward
    return observation


async def call_service_tool(
    service: ServiceHost, name: str, arguments: Arguments, max_wait_s: float = math.inf
) -> msgspec.Struct:
    """Call one of the service's tools. A tool that waits for a rollout waits as long as the caller requests, up to `max_wait_s` seconds."""

    async def call(rollouts: Rollouts) -> msgspec.Struct:
        async def wait(rollout_id: str, wait_s: float | None) -> RolloutResult:
            limit_s = min(max_wait_s, math.inf if wait_s is None else wait_s)
            return await rollouts.finalize(rollout_id, None if limit_s == math.inf else limit_s)

        return await TOOLS[name].call(rollouts, arguments, wait)

    return await service.call(call)


def _to_tool_error(error: TurngateError) -> ToolError:
    is_about_arguments = error.boundary == "client" and error.param is not None
    kind = ToolErrorType.INVALID_ARGS if is_about_arguments else ToolErrorType.EXECUTION_ERROR
    return ToolError(error_type=kind, message=error.message)


def _error_metadata(error: TurngateError) -> dict[str, Any]:
    return {
        "param": error.param,
        "kind": error.kind,
        "boundary": error.boundary,
        "status": error.status,
        "retry_safe": error.retry_safe,
    }


# ── the same tools at /mcp ──────────────────────────────────────────────────────────────────────────────────────────


def build_mcp_server(service: ServiceHost) -> FastMCP[Any]:
    """Build the FastMCP server that offers the tools. All sessions share it."""
    server: FastMCP[Any] = FastMCP("turngate", version=__version__, mask_error_details=True)
    for tool in TOOLS.values():
        fast_tool = _OpenEnvTool(
            name=tool.name,
            title=tool.title,
            description=tool.description,
            parameters=tool.input_schema(),
            annotations=ToolAnnotations(
                readOnlyHint=tool.is_read_only,
                destructiveHint=tool.is_destructive,
                idempotentHint=tool.is_idempotent or tool.is_read_only,
            ),
        )
        fast_tool._service = service
        server.add_tool(fast_tool)
    return server


class _OpenEnvTool(Tool):
    """One of the service's tools, for FastMCP. Errors such as invalid arguments are reported to the caller, not logged as exceptions."""

    _service: ServiceHost = PrivateAttr()

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            value = msgspec.to_builtins(await call_service_tool(self._service, self.name, arguments))
        except TurngateError as error:
            return ToolResult(content=[TextContent(type="text", text=error.message)], is_error=True)
        return ToolResult(content=[TextContent(type="text", text=_to_text(value))], structured_content=value)


def _to_text(value: Mapping[str, Any]) -> str:
    """Return a result as text for models, without log-probabilities, which would fill the model's context."""
    if "turns" not in value or not isinstance(value["turns"], list):
        return msgspec.json.encode(value).decode()
    turns = [{name: field for name, field in turn.items() if name != "logprobs"} for turn in value["turns"]]
    return msgspec.json.encode({**value, "turns": turns}).decode()
