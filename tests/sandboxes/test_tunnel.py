"""Tunnels: their URL is read from the output, and a dead one is replaced without the agent noticing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import kit
from tests.sandboxes.test_egress import ask
from tests.sandboxes.upstream import reply_with, upstream
from tests.speed import scaled
from turngate.errors import SandboxError
from turngate.sandboxes import door, tunnel
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.egress import connect_sandbox

pytestmark = pytest.mark.process

# A typical tunnel: it prints its address among other lines, uses a new port every time, and forwards connections.
# With a file `broken-PID` it still runs but replies 404, as a dead tunnel does.
COMMAND = """
import asyncio, os, subprocess, sys
async def pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def main():
    child = subprocess.Popen(["sleep", "5" + sys.argv[1]])
    async def accept(reader, writer):
        if os.path.exists(sys.argv[2] + "/broken-" + str(os.getpid())):
            writer.write(b"HTTP/1.1 404 Not Found\\r\\ncontent-length: 0\\r\\n\\r\\n")
            return writer.close()
        up = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
        await asyncio.gather(pipe(reader, up[1]), pipe(up[0], writer))
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print("INFO see https://docs.example/tunnels for help", file=sys.stderr)
    print("x" * 200_000, file=sys.stderr)
    print(f"+ your url is: http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ +", file=sys.stderr, flush=True)
    open(sys.argv[2] + "/pid", "w").write(str(os.getpid()))
    while True:
        await asyncio.sleep(0.1)
        print("noise " * 100, flush=True)
asyncio.run(main())
"""


def fast_options(probe_every_s: float = 0.2) -> dict[str, Any]:
    probes = {"probe_every_s": probe_every_s, "probe_s": scaled(2), "probes_lost": 2}
    return {**probes, "pause_s": (0.1, 1.0), "pattern": r"your url is: (\S+)"}


def command(folder: Path) -> list[str]:
    return [sys.executable, "-c", COMMAND, "{port}", str(folder)]


async def test_tunnel_url_is_read_and_process_group_ends(tmp_path: Path) -> None:
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        async with tunnel.open_tunnel(command(tmp_path), opened_door.address, **fast_options()) as opened:
            assert opened.url.startswith("http://127.0.0.1:")
            assert opened.url != opened_door.address
            port = opened_door.address.rpartition(":")[2]
            assert kit.processes(f"sleep\x005{port}")
            await asyncio.sleep(1)  # a live tunnel is kept
            assert opened.replaced == 0
        await kit.wait_until(lambda: not kit.processes(f"sleep\x005{port}"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "echo no address here",
            "exited with code 0 without printing a URL; the last lines of its output: no address here",
        ),
        (
            "sh -c 'echo oh no >&2; exit 3'",
            "exited with code 3 without printing a URL; the last lines of its output: oh no",
        ),
        ("sleep 60", "ran for 1 s"),
        ("no-such-tunnel {port}", "program no-such-tunnel not found"),
        ("", "is empty"),
    ],
)
async def test_command_without_url_is_error(words: str, why: str) -> None:
    start_s = 1 if "ran for" in why else scaled(10)
    with pytest.raises(SandboxError, match=why):
        async with tunnel.open_tunnel(words, "http://127.0.0.1:9", start_s=start_s):
            pass


async def test_placeholders_are_replaced_in_command() -> None:
    async with tunnel.open_tunnel(
        "sh -c 'echo https://{port}.example/{url}; sleep 60'", "http://127.0.0.1:99", probe_every_s=60
    ) as opened:
        assert opened.url == "https://99.example/http://127.0.0.1:99"


@pytest.mark.sample(1)
@pytest.mark.parametrize("death", ["killed", "broken"])
async def test_dead_tunnel_is_replaced_unnoticed(tmp_path: Path, root: Path, death: str) -> None:
    """A client in the sandbox that never retries calls all the time while the tunnel dies."""
    sandbox = await kit.MAKE["local"](root).create(SandboxSpec())
    options = fast_options(3600.0 if death == "killed" else 0.2)  # the end of the command is noticed without a probe
    replies: list[str] = []

    async def keep_calling(url: str) -> None:
        while True:
            replies.append(await ask(sandbox, f"{url}/v1/messages"))

    try:
        async with (
            upstream(reply_with("yes")) as gateway,
            door.open_door(gateway.url) as opened_door,
            tunnel.open_tunnel(command(tmp_path), opened_door.address, **options) as opened,
            connect_sandbox(sandbox, opened) as url,
        ):
            calling = asyncio.create_task(keep_calling(url))
            await kit.wait_until(lambda: len(replies) >= 3)
            first, pid = opened.url, int((tmp_path / "pid").read_text())
            if death == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                (tmp_path / f"broken-{pid}").touch()
            await kit.wait_until(lambda: opened.replaced == 1, within_s=20)
            count = len(replies)
            await kit.wait_until(lambda: len(replies) >= count + 3, within_s=20)
            calling.cancel()
            await asyncio.wait([calling])
            assert opened.url != first
            assert set(replies) == {"200 yes"}
    finally:
        await sandbox.stop()


async def test_failing_tunnel_restart_backs_off(tmp_path: Path) -> None:
    file = tmp_path / "tries"
    script = f"date +%s.%N >>{file}; [ $(wc -l <{file}) = 1 ] && echo http://127.0.0.1:1 && sleep 0.5; exit 1"
    logged: list[str] = []

    def tries() -> list[float]:
        return [float(line) for line in file.read_text().splitlines()]

    options = {"probe_every_s": 60.0, "pause_s": (0.2, 0.8), "log": logged.append}
    async with tunnel.open_tunnel(["sh", "-c", script], "http://127.0.0.1:9", **options):
        await kit.wait_until(lambda: len(tries()) >= 5, within_s=20)
        for (before, after), pause in zip(pairwise(tries()), (0.2, 0.4, 0.8, 0.8), strict=False):
            assert after - before > 0.95 * pause
        assert any("exited with code 1 without printing a URL" in line for line in logged)
