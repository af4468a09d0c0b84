"""The nouns of a task: what is asked, what the agent finds when it begins, and who decides about the outcome.

A task is data. Loaders (`folder`, `swe`, `rows`) make one from what people have; `place.py` lays it out in a sandbox; `grading/` decides
about what came of it. Nothing of a grader or a solution ever enters the agent's sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from turngate.errors import TaskError
from turngate.trace.host_tools import HostTool
from turngate.types import Json

MAX_INSTRUCTION = 1_000_000  # characters of an instruction


class Script(msgspec.Struct, frozen=True, kw_only=True, tag="script"):
    """A script decides, in a fresh sandbox with the agent's work. `files` are laid down there as /tests, after the work."""

    files: Path | None = None
    command: tuple[str, ...] = ("bash", "/tests/test.sh")
    probe: tuple[
        str, ...
    ] = ()  # runs the agent's work in a sandbox of its own; `command` then sees only what that left
    decides: Literal["reward file", "exit code"] = "reward file"
    timeout_s: float = 900.0  # of the probe and of the command, each
    env: Mapping[str, str] = {}
    git: bool = False  # the agent's own .git is part of its work: for tasks about git itself


class Function(msgspec.Struct, frozen=True, kw_only=True, tag="function"):
    """A Python function on the host decides: `module:name` or `file.py:name`."""

    name: str
    timeout_s: float = 900.0


class Swe(msgspec.Struct, frozen=True, kw_only=True, tag="swe"):
    """Tests of a repository decide: those that failed have to pass, and those that passed have to go on doing so."""

    repo: str
    base_commit: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_cmd: str  # a shell command, run in the repository
    parser: str = "pytest"  # a name of `grading/logs.py`
    install: str = ""  # a shell command that has to run again after the work is laid down
    before: str = ""  # a shell prelude of both: where the right environment is activated
    reward: Literal["resolved", "fraction"] = "resolved"
    timeout_s: float = 1800.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a rubric."""

    name: str
    weight: float
    grader: Script | Function | Swe


class Rubric(msgspec.Struct, frozen=True, kw_only=True, tag="rubric"):
    """Several graders, each with its weight. The reward is the weighted mean; without one of them there is none."""

    parts: tuple[Part, ...]


Grader = Script | Function | Swe | Rubric


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """The reference: a patch for the working folder, or files with a `solve.sh`. For proving the task, never for the agent."""

    patch: str = ""
    files: Path | None = None
    env: Mapping[str, str] = {}  # for solve.sh


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, what the agent finds when it begins, and who decides about the outcome."""

    id: str
    instruction: str
    files: Path | None = None
    setup: str = ""  # a shell script
    setup_timeout_s: float = 900.0
    image: str = ""
    dockerfile: Path | None = None  # the folder that holds it
    workdir: str = ""  # where the image has what is to be worked on; empty: the sandbox's own
    cpus: float | None = None
    memory_mb: int | None = None
    timeout_s: float | None = None  # the agent's time
    grader: Grader | None = None
    solution: Solution | None = None
    tools: tuple[HostTool, ...] = ()  # that the agent may call at the gateway, and the host handles
    env: Mapping[str, str] = {}  # for every command in the sandbox
    metadata: Mapping[str, Json] = {}
    source: str = ""  # where it was read, for messages: a folder, or a file and its row


def task_from_prompt(instruction: str) -> Task:
    """A task that is nothing but its instruction."""
    return Task(id="prompt", instruction=check_instruction(instruction, "prompt"), source="--prompt")


def check_instruction(instruction: str, where: str) -> str:
    if not instruction.strip():
        raise TaskError(f"task: {where} is empty; it has to say what is asked", param="task")
    if len(instruction) > MAX_INSTRUCTION:
        raise TaskError(f"task: {where} has {len(instruction)} characters, more than {MAX_INSTRUCTION}", param="task")
    if "\0" in instruction:
        raise TaskError(f"task: {where} holds a null character, which no command line can carry", param="task")
    return instruction


def to_task_id(name: str) -> str:
    """A task's id from any name: letters, digits and a few signs, so that it can be a folder and a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "task"
