"""The code cache of Node agents, with shell scripts in place of Node. tests/agents_real tests a real agent with Node."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.agents.test_launch import INSTALLED, agent, plan
from tests.speed import scaled
from turngate.agents import code_cache, install
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec, find_agent
from turngate.errors import SandboxError

SPEC = """
command = ["{node}", "{program}", "--model", "{model}"]
stdin = "{prompt}"
code_cache = true

[install]
npm = "x"
version = "1.0"
program = "x.js"
"""
# Stores one module, as Node does: only the user can read it, and the folder's name ends in the user's id.
STORE_MODULE = """\
if [ "$1" = --expose-internals ]; then
    cache="$(dirname "$3")/modules/v24-x64-abc-$(id -u)"
    echo "$cache" > "$0.cache"
    mkdir -p "$cache" && chmod 700 "$cache"
    (umask 077 && echo code > "$cache/module")
fi
"""


@pytest.fixture
def spec() -> AgentSpec:
    return agent(SPEC)


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Create an installed agent whose Node is a shell script."""
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    node = tmp_path / "bin" / "node"
    monkeypatch.setattr(install, "ensure_node", lambda report: node)

    def build(folder: Path, fingerprint: str, build: object, report: object, **options: str) -> None:
        if folder.parent.name == code_cache.FOLDER:
            build_once(folder, fingerprint, build, report, **options)  # type: ignore[arg-type]
        else:
            folder.mkdir(parents=True, exist_ok=True)  # npm is not needed here

    build_once = install.build_once
    monkeypatch.setattr(install, "build_once", build)

    def make(script: str) -> Path:
        node.parent.mkdir(exist_ok=True)
        node.write_text(f"#!/bin/sh\n{script}")
        node.chmod(0o755)
        return node

    return make


def install_agent(spec: AgentSpec) -> tuple[Installation, list[str]]:
    lines: list[str] = []
    return install.ensure_installed(spec, lines.append), lines


@pytest.mark.process
def test_cache_is_built_once_and_readable_for_users_of_sandboxes(
    make_node: Callable[[str], Path], spec: AgentSpec
) -> None:
    node = make_node(STORE_MODULE)
    installed, lines = install_agent(spec)
    assert lines == ["compiling mine …"]
    folder = code_cache.cache_folder(installed)
    built = Path(node.with_name("node.cache").read_text().strip())
    assert len(built.parts) == len((folder / "modules" / built.name).parts)  # keys contain relative paths
    assert installed.code_cache == str(folder / "enable.cjs")
    for user in (*code_cache.USERS, os.getuid()):
        module = folder / "modules" / f"v24-x64-abc-{user}" / "module"
        assert module.read_text() == "code\n"
        assert (module.stat().st_mode & 0o777, module.resolve().parent.stat().st_mode & 0o777) == (0o644, 0o755)
    assert {path.name for path in folder.iterdir()} == {"enable.cjs", "modules", install.MARKER}
    assert install_agent(spec) == (installed, [])


@pytest.mark.process
def test_each_node_has_its_own_cache(make_node: Callable[[str], Path], spec: AgentSpec) -> None:
    """Runs that use the cache of one Node are not disturbed by a run with a different one, even if it cannot build a cache."""
    make_node(STORE_MODULE)
    first = install_agent(spec)[0]
    make_node(STORE_MODULE + "# a newer version\n")
    second, lines = install_agent(spec)
    assert lines == ["compiling mine …"]
    make_node("exit 1\n")
    assert install_agent(spec)[0].code_cache == ""
    assert first.code_cache != second.code_cache
    assert Path(first.code_cache).exists() and Path(second.code_cache).exists()


