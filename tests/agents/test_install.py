"""Installations: what would be run, and how a folder of the cache is made. The real ones are made by the tests that run real agents."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from turngate.agents import install, spec
from turngate.errors import AgentError


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quiet(_: str) -> None:
    pass


def test_npm_gets_the_pin_and_the_node_by_its_path(tmp_path: Path) -> None:
    node = tmp_path / "node" / "bin" / "node"
    library = tmp_path / "node" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    library.parent.mkdir(parents=True)
    library.touch()
    command = install.npm_command(spec.find_agent("codex").spec, node)
    assert command[:3] == [str(node), str(library), "install"]
    assert command[-1] == "@openai/codex@0.166.0"


def test_pip_installs_for_the_agents_python_and_nothing_unpinned() -> None:
    mini = spec.find_agent("mini-swe-agent").spec
    command = install.pip_command(mini, Path("/target"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[command.index("--python-version") + 1] == "3.11"
    assert "--no-deps" in command
    assert "mini-swe-agent==2.4.6" in command
    assert all("==" in word for word in command[command.index("mini-swe-agent==2.4.6") :])


def test_an_agent_in_the_image_needs_nothing() -> None:
    shell = spec.find_agent("shell").spec
    assert install.explain_missing(shell) is None
    assert install.ensure_installed(shell, quiet) == install.Installation()
    assert install.Installation().mounts == ()


def test_what_is_missing_is_said(empty_cache: Path) -> None:
    assert (
        install.explain_missing(spec.find_agent("pi").spec) == f"pi 0.87.1 is not installed in {empty_cache / 'agents'}"
    )


def test_a_folder_is_made_once_and_again_when_its_recipe_changes(tmp_path: Path) -> None:
    place, made = tmp_path / "a" / "part", []

    def build(new: Path) -> None:
        made.append(new)
        (new / "file").write_text(str(len(made)))

    install.build_once(place, "one\n", build, quiet)
    install.build_once(place, "one\n", build, quiet)
    assert (place / "file").read_text() == "1"
    install.build_once(place, "two\n", build, quiet)
    assert (place / "file").read_text() == "2"
    assert sorted(path.name for path in place.parent.iterdir()) == [".part.lock", "part"]


def test_a_folder_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "part"

    def build(new: Path) -> None:
        (new / "half").touch()
        raise AgentError("no network")

    with pytest.raises(AgentError, match="no network"):
        install.build_once(place, "one\n", build, quiet)
    assert [path.name for path in tmp_path.iterdir()] == [".part.lock"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".making-part-x" / "new").mkdir(parents=True)
    install.build_once(tmp_path / "part", "one\n", lambda new: None, quiet)
    assert not (tmp_path / ".making-part-x").exists()


def test_several_at_once_make_it_once(tmp_path: Path) -> None:
    made = []
    started = threading.Barrier(4)

    def build(new: Path) -> None:
        made.append(new)

    def ask() -> None:
        started.wait()
        install.build_once(tmp_path / "part", "one\n", build, quiet)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@pytest.mark.process
def test_a_failed_command_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"]
    with pytest.raises(AgentError, match=r"(?s)install x: .*exited with status 3; its last lines:.*no such package"):
        install._run_command("install x", command)


@pytest.mark.process
def test_a_python_installation_runs_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(install.RUN_MODULE)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "run.py").write_text("import json, sys\nprint(json.dumps([__name__, sys.argv[1:]]))\n")
    done = subprocess.run(
        [sys.executable, tmp_path, "thing.run", "-a", "b"], capture_output=True, check=True, text=True
    )
    assert json.loads(done.stdout) == ["__main__", ["-a", "b"]]


@pytest.mark.process
def test_the_systems_own_node_is_not_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "node-24" / "bin" / "node"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\necho v24.1.0\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(own.parent))
    assert install.find_node() == own
    own.write_text("#!/bin/sh\necho v20.1.0\n")
    assert install.find_node() is None
    monkeypatch.setattr(install.shutil, "which", lambda name: "/usr/bin/env")
    assert install.find_node() is None


def test_a_python_agent_is_compiled_for_the_python_that_runs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "_run_command", lambda action, argv, **how: ran.append([str(word) for word in argv]))
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    mini = spec.find_agent("mini-swe-agent").spec
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (here, "3.7"):
        made = msgspec.structs.replace(mini.install, python=python)
        install._install_pip(msgspec.structs.replace(mini, install=made), tmp_path, quiet)
    compiled = [argv for argv in ran if "compileall" in argv]
    assert [argv[0] for argv in compiled] == [sys.executable, "/usr/bin/python3.7"]
    assert all(argv[-1] == str(tmp_path) for argv in compiled)


def test_pinned_packages_are_downloaded_in_shares_and_installed_without_an_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mini = spec.find_agent("mini-swe-agent").spec
    commands = install.download_commands(mini, tmp_path)
    assert len(commands) == install.DOWNLOADS
    assert all("--no-deps" in command for command in commands)
    pinned = [word for command in commands for word in command if "==" in word]
    assert sorted(pinned) == sorted(["mini-swe-agent==2.4.6", *mini.install.also])
    command = install.pip_command(mini, Path("/target"), tmp_path)
    assert command[command.index("--find-links") + 1] == str(tmp_path) and "--no-index" in command

    said: list[str] = []
    monkeypatch.setattr(install, "_run_command", lambda action, argv, **how: None)
    install._install_pip(mini, tmp_path, said.append)
    assert said[0] == "installing mini-swe-agent 2.4.6 …"
