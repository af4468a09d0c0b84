"""Load a task from a folder in Harbor's format, with its settings and limits from `task.toml`.

    my-task/
      instruction.md         what the agent is asked to do (required)
      task.toml              Harbor's settings, and ours in the table [turngate]
      environment/Dockerfile the image, for the docker sandbox
      tests/test.sh          grades the outcome; copied to /tests in the grader's sandbox, never to the agent's sandbox
      tests/run.sh           runs the agent's work in a separate sandbox; test.sh then sees only its output in /logs/probe
      solution/solve.sh      the reference solution, which must score 1
      files/                 the agent's initial working folder
      setup.sh               a script that runs in the working folder before the agent starts

`tests/run.sh`, `files/` and `setup.sh` are our own additions, the last two for sandboxes without images. All other names are Harbor's.
Unsupported Harbor settings are ignored if the task stays the same without them, and rejected otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec

from turngate.common.validation import explain_error, parse_toml, path_exists
from turngate.errors import BadRequest, TaskError
from turngate.tasks.host_env import RESERVED_PREFIXES
from turngate.tasks.task import (
    Function,
    Grader,
    HostPlace,
    HostVariable,
    Part,
    Rubric,
    Script,
    Solution,
    Task,
    check_instruction,
    to_task_id,
)
from turngate.trace.tool_schema import HostTool
from turngate.trace.tool_schema import check_tools as checked_tools
from turngate.types import Json

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG])B?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_FROM_HOST = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_FUNCTION = re.compile(r"[^:]+:[A-Za-z_][A-Za-z0-9_.]*")


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: Seconds | None = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: Seconds = 600.0  # Harbor's own default
    env: Mapping[str, str] = {}
    environment: Json = None


class _Environment(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    os: str = "linux"
    cpus: Positive | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    memory: str | None = None  # as in older Harbor tasks: "2G"
    gpus: int | None = None
    tpu: Json = None
    env: Mapping[str, str] = {}
    workdir: str | None = None
    mcp_servers: list[Json] = []
    healthcheck: Json = None


class _Solution(msgspec.Struct, frozen=True):
    env: Mapping[str, str] = {}


class _RubricLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of [[turngate.rubric]]."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    weight: Positive = 1.0
    script: str = ""  # a file in tests/
    function: str = ""


class _TurngateTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `[turngate]` table of a `task.toml`: settings that Harbor does not have."""

    setup_timeout_sec: Seconds = 900.0
    workdir: str = ""
    decides: Literal["reward file", "exit code"] = "reward file"
    git: bool = False  # include the agent's .git in its work
    grader: str = ""
    rubric: list[_RubricLine] = []
    tools: tuple[HostTool, ...] = ()


class _TaskFile(msgspec.Struct, frozen=True):
    """The settings that are read from a Harbor `task.toml`."""

    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    metadata: Mapping[str, Json] = {}
    steps: list[Json] = []
    turngate: _TurngateTable = _TurngateTable()


_MAX_NAMED = 3  # tasks named in an error
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")  # files that contain many tasks


def find_task_folders(path: Path) -> list[Path]:
    """Return the subfolders of a folder that contain a task, sorted by name."""
    subfolders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return [folder for folder in subfolders if (folder / "instruction.md").exists() or (folder / "task.toml").exists()]


def load_task(path: Path) -> Task:
    """Load one task from a folder, or from a text file that contains the instruction."""
    if not path_exists(path):
        raise TaskError(
            f"task: {path} does not exist; specify a folder with an instruction.md, or a text file", param="task"
        )
    if path.is_file() and path.suffix in ROW_SUFFIXES:
        raise TaskError(
            f"task: {path} is a file of tasks, not one task; run its tasks with `turngate batch --tasks {path}`",
            param="task",
        )
    if path.is_file():
        return Task(
            id=to_task_id(path.stem), instruction=check_instruction(read_text(path), str(path)), source=str(path)
        )
    instruction = path / "instruction.md"
    if not instruction.is_file():
        if not (path / "task.toml").exists() and (folders := find_task_folders(path)):
            names = ", ".join(folder.name for folder in folders[:_MAX_NAMED]) + (
                ", …" if len(folders) > _MAX_NAMED else ""
            )
            raise TaskError(
                f"task: {path} is not a task, but a folder of tasks ({names}); specify one of them, such as {folders[0]}, or run "
                f"them all with `turngate batch --tasks {path}`",
                param="task",
            )
        raise TaskError(
            f"task: {path} has no instruction.md; add one that describes what the agent should do", param="task"
        )
    settings = _load_settings(path / "task.toml")
    _check_supported(path, settings)
    environment, own = settings.environment, settings.turngate
    grader, solution = _grader(path, settings), _solution(path, settings)
    setup, files, dockerfile = path / "setup.sh", path / "files", path / "environment" / "Dockerfile"
    return Task(
        id=to_task_id(path.absolute().name),
        instruction=check_instruction(read_text(instruction), str(instruction)),
        files=files if files.is_dir() else None,
        setup=read_text(setup) if setup.is_file() else "",
        setup_timeout_s=own.setup_timeout_sec,
        image=environment.docker_image or "",
        dockerfile=dockerfile.parent if dockerfile.is_file() else None,
        workdir=_workdir(path, own, environment),
        cpus=environment.cpus,
        memory_mb=_memory(path, environment),
        timeout_s=settings.agent.timeout_sec,
        grader=grader,
        solution=solution,
        tools=_tools(path, own),
        env=_resolve_env(path, "environment.env", environment.env),
        host_env=tuple(_find_host_variables(settings, grader, solution)),
        metadata=msgspec.to_builtins(settings.metadata),
        source=str(path),
    )


