"""The parts of a task: the instruction, the files and setup that the agent starts with, and the grader of the outcome.

A task is data. The modules in `loaders/` build tasks, `staging.py` sets up a task in a sandbox, and `grading/` grades the outcome. Graders
and solutions never enter the agent's sandbox, except when a scripted model replays a solution (`reference.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from turngate.errors import TaskError
from turngate.trace.tool_schema import HostTool
from turngate.types import Json

MAX_INSTRUCTION = 1_000_000  # characters


class Script(msgspec.Struct, frozen=True, kw_only=True, tag="script"):
    """A script that grades the agent's work in a fresh sandbox.

    The sandbox contains `files` and, unless there is a probe, a copy of the work. The files are in /tests, or in $HOME/grading/tests if the
    sandbox shares the host's file system.
    """

    files: Path | None = None
    command: tuple[str, ...] = ("bash", "/tests/test.sh")
    # A command (the probe) that runs the agent's work in a separate sandbox. `command` then sees only the probe's output.
    probe: tuple[str, ...] = ()
    decides: Literal["reward file", "exit code"] = "reward file"
    timeout_s: float = 900.0  # applies to the probe and to the command separately
    env: Mapping[str, str] = {}
    git: bool = False  # include the agent's .git in its work, for tasks about git itself


class Function(msgspec.Struct, frozen=True, kw_only=True, tag="function"):
    """A Python function on the host that grades the work: `module:name` or `file.py:name`."""

    name: str
    timeout_s: float = 900.0


class Swe(msgspec.Struct, frozen=True, kw_only=True, tag="swe"):
    """A repository's tests as a grader: those that fail without the work must pass with it, and those that already pass must still pass."""

    repo: str
    base_commit: str  # empty if the task's files are not a git repository
    test_patch: str  # empty if the task's files contain the tests
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_cmd: str  # a shell command, run in the repository
    parser: str = "pytest"  # name of a parser in `grading/logs.py`
    install: str = ""  # a shell command to run again after the work is copied in
    before: str = ""  # shell code that runs before both commands, to activate the right environment
    reward: Literal["resolved", "fraction"] = "resolved"
    timeout_s: float = 1800.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One grader of a rubric, with its weight."""

    name: str
    weight: float
    grader: Script | Function | Swe


class Rubric(msgspec.Struct, frozen=True, kw_only=True, tag="rubric"):
    """Several graders with weights. The reward is the weighted mean of their rewards, or None if one of them gives no reward."""

    parts: tuple[Part, ...]


Grader = Script | Function | Swe | Rubric


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """The reference solution: a patch for the working folder, or files with a `solve.sh`.

    It is hidden from every model except a scripted one.
    """

    patch: str = ""
    files: Path | None = None
    env: Mapping[str, str] = {}  # for solve.sh


HostPlace = Literal[
    "environment", "grader", "solution"
]  # whose environment variables: those of the task's sandbox, its grader or its solution


class HostVariable(msgspec.Struct, frozen=True, kw_only=True):
    """A value in a task's environment that comes from this machine's environment: `${NAME}` or `${NAME:-default}` in the task's file."""

    place: HostPlace
    name: str  # name of the value in that environment
    variable: str  # name of the variable on this machine
    default: str | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """An instruction for an agent, the environment in which the agent works, and the grader of its work."""

    id: str
    instruction: str
    files: Path | None = None
    setup: str = ""  # a shell script
    setup_timeout_s: float = 900.0
    image: str = ""
    dockerfile: Path | None = None  # the folder that contains the Dockerfile
    workdir: str = ""  # the agent's working folder in the image; empty means the sandbox's default
    cpus: float | None = None
    memory_mb: int | None = None
    timeout_s: float | None = None  # time limit for the agent
    grader: Grader | None = None
    solution: Solution | None = None
    tools: tuple[HostTool, ...] = ()  # tools that the agent may call through the gateway
    env: Mapping[str, str] = {}  # environment variables of every command in the sandbox
    host_env: tuple[
        HostVariable, ...
    ] = ()  # values in the task's environments that come from this machine and may be secret
    metadata: Mapping[str, Json] = {}
    source: str = ""  # origin shown in messages: a folder, or a file and row

    @property
    def kind(self) -> str:
        """The kind of task, by which rewards are summarized: `kind` in the metadata, otherwise `category`.

        Empty if neither is a non-empty string.
        """
        named = (self.metadata.get(name) for name in ("kind", "category"))
        return next((kind for kind in named if isinstance(kind, str) and kind), "")


def task_from_prompt(instruction: str) -> Task:
    """Create a task that consists only of an instruction."""
    return Task(id="prompt", instruction=check_instruction(instruction, "prompt"), source="--prompt")


def change_graders(
    grader: Grader | None,
    change_script: Callable[[Script, str], Script],
    change_function: Callable[[Function, str], Function] = lambda function, name: function,
) -> Grader | None:
    """Return the grader with its scripts and functions changed by `change_script` and `change_function`.

    Both callbacks also receive a name for the grader that is unique within the task.
    """

    def change(one: Script | Function | Swe, name: str) -> Script | Function | Swe:
        match one:
            case Script():
                return change_script(one, name)
            case Function():
                return change_function(one, name)
        return one

    if isinstance(grader, Rubric):
        parts = enumerate(grader.parts, 1)
        return Rubric(
            parts=tuple(msgspec.structs.replace(part, grader=change(part.grader, f"tests-{n}")) for n, part in parts)
        )
    return None if grader is None else change(grader, "tests")


def check_instruction(instruction: str, where: str) -> str:
    if not instruction.strip():
        raise TaskError(f"task: {where} is empty; describe what the agent should do", param="task")
    if len(instruction) > MAX_INSTRUCTION:
        raise TaskError(
            f"task: {where} is {len(instruction)} characters long; the limit is {MAX_INSTRUCTION}", param="task"
        )
    if "\0" in instruction:
        raise TaskError(
            f"task: {where} contains a NUL character, which cannot be passed on a command line; remove it", param="task"
        )
    return instruction


def to_task_id(name: str) -> str:
    """Convert any name to a task id of letters, digits, `_`, `.` and `-`, which can be used as a folder name and a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "task"
