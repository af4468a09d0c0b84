"""The first description of an agent, written from what one run showed."""

from __future__ import annotations

from typing import Any

import pytest

from turngate.agents.spec import AgentSpec, parse_spec
from turngate.errors import AgentError
from turngate.rollout.agent_draft import find_secrets, find_shell_tool, write_description
from turngate.rollout.agent_watch import MODEL, WatchedRun
from turngate.rollout.call_log import LoggedCall
from turngate.rollout.redaction import redact_command
from turngate.trace.signals import is_model_alias
from turngate.types import Tool


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name, {"type": "function", "function": {"name": name, "parameters": schema}})


TEXT = {"type": "string"}
BASH = tool("bash", ("command",), command=TEXT, timeout={"type": "number"})


def model_call(**fields: Any) -> LoggedCall:
    standard = {"method": "POST", "path": "/v1/chat/completions", "dialect": "chat", "samples": True, "status": 200}
    return LoggedCall(**{"model": MODEL, **standard, **fields})


def watched(
    *calls: LoggedCall, variables: tuple[str, ...] = (), exit_code: int | None = 0, output: str = ""
) -> WatchedRun:
    return WatchedRun(calls=calls, variables=variables, exit_code=exit_code, output=output)


def draft(run: WatchedRun, *command: str, **env: str) -> AgentSpec:
    return parse_spec(write_description("mine", command or ("mine", "run"), env, run), "mine.toml")


def test_description_of_agent_with_shell_tool() -> None:
    run = watched(model_call(tools=(BASH,)), variables=("OPENAI_BASE_URL", "OPENAI_API_KEY"))
    spec = draft(run)
    assert (spec.name, spec.dialect, spec.command, spec.stdin) == ("mine", "chat", ("mine", "run"), "{prompt}")
    assert spec.env == {
        "OPENAI_BASE_URL": "{base_url}/v1",
        "OPENAI_API_KEY": "{api_key}",
        "OPENAI_MODEL": "{model}",
    }
    assert spec.shell_call is not None and spec.shell_call.arguments == {"command": "{command}"}
    assert [call.arguments["command"] for step in spec.check for call in step.calls][-1] == "echo done > done.txt"
    assert spec.check_task and not spec.check[-1].calls


def test_prompt_in_command_needs_no_stdin() -> None:
    run = watched(model_call(), variables=("command",))
    spec = draft(run, "mine", "--url", "{base_url}/v1", "--message", "{prompt}", MINE_KEY="{api_key}")
    assert (spec.stdin, spec.env) == ("", {"MINE_KEY": "{api_key}"})
    assert spec.command[-1] == "{prompt}"


def test_agent_without_tools_does_not_do_the_task() -> None:
    spec = draft(watched(model_call()))
    assert not spec.check_task and spec.shell_call is None
    assert [step.calls for step in spec.check] == [()]


def test_several_dialects_are_any() -> None:
    assert draft(watched(model_call(), model_call(dialect="messages"))).dialect == "any"
    assert draft(watched(model_call(dialect="responses"))).dialect == "responses"


def test_temperature_and_session_header_are_noted() -> None:
    call = model_call(sampling={"temperature": 0}, headers=("accept", "x-session-id"))
    text = write_description("mine", ["mine"], {}, watched(call))
    assert "\n# The agent asks for temperature 0. " in text
    assert 'thread = ["header:x-session-id"]' in text


def test_other_models_are_served_as_side_calls() -> None:
    title = model_call(model="small[1m]", status=404, error="model 'small[1m]' does not exist")
    spec = draft(watched(model_call(headers=("x-session-id",)), title, title))
    assert spec.signals.models == {"small[[]1m]": "side"}
    assert spec.signals.thread == ("header:x-session-id",)
    assert is_model_alias(spec.signals, "small[1m]") and not is_model_alias(spec.signals, "small1")