def _load_settings(path: Path) -> _TaskFile:
    if not path.is_file():
        return _TaskFile()
    try:
        return msgspec.convert(parse_toml(read_text(path)), _TaskFile)
    except msgspec.ValidationError as error:
        raise TaskError(f"task: {path}: {explain_error(error, _TaskFile, 'setting')[0]}", param="task") from None
    except ValueError as error:
        raise TaskError(f"task: {path} is not valid TOML: {error}", param="task") from None


def _field_error(folder: Path, field: str, problem: str) -> TaskError:
    return TaskError(f"task: {folder / 'task.toml'}: {field} {problem}", param=field)


def _check_supported(folder: Path, settings: _TaskFile) -> None:
    """Raise `TaskError` for unsupported settings that would change the task if they were ignored."""
    environment = settings.environment
    unsupported = {
        "steps": (bool(settings.steps), "is not supported; make a separate task folder for each step"),
        "environment.os": (environment.os.lower() != "linux", f"must be 'linux', not {environment.os!r}"),
        "environment.gpus": (bool(environment.gpus), "is not supported, because sandboxes have no GPUs; remove it"),
        "environment.tpu": (environment.tpu is not None, "is not supported, because sandboxes have no TPUs; remove it"),
        "environment.mcp_servers": (bool(environment.mcp_servers), "is not supported; remove it"),
        "environment.healthcheck": (
            environment.healthcheck is not None,
            "is not supported, because an image's services are not started; remove it, and start the services in setup.sh",
        ),
        "verifier.environment": (
            settings.verifier.environment is not None,
            "is not supported, because the grader uses the task's image; remove it, and install what the grader needs "
            "in environment/Dockerfile",
        ),
    }
    for field, (is_set, problem) in unsupported.items():
        if is_set:
            raise _field_error(folder, field, problem)
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).is_file():
            raise TaskError(
                f"task: {folder}: environment/{name} is not supported, because a task cannot use several containers; use one Dockerfile",
                param="environment",
            )


def _workdir(folder: Path, own: _TurngateTable, environment: _Environment) -> str:
    field, workdir = (
        ("turngate.workdir", own.workdir) if own.workdir else ("environment.workdir", environment.workdir or "")
    )
    if workdir and not PurePosixPath(workdir).is_absolute():
        raise _field_error(folder, field, f"must be an absolute path in the image, not {workdir!r}")
    return workdir


def _memory(folder: Path, environment: _Environment) -> int | None:
    if environment.memory is None:
        return environment.memory_mb
    size = _SIZE.fullmatch(environment.memory.strip())
    if size is None:
        raise _field_error(
            folder, "environment.memory", f"must be a size like '2G' or '512M', not {environment.memory!r}"
        )
    megabytes = int(float(size[1]) * _MEGABYTES[size[2].upper()])
    if environment.memory_mb not in (None, megabytes):
        raise _field_error(
            folder,
            "environment.memory",
            f"is {megabytes} megabytes, but memory_mb is {environment.memory_mb}; remove one of them",
        )
    if megabytes < 16:
        raise _field_error(folder, "environment.memory", f"must be at least 16 megabytes, not {environment.memory!r}")
    return megabytes


def _resolve_env(folder: Path, field: str, env: Mapping[str, str]) -> Mapping[str, str]:
    """Resolve values of the form `${NAME}` or `${NAME:-default}` from the host's environment, as Harbor does."""
    return {name: _resolve_value(folder, f"{field}.{name}", value) for name, value in env.items()}


