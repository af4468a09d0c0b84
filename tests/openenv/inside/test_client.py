"""The real OpenEnv client with the real server: reset, step, state, every tool, invalid arguments and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

from tests.openenv.kit import BAD, CALL_MODEL, GOOD, MODEL, REPLY, SLOW, run_server
from tests.speed import scaled
from turngate.errors import BadRequest, NotFound
from turngate.openenv import ReadyObservation, TurngateAction, TurngateEnv, TurngateObservation
from turngate.openenv.app import MAX_BYTES
from turngate.service.mcp_tools import TOOLS

pytestmark = pytest.mark.process

RUN = {"model_key": MODEL, "instruction": CALL_MODEL, "test_script": GOOD}


# ── reset, step, state ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
async def test_episode(url: str) -> None:
    async with TurngateEnv(url) as env:
        ready = await env.reset(episode_id="first", seed=3)
        assert isinstance(ready.observation, ReadyObservation) and not ready.done and ready.reward is None
        assert {endpoint["key"]: endpoint["key_is_set"] for endpoint in ready.observation.endpoints} == {
            MODEL: True,
            "openai://kept": False,
        }
        step = await env.step(TurngateAction(tool_name="run_rollout", arguments=RUN))
        assert isinstance(step.observation, TurngateObservation)
        assert step.done and step.reward == 1.0 and step.observation.status == "finished"
        assert step.observation.result["reward"] == 1.0 and step.observation.result["wall_s"] > 0
        state = await env.state()
        assert (state.episode_id, state.step_count, state.last_reward) == ("first", 1, 1.0)
        assert state.rollouts == [step.observation.rollout_id] == [state.last_rollout]

        await env.get_messages(state.last_rollout)
        assert (await env.get_state(state.last_rollout)).reward == 1.0 and (await env.state()).last_reward == 1.0

        await env.reset()
        again = await env.state()
        assert again.episode_id != "first" and again.step_count == 0 and again.rollouts == []


@pytest.mark.real
async def test_unknown_reward_is_none_and_zero_is_zero(url: str) -> None:
    async with TurngateEnv(url) as env:
        ungraded = await env.step(CallToolAction(tool_name="run_rollout", arguments={**RUN, "test_script": ""}))
        assert ungraded.done and ungraded.reward is None and (await env.state()).last_reward is None
        raised = await env.step(CallToolAction(tool_name="run_rollout", arguments={**RUN, "test_script": BAD}))
        assert raised.done and raised.reward == 0.0
        broken = await env.step(CallToolAction(tool_name="run_rollout", arguments={**RUN, "setup_shell": "exit 7"}))
        assert broken.done and broken.reward is None
        assert broken.observation.error is None and broken.observation.result["error"]["stage"] == "setup"
        assert broken.observation.result["wall_s"] > 0


def test_sync_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.openenv.client.WAIT_S", scaled(60))  # so that one finalize call is enough
    with TurngateEnv(url).sync() as env:
        assert env.reset().observation.endpoints
        result = env.run_rollout(MODEL, CALL_MODEL, GOOD, task_id="sum", agent_timeout_s=scaled(60))
        assert result.reward == 1.0 and result.task_id == "sum" and result.done and result.wall_s > 0
        assert env.state().step_count == 2  # start and finalize


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_run_rollout_result(url: str) -> None:
    async with TurngateEnv(url) as env:
        result = await env.run_rollout(
            MODEL, CALL_MODEL, GOOD, upload_files={"notes/a.txt": "hello"}, max_tokens_cap=64
        )
        assert (result.status, result.reward, result.exit_code, result.error) == ("finished", 1.0, 0, None)
        [turn] = result.turns
        assert turn.text == REPLY and turn.finish_reason == "stop" and turn.capture == "tokens"
        assert turn.logprobs is not None and len(turn.logprobs) == turn.sampled_tokens and max(turn.logprobs) < 0
        assert result.workdir_files["answer.txt"] == REPLY and result.workdir_files["notes/a.txt"] == "hello"
        assert REPLY in "".join(result.log_tails.values())


async def test_rollout_step_by_step(url: str) -> None:
    async with TurngateEnv(url) as env:
        rollout = await env.start_rollout(MODEL, SLOW)
        assert not (await env.get_state(rollout)).done
        events, cursor = [], 0
        while not any(event.kind == "turn" for event in events):
            page = await env.subscribe_events(rollout, cursor, wait_s=10)
            events, cursor = events + page.events, page.cursor
        conversation = await env.get_messages(rollout)
        assert [message.role for message in conversation.messages] == ["user", "assistant"]
        assert conversation.messages[-1].text == REPLY and conversation.messages[-1].sampled and not conversation.over
        unfinished = await env.finalize_rollout(rollout, wait_s=0)
        assert not unfinished.done and unfinished.reward is None and unfinished.wall_s > 0

        aborted = await env.abort_rollout(rollout, "seen enough")
        assert aborted.status == "cancelled" and aborted.done
        assert (await env.abort_rollout(rollout)).status == "cancelled"
        result = await env.finalize_rollout(rollout)
        assert result == await env.finalize_rollout(rollout) and result.status == "cancelled" and result.reward is None
        while not page.over:
            page = await env.subscribe_events(rollout, cursor, wait_s=10)
            events, cursor = events + page.events, page.cursor
        assert [event.cursor for event in events] == list(range(1, cursor + 1))
        listed = await env.list_rollouts(status="cancelled")
        assert rollout in [one.rollout_id for one in listed.rollouts]
        assert [endpoint.key for endpoint in await env.list_endpoints()] == [MODEL, "openai://kept"]


async def test_invalid_swe_row_is_named(url: str) -> None:
    """The server has no image for the row, so the error names the argument."""
    row = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "0" * 40, "problem_statement": "Mend it"}
    async with TurngateEnv(url) as env:
        with pytest.raises(BadRequest) as raised:
            await env.run_swe_rollout(row, MODEL)
        assert str(raised.value.param).startswith("task")
        step = await env.step(TurngateAction(tool_name="run_swe_rollout", arguments={"model_key": MODEL}))
        assert step.observation.error.error_type == "invalid_args" and step.observation.metadata["param"] == "task"


@pytest.mark.real
async def test_openenv_clients_list_and_call_tools(url: str) -> None:
    """`/mcp` offers only tools: no reset, no step, no state."""
    async with MCPToolClient(url) as client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        assert set(tools) == set(TOOLS) and not {"reset", "step", "state", "close"} & set(tools)
        assert tools["run_rollout"].input_schema["required"] == ["model_key", "instruction"]
        assert "key" not in tools["run_rollout"].input_schema["properties"]
        response = await client.call_tool("run_rollout", **RUN)
        assert response["reward"] == 1.0 and response["turns"][0]["logprobs"]
        with pytest.raises(RuntimeError, match="unknown model_key 'vllm://nothing'"):
            await client.call_tool("run_rollout", **{**RUN, "model_key": "vllm://nothing"})
    async with GenericEnvClient(base_url=url) as plain:
        listed = await plain.step({"type": "list_tools"})
        assert {tool["name"] for tool in listed.observation["tools"]} == set(TOOLS)
        response = await plain.step({"type": "call_tool", "tool_name": "list_endpoints", "arguments": {}})
        assert response.observation["result"]["endpoints"] and response.reward is None and not response.done
    async with TurngateEnv(url) as env:
        assert {tool.name for tool in await env.list_tools()} == set(TOOLS)


# ── bad arguments ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tool", "arguments", "param"),
    [
        ("run_rollout", {"model_key": MODEL}, "instruction"),
        ("run_rollout", {**RUN, "model_key": "vllm://nothing"}, "model_key"),
        ("run_rollout", {**RUN, "model_key": "openai://kept"}, "model_key"),
        ("run_rollout", {**RUN, "agent": "codex"}, "agent"),
        ("run_rollout", {**RUN, "mode": "sideways"}, "mode"),
        ("run_rollout", {**RUN, "agent_timeout_s": "long"}, "agent_timeout_s"),
        ("run_rollout", {**RUN, "upload_files": {"../x": "y"}}, "upload_files"),
        ("run_rollout", {**RUN, "endpoint_url": "https://example.org/v1"}, "endpoint_url"),
        ("start_rollout", {**RUN, "hf_token": "hf_planted"}, "hf_token"),
        ("get_state", {"rollout_id": "nobody"}, "rollout_id"),
        ("finalize_rollout", {"rollout_id": "nobody"}, "rollout_id"),
        ("subscribe_events", {"rollout_id": "nobody", "after": -1}, "after"),
        ("list_rollouts", {"limit": 0}, "limit"),
    ],
)
async def test_invalid_arguments_are_named(url: str, tool: str, arguments: dict[str, Any], param: str) -> None:
    async with TurngateEnv(url) as env:
        response = (await env.step(CallToolAction(tool_name=tool, arguments=arguments))).observation
        assert response.error.error_type == "invalid_args" and response.metadata["param"] == param
        assert param in response.error.message and "planted" not in response.error.message
        assert response.reward is None and not response.done
        with pytest.raises(NotFound if response.metadata["kind"] == "not_found" else BadRequest, match=param) as raised:
            await env.call_tool(tool, **arguments)
        assert raised.value.param == param


async def test_unknown_tool_and_invalid_action(url: str) -> None:
    async with TurngateEnv(url) as env:
        response = (await env.step(CallToolAction(tool_name="run_rolout"))).observation
        assert response.error.error_type == "tool_not_found" and "did you mean run_rollout?" in response.error.message
        with pytest.raises(RuntimeError, match="split is not an argument of reset"):
            await env.reset(split="train")
    async with httpx.AsyncClient(timeout=scaled(5)) as http:
        rejected = await http.post(f"{url}/reset", json={"split": "train"})
        assert rejected.status_code == 400 and rejected.json()["param"] == "split"
    async with GenericEnvClient(base_url=url) as plain:
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            await plain.step({"message": "hello"})


# ── clients that come and go ────────────────────────────────────────────────────────────────────────────────────────


async def test_two_concurrent_clients(url: str) -> None:
    """Each client has its own episode; rollouts are shared and run concurrently."""
    async with TurngateEnv(url) as one, TurngateEnv(url) as other:
        await one.reset(episode_id="one")
        await other.reset(episode_id="other")
        slow = await one.start_rollout(MODEL, SLOW)
        waiting = asyncio.ensure_future(one.wait_for(slow))
        quick = await other.run_rollout(MODEL, CALL_MODEL, GOOD)
        assert quick.reward == 1.0 and not waiting.done()
        async with httpx.AsyncClient(timeout=scaled(5)) as http:
            assert (await http.get(f"{url}/health")).json() == {"status": "healthy"}
        await other.abort_rollout(slow)
        assert (await waiting).status == "cancelled"
        assert (await one.state()).rollouts == [slow] and (await other.state()).rollouts == [quick.rollout_id]
        async with await other.new_session() as third:
            assert (await third.finalize_rollout(quick.rollout_id)).reward == 1.0


async def test_one_client_with_concurrent_calls(url: str) -> None:
    async with TurngateEnv(url) as env:
        results = await asyncio.gather(*(env.run_rollout(MODEL, CALL_MODEL, GOOD, task_id=f"t{n}") for n in range(5)))
        assert [(result.task_id, result.reward) for result in results] == [(f"t{n}", 1.0) for n in range(5)]


async def test_rollout_survives_disconnect(url: str) -> None:
    """A client disconnects during a call, and another one continues with the rollout."""
    disconnecting = TurngateEnv(url)
    await disconnecting.connect()
    step = asyncio.ensure_future(
        disconnecting._step_async(
            TurngateAction(tool_name="run_rollout", arguments={**RUN, "instruction": SLOW, "task_id": "left"})
        )
    )
    async with TurngateEnv(url) as env:
        while not (found := [one for one in (await env.list_rollouts()).rollouts if one.task_id == "left"]):
            await asyncio.sleep(0)
        rollout = found[0].rollout_id
        events = (await env.subscribe_events(rollout, wait_s=20)).events
        assert disconnecting._ws is not None
        disconnecting._ws.transport.abort()
        with pytest.raises(Exception, match="close"):
            await step
        while not any(event.kind == "turn" for event in events):
            events += (await env.subscribe_events(rollout, events[-1].cursor, wait_s=20)).events
        state = await env.get_state(rollout)
        assert state.status == "running" and state.turns == 1
        assert (await env.abort_rollout(rollout)).status == "cancelled"
    await disconnecting.close()


async def test_broken_connection_is_restored_while_waiting(url: str) -> None:
    async with TurngateEnv(url) as env:
        rollout = await env.start_rollout(MODEL, CALL_MODEL + "time.sleep(1)\n", GOOD)
        waiting = asyncio.ensure_future(env.wait_for(rollout))
        await asyncio.sleep(0)
        assert env._ws is not None
        env._ws.transport.abort()
        assert (await waiting).reward == 1.0


async def test_step_with_timeout_returns_in_time(url: str) -> None:
    async with httpx.AsyncClient(timeout=scaled(60)) as http:
        action = {"type": "call_tool", "tool_name": "run_rollout", "arguments": {**RUN, "instruction": SLOW}}
        response = (await http.post(f"{url}/step", json={"action": action, "timeout_s": 0.5})).json()
        assert (
            not response["done"]
            and response["reward"] is None
            and response["observation"]["status"] in ("queued", "running")
        )
    async with TurngateEnv(url) as env:
        assert (await env.abort_rollout(response["observation"]["rollout_id"])).status == "cancelled"


async def test_foreign_origins_and_hosts_are_rejected(url: str) -> None:
    """A browser on this machine could send them."""
    here = url.removeprefix("http://")
    async with httpx.AsyncClient(timeout=scaled(5)) as http:
        pages = ["https://example.org", "null", "http://["]
        for headers in [
            *({"origin": page} for page in pages),
            *({"host": host} for host in ("example.org", "[", "[::1")),
        ]:
            rejected = await http.get(f"{url}/schema", headers=headers)
            assert rejected.status_code == 403 and next(iter(headers)) in rejected.json()["detail"].lower()
        assert (await http.get(f"{url}/schema", headers={"origin": f"http://{here}"})).status_code == 200
    with pytest.raises(ConnectionError):
        await TurngateEnv(url, headers={"Origin": "https://example.org"}).connect()


async def test_malformed_requests_are_rejected(url: str) -> None:
    action = {"type": "call_tool", "tool_name": "list_endpoints", "arguments": {}}
    async with httpx.AsyncClient(timeout=scaled(60)) as http:
        for value in ("NaN", "-1", '"soon"'):
            body = f'{{"action": {json.dumps(action)}, "timeout_s": {value}}}'
            rejected = await http.post(f"{url}/step", content=body, headers={"content-type": "application/json"})
            assert rejected.status_code == 422 and rejected.json()["detail"][0]["loc"] == ["body", "timeout_s"]

        value = '{"action": {"type": "call_tool", "tool_name": NaN}}'
        rejected = await http.post(f"{url}/step", content=value, headers={"content-type": "application/json"})
        assert rejected.status_code == 422 and rejected.json()["detail"][0]["loc"] == ["tool_name"]

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(MAX_BYTES // 2**20 + 1):
                yield bytes(2**20)

        large = await http.post(f"{url}/step", content=chunks(), headers={"content-type": "application/json"})
        assert large.status_code == 413 and str(MAX_BYTES) in large.json()["detail"]
        assert (await http.post(f"{url}/step", json={"action": action})).status_code == 200


# ── the server ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_server_with_key_and_shutdown(tmp_path: Path) -> None:
    """A server stopped during a rollout ends at once and leaves no process; after a restart it has the result."""
    key = {"Authorization": "Bearer planted-key"}
    with run_server(tmp_path, TURNGATE_OPENENV_KEY="planted-key", KEPT_KEY="planted-too") as server:
        async with httpx.AsyncClient(timeout=scaled(5)) as http:
            assert (await http.get(f"{server.url}/health")).status_code == 200
            assert (await http.get(f"{server.url}/schema")).status_code == 401
            assert (await http.get(f"{server.url}/schema", headers=key)).status_code == 200
        with pytest.raises(ConnectionError):
            await TurngateEnv(server.url).connect()
        async with TurngateEnv(server.url, headers=key) as env:
            assert [endpoint.key_is_set for endpoint in await env.list_endpoints()] == [True, True]
            rollout = await env.start_rollout(MODEL, SLOW)
            while not (await env.get_state(rollout)).turns:
                await env.subscribe_events(rollout, wait_s=1)
            assert server.stop() == 0
        assert "planted" not in server.log and "Traceback" not in server.log
    assert find_processes(tmp_path) == []
    with run_server(tmp_path) as server:
        async with TurngateEnv(server.url) as env:
            result = await env.finalize_rollout(rollout)
            assert result.done and result.reward is None and result.status in ("cancelled", "error")


def find_processes(folder: Path) -> list[str]:
    """Processes with the folder in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if str(folder).encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                pass
    return found
