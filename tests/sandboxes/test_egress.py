"""An agent in a sandbox without network reaches only the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.sandboxes.contract import sh
from tests.sandboxes.test_relay import node
from tests.sandboxes.upstream import OK, Call, reply_with, upstream
from tests.speed import scaled
from turngate.errors import SandboxError
from turngate.sandboxes import door, egress
from turngate.sandboxes.base import Backend, Mount, Sandbox, SandboxSpec
from turngate.sandboxes.egress import RELAY_FOLDER, connect_sandbox

pytestmark = pytest.mark.process

# Send a POST from the sandbox, and print the status and the reply.
POST_PROGRAM = """
import sys, urllib.request, urllib.error
try:
    reply = urllib.request.urlopen(urllib.request.Request(sys.argv[1], data=b"question"), timeout=float(sys.argv[2]))
except urllib.error.HTTPError as error:
    reply = error
print(reply.status, reply.read().decode())
"""


async def ask(sandbox: Sandbox, url: str) -> str:
    done = await sandbox.exec(["python3", "-c", POST_PROGRAM, url, str(scaled(30))], timeout_s=scaled(60))
    return done.stdout.decode().strip() or done.stderr.decode()[-200:]


async def stream(call: Call) -> None:
    await call.send(f"HTTP/1.1 200 OK\r\n{OK}transfer-encoding: chunked\r\n\r\n")
    for piece in ("one ", "two"):
        await call.send(f"{len(piece):x}\r\n{piece}\r\n")
    await call.send("0\r\n\r\n")


async def test_sandbox_reaches_only_model_calls_of_gateway(sandbox: Sandbox) -> None:
    assert sandbox.shared
    async with upstream(stream) as gateway:
        folder = sandbox.shared[0]
        async with (
            door.open_door(gateway.url, folder=folder) as opened_door,
            connect_sandbox(sandbox, opened_door, give_up_s=scaled(5)) as url,
        ):
            assert await ask(sandbox, f"{url}/v1/messages") == "200 one two"
            assert (await ask(sandbox, f"{url}/admin/sessions")).startswith("404")
            assert (await ask(sandbox, f"{url}/v1/rollouts/other/chat/completions")).startswith("404")
            posts = [request for request in gateway.requests if request.request_line.startswith("POST")]
            assert [(request.request_line.split()[1], request.body) for request in posts] == [
                ("/v1/messages", b"question")
            ]
        assert not list(folder.iterdir())
        assert "Connection refused" in await ask(sandbox, f"{url}/v1/messages")


async def test_killed_relay_restarts_on_same_port(sandbox: Sandbox) -> None:
    assert sandbox.shared
    async with (
        upstream(reply_with("still here")) as gateway,
        door.open_door(gateway.url, folder=sandbox.shared[0]) as opened_door,
        connect_sandbox(sandbox, opened_door) as url,
    ):
        await sh(sandbox, f"kill -KILL $(pgrep -f {sandbox.home}/{RELAY_FOLDER}/[r]elay.py)")
        async with asyncio.timeout(scaled(20)):
            while await ask(sandbox, f"{url}/v1/messages") != "200 still here":
                await asyncio.sleep(0.25)


async def test_call_survives_gateway_restart(sandbox: Sandbox) -> None:
    assert sandbox.shared
    async with (
        upstream(reply_with("after")) as gateway,
        door.open_door(gateway.url, folder=sandbox.shared[0]) as opened_door,
        connect_sandbox(sandbox, opened_door) as url,
    ):
        port = int(gateway.url.rpartition(":")[2])
        await gateway.close()
        call = asyncio.create_task(ask(sandbox, f"{url}/v1/messages"))
        await asyncio.sleep(1.5)
        assert not call.done()
        await gateway.listen(port=port)
        assert await call == "200 after"


async def test_unreachable_gateway_is_error_at_start(sandbox: Sandbox) -> None:
    assert sandbox.shared
    async with door.open_door("http://127.0.0.1:1", folder=sandbox.shared[0]) as opened_door:
        with pytest.raises(SandboxError, match="cannot be reached from the sandbox"):
            async with connect_sandbox(sandbox, opened_door, give_up_s=0.5):
                pass
    assert not await list_relays(sandbox)


@pytest.mark.needs("node")
async def test_node_relay_without_python(backend: Backend) -> None:
    program = Path(node()).resolve()
    inside = str(program.parent) if backend.name == "local" else "/opt/node"
    sandbox = await backend.create(SandboxSpec(mounts=(Mount(str(program.parent), inside),)))
    try:
        assert sandbox.shared
        hide = "mkdir bin && for name in python3 python; do printf '#!/bin/sh\\nexit 127\\n' >bin/$name && chmod +x bin/$name; done"
        await sh(sandbox, hide)
        sandbox.env = {**sandbox.env, "PATH": f"{sandbox.workdir}/bin:/usr/bin:/bin"}  # type: ignore[attr-defined]
        async with (
            upstream(reply_with("by node")) as gateway,
            door.open_door(gateway.url, folder=sandbox.shared[0]) as opened_door,
        ):
            async with connect_sandbox(sandbox, opened_door, node=f"{inside}/node") as url:
                assert await sh(sandbox, f"curl -s -d question {url}/v1/messages") == "by node"
                assert "relay.mjs" in await sh(sandbox, f"ls {sandbox.home}/{RELAY_FOLDER}")
            with pytest.raises(SandboxError, match=r"Python 3\.8 or newer, or Node, but the sandbox has neither"):
                sandbox.env = {**sandbox.env, "PATH": f"{sandbox.workdir}/bin"}  # type: ignore[attr-defined]
                async with connect_sandbox(sandbox, opened_door):
                    pass
    finally:
        await sandbox.stop()


async def test_slow_search_for_interpreter_does_not_ask_to_install_one(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "START_S", 0.3)
    sandbox = await backend.create(SandboxSpec())
    try:
        await sh(sandbox, "mkdir bin && printf '#!/bin/sh\\nsleep 600\\n' >bin/python3 && chmod +x bin/python3")
        sandbox.env = {**sandbox.env, "PATH": f"{sandbox.workdir}/bin:/usr/bin:/bin"}  # type: ignore[attr-defined]
        with pytest.raises(SandboxError, match="the search for Python or Node"):
            async with connect_sandbox(sandbox, "http://127.0.0.1:1"):
                pass
    finally:
        await sandbox.stop()


async def test_cancellation_leaves_no_relay(sandbox: Sandbox) -> None:
    assert sandbox.shared
    async with upstream() as gateway, door.open_door(gateway.url, folder=sandbox.shared[0]) as opened_door:

        async def use() -> None:
            async with connect_sandbox(sandbox, opened_door):
                await asyncio.sleep(60)

        for after_s in (0.05, 0.3, 2.0):
            task = asyncio.create_task(use())
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await list_relays(sandbox)


async def test_sandbox_may_stop_before_relay(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    assert sandbox.shared
    folder = sandbox.shared[0]
    async with (
        upstream() as gateway,
        door.open_door(gateway.url, folder=folder) as opened_door,
        connect_sandbox(sandbox, opened_door),
    ):
        await sandbox.stop()
        await asyncio.sleep(1)


async def list_relays(sandbox: Sandbox) -> list[str]:
    await asyncio.sleep(0.2)
    return (await sandbox.exec(["pgrep", "-f", f"{sandbox.home}/{RELAY_FOLDER}/relay.py"])).stdout.decode().split()


async def test_relay_command_line_has_no_secret(sandbox: Sandbox) -> None:
    assert sandbox.shared
    async with (
        upstream() as gateway,
        door.open_door(gateway.url, folder=sandbox.shared[0]) as opened_door,
        connect_sandbox(sandbox, opened_door),
    ):
        assert gateway.url not in await sh(sandbox, "ps axww -o args")
