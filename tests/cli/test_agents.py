"""`turngate agents`: list, check and install, and their errors."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.cli.kit import SLEEP_S, run_cli, run_rejected, start_cli
from tests.sandboxes import kit as sandboxes
from turngate.agents.spec import CATALOG, load_spec

PRESETS = sorted(file.stem for file in CATALOG.glob("*.toml"))

# A custom agent: a minimal tool loop with a transcript. `WORK` is replaced to make it fail.
CUSTOM_AGENT = '''
name = "tiny"
title = "A [bold]tiny[/] agent"
dialect = "chat"
command = ["python3", "{home}/tiny.py"]
stdin = "{prompt}"
[env]
BASE = "{base_url}/v1"
KEY = "{api_key}"
MODEL = "{model}"
[transcript]
path = "said.jsonl"
turn = "{text: content || '', calls: tool_calls[].function.{name: name, arguments: arguments}}"
[[files]]
path = "tiny.py"
content = """
import json, os, subprocess, sys, urllib.request
open_ = urllib.request.build_opener(urllib.request.ProxyHandler(dict())).open
tool = dict(type="function", function=dict(name="sh", parameters=dict(type="object", properties=dict(line=dict(type="string")))))
history = [dict(role="user", content=sys.stdin.read())]
while True:
    body = json.dumps(dict(model=os.environ["MODEL"], messages=history, tools=[tool])).encode()
    request = urllib.request.Request(os.environ["BASE"] + "/chat/completions", body, dict(authorization="Bearer " + os.environ["KEY"]))
    message = json.load(open_(request))["choices"][0]["message"]
    history.append(message)
    with open(os.environ["HOME"] + "/said.jsonl", "a") as file:
        file.write(json.dumps(message) + chr(10))
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        line = json.loads(call["function"]["arguments"])["line"]
        done = subprocess.run(["sh", "-c", line WORK], capture_output=True, text=True)
        history.append(dict(role="tool", tool_call_id=call["id"], content=done.stdout or "-"))
