"""`turngate run`: its output, errors and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from tests.cli import test_serve
from tests.cli.kit import CALL_ONCE, ROOT, SLEEP_S, outcome_of, run_cli, run_rejected, sessions, shell_run, start_cli
from tests.engines.standins import StandIn, serving
from tests.kit import gateway
from tests.speed import paced, scaled
from turngate import tasks
from turngate.cli.gateway_choice import GatewayChoice
from turngate.cli.run import _show_flags
from turngate.config import ServeConfig
from turngate.render import BUILTIN_TOKENIZER
from turngate.server.bind import RunningGateway
from turngate.server.run import run_in_thread
from turngate.telemetry.logs import REDACTED

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.usefixtures("own_temporary_folder")]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--task", "x", "--prompt", "y"], "pass either --task PATH or --prompt TEXT, not both"),
        (["--prompt", ""], "task: prompt is empty; describe what the agent should do"),
        (["--task", "/no/such/task"], "task: /no/such/task does not exist; specify a folder with an instruction.md"),
        (["--task", "x" * 300], f"task: {'x' * 300} does not exist; specify a folder"),
        (["--tokenizer", "x" * 300], f"tokenizer: '{'x' * 300}' is neither a folder nor a model"),
        (["--prompt", " "], "task: prompt is empty; describe what the agent should do"),
        (["--prompt", "x", "--network", "some"], "--network must be none or open, not 'some'"),
        (
            ["--prompt", "x", "--sandbox", "vm"],
            "--sandbox must be one of local, bubblewrap, docker, e2b, huggingface, not 'vm'",
        ),
        (["--prompt", "x"], "shell needs a command; add it after --, as in `turngate run --agent shell -- COMMAND`"),
        ([], "shell needs a command; add it after --, as in `turngate run --agent shell -- COMMAND`"),
        (
            ["--set", "command=x", "--", "y"],
            "the command is set both after -- and with --set command=…; remove one of them",
        ),
        (["--prompt", "x", "--set", "command"], "--set must be NAME=VALUE, not 'command'"),
        (["--prompt", "x", "--set", "comand=x"], "options.comand: shell has no such option; did you mean command?"),
        (["--prompt", "x", "--timeout", "0"], "--timeout must be greater than 0, not 0.0"),
        (["--prompt", "x", "--timeout", "nan"], "--timeout must be greater than 0, not nan"),
        (["--prompt", "x", "--timeout", "inf"], "--timeout must be finite, not inf"),
        (["--prompt", "x", "--max-turns", "-1"], "--max-turns must be greater than 0, not -1"),
        (["--prompt", "x", "--memory-mb", "0"], "--memory-mb must be greater than 0, not 0"),
        (["--prompt", "x", "--script", "/no/file"], "script /no/file cannot be read: No such file or directory"),
        (["--prompt", "x", "--engine", "vlm"], "--engine must be one of vllm, sglang, "),
        (
            ["--prompt", "x", "--engine-url", "http://x"],
            "--engine-url cannot be set with the engine 'scripted' (the default)",
        ),
        (["--prompt", "x", "--public-url", "here"], "--public-url must be an http(s) URL, not 'here'"),
        (
            ["--prompt", "x", "--public-url", "http://x", "--tunnel", "y"],
            "--public-url cannot be combined with a tunnel; set only one of them",
        ),
        (["--prompt", "x", "--gateway", "here"], "TURNGATE_ADMIN_KEY is not set; set it to the gateway's admin key"),
        (
            ["--prompt", "x", "--gateway", "http://x", "--engine", "vllm"],
            "--engine cannot be set for the running gateway at http://x; remove --engine",
        ),
        (
            ["--prompt", "x", "--out", "/dev/null/x"],
            "out: /dev/null is not a folder; choose a different --out folder",
        ),
    ],
)
def test_invalid_option_is_named(arguments: list[str], line: str, data: Path) -> None:
    command = ["--set", "command=true"] if "needs a command" not in line and "--set" not in arguments else []
    assert run_rejected("run", "--agent", "shell", "--data", data, *command, *arguments).startswith(line)
    assert not (data / "rollouts").exists()


def test_batch_on_a_shared_store_needs_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "instruction": "Say hello."}\n')
    arguments = (
        "--tasks",
        file,
        "--agent",
        "shell",
        "--set",
        "command=true",
        "--data",
        "postgresql://localhost/nowhere",
    )
    line = run_rejected("batch", *arguments)
    assert line == "--data must be a folder; to use a shared store, also pass --ray, or the URL of a cell as --gateway"


@pytest.mark.parametrize("words", [("--", "echo", "two words"), ("fix the bug",)])
def test_only_shell_accepts_a_command(words: tuple[str, ...], data: Path) -> None:
    line = run_rejected("run", "--data", data, *words)
    command = shlex.join(word for word in words if word != "--")
    assert line == (
        f"mini-swe-agent does not take a command, but one was passed ({command}); pass an instruction as --prompt TEXT, a task as "
        "--task PATH, or a command to --agent shell"
    )


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("hf://org/name@train", "a data set"),
        ("rows.py:load", "a function that returns tasks"),
        ("package.rows:load", "a function that returns tasks"),
    ],
)
def test_source_of_several_tasks_is_not_one_task(source: str, kind: str, data: Path) -> None:
    assert run_rejected("run", "--data", data, "--task", source) == (
        f"task: {source} is {kind}, not one task; run its tasks with `turngate batch --tasks {source}`, or specify one task: "
        "a folder with an instruction.md, or a text file"
    )


PYTHON_AGENT = """
name = "mine"
title = "M"
dialect = "chat"
command = ["{python}", "{install}"]

