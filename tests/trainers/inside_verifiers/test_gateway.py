"""Tests for the gateway mixin: verifiers runs a program in its own runtime against a real gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import ValidationError

from tests.kit import Gated, Running, gateway, say, until
from tests.speed import scaled
from turngate.engines.scripted import ScriptedTurn
from turngate.trainers.verifiers import gateway as mixin
from turngate.trainers.verifiers.gateway import GatewayConfig, RolloutApi, turns_from_trajectory
from turngate.trainers.verifiers.graft import graft

pytestmark = pytest.mark.process

TWO = 'first = ask("Hi"); print(ask("Hi", first, "More"))'


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the mixin's requests to the gateway, in order."""
    order: list[str] = []
    answer = RolloutApi._send

    async def record(self: RolloutApi, method: str, url: str, body: Any, gone: bool) -> bytes:
        order.append(url.rpartition("/")[2])
        return await answer(self, method, url, body, gone)

    monkeypatch.setattr(RolloutApi, "_send", record)
    return order


def agent(g: Running, program: str, *, timeout: float | None = None, **config: Any) -> vf.Agent:
    os.environ["TURNGATE_ADMIN_KEY"] = g.app.admin_key  # removed by the shared fixture
    harness = {"id": "gateway-program", "gateway": g.root, "program": program, **config.pop("harness", {})}
    return vf.make_agent(
        vf.AgentConfig.model_validate(
            {
                "model": "m",
                "harness": harness,
                "runtime": {"type": "subprocess"},
                "timeout": {"rollout": timeout},
                **config,
            }
        )
    )


def task() -> vf.Task:
    return vf.Task(vf.TaskData(idx=0, prompt="Do it"))


async def run_rollout(g: Running, program: str, **config: Any) -> vf.Trace:
    async with agent(g, program, **config) as running_agent:
        return await running_agent.run(task())


@asynccontextmanager
async def start_rollout(
    g: Running, program: str, **config: Any
) -> AsyncIterator[tuple[asyncio.Task[vf.Trace], list[vf.Trace]]]:
    """Start a rollout and yield its task and trace."""
    traces: list[vf.Trace] = []
    async with agent(g, program, **config) as running_agent:
        running = asyncio.create_task(running_agent.run(task(), on_trace=traces.append))
        try:
            yield running, traces
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_trace_equals_gateway_recording(requests: list[str]) -> None:
    async with gateway([say("Hello."), say("Bye.")]) as g:
        trace = await run_rollout(g, TWO)
        assert trace.ok and trace.stop_condition == "agent_completed" and trace.info["printed"] == "Bye.\n"
        [row], [branch] = await g.samples(trace.id), trace.branches
        assert branch.token_ids == row["ids"] and branch.sampled_mask == [bool(m) for m in row["mask"]]
        assert branch.logprobs == [lp or 0.0 for lp in row["logprobs"]]
        assert [m.role for m in trace.messages] == ["user", "assistant", "user", "assistant"]
        assert trace.num_turns == 2 and trace.usage.completion_tokens == sum(row["mask"])
        assert trace.info["url"] == f"{g.root}/v1/rollouts/{trace.id}/v1"
        assert (await g.show(trace.id))["status"] == "sealed" and trace.info["after"] == [4]
        assert requests == ["register", "unregister", "trajectory"]


async def test_all_dialect_paths_are_routed() -> None:
    """Codex and Claude Code append other paths to the base URL, with or without `/v1`."""
    program = """
def post(url, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["SECRET"]}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3600) as reply:
        return json.loads(reply.read())
url = os.environ["URL"]
post(url + "/responses", {"model": "m", "input": "Hi"})
post(url.removesuffix("/v1") + "/v1/messages", {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Ho"}]})
print(post(url + "/models", None)["data"][0]["id"])
"""
    async with gateway([say("One."), say("Two.")]) as g:
        trace = await run_rollout(g, program)
        assert trace.ok and trace.info["printed"] == "m\n"
        assert sorted(m.content for m in trace.assistant_messages) == ["One.", "Two."]
        rows = sorted(row["ids"] for row in await g.samples(trace.id))
        assert sorted(branch.token_ids for branch in trace.branches) == rows


