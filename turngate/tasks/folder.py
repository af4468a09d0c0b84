"""A task as a folder, in Harbor's format.

    my-task/
      instruction.md     what is asked (required)
      task.toml          [agent] timeout_sec, [environment] cpus, memory_mb, docker_image
      environment/       a Dockerfile, for the docker sandbox
      files/             the agent's working folder at the start
      setup.sh           run there before the agent begins

The names are Harbor's where Harbor has one; `files/` and `setup.sh` are ours, for sandboxes without images.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from turngate.errors import TaskError
from turngate.explain import explain
from turngate.tasks.task import Task, checked, named


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


def load(path: Path) -> Task:
    """One task: a folder, or a text file whose content is what is asked."""
    if path.is_file():
        return Task(id=named(path.stem), instruction=checked(text(path), str(path)), source=str(path))
    if not path.is_dir():
        raise TaskError(f"task: there is no {path}; give a folder with an instruction.md, or a text file", param="task")
    instruction = path / "instruction.md"
    if not instruction.is_file():
        raise TaskError(f"task: {path} has no instruction.md, which says what is asked", param="task")
    settings = _settings(path / "task.toml")
    setup, files, environment = path / "setup.sh", path / "files", path / "environment"
    return Task(
        id=named(path.absolute().name),
        instruction=checked(text(instruction), str(instruction)),
        files=files if files.is_dir() else None,
        setup=text(setup) if setup.is_file() else "",
        image=settings.environment.docker_image,
        dockerfile=environment if (environment / "Dockerfile").is_file() else None,
        cpus=settings.environment.cpus,
        memory_mb=settings.environment.memory_mb,
        timeout_s=settings.agent.timeout_sec,
        source=str(path),
    )


def _settings(path: Path) -> _TaskFile:
    if not path.is_file():
        return _TaskFile()
    try:
        return msgspec.convert(tomllib.loads(text(path)), _TaskFile)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"task: {path} is not valid TOML: {error}", param="task") from None
    except msgspec.ValidationError as error:
        raise TaskError(f"task: {path}: {explain(error, _TaskFile, 'setting')[0]}", param="task") from None


def text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TaskError(f"task: {path} is not UTF-8 text", param="task") from None
    except OSError as error:
        raise TaskError(f"task: {path} cannot be read ({error.strerror})", param="task") from None