def _resolve_value(folder: Path, field: str, value: str) -> str:
    match = _FROM_HOST.fullmatch(value)
    if match is None:
        return value
    variable, default = match[1], match[2]
    if variable.startswith(RESERVED_PREFIXES):
        raise _field_error(
            folder,
            field,
            f"must not refer to {variable}, because names that start with {' or '.join(RESERVED_PREFIXES)} are reserved for Turngate "
            "and its database; use a different name",
        )
    resolved = os.environ.get(variable, default)
    if resolved is None:
        raise _field_error(
            folder,
            field,
            f"refers to the environment variable {variable}, which is not set; set it, or write ${{{variable}:-default}}",
        )
    return resolved


def _find_host_variables(
    settings: _TaskFile, grader: Grader | None, solution: Solution | None
) -> Iterator[HostVariable]:
    """Yield the variables of the host's environment that `_resolve_env` has read."""
    parts = [part.grader for part in grader.parts] if isinstance(grader, Rubric) else [grader]
    has_script = any(isinstance(part, Script) for part in parts)
    envs: dict[HostPlace, Mapping[str, str]] = {
        "environment": settings.environment.env,
        "grader": settings.verifier.env if has_script else {},
        "solution": settings.solution.env if solution is not None else {},
    }
    for place, env in envs.items():
        for name, value in env.items():
            if (match := _FROM_HOST.fullmatch(value)) is not None:
                yield HostVariable(place=place, name=name, variable=match[1], default=match[2])


def _grader(folder: Path, settings: _TaskFile) -> Grader | None:
    own, tests = settings.turngate, folder / "tests"
    if own.grader and own.rubric:
        raise _field_error(folder, "turngate.grader", "cannot be combined with turngate.rubric; remove one of them")
    if own.grader:
        return _function(folder, "turngate.grader", own.grader, settings)
    if own.rubric:
        names = [line.name for line in own.rubric]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise _field_error(
                folder, "turngate.rubric", f"contains two entries named {duplicate!r}; names must be unique"
            )
        return Rubric(parts=tuple(_part(folder, line, settings) for line in own.rubric))
    if not tests.is_dir():
        return None
    if not (tests / "test.sh").is_file():
        raise TaskError(f"task: {tests} has no test.sh; add one that grades the outcome", param="tests")
    return _script(folder, "test.sh", settings)


def _script(folder: Path, name: str, settings: _TaskFile) -> Script:
    tests = folder / "tests"
    return Script(
        files=tests,
        command=("bash", f"/tests/{name}"),
        probe=("bash", "/tests/run.sh") if (tests / "run.sh").is_file() else (),
        decides=settings.turngate.decides,
        git=settings.turngate.git,
        timeout_s=settings.verifier.timeout_sec,
        env=_resolve_env(folder, "verifier.env", settings.verifier.env),
    )


def _function(folder: Path, field: str, name: str, settings: _TaskFile) -> Function:
    """Build a grader from `module:name`, or from `file.py:name` with a file in the task's folder."""
    if not _FUNCTION.fullmatch(name):
        raise _field_error(folder, field, f"must be module:function or file.py:function, not {name!r}")
    location, _, attribute = name.rpartition(":")
    if location.endswith(".py"):
        file = (folder / location).absolute()
        if not file.is_file():
            raise _field_error(folder, field, f"refers to {file}, which does not exist")
        name = f"{file}:{attribute}"
    return Function(name=name, timeout_s=settings.verifier.timeout_sec)


def _part(folder: Path, line: _RubricLine, settings: _TaskFile) -> Part:
    field = f"turngate.rubric ({line.name})"
    if bool(line.script) == bool(line.function):
        raise _field_error(folder, field, "must set either 'script' (a file in tests/) or 'function', but not both")
    if line.function:
        return Part(name=line.name, weight=line.weight, grader=_function(folder, field, line.function, settings))
    script = PurePosixPath(line.script)
    if script.is_absolute() or ".." in script.parts or not (folder / "tests" / script).is_file():
        raise _field_error(folder, field, f"refers to {line.script!r}, which is not a file in {folder / 'tests'}")
    return Part(name=line.name, weight=line.weight, grader=_script(folder, str(script), settings))


def _solution(folder: Path, settings: _TaskFile) -> Solution | None:
    location = folder / "solution"
    if not location.is_dir():
        return None
    if not (location / "solve.sh").is_file():
        raise TaskError(f"task: {location} has no solve.sh; add one that solves the task", param="solution")
    return Solution(files=location, env=_resolve_env(folder, "solution.env", settings.solution.env))


def _tools(folder: Path, own: _TurngateTable) -> tuple[HostTool, ...]:
    try:
        checked_tools(own.tools)
    except BadRequest as error:
        raise TaskError(
            f"task: {folder / 'task.toml'}: turngate.{error.message}", param=f"turngate.{error.param}"
        ) from None
    return own.tools


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TaskError(f"task: {path} is not UTF-8 text; save it as UTF-8", param="task") from None
    except OSError as error:
        raise TaskError(f"task: {path} cannot be read ({error.strerror})", param="task") from None
