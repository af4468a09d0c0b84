"""The environment's client: OpenEnv's `EnvClient`, with a method for every tool and our own types in and out.

    async with TurngateEnv("http://127.0.0.1:8000") as env:
        result = await env.run_rollout("vllm://Qwen3-8B", "Mend add() in main.py", test_script="python3 test_main.py")

    with TurngateEnv("http://127.0.0.1:8000").sync() as env:
        result = env.run_rollout("vllm://Qwen3-8B", "Mend add() in main.py", test_script="python3 test_main.py")

One client is one socket, and one call at a time; several callers wait for each other. Rollouts run beside each other all the same: start
them all, then have their results. Or have a client each, with `new_session`.
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
from turngate.service.result import EventPage, MessagePage, RolloutList, RolloutResult, RolloutState
from turngate.service.tools import EndpointList, StartedRollout
from turngate.types import Json

WAIT_S = 5.0  # of one question whether a rollout has ended: other callers of this client wait as long
MAX_ATTEMPTS = 5  # at a server that cannot be reached, before a rollout that is waited for is given up

T = TypeVar("T", bound=msgspec.Struct)


class TurngateEnv(EnvClient[Action, Observation, TurngateState]):
    """`reset`, `step` and `state` as every OpenEnv client has them, and the tools by their names.

    A rollout that is waited for is asked about again and again, so that no time limit on the way matters; where the connection breaks, it
    is taken up on a new one. Whoever stops waiting leaves it running: `abort_rollout` ends it.
    What is wrong with arguments is a `BadRequest` whose `param` names the argument. What went wrong with a rollout is in its result.
    """

    _turns: asyncio.Lock | None = None

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
        """Let an agent do what the instruction says, and have the work graded."""
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
        """The same for a row of a SWE data set (docs/swe.md)."""
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
        """Its id, at once."""
        given = {
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
        return (await self._tell("start_rollout", StartedRollout, **_drop_unset(given))).rollout_id

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
        """Its id, at once."""
        given = {
            "model_key": model_key,
            "agent": agent,
            "thinking": thinking,
            "mode": mode,
            "max_tokens_cap": max_tokens_cap,
            "agent_timeout_s": agent_timeout_s,
            "endpoint_url": endpoint_url,
        }
        return (await self._tell("start_rollout", StartedRollout, task=dict(task), **_drop_unset(given))).rollout_id

    async def get_state(self, rollout_id: str) -> RolloutState:
        """How far it is. (`state()` is the session's, as OpenEnv has it.)"""
        return await self._tell("get_state", RolloutState, rollout_id=rollout_id)

    async def get_messages(self, rollout_id: str, after: int = 0, limit: int = 100) -> MessagePage:
        """The conversation past a cursor, as it happens."""
        return await self._tell("get_messages", MessagePage, rollout_id=rollout_id, after=after, limit=limit)

    async def subscribe_events(
        self, rollout_id: str, after: int = 0, limit: int = 200, wait_s: float = 0.0
    ) -> EventPage:
        """What happened past a cursor; waits so long for something."""
        return await self._tell(
            "subscribe_events", EventPage, rollout_id=rollout_id, after=after, limit=limit, wait_s=wait_s
        )

    async def abort_rollout(self, rollout_id: str, reason: str = "") -> RolloutState:
        """Ends generation and sandbox, and returns when both are gone."""
        return await self._tell("abort_rollout", RolloutState, rollout_id=rollout_id, reason=reason)

    async def finalize_rollout(self, rollout_id: str, wait_s: float | None = None) -> RolloutResult:
        """Its result, as often as you like. With `wait_s`, `done` may be false; without, this waits to its end."""
        if wait_s is None:
            return await self.wait_for(rollout_id)
        return await self._tell("finalize_rollout", RolloutResult, rollout_id=rollout_id, wait_s=wait_s)

    async def list_rollouts(self, status: str = "", limit: int = 50, before: str = "") -> RolloutList:
        """Newest first; those of other clients too."""
        return await self._tell("list_rollouts", RolloutList, status=status, limit=limit, before=before)

    async def list_endpoints(self) -> list[EndpointView]:
        """What `model_key` may be."""
        return (await self._tell("list_endpoints", EndpointList)).endpoints

    async def wait_for(self, rollout_id: str) -> RolloutResult:
        """Its result, when it has ended. Over lost connections too."""
        failed, wait_s = 0, min(WAIT_S, self._message_timeout / 2)
        while True:
            try:
                result = await self.finalize_rollout(rollout_id, wait_s)
            except (ConnectionClosed, OSError, TimeoutError):
                failed += 1
                if failed == MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(0.2 * 2**failed)
            else:
                failed = 0
                if result.done:
                    return result

    async def list_tools(self) -> list[Tool]:
        """The tools, with their schemas."""
        observation = (await self._step_async(ListToolsAction())).observation
        assert isinstance(observation, ListToolsObservation)
        return list(observation.tools)

    async def call_tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        """A tool's answer, as JSON."""
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

    async def _tell(self, name: str, kind: type[T], **arguments: Any) -> T:
        return msgspec.convert(await self.call_tool(name, **arguments), kind)

    # ── OpenEnv's seams ──

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """One at a time: answers carry no number by which they could be told apart."""
        if self._turns is None:
            self._turns = asyncio.Lock()
        async with self._turns:
            return dict(await super()._send_and_receive(message))

    def _step_payload(self, action: Action) -> dict[str, Any]:
        return dict(action.model_dump())

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Observation]:
        told = payload["observation"]
        kind: type[Observation] = ReadyObservation
        if "tools" in told:
            kind = ListToolsObservation
        elif "tool_name" in told:
            kind = TurngateObservation
        done, reward = payload["done"], payload["reward"]
        observation = kind.model_validate({**told, "done": done, "reward": reward})
        return StepResult(observation=observation, reward=reward, done=done, metadata=payload.get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> TurngateState:
        return TurngateState.model_validate(payload)


def _drop_unset(values: dict[str, Any]) -> dict[str, Any]:
    """Without what was left out: the server's own defaults hold."""
    return {name: value for name, value in values.items() if value is not None and value != ""}
