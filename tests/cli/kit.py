"""What the tests of the command line are written with: `turngate` in this process, as a process of its own, and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

import turngate
from tests.speed import scaled
from turngate.cli import app

ROOT = Path(turngate.__file__).parents[1]
NAP = f"65{os.getpid():07d}"  # seconds that nobody else on this machine sleeps: by them a process is known again
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def ran(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """`turngate …` in this process. Nothing but an exit code may come of it."""
    outcome = CliRunner().invoke(app, [*map(str, arguments)], env=env)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome


def refused(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """The one line that is printed instead of doing anything."""
    outcome = ran(*arguments, env=env)
    assert (outcome.exit_code, outcome.stdout) == (2, ""), outcome.output
    [line] = outcome.stderr.splitlines()
    assert line.startswith("turngate: ")
    return line.removeprefix("turngate: ")


class Process:
    """A `turngate …` of its own; `output` grows as it prints."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int) -> None:
        self.process = process
        self._reading = reading
        self._raw = b""
        self.output = ""

    def until(self, holds: Callable[[], object], seconds: float = 40.0) -> None:
        """Read until something holds."""
        limit = scaled(seconds)
        end = time.monotonic() + limit
        while not holds():
            assert time.monotonic() < end, f"still not so after {limit:.0f} s; it printed:\n{self.output}"
            assert self._read(0.05) or self.process.poll() is None, f"it ended, and printed:\n{self.output}"

    def says(self, text: str, seconds: float = 40.0) -> None:
        self.until(lambda: text in self.output, seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def type(self, keys: bytes) -> None:
        os.write(self._reading, keys)

    def ended(self, seconds: float = 40.0) -> int:
        """Its exit code."""
        limit = scaled(seconds)
        end = time.monotonic() + limit
        while self._read(0.05) or self.process.poll() is None:
            assert time.monotonic() < end, f"it has not ended after {limit:.0f} s; it printed:\n{self.output}"
        return self.process.wait()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._reading], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._reading, 65536)
        except OSError:  # a terminal that nobody is at any more
            data = b""
        self._raw += data
        self.output = self._raw.decode("utf-8", "replace")
        return bool(data)

    @property
    def plain(self) -> str:
        """What was printed, without colours and movements."""
        return ANSI.sub("", self.output).replace("\r\n", "\n")


@contextmanager
def process(*arguments: str | Path, columns: int = 0, before: str = "", **env: str) -> Iterator[Process]:
    """`columns`: on a terminal of that width; 0: its output goes into a pipe. `before`: Python that it runs first."""
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

    def own_terminal() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):  # `nohup`, and shells in the background, have them ignored
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
        preexec_fn=own_terminal,
    )
    os.close(writing)
    running = Process(child, reading)
    try:
        yield running
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        os.close(reading)
