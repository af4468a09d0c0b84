"""Commands, flags, Python code and imports in the documentation are valid."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tests.docs.blocks import PAGES, ROOT, Block, read_blocks, read_prose, split_commands
from turngate.cli import app

_SEPARATORS = ("&", "|", ">", "&&", ";", "2>", "<", ">>", "||")
_GENERATED = "docs/reference/cli.md"  # lists commands as usage lines
_BRITISH = re.compile(
    r"\b(?:token|recogn|summar|normal|organ|serial|initial|optim|minim|maxim|general|special)is(?:e[ds]?|ing)\b"
)


def split_line(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a command line as words, without variables that are set for it."""
    words: list[str] = []
    for word in [*shlex.split(text, comments=True), ";"]:
        if word not in _SEPARATORS:
            words.append(word)
            continue
        while words and re.match(r"\w+=", words[0]):
            del words[0]
        if words:
            yield words
        words = []


def find_problem(words: list[str]) -> str:
    """Return what is wrong with a command, or an empty string. Unknown programs are not checked."""
    program = words[0].removeprefix(".venv/bin/")
    if program == "turngate":
        return _find_wrong_flag(words[1:])
    if program == "make":
        return "" if re.search(rf"^\.PHONY: .*\b{words[1]}\b", _read("Makefile"), re.M) else "no such target"
    script = next((word for word in words[1:] if word.endswith((".py", ".sh"))), "")
    if program in ("python", "python3", "sh") and "/" in script:
        if not (ROOT / script).exists():
            return "no such script"
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        return ", ".join(f"{flag} is not a flag of it" for flag in flags if f'"{flag}"' not in _read(script))
    return ""


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _find_wrong_flag(words: list[str]) -> str:
    command: Any = typer.main.get_command(app)
    words = list(words)
    while subcommands := vars(command).get("commands"):
        if not words and vars(command).get("invoke_without_command"):
            return ""
        if not words or words[0].startswith("-"):
            return "" if words in (["--help"], ["--version"]) else f"names no command of {sorted(subcommands)}"
        if words[0] not in subcommands:
            return f"{words[0]} is no command"
        command = subcommands[words.pop(0)]
    flags = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words[: words.index("--")] if "--" in words else words:
        if word.startswith("--") and word.partition("=")[0] not in flags:
            return f"{word} is no flag of it"
    return ""


def check_shell(block: Block) -> Iterator[str]:
    for command in split_commands(block):
        for words in split_line(command.text):
            if why := find_problem(words):
                yield f"{block.place}: {shlex.join(words)}: {why}"


def check_python(block: Block) -> Iterator[str]:
    try:
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(block.text, block.page, "exec", flags)
    except SyntaxError as error:
        yield f"{block.place}: {error}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "turngate":
            absent = {alias.name for alias in node.names} - read_names(node.module or "")
            yield from (f"{block.place}: {node.module} has no {name}" for name in sorted(absent))


def read_names(module: str) -> set[str]:
    """Read the names that a module defines or imports, without importing it: it may need an extra."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.exists():
        return set()
    names = {child.stem for child in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_code_are_valid(page: str) -> None:
    wrong = []
    for block in read_blocks(page):
        if not block.language:
            wrong.append(f"{block.place}: the block has no language; write `bash`, `python` or, for output, `text`")
        elif block.language in ("sh", "shell", "console"):
            wrong.append(f"{block.place}: write `bash` for commands and `text` for output")
        elif block.language == "bash":
            wrong += check_shell(block)
        elif block.language == "python":
            wrong += check_python(block)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if page != _GENERATED])
def test_prose_is_spelled_alike_and_has_no_commands(page: str) -> None:
    prose = read_prose(page)
    assert not _BRITISH.findall(prose), "write -ize"
    assert not re.findall(r"^    (?:turngate|pip|make|python|curl|export) .*", prose, re.M), (
        "put commands into a `bash` block"
    )


def test_readme_fits_a_screen() -> None:
    lines = _read("README.md").splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def make_block(text: str, language: str = "bash") -> Block:
    return Block("page.md", 1, language, text)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("turngate run --task a --agent pi -- ./agent --any", ""),
        ("KEY=1 turngate serve --port 1 &", ""),
        ("turngate agents", ""),
        ("turngate run --no-such-flag", "--no-such-flag is no flag of it"),
        ("turngate nothing", "nothing is no command"),
        ("echo a && turngate verify --typo | cat", "--typo is no flag of it"),
        ("make check", ""),
        ("make nothing", "no such target"),
        ("python examples/demo.py --fast", ""),
        ("python examples/demo.py --fats", "--fats is not a flag of it"),
        ("python examples/no.py", "no such script"),
    ],
)
def test_invalid_command_is_found(command: str, problem: str) -> None:
    found = list(check_shell(make_block(f"# a comment\n{command}   # why\n")))
    assert [line.rpartition(": ")[2] for line in found] == ([problem] if problem else [])


def test_commands_are_split_at_their_ends() -> None:
    block = make_block("turngate run \\\n    --agent pi  # one\n\n# none\ncurl -d '{\n}'\n")
    assert [command.text for command in split_commands(block)] == [
        "turngate run \\\n    --agent pi  # one",
        "curl -d '{\n}'",
    ]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("from turngate.client.feed import BlockingFeed", ""),
        ("from turngate.trainers import trl", ""),
        ("from turngate.trainers.trl.worker import TurngateWorker", ""),
        ("from turngate.client.feed import Nothing", "page.md:1: turngate.client.feed has no Nothing"),
        ("from turngate.nowhere import Feed", "page.md:1: turngate.nowhere has no Feed"),
        ("await run(", "page.md:1: '(' was never closed (page.md, line 1)"),
    ],
)
def test_invalid_code_is_found(code: str, problem: str) -> None:
    assert list(check_python(make_block(code, "python"))) == ([problem] if problem else [])


def test_every_threat_has_a_test() -> None:
    """Each row of the threat model names an attacker, an asset, a defense, and tests that exist."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.partition("## Threat model\n\n")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]
    assert len(rows) >= 25 and all(len(row) == 4 and all(row) for row in rows)
    for row in rows:
        path, _, name = row[3].strip("`").partition("::")
        assert path.startswith("tests/") and (ROOT / path).exists(), path
        assert not name or re.search(rf"def {name}\(", (ROOT / path).read_text(encoding="utf-8")), row[3]
