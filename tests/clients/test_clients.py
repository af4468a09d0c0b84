"""Tests that tool loops of the common client libraries are recorded as one exact row.

Each library runs unmodified in its own process (`programs/`), against a real gateway with a scripted model. The conversation has six turns,
thinking, parallel calls, and a follow-up question. `CLIENTS` is also the table in docs/clients.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import kit
from tests.speed import scaled
from tests.verify.everywhere import verdicts
from tools import parts
from tools.part_pins import CLIENT_PINS, CLIENTS_ALONE, JS_CLIENT_PINS
from turngate.agents.install import find_node
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.verify import ScriptedScorer

Json = Any
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
OPENAI = ("chat", "chat streamed", "responses", "responses streamed")
BY_ID = ("responses by id", "responses by id streamed")
MESSAGES = ("messages", "messages streamed")
GEMINI = ("gemini", "gemini streamed")

SYSTEM = "You are careful. You read files before you answer."
QUESTIONS = ("Why is the sum wrong?", "Thanks. Which file was it?")
FILES = {
    "a.py": "from b import add\nprint(add(1, 2))\n",
    "b.py": "def add(a, b):\n    return a - b\n",
    "größe 👍.txt": "3\n",
}
ANSWERS = ["`add` subtracts: the sign is wrong.", "It was b.py."]
CALLS: list[tuple[str, Json]] = [
    ("list_files", {"path": "."}),
    ("read_file", {"path": "a.py"}),
    ("read_file", {"path": "b.py"}),
    ("read_file", {"path": "größe 👍.txt"}),
    ("read_file", {"path": "c.py"}),
]
TURNS = (
    ("I look first.", "Let me look.", CALLS[:2]),
    ("", "", CALLS[2:3]),
    ("Größe?", "", CALLS[3:4]),
    ("", "One more.", CALLS[4:5]),
    ("It is the sign.", ANSWERS[0], []),
    ("", ANSWERS[1], []),
)


@dataclass(frozen=True)
class Client:
    """A client library: its program, the part with its environment, and the ways in which it can talk to the gateway."""

    program: str
    ways: tuple[str, ...]
    part: str = ""  # empty: the environment of the tests
    tool_prefix: str = ""  # that the library puts before the names of tools


CLIENTS = {
    "openai": Client("openai_sdk.py", (*OPENAI, *BY_ID)),
    "anthropic": Client("anthropic_sdk.py", MESSAGES),
    "google-genai": Client("google_genai_sdk.py", GEMINI),
    "langchain": Client("langchain_agent.py", (*OPENAI, *MESSAGES, *GEMINI), "clients"),
    "litellm": Client("litellm_sdk.py", (*OPENAI, *MESSAGES, *GEMINI), "clients"),
    "pydantic-ai": Client("pydantic_ai_agent.py", (*OPENAI, *MESSAGES, *GEMINI), "clients"),
    "openai-agents": Client("openai_agents_sdk.py", (*OPENAI, *BY_ID), "clients"),
    "claude-agent-sdk": Client("claude_agent_sdk_client.py", MESSAGES, "clients", "mcp__files__"),
    "ai-sdk": Client("ai_sdk.mjs", (*OPENAI, *MESSAGES, *GEMINI), "js-clients"),
}
REAL = ("pydantic-ai", "ai-sdk")  # one of each part runs in `make test-real` too
# Only in `make soak`: two in the same ways as those, and three SDKs that `tests/server` calls in all of their dialects.
REPEATED = ("langchain", "litellm", "openai", "anthropic", "google-genai")


def _to_param(name: str) -> Any:
    part = CLIENTS[name].part
    marks = [pytest.mark.process, pytest.mark.needs(part) if part else pytest.mark.full]
    marks.append(pytest.mark.real if name in REAL else pytest.mark.full)
    return pytest.param(name, marks=[*marks, *([pytest.mark.repeat] if name in REPEATED else [])])


def script(prefix: str) -> Any:
    """A model that follows `TURNS`, whatever else a client asks it in between."""

    def answer(request: Generate, index: int) -> ScriptedTurn:
        prompt = kit.tokenizer().decode(request.prompt)
        if QUESTIONS[0] not in prompt:
            return kit.say("Yes.")
        thought, text, calls = TURNS[prompt.count("<|im_start|>assistant") - 1]
        thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        return kit.say(
            f"{thinking}{text}\n{kit.calls(*((prefix + name, given) for name, given in calls))}".rstrip("\n")
        )

    return answer


def command(client: Client) -> tuple[list[str], dict[str, str]]:
    """The command line of a client's program, and its whole environment: it has no other keys, endpoints or settings."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    program = str(PROGRAMS / client.program)
    if client.part == "js-clients":
        return [str(find_node()), program], environment | {"CLIENTS": str(parts.cache() / client.part)}
    python = str(parts.cache() / client.part / "bin" / "python") if client.part else sys.executable
    return [python, program], environment


