"""Kill a gateway repeatedly while agents work, and check that no answer an agent received is lost.

Sixteen agents talk to a real `turngate serve` process, streaming and not. At random moments it is killed with SIGKILL and restarted on the
same data folder. An agent whose connection broke repeats its call, as SDKs do. At the end, every answer that an agent received in full must
be on its session's path, in order, and every recorded token must have been sampled after exactly the recorded ids before it (the scripted
engine's log-probabilities prove that).

To run it by hand: `python -m tests.crash.storm --kills 200`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.ports import free_port
from tests.speed import scaled
from turngate.engines.scripted import derive_logprobs
from turngate.types import Ids

ADMIN = "storm-admin-key-0123456789"
REPLIES = [
    '<think>\nI should look at it.\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>',
    "The file looks fine. What next?",
    '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "read", "arguments": {"path": "é"}}\n</tool_call>',
    "Done with this part of the work, I think; there may be more to do.",
]
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("read", "run")]


class Server:
    """A `turngate serve` on a fixed port and data folder that can be killed and restarted.

    `arguments` replace those of the scripted engine. `command` is `serve` or `cell`, `data` may be the URL of a shared store, and `env`
    is added to the environment.
    """

    def __init__(
        self,
        folder: Path,
        durability: str,
        workers: int = 1,
        arguments: Sequence[str] | None = None,
        command: str = "serve",
        data: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.data = data or str(folder / "data")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._env = {**os.environ, "TURNGATE_ADMIN_KEY": ADMIN, **(env or {})}
        if arguments is None:
            script = folder / "script.json"
            script.write_text(json.dumps(REPLIES))
            arguments = ["--script", str(script)]
        self._argv = [sys.executable, "-m", "turngate", command, "--port", str(self.port), "--data", self.data]
        self._argv += ["--durability", durability, *arguments]
        self._argv += ["--workers", str(workers)] if workers > 1 else []

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._env, cwd=self.folder)

    async def ready(self, limit_s: float = 30) -> None:
        """Wait until the gateway answers on a new connection; an older one may still lead to a worker of the killed front."""
        end = time.monotonic() + scaled(limit_s)
        async with httpx.AsyncClient(timeout=scaled(30), limits=httpx.Limits(max_keepalive_connections=0)) as client:
            while time.monotonic() < end:
                self.check()
                try:
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    await asyncio.sleep(0.02)
        raise AssertionError("the gateway was not ready in time")

    def check(self) -> None:
        """Raise an error if the gateway has exited by itself."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the gateway has exited:\n{(self.folder / 'log').read_text()[-2000:]}")

    def kill_worker(self, rng: random.Random) -> None:
        """Kill a random worker; the front restarts it."""
        assert self.process is not None
        pids = children(self.process.pid)
        if pids:
            os.kill(rng.choice(pids), signal.SIGKILL)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


class Agent:
    def __init__(self, number: int, client: httpx.AsyncClient, url: str, session: str, key: str) -> None:
        self.rng = random.Random(number)
        self.client, self.url, self.session, self.key = client, url, session, key
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Work."},
            {"role": "user", "content": f"Task {number}"},
        ]
        self.received: list[dict[str, Any]] = []

    async def work(self, over: asyncio.Event) -> None:
        while not over.is_set():
            message = await self.ask(over)
            if message is None:
                return
            self.received.append(message)
            self.messages.append(message)
            for call in message.get("tool_calls", []):
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": f"output {len(self.messages)}"}
                )
            if not message.get("tool_calls"):
                self.messages.append({"role": "user", "content": f"go on {len(self.messages)}"})
            await asyncio.sleep(self.rng.random() * 0.02)

    async def ask(self, over: asyncio.Event) -> dict[str, Any] | None:
        """Repeat a call until it returns a complete answer."""
        attempts = 0
        while True:
            try:
                return await self.once(attempts)
            except httpx.HTTPError:
                attempts += 1
                if over.is_set():
                    return None
                await asyncio.sleep(0.05)

    async def once(self, attempts: int) -> dict[str, Any]:
        stream = self.rng.random() < 0.5
        body = {"model": "x", "messages": self.messages, "tools": TOOLS, "stream": stream}
        headers = {"authorization": f"Bearer {self.key}", "x-stainless-retry-count": str(attempts)}
        async with self.client.stream(
            "POST", f"{self.url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            raw = await response.aread()
            if response.status_code == 503 and b"retry" in raw:
                raise httpx.ReadError("retry")
            assert response.status_code == 200, raw
        if not stream:
            return {k: v for k, v in json.loads(raw)["choices"][0]["message"].items() if v}
        if not raw.endswith(b"data: [DONE]\n\n"):
            raise httpx.ReadError("the stream broke off")
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for event in (json.loads(e[6:]) for e in raw.decode().split("\n\n") if e and e != "data: [DONE]"):
            delta = event["choices"][0]["delta"]
            message["content"] += delta.get("content") or ""
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or [])
        return {k: v for k, v in message.items() if v}