@pytest.mark.process
def test_agent_that_stores_no_code_starts_without_cache(make_node: Callable[[str], Path], spec: AgentSpec) -> None:
    make_node("echo 'SyntaxError: bad option'; exit 9\n")
    installed, lines = install_agent(spec)
    assert installed.code_cache == ""
    assert lines == [
        "compiling mine …",
        "mine will start without a code cache: a run of mine stored no code; the last line of its output: SyntaxError: bad option",
    ]
    assert install_agent(spec) == (installed, [])  # it is not tried again
    corrected = msgspec.structs.replace(spec, env={"A": "1"})
    assert install_agent(corrected)[1] == lines  # until its file changes


@pytest.mark.process
def test_hanging_agent_is_stopped(
    make_node: Callable[[str], Path], spec: AgentSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(code_cache, "RUN_S", 0.5)
    make_node(f"echo $$ >> {tmp_path}/pids; sleep 1000 & echo $! >> {tmp_path}/pids; wait\n")
    installed, lines = install_agent(spec)
    assert installed.code_cache == ""
    assert lines[1].endswith("(stopped after 0 seconds)")
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 4
    deadline = time.monotonic() + scaled(10)  # a killed process may take a moment to disappear
    while any(Path("/proc", pid, "exe").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.process
def test_read_only_installation_starts_without_cache(
    make_node: Callable[[str], Path], spec: AgentSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_node(STORE_MODULE)

    def fail(*args: object) -> str:
        raise OSError(30, "Read-only file system", "/cache/x")

    monkeypatch.setattr(code_cache, "build", fail)
    installed, lines = install_agent(spec)
    assert installed.code_cache == ""
    assert lines[-1] == "mine will start without a code cache: /cache/x: Read-only file system"


@pytest.mark.process
def test_setting_turns_cache_off(
    make_node: Callable[[str], Path], spec: AgentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_node(STORE_MODULE)
    monkeypatch.setenv("TURNGATE_WARM_STARTS", "off")
    assert install_agent(spec)[0].code_cache == ""
    monkeypatch.setenv("TURNGATE_WARM_STARTS", "no")
    with pytest.raises(SandboxError, match="TURNGATE_WARM_STARTS must be on or off, not 'no'"):
        install_agent(spec)


@pytest.mark.process
def test_runs_of_agent_make_calls_that_are_rejected(
    make_node: Callable[[str], Path], spec: AgentSpec, tmp_path: Path
) -> None:
    """The agent gets an endpoint, a prompt, and a HOME of its own, but no variables of this process."""
    calls = agent(SPEC + '\n[env]\nURL = "{base_url}"\nKEY = "{api_key}"\n')
    post = tmp_path / "post.py"
    post.write_text(
        "import os, urllib.error, urllib.request\n"
        "try:\n    urllib.request.urlopen(os.environ['URL'] + '/v1/chat/completions', b'{}')\n"
        "except urllib.error.HTTPError as error:\n    print(error.read().decode())\n"
    )
    make_node(
        f"{STORE_MODULE}\nexec >> {tmp_path}/log\n"
        f'{sys.executable} {post}; cat; echo; echo "$KEY $TURNGATE_CACHE $PYTEST_CURRENT_TEST"; pwd\n'
    )
    install_agent(calls)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 8
    assert [line for line in lines if '"code": 400' in line] == [lines[0], lines[4]]
    assert (lines[1], lines[2]) == ("Reply with one word.", "none  ")
    assert not Path(lines[3]).exists()


def test_cache_is_enabled_before_program() -> None:
    agent = find_agent("continue").spec
    cached = msgspec.structs.replace(INSTALLED, code_cache=f"{INSTALLED.folder}/code-cache/enable.cjs")
    moved, _ = cached.relocate("/opt/turngate")
    plain, command = plan(agent).command, plan(agent, installed=moved).command
    at = plain.index(INSTALLED.node)
    assert plain[at + 1] == INSTALLED.program
    assert command == (
        *plain[:at],
        "/opt/turngate/node/node",
        "--require",
        "/opt/turngate/agent/code-cache/enable.cjs",
        "/opt/turngate/agent/x",
        *plain[at + 2 :],
    )
