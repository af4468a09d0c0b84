"""Helpers for tests of the command line: run `turngate` in this process, in its own process, or on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

import turngate
from tests.speed import scaled
from turngate.cli import app
from turngate.store.store import Store

ROOT = Path(turngate.__file__).parents[1]
SLEEP_S = f"65{os.getpid():07d}"  # a unique duration, by which a sleeping process is found
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
CALL_MODEL = """
import json, os, urllib.request
body = json.dumps({"model": os.environ["TURNGATE_MODEL"], "messages": [{"role": "user", "content": "Hi"}]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
)
print(json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))["choices"][0]["message"]["content"])
"""
CALL_ONCE = f"python3 -c {shlex.quote(CALL_MODEL)}"


def run_cli(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """Run `turngate …` in this process. It must exit without an exception."""
    outcome = CliRunner().invoke(app, [*map(str, arguments)], env=env)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome


def run_rejected(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command that must fail at once, and return its one-line error."""
    outcome = run_cli(*arguments, env=env)
    assert (outcome.exit_code, outcome.stdout) == (2, ""), outcome.output
    [line] = outcome.stderr.splitlines()
    assert line.startswith("turngate: ")
    return line.removeprefix("turngate: ")


class CliProcess:
    """A running `turngate …` process; `output` is what it has printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int) -> None:
        self.process = process
        self._reading = reading
        self._raw = b""
        self.output = ""

    def wait_until(self, condition: Callable[[], object], seconds: float = 40.0) -> None:
        """Read output until a condition holds."""
        limit = scaled(seconds)
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, f"condition did not hold within {limit:.0f} s; output:\n{self.output}"
            assert self._read(0.05) or self.process.poll() is None, f"the process ended; output:\n{self.output}"

    def wait_for_output(self, text: str, seconds: float = 40.0) -> None:
        self.wait_until(lambda: text in self.output, seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def type(self, keys: bytes) -> None:
        os.write(self._reading, keys)

    def wait_for_exit(self, seconds: float = 40.0) -> int:
        """Wait for the process to end and return its exit code."""
        limit = scaled(seconds)
        end = time.monotonic() + limit
        while self._read(0.05) or self.process.poll() is None:
            assert time.monotonic() < end, f"did not end within {limit:.0f} s; output:\n{self.output}"
        return self.process.wait()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._reading], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._reading, 65536)
        except OSError:  # the terminal was closed
            data = b""
        self._raw += data
        self.output = self._raw.decode("utf-8", "replace")
        return bool(data)

    @property
    def plain(self) -> str:
        """The output without escape sequences."""
        return ANSI.sub("", self.output).replace("\r\n", "\n")


@contextmanager
def start_cli(*arguments: str | Path, columns: int = 0, before: str = "", **env: str) -> Iterator[CliProcess]:
    """Start `turngate …`, on a terminal with that many columns or with a pipe for 0. `before`: Python code to run first."""
    start = "import runpy; runpy.run_module('turngate', run_name='__main__', alter_sys=True)"
    program = ["-c", f"{before}; {start}"] if before else ["-m", "turngate"]
    command = [sys.executable, *program, *map(str, arguments)]
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("TURNGATE", "COLUMNS", "NO_COLOR", "FORCE_COLOR"))
    }
    environment = {**clean, "TERM": "xterm-256color", "COLORTERM": "truecolor", **env}
    if columns:
        reading, writing = pty.openpty()
        fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    else:
        reading, writing = os.pipe()

    def set_up_terminal() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):  # `nohup` and background shells ignore them
            signal.signal(number, signal.SIG_DFL)
        if columns:
            fcntl.ioctl(writing, termios.TIOCSCTTY, 0)

    child = subprocess.Popen(
        command,
        stdin=writing if columns else subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=set_up_terminal,
    )
    os.close(writing)
    running = CliProcess(child, reading)
    try:
        yield running
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        os.close(reading)


def shell_run(data: Path, command: str, *more: str | Path, prompt: str = "Do it.") -> list[str | Path]:
    """The arguments for a run of the `shell` agent."""
    prompted = () if "--task" in more else ("--prompt", prompt)
    return ["run", "--agent", "shell", "--data", data, "--set", f"command={command}", *prompted, *more]


def outcome_of(data: Path) -> Any:
    [folder] = (data / "rollouts").iterdir()
    return json.loads((folder / "outcome.json").read_text())


def sessions(data: Path) -> list[tuple[str, str]]:
    store = Store.reading(data)
    try:
        return [(row.status, row.stop) for row in store.sessions(limit=10)]
    finally:
        store.close()
