"""Real MCP clients run real rollouts: Claude Code and Codex, each over stdio and HTTP, set up as docs/mcp.md says.

Their own model is Turngate's scripted engine, which makes them call the tools; the tool results then appear in their prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from tests import kit as gateways
from tests.agents_real.kit import agent, agents, call, model_step
from tests.mcp import kit
from tests.mcp.kit import KEY, MODEL, rollout_arguments
from tests.mcp.test_tools import ROW
from tests.speed import scaled
from turngate.agents.launch import Launch, plan_launch
from turngate.rollout.playbook import Playbook, Scene
from turngate.service.mcp_tools import TOOLS

pytestmark = pytest.mark.full

PROMPT = "Try the rollouts, please."
TIMEOUT_S = 120.0


ROLLOUT: dict[str, object] = {"rollout_id": "{rollout}"}  # the started rollout


def _calls() -> tuple[tuple[str, dict[str, object]], ...]:
    """Every tool with its arguments."""
    order = rollout_arguments('open("a.txt", "w").write(ask("Hi"))', test_script="grep -q Hello a.txt")
    # So that the playbook does not read it as a placeholder.
    order["instruction"] = re.sub(r"\{(\w+)\}", r"{ \1 }", order["instruction"])
    return (
        ("list_endpoints", {}),
        ("start_rollout", order),
        ("finalize_rollout", {**ROLLOUT, "wait_s": scaled(20), "logprobs": False}),
        ("get_state", ROLLOUT),
        ("get_messages", ROLLOUT),
        ("subscribe_events", ROLLOUT),
        ("abort_rollout", ROLLOUT),  # has no effect on a finished rollout
        ("run_rollout", {**order, "task_id": "at-once", "logprobs": False}),
        ("run_swe_rollout", {"task": ROW, "model_key": MODEL}),
        ("list_rollouts", {}),
    )


def _scene() -> Scene:
    steps = [model_step("", call(f"mcp__turngate__{name}", **arguments)) for name, arguments in _calls()]
    return Scene(PROMPT, (*steps, model_step("All done.")), finds={"rollout": r'"rollout_id":"([^"]+)"'})


def _claude(server: kit.Server, home: Path, launch: Launch) -> list[str]:
    """`--mcp-config`, with the key left in the environment."""
    parameters = server.parameters()
    entry: dict[str, object] = {"type": "stdio", "command": parameters.command, "args": parameters.args}
    entry["env"] = {name: value for name, value in server.env.items() if name != "TURNGATE_MCP_KEY"}
    if server.url:
        header = {"Authorization": "Bearer ${TURNGATE_MCP_KEY}"}
        entry = {"type": "http", "url": server.url, "headers": header}
    (home / "mcp.json").write_text(json.dumps({"mcpServers": {"turngate": entry}}))
    return [*launch.command, "--mcp-config", str(home / "mcp.json")]


def _codex(server: kit.Server, home: Path, launch: Launch) -> list[str]:
    """`[mcp_servers.turngate]` in its config.toml."""
    parameters = server.parameters()
    lines = [f"command = {json.dumps(parameters.command)}", f"args = {json.dumps(parameters.args)}"]
    lines += ["required = true", f"startup_timeout_sec = {scaled(60):.0f}"]
    lines += [f"env.{name} = {json.dumps(value)}" for name, value in server.env.items() if name != "TURNGATE_MCP_KEY"]
    if server.url:
        lines = [f'url = "{server.url}"', 'bearer_token_env_var = "TURNGATE_MCP_KEY"']
    lines.append(f"tool_timeout_sec = {scaled(60):.0f}")
    file = home / ".codex" / "config.toml"
    file.write_text("\n".join([file.read_text(), "[mcp_servers.turngate]", *lines, ""]))
    tomllib.loads(file.read_text())
    return list(launch.command)


CONFIGURE = {"claude-code": _claude, "codex": _codex}


@pytest.mark.parametrize("name", agents(*CONFIGURE, only=("codex",)))
async def test_real_agent_calls_every_tool(server: kit.Server, name: str, tmp_path: Path) -> None:
    spec, installed = agent(name)
    async with gateways.gateway(Playbook(gateways.renderer(), [_scene()]), max_context=200_000) as gateway:
        session = await gateway.open()
        (work := tmp_path / "work").mkdir()
        launch = plan_launch(
            spec,
            installed,
            base_url=gateway.root,
            api_key=session.key,
            model="m",
            prompt=PROMPT,
            home=str(tmp_path),
            workdir=str(work),
        )
        for file in launch.files:
            path = Path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TURNGATE_MCP_KEY": KEY}
        env["MCP_TIMEOUT"] = f"{scaled(30) * 1000:.0f}"  # Claude Code's, in milliseconds
        process = await asyncio.create_subprocess_exec(
            *CONFIGURE[name](server, tmp_path, launch),
            cwd=work,
            env={**env, **launch.env},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), scaled(TIMEOUT_S))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        prompts = [gateways.tokenizer().decode(node["ids"]) for node in (await gateway.trace(session.id))["nodes"]]
    assert process.returncode == 0 and "All done." in output.decode(), output.decode()

    def find(mark: str) -> list[str]:
        return [text for text in prompts if mark in text]

    assert {name for name, _ in _calls()} == set(TOOLS)
    [endpoints] = find('"endpoints":[')
    assert MODEL in endpoints
    results = find('"workdir_files":')
    for result in results[:2]:  # of finalize_rollout and run_rollout
        assert '"status":"finished"' in result and '"a.txt":"Hello."' in result
        assert '"reward":1' in result
    assert '"task_id":"at-once"' in results[1]
    assert ROW["instance_id"] in results[2] and "docker" in results[2]  # but the sandbox is local
    [messages] = find('"messages":[')
    assert "Hello." in messages
    [events] = find('"events":[')
    assert '"kind":"queued"' in events and '"kind":"ended"' in events
    [listing] = find('"rollouts":[')
    assert "at-once" in listing
    states = [text for text in find('"started":') if text is not listing]
    assert len(states) == 2 and all('"stage":"done"' in text for text in states)  # of get_state and abort_rollout
