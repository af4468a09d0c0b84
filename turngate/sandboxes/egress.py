"""Connect a sandbox to the gateway: start a relay in the sandbox, and yield the URL that the agent uses for its model calls.

    async with open_door(gateway, folder=sandbox.shared[0]) as door, connect_sandbox(sandbox, door) as base_url: …

If the sandbox and the host share a folder (local, bubblewrap, docker), the relay connects to a `GatewayDoor`. Otherwise it connects to a
`Tunnel` or a public URL. The relay is a background job that runs on the sandbox's Python or Node. If the relay ends, it is restarted on the
same port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError
from turngate.sandboxes import relay
from turngate.sandboxes.base import STANDALONE_ENV, Job, Sandbox
from turngate.sandboxes.door import GatewayDoor
from turngate.sandboxes.tunnel import Tunnel

RELAY_FOLDER = ".turngate"  # in the sandbox's home
RELAY_SOURCES = {"python": Path(relay.__file__), "node": Path(relay.__file__).with_suffix(".mjs")}
# The relay needs only the standard library, and searching for other packages takes time.
_INTERPRETER_FLAGS = {"python": ("-I", "-S"), "node": ()}
START_S = 30.0
PROBE_S = 60.0
RESTART_PAUSE_S = 0.5

# Asks Python for its real path, because `python3` may be a wrapper script that first searches for a Python and takes ten times as long.
FIND_RUNTIME = """
rm -f "$3/port" "$3/reached"
for python in "$1" python3 python; do
  [ -n "$python" ] || continue
  found=$("$python" -I -S -c 'import sys; sys.version_info < (3, 8) and sys.exit(1); print(sys.executable)' 2>/dev/null) || continue
  echo "python ${found:-$python}" && exit
done
for node in "$2" node nodejs; do
  [ -n "$node" ] && "$node" --version >/dev/null 2>&1 && echo "node $node" && exit
done
exit 1
"""
WAIT_FOR_FILE = """
tries=0
while [ ! -s "$1" ] && [ $tries -lt "$2" ]; do [ $tries -lt 50 ] && sleep 0.02 || sleep 0.1; tries=$((tries + 1)); done
cat "$1"
"""


@asynccontextmanager
async def connect_sandbox(
    sandbox: Sandbox,
    egress: GatewayDoor | Tunnel | str,
    *,
    python: str = "",
    node: str = "",
    give_up_s: float = relay.GIVE_UP_S,
) -> AsyncIterator[str]:
    """Keep the sandbox connected to the gateway while the block runs, and yield the URL at which the agent can reach the gateway.

    If no interpreter for the relay is on the sandbox's PATH, set `python` or `node` to an interpreter's path. While the gateway cannot be
    reached, a call is retried for up to `give_up_s` seconds.
    """
    async with AsyncExitStack() as stack:
        folder = f"{sandbox.home}/{RELAY_FOLDER}"
        target = f"{folder}/target"

        async def write_target(url: str) -> None:
            await sandbox.write(target, url.encode(), mode=0o600)

        await write_target(_relay_target(sandbox, egress))
        if isinstance(egress, Tunnel):
            await stack.enter_async_context(egress.notify(write_target))
            await write_target(egress.url)  # the URL may have changed before we subscribed
        run = await _stage_relay(sandbox, folder, python, node)
        command = [*run, "--target", target, "--port-file", f"{folder}/port", "--give-up-s", str(give_up_s)]
        first = [*command, "--port", "0", "--reached-file", f"{folder}/reached"]
        job = await sandbox.start(first, env={STANDALONE_ENV: "1"}, stderr=f"{folder}/log")
        jobs = [job]
        stack.push_async_callback(_kill_relay, jobs)
        port = await _read_port(sandbox, folder)
        watch = asyncio.create_task(_keep_running(sandbox, [*command, "--port", str(port)], f"{folder}/log", jobs))
        stack.push_async_callback(_cancel_task, watch)
        await _check_gateway_reached(sandbox, f"{folder}/reached")
        yield f"http://127.0.0.1:{port}"


def _relay_target(sandbox: Sandbox, egress: GatewayDoor | Tunnel | str) -> str:
    """Return the gateway's address as a relay in the sandbox sees it."""
    if isinstance(egress, str):
        return egress
    if isinstance(egress, Tunnel):
        return egress.url
    if egress.socket is None:
        return egress.address
    if sandbox.shared is None or egress.socket.parent != sandbox.shared[0]:
        raise SandboxError(
            "the door's socket is not in a folder that the sandbox shares with the host; pass `folder=sandbox.shared[0]` to `open_door`, "
            "or use a tunnel if the sandbox shares no folder"
        )
    return f"unix:{sandbox.shared[1]}/{egress.socket.name}"