async def test_gateway_enforces_sampling_and_limits() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        trace = await run_rollout(g, TWO, sampling={"temperature": 0.5, "max_tokens": 77}, max_turns=1)
        [turn] = g.engine.received
        assert turn.sampling.temperature == 0.5 and turn.max_tokens == 77
        assert trace.num_turns == 1 and not trace.ok  # the second call was rejected, so the program failed


async def test_timeout_kills_agent_and_keeps_trajectory(requests: list[str], tmp_path: Path) -> None:
    """A program that times out in its second turn is killed, and its call is aborted."""
    async with gateway([say("Hello."), ScriptedTurn(hang=True)]) as g:
        pid_file = tmp_path / "pid"
        program = f'open({str(pid_file)!r}, "w").write(str(os.getpid())); first = ask("Hi"); ask("Hi", first, "More")'
        trace = await run_rollout(g, program, timeout=scaled(1.5))
        assert trace.is_timeout and trace.stop_condition == "agent_timeout"
        assert requests == ["register", "cancel", "unregister", "trajectory"]
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)
        shown = await g.show(trace.id)
        assert shown["status"] == "cancelled" and shown["in_flight"] == 0
        assert trace.num_turns == 1 and trace.branches[0].token_ids  # the completed turn is kept
        assert trace.info["after"] == [2]


async def test_cancel_reaches_gateway_first(requests: list[str]) -> None:
    async with gateway(engine=Gated([say("Never.")], tokens=0)) as g:
        async with start_rollout(g, 'ask("Hi")') as (running, traces):
            await until(lambda: g.gated.waiting)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert requests[:2] == ["register", "cancel"]
        await until(lambda: not g.gated.waiting)
        assert (await g.show(traces[0].id))["status"] == "cancelled" and traces[0].info["after"] == [0]


@pytest.mark.parametrize(("harness", "error"), [({}, "HarnessError"), ({"breaks": True}, "SandboxError")])
async def test_failed_rollout_keeps_recorded_turns(harness: dict[str, Any], error: str) -> None:
    async with gateway([say("Hello.")]) as g:
        trace = await run_rollout(g, 'ask("Hi"); sys.exit(3)', harness=harness)
        assert not trace.ok and trace.last_error.type == error
        [row], [branch] = await g.samples(trace.id), trace.branches
        assert branch.token_ids == row["ids"] and trace.info["after"] == [2]
        assert (await g.show(trace.id))["status"] == "sealed"


async def test_failing_hook_does_not_hide_error() -> None:
    async with gateway([say("Hello.")] * 2) as g:
        trace = await run_rollout(g, 'ask("Hi")', harness={"breaks": True, "hook_breaks": True})
        assert trace.last_error.type == "SandboxError" and trace.num_turns == 1
        trace = await run_rollout(g, 'ask("Hi")', harness={"hook_breaks": True})
        assert "the hook is broken" in trace.last_error.message and trace.num_turns == 1


