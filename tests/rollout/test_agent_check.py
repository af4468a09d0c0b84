"""`agents check` on small agents: each failure names its cause, and agents without tools pass."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.speed import scaled
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentFile, AgentSpec, CheckCall, CheckStep, parse_spec
from turngate.rollout.agent_check import CheckOptions, CheckReport, check_agent
from turngate.sandboxes.local import LocalBackend

pytestmark = pytest.mark.process

# A small agent. It offers the tool `sh` and runs its calls, and writes the files of fenced blocks in a reply: ```NAME …```.
AGENT = r"""
import json, os, re, subprocess, sys, urllib.request, urllib.error
settings = json.loads(os.environ["SETTINGS"])
tool = {"type": "function", "function": {"name": "sh", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = {"model": os.environ["MODEL"], "messages": messages, **settings.get("body", {})}
    if settings.get("tools", True):
        body["tools"] = [tool]
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            message = json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print(error.read().decode(), file=sys.stderr)
        break
    if settings.get("one_call") and message.get("tool_calls"):
        message["tool_calls"] = message["tool_calls"][:1]
    messages.append({key: value for key, value in message.items() if value is not None})
    for name, text in re.findall(r"```(\S+)\n(.*?)```", message.get("content") or "", re.S):
        open(name, "w").write(text)
    for call in message.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    if not message.get("tool_calls"):
        break
"""
TOML = """
name = "small"
title = "A small agent"
dialect = "chat"
command = ["python3", "{home}/agent.py"]
stdin = "{prompt}"

[env]
URL = "{base_url}"
KEY = "{api_key}"
MODEL = "{model}"
"""
WITH_TOOLS = (
    CheckStep(
        say="I edit it.", calls=(CheckCall(tool="sh", arguments={"command": "sed -i s/colour/color/ notes.txt"}),)
    ),
    CheckStep(calls=(CheckCall(tool="sh", arguments={"command": "echo done > done.txt"}),)),
    CheckStep(say="Done."),
)
IN_TEXT = (CheckStep(say="```notes.txt\nalpha\ncolor\nomega\n```\n```done.txt\ndone\n```"),)


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))  # short, for unix sockets
    yield folder
    shutil.rmtree(folder)


def small_agent(steps: tuple[CheckStep, ...], *, check_task: bool = True, **settings: Any) -> AgentSpec:
    spec = parse_spec(TOML, "small.toml")
    return msgspec.structs.replace(
        spec,
        env={**spec.env, "SETTINGS": json.dumps(settings)},
        files=(AgentFile(path="agent.py", content=AGENT),),
        check=steps,
        check_task=check_task,
    )


async def check(root: Path, agent: AgentSpec, **options: Any) -> CheckReport:
    settings = CheckOptions(timeout_s=scaled(40), **options)
    return await check_agent(agent, Installation(), LocalBackend(root / "sandboxes"), root / "kept", settings)


def failures(report: CheckReport) -> dict[str, str]:
    return {result.name: result.detail for result in report.results if not result.ok}


async def test_agent_with_tools_passes_and_its_tools_are_listed(root: Path) -> None:
    report = await check(root, small_agent(WITH_TOOLS))
    assert report.passed, failures(report)
    assert report.tools == ("sh",)


async def test_agent_without_tools_passes(root: Path) -> None:
    report = await check(root, small_agent(IN_TEXT, tools=False))
    assert report.passed, failures(report)
    assert report.tools == ()
    assert report.outcome.roles == {"main": 1}


async def test_agent_that_only_replies_passes(root: Path) -> None:
    report = await check(root, small_agent((CheckStep(say="Hello."),), tools=False, check_task=False))
    assert report.passed, failures(report)
    assert not any(result.name == "the task is done" for result in report.results)


async def test_greedy_sampling_is_named(root: Path) -> None:
    agent = small_agent(WITH_TOOLS, body={"temperature": 0})
    report = await check(root, agent, session={"sampling": {"temperature": 0}})
    assert failures(report) == {
        "every turn of the agent can be trained": (
            "not trained: biased sampling: greedy; the agent asks for temperature 0"
        )
    }


async def test_missing_tools_are_named(root: Path) -> None:
    report = await check(root, small_agent(WITH_TOOLS, tools=False))
    assert list(failures(report)) == ["the task is done"]
    assert "the agent offers no tools, but its [[check]] steps call sh" in failures(report)["the task is done"]


async def test_unknown_tool_in_steps_is_named(root: Path) -> None:
    steps = (CheckStep(calls=(CheckCall(tool="edit", arguments={"command": "ls"}),)), CheckStep(say="Done."))
    detail = failures(await check(root, small_agent(steps)))["the task is done"]
    assert detail.endswith(
        "the [[check]] steps call edit, but the agent offers only sh; change the steps to call only the offered tools"
    )


async def test_dropped_tool_call_is_named(root: Path) -> None:
    both = CheckStep(calls=tuple(call for step in WITH_TOOLS for call in step.calls))
    report = await check(root, small_agent((both, *WITH_TOOLS), one_call=True))
    assert failures(report) == {
        "the main conversation is exactly one row": (
            "turns per row: 3, 1; turn 2 begins a branch (edited): the agent changed the answer of turn 1 in its history; "
            "turn 1 has 2 tool calls: if the agent runs one tool per reply, write [[check]] steps with one call each"
        )
    }


async def test_refused_call_is_named(root: Path) -> None:
    found = failures(await check(root, small_agent(WITH_TOOLS, body={"model": "gpt-9"})))
    assert found["the gateway accepted every call"].startswith("1 refused; the first: 404 ")
    assert "gpt-9" in found["the gateway accepted every call"]


async def test_agent_that_never_calls_the_model_is_named(root: Path) -> None:
    agent = msgspec.structs.replace(small_agent(WITH_TOOLS), command=("true",))
    assert "the agent made no model call" in failures(await check(root, agent))["the task is done"]


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("raise SystemExit(3)", "failed: exit code 3; it printed nothing"),
        ("raise SystemExit('no model')", "failed: exit code 1; it printed: no model"),
    ],
    ids=["silent", "with output"],
)
async def test_exit_code_of_a_failed_agent_is_named(root: Path, program: str, detail: str) -> None:
    agent = msgspec.structs.replace(small_agent(WITH_TOOLS), files=(AgentFile(path="agent.py", content=program),))
    assert failures(await check(root, agent))["the agent ran and exited on its own"] == detail
