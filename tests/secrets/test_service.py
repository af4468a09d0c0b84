"""A full run of the service with marked secrets everywhere: `turngate mcp` over both transports and the Python API, with rollouts that end
in every way there is, and a search for the secrets in all that can be seen of it."""

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

from tests.mcp.kit import called, refused
from tests.sandboxes.kit import need
from tests.secrets.kit import (
    PROCESSES,
    PROVIDER_KEY,
    TURNGATE,
    House,
    Processes,
    Provider,
    Receiver,
    given_out,
    house,
    looking,
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
# What is given comes by its standard input: its words are in the process list.
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
    def __init__(self, home: House, provider: Provider, receiver: Receiver) -> None:
        self.home = home
        self.provider = provider
        self.receiver = receiver
        self.processes = Processes()
        self.results: dict[str, Json] = {}

    def config(self, name: str, sandbox: str) -> Path:
        file = self.home.folder / f"{name}.toml"
        file.write_text(
            CONFIG.format(
                folder=self.home.folder, name=name, sandbox=sandbox, url=self.provider.url, variable=PROVIDER_KEY
            )
        )
        return file

    @property
    def test(self) -> str:
        """That is passed where the agent has not seen the answer."""
        # The shell's own comparison: an argument of grep would be in the process list.
        return f"case $(cat seen.txt) in *'{self.home.planted['the hidden answer']}'*) exit 1 ;; esac"

    def over_http(self) -> None:
        """Every way to end, behind walls."""
        key = self.home.env["TURNGATE_MCP_KEY"]
        words = ("mcp", "--config", self.config("http", "bubblewrap"), "--http", "127.0.0.1:0", "--log-format", "json")
        with self.home.serving(*words) as url:
            asyncio.run(self._http(f"{url}/mcp", key))

    async def _http(self, url: str, key: str) -> None:
        with httpx.Client(trust_env=False, timeout=scaled(5)) as client:
            for authorization in ("", f"Bearer {key}x"):
                self.home.evidence.add_answer(client.post(url, json={}, headers={"authorization": authorization}))
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=scaled(60), trust_env=False) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            await self._driven(client, walls=True)

    def over_stdio(self) -> None:
        """Without walls, and with lines of text."""
        log = self.home.folder / "stdio-log"
        # A shell, so that what it says beside the protocol is kept.
        words = ["-c", f'exec "$@" 2>> {log}', "sh", *TURNGATE, "mcp", "--config", str(self.config("stdio", "local"))]
        asyncio.run(self._stdio(StdioServerParameters(command="/bin/sh", args=words, env=self.home.env)))

    async def _stdio(self, server: StdioServerParameters) -> None:
        async with Client(server) as client:
            await self._driven(client, walls=False)

    async def _driven(self, client: Client, *, walls: bool) -> None:
        see = self.home.evidence.add

        async def tell(tool: str, /, **arguments: Json) -> Json:
            answer = await called(client, tool, **arguments)
            see(f"the answer of {tool}", answer)
            return answer

        orders: dict[str, dict[str, Json]] = {
            "finished": {"test_script": self.test},
            "the provider fails": {"then": 'print(ask("FAIL-500"))'},
        }
        if walls:
            orders |= {
                "the agent fails": {"then": 'ask("Hi"); sys.exit(3)'},
                "setup fails": {"setup_shell": "env; cat /proc/self/environ; exit 7"},
                "grading fails": {"test_script": f"{self.test}; env; exit 9"},
                "timed out": {"then": 'ask("Hi"); time.sleep(3600)', "agent_timeout_s": scaled(4)},
                "aborted": {"then": 'ask("Hi"); time.sleep(3600)'},
            }
        see("the tools", (await client.list_tools()).model_dump_json())
        await tell("list_endpoints")
        begun: dict[str, str] = {}
        for name, order in orders.items():
            program = looking(walls=walls, then=order.pop("then", ""))
            limit = {"agent_timeout_s": scaled(50)}
            asked = {"model_key": HOSTED, "instruction": program, "task_id": "marked", **limit, **order}
            begun[name] = (await tell("start_rollout", **asked))["rollout_id"]
        for wrong in (
            {"model_key": KEYLESS},
            {"model_key": HOSTED, "endpoint_url": f"http://me:{self.home.planted['a password in a URL']}@127.0.0.1:1"},
            {"model_key": HOSTED, "mode": "direct"},
            {"model_key": "nobody://x"},
        ):
            see("a refusal", await refused(client, "start_rollout", **{"instruction": "x", **wrong}))
        if "aborted" in begun:
            await self._until_a_turn(tell, begun["aborted"])
            await tell("abort_rollout", rollout_id=begun["aborted"], reason="enough")
        for name, rollout in begun.items():
            self.results[f"{name}, {'http' if walls else 'stdio'}"] = await tell("finalize_rollout", rollout_id=rollout)
            await self._events(tell, rollout)
            await tell("get_messages", rollout_id=rollout)
            await tell("get_state", rollout_id=rollout)
        await tell("list_rollouts")

    async def _until_a_turn(self, tell: Any, rollout: str) -> None:
        kinds: list[str] = []
        cursor = 0
        while "turn" not in kinds:
            page = await tell("subscribe_events", rollout_id=rollout, after=cursor, wait_s=20)
            kinds += [event["kind"] for event in page["events"]]
            cursor = page["cursor"]
            assert not page["over"], kinds

    async def _events(self, tell: Any, rollout: str) -> None:
        cursor, over = 0, False
        while not over:
            page = await tell("subscribe_events", rollout_id=rollout, after=cursor, wait_s=20)
            cursor, over = page["cursor"], page["over"]

    def from_python(self) -> None:
        """With results as text and as a notebook shows them."""
        given = {
            "model": f"{HOSTED}@{self.provider.url}",
            "where": {"key_env": PROVIDER_KEY, "data": str(self.home.folder / "api")},
            "programs": [looking(walls=False), looking(walls=False, then='print(ask("FAIL-500"))')],
            "test": self.test,
            "bad": f"http://me:{self.home.planted['a password in a URL']}@127.0.0.1:1",
        }
        program = (sys.executable, "-c", API)
        self.results["api"] = self.home.ran(program=program, input=json.dumps(given), TURNGATE_ADMIN_KEY="x" * 20)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    need("bubblewrap")
    with house() as home, Provider().running() as provider, Receiver().running() as receiver:
        made, new = Run(home, provider, receiver), home.planted.new
        new("the hidden answer")
        new("a password in a URL")
        home.env["TURNGATE_MCP_KEY"] = new("the MCP key")
        home.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.url
        with made.processes.watching(), ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work) for work in (made.over_http, made.over_stdio, made.from_python)]:
                done.result()
        home.learn_keys(home.folder)
        home.evidence.add(PROCESSES, b"\n".join(made.processes.lines()))
        home.evidence.add("the spans", receiver.spans())
        keys = [path.relative_to(home.folder).as_posix() for path in home.folder.rglob("admin-key")]
        assert keys  # of the gateways that it started for itself
        for number, path in enumerate(keys):
            home.planted.known(f"admin key {number} that was made", (home.folder / path).read_text().strip())
        home.evidence.add_folder(home.folder, but=tuple(keys))
        yield made


