"""A full run of the service with planted secrets, and a search for them in everything the run produced.

It uses `turngate mcp` over both transports and the Python API, with rollouts that end in every possible way.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.mcp.kit import call_rejected, call_tool
from tests.sandboxes.kit import need
from tests.secrets.kit import (
    PROCESSES,
    PROVIDER_KEY,
    TURNGATE,
    Processes,
    Provider,
    Receiver,
    Workspace,
    find_issued_secrets,
    open_workspace,
    search_program,
)
from tests.speed import scaled

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.needs("bubblewrap")]

Json = Any
HOSTED, KEYLESS = "openai://gpt-x", "openai://other"
CONFIG = """
data = "{folder}/{name}"
sandbox = "{sandbox}"
agent = "shell"
agents = ["shell"]
running = 3
allowed_hosts = ["127.0.0.1:1"]

[agent_options.shell]
command = "exec python3 -"

[endpoints."openai://gpt-x"]
url = "{url}"
key_env = "{variable}"

[endpoints."openai://other"]
key_env = "NOT_SET"
"""
# Its input comes over stdin, because arguments are in the process list.
API = """
import json, sys
import turngate as tg
from turngate.errors import TurngateError
given = json.load(sys.stdin)
with tg.open(given["model"], agent="shell", options={"command": "exec python3 -"}, sandbox="local", **given["where"]) as client:
    for program in given["programs"]:
        result = client.run(program, test_script=given["test"], progress=False)
        print(result.status, repr(result), result, result._repr_html_(), result.logs, result.files, result.error, sep="\\n")
try:
    tg.open("gpt-x", gateway=given["bad"])
except TurngateError as error:
    print("REFUSED", error)
