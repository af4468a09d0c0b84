"""Installation of agents: commands and cached folders. Tests of real agents run the real installations."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turngate.agents import install, spec
from turngate.agents.installation import PYTHON_VARIABLE, Installation
from turngate.agents.interpreters import Interpreter
from turngate.errors import AgentError


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ignore(_: str) -> None:
    pass


def test_npm_command_pins_version_and_uses_given_node(tmp_path: Path) -> None:
    node = tmp_path / "node" / "bin" / "node"
    library = tmp_path / "node" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    library.parent.mkdir(parents=True)
    library.touch()
    codex = spec.find_agent("codex").spec
    assert install.npm_command(codex, node)[:3] == [str(node), str(library), "ci"]  # from the lock
    newer = msgspec.structs.replace(codex, install=msgspec.structs.replace(codex.install, version="999.0.0"))
    command = install.npm_command(newer, node)  # which has no lock
    assert command[:3] == [str(node), str(library), "install"]
    assert command[-1] == "@openai/codex@999.0.0"


PYTHON_312 = Interpreter("/opt/python/bin/python3.12", "/opt/python")


def agent_for_312(**changes: Any) -> spec.AgentSpec:
    mini = spec.find_agent("mini-swe-agent").spec
    return msgspec.structs.replace(mini, install=msgspec.structs.replace(mini.install, **{"python": "3.12"} | changes))


def test_pip_runs_on_agent_python_and_pins_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_python", lambda version: PYTHON_312 if version == "3.12" else None)
    command = install.pip_command(agent_for_312(), Path("/target"))
    assert command[:6] == [sys.executable, "-m", "pip", "--python", PYTHON_312.path, "install"]
    assert "--python-version" not in command  # pip would evaluate `python_version` in requirements for its own Python
    assert "--no-deps" in command
    assert "mini-swe-agent==2.4.6" in command
    assert all("==" in word for word in command[command.index("mini-swe-agent==2.4.6") :])


def test_pinned_packages_are_installed_without_agent_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_python", lambda version: None)
    command = install.pip_command(agent_for_312(), Path("/target"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[command.index("--python-version") + 1] == "3.12"
    with pytest.raises(
        AgentError, match=r"this machine has no python3\.12; install it .* or list all dependencies"
    ) as error:
        install.pip_command(agent_for_312(deps=True), Path("/target"))
    assert error.value.param == "install.python"


def test_installations_for_different_pythons_do_not_share_folder() -> None:
    folders = {
        install.install_folder(agent_for_312()),
        install.install_folder(spec.find_agent("mini-swe-agent").spec),
    }
    assert sorted(folder.name for folder in folders) == ["mini-swe-agent-2.4.6-py3.11", "mini-swe-agent-2.4.6-py3.12"]


def test_sandbox_with_host_programs_runs_agent_python_by_path() -> None:
    installed = Installation(folder="/cache/x", program="/cache/x/bin/x", python="python3.12")
    installed = msgspec.structs.replace(installed, host_python=PYTHON_312)
    assert installed.mounts == ("/cache/x",)  # an image has its own Python
    assert installed.relocate("/opt/turngate")[0].python == "python3.12"
    shared = installed.use_host_python()
    assert (shared.python, shared.mounts) == (PYTHON_312.path, ("/cache/x", "/opt/python"))
    moved, pairs = shared.relocate("/opt/turngate")
    assert (moved.python, moved.program) == (PYTHON_312.path, "/opt/turngate/agent/bin/x")
    assert pairs == (("/opt/python", "/opt/python"), ("/cache/x", "/opt/turngate/agent"))
    system = msgspec.structs.replace(installed, host_python=Interpreter("/usr/bin/python3.12", "/usr"))
    assert system.use_host_python().mounts == ("/cache/x",)


def test_agent_without_installer_needs_nothing() -> None:
    shell = spec.find_agent("shell").spec
    assert install.explain_missing(shell) is None
    assert install.ensure_installed(shell, ignore) == Installation()
    assert Installation().mounts == ()


def test_missing_installation_is_explained(empty_cache: Path) -> None:
    assert (
        install.explain_missing(spec.find_agent("pi").spec) == f"pi 0.87.1 is not installed in {empty_cache / 'agents'}"
    )


def test_folder_is_rebuilt_only_if_recipe_changes(tmp_path: Path) -> None:
    folder, built = tmp_path / "a" / "part", []

    def build(new: Path) -> None:
        built.append(new)
        (new / "file").write_text(str(len(built)))

    install.build_once(folder, "one\n", build, ignore)
    install.build_once(folder, "one\n", build, ignore)
    assert (folder / "file").read_text() == "1"
    install.build_once(folder, "two\n", build, ignore)
    assert (folder / "file").read_text() == "2"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".part.lock", "part"]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "part"

    def build(new: Path) -> None:
        (new / "half").touch()
        raise AgentError("no network")

    with pytest.raises(AgentError, match="no network"):
        install.build_once(folder, "one\n", build, ignore)
    assert [path.name for path in tmp_path.iterdir()] == [".part.lock"]


def test_leftovers_of_killed_build_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".making-part-x" / "new").mkdir(parents=True)
    install.build_once(tmp_path / "part", "one\n", lambda new: None, ignore)
    assert not (tmp_path / ".making-part-x").exists()


def test_concurrent_builds_run_once(tmp_path: Path) -> None:
    built = []
    started = threading.Barrier(4)

    def build(new: Path) -> None:
        built.append(new)

    def build_part() -> None:
        started.wait()
        install.build_once(tmp_path / "part", "one\n", build, ignore)

    threads = [threading.Thread(target=build_part) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


RECIPES = {
    "npm": {"npm": "x"},
    "node": {"npm": "x"},
    "pip": {"pip": "x", "python": "3.12", "deps": True},
    "pip download": {"pip": "x", "python": "3.12", "deps": False},
}


@pytest.mark.process
@pytest.mark.parametrize("command", RECIPES)
def test_killed_command_leaves_no_temporary_files(
    command: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    program = tmp_path / "bin" / "program"
    npm = tmp_path / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    npm.parent.mkdir(parents=True)
    npm.touch()
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nmktemp -d\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(install, "find_python", lambda version: PYTHON_312)
    monkeypatch.setattr(install, "find_node", lambda: None if command == "node" else program)
    shell = spec.find_agent("shell").spec
    recipe = msgspec.structs.replace(shell.install, version="1.0", **RECIPES[command])
    with pytest.raises(AgentError, match=r"status -9; .*\n    /.*/tmp"):
        install.ensure_installed(msgspec.structs.replace(shell, install=recipe), ignore)
    assert not list((tmp_path / "tmp").iterdir())
    assert {path.suffix for path in empty_cache.rglob("*") if not path.is_dir()} == {".lock"}


@pytest.mark.process
def test_failed_command_shows_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"]
    with pytest.raises(
        AgentError, match=r"(?s)install x: .*exited with status 3; the last lines of its output:.*no such package"
    ):
        install._run_command("install x", command, scratch=tmp_path)


@pytest.mark.process
def test_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = install.npm_command(spec.find_agent("codex").spec, tmp_path / "bin" / "node")  # a Node without npm
    with pytest.raises(
        AgentError,
        match=r"could not install x: `npm ci .*` could not be run \(No such file or directory\); check that the program",
    ):
        install._run_command("install x", command, scratch=tmp_path)


@pytest.mark.process
def test_python_installation_runs_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(install.RUN_MODULE)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "run.py").write_text("import json, sys\nprint(json.dumps([__name__, sys.argv[1:]]))\n")
    done = subprocess.run(
        [sys.executable, tmp_path, "thing.run", "-a", "b"], capture_output=True, check=True, text=True
    )
    assert json.loads(done.stdout) == ["__main__", ["-a", "b"]]


LONG_PIP_HEADER = "#!/bin/sh\n'''exec' /a/long/path/bin/python3.11 \"$0\" \"$@\"\n' '''\n"


@pytest.mark.process
@pytest.mark.parametrize("header", ["#!/build/venv/bin/python3.11\n", LONG_PIP_HEADER])
def test_scripts_run_wherever_installation_is_mounted(tmp_path: Path, header: str) -> None:
    built = tmp_path / "built"
    (built / "bin").mkdir(parents=True)
    (built / "__main__.py").write_text(install.RUN_MODULE)
    (built / "thing.py").write_text("import sys\n\ndef main():\n    print(sys.argv)\n    return 3\n")
    script = built / "bin" / "thing"
    script.write_text(header + "import sys\nfrom thing import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    script.chmod(0o755)
    (built / "bin" / "native").write_bytes(b"\x7fELF")
    install.make_scripts_relocatable(built, "python9.9")
    mounted = built.rename(tmp_path / "mounted here")
    (tmp_path / "link").symlink_to(mounted / "bin" / "thing")
    for program in (mounted / "bin" / "thing", tmp_path / "link"):
        command = [program, "-a", "b c"]
        env = {"PATH": "/usr/bin:/bin", PYTHON_VARIABLE: sys.executable}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (3, f"{[str(program), '-a', 'b c']}\n"), done.stderr
    assert (mounted / "bin" / "native").read_bytes() == b"\x7fELF"
    assert ":-python9.9}" in (mounted / "bin" / "thing").read_text()  # the name that an image has


@pytest.mark.process
def test_system_node_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = tmp_path / "node-24" / "bin" / "node"
    node.parent.mkdir(parents=True)
    node.write_text("#!/bin/sh\necho v24.1.0\n")
    node.chmod(0o755)
    monkeypatch.setenv("PATH", str(node.parent))
    assert install.find_node() == node
    node.write_text("#!/bin/sh\necho v20.1.0\n")
    assert install.find_node() is None
    monkeypatch.setattr(install.shutil, "which", lambda name: "/usr/bin/env")
    assert install.find_node() is None


def test_node_without_its_binary_is_installed_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_node(new: Path, report: install.Report) -> None:
        (new / "bin").mkdir()
        (new / "bin" / "node").touch()

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(install, "build_node", build_node)
    node = install.ensure_node(ignore)
    assert node.is_file() and install.find_node() == node
    node.unlink()
    assert install.find_node() is None
    assert install.ensure_node(ignore) == node and node.is_file()


def test_python_agent_is_compiled_for_its_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        install, "_run_command", lambda action, argv, **how: commands.append([str(word) for word in argv])
    )
    monkeypatch.setattr(install, "find_python", lambda version: PYTHON_312 if version == "3.12" else None)
    for python in ("3.12", "3.7"):
        install._install_pip(agent_for_312(python=python), tmp_path, ignore)
    compiled = [argv for argv in commands if "compileall" in argv]
    assert [argv[0] for argv in compiled] == [PYTHON_312.path]  # there is no 3.7
    assert all(argv[-1] == str(tmp_path) for argv in compiled)


def test_packages_are_downloaded_in_parallel_and_installed_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mini = spec.find_agent("mini-swe-agent").spec
    commands = install.download_commands(mini, tmp_path)
    assert len(commands) == install.DOWNLOADS
    assert all({"--no-deps", "--require-hashes"} <= set(command) for command in commands)
    pinned = [line for command in commands for line in Path(command[-1]).read_text().splitlines() if "==" in line]
    assert len(pinned) == len(set(pinned)) == 1 + len(mini.install.also)
    for file in tmp_path.iterdir():
        file.unlink()
    command = install.pip_command(mini, Path("/target"), tmp_path)
    assert command[command.index("--find-links") + 1] == str(tmp_path) and "--no-index" in command
    (tmp_path / "some-1.0.tar.gz").touch()  # pip builds it with tools from the index
    assert "--no-index" not in install.pip_command(mini, Path("/target"), tmp_path)

    messages: list[str] = []
    monkeypatch.setattr(install, "_run_command", lambda action, argv, **how: None)
    install._install_pip(mini, tmp_path, messages.append)
    assert messages[0] == "installing mini-swe-agent 2.4.6 …"


# ── locks ──


def test_every_bundled_agent_is_locked_with_hashes() -> None:
    """Also of packages that its own packages need, at the versions of its file."""
    agents = [entry.spec for entry in spec.load_catalog().values() if entry.spec.install.npm or entry.spec.install.pip]
    assert len(agents) >= 13
    for agent in agents:
        lock = install.find_lock(agent)
        assert lock is not None, f"run tools/lock_agents.py {agent.name}"
        if agent.install.npm:
            packages = json.loads(lock.read_text())["packages"]
            assert all(package["integrity"].startswith("sha512-") for path, package in packages.items() if path)
            names = {path.rpartition("node_modules/")[2] for path in packages}
            for package in packages.values():  # else `npm ci` refuses the lock
                assert {*package.get("dependencies", ()), *package.get("optionalDependencies", ())} <= names
        else:
            requirements = install.split_lock(lock.read_text())
            assert all("--hash=sha256:" in requirement for requirement in requirements)
            names = {normalize(requirement.split()[0]) for requirement in requirements}
            assert {normalize(pin) for pin in agent.install.also} <= names
    [node] = install.split_lock(install.NODE_LOCK.read_text())
    assert node.startswith(f"{install.NODE_PACKAGE} ") and "--hash=sha256:" in node


def normalize(requirement: str) -> str:
    return requirement.lower().replace("_", "-").replace(".", "-")


def make_wheel(folder: Path) -> str:
    """Make a wheel of a package that does nothing, and return its SHA-256."""
    info = "tiny_agent-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_agent-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_agent.py", "print('hello')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-agent\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((folder / "tiny_agent-1.0-py3-none-any.whl").read_bytes()).hexdigest()


@pytest.mark.process
@pytest.mark.parametrize("tampered", [False, True])  # the first is the control
def test_package_with_another_hash_is_not_installed(
    tampered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "index").mkdir()
    digest = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(install, "LOCKS", tmp_path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shell = spec.find_agent("shell").spec
    recipe = msgspec.structs.replace(shell.install, pip="tiny-agent", version="1.0", python=version, deps=True)
    agent = msgspec.structs.replace(shell, install=recipe)
    wanted = hashlib.sha256(b"another file").hexdigest() if tampered else digest
    install.lock_file(agent).write_text(
        f"{install.lock_header(version)}tiny-agent==1.0 \\\n    --hash=sha256:{wanted}\n"
    )
    assert install.find_lock(agent) is not None
    if not tampered:
        folder = Path(install.ensure_installed(agent, ignore).folder)
        assert (folder / "tiny_agent.py").exists()
        return
    with pytest.raises(AgentError, match="DO NOT MATCH THE HASHES"):
        install.ensure_installed(agent, ignore)
    assert not install.install_folder(agent).exists()


@pytest.mark.process
def test_command_completes_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shell = spec.find_agent("shell").spec

    def agent(*prepare: str) -> spec.AgentSpec:
        recipe = msgspec.structs.replace(
            shell.install, pip="tiny-agent", version="1.0", python=version, program="tiny_agent.py", prepare=prepare
        )
        return msgspec.structs.replace(shell, install=recipe)

    with pytest.raises(AgentError, match=r"could not prepare shell 1.0: `cp \S+/new/missing") as error:
        install.ensure_installed(agent("cp", "{install}/missing", "x"), ignore)
    assert "No such file" in error.value.message
    assert not install.install_folder(agent()).exists()
    copying = agent("cp", "{program}", "{install}/copy.py")
    folder = Path(install.ensure_installed(copying, ignore).folder)
    assert (folder / "copy.py").read_bytes() == (folder / "tiny_agent.py").read_bytes()
    assert install.explain_missing(copying) is None
    assert install.explain_missing(agent()) is not None  # another recipe


def test_installations_of_older_versions_are_used() -> None:
    """The fingerprint of an agent that has no `install.prepare` is the same as before that field existed."""
    text = 'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["x"]\n[install]\nnpm = "x"\nversion = "1.0"\nprogram = "x.js"\n'
    assert install._fingerprint(spec.parse_spec(text, "mine.toml")) == "mine d10c1c9d67711183\n"


@pytest.mark.process
@pytest.mark.needs("node")
@pytest.mark.parametrize("tampered", [False, True])  # the first is the control
def test_npm_package_with_another_hash_is_not_installed(
    tampered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    with tarfile.open(tmp_path / "tiny.tgz", "w:gz") as tar:
        for name, text in {"package.json": '{"name": "tiny-agent", "version": "1.0.0"}', "cli.js": "1"}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    content = b"another file" if tampered else (tmp_path / "tiny.tgz").read_bytes()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    package = {"version": "1.0.0", "resolved": f"file:{tmp_path}/tiny.tgz", "integrity": integrity}
    root = {"dependencies": {"tiny-agent": "1.0.0"}}
    shell = spec.find_agent("shell").spec
    recipe = msgspec.structs.replace(shell.install, npm="tiny-agent", version="1.0.0")
    agent = msgspec.structs.replace(shell, install=recipe)
    monkeypatch.setattr(install, "LOCKS", tmp_path)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    monkeypatch.setenv("npm_config_offline", "true")
    lock = {"lockfileVersion": 3, "requires": True, "packages": {"": root, "node_modules/tiny-agent": package}}
    install.lock_file(agent).write_text(json.dumps(lock))
    node = Path(str(shutil.which("node"))).resolve()
    (tmp_path / "new").mkdir()
    if not tampered:
        install._install_npm(agent, tmp_path / "new", node, ignore)
        assert (tmp_path / "new" / "node_modules" / "tiny-agent" / "cli.js").exists()
        return
    with pytest.raises(AgentError, match="EINTEGRITY"):
        install._install_npm(agent, tmp_path / "new", node, ignore)