print(message["content"])
"""
[[check]]
calls = [{ tool = "sh", arguments = { line = "cat notes.txt" } }]
[[check]]
think = "I edit it."
calls = [{ tool = "sh", arguments = { line = "sed -i s/colour/color/ notes.txt" } }]
[[check]]
calls = [{ tool = "sh", arguments = { line = "cat notes.txt" } }, { tool = "sh", arguments = { line = "echo done > done.txt" } }]
[[check]]
say = "Done."
'''


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.toml"
    file.write_text(CUSTOM_AGENT.replace("line WORK", "line"))
    return file


def test_list_shows_every_preset() -> None:
    done = run_cli("agents")
    assert done.exit_code == 0
    for name in PRESETS:
        assert f"│ {name} " in done.stdout
    assert "shell" in PRESETS and "by the sandbox" in done.stdout
    assert "turngate agents check NAME" in done.stdout


def test_list_shows_custom_agents_and_overridden_presets(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    own = tmp_path / "more" / "pi.toml"
    own.write_text('name = "pi"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["x"]\n')
    done = run_cli("agents", env={"TURNGATE_AGENTS": os.pathsep.join([str(tiny), str(own)])})
    assert done.exit_code == 0
    assert "│ tiny " in done.stdout and "[bold]tiny[/]" in done.stdout  # not parsed as markup
    assert f"pi: {own} overrides {CATALOG / 'pi.toml'}\n" in done.stdout


def test_invalid_agent_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('name = "wrong"\n')
    assert run_rejected("agents", env={"TURNGATE_AGENTS": str(file)}).startswith(f"{file}: ")


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    assert run_rejected("agents", "check", "shell").startswith("agent shell has no [[check]] steps to run; ")
    assert "did you mean claude-code" in run_rejected("agents", "check", "claude_code")
    assert run_rejected("agents", "check", "pi", "--sandbox", "cloud").startswith(
        "--sandbox must be one of local, bubblewrap, docker, e2b, huggingface, not 'cloud'"
    )
    assert run_rejected("agents", "check", str(tmp_path / "none.toml")).endswith(
        "cannot be read (No such file or directory)"
    )
    assert run_rejected("agents", "install", "nobody").startswith("unknown agent 'nobody'; available: ")
    # All names are checked before anything is installed.
    assert run_rejected("agents", "install", "shell", "nobody").startswith("unknown agent 'nobody'")


def test_install_agent_without_installer() -> None:
    done = run_cli("agents", "install", "shell")
    assert (done.exit_code, done.stdout) == (0, "shell: nothing to install\n")


@pytest.mark.process
def test_check_passes_for_custom_agent(tiny: Path, tmp_path: Path) -> None:
    keep = tmp_path / "a folder to keep it in, with a long name, so that the line is longer than any terminal is wide"
    done = run_cli("agents", "check", str(tiny), "--keep", keep)
    assert done.exit_code == 0, done.output
    assert "tiny in the local sandbox (turns: 4, " in done.stdout  # it has no version
    assert done.stdout.count("│ yes │") == 9 and "│ NO" not in done.stdout
    assert "Everything was recorded.\n" in done.stdout
    [command] = re.findall(r"^inspect: (turngate show .*)$", done.stdout, re.MULTILINE)
    shown = run_cli(*shlex.split(command)[1:])
    assert shown.exit_code == 0 and "agent tiny · task check · sandbox local" in shown.stdout
    assert "→ sh" in shown.stdout and "4 (4 main)" in shown.stdout


@pytest.mark.process
def test_check_fails_if_task_is_not_done(tiny: Path) -> None:
    """The agent runs an empty command, so the task is not done."""
    tiny.write_text(CUSTOM_AGENT.replace("line WORK", "str()"))
    done = run_cli("agents", "check", str(tiny))
    assert done.exit_code == 1
    assert "1 of 9 checks failed.\n" in done.stdout
    [failed] = [line for line in done.stdout.splitlines() if line.startswith("│ NO")]
    assert "the task is done" in failed


@pytest.mark.process
def test_check_reports_crashing_agent(tiny: Path) -> None:
    tiny.write_text(CUSTOM_AGENT.replace("line WORK", "no_such_name"))
    done = run_cli("agents", "check", str(tiny))
    assert done.exit_code == 1 and "NameError" in done.stdout.replace("\n", "")


@pytest.mark.process
def test_ctrl_c_stops_check(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(CUSTOM_AGENT.replace("line WORK", f'"sleep {SLEEP_S}"'))
    with start_cli("agents", "check", str(tiny), "--keep", tmp_path / "keep") as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        running.send(signal.SIGINT)
        assert running.wait_for_exit() == 130
        assert "Stopping" in running.output and running.output.endswith("turngate: stopped\n")
        assert "Traceback" not in running.output
    assert sandboxes.processes(SLEEP_S) == []


# ---- agents new ----

# Reads its endpoint from the variables of OpenAI's SDK.
NEW_AGENT = """
import json, os, subprocess, sys, urllib.request
open_ = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
properties = {"command": {"type": "string"}, "why": {"type": "string"}}
tool = {"name": "run_command", "parameters": {"type": "object", "properties": properties, "required": ["command", "why"]}}
history = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": history, "tools": [{"type": "function", "function": tool}]}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-session-id": "one"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    message = json.load(open_(request))["choices"][0]["message"]
    history.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        history.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout or "-"})
"""


@pytest.mark.process
def test_new_agent_is_described_and_passes_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(NEW_AGENT)
    done = run_cli(
        "agents",
        "new",
        "mine",
        "--env",
        "GH_TOKEN=ghp_SECRET",
        "--",
        "python3",
        tmp_path / "agent.py",
        "--key=ghp_SECRET",
    )
    assert done.exit_code == 0, done.output
    assert "requests: POST /v1/chat/completions\n" in done.stdout
    assert "tools offered: run_command\n" in done.stdout
    assert (
        "values that look like secrets were left out of these fields in mine.toml: command, env.GH_TOKEN; add them if"
        in done.stdout
    )
    assert "ghp_SECRET" not in done.output + (tmp_path / "mine.toml").read_text()
    assert "wrote mine.toml; now run: turngate agents check ./mine.toml" in done.stdout
    spec = load_spec(tmp_path / "mine.toml")
    assert list(spec.env) == ["OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "GH_TOKEN"]
    assert (spec.dialect, spec.signals.thread) == ("chat", ("header:x-session-id",))
    checked = run_cli("agents", "check", "./mine.toml")
    assert checked.exit_code == 0, checked.output
    assert "tools offered: run_command\n" in checked.stdout
    assert (
        run_rejected("agents", "new", "mine", "--", "true")
        == "mine.toml already exists; move it, or choose a different name"
    )


@pytest.mark.process
def test_new_agent_that_does_not_reach_the_model_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli("agents", "new", "mine", "--", "sh", "-c", "echo no endpoint; exit 3")
    assert done.exit_code == 2
    assert (
        "mine: the command made no request to the gateway and ended with exit code 3; it printed: no endpoint"
        in done.stderr
    )
    assert "--env NAME={base_url}/v1" in done.stderr
    assert not (tmp_path / "mine.toml").exists()
    assert "--env must be NAME=VALUE, not 'X'" in run_rejected("agents", "new", "mine", "--env", "X", "--", "true")
