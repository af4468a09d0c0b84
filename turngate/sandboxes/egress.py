"""Connect a sandbox to the gateway: a relay inside, and a URL that an agent in there takes for its model provider's.

    async with door.opened(gateway, folder=sandbox.shared[0]) as way, connected(sandbox, way) as base_url: …

A `Door` is used where sandbox and host share a folder (local, bubblewrap, docker), a `Tunnel` or a public URL where they do not. The
relay is a background job with the runtime that the sandbox has; one that was killed is started again on the same port.
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
_INTERPRETER_FLAGS = {
    "python": ("-I", "-S"),
    "node": (),
}  # it needs nothing but the standard library, and looking for more takes time
START_S = 30.0
PROBE_S = 60.0
RESTART_PAUSE_S = 0.5  # before a relay that has ended is started again

# A Python's own path is asked for: what is called `python3` may be a script that looks for one, at ten times the cost of starting it.
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
    way: GatewayDoor | Tunnel | str,
    *,
    python: str = "",
    node: str = "",
    give_up_s: float = relay.GIVE_UP_S,
) -> AsyncIterator[str]:
    """The URL by which the sandbox reaches the gateway, as long as the block runs.

    `python`, `node`: an interpreter in the sandbox to run the relay with, where it is not on the PATH. `give_up_s`: how long
    a call waits for a gateway that does not answer.
    """
    async with AsyncExitStack() as stack:
        folder = f"{sandbox.home}/{RELAY_FOLDER}"
        target = f"{folder}/target"

        async def follow(url: str) -> None:
            await sandbox.write(target, url.encode(), mode=0o600)

        await follow(_relay_target(sandbox, way))
        if isinstance(way, Tunnel):
            await stack.enter_async_context(way.followed(follow))
            await follow(way.url)  # it may have changed before we followed it
        run = await _stage_relay(sandbox, folder, python, node)
        command = [*run, "--target", target, "--port-file", f"{folder}/port", "--give-up-s", str(give_up_s)]
        first = [*command, "--port", "0", "--reached-file", f"{folder}/reached"]
        job = await sandbox.start(first, env={STANDALONE_ENV: "1"}, stderr=f"{folder}/log")
        kept = [job]
        stack.push_async_callback(_kill_relay, kept)
        port = await _read_port(sandbox, folder)
        watch = asyncio.create_task(_keep_running(sandbox, [*command, "--port", str(port)], f"{folder}/log", kept))
        stack.push_async_callback(_cancel_task, watch)
        await _check_gateway_reached(sandbox, f"{folder}/reached")
        yield f"http://127.0.0.1:{port}"


def _relay_target(sandbox: Sandbox, way: GatewayDoor | Tunnel | str) -> str:
    """The gateway's address, as a relay in the sandbox sees it."""
    if isinstance(way, str):
        return way
    if isinstance(way, Tunnel):
        return way.url
    if way.socket is None:
        return way.address
    if sandbox.shared is None or way.socket.parent != sandbox.shared[0]:
        raise SandboxError("the door is not in the folder that this sandbox shares")
    return f"unix:{sandbox.shared[1]}/{way.socket.name}"


async def _stage_relay(sandbox: Sandbox, folder: str, python: str, node: str) -> list[str]:
    """Put the relay into the sandbox. The command that runs it."""
    found = await sandbox.exec(["/bin/sh", "-c", FIND_RUNTIME, "sh", python, node, folder], timeout_s=START_S)
    if found.exit_code:
        raise SandboxError(
            "the sandbox has neither Python 3.8 nor Node to run the relay with: "
            "add one to the image, or mount one and name it"
        )
    kind, _, program = found.stdout.decode().strip().partition(" ")
    source = RELAY_SOURCES[kind]
    await sandbox.write(f"{folder}/{source.name}", await asyncio.to_thread(source.read_bytes))
    return [program, *_INTERPRETER_FLAGS[kind], f"{folder}/{source.name}"]


async def _read_port(sandbox: Sandbox, folder: str) -> int:
    said = await _wait_for_file(sandbox, f"{folder}/port", START_S)
    if said.isdigit():
        return int(said)
    log = await sandbox.exec(["cat", f"{folder}/log"], timeout_s=START_S)
    raise SandboxError(f"the relay did not start: {log.stdout.decode(errors='replace').strip()[-300:]}")


async def _check_gateway_reached(sandbox: Sandbox, file: str) -> None:
    """Fail now, by name, and not later in the middle of an agent's first call."""
    said = await _wait_for_file(sandbox, file, PROBE_S)
    if said != relay.REACHED:
        raise SandboxError(f"the gateway cannot be reached from the sandbox: {said[-300:] or 'it took too long'}")


async def _wait_for_file(sandbox: Sandbox, file: str, limit_s: float) -> str:
    """What the relay writes into a file, once it does."""
    tries = 50 + round(10 * limit_s)
    done = await sandbox.exec(["/bin/sh", "-c", WAIT_FOR_FILE, "sh", file, str(tries)], timeout_s=limit_s + 5)
    return done.stdout.decode(errors="replace").strip()


async def _keep_running(sandbox: Sandbox, command: list[str], log: str, kept: list[Job]) -> None:
    """Start the relay again when it has ended, however that came."""
    while True:
        await kept[-1].wait()
        await asyncio.sleep(RESTART_PAUSE_S)
        kept.append(await sandbox.start(command, env={STANDALONE_ENV: "1"}, stderr=log))


async def _cancel_task(watch: asyncio.Task[None]) -> None:
    watch.cancel()
    await asyncio.wait([watch])
    if not watch.cancelled():
        watch.exception()  # the sandbox has ended; whoever uses it will notice


async def _kill_relay(kept: list[Job]) -> None:
    with suppress(SandboxError):  # it has ended with its sandbox
        await run_to_completion(kept[-1].kill())
