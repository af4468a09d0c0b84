"""Real vLLM on the CPU, one server at a time: requesting another model stops the running server.

All tests that need vLLM run in one process, sorted by model (`tests/tiers.py`), so each model starts once.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.engine_process import stop_group, wait_until_healthy
from tests.needs import require, uses
from tests.ports import free_port
from tools import parts

CONTEXT = 8192
TINY_RUNS = 4  # sequences of the tiny model at once, so that a few calls saturate it
# Serving adapters slows every token down: the tiny model does it.
OPTIONS = {
    "tiny-qwen3": ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-num-seqs", str(TINY_RUNS)]
}
REPORTS = ["--enable-prompt-tokens-details"]  # how many tokens of a prompt were cached


@dataclass(frozen=True)
class Model:
    """A served model and its folder."""

    name: str
    url: str
    folder: Path
    max_context: int = CONTEXT


class Servers:
    """Starts the server of a model when a test requests it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: Model | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def close(self) -> None:
        self._running = None
        self._stack.close()

    @uses("vllm")
    def get(self, name: str) -> Model:
        require("vllm", name)
        if self._running is None or self._running.name != name or self._has_ended():
            self.close()
            self._running = self._start(name)
        return self._running

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _start(self, name: str) -> Model:
        folder, port, log = parts.ensure(name), free_port(), self._logs / f"{name}.log"
        argv, env = parts.vllm_command(folder, port, served_name=name, max_model_len=CONTEXT)
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="v"))  # vLLM leaves files there
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*argv, *REPORTS, *OPTIONS.get(name, [])],
                env={**env, "TMPDIR": scratch, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._process = process
        self._stack.callback(stop_group, process)
        model = Model(name, f"http://127.0.0.1:{port}", folder)
        wait_until_healthy("vLLM", model.url, process, log)
        return model