def test_it_was_a_full_run(run: Run) -> None:
    """Nothing is proven by a run in which nothing happened."""
    ends = {name: result["status"] for name, result in run.results.items() if name != "api"}
    assert ends == {
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
    assert "it went wrong" in results["the provider fails, http"]["error"]["message"]  # in the provider's own words
    assert "my key" in results["finished, http"]["workdir_files"]["seen.txt"]
    assert "[secret]" in results["finished, http"]["workdir_files"]["own-key.txt"]
    assert "the end, " in results["finished, http"]["log_tails"]["stderr"]
    assert "REFUSED" in results["api"] and "<" in results["api"] and "it went wrong" in results["api"]
    assert run.provider.keys == {f"Bearer {run.home.env[PROVIDER_KEY]}"}
    assert len(run.home.session_secrets()) == 9  # those that were not aborted or never began
    assert b"invoke_agent shell" in run.receiver.spans()
    assert any(b"bwrap" in line for line in run.processes.lines())


@pytest.mark.real
@pytest.mark.promise(7)
def test_no_secret_is_anywhere(run: Run) -> None:
    """Session secrets are in files that agents themselves wrote them into, and in no other."""
    may = re.compile(r"/work/own-key\.txt$")
    found = run.home.planted.found(run.home.evidence)
    assert [one for one in found if not (one.secret.startswith("session secret") and may.search(one.where))] == []
    assert [where for where in given_out(run.home.evidence) if not may.search(where)] == []


def test_agents_saw_their_own_secret_and_nothing_else(run: Run) -> None:
    seen = list(run.home.folder.rglob("seen.txt"))
    assert len(seen) >= 8
    for path in seen:
        text = path.read_text()
        assert "TURNGATE_API_KEY" in text
        assert [name for name in run.home.planted if run.home.planted[name] in text] == [], path
