"""Agent specs: presets load, and errors name the file, the field and the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turngate.agents import spec
from turngate.errors import AgentError

GOOD = """
name = "mine"
title = "Mine"
dialect = "chat"
command = ["mine", "--model", "{model}"]
"""
PRESETS = sorted(file.stem for file in spec.CATALOG.glob("*.toml"))
NO_TRANSCRIPT = ("aider", "cline", "openhands", "shell")
KEY_IN_OTHER_VARIABLE = ("shell", "qwen-code", "gemini-cli", "openhands")


@pytest.fixture(autouse=True)
def no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TURNGATE_AGENTS", raising=False)


def test_presets_are_named_like_their_files() -> None:
    assert len(PRESETS) >= 14
    assert list(spec.load_catalog()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_documented(name: str) -> None:
    agent = spec.find_agent(name).spec
    assert agent.limits, "known limits, for docs/agents.md"
    assert (agent.transcript is None) == (name in NO_TRANSCRIPT), "describe the transcript, or add it to NO_TRANSCRIPT"
    if name == "shell":
        return
    assert agent.install.version, "a package on npm or PyPI, at a fixed version"
    assert agent.off, "features that are switched off"
    assert agent.homepage.startswith("https://")


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in KEY_IN_OTHER_VARIABLE])
def test_key_is_not_in_variables_that_sdks_read(name: str) -> None:
    agent = spec.find_agent(name).spec
    holders = [variable for variable, text in agent.env.items() if "{api_key}" in text]
    assert not [variable for variable in holders if not variable.startswith("TURNGATE_")], (
        "programs that the agent starts could use the key; choose a variable that begins with TURNGATE_, or a file"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nmae = 1", "nmae is not a known field; did you mean name?"),
        ('dialect = "chat', "invalid TOML"),
        ('command = ["mine", "{modle}"]', "command[1]: {modle} is not a known placeholder; did you mean model?"),
        (
            'command = ["mine", "{api_key}"]',
            "command[1]: {api_key} may only be used in env or in a file with mode 0600",
        ),
        ('stdin = "{api_key}"', "stdin: {api_key} may only be used in env"),
        ('command = ["x", "{model*2}"]', "command[1]: {model} is text, but only numbers can be multiplied or divided"),
        ('command = ["x", "{context_tokens//0}"]', "command[1]: {context_tokens} is divided by 0"),
        ('command = ["{program}"]', "install must set program, because {program} is used"),
        ("command = []", "command is empty"),
        ('name = "Mine!"', "name is 'Mine!', but must start with a-z or 0-9 and contain only a-z, 0-9 and '-'"),
        ('dialect = "smoke"', "dialect must be one of chat, responses, messages, gemini, any, not 'smoke'"),
        (
            '[[files]]\npath = "a"\ncontent = "{api_key}"',
            'files[0].mode is 0644, but the file contains {api_key}; set mode = "0600"',
        ),
        (
            '[[files]]\npath = "a"\ncontent = ""\nmode = "rw"',
            "files[0].mode must be an octal mode such as 0644, not 'rw'",
        ),
        ('[env]\nA = "{nothing}"', "env.A: {nothing} is not a known placeholder"),
        ('[install]\nnpm = "x"\npip = "y"', "install.npm and install.pip cannot both be set; remove one"),
        (
            '[install]\nnpm = "x"\nversion = "latest"',
            "install.version must be an exact version such as 1.2.3, not 'latest'",
        ),
        ('[install]\nnpm = "x"\nversion = "1.0"', "install.program is missing"),
        (
            '[install]\nnpm = "x"\nversion = "1.0"\nprogram = "../x"',
            "install.program must be a path inside the installation, not '../x'",
        ),
        ('[install]\npip = "x"\nversion = "1.0"', "install.python must be a Python version such as 3.11, not ''"),
        (
            '[install]\npip = "x"\nversion = "1.0"\npython = "3.11"\nalso = ["y"]',
            "install.also[0] must be pinned as name==version, not 'y'",
        ),
        ('[install]\nversion = "1"', "install.version, install.program and install.prepare need a package"),
        ("[install]\ndeps = false", "install.also, install.python and install.deps apply only to pip packages; remove"),
        ('[install]\npython = "3.11"', "install.also, install.python and install.deps apply only to pip packages"),
        ('[install]\nalso = ["y==1"]', "install.also, install.python and install.deps apply only to pip packages"),
        (
            '[install]\nnpm = "x"\nversion = "1.0"\nprogram = "x"\nprepare = ["{program}", "{home}"]',
            "install.prepare[1]: only {install}, {program} and {node} can be used here",
        ),
        (
            '[[check]]\nsay = "In {home}."',
            "check[0]: {home} is not a known placeholder; only {workdir} can be used here",
        ),
        (
            'preload = ["json"]',
            'preload needs install.pip, a command that begins with "{python}", "{install}", and no stdin',
        ),
        (
            'command = ["{python}", "{install}", "x"]\npreload = ["a b"]\n'
            '[install]\npip = "x"\nversion = "1.0"\npython = "3.11"',
            "preload[0] must be the name of a module such as package.module, not 'a b'",
        ),
        (
            'command = ["{program}"]\ncode_cache = true\n[install]\nnpm = "x"\nversion = "1.0"\nprogram = "x"',
            'code_cache needs install.npm and a command that begins with "{node}"',
        ),
        ('[options.model]\nabout = "x"', "options.model: {model} is a built-in placeholder"),
        ('[signals]\nthread = ["cookie:x"]', "signals.thread[0]: unknown source 'cookie:x'; use header:NAME"),
        ('[signals]\nmodels = { "{home}" = "side" }', "signals.models.{home}: only {model} and {small_model}"),
        (
            '[signals]\nmodels = { "x" = "aside" }',
            "signals.models[...] must be one of main, subagent, side, summary, not 'aside'",
        ),
        ('[transcript]\nturn = "a"', "transcript must set either path or stdout = true, but not both"),
        ('[transcript]\nturn = "a ||"\nstdout = true', "transcript.turn is not valid JMESPath"),
        (
            '[transcript]\nturn = "a"\npath = "/etc/passwd"',
            "transcript.path must be a path below HOME, not '/etc/passwd'",
        ),
        ('[transcript]\nturn = "a"\nstdout = true\nmerge = "end"', 'transcript.end is required if merge = "end"'),
        (
            '[transcript]\nturn = "a"\nstdout = true\nformat = "json"',
            'transcript.records is required if format = "json"',
        ),
        ("[transcript]\nstdout = true", "transcript.turn is missing"),
        (
            '[shell_call]\ntool = "bash"\narguments = { cmd = "ls" }',
            'shell_call.arguments must contain {command}, such as { command = "{command}" }',
        ),
        (
            '[shell_call]\ntool = "bash"\narguments = { cmd = "{command}", cwd = "{home}" }',
            "shell_call.arguments: {home} cannot be used here; use {command} or {workdir}",
        ),
        ('[shell_call]\ntool = "bash"', "shell_call.arguments is missing"),
    ],
)
def test_invalid_spec_names_file_field_and_fix(change: str, message: str) -> None:
    field = change.split(" ", 1)[0]
    kept = "\n".join(line for line in GOOD.splitlines() if not line.startswith(f"{field} "))
    with pytest.raises(AgentError) as raised:
        spec.parse_spec(f"{kept}\n{change}\n", "my.toml")
    assert str(raised.value).startswith("my.toml: ")
    assert message in str(raised.value)


def test_unknown_agent_suggests_nearest() -> None:
    with pytest.raises(AgentError, match="unknown agent 'claude'; did you mean claude-code"):
        spec.find_agent("claude")


def test_agent_file_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    assert spec.find_agent("./mine.toml", cwd=tmp_path).spec.title == "Mine"
    with pytest.raises(AgentError, match=r"other\.toml cannot be read \(No such file"):
        spec.find_agent("./other.toml", cwd=tmp_path)


def test_user_file_overrides_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "config" / "turngate" / "agents"
    folder.mkdir(parents=True)
    (folder / "pi.toml").write_text(GOOD.replace('"mine"', '"pi"', 1))
    found = spec.find_agent("pi")
    assert (found.spec.title, found.file, found.shadows) == ("Mine", folder / "pi.toml", spec.CATALOG / "pi.toml")
    single = tmp_path / "stronger.toml"
    single.write_text(GOOD.replace('"mine"', '"pi"', 1).replace("Mine", "Stronger"))
    monkeypatch.setenv("TURNGATE_AGENTS", str(single))
    assert (spec.find_agent("pi").spec.title, spec.find_agent("pi").shadows) == ("Stronger", folder / "pi.toml")


def test_duplicate_name_in_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("a.toml", "b.toml"):
        (tmp_path / file).write_text(GOOD)
    monkeypatch.setenv("TURNGATE_AGENTS", str(tmp_path))
    with pytest.raises(AgentError, match=r"b\.toml: the name 'mine' is already used in .*a\.toml"):
        spec.load_catalog()


def test_missing_agents_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_AGENTS", "/no/such/folder")
    with pytest.raises(AgentError, match="TURNGATE_AGENTS: /no/such/folder does not exist"):
        spec.load_catalog()


@pytest.mark.process
def test_threads_load_their_first_agents_at_once() -> None:
    """msgspec ends the process if two threads build a type at once."""
    program = """
import sys, threading
from turngate.agents.spec import load_catalog
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
def load():
    barrier.wait()
    load_catalog()
threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", program], check=True)


def test_unreadable_description_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "agent.json").mkdir()
    with pytest.raises(AgentError) as raised:
        spec.read_description(tmp_path)
    assert raised.value.message == f"{tmp_path / 'agent.json'} cannot be read (Is a directory)"
