"""Every tool with the official SDK's client over both transports: results, and errors for invalid arguments."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

from tests.mcp import kit
from tests.mcp.kit import MODEL, call_rejected, call_tool, connect, rollout_arguments, wait_program
from turngate.service.mcp_tools import TOOLS

pytestmark = [pytest.mark.process, pytest.mark.full]

ROW = {
    "instance_id": "own__thing-1",
    "repo": "own/thing",
    "base_commit": "0123456789abcdef0123456789abcdef01234567",
    "problem_statement": "It does not work.",
    "patch": "",
    "test_patch": "diff --git a/test_a.py b/test_a.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_a.py\n@@ -0,0 +1 @@\n+x = 1\n",
    "FAIL_TO_PASS": ["test_a.py::test"],
    "PASS_TO_PASS": [],
    "image_name": "swebench/own",
    "install_config": {"test_cmd": "pytest -rA", "log_parser": "pytest"},
}


@pytest.mark.real
async def test_rollout_step_by_step(server: kit.Server, folder: Path) -> None:
    gate = folder / "gate"
    async with connect(server) as client:
        catalog = await call_tool(client, "list_endpoints")
        assert catalog["agents"] == ["shell"]
        [small, hosted] = catalog["endpoints"]
        assert (small["key"], small["modes"], small["capture"]) == (MODEL, ["exact", "gate"], "tokens")
        assert (hosted["key"], hosted["key_is_set"]) == ("openai://hosted", False)

        order = rollout_arguments(wait_program(gate), test_script="grep -q Hello answer.txt", task_id="greet")
        rollout = await call_tool(client, "start_rollout", **order)
        state = await call_tool(client, "get_state", **rollout)
        assert (state["task_id"], state["agent"], state["done"]) == ("greet", "shell", False)
        early = await call_tool(client, "finalize_rollout", **rollout, wait_s=0)
        assert (early["done"], early["reward"]) == (False, None)
        assert rollout["rollout_id"] in [
            one["rollout_id"] for one in (await call_tool(client, "list_rollouts"))["rollouts"]
        ]

        gate.touch()
        events, cursor, over = [], 0, False
        while not over:
            page = await call_tool(client, "subscribe_events", **rollout, after=cursor, wait_s=20)
            events += page["events"]
            cursor, over = page["cursor"], page["over"]
        assert [event["cursor"] for event in events] == [*range(1, len(events) + 1)]  # no gaps, no duplicates
        assert "ended" in [event["kind"] for event in events]

        result = await call_tool(client, "finalize_rollout", **rollout)
        assert (result["done"], result["status"], result["reward"]) == (True, "finished", 1.0), result
        assert result["exit_code"] == 0 and result["wall_s"] > 0 and result["error"] is None
        assert result["workdir_files"]["answer.txt"] == "Hello."
        [turn] = result["turns"]
        assert turn["text"] == "Hello." and turn["finish_reason"] == "stop"
        assert len(turn["logprobs"]) == turn["sampled_tokens"] > 0
        assert await call_tool(client, "finalize_rollout", **rollout) == result  # repeatable

        lean = await call_tool(client, "finalize_rollout", **rollout, logprobs=False)
        assert lean["turns"][0]["logprobs"] is None and "logprobs" in lean["clamped"][-1]

        conversation = (await call_tool(client, "get_messages", **rollout))["messages"]
        assert [(one["role"], one["text"]) for one in conversation] == [("user", "Hi"), ("assistant", "Hello.")]


async def test_rollout_in_one_call(server: kit.Server, folder: Path) -> None:
    messages: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        messages.append(message or "")

    async with connect(server) as client:
        arguments = rollout_arguments(
            'print(ask("Hi"))', upload_files={"a/b.txt": "1", "c": {"base64": "AP8="}}, setup_shell="echo 2 > d"
        )
        result = (await client.call_tool("run_rollout", arguments, progress_callback=progress)).structured_content
        assert (result["status"], result["reward"]) == ("finished", None)  # no test script
        assert result["workdir_files"]["a/b.txt"] == "1" and result["workdir_files"]["d"] == "2\n"
        assert result["rollout_id"] in messages[0]

        # A failed task is a result.
        failed = await call_tool(client, "run_rollout", **rollout_arguments("", setup_shell="exit 7"))
        assert (failed["error"]["stage"], failed["error"]["boundary"], failed["reward"]) == ("setup", "task", None)
        assert failed["wall_s"] > 0
        row = await call_tool(client, "run_swe_rollout", task=ROW, model_key=MODEL)
        assert row["task_id"] == ROW["instance_id"] and "docker" in row["error"]["message"], row["error"]

        # Aborting ends agent and sandbox.
        rollout = await call_tool(client, "start_rollout", **rollout_arguments(wait_program(folder / "never")))
        await kit.wait_for_file_async(folder / "never.waits")
        state = await call_tool(client, "abort_rollout", **rollout, reason="enough of it")
        assert (state["done"], state["status"]) == (True, "cancelled")
        assert server.leftovers() == []
        assert (await call_tool(client, "abort_rollout", **rollout))["status"] == "cancelled"
        result = await call_tool(client, "finalize_rollout", **rollout)
        assert result["status"] == "cancelled" and result["wall_s"] > 0 and result["reward"] is None


async def test_invalid_arguments_are_named(http: kit.Server) -> None:
    fine = {"model_key": MODEL, "instruction": "x"}
    wrong: list[tuple[str, dict[str, object], str]] = [
        ("run_rollout", {"instruction": "x"}, "model_key is missing"),
        ("run_rollout", {**fine, "model_key": "vllm://other"}, f"unknown model_key 'vllm://other'.*{MODEL}"),
        (
            "run_rollout",
            {**fine, "model_key": "openai://hosted"},
            "the server has no valid key for the endpoint .*TURNGATE_TEST_HOSTED_KEY",
        ),
        ("run_rollout", {**fine, "agent_timeout_s": "long"}, "agent_timeout_s must be a number, not a string"),
        ("run_rollout", {**fine, "timeout": 5}, "timeout is not a known argument"),
        ("run_rollout", {**fine, "logprobs": "no"}, "logprobs must be true or false, not a string"),
        ("run_rollout", {**fine, "upload_files": {"../out": "x"}}, "upload_files.*below the working folder"),
        ("start_rollout", {**fine, "mode": "blind"}, "mode must be one of exact, observe.* not 'blind'"),
        (
            "start_rollout",
            {**fine, "mode": "transparent_proxy"},
            "mode 'observe' is not available for endpoint .*; choose one of: ",
        ),
        ("start_rollout", {**fine, "agent": "/bin/sh"}, "agent .*choose one of shell"),
        ("start_rollout", {**fine, "endpoint_url": "http://10.0.0.1/v1"}, "endpoint_url .*allowed_hosts"),
        ("start_rollout", {**fine, "task": ROW}, "send either an instruction or a task"),
        ("start_rollout", {"model_key": MODEL}, "instruction is missing"),
        ("run_swe_rollout", {"model_key": MODEL, "task": {"repo": "a/b"}}, "task"),
        ("get_state", {"rollout_id": "nope"}, "unknown rollout_id 'nope'"),
        ("finalize_rollout", {"rollout_id": "nope", "wait_s": -1}, "wait_s must be a number of at least 0"),
        ("finalize_rollout", {"rollout_id": "nope"}, "unknown rollout_id 'nope'"),
        ("get_messages", {"rollout_id": 5}, "rollout_id must be a string, not an integer"),
        ("subscribe_events", {"rollout_id": "nope", "wait_s": 1000}, "wait_s must be a number of at most "),
        ("list_rollouts", {"limit": 0}, "limit must be an integer of at least 1"),
        ("list_endpoints", {"all": True}, "all is not a known argument"),
    ]
    for secret in ("api_key", "key", "sandbox", "image", "network"):
        wrong.append(("start_rollout", {**fine, secret: "x"}, f"{secret} is not a known argument"))
    async with connect(http) as client:
        before = (await call_tool(client, "list_rollouts"))["rollouts"][:1]
        for tool, arguments, words in wrong:
            conversation = await call_rejected(client, tool, **arguments)
            assert re.search(words, conversation), (tool, arguments, conversation)
        with pytest.raises(MCPError, match=r"start_rolout.*did you mean start_rollout"):
            await client.call_tool("start_rolout", {})
        assert (await call_tool(client, "list_rollouts"))["rollouts"][:1] == before  # nothing was started


@pytest.mark.parametrize(("transport", "mode"), [("http", "auto"), ("http", "legacy"), ("stdio", "legacy")])
async def test_server_info_and_tool_schemas(request: pytest.FixtureRequest, transport: str, mode: str) -> None:
    async with connect(request.getfixturevalue(transport), mode) as client:
        assert client.server_info.name == "turngate" and "run_rollout" in (client.instructions or "")
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert len(await asyncio.gather(*(call_tool(client, "list_endpoints") for _ in range(5)))) == 5
    assert list(tools) == list(TOOLS)
    for tool in tools.values():
        assert tool.description and tool.annotations and tool.output_schema and tool.output_schema["type"] == "object"
        assert all(argument["description"] for argument in tool.input_schema["properties"].values())
    hints = {name: tool.annotations for name, tool in tools.items() if tool.annotations}
    assert [name for name, hint in hints.items() if hint.destructive_hint] == ["abort_rollout"]
    assert [name for name, hint in hints.items() if not hint.read_only_hint] == [
        "run_rollout",
        "run_swe_rollout",
        "start_rollout",
        "abort_rollout",
    ]
    start, run, run_swe = (
        set(tools[name].input_schema["properties"]) for name in ("start_rollout", "run_rollout", "run_swe_rollout")
    )
    assert run | run_swe == start | {"logprobs"} and "except logprobs" in (tools["start_rollout"].description or "")
    turn = tools["run_rollout"].output_schema["properties"]["turns"]["items"]  # type: ignore[index]
    assert {"finish_reason", "logprobs", "version_start"} <= set(turn["properties"])