def test_secrets_are_not_written() -> None:
    command = ["mine", "--token", "ghp_SECRET", "--url", "{base_url}/v1"]
    env = {
        "GITHUB_TOKEN": "ghp_SECRET",
        "PASSWORD": "abc",
        "MINE_KEY": "{api_key}",
        "MAX_TOKENS": "4096",
        "MODE": "fast",
    }
    text = write_description("mine", command, env, watched(model_call()))
    spec = parse_spec(text, "mine.toml")
    assert "ghp_" not in text and "abc" not in text
    assert spec.env == {
        "GITHUB_TOKEN": "",
        "PASSWORD": "",
        "MINE_KEY": "{api_key}",
        "MAX_TOKENS": "4096",
        "MODE": "fast",
    }
    assert spec.command == ("mine", "--token", "[secret]", "--url", "{base_url}/v1")
    assert find_secrets(command, env) == ["command", "env.GITHUB_TOKEN", "env.PASSWORD"]
    assert find_secrets(["mine", "{prompt}"], {"MINE_KEY": "{api_key}"}) == []


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["a", "--api-key=sk-1234"], ["a", "--api-key=[secret]"]),
        (["a", "--api-key={api_key}", "--max-tokens", "4096"], ["a", "--api-key={api_key}", "--max-tokens", "4096"]),
        (["a", "--token", "--verbose"], ["a", "--token", "--verbose"]),
        (["env", "GH_TOKEN=ghp_1", "a", "keys"], ["env", "GH_TOKEN=[secret]", "a", "keys"]),
        (["sh", "-c", "GH_TOKEN=ghp_1 a --key 'x y'"], ["sh", "-c", "GH_TOKEN=[secret] a --key '[secret]'"]),
        (["sh", "-c", 'a --key "$GH_KEY"'], ["sh", "-c", 'a --key "$GH_KEY"']),
        (["a", '{"api_key": "sk-1", "max_tokens": 10}'], ["a", '{"api_key": "[secret]", "max_tokens": 10}']),
        (["a", "-c", "key = os.environ['OPENAI_API_KEY']"], ["a", "-c", "key = os.environ['OPENAI_API_KEY']"]),
        (["a", "http://me:pass1@host/x?token=t1"], ["a", "http://[secret]@host/x?token=[secret]"]),
        (["a", "-H", "Authorization: Bearer abcdefgh1"], ["a", "-H", "Authorization: Bearer [secret]"]),
    ],
)
def test_secrets_in_commands(command: list[str], shown: list[str]) -> None:
    assert redact_command(command) == shown


@pytest.mark.parametrize("name", ['x\ncommand = ["sh", "-c", "evil"]', 'x"]\n[install]', "x\r\x00\x7f", "\ud800", ""])
def test_names_from_the_program_are_quoted(name: str) -> None:
    run = watched(model_call(tools=(tool(name, (name,), **{"command": TEXT, name: TEXT}),)))
    text = write_description("mine", ["mine"], {name: "v"}, run)
    spec = parse_spec(text.encode().decode(), "mine.toml")
    assert (spec.command, spec.install.program) == (("mine",), "")
    assert spec.shell_call is not None and spec.shell_call.tool == name.replace("\ud800", r"\ud800")


@pytest.mark.parametrize(
    ("tools", "name", "arguments"),
    [
        ((tool("read", path=TEXT), BASH), "bash", {"command": "{command}"}),
        ((tool("exec_command", ("cmd",), cmd=TEXT),), "exec_command", {"cmd": "{command}"}),
        ((tool("note", command=TEXT), tool("run_shell", command=TEXT)), "run_shell", {"command": "{command}"}),
        (
            (
                tool(
                    "sh",
                    ("command", "description", "wait", "s"),
                    command=TEXT,
                    description=TEXT,
                    wait={"type": "boolean"},
                    s={"type": "integer"},
                ),
            ),
            "sh",
            {"command": "{command}", "description": "Run the command", "wait": False, "s": 60},
        ),
        (
            (tool("mode", ("command", "how"), command=TEXT, how={"enum": ["a", "b"]}),),
            "mode",
            {"command": "{command}", "how": "a"},
        ),
    ],
)
def test_shell_tool(tools: tuple[Tool, ...], name: str, arguments: dict[str, Any]) -> None:
    found = find_shell_tool(tools)
    assert found is not None and (found.name, found.arguments) == (name, arguments)


@pytest.mark.parametrize("tools", [(), (tool("edit", path=TEXT),), (tool("bash", command={"type": "array"}),)])
def test_no_shell_tool(tools: tuple[Tool, ...]) -> None:
    assert find_shell_tool(tools) is None


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            watched(exit_code=127, output="mine: not found"),
            "exit code 127, which usually means that a program was not found; it printed: mine: not found",
        ),
        (
            watched(LoggedCall(method="HEAD", path="/", status=200), exit_code=127),
            "exit code 127, which usually means that a program was not found; it printed nothing",
        ),
        (
            watched(model_call(status=400, error="messages is missing"), exit_code=127),
            "no model call succeeded; the first returned status 400: messages is missing",
        ),
        (
            watched(model_call(status=0), exit_code=1, output="timed out"),
            "no model call got a response, and the command ended with exit code 1; it printed: timed out",
        ),
        (
            watched(model_call(status=0), model_call(status=503, error="stopping")),
            "no model call succeeded; the first returned status 503: stopping",
        ),
        (watched(exit_code=0), r"made no request to the gateway and ended with exit code 0; it printed nothing; pass"),
        (watched(exit_code=None), "did not end in time"),
        (
            watched(LoggedCall(method="POST", path="/chat/completions", status=404)),
            r"made no model call, only these requests: POST /chat/completions; check the path of its base URL",
        ),
        (
            watched(model_call(model="gpt-9", status=404, error="model gpt-9 is not served")),
            r"no model call succeeded; the first returned status 404: model gpt-9 is not served; "
            r"pass the model's name as \{model\}, not gpt-9",
        ),
    ],
)
def test_run_that_did_not_reach_the_model_is_explained(run: WatchedRun, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        write_description("mine", ["mine"], {}, run)


def test_exit_code_after_a_successful_call_does_not_matter() -> None:
    assert 'name = "mine"' in write_description("mine", ["mine"], {}, watched(model_call(), exit_code=127))