[install]
pip = "no-such-package"
version = "1"
python = "VERSION"
"""


def test_missing_python_is_reported_before_installing(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PYTHON_AGENT.replace("VERSION", "3.99"))
    line = run_rejected("run", "--agent", file, "--prompt", "x", "--data", data)
    assert line.startswith("mine needs python3.99, which is not installed on this machine; install it")


def test_python_outside_the_path_is_found(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PYTHON_AGENT.replace("VERSION", "{}.{}".format(*sys.version_info)))
    env = {"PATH": "/nowhere", "TURNGATE_CACHE": str(data), "PIP_NO_INDEX": "1"}
    outcome = run_cli("run", "--agent", file, "--prompt", "x", "--data", data, env=env)
    assert outcome.exit_code == 2 and "no-such-package" in outcome.stderr, outcome.output
    assert "not installed on this machine" not in outcome.output


def test_unknown_agent_suggests_name(data: Path) -> None:
    line = run_rejected("run", "--agent", "claud-code", "--prompt", "x", "--data", data)
    assert line.startswith("unknown agent 'claud-code'; did you mean claude-code")


def test_invalid_agent_file_names_field(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, wrong in {
        'name = "mine"\ntitle = "M"\ndialect = "chat"\ncomand = ["x"]\n': "command",
        'name = "mine"\ntitle = "M"\ndialect = "chats"\ncommand = ["x"]\n': "dialect",
        'name = "mine"\ntitle = "M"\ndialect = "chat"\ncommand = ["x", "{api_key}"]\n': "command[1]",
        'name = "mine"\ntitle = "M"\ndialect = "chat"\ncommand = ["{modle}"]\n': "command[0]",
    }.items():
        file.write_text(text)
        line = run_rejected("run", "--agent", str(file), "--prompt", "x", "--data", data)
        assert line.startswith(f"{file}: ") and wrong in line


def test_unreachable_gateway_and_invalid_url(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.cli.gateway_choice.START_S", 0)
    key = {"TURNGATE_ADMIN_KEY": "k" * 20}
    line = run_rejected(*shell_run(data, "true", "--gateway", "http://127.0.0.1:9"), env=key)
    assert line == "gateway: nothing is listening at http://127.0.0.1:9; start a gateway with `turngate serve`"
    for url in ("here", "http://[", "http://:80"):
        line = run_rejected(*shell_run(data, "true", "--gateway", url), env=key)
        assert line == f"gateway: {url!r} is not an http(s) URL; pass a URL such as http://127.0.0.1:8700"


async def test_wrong_admin_key_is_rejected(data: Path) -> None:
    async with gateway() as g:
        with start_cli(*shell_run(data, "true", "--gateway", g.root), TURNGATE_ADMIN_KEY="wrong" * 5) as running:
            assert await asyncio.to_thread(running.wait_for_exit) == 2
        assert running.output == (
            f"turngate: gateway: {g.root} rejected the key; use the key in the file admin-key in the gateway's data folder, the "
            "TURNGATE_ADMIN_KEY that the gateway was started with, or a valid API key\n"
        )
        assert "wrong" * 5 not in running.output
        assert not data.exists()


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_finished_run(data: Path) -> None:
    done = run_cli(*shell_run(data, CALL_ONCE))
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    lines = done.stdout.splitlines()
    stages = [line.split()[1] for line in lines if line[0].isdigit()]
    assert [stage for n, stage in enumerate(stages) if stage not in stages[:n]] == [
        *("sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "done")
    ]
    outcome = outcome_of(data)
    assert "\x1b" not in done.stdout
    assert any(line.startswith("finished (exit code 0) after ") for line in lines)
    assert f"  trace   1 turn (1 main), {outcome['sampled_tokens']} sampled tokens, 1 row" in lines
    assert f"  inspect turngate show {outcome['session']} --data {data}" in lines
    assert f"  files   {data / 'rollouts' / outcome['session']}" in lines
    assert "  sandbox local does not enforce: network" in lines
    assert (outcome["status"], outcome["exit_code"], outcome["agent"]) == ("finished", 0, "shell")
    assert sessions(data) == [("sealed", "")]
    assert oct((data).stat().st_mode & 0o777) == "0o700"


def test_words_after_dashes_are_the_command(data: Path) -> None:
    """They arrive unchanged, even flags. No task is needed."""
    words = ["printf", "%s\\n", "two  words", "it's", "$HOME", "--task", "*"]
    done = run_cli("run", "--agent", "shell", "--data", data, "--", *words)
    assert done.exit_code == 0, done.output
    outcome = outcome_of(data)
    assert outcome["collected"]["stdout"].splitlines() == ["two  words", "it's", "$HOME", "--task", "*"]
    assert (outcome["task"], outcome["kind"], outcome["reward"]) == ("command", None, None)
    assert "note" not in done.stdout


def test_task_without_tests_has_no_grade(data: Path) -> None:
    done = run_cli(*shell_run(data, "true"))
    assert "  grade   none: the task has no tests, so there is no reward; pass --task" in done.stdout


def test_files_are_kept_in_the_local_folder_of_a_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "postgresql://user@db/turngate"
    monkeypatch.chdir(tmp_path)
    with run_in_thread(gateway()) as g:
        monkeypatch.setenv("TURNGATE_ADMIN_KEY", g.app.admin_key)
        done = run_cli(*shell_run(Path(), "true", "--gateway", g.root, "--data", shared))
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["turngate-data"]
    assert f"  files   {ServeConfig(data=shared).folder / 'rollouts'}/" in done.stdout


@pytest.mark.parametrize(
    ("engine", "flags"), [("vllm", ("--model", "m", "--tokenizer", BUILTIN_TOKENIZER)), ("openai", ()), ("gemini", ())]
)
def test_engine_that_is_down_is_reported_before_the_agent_starts(
    engine: str, flags: tuple[str | Path, ...], data: Path
) -> None:
    done = run_cli(*shell_run(data, "true", "--engine", engine, "--engine-url", "http://127.0.0.1:9", *flags))
    assert done.exit_code == 2 and "sandbox" not in done.stdout
    assert done.stderr.splitlines()[-1] == (
        f"turngate: --engine-url: no engine can be used (http://127.0.0.1:9: the connection to {engine} failed: connection "
        "refused); check that the engine has started and serves the model, and that --engine-url is its address"
    )
    assert not data.exists() or sessions(data) == []


@pytest.mark.parametrize("status", [401, 404, 503])
def test_observed_endpoint_may_answer_with_any_status(status: int, data: Path) -> None:
    with run_in_thread(serving(StandIn(documents={"/": status}))) as server:
        done = run_cli(*shell_run(data, "true", "--engine", "openai", "--engine-url", server.url))
    assert done.exit_code == 0, done.output


def test_slow_observed_endpoint_does_not_stop_the_run(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.engines.http.PROBE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = run_cli(*shell_run(data, "true", "--engine", "openai", "--engine-url", url))
    assert done.exit_code == 0, done.output


def test_command_exit_code_is_the_agents(data: Path) -> None:
    done = run_cli("run", "--agent", "shell", "--data", data, "--json", "--", "sh", "-c", "exit 7")
    outcome = json.loads(done.stdout)
    assert (done.exit_code, outcome["status"], outcome["exit_code"]) == (1, "failed", 7)


def test_missing_replay_is_explained(data: Path, tmp_path: Path) -> None:
    """A scripted model cannot solve the task with the shell agent, which has no shell tool."""
    done = run_cli(*shell_run(data, CALL_ONCE, "--task", tasks.BUNDLED_TASK))
    [note] = [line for line in done.stdout.splitlines() if line.startswith("  note ")]
    assert "  grade   reward 0 (graded)" in done.stdout
    assert "no reference solution was replayed, because the description of the agent shell has no [shell_call]" in note
    assert "--engine" in note and "--script FILE" in note


def test_inspect_command_is_one_quoted_line(tmp_path: Path) -> None:
    """Even if the folder name is long and has special characters."""
    data = tmp_path / ("long folder [red]name[/red] :bomb: " * 4).strip()
    done = run_cli(*shell_run(data, "true"))
    outcome = outcome_of(data)
    [inspect] = [line for line in done.stdout.splitlines() if line.startswith("  inspect ")]
    assert inspect == f"  inspect turngate show {outcome['session']} --data {shlex.quote(str(data))}"
    shown = run_cli(*shlex.split(inspect)[2:])
    assert shown.exit_code == 0 and outcome["session"] in shown.stdout


def test_gateway_in_inspect_command_is_quoted() -> None:
    """A shell would expand the brackets of an IPv6 address."""
    flags = _show_flags(ServeConfig(), GatewayChoice("http://[::1]:8700"))
    assert flags == " --gateway 'http://[::1]:8700'"


def test_failed_run_prints_agent_output(data: Path) -> None:
    done = run_cli(*shell_run(data, "echo one; echo two >&2; printf '[red]\\033[31mthree :bomb:\\n' >&2; exit 3"))
    assert done.exit_code == 1
    assert "failed (exit code 3) after " in done.stdout
    assert "  output  two\n  output  [red]␛[31mthree :bomb:\n" in done.stdout
    assert "\x1b" not in done.stdout and "1 row" not in done.stdout


def test_run_reaches_limit(data: Path) -> None:
    done = run_cli(*shell_run(data, f"{CALL_ONCE}; {CALL_ONCE}", "--max-turns", "1"))
    assert done.exit_code == 1
    assert "limit (exit code 0) after " in done.stdout and "\n  limit   turns\n" in done.stdout
    assert outcome_of(data)["stop"] == "turns"


def test_run_times_out(data: Path) -> None:
    done = run_cli(*shell_run(data, f"{CALL_ONCE}; sleep {SLEEP_S}", "--timeout", str(paced(1))))
    assert done.exit_code == 1
    assert "timed out after " in done.stdout
    assert "  trace   1 turn (1 main)" in done.stdout and ", kept\n" in done.stdout
    assert sessions(data) == [("sealed", "timed out")]


def test_failed_setup_is_a_fault(data: Path, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "instruction.md").write_text("Do it.")
    (tmp_path / "task" / "setup.sh").write_text("echo no such thing >&2; exit 4")
    done = run_cli(*shell_run(data, "true", "--task", tmp_path / "task"))
    assert done.exit_code == 3
    assert "error after " in done.stdout
    assert "  fault   task, in stage setup: the setup script failed with exit code 4: no such thing\n" in done.stdout
    assert sessions(data) == []


@pytest.mark.parametrize(
    ("script", "reason", "output"),
    [
        (
            "set -e\necho begin\nno-such-program",
            "(exit code 127): it wrote neither reward.txt nor reward.json to $TURNGATE_LOGS/verifier; on the untouched",
            ["begin", "$TURNGATE_TESTS/test.sh: line 3: no-such-program: command not found"],
        ),
        (
            "exit 3",
            "(exit code 3): it wrote neither reward.txt nor reward.json to $TURNGATE_LOGS/verifier; the script printed nothing; on",
            [],
        ),
        (
            "printf 'first\\n\\033[31m3 of 4\\n'; echo 3/4 > $TURNGATE_LOGS/verifier/reward.txt",
            "(exit code 0): reward.txt must contain a finite number, not b'3/4\\n'; on the untouched task",
            ["first", "␛[31m3 of 4"],
        ),
        (
            "(echo 1 > /logs/verifier/none/reward.txt) 2>&-; echo last",
            '; the script uses /logs/verifier, but in the local sandbox the folder is elsewhere: use "${TURNGATE_LOGS:-/logs}/verifier";',
            ["last"],
        ),
    ],
)
def test_broken_grading_script_is_explained(
    script: str, reason: str, output: list[str], data: Path, tmp_path: Path
) -> None:
    (tmp_path / "task" / "tests").mkdir(parents=True)
    (tmp_path / "task" / "instruction.md").write_text("Do it.")
    (tmp_path / "task" / "tests" / "test.sh").write_text(script)
    done = run_cli(*shell_run(data, "true", "--task", tmp_path / "task"))
    assert done.exit_code == 3 and "  grade   no reward (invalid task)\n" in done.stdout
    outcome = outcome_of(data)
    assert outcome["reward"] is None
    start = done.stdout.index("  reason  ")
    shown = done.stdout[start : done.stdout.index("  note    ")].splitlines()
    assert shown[0].startswith("  reason  the grader's script gave no reward (exit code ") and reason in shown[0]
    assert "on the untouched task, the grader fails in the same way" in shown[0]
    assert shown[-len(output) or 1 :] == [f"{'':10}{line}" for line in output]
    log = data / "rollouts" / outcome["session"] / "grade.log"
    assert f"  note    the grader's complete output is in {log}\n" in done.stdout and log.is_file()
    assert all(done.stdout.count(line) == 1 for line in (reason, *output))


def test_reason_of_a_rubrics_part_is_printed_once(data: Path, tmp_path: Path) -> None:
    """The reason does not contain the agent's secret, although the graded work does."""
    (tmp_path / "task" / "tests").mkdir(parents=True)
    (tmp_path / "task" / "instruction.md").write_text("Do it.")
    (tmp_path / "task" / "task.toml").write_text('[[turngate.rubric]]\nname = "style"\nscript = "style.sh"\n')
    (tmp_path / "task" / "tests" / "style.sh").write_text("cat key || exit 4; echo broken; exit 3")
    done = run_cli(*shell_run(data, "echo key=$OPENAI_API_KEY > key", "--task", tmp_path / "task"))
    part = "  style: none (weight 1) the grader's script gave no reward (exit code 3): "
    assert f"\n          key={REDACTED}\n          broken\n" in done.stdout
    assert part in done.stdout and done.stdout.count("exit code 3") == done.stdout.count("broken") == 1, done.stdout


