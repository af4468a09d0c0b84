"""Planned launches: placeholders, prompts of every kind, and where the key goes."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from turngate.agents import launch, placeholders, spec
from turngate.agents.installation import Installation
from turngate.agents.launch import MAX_ARGUMENT_BYTES, Launch, ModelLimits, plan_launch, plan_preload
from turngate.errors import AgentError

INSTALLED = Installation(
    folder="/cache/agents/x-1", program="/cache/agents/x-1/x", node="/cache/node/bin/node", python="python3.11"
)
KEY = "tg-secret-key"
PROMPTS = {
    "plain": "Fix the bug.",
    "quotes": "\"double\" 'single' `back` $HOME \\n {model} {{task}} %s",
    "dashes": "--help\n-x",
    "lines": "one\n\ntwo\r\n\tthree\n",
    "unicode": "é 日本語 🎉 \u2028 \ufeff \x7f \x85",
    "long": "x" * 200_000,
}
PRESETS = list(spec.load_catalog())


def plan(
    agent: spec.AgentSpec,
    prompt: str = "Do it.",
    model: str = "Qwen/Qwen3-8B",
    installed: Installation = INSTALLED,
) -> Launch:
    options = {"command": "true"} if agent.name == "shell" else None
    return plan_launch(
        agent,
        installed,
        base_url="http://127.0.0.1:8700/",
        api_key=KEY,
        model=model,
        prompt=prompt,
        home="/home/agent",
        workdir="/work",
        limits=ModelLimits(context_tokens=40000, max_output_tokens=4000),
        options=options,
    )


def agent(text: str) -> spec.AgentSpec:
    return spec.parse_spec(f'name = "mine"\ntitle = "Mine"\ndialect = "chat"\n{text}', "my.toml")


@pytest.mark.parametrize("name", PRESETS)
def test_key_is_only_in_env_or_private_files(name: str) -> None:
    run = plan(spec.find_agent(name).spec)
    assert not [word for word in run.command if KEY in word]
    open_files = [file.path for file in run.files if KEY.encode() in file.data and file.mode & 0o077]
    assert open_files == []
    holders = [name for name, value in run.env.items() if KEY in value]
    assert holders or [file for file in run.files if KEY.encode() in file.data]


PROMPT_IS_ARGUMENT = ("cline", "kimi-code")  # they read it from nowhere else


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in PROMPT_IS_ARGUMENT])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_preset_accepts_any_prompt(name: str, prompt: str) -> None:
    run = plan(spec.find_agent(name).spec, prompt)
    assert not [word for word in run.command if len(word) > 1000]
    files_with_prompt = [
        file.data
        for file in run.files
        if prompt.encode() in file.data or placeholders.escape_quoted(prompt).encode() in file.data
    ]
    assert files_with_prompt


@pytest.mark.parametrize("name", PROMPT_IS_ARGUMENT)
def test_prompt_as_argument_arrives_intact_or_is_rejected(name: str) -> None:
    for prompt in PROMPTS.values():
        try:
            assert prompt in plan(spec.find_agent(name).spec, prompt).command
        except AgentError as error:
            assert len(prompt.encode()) > MAX_ARGUMENT_BYTES and "the limit is 131071" in error.message


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", ["plain", "Qwen/Qwen3-8B", 'odd"name\\'])
def test_generated_files_stay_valid(name: str, model: str) -> None:
    for file in plan(spec.find_agent(name).spec, PROMPTS["quotes"], model).files:
        if file.path.endswith(".json"):
            json.loads(file.data)
        if file.path.endswith(".toml"):
            assert f'"{model}"' in str(tomllib.loads(file.data.decode())).replace("'", '"').replace("\\\\", "\\")


# They have no model for side calls.
ONE_MODEL = ("pi", "codex", "mini-swe-agent", "cline", "continue", "copilot-cli", "kimi-code", "openhands")


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ONE_MODEL])
def test_small_model_calls_are_side_calls(name: str) -> None:
    signals = plan(spec.find_agent(name).spec, model="a[1]*").signals
    assert signals.models == {"a[[]1][*]-small": "side"}


def test_prompt_in_yaml_round_trips(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    mini = spec.find_agent("mini-swe-agent").spec
    for prompt in PROMPTS.values():
        [file] = plan(mini, prompt).files
        assert yaml.safe_load(file.data.decode())["run"]["task"] == prompt


@pytest.mark.process
def test_stdin_comes_from_file(tmp_path: Path) -> None:
    cat = agent('command = ["cat", "-"]\nstdin = "{prompt}"')
    run = plan_launch(
        cat,
        Installation(),
        base_url="x",
        api_key=KEY,
        model="m",
        prompt=PROMPTS["lines"],
        home=str(tmp_path),
        workdir="/",
    )
    for file in run.files:
        Path(file.path).parent.mkdir(parents=True, exist_ok=True)
        Path(file.path).write_bytes(file.data)
    done = subprocess.run(run.command, capture_output=True, check=True)
    assert done.stdout == PROMPTS["lines"].encode()


def test_placeholder_arithmetic() -> None:
    values: dict[str, placeholders.Value] = {"n": 40000, "name": "x"}
    assert (
        placeholders.fill('{"a": {n}, "b": {n*8//10}, "c": {n*8/10485760}}', values)
        == '{"a": 40000, "b": 32000, "c": 0.030518}'
    )


def test_other_braces_are_kept() -> None:
    text = '{"a": {}} {{name}} {env:NAME} {Name} ${name} $x'
    assert placeholders.fill(text, {"name": "x"}) == '{"a": {}} {{name}} {env:NAME} {Name} $x $x'


def test_prompt_too_long_or_with_nul_is_rejected_as_argument() -> None:
    by_argument = agent('command = ["mine", "--", "{prompt}"]')
    assert plan(by_argument, PROMPTS["quotes"]).command == ("mine", "--", PROMPTS["quotes"])
    with pytest.raises(AgentError, match=r"command\[2\] is 200000 bytes long, .* stdin or in \{prompt_file\}"):
        plan(by_argument, PROMPTS["long"])
    with pytest.raises(AgentError, match="contains a NUL character"):
        plan(by_argument, "a\0b")


def test_errors_about_arguments_count_the_words_of_the_description() -> None:
    wrapped = agent('command = ["mine", "--", "{prompt}"]\nstdin = "-"')
    with pytest.raises(AgentError, match=r"command\[2\] contains a NUL character") as raised:
        plan(wrapped, "a\0b", installed=Installation(code_cache="/cache/enable.js"))
    assert raised.value.param == "command[2]"


def test_prompt_file_is_written_if_referenced() -> None:
    run = plan(agent('command = ["mine", "@{prompt_file}"]'), "the task")
    assert run.command[1] == "@/home/agent/.turngate/prompt.txt"
    assert [(file.path, file.data, file.mode) for file in run.files] == [(run.command[1][1:], b"the task", 0o600)]


def test_options_are_required_and_checked() -> None:
    shell = spec.find_agent("shell").spec
    values = {"base_url": "x", "api_key": KEY, "model": "m", "prompt": "p", "home": "/h", "workdir": "/w"}
    assert (
        plan_launch(shell, Installation(), **values, options={"command": "echo 'hi' \"$X\""}).command[-1]
        == "echo 'hi' \"$X\""
    )
    with pytest.raises(
        AgentError,
        match=r"options\.command: shell requires this option \(the command line to run.*\); pass --set command=…",
    ):
        plan_launch(shell, Installation(), **values)
    with pytest.raises(AgentError, match=r"options\.comand: shell has no such option; did you mean command\?"):
        plan_launch(shell, Installation(), **values, options={"comand": "x"})
    with pytest.raises(AgentError, match=r"options\.command: pi has no options; remove this one"):
        plan_launch(spec.find_agent("pi").spec, Installation(), **values, options={"command": "x"})


def test_installation_is_mounted_at_same_path() -> None:
    run = plan(spec.find_agent("codex").spec)
    assert [(mount.source, mount.target, mount.writable) for mount in run.mounts] == [
        ("/cache/agents/x-1", "/cache/agents/x-1", False),
        ("/cache/node/bin", "/cache/node/bin", False),
    ]
    assert run.command[4:6] == ("/cache/node/bin/node", "/cache/agents/x-1/x")


def test_base_url_has_no_double_slash() -> None:
    assert b'base_url = "http://127.0.0.1:8700/v1"' in plan(spec.find_agent("codex").spec).files[0].data


def test_own_folder_is_in_agent_home() -> None:
    run = plan(spec.find_agent("opencode").spec)
    assert run.stdout == f"/home/agent/{launch.OWN_FOLDER}/stdout"


def test_preload_has_only_variables_that_are_the_same_in_every_run() -> None:
    agent = spec.find_agent("mini-swe-agent").spec
    installed = Installation(folder="/i", python="/usr/bin/python3.11")
    preload = plan_preload(agent, installed)
    assert preload is not None
    assert (preload.python, preload.folder, preload.modules) == ("/usr/bin/python3.11", "/i", agent.preload)
    assert preload.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert not any("{" in text for text in preload.env.values())
    assert plan_preload(agent, Installation(folder="/i", python="python3.11")) is None  # a Python of the sandbox's own
    assert plan_preload(spec.find_agent("pi").spec, installed) is None
