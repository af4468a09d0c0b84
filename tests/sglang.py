"""Real SGLang on the CPU: one server with a tiny mixture-of-experts model for all tests that need it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engine_process import stop_group, wait_until_healthy
from tests.needs import require, uses
from tests.ports import free_port
from tools import parts

MODEL = "tiny-qwen3-moe"
CONTEXT = 4096


@dataclass(frozen=True)
class Server:
    """A running server, and the folder of its model."""

    url: str
    folder: Path

    @property
    def expert_shape(self) -> tuple[int, int]:
        """The number of layers, and of experts per token."""
        config = json.loads((self.folder / "config.json").read_text())
        return config["num_hidden_layers"], config["num_experts_per_tok"]


@contextmanager
@uses("sglang", MODEL)
def start_sglang(log: Path) -> Iterator[Server]:
    require("sglang", MODEL)
    folder, port = parts.ensure(MODEL), free_port()
    argv, env = parts.sglang_command(folder, port, context_length=CONTEXT)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="s"))  # SGLang leaves files there
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv, env={**env, "TMPDIR": scratch}, stdout=output, stderr=output, start_new_session=True
            )
        stack.callback(stop_group, process)
        server = Server(f"http://127.0.0.1:{port}", folder)
        wait_until_healthy("SGLang", server.url, process, log)
        yield server