async def _stage_relay(sandbox: Sandbox, folder: str, python: str, node: str) -> list[str]:
    """Copy the relay into the sandbox and return the command that runs it."""
    found = await sandbox.exec(["/bin/sh", "-c", FIND_RUNTIME, "sh", python, node, folder], timeout_s=START_S)
    if found.timed_out:
        raise SandboxError(
            f"the search for Python or Node in the sandbox took longer than {START_S:.0f} s; the machine may be overloaded"
        )
    if found.exit_code:
        raise SandboxError(
            "the relay to the gateway needs Python 3.8 or newer, or Node, but the sandbox has neither; "
            "install one of them in the image or, if the sandbox uses this machine's programs, on this machine"
        )
    kind, _, program = found.stdout.decode().strip().partition(" ")
    source = RELAY_SOURCES[kind]
    await sandbox.write(f"{folder}/{source.name}", await asyncio.to_thread(source.read_bytes))
    return [program, *_INTERPRETER_FLAGS[kind], f"{folder}/{source.name}"]


async def _read_port(sandbox: Sandbox, folder: str) -> int:
    text = await _wait_for_file(sandbox, f"{folder}/port", START_S)
    if text.isdecimal():
        return int(text)
    log = await sandbox.exec(["cat", f"{folder}/log"], timeout_s=START_S)
    reason = (
        log.stdout.decode(errors="replace").strip()[-300:]
        or f"it reported neither a port nor an error within {START_S:.0f} s"
    )
    raise SandboxError(f"the relay to the gateway did not start in the sandbox: {reason}")


async def _check_gateway_reached(sandbox: Sandbox, file: str) -> None:
    """Raise `SandboxError` if the relay cannot reach the gateway, so that the rollout fails now instead of at the agent's first call."""
    text = await _wait_for_file(sandbox, file, PROBE_S)
    if text != relay.REACHED:
        raise SandboxError(
            f"the gateway cannot be reached from the sandbox: {text[-300:] or f'no answer within {PROBE_S:.0f} s'}"
        )


async def _wait_for_file(sandbox: Sandbox, file: str, limit_s: float) -> str:
    """Wait until the relay has written a file, and return the file's content. Return an empty string after about `limit_s` seconds."""
    tries = 50 + round(10 * limit_s)
    done = await sandbox.exec(["/bin/sh", "-c", WAIT_FOR_FILE, "sh", file, str(tries)], timeout_s=limit_s + 5)
    return done.stdout.decode(errors="replace").strip()


async def _keep_running(sandbox: Sandbox, command: list[str], log: str, jobs: list[Job]) -> None:
    """Restart the relay whenever it ends."""
    while True:
        await jobs[-1].wait()
        await asyncio.sleep(RESTART_PAUSE_S)
        jobs.append(await sandbox.start(command, env={STANDALONE_ENV: "1"}, stderr=log))


async def _cancel_task(watch: asyncio.Task[None]) -> None:
    watch.cancel()
    await asyncio.wait([watch])
    if not watch.cancelled():
        watch.exception()  # the sandbox has ended; its next use raises the same error


async def _kill_relay(jobs: list[Job]) -> None:
    with suppress(SandboxError):  # the relay ended with its sandbox
        await run_to_completion(jobs[-1].kill())