def test_missing_agent_program_is_a_fault(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["no-such-program"]\n')
    done = run_cli("run", "--agent", str(file), "--prompt", "x", "--data", data)
    assert done.exit_code == 3
    assert "  fault   agent, in stage launch: mine: no-such-program was not found in the local" in done.stdout


def test_json_output(data: Path) -> None:
    done = run_cli(*shell_run(data, CALL_ONCE, "--json"))
    assert done.exit_code == 0
    outcome = json.loads(done.stdout)
    assert outcome == outcome_of(data)
    assert (outcome["turns"], outcome["rows"], outcome["roles"]) == (1, 1, {"main": 1})
    assert "agent" in done.stderr and "\x1b" not in done.stderr  # progress goes to stderr


def test_out_folder(data: Path, tmp_path: Path) -> None:
    done = run_cli(*shell_run(data, "echo x > file", "--out", tmp_path / "out" / "there"))
    assert done.exit_code == 0
    [folder] = (tmp_path / "out" / "there").iterdir()
    assert (folder / "work" / "file").read_text() == "x\n" and (folder / "outcome.json").is_file()
    assert not (data / "rollouts").exists()


def test_custom_script_and_model(data: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('["Said as told."]')
    words = shell_run(
        data, f"{CALL_ONCE}; echo $TURNGATE_MODEL", "--script", tmp_path / "script.json", "--model", "policy-1"
    )
    done = run_cli(*words)
    assert done.exit_code == 0 and "is only a name" not in done.stdout
    assert outcome_of(data)["collected"]["stdout"] == "Said as told.\npolicy-1\n"


def test_model_without_engine_is_noted_before_the_run(data: Path) -> None:
    done = run_cli(*shell_run(data, "true", "--model", "policy-1"))
    assert done.exit_code == 0
    note = "The engine is scripted, so the model policy-1 is only a name. Pass --engine to use a real model."
    assert done.stdout.splitlines()[0] == note


@pytest.mark.parametrize(
    "prompt", ["-rf --help", "--", 'it\'s "so"\n$HOME `x`', "Grüße 🎉 \x1b[31m", "{prompt} {{x}} %s", "=" * 1000]
)
def test_prompt_reaches_agent_unchanged(prompt: str, data: Path) -> None:
    done = run_cli(*shell_run(data, 'cat > got; cmp got "$TURNGATE_PROMPT_FILE"', prompt=prompt))
    assert done.exit_code == 0, done.output
    [folder] = (data / "rollouts").iterdir()
    assert (folder / "work" / "got").read_bytes() == prompt.encode()


def test_long_task_reaches_agent_unchanged(data: Path, tmp_path: Path) -> None:
    text = "word é\n" * 20_000
    (tmp_path / "task.md").write_text(text)
    assert run_cli(*shell_run(data, "cat > got", "--task", tmp_path / "task.md")).exit_code == 0
    [folder] = (data / "rollouts").iterdir()
    assert (folder / "work" / "got").read_bytes() == text.encode()


def test_custom_agent_overriding_preset_is_reported(data: Path, tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    file = tmp_path / "agents" / "mine.toml"
    file.write_text(
        'name = "pi"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["echo", "{greeting}"]\n'
        '[options.greeting]\nabout = "what to say"\ndefault = "hello"\n'
    )
    env = {"TURNGATE_AGENTS": str(tmp_path / "agents")}
    done = run_cli("run", "--agent", "pi", "--prompt", "x", "--data", data, "--set", "greeting=ho", env=env)
    assert done.exit_code == 0 and outcome_of(data)["collected"]["stdout"] == "ho\n"
    assert done.stderr.startswith(f"agent pi: {file} overrides ") and "catalog/pi.toml" in done.stderr


# ── choice of gateway ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_gateway_serving_the_folder_is_used(data: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('["From the one that serves."]')
    with test_serve.start_serve(data, "--script", tmp_path / "script.json", "--model", "policy-7") as served:
        done = run_cli(*shell_run(data, CALL_ONCE))
        assert done.exit_code == 0, done.output
        note = f"Using the gateway at {served.url}, which already serves {data}, and its scripted engine"
        assert done.stdout.splitlines()[0] == note
        outcome = outcome_of(data)
        assert (outcome["collected"]["stdout"], outcome["model"]) == ("From the one that serves.\n", "policy-7")
        shown = run_cli("show", "--data", data)  # while it serves
        assert shown.exit_code == 0 and "From the one that serves." in shown.stdout
        # A run cannot change the engine of the gateway.
        other = run_cli(*shell_run(data, CALL_ONCE, "--script", tmp_path / "script.json"))
        assert (
            other.exit_code == 2
            and "--script cannot be set for the running gateway at" in other.stderr
            and "remove --script or choose a different --data folder" in other.stderr
        )
        # The gateway can also be given by its URL.
        key = {"TURNGATE_ADMIN_KEY": (data / "admin-key").read_text().strip()}
        done = run_cli(*shell_run(tmp_path / "elsewhere", CALL_ONCE, "--gateway", served.url), env=key)
        assert done.exit_code == 0, done.output
        session = outcome_of(tmp_path / "elsewhere")["session"]
        assert f"  inspect turngate show {session} --gateway {served.url}\n" in done.stdout
        shown = run_cli("show", session, "--gateway", served.url, env=key)
        assert shown.exit_code == 0 and "policy-7" in shown.stdout
        assert not (tmp_path / "elsewhere" / "turngate.db").exists()


def test_concurrent_runs_on_one_folder_are_rejected(data: Path) -> None:
    with start_cli(*shell_run(data, f"sleep {SLEEP_S}")) as first:
        first.wait_for_output("agent")
        line = run_rejected(*shell_run(data, "true"))
        assert line == (
            f"data folder {data} is in use by another turngate process; choose a different --data folder, or wait until "
            f"that process ends. To share a folder between runs, first start `turngate serve --data {data}`"
        )
        first.send(signal.SIGINT)
        assert first.wait_for_exit() == 130


def test_stale_gateway_address_is_ignored(data: Path) -> None:
    data.mkdir(mode=0o700)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (data / "gateway.json").write_bytes(msgspec.json.encode(RunningGateway(f"http://127.0.0.1:{port}", os.getpid())))
    done = run_cli(*shell_run(data, CALL_ONCE))
    assert done.exit_code == 0 and "serves" not in done.stdout


def test_stale_gateway_address_that_another_program_uses_is_ignored(data: Path) -> None:
    data.mkdir(mode=0o700)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        note = RunningGateway(f"http://127.0.0.1:{other.server_port}", os.getpid())
        (data / "gateway.json").write_bytes(msgspec.json.encode(note))
        threading.Thread(target=other.serve_forever).start()
        try:
            done = run_cli(*shell_run(data, CALL_ONCE))
        finally:
            other.shutdown()
    assert done.exit_code == 0 and "serves" not in done.stdout, done.output


# ── help and pipes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_help_is_fast_and_lists_exit_codes() -> None:
    """At most a quarter of a second of CPU time on an idle machine, best of five."""
    cpu_seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "turngate", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = os.times()
        cpu_seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(cpu_seconds) < scaled(0.25), cpu_seconds
    for words in (["run"], ["show"], ["agents"], ["agents", "check"], ["agents", "install"], ["serve"], ["certify"]):
        assert run_cli(*words, "--help").exit_code == 0
    help_text = " ".join(run_cli("run", "--help").stdout.split())
    assert "130 if the command was stopped by Ctrl-C" in help_text


def test_help_imports_nothing_heavy() -> None:
    heavy = (
        "numpy",
        "aiohttp",
        "tokenizers",
        "jinja2",
        "tiktoken",
        "uvicorn",
        "starlette",
        "msgspec",
        "orjson",
        "jmespath",
    )
    code = f"import sys, turngate.cli.main; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_closed_output_pipe_is_no_error(data: Path) -> None:
    words = [sys.executable, "-m", "turngate", *map(str, shell_run(data, "true"))]
    done = subprocess.run(["/bin/sh", "-c", f"{shlex.join(words)} | head -1"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
