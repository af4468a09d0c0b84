"""Turn a page of the documentation into a shell script that does what its reader would do.

The commands and the Python blocks run in the order of the page, in one shell and one folder. Servers run in the background until the end,
or until another one needs their port. A page whose code calls a gateway or an engine that it does not start finds one running.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.blocks import Block, Command, read_blocks, split_commands

SHELL = "bash"
PORTS = (8000, 8001, 8700, 8701, 8710)  # that the documentation uses
ENGINE = "vllm serve Qwen/Qwen3-8B --logprobs-mode processed_logprobs"
GATEWAY = "turngate serve --data gateway"
# Programs that run until they are stopped, and the ports they listen on by default.
_SERVERS = {r"vllm serve": 8000, r"turngate serve": 8700, r"turngate mcp .*--http": 8710}
_ENDLESS = re.compile(r"turngate batch .*--rounds \d\d", re.S)
_PORT = re.compile(rf"(?<=[:= ])({'|'.join(map(str, PORTS))})\b")
_REPLACED = {  # on every page, to save time: bubblewrap instead of Docker, and smaller groups
    "--sandbox docker": "--sandbox bubblewrap",
    'get_backend("docker")': 'get_backend("bubblewrap")',
    **{f"{name}{n}": f"{name}2" for name in ("--n ", "n=") for n in (4, 8)},
}
_HEADER = r"""
set -euo pipefail
declare -A servers
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
stop_server() {
    [ -z "${servers[$1]:-}" ] || { kill "${servers[$1]}"; wait "${servers[$1]}" || true; servers[$1]=; }
}
await_server() {
    servers[$2]=$1
    until (exec 3<> "/dev/tcp/127.0.0.1/$2") 2> /dev/null; do
        kill -0 "$1" 2> /dev/null || { echo "the server ended" >&2; exit 1; }
        sleep 0.1
    done
}
"""


@dataclass(frozen=True)
class Setting:
    """What the reader of a page has before reading it."""

    before: str = ""  # shell commands to run first
    after: str = ""  # shell commands that check what the page's code did
    names: str = ""  # Python code that defines the names which the Python blocks use
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # path: the language and index of its block
    replaced: Mapping[str, str] = field(default_factory=dict)  # placeholders
    gateway: str = ""  # flags of the gateway that is running
    is_python_last: bool = False  # the shell commands come first
    parts: tuple[str, ...] = ()  # of tests/needs.py, in addition to those that the page names
    is_slow: bool = False  # run it only in `make test-all`
    repeats: str = ""  # the file with a test of the same commands and code: run the page only in `make soak`


def find_port(command: str) -> int | None:
    """Return the port on which a command serves, or None if it is not a server."""
    for pattern, default in _SERVERS.items():
        if re.match(rf"(\w+=\S* )*{pattern}", command):
            explicit = re.search(r"--port[ =](\d+)|--http \S+:(\d+)", command)
            return int(explicit[1] or explicit[2]) if explicit else default
    return None


def _start_server(command: str, port: int) -> str:
    command = re.sub(r"(\s+&)?(\s+#.*)?\s*$", "", command)
    if "--http" not in command and "--port" not in command:
        command += f" --port {port}"
    return f"stop_server {port}; {command} & await_server $! {port}"


def write_command(command: str) -> str:
    """Return a command in the form in which a script can run it."""
    if (port := find_port(command)) is not None:
        return _start_server(command, port) + (
            f"; stop_server {port}" if "# " in command and "Ctrl-C" in command else ""
        )
    if _ENDLESS.match(command):
        return re.sub(r"(\s+&)?(\s+#.*)?\s*$", "", command) + " --concurrency 2 &"
    if command.startswith("curl -N"):  # a stream without an end
        return f"timeout 2 {command} || [ $? = 124 ]"
    if re.match(r"turngate doctor(?!.*--(gateway|config|only))", command):  # its default port may be in use
        return command.replace("turngate doctor", "turngate doctor --port 8701", 1)
    return command


def _find_services(texts: list[str], gateway: str) -> Iterator[str]:
    """Yield the servers that the page uses before it starts them."""
    for command, port in ((ENGINE, 8000), (f"{GATEWAY} {gateway}", 8700)):
        used = [n for n, text in enumerate(texts) if re.search(rf":{port}\b", text) and find_port(text) != port]
        started = [n for n, text in enumerate(texts) if find_port(text) == port]
        if used and (not started or used[0] < started[0]):
            yield _start_server(command, port)


class Script:
    """The script of one page, without the commands and blocks whose text starts with one of `unrun`."""

    def __init__(self, page: str, setting: Setting, unrun: tuple[str, ...] = ()) -> None:
        self.setting = setting
        self._blocks = read_blocks(page)
        self.steps = [step for step in self._read_steps() if not step.text.startswith(unrun)]
        if setting.is_python_last:
            self.steps.sort(key=lambda step: isinstance(step, Block))

    def _read_steps(self) -> Iterator[Command | Block]:
        for block in self._blocks:
            if block.language == SHELL:
                yield from split_commands(block)
            elif block.language == "python":
                yield block

    def read_texts(self) -> list[str]:
        """Return everything that the script runs and that its files contain."""
        setting = self.setting
        files = [self._find_file(*place) for place in setting.files.values()]
        steps = [self._fill_in(step.text) for step in self.steps]
        return [setting.before, setting.gateway, setting.names, *files, *steps, setting.after]

    def _find_file(self, language: str, index: int) -> str:
        return self._fill_in([block.text for block in self._blocks if block.language == language][index])

    def _fill_in(self, text: str) -> str:
        for placeholder, value in {**self.setting.replaced, **_REPLACED}.items():
            text = text.replace(placeholder, value)
        return text

    def write(self, folder: Path, ports: Mapping[int, int]) -> str:
        """Write the files of the page into a folder, and return the script."""
        setting = self.setting
        files = {"names.py": setting.names}
        files |= {name: self._find_file(*place) for name, place in setting.files.items()}
        lines: list[str] = []
        programs: list[str] = []
        for step in [*self.steps, None]:
            if isinstance(step, Block):
                programs.append(name := f"block-{step.line}.py")
                files[name] = self._fill_in(step.text)
                continue
            if programs:  # consecutive blocks are one program
                lines.append(f"run_block names.py {' '.join(programs)}")
                programs = []
            if step is not None:
                command = self._fill_in(step.text)
                lines += [f"echo {shlex.quote('▸ ' + command)}", write_command(command)]
        services = _find_services(self.read_texts(), setting.gateway)
        script = "\n".join([_HEADER, *services, setting.before, *lines, setting.after, ""])

        def map_ports(text: str) -> str:
            return _PORT.sub(lambda found: str(ports[int(found[1])]), text)

        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(map_ports(text), encoding="utf-8")
        return map_ports(script)
