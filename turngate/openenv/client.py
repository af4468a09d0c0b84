"""The environment's client, `TurngateEnv`: OpenEnv's `EnvClient` with a typed method for every tool.

    async with TurngateEnv("http://127.0.0.1:8000") as env:
        result = await env.run_rollout("vllm://Qwen3-8B", "Fix add() in main.py", test_script="python3 test_main.py")

    with TurngateEnv("http://127.0.0.1:8000").sync() as env:
        result = env.run_rollout("vllm://Qwen3-8B", "Fix add() in main.py", test_script="python3 test_main.py")

A client has one socket and makes one call at a time, so concurrent callers wait for each other. Rollouts still run concurrently: start them
all, then wait for their results. Or use one client per caller, with `new_session`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolErrorType,
)
from openenv.core.env_server.types import Action, Observation
from websockets.exceptions import ConnectionClosed

from turngate.errors import BadRequest, NotFound, TurngateError
from turngate.openenv.models import ReadyObservation, TurngateObservation, TurngateState
from turngate.service.catalog import EndpointView
from turngate.service.mcp_tools import EndpointList, StartedRollout
from turngate.service.result import EventPage, MessagePage, RolloutList, RolloutResult, RolloutState
from turngate.types import Json

WAIT_S = 5.0  # the longest that one call waits for a result, since other callers of the client wait in the meantime
MAX_ATTEMPTS = 5  # failed attempts to reach the server after which `wait_for` fails

T = TypeVar("T", bound=msgspec.Struct)


class TurngateEnv(EnvClient[Action, Observation, TurngateState]):
    """A client with OpenEnv's `reset`, `step` and `state`, and a method for each tool.

    A method that waits for a rollout without a time limit polls the server, so that a proxy's timeout does not end the wait. The
    method also reconnects if the connection breaks. If the caller stops waiting, the rollout continues. `abort_rollout` ends a rollout.

    Invalid arguments raise a `BadRequest`. An unknown rollout or tool raises a `NotFound`. The `param` of the error names the argument. A
    problem with a rollout is reported in its result.
    """

    _call_lock: asyncio.Lock | None = None

    # ── tools ──

    async def run_rollout(
        self,
        model_key: str,
        instruction: str,
        test_script: str = "",
        *,
        task_id: str = "",
        agent: str = "",
        setup_shell: str = "",
        upload_files: Mapping[str, str | Mapping[str, str]] | None = None,
        thinking: bool | None = None,
        mode: str = "",
        max_tokens_cap: int | None = None,
        agent_timeout_s: float | None = None,
        endpoint_url: str = "",
    ) -> RolloutResult:
        """Run an agent on an instruction, grade its work, and return the result."""
        started = await self.start_rollout(
            model_key,
            instruction,
            test_script,
            task_id=task_id,
            agent=agent,
            setup_shell=setup_shell,
            upload_files=upload_files,
            thinking=thinking,
            mode=mode,
            max_tokens_cap=max_tokens_cap,
            agent_timeout_s=agent_timeout_s,
            endpoint_url=endpoint_url,
        )
        return await self.wait_for(started)

    async def run_swe_rollout(
        self,
        task: Mapping[str, Json],
        model_key: str,
        *,
        agent: str = "",
        thinking: bool | None = None,
        mode: str = "",
        max_tokens_cap: int | None = None,
        agent_timeout_s: float | None = None,
        endpoint_url: str = "",
    ) -> RolloutResult:
        """Run an agent on a row of a SWE data set (docs/swe.md), grade its work, and return the result."""
        started = await self.start_swe_rollout(
            task,
            model_key,
            agent=agent,
            thinking=thinking,
            mode=mode,
            max_tokens_cap=max_tokens_cap,
            agent_timeout_s=agent_timeout_s,
            endpoint_url=endpoint_url,
        )
        return await self.wait_for(started)

    async def start_rollout(
        self,
        model_key: str,
        instruction: str,
        test_script: str = "",
        *,
        task_id: str = "",
        agent: str = "",
        setup_shell: str = "",
        upload_files: Mapping[str, str | Mapping[str, str]] | None = None,
        thinking: bool | None = None,
        mode: str = "",
        max_tokens_cap: int | None = None,
        agent_timeout_s: float | None = None,
        endpoint_url: str = "",
    ) -> str:
        """Start a rollout and return its id immediately."""
        arguments = {
            "model_key": model_key,
            "instruction": instruction,
            "test_script": test_script,
            "task_id": task_id,
            "agent": agent,
            "setup_shell": setup_shell,
            "upload_files": upload_files or None,
            "thinking": thinking,
            "mode": mode,
            "max_tokens_cap": max_tokens_cap,
            "agent_timeout_s": agent_timeout_s,
            "endpoint_url": endpoint_url,
        }
        return (await self._call("start_rollout", StartedRollout, **_drop_unset(arguments))).rollout_id

    async def start_swe_rollout(
        self,
        task: Mapping[str, Json],
        model_key: str,
        *,
        agent: str = "",
        thinking: bool | None = None,
        mode: str = "",
        max_tokens_cap: int | None = None,
        agent_timeout_s: float | None = None,
        endpoint_url: str = "",
    ) -> str:
        """Start a rollout on a row of a SWE data set (docs/swe.md), and return the rollout's id immediately."""
        arguments = {
            "model_key": model_key,
            "agent": agent,
            "thinking": thinking,
            "mode": mode,
            "max_tokens_cap": max_tokens_cap,
            "agent_timeout_s": agent_timeout_s,
            "endpoint_url": endpoint_url,
        }
        return (await self._call("start_rollout", StartedRollout, task=dict(task), **_drop_unset(arguments))).rollout_id

    async def get_state(self, rollout_id: str) -> RolloutState:
        """Return the progress of a rollout. (OpenEnv's `state()` returns the state of the session.)"""
        return await self._call("get_state", RolloutState, rollout_id=rollout_id)

    async def get_messages(self, rollout_id: str, after: int = 0, limit: int = 100) -> MessagePage:
        """Return up to `limit` messages of a rollout after the cursor `after`. The rollout may still be running."""
        return await self._call("get_messages", MessagePage, rollout_id=rollout_id, after=after, limit=limit)

    async def subscribe_events(
        self, rollout_id: str, after: int = 0, limit: int = 200, wait_s: float = 0.0
    ) -> EventPage:
        """Return up to `limit` events of a rollout after the cursor `after`. Wait up to `wait_s` seconds for the first one."""
        return await self._call(
            "subscribe_events", EventPage, rollout_id=rollout_id, after=after, limit=limit, wait_s=wait_s
        )

    async def abort_rollout(self, rollout_id: str, reason: str = "") -> RolloutState:
        """Stop a rollout, and return its final state once its agent and sandbox have stopped. An ended rollout is left unchanged."""
        return await self._call("abort_rollout", RolloutState, rollout_id=rollout_id, reason=reason)

    async def finalize_rollout(self, rollout_id: str, wait_s: float | None = None) -> RolloutResult:
        """Wait until a rollout has ended, and return its result. After `wait_s` seconds, return a result with `done` false instead."""
        if wait_s is None:
            return await self.wait_for(rollout_id)
        return await self._call("finalize_rollout", RolloutResult, rollout_id=rollout_id, wait_s=wait_s)

    async def list_rollouts(self, status: str = "", limit: int = 50, before: str = "") -> RolloutList:
        """Return up to `limit` rollouts of all clients, newest first. If `status` is set, return only those with this status.

        The status `done` selects all rollouts that have ended. For the next page, set `before` to the id of the last rollout of the
        previous page.
        """
        return await self._call("list_rollouts", RolloutList, status=status, limit=limit, before=before)

    async def list_endpoints(self) -> list[EndpointView]:
        """Return the endpoints that `model_key` may name."""
        return (await self._call("list_endpoints", EndpointList)).endpoints

    async def wait_for(self, rollout_id: str) -> RolloutResult:
        """Wait until a rollout has ended, and return its result.

        Reconnect if the connection breaks. After `MAX_ATTEMPTS` failures in a row, raise the last error.
        """
        failures, wait_s = 0, min(WAIT_S, self._message_timeout / 2)
        while True:
            try:
                result = await self.finalize_rollout(rollout_id, wait_s)
            except (ConnectionClosed, OSError, TimeoutError):
                failures += 1
                if failures == MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(0.2 * 2**failures)
            else:
                failures = 0
                if result.done:
                    return result

    async def list_tools(self) -> list[Tool]:
        """Return the server's tools with their schemas."""
        observation = (await self._step_async(ListToolsAction())).observation
        assert isinstance(observation, ListToolsObservation)
        return list(observation.tools)

    async def call_tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool and return its result as a decoded JSON object."""
        observation = (await self._step_async(CallToolAction(tool_name=name, arguments=arguments))).observation
        assert isinstance(observation, TurngateObservation)
        if observation.error is None:
            return dict(observation.result)
        param, message = observation.metadata.get("param"), observation.error.message
        if observation.metadata.get("kind") == NotFound.kind:
            raise NotFound(message, param=param)
        if observation.error.error_type is ToolErrorType.INVALID_ARGS:
            raise BadRequest(message, param=param)
        raise TurngateError(message, param=param)

    async def _call(self, name: str, kind: type[T], **arguments: Any) -> T:
        return msgspec.convert(await self.call_tool(name, **arguments), kind)

    # ── hooks of OpenEnv's client ──

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the reply. Only one call is made at a time, because replies carry no id that matches them to calls."""
        if self._call_lock is None:
            self._call_lock = asyncio.Lock()
        async with self._call_lock:
            return dict(await super()._send_and_receive(message))

    def _step_payload(self, action: Action) -> dict[str, Any]:
        return dict(action.model_dump())

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Observation]:
        values = payload["observation"]
        kind: type[Observation] = ReadyObservation
        if "tools" in values:
            kind = ListToolsObservation
        elif "tool_name" in values:
            kind = TurngateObservation
        done, reward = payload["done"], payload["reward"]
        observation = kind.model_validate({**values, "done": done, "reward": reward})
        return StepResult(observation=observation, reward=reward, done=done, metadata=payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> TurngateState:
        return TurngateState.model_validate(payload)


def _drop_unset(values: dict[str, Any]) -> dict[str, Any]:
    """Remove arguments that are not set, so that the server's defaults apply."""
    return {name: value for name, value in values.items() if value is not None and value != ""}
