"""Turn a task's reference solution into shell commands that a scripted model can run to solve the task.

Each command is short enough for one tool call of an agent. The commands first write the solution's files, and then apply the solution.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from turngate.errors import TaskError
from turngate.sandboxes.base import Backend
from turngate.tasks.task import Solution

SOLUTION = "/solution"  # same path as in Harbor
# The patch is read from standard input. Outside a repository, `git apply` works on the plain folder.
APPLY_PATCH = """
if command -v git >/dev/null 2>&1; then exec git apply --whitespace=nowarn -; fi
exec patch -p1 --batch --forward
"""
SOLVE_ENV = {"DEBIAN_FRONTEND": "noninteractive"}  # for solve.sh
MAX_BYTES = 128 * 1024  # a larger solution would need too many tool calls
_COMMAND_CHARS = 6000  # maximum length of a command; agents limit the number of tokens in a reply
_PIECE_BYTES = 4000  # maximum size of a file's piece in one command; base64 makes it a third longer
_DELIMITER = "END_OF_FILE"
_MODEL_SYNTAX = re.compile(r"<\||</?(tool_call|think)>")  # a tokenizer would read these as special tokens


def solution_folders(backend: Backend) -> tuple[str, ...]:
    """Return the folders that a solution needs at the root of a sandbox, or none if the sandbox shares the host's root."""
    return (SOLUTION,) if backend.relocates else ()


def reference_commands(solution: Solution, backend: Backend) -> tuple[str, ...]:
    """Return the commands that apply a solution in a sandbox. Raise `TaskError` if the solution cannot be turned into commands."""
    if solution.env:
        raise TaskError(
            "the task's solution cannot be replayed: it needs environment variables, and the trace would contain their values",
            param="solution",
        )
    folder = SOLUTION if backend.relocates else '"$HOME"' + SOLUTION
    files = dict(_read_files(solution))
    if (size := sum(map(len, files.values()))) > MAX_BYTES:
        raise TaskError(
            f"the task's solution is {size} bytes long, but at most {MAX_BYTES} bytes can be replayed", param="solution"
        )
    parents = {f"{folder}/{shlex.quote(str(parent))}" for name in files if (parent := Path(name).parent) != Path()}
    fragments = [*_split_arguments("mkdir -p", [folder, *sorted(parents)])]
    for name, data in files.items():
        fragments += _write_file(f"{folder}/{shlex.quote(name)}", data)
    if programs := [f"{folder}/{shlex.quote(name)}" for name in files if _is_program(solution, name)]:
        fragments += _split_arguments("chmod +x", programs)
    fragments.append(_apply(solution, folder))
    return tuple(_join(fragments))


def _read_files(solution: Solution) -> Iterator[tuple[str, bytes]]:
    if solution.files is None:
        yield "solution.patch", solution.patch.encode()
        return
    paths = sorted(solution.files.rglob("*"))
    if links := [path for path in (solution.files, *paths) if path.is_symlink()]:
        raise TaskError(
            f"the task's solution cannot be replayed: {links[0]} is a symbolic link, whose target could be a private file; "
            "replace the link with a copy of its target",
            param="solution",
        )
    try:
        if (size := sum(path.stat().st_size for path in paths if path.is_file())) > MAX_BYTES:
            raise TaskError(
                f"the task's solution is {size} bytes long, but at most {MAX_BYTES} bytes can be replayed",
                param="solution",
            )
        for path in paths:
            if path.is_file():
                yield str(path.relative_to(solution.files)), path.read_bytes()
    except OSError as error:
        raise TaskError(f"{solution.files} cannot be read ({error.strerror})", param="solution") from None


def _is_program(solution: Solution, name: str) -> bool:
    return solution.files is not None and name != "solve.sh" and os.access(solution.files / name, os.X_OK)


def _write_file(target: str, data: bytes) -> Iterator[str]:
    """Yield shell commands that write a file: short text as is, everything else as base64, in pieces."""
    text = _decode(data)
    if text is not None and len(data) <= _PIECE_BYTES:
        yield f"cat > {target} <<'{_DELIMITER}'\n{text}{_DELIMITER}"
        return
    for start in range(0, max(len(data), 1), _PIECE_BYTES):
        piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
        yield f"printf %s '{piece}' | base64 -d {'>>' if start else '>'} {target}"


def _split_arguments(program: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield commands that together pass all arguments to a program, as many as fit in one tool call at a time."""
    command = program
    for argument in arguments:
        if command != program and len(command) + 1 + len(argument) > _COMMAND_CHARS:
            yield command
            command = program
        command += f" {argument}"
    yield command


def _decode(data: bytes) -> str | None:
    """Return a file's text, or None if a here-document cannot reproduce it exactly, or if a tokenizer would find special tokens in it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    exact = text.endswith("\n") and "\0" not in text and "\r" not in text and _DELIMITER not in text
    return text if exact and not _MODEL_SYNTAX.search(text) else None


def _apply(solution: Solution, folder: str) -> str:
    if solution.files is None:
        return f"sh -c {shlex.quote(APPLY_PATCH.strip())} < {folder}/solution.patch"
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in SOLVE_ENV.items())
    return f"{env} TURNGATE_SOLUTION={folder} bash {folder}/solve.sh"


def _join(fragments: list[str]) -> Iterator[str]:
    """Join fragments into commands that each fit in one tool call."""
    command = ""
    for fragment in fragments:
        if command and len(command) + 1 + len(fragment) > _COMMAND_CHARS:
            yield command
            command = ""
        command += ("\n" if command else "") + fragment
    yield command
