"""Helpers for the tests of the OpenEnv environment: its server in a separate process, with an agent that is a small program.

The agent is the catalogue's `shell` with Python as its command, so an instruction is a program.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.speed import scaled

ROOT = Path(__file__).parents[2]
MODEL = "scripted://demo"
REPLY = "Four."
# A program that calls the model once and writes its answer to a file.
CALL_MODEL = """\
import json, os, pathlib, time, urllib.request
asked = {"model": os.environ["TURNGATE_MODEL"], "messages": [{"role": "user", "content": "2 and 2?"}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["TURNGATE_API_KEY"]}
url = os.environ["TURNGATE_BASE_URL"] + "/v1/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers)) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"]
pathlib.Path("answer.txt").write_text(answer)
print(answer, flush=True)
"""
SLOW = CALL_MODEL + "time.sleep(3600)\n"
GOOD = "grep -q Four answer.txt"
BAD = "grep -q Five answer.txt"

SETTINGS = """\
data = "{folder}/data"
sandbox = "local"
agent = "shell"
agents = ["shell"]
running = 8
most_agent_timeout_s = 36000

[agent_options.shell]
command = "exec {python} -"

[endpoints."{model}"]
script = "{folder}/replies.json"

[endpoints."openai://kept"]
key_env = "KEPT_KEY"
"""


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path) -> None:
        self.process = process
        self.url = url
        self.folder = folder

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(scaled(30))


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNGATE_ADMIN", "PYTEST"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}


def write_settings(folder: Path, more: str = "") -> Path:
    """Write the settings file of the service. `more`: TOML to append."""
    (folder / "replies.json").write_text(f'["{REPLY}"]')
    file = folder / "service.toml"
    file.write_text(SETTINGS.format(folder=folder, model=MODEL, python=sys.executable) + more)
    return file


@contextmanager
def run_server(folder: Path, *, package: Path | None = None, settings: str = "", **env: str) -> Iterator[Server]:
    """Run the server on a free port. `package`: start it from that folder, as OpenEnv does, instead of with Turngate's command.

    `settings`: TOML to append to the service's settings.
    """
    module = ["server.app"] if package else ["turngate.openenv"]
    given = {} if package else {"TURNGATE_SERVICE": str(write_settings(folder, settings))}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, "--port", "0"],
            cwd=package or folder,
            env=environment(**given, **env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        yield Server(process, _wait_for_url(process, folder / "log"), folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(scaled(30))
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    """Wait until the server logs its URL."""
    while process.poll() is None:
        if found := re.search(r"environment at (http://\S+)", log.read_text()):
            return found[1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise AssertionError(f"the server ended: {log.read_text()[-3000:]}")