async def run_program(client: Client, home: Path, conversation: Mapping[str, Json]) -> Json:
    argv, environment = command(client)
    pipe = asyncio.subprocess.PIPE
    # Claude Code leaves unix sockets in its folder for temporary files, so the path must be short.
    with tempfile.TemporaryDirectory(prefix="c") as scratch:
        environment |= {"HOME": str(home), "TMPDIR": scratch}
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=home, env=environment
        )
        try:
            async with asyncio.timeout(scaled(90)):
                out, errors = await process.communicate(json.dumps(conversation).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, errors.decode(errors="replace")[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("name", [_to_param(name) for name in CLIENTS])
async def test_tool_loop_is_one_exact_row(name: str, tmp_path: Path) -> None:
    client = CLIENTS[name]
    async with kit.gateway(script(client.tool_prefix), data=tmp_path / "data") as g:
        sessions = {way: await g.open() for way in client.ways}
        conversation = {"root": g.root, "model": "m", "system": SYSTEM, "questions": QUESTIONS, "files": FILES}
        keys = {way: session.key for way, session in sessions.items()}
        report = await run_program(client, tmp_path, {**conversation, "keys": keys})
        assert list(report) == list(client.ways)
        for way, session in sessions.items():
            assert report[way]["answers"] == ANSWERS, way
            assert sorted(report[way]["calls"], key=str) == sorted((list(call) for call in CALLS), key=str), way
            turns = [turn for turn in await g.turns(session.id) if turn["role"] == "main"]
            assert (len(turns), [turn["cause"] for turn in turns if turn["cause"]]) == (len(TURNS), []), way
            assert (await g.show(session.id)).get("refused") is None, way
            rows = await g.samples(session.id)
            assert [sum(row["mask"]) for row in rows] == [sum(len(turn["ids"]) for turn in turns)], way
            await g.seal(session.id)
    found = verdicts(g.app, ScriptedScorer())
    assert [verdict.counts.rows for verdict in found] == [1] * len(client.ways)
    assert {part.part for verdict in found for part in verdict.unchecked} == set()


def test_docs_list_the_tested_clients() -> None:
    lines = (ROOT / "docs" / "clients.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    pins = [re.split("==|(?<=.)@", pin) for pin in (*CLIENT_PINS, CLIENTS_ALONE, *JS_CLIENT_PINS)]
    versions = {re.sub(r"-slim|\[.*\]", "", name): version for name, version in pins}
    versions["ai-sdk"] = versions["ai"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"]["dev"]:
        name, _, least = requirement.partition(">=")
        versions[name] = f"{least} or newer"
    assert [(name, version, dialects) for name, version, _, dialects in rows] == [
        (name, versions[name], ", ".join(dict.fromkeys(way.split()[0] for way in client.ways)))
        for name, client in CLIENTS.items()
    ]
