"""Run an agent's command once against the scripted engine, and observe how it reaches the model.

The command runs in a local sandbox with an empty home folder, as it would in a rollout. The usual environment variables in which programs
look for an endpoint or a key are set, each to a different value. The requests therefore show which variables the agent read.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from turngate.agents.installation import Installation
from turngate.agents.launch import Launch, plan_launch
from turngate.agents.spec import AgentSpec
from turngate.client.gateway import GatewayClient
from turngate.config import ServeConfig
from turngate.engines.scripted import Scripted
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.rollout.call_log import CallLog, LoggedCall
from turngate.rollout.playbook import Playbook
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec
from turngate.server.asgi import App, Receive, Scope, Send
from turngate.server.run import run_embedded

MODEL = "watched"
PROMPT = "Say hello."
# The variables that programs read, and the values that an agent's description gives them.
URL_VARIABLES = {
    "OPENAI_BASE_URL": "{base_url}/v1",
    "OPENAI_API_BASE": "{base_url}/v1",
    "LLM_BASE_URL": "{base_url}/v1",
    "ANTHROPIC_BASE_URL": "{base_url}",
    "GOOGLE_GEMINI_BASE_URL": "{base_url}",
    "TURNGATE_BASE_URL": "{base_url}",
}
KEY_VARIABLES = dict.fromkeys(
    (
        *("OPENAI_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
        *("GEMINI_API_KEY", "GOOGLE_API_KEY", "TURNGATE_API_KEY"),
    ),
    "{api_key}",
)
MODEL_VARIABLES = dict.fromkeys(
    ("OPENAI_MODEL", "LLM_MODEL", "ANTHROPIC_MODEL", "GEMINI_MODEL", "TURNGATE_MODEL"), "{model}"
)
VARIABLES = URL_VARIABLES | KEY_VARIABLES | MODEL_VARIABLES
COMMAND = "command"  # the mark of {base_url} and {api_key} in the command and its `env`
_MARKED_PATH = re.compile(r"/from/([A-Za-z_][A-Za-z0-9_]*)(/.*|$)")


class WatchedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed while a command ran: its requests, the variables that set its endpoint and key, its exit code and its output."""

    calls: tuple[LoggedCall, ...]
    variables: tuple[str, ...]  # the variables from which the agent read its endpoint and key
    exit_code: int | None  # None if the command was stopped at the time limit
    output: str  # the end of what the command printed


class _Marks:
    """Adds a mark to each URL and key: the name of the environment variable that contains it, or `COMMAND`.

    An application that `wrap` returns records the marks in requests, and removes them.
    """

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.seen: dict[str, None] = {}

    def mark_url(self, url: str, name: str) -> str:
        return f"{url}/from/{name}"

    def mark_key(self, name: str) -> str:
        return f"{self.key}.{name}"

    def wrap(self, app: App) -> App:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await app(self._unmark(scope), receive, send)

        return serve

    def _unmark(self, scope: Scope) -> Scope:
        changed = dict(scope)
        if found := _MARKED_PATH.match(scope["path"]):
            self.seen[found[1]] = None
            changed["path"] = found[2] or "/"
            changed["raw_path"] = changed["path"].encode()
        changed["headers"] = [(name, self._unmark_key(value)) for name, value in scope["headers"]]
        changed["query_string"] = self._unmark_key(scope.get("query_string", b""))
        return changed

    def _unmark_key(self, value: bytes) -> bytes:
        def remove(found: re.Match[bytes]) -> bytes:
            self.seen[found[1].decode()] = None
            return self.key.encode()

        return re.sub(re.escape(self.key.encode()) + rb"\.([A-Za-z_]+)", remove, value) if self.key else value


async def watch_command(
    name: str, command: Sequence[str], env: Mapping[str, str], backend: Backend, *, timeout_s: float
) -> WatchedRun:
    """Run a command once, and return what was observed. `command` and `env` may contain placeholders such as {base_url}."""
    spec = draft_command(name, command, env)
    renderer, certificate = load_renderer(BUILTIN_TOKENIZER, model="", family="auto")
    engine = Scripted(Playbook(renderer, []), model=MODEL, max_context=131072, keep=1000)
    log, marks = CallLog(), _Marks()
    with tempfile.TemporaryDirectory(prefix="turngate-watch-") as folder:
        config = ServeConfig(data=str(Path(folder, "data")), model=MODEL, port=0)
        async with (
            run_embedded(
                config, engine=engine, renderer=(renderer, certificate), wrap=lambda app: marks.wrap(log.wrap(app))
            ) as address,
            GatewayClient(address.url, address.admin_key) as gateway,
        ):
            opened = await gateway.open({"model": MODEL})
            marks.key = opened.key
            log.calls.clear()  # keep only the agent's calls
            sandbox = await backend.create(SandboxSpec(network="open", life_s=2 * timeout_s))
            try:
                launch = _plan(spec, sandbox, address.url, marks)
                exit_code = await _run(sandbox, launch, timeout_s)
                output = await _read_output(sandbox, launch)
            finally:
                await sandbox.stop()
    output = output.replace(marks.key, "[key]")
    return WatchedRun(calls=tuple(log.calls), variables=tuple(marks.seen), exit_code=exit_code, output=output)


def draft_command(name: str, command: Sequence[str], env: Mapping[str, str]) -> AgentSpec:
    """Return the description of an agent that runs this command.

    If neither `command` nor `env` contains {prompt} or {prompt_file}, the prompt is sent on standard input.
    """
    spec = AgentSpec(name=name, title=name, dialect="any", command=tuple(command), env=dict(env))
    takes_prompt = spec.uses("prompt") or spec.uses("prompt_file")
    return spec if takes_prompt else msgspec.structs.replace(spec, stdin="{prompt}")


def _plan(spec: AgentSpec, sandbox: Sandbox, url: str, marks: _Marks) -> Launch:
    launch = plan_launch(
        spec,
        Installation(),
        base_url=marks.mark_url(url, COMMAND),
        api_key=marks.mark_key(COMMAND),
        model=MODEL,
        prompt=PROMPT,
        home=sandbox.home,
        workdir=sandbox.workdir,
    )
    env = dict.fromkeys(MODEL_VARIABLES, MODEL)
    env |= {name: marks.mark_key(name) for name in KEY_VARIABLES}
    env |= {name: value.replace("{base_url}", marks.mark_url(url, name)) for name, value in URL_VARIABLES.items()}
    return msgspec.structs.replace(launch, env=env | launch.env)


async def _run(sandbox: Sandbox, launch: Launch, timeout_s: float) -> int | None:
    for file in launch.files:
        await sandbox.write(file.path, file.data, mode=file.mode)
    job = await sandbox.start(
        launch.command, env=launch.env, cwd=launch.cwd, stdout=launch.stdout, stderr=launch.stderr
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await job.wait()
    except TimeoutError:
        return None
    finally:
        await job.kill()


async def _read_output(sandbox: Sandbox, launch: Launch) -> str:
    parts = [await sandbox.read(path) for path in (launch.stdout, launch.stderr)]
    return b"\n".join(parts).decode("utf-8", "replace").strip()[-1000:]
