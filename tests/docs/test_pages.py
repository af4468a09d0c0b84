"""Commands, flags and Python code in the documentation are valid."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from turngate.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and text of each code block, including indented ones."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M)
    for line in _FENCE.sub("", text).splitlines():
        if line.startswith("    turngate "):
            yield "", line.strip()


def commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^\$ ", "", line.strip())
        if re.match(r"(\.venv/bin/)?turngate ", line):
            words = shlex.split(line, comments=True)
            ends = [n for n, word in enumerate(words) if word in ("&", "|", ">", "&&", ";", "2>", "<")]
            yield words[1 : ends[0]] if ends else words[1:]


def find_problem(words: list[str]) -> str:
    """Return what is wrong with a command line, or an empty string."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while subcommands := vars(command).get("commands"):
        if not words and vars(command).get("invoke_without_command"):
            return ""
        if not words or words[0].startswith("-"):
            return "" if words in (["--help"], ["--version"]) else f"names no command of {sorted(subcommands)}"
        if words[0] in ("COMMAND", "…", "..."):
            return ""
        if words[0] not in subcommands:
            return "" if vars(command).get("invoke_without_command") else f"{words[0]} is no command"
        command = subcommands[words.pop(0)]
    flags = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words[: words.index("--")] if "--" in words else words:
        if word.startswith("--") and word.partition("=")[0] not in flags:
            return f"{word} is no flag of it"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_code_are_valid(page: Path) -> None:
    wrong = []
    for language, text in blocks(page):
        if language == "python":
            try:
                compile(text, str(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                wrong.append(f"{error}: {text.splitlines()[(error.lineno or 1) - 1]}")
        elif language in ("", "bash", "sh", "shell", "console"):
            wrong += [f"turngate {' '.join(words)}: {why}" for words in commands(text) if (why := find_problem(words))]
    assert not wrong, "\n".join(wrong)


def test_unknown_command_is_reported() -> None:
    assert (
        find_problem(["run", "--no-such-flag"])
        and find_problem(["nothing"])
        and not find_problem(["agents", "install", "pi"])
    )
    assert list(commands("turngate run --task a \\\n   --agent pi   # why\n")) == [
        ["run", "--task", "a", "--agent", "pi"]
    ]