def walk_paths(trace: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Ids]]:
    """Yield each node of a trace with all ids before it."""
    paths: dict[int | None, list[int]] = {None: []}
    for node in trace["nodes"]:
        before = paths[node["parent"]]
        paths[node["id"]] = [*before, *node["ids"]]
        yield node, np.array(before, np.int32)


def check_trace(agent: Agent, trace: dict[str, Any]) -> int:
    """Check that all received answers are on one path, in order, with exact ids. Return the number of recorded turns."""
    nodes = {node["id"]: node for node in trace["nodes"]}
    texts: dict[int | None, tuple[tuple[str, int], ...]] = {None: ()}
    for node, before in walk_paths(trace):
        texts[node["id"]] = texts[node["parent"]]
        if node["kind"] == "sampled":
            assert node["logprobs"] == derive_logprobs(before, node["ids"]), (
                f"{agent.session}: node {node['id']} was sampled after other ids"
            )
            message = node["message"]
            texts[node["id"]] += ((message.get("content", ""), len(message.get("tool_calls", []))),)
    expected_texts = tuple((m.get("content", ""), len(m.get("tool_calls", []))) for m in agent.received)
    assert any(text[: len(expected_texts)] == expected_texts for text in texts.values()), (
        f"{agent.session}: an answer was lost"
    )
    forks = {n["cause"] for n in nodes.values() if n["cause"]}
    assert forks <= {"retry", "resample"}, f"{agent.session}: forked by {forks}"
    return sum(node["kind"] == "sampled" for node in nodes.values())


async def storm(kills: int, *, agents: int = 16, durability: str = "process", seed: int = 0, workers: int = 1) -> str:
    """Run the storm. With several workers, kill one of them, and every fifth time the front, which ends all workers."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), durability, workers)
        server.start()
        try:
            async with httpx.AsyncClient(timeout=scaled(30), limits=httpx.Limits(max_connections=None)) as client:
                await server.ready()
                admin = {"authorization": f"Bearer {ADMIN}"}
                opened = [
                    (await client.post(f"{server.url}/admin/sessions", json={}, headers=admin)).json()
                    for _ in range(agents)
                ]
                agents_at_work = [Agent(n, client, server.url, s["id"], s["api_key"]) for n, s in enumerate(opened)]
                over = asyncio.Event()
                tasks = [asyncio.create_task(agent.work(over)) for agent in agents_at_work]
                for n in range(kills):
                    if workers > 1 and n % 5 != 4:
                        await asyncio.sleep(rng.uniform(0.3, 1.5))
                        server.kill_worker(rng)
                        continue
                    await asyncio.sleep(rng.uniform(0.05, 0.5))
                    server.kill()
                    server.start()
                    await server.ready()
                await asyncio.sleep(0.5)
                await _wait_for_answers(agents_at_work, tasks)
                over.set()
                await asyncio.gather(*tasks)
                turns = 0
                for agent in agents_at_work:
                    turns += check_trace(
                        agent, await _read_trace(client, server, f"/admin/sessions/{agent.session}/trace")
                    )
                received = sum(len(agent.received) for agent in agents_at_work)
                await verify_all(server.data, agents)
                return f"{kills} kills, {agents} agents, {received} answers received, {turns} turns recorded, none lost"
        finally:
            server.kill()


async def _wait_for_answers(agents_at_work: list[Agent], tasks: list[asyncio.Task[None]]) -> None:
    """Wait until each agent has received an answer."""
    end = time.monotonic() + scaled(60)
    while not all(agent.received for agent in agents_at_work):
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() < end, "an agent got no answer"
        await asyncio.sleep(0.05)


async def _read_trace(client: httpx.AsyncClient, server: Server, path: str) -> dict[str, Any]:
    """Read a trace; retry while its worker is starting, or while the workers of a killed front are ending."""
    end = time.monotonic() + scaled(60)
    while True:
        server.check()
        try:
            response = await client.get(server.url + path, headers={"authorization": f"Bearer {ADMIN}"})
        except httpx.TransportError:
            assert time.monotonic() < end, "the gateway does not answer"
        else:
            if response.status_code != 503:
                assert response.status_code == 200, response.text
                found: dict[str, Any] = response.json()
                return found
            assert time.monotonic() < end, response.text
        await asyncio.sleep(0.1)


async def verify_all(data: str, sessions: int) -> None:
    """Run `turngate verify` on all sessions; it must find no errors."""
    verdicts = await read_verdicts(data)
    assert len(verdicts) == sessions and all(verdict["ok"] for verdict in verdicts), verdicts


async def read_verdicts(data: str) -> list[dict[str, Any]]:
    """Run `turngate verify` on all sessions and return its verdicts."""
    argv = [sys.executable, "-m", "turngate", "verify", "--all", "--json", "--data", data]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = await process.communicate()
    assert process.returncode in (0, 1), errors.decode()
    verdicts: list[dict[str, Any]] = json.loads(output)["sessions"]
    return verdicts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--durability", choices=["process", "disk"], default="process")
    options = parser.parse_args()
    print(asyncio.run(storm(options.kills, durability=options.durability, seed=options.seed, workers=options.workers)))