"""


class Run:
    def __init__(self, workspace: Workspace, provider: Provider, receiver: Receiver) -> None:
        self.workspace = workspace
        self.provider = provider
        self.receiver = receiver
        self.processes = Processes()
        self.results: dict[str, Json] = {}

    def config(self, name: str, sandbox: str) -> Path:
        file = self.workspace.folder / f"{name}.toml"
        file.write_text(
            CONFIG.format(
                folder=self.workspace.folder, name=name, sandbox=sandbox, url=self.provider.url, variable=PROVIDER_KEY
            )
        )
        return file

    @property
    def test(self) -> str:
        """A test that passes if the agent has not seen the answer."""
        # Compared by the shell itself: an argument of grep would be in the process list.
        return f"case $(cat seen.txt) in *'{self.workspace.planted['the hidden answer']}'*) exit 1 ;; esac"

    def over_http(self) -> None:
        """Run rollouts with every kind of end, isolated."""
        key = self.workspace.env["TURNGATE_MCP_KEY"]
        words = ("mcp", "--config", self.config("http", "bubblewrap"), "--http", "127.0.0.1:0", "--log-format", "json")
        with self.workspace.serve(*words) as url:
            asyncio.run(self._http(f"{url}/mcp", key))

    async def _http(self, url: str, key: str) -> None:
        with httpx.Client(trust_env=False, timeout=scaled(5)) as client:
            for authorization in ("", f"Bearer {key}x"):
                self.workspace.evidence.add_response(
                    client.post(url, json={}, headers={"authorization": authorization})
                )
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=scaled(60), trust_env=False) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            await self._run_rollouts(client, isolated=True)

    def over_stdio(self) -> None:
        """Run rollouts without isolation, with text logs."""
        log = self.workspace.folder / "stdio-log"
        # Run by a shell, to keep its stderr.
        words = ["-c", f'exec "$@" 2>> {log}', "sh", *TURNGATE, "mcp", "--config", str(self.config("stdio", "local"))]
        asyncio.run(self._stdio(StdioServerParameters(command="/bin/sh", args=words, env=self.workspace.env)))

    async def _stdio(self, server: StdioServerParameters) -> None:
        async with Client(server) as client:
            await self._run_rollouts(client, isolated=False)

    async def _run_rollouts(self, client: Client, *, isolated: bool) -> None:
        record = self.workspace.evidence.add

        async def call(tool: str, /, **arguments: Json) -> Json:
            answer = await call_tool(client, tool, **arguments)
            record(f"the answer of {tool}", answer)
            return answer

        rollouts: dict[str, dict[str, Json]] = {
            "finished": {"test_script": self.test},
            "the provider fails": {"then": 'print(ask("FAIL-500"))'},
        }
        if isolated:
            rollouts |= {
                "the agent fails": {"then": 'ask("Hi"); sys.exit(3)'},
                "setup fails": {"setup_shell": "env; cat /proc/self/environ; exit 7"},
                "grading fails": {"test_script": f"{self.test}; env; exit 9"},
                "timed out": {"then": 'ask("Hi"); time.sleep(3600)', "agent_timeout_s": scaled(4)},
                "aborted": {"then": 'ask("Hi"); time.sleep(3600)'},
            }
        record("the tools", (await client.list_tools()).model_dump_json())
        await call("list_endpoints")
        started: dict[str, str] = {}
        for name, fields in rollouts.items():
            program = search_program(isolated=isolated, then=fields.pop("then", ""))
            limit = {"agent_timeout_s": min(scaled(240), 3600)}  # what a service allows
            arguments = {"model_key": HOSTED, "instruction": program, "task_id": "marked", **limit, **fields}
            started[name] = (await call("start_rollout", **arguments))["rollout_id"]
        for wrong in (
            {"model_key": KEYLESS},
            {
                "model_key": HOSTED,
                "endpoint_url": f"http://me:{self.workspace.planted['a password in a URL']}@127.0.0.1:1",
            },
            {"model_key": HOSTED, "mode": "direct"},
            {"model_key": "nobody://x"},
        ):
            record("a refusal", await call_rejected(client, "start_rollout", **{"instruction": "x", **wrong}))
        if "aborted" in started:
            await self._wait_for_turn(call, started["aborted"])
            await call("abort_rollout", rollout_id=started["aborted"], reason="enough")
        for name, rollout in started.items():
            self.results[f"{name}, {'http' if isolated else 'stdio'}"] = await call(
                "finalize_rollout", rollout_id=rollout
            )
            await self._read_events(call, rollout)
            await call("get_messages", rollout_id=rollout)
            await call("get_state", rollout_id=rollout)
        await call("list_rollouts")

    async def _wait_for_turn(self, call: Any, rollout: str) -> None:
        kinds: list[str] = []
        cursor = 0
        while "turn" not in kinds:
            page = await call("subscribe_events", rollout_id=rollout, after=cursor, wait_s=20)
            kinds += [event["kind"] for event in page["events"]]
            cursor = page["cursor"]
            assert not page["over"], kinds

    async def _read_events(self, call: Any, rollout: str) -> None:
        cursor, over = 0, False
        while not over:
            page = await call("subscribe_events", rollout_id=rollout, after=cursor, wait_s=20)
            cursor, over = page["cursor"], page["over"]

    def from_python(self) -> None:
        """Print results as text and as HTML for a notebook."""
        arguments = {
            "model": f"{HOSTED}@{self.provider.url}",
            "where": {"key_env": PROVIDER_KEY, "data": str(self.workspace.folder / "api")},
            "programs": [search_program(isolated=False), search_program(isolated=False, then='print(ask("FAIL-500"))')],
            "test": self.test,
            "bad": f"http://me:{self.workspace.planted['a password in a URL']}@127.0.0.1:1",
        }
        program = (sys.executable, "-c", API)
        self.results["api"] = self.workspace.run(
            program=program, input=json.dumps(arguments), TURNGATE_ADMIN_KEY="x" * 20
        )


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    need("bubblewrap")
    with open_workspace() as workspace, Provider().serve() as provider, Receiver().serve() as receiver:
        full_run, new = Run(workspace, provider, receiver), workspace.planted.new
        new("the hidden answer")
        new("a password in a URL")
        workspace.env["TURNGATE_MCP_KEY"] = new("the MCP key")
        workspace.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.url
        with full_run.processes.watch(), ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work) for work in (full_run.over_http, full_run.over_stdio, full_run.from_python)]:
                done.result()
        workspace.learn_keys(workspace.folder)
        workspace.evidence.add(PROCESSES, b"\n".join(full_run.processes.lines()))
        workspace.evidence.add("the spans", receiver.spans())
        keys = [path.relative_to(workspace.folder).as_posix() for path in workspace.folder.rglob("admin-key")]
        assert keys  # of the gateways that the service started
        for number, path in enumerate(keys):
            workspace.planted.add(f"admin key {number} that was made", (workspace.folder / path).read_text().strip())
        workspace.evidence.add_folder(workspace.folder, allow=tuple(keys))
        yield full_run


def test_run_is_complete(run: Run) -> None:
    """Check that the run did what the search for secrets relies on."""
    statuses = {name: result["status"] for name, result in run.results.items() if name != "api"}
    assert statuses == {
        "finished, http": "finished",
        "the agent fails, http": "failed",
        "the provider fails, http": "error",
        "setup fails, http": "error",
        "grading fails, http": "finished",
        "timed out, http": "timed out",
        "aborted, http": "cancelled",
        "finished, stdio": "finished",
        "the provider fails, stdio": "error",
    }
    results = run.results
    assert results["finished, http"]["reward"] == results["finished, stdio"]["reward"] == 1.0
    assert results["setup fails, http"]["error"]["stage"] == "setup"
    assert results["grading fails, http"]["error"]["stage"] == "grade"
    assert (
        "it went wrong" in results["the provider fails, http"]["error"]["message"]
    )  # the provider's own error message
    assert "my key" in results["finished, http"]["workdir_files"]["seen.txt"]
    assert "[secret]" in results["finished, http"]["workdir_files"]["own-key.txt"]
    assert "the end, " in results["finished, http"]["log_tails"]["stderr"]
    assert "REFUSED" in results["api"] and "<" in results["api"] and "it went wrong" in results["api"]
    assert run.provider.keys == {f"Bearer {run.workspace.env[PROVIDER_KEY]}"}
    assert len(run.workspace.session_secrets()) == 9  # of all rollouts but those that were aborted or never started
    assert b"invoke_agent shell" in run.receiver.spans()
    assert any(b"bwrap" in line for line in run.processes.lines())


@pytest.mark.real
@pytest.mark.promise(7)
def test_no_secret_leaks(run: Run) -> None:
    """Session secrets are only in files that agents wrote them to."""
    allowed_place = re.compile(r"/work/own-key\.txt$")
    found = run.workspace.planted.find(run.workspace.evidence)
    assert [
        leak for leak in found if not (leak.secret.startswith("session secret") and allowed_place.search(leak.where))
    ] == []
    assert [where for where in find_issued_secrets(run.workspace.evidence) if not allowed_place.search(where)] == []


def test_agents_see_only_their_own_secret(run: Run) -> None:
    seen = list(run.workspace.folder.rglob("seen.txt"))
    assert len(seen) >= 8
    for path in seen:
        text = path.read_text()
        assert "TURNGATE_API_KEY" in text
        assert [name for name in run.workspace.planted if run.workspace.planted[name] in text] == [], path
