"""Helpers for the rollout tests: a gateway, a folder for sandboxes, and agents that are small programs.

    async with open_harness([say("Hello.")]) as harness:
        outcome = await harness.run('print(ask("Hi"))')
        assert outcome.collected.stdout == "Hello.\n"

The agent is the catalogue's `shell`, which runs Python here. Its program is the prompt, with `PRELUDE` before it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests import kit
from tests.sandboxes import kit as sandboxes
from tests.speed import scaled
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec, find_agent, parse_spec
from turngate.client.gateway import GatewayClient
from turngate.engines.scripted import Script, ScriptedTurn
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes import folders
from turngate.sandboxes.base import Backend
from turngate.tasks.task import Task

# The functions of a small agent, with the standard library only: `ask` calls the model, `http` sends any request. The rollout's own limit
# ends a call that hangs.
PRELUDE = """\
import json, os, sys, time, urllib.request, urllib.error
URL, KEY = os.environ["TURNGATE_BASE_URL"], os.environ["TURNGATE_API_KEY"]

def http(method, path, body=None, key=KEY, url=URL, **headers):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({"authorization": "Bearer " + key} if key else {}), **headers}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3600) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def ask(*texts):
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    status, text = http("POST", "/v1/chat/completions", {"model": os.environ["TURNGATE_MODEL"], "messages": messages})
    if status != 200:
        sys.exit(f"{status} {text}")
    return json.loads(text)["choices"][0]["message"]["content"]

"""


class Harness:
    """Runs rollouts against `gateway`, collects their results in `folder`, and keeps sandboxes below `root`."""

    def __init__(
        self, gateway: kit.Running, client: GatewayClient, connector: GatewayConnector, root: Path, folder: Path
    ) -> None:
        self.gateway = gateway
        self.client = client
        self.connector = connector
        self.root = root
        self.folder = folder
        self.stages: list[str] = []  # of the last rollout

    def rollout(
        self,
        program: str = "",
        *,
        command: str = "exec python3 -",
        agent: AgentSpec | None = None,
        installed: Installation | None = None,
        backend: Backend | str = "local",
        client: GatewayClient | None = None,
        watch: Callable[[RolloutProgress], None] = lambda progress: None,
        task: Task | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Rollout:
        """Prepare a rollout of a Python `program`, or of a `task` with a shell `command`."""
        self.stages = stages = []

        def record_stage(progress: RolloutProgress) -> None:
            if not stages or stages[-1] != progress.stage:
                stages.append(progress.stage)
            watch(progress)

        spec = RolloutSpec(
            task=task or Task(id="test", instruction=PRELUDE + program),
            agent=agent or find_agent("shell").spec,
            installed=installed or Installation(),
            backend=sandboxes.MAKE[backend](self.root) if isinstance(backend, str) else backend,
            model="m",
            timeout_s=timeout_s or scaled(60),
            **{"folder": self.folder, "options": {} if agent else {"command": command}, **fields},
        )
        return Rollout(spec, client or self.client, self.connector, record_stage)

    async def run(self, program: str = "", **options: Any) -> Outcome:
        return await self.rollout(program, **options).run()

    def read_work(self, outcome: Outcome, name: str) -> bytes:
        """Read a file that the agent left in its working folder."""
        return (self.folder / outcome.session / "work" / name).read_bytes()

    async def open_sessions(self) -> list[str]:
        return [
            session["id"] for session in (await self.gateway._request("GET", "/admin/sessions?status=open"))["sessions"]
        ]

    def alive(self) -> list[str]:
        """List folders and processes of sandboxes below `root` that still exist."""
        found = [path.name for path in self.root.iterdir()]
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    if (
                        f"{folders.SANDBOX_ENV}=local-".encode() in (process / "environ").read_bytes()
                        and str(self.root).encode() in (process / "environ").read_bytes()
                    ):
                        found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    pass
        return found


@asynccontextmanager
async def open_harness(script: Script | Sequence[ScriptedTurn] = (), **config: Any) -> AsyncIterator[Harness]:
    """Open a harness whose engine replies from `script`, or with "Done.". Check at the end that no sandbox is left."""
    async with AsyncExitStack() as stack:
        # Short, because the path of a unix socket must be short.
        root = Path(tempfile.mkdtemp(prefix="tg-"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-left-")))
        running = await stack.enter_async_context(
            kit.gateway(script or (lambda request, n: kit.say("Done.")), **config)
        )
        client = await stack.enter_async_context(GatewayClient(running.root, running.app.admin_key))
        connector = await stack.enter_async_context(GatewayConnector(running.root))
        harness = Harness(running, client, connector, root, folder)
        yield harness
        assert harness.alive() == []


def parse_agent(toml: str) -> AgentSpec:
    """Parse a user-defined agent."""
    return parse_spec(toml, "own.toml")
