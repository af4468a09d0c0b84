"""`turngate agents` as a person meets it: the list, the check of one agent, and what is said where something is wrong."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.cli.kit import NAP, process, ran, refused
from tests.sandboxes import kit as sandboxes
from turngate.agents.spec import CATALOG

PRESETS = sorted(file.stem for file in CATALOG.glob("*.toml"))

# An agent of the user's own: the smallest loop that calls tools. It keeps a transcript, and may be told to skip its work.
OWN = '''
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
    file.write_text(OWN.replace("line WORK", "line"))
    return file


def test_the_list_has_every_preset() -> None:
    done = ran("agents")
    assert done.exit_code == 0
    for name in PRESETS:
        assert f"│ {name} " in done.stdout
    assert "shell" in PRESETS and "by the sandbox" in done.stdout
    assert "turngate agents check NAME" in done.stdout


def test_an_agent_of_ones_own_is_listed_and_one_in_a_presets_place_is_told(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    own = tmp_path / "more" / "pi.toml"
    own.write_text('name = "pi"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["x"]\n')
    done = ran("agents", env={"TURNGATE_AGENTS": os.pathsep.join([str(tiny), str(own)])})
    assert done.exit_code == 0
    assert "│ tiny " in done.stdout and "[bold]tiny[/]" in done.stdout  # not taken for markup
    assert f"pi: {own} overrides {CATALOG / 'pi.toml'}\n" in done.stdout


def test_a_wrong_file_of_ones_own_is_named(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('name = "wrong"\n')
    assert refused("agents", env={"TURNGATE_AGENTS": str(file)}).startswith(f"{file}: ")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert refused("agents", "check", "shell").startswith("agent shell has no [[check]] steps to run; ")
    assert "did you mean claude-code" in refused("agents", "check", "claude_code")
    assert refused("agents", "check", "pi", "--sandbox", "cloud").startswith(
        "sandbox must be one of local, bubblewrap, docker, e2b, huggingface, not 'cloud'"
    )
    assert refused("agents", "check", str(tmp_path / "none.toml")).endswith(
        "cannot be read (No such file or directory)"
    )
    assert refused("agents", "install", "nobody").startswith("unknown agent 'nobody'; available: claude-code, ")
    # All names are looked at before anything is installed.
    assert refused("agents", "install", "shell", "nobody").startswith("unknown agent 'nobody'")


def test_an_agent_that_needs_no_installing() -> None:
    done = ran("agents", "install", "shell")
    assert (done.exit_code, done.stdout) == (0, "shell: nothing to install\n")


@pytest.mark.process
def test_an_agent_of_ones_own_that_is_captured_whole(tiny: Path, tmp_path: Path) -> None:
    keep = tmp_path / "a folder to keep it in, with a long name, so that the line is longer than any terminal is wide"
    done = ran("agents", "check", str(tiny), "--keep", keep)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("│ yes │") == 7 and "│ NO" not in done.stdout
    assert "Recorded completely.\n" in done.stdout
    [look] = re.findall(r"^inspect: (turngate show .*)$", done.stdout, re.MULTILINE)
    shown = ran(*shlex.split(look)[1:])
    assert shown.exit_code == 0 and "agent tiny · task check · sandbox local" in shown.stdout
    assert "→ sh" in shown.stdout and "4 (4 main)" in shown.stdout


@pytest.mark.process
def test_an_agent_that_does_not_do_what_it_is_told(tiny: Path) -> None:
    """It calls no program, and leaves its transcript as it is: the task is not done, and that is said."""
    tiny.write_text(OWN.replace("line WORK", "str()"))
    done = ran("agents", "check", str(tiny))
    assert done.exit_code == 1
    assert "NOT recorded completely.\n" in done.stdout
    [failed] = [line for line in done.stdout.splitlines() if line.startswith("│ NO")]
    assert "the task is done" in failed


@pytest.mark.process
def test_an_agent_that_crashes(tiny: Path) -> None:
    tiny.write_text(OWN.replace("line WORK", "no_such_name"))
    done = ran("agents", "check", str(tiny))
    assert done.exit_code == 1 and "NameError" in done.stdout.replace("\n", "")


@pytest.mark.process
def test_ctrl_c_in_the_middle_of_a_check(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(OWN.replace("line WORK", f'"sleep {NAP}"'))
    with process("agents", "check", str(tiny), "--keep", tmp_path / "keep") as running:
        running.until(lambda: sandboxes.processes(f"sleep\0{NAP}"))
        running.send(signal.SIGINT)
        assert running.ended() == 130
        assert "Stopping" in running.output and running.output.endswith("turngate: stopped\n")
        assert "Traceback" not in running.output
    assert sandboxes.processes(NAP) == []
