"""The conversation that a program has with the gateway through a client library: read from stdin, and reported on stdout.

Uses only the standard library, because each program runs in the environment of its client library.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

GIVEN: dict[str, Any] = json.load(sys.stdin)
ROOT: str = GIVEN["root"]
MODEL: str = GIVEN["model"]
SYSTEM: str = GIVEN["system"]
QUESTIONS: list[str] = GIVEN["questions"]
FILES: dict[str, str] = GIVEN["files"]
MAX_STEPS = 10

_calls: list[tuple[str, dict[str, str]]] = []


def list_files(path: str) -> str:
    """List the files of a folder.

    Args:
        path: The path of the folder.
    """
    _calls.append(("list_files", {"path": path}))
    return "\n".join(FILES)


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: The path of the file.
    """
    _calls.append(("read_file", {"path": path}))
    return FILES.get(path, f"{path} does not exist")


TOOLS: dict[str, Callable[[str], str]] = {"list_files": list_files, "read_file": read_file}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}


def run_tool(name: str, arguments: str | dict[str, str]) -> str:
    """Run a tool for a client library that leaves it to its user."""
    return TOOLS[name](**(json.loads(arguments) if isinstance(arguments, str) else arguments))


Way = Callable[[str], "list[str] | Awaitable[list[str]]"]


def main(ways: dict[str, Way]) -> None:
    """Have the conversation in each way that was asked for. A way takes a session's key, and returns the answers to the questions."""
    report = {}
    for name, key in GIVEN["keys"].items():
        _calls.clear()
        answers = ways[name](key)
        report[name] = {
            "answers": asyncio.run(_wait_for(answers)) if isinstance(answers, Awaitable) else answers,
            "calls": list(_calls),
        }
    print(json.dumps(report), flush=True)


async def _wait_for(answers: Awaitable[list[str]]) -> list[str]:
    return await answers
