"""The gateway at work, on embedded defaults: no model, no GPU, no network.

Starts `turngate serve` on the scripted engine, opens a session, lets the official `openai` client hold a five-turn conversation
with tools, and prints the recorded trace: which tokens were sampled, which are context, and that they chain.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.text import Text

from turngate.render import Tokenizer
from turngate.server.app import BUILTIN_TOKENIZER

SCRIPT = Path(__file__).with_name("replies.json")  # what the scripted engine says, turn by turn
FILES = {
    "main.py": "def add(a, b):\n    return a - b\n",
    "test_main.py": "from main import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {"type": "object", "properties": {k: {"type": "string"} for k in keys}},
        },
    }
    for name, what, keys in (
        ("list_files", "Lists a folder.", ["path"]),
        ("read_file", "Reads a file.", ["path"]),
        ("write_file", "Writes a file.", ["path", "text"]),
        ("run_tests", "Runs the tests.", []),
    )
]
console = Console(width=110, highlight=False)


def run_tool(name: str, arguments: dict[str, str]) -> str:
    """What the agent's tools answer."""
    match name:
        case "list_files":
            return "\n".join(FILES)
        case "read_file":
            return FILES[arguments["path"]]
        case "write_file":
            FILES[arguments["path"]] = arguments["text"]
            return "written"
        case _:
            return "1 passed" if "a + b" in FILES["main.py"] else "1 failed"


def hold_conversation(client: openai.OpenAI) -> None:
    """An agent's loop, as any program with the openai client has it."""
    messages: list[Any] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "The test fails. Fix it."},
    ]
    while True:
        message = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        called = ", ".join(f"{c.function.name}({c.function.arguments})" for c in message.tool_calls or [])
        console.print(
            Text(
                f"  assistant: {message.content or ''} {called}".rstrip(),
                style="cyan",
                overflow="ellipsis",
                no_wrap=True,
            )
        )
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = run_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def show(nodes: list[dict[str, Any]], sample: dict[str, Any]) -> None:
    """The trace as coloured tokens, and the checks that make it a training row."""
    tokenizer = Tokenizer(BUILTIN_TOKENIZER)
    path: list[int] = []
    for node in nodes:
        sampled = node["kind"] == "sampled"
        head = f"{'sampled' if sampled else 'context'} · {len(node['ids'])} tokens after {len(path)}"
        if sampled:
            head += f" · mask 1 · mean log-probability {sum(node['logprobs']) / len(node['logprobs']):.2f} · finish {node['finish']}"
        else:
            head += " · mask 0"
        console.rule(Text(head, style="bold green" if sampled else "dim"), align="left", style="dim")
        text = Text()
        for n, token in enumerate(node["ids"]):
            if sampled and n and not console.is_terminal:
                text.append("│")  # without colours, a bar shows where a token ends
            # Alternating shades, so that one sees where a token ends.
            text.append(
                tokenizer.decode(token),
                style=("black on green", "black on bright_green")[n % 2]
                if sampled
                else ("dim", "dim on grey15")[n % 2],
            )
        console.print(text)
        path += node["ids"]
    chained = path == sample["ids"] and sum(span["trained"] for span in sample["spans"]) == 5
    scored = all((p is not None) == bool(m) for p, m in zip(sample["logprobs"], sample["mask"], strict=True))
    console.rule(style="dim")
    console.print(
        f"The five turns are one row of {len(sample['ids'])} tokens, of which {sum(sample['mask'])} are trained."
    )
    console.print(f"Every turn was sampled after exactly the ids before it: {'yes' if chained else 'NO'}.")
    console.print(f"Every trained token has its own log-probability: {'yes' if scored else 'NO'}.")
    if not (chained and scored):
        raise SystemExit(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        admin_key = secrets.token_urlsafe(24)
        argv = [
            sys.executable,
            "-m",
            "turngate",
            "serve",
            "--port",
            str(port),
            "--data",
            f"{folder}/data",
            "--script",
            str(SCRIPT),
        ]
        console.print(f"$ turngate serve --port {port} --data DIR --engine scripted")
        server = subprocess.Popen(argv, env={**os.environ, "TURNGATE_ADMIN_KEY": admin_key})
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, server)
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {admin_key}"}) as admin:
                session = admin.post("/admin/sessions", json={"metadata": {"task": "demo"}}).raise_for_status().json()
                console.print(
                    f"session {session['id']} is open; its secret is the agent's OPENAI_API_KEY, {url}/v1 its OPENAI_BASE_URL"
                )
                with openai.OpenAI(base_url=f"{url}/v1", api_key=session["api_key"]) as client:
                    hold_conversation(client)
                admin.post(f"/admin/sessions/{session['id']}/seal").raise_for_status()
                nodes = admin.get(f"/admin/sessions/{session['id']}/trace").raise_for_status().json()["nodes"]
                (sample,) = admin.get(f"/admin/sessions/{session['id']}/samples").raise_for_status().json()["samples"]
            show(nodes, sample)
        finally:
            server.terminate()
            server.wait(10)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        if server.poll() is not None:
            raise SystemExit("the gateway did not start")
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.05)
    raise SystemExit("the gateway was not ready in ten seconds")


if __name__ == "__main__":
    main()