@pytest.mark.parametrize("without", ["trajectory", "num_turns", "status", "model"])
async def test_incomplete_trajectory_leaves_trace_unchanged(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = RolloutApi._send

    async def cut(self: RolloutApi, method: str, url: str, body: Any, gone: bool) -> bytes:
        data = await answer(self, method, url, body, gone)
        return data.replace(f'"{without}":'.encode(), b'"other":') if url.endswith("/trajectory") else data

    async with gateway([say("Hello.")]) as g:
        monkeypatch.setattr(RolloutApi, "_send", cut)
        trace = await run_rollout(g, 'ask("Hi")')
        assert not trace.ok and trace.stop_condition == "interception_error" and without in trace.last_error.message
        assert trace.nodes == [] and trace.task.data.prompt == "Do it" and trace.info["after"] == [0]


async def test_existing_trace_is_not_overwritten() -> None:
    async with gateway([say("Hello.")]) as g:
        trace = await run_rollout(g, 'ask("Hi")')
        before = trace.model_dump_json()
        async with RolloutApi(g.root, g.app.admin_key) as rollouts:
            turns = turns_from_trajectory(await rollouts.trajectory(trace.id))
        with pytest.raises(ValueError, match="already"):
            graft(trace, turns)
        assert trace.model_dump_json() == before


async def test_missing_logprobs_are_not_filled_in() -> None:
    async with gateway([say("Hello.", null_logprobs=True), say("Bye.")]) as g:
        trace = await run_rollout(g, TWO)
        [branch], [row] = trace.branches, await g.samples(trace.id)
        assert branch.sampled_mask == [bool(m) for m in row["mask"]] and branch.token_ids == row["ids"]
        assert len([lp for node in trace.nodes for lp in node.logprobs]) == sum(branch.sampled_mask)


async def test_shared_turn_is_trained_in_one_branch() -> None:
    async with gateway([say("Hello."), say("This."), say("That, and more.")]) as g:
        trace = await run_rollout(g, 'first = ask("Hi"); ask("Hi", first, "This?"); ask("Hi", first, "That?")')
        rows = sorted((r["ids"], [bool(m) for m in r["mask"]]) for r in await g.samples(trace.id))
        assert sorted((b.token_ids, b.sampled_mask) for b in trace.branches) == rows and len(rows) == 2
        assert trace.num_turns == 3


def test_config_defaults_and_validation() -> None:
    assert GatewayConfig().poll_interval > 0 and GatewayConfig().silence_s > 0
    with pytest.raises(ValidationError, match="poll_interval"):
        GatewayConfig(poll_interval=0)


async def test_missing_gateway_setting_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway() as g:
        monkeypatch.delenv(mixin.GATEWAY, raising=False)
        trace = await run_rollout(g, 'ask("Hi")', harness={"gateway": ""})
        assert trace.last_error.type == "InterceptionError" and mixin.GATEWAY in trace.last_error.message
        running_agent = agent(g, 'ask("Hi")')
        monkeypatch.delenv("TURNGATE_ADMIN_KEY")
        async with running_agent:
            trace = await running_agent.run(task())
        assert "TURNGATE_ADMIN_KEY" in trace.last_error.message and not trace.ok


async def test_broken_tunnel_is_tunnel_error(requests: list[str]) -> None:
    """A tunnel that breaks during a run ends the rollout with a tunnel error."""
    async with gateway([say("Hello.")]) as g:
        port = int(g.root.rpartition(":")[2])

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inside_reader, inside = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pump(reader, inside), _pump(inside_reader, writer), return_exceptions=True)

        tunnel = await asyncio.start_server(forward, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{tunnel.sockets[0].getsockname()[1]}"
        harness = {"public_url": url, "poll_interval": 0.1, "silence_s": scaled(0.25)}
        async with start_rollout(g, 'ask("Hi"); time.sleep(3600)', harness=harness) as (running, traces):
            await until(lambda: g.engine.received, 20)
            await until(lambda: list(g.live(traces[0].id).trace.turns()))
            tunnel.close()
            trace = await asyncio.wait_for(running, scaled(20))
        assert trace.stop_condition == "tunnel_error" and not trace.ok and url in trace.last_error.message
        assert trace.info["url"].startswith(url) and trace.num_turns == 1
        assert requests == ["register", "unregister", "trajectory"] and trace.rewards == {}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def test_unregister_is_idempotent() -> None:
    async with gateway() as g, RolloutApi(g.root, g.app.admin_key) as rollouts:
        await rollouts.register("r1", {"model": "m"})
        for _ in range(2):
            await rollouts.unregister("r1")
        await rollouts.unregister("nobody")
        await rollouts.cancel("r1")
        assert (await g.show("r1"))["status"] == "sealed"
        with pytest.raises(vf.InterceptionError, match="409"):
            await rollouts.register("r1", {"model": "m"})


async def test_request_is_repeated_while_the_gateway_stops() -> None:
    statuses = ["503 Service Unavailable", "404 Not Found"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {statuses.pop(0)}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, RolloutApi(f"http://127.0.0.1:{port}", "key") as rollouts:
        await rollouts.cancel("r1")
    assert statuses == []


async def test_disabled_mixin_does_nothing(requests: list[str]) -> None:
    async with gateway() as g:
        trace = await run_rollout(g, "pass", harness={"gateway_enabled": False, "gateway": ""})
        assert trace.ok and "/v1/rollouts/" not in trace.info["url"] and requests == [] and "after" not in trace.info
