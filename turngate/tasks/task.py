"""A task: what is asked, and what the agent finds when it begins. Read from a folder, a text file, or said outright.

    my-task/
      instruction.md     what is asked (required)
      files/             the agent's working folder at the start
      setup.sh           run there before the agent begins
      environment/       a Dockerfile, for the docker sandbox
      task.toml          [agent] timeout_sec, [environment] cpus, memory_mb, docker_image

The names are Harbor's where Harbor has one; `files/` and `setup.sh` are ours, for sandboxes without images.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from turngate.errors import TaskError
from turngate.explain import explain

_LARGEST = 1_000_000  # characters of an instruction


class Task(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    instruction: str
    files: Path | None = None
    setup: str = ""  # a shell script
    image: str = ""
    dockerfile: Path | None = None  # the folder that holds it
    cpus: float | None = None
    memory_mb: int | None = None
    timeout_s: float | None = None  # the agent's time


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: Annotated[float, msgspec.Meta(gt=0)] | None = None


class _Environment(msgspec.Struct, frozen=True):
    docker_image: str = ""
    cpus: Annotated[float, msgspec.Meta(gt=0)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None


class _TaskFile(msgspec.Struct, frozen=True):
    """Of a Harbor `task.toml`, what a run needs; the rest is for others."""

    agent: _Agent = _Agent()
    environment: _Environment = _Environment()


def said(instruction: str) -> Task:
    """A task that is nothing but its instruction."""
    return Task(id="prompt", instruction=_checked(instruction, "prompt"))


def load(path: Path) -> Task:
    if path.is_file():
        return Task(id=_id(path.stem), instruction=_checked(_text(path), str(path)))
    if not path.is_dir():
        raise TaskError(f"task: there is no {path}; give a folder with an instruction.md, or a text file", param="task")
    instruction = path / "instruction.md"
    if not instruction.is_file():
        raise TaskError(f"task: {path} has no instruction.md, which says what is asked", param="task")
    settings = _settings(path / "task.toml")
    setup, files, environment = path / "setup.sh", path / "files", path / "environment"
    return Task(
        id=_id(path.absolute().name),
        instruction=_checked(_text(instruction), str(instruction)),
        files=files if files.is_dir() else None,
        setup=_text(setup) if setup.is_file() else "",
        image=settings.environment.docker_image,
        dockerfile=environment if (environment / "Dockerfile").is_file() else None,
        cpus=settings.environment.cpus,
        memory_mb=settings.environment.memory_mb,
        timeout_s=settings.agent.timeout_sec,
    )


def _settings(path: Path) -> _TaskFile:
    if not path.is_file():
        return _TaskFile()
    try:
        return msgspec.convert(tomllib.loads(_text(path)), _TaskFile)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"task: {path} is not valid TOML: {error}", param="task") from None
    except msgspec.ValidationError as error:
        raise TaskError(f"task: {path}: {explain(error, _TaskFile, 'setting')[0]}", param="task") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TaskError(f"task: {path} is not UTF-8 text", param="task") from None
    except OSError as error:
        raise TaskError(f"task: {path} cannot be read ({error.strerror})", param="task") from None


def _checked(instruction: str, where: str) -> str:
    if not instruction.strip():
        raise TaskError(f"task: {where} is empty; it has to say what is asked", param="task")
    if len(instruction) > _LARGEST:
        raise TaskError(f"task: {where} has {len(instruction)} characters, more than {_LARGEST}", param="task")
    if "\0" in instruction:
        raise TaskError(f"task: {where} holds a null character, which no command line can carry", param="task")
    return instruction


def _id(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "task"
