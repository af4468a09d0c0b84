"""Start, measure and stop the processes of a benchmark. Used by `overhead.py`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A server on 127.0.0.1. `ready_s` is the time from its start to the first 200 response of /health."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, env: dict[str, str] | None = None, tree: Path = HERE.parent
    ) -> None:
        self.port = port
        self._log = log
        began = time.perf_counter()
        with open(log, "wb") as file:
            self._popen = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=tree, env={**os.environ, **(env or {})}
            )
        self.pid = self._popen.pid
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - began

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                raise SystemExit(f"bench: a process exited with code {self._popen.returncode}:\n{self.log()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.01)
        raise SystemExit(f"bench: not healthy after 60 s:\n{self.log()}")

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def rss_mb(self) -> float:
        return rss_mb(self.pid)

    def family(self) -> list[int]:
        """Return the ids of the process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8")
        return [self.pid, *map(int, children.split())]

    def send_signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def stop(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()


def start_engine(folder: Path, answers: Path, *, omit_prompt_ids: bool) -> Process:
    port = free_port()
    command = [sys.executable, str(HERE / "mock_engine.py"), "--port", str(port), "--answers", str(answers)]
    return Process(command + ["--omit-prompt-ids"] * omit_prompt_ids, port, folder / "engine.log")


class Gateway(Process):
    """`turngate serve` of the checkout `tree`, with its own data folder, or `turngate cell` if there is a shared store."""

    def __init__(
        self,
        folder: Path,
        engine: Process,
        tokenizer: Path,
        name: str,
        profile: Path | None = None,
        tree: Path = HERE.parent,
        program: Path | None = None,
        env: dict[str, str] | None = None,
        workers: int = 1,
        script: Path | None = None,
        shared: str = "",
        arguments: Sequence[str] = (),
    ) -> None:
        self.admin_key = secrets.token_hex(16)
        port = free_port()
        env = {"TURNGATE_ADMIN_KEY": self.admin_key, **(env or {})}
        if profile is not None:
            program = HERE / "profiled_gateway.py"
            env["BENCH_PROFILE"] = str(profile)
        command = [sys.executable, *(["-m", "turngate"] if program is None else [str(program)])]
        command += [*(["cell", "--shared", shared] if shared else ["serve"]), "--port", str(port)]
        command += ["--data", str(folder / name), "--durability", "process"]
        command += ["--workers", str(workers)] if workers > 1 else []
        vllm = ["--engine", "vllm", "--engine-url", f"http://127.0.0.1:{engine.port}"]
        command += [*(["--engine", "scripted", "--script", str(script)] if script else vllm), "--model", "bench"]
        super().__init__([*command, "--tokenizer", str(tokenizer), *arguments], port, folder / f"{name}.log", env, tree)


def cpu_s(pid: int) -> float:
    """Return user and system time of all threads. /proc/PID/stat has the same, but only in hundredths of a second."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock id that clock_getcpuclockid(3) returns
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
