"""Real vLLM on the CPU, one server per model, started once for all tests that use it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tools import parts

MODELS = {"tiny-qwen3": 8192, "smollm2": 2048}


@dataclass(frozen=True)
class Model:
    name: str
    url: str
    folder: Path
    max_context: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    """The server of a model. It stays until the end: files of tests come one by one, and each wants all models."""
    running: dict[str, Model] = {}
    with ExitStack() as stack:

        def started(name: str) -> Model:
            if name not in running:
                log = tmp_path_factory.mktemp("vllm") / "log"
                running[name] = stack.enter_context(serving(name, MODELS[name], log))
            return running[name]

        yield started


@pytest.fixture(scope="session", params=list(MODELS))
def model(request: pytest.FixtureRequest, server: Callable[[str], Model]) -> Model:
    return server(request.param)


@contextmanager
def serving(
    name: str, max_context: int, log: Path, options: Sequence[str] = (), extra: Mapping[str, str] | None = None
) -> Iterator[Model]:
    """A vLLM server, with further options and environment. Skips the test where a part of it was not made; in CI it is made then."""
    for part in ("vllm", name):
        if os.environ.get("CI") != "true" and (reason := parts.missing(part)):
            pytest.skip(f"{reason}; make it with: python tools/parts.py {part}")
        parts.ensure(part)
    folder, port = parts.ensure(name), free_port()
    argv, env = parts.vllm_command(folder, port, served_name=name, max_model_len=max_context)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, *options], env={**env, **(extra or {})}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield Model(name, url, folder, max_context)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float = 300) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise RuntimeError(f"vLLM was not ready after {limit_s:.0f} s:\n{log.read_text()[-3000:]}")
