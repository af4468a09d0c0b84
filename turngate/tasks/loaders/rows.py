"""Our own row format: a task as one JSON object, such as a line of a JSONL file.

    {"id": "fix-add", "instruction": "…", "files": {"main.py": "…"}, "setup": "…", "image": "…", "timeout_s": 600,
     "grader": {"type": "script", "files": {"test.sh": "…"}, "decides": "exit code"}, "solution": {"patch": "…"}, "metadata": {…}}

The schema is strict: an unknown field is an error. Otherwise, a task with a misspelled `grader` would have no grader. A row's files are
stored on the host, in a cache folder named after a hash of their content.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec

from turngate.agents.install import cache_folder
from turngate.common.validation import explain_error
from turngate.errors import BadRequest, TaskError
from turngate.tasks.task import (
    Function,
    Grader,
    Part,
    Rubric,
    Script,
    Solution,
    Swe,
    Task,
    check_instruction,
    to_task_id,
)
from turngate.trace.tool_schema import HostTool
from turngate.trace.tool_schema import check_tools as checked_tools
from turngate.types import Json

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]
Files = Mapping[str, str]


class _Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="script"):
    files: Files = {}
    command: tuple[str, ...] = ("bash", "/tests/test.sh")
    probe: tuple[str, ...] = ()
    decides: Literal["reward file", "exit code"] = "reward file"
    git: bool = False
    timeout_s: Seconds = 900.0
    env: Mapping[str, str] = {}


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    name: Annotated[str, msgspec.Meta(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
    timeout_s: Seconds = 900.0


class _Swe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="swe"):
    repo: NotEmpty
    fail_to_pass: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    pass_to_pass: tuple[str, ...]
    test_cmd: NotEmpty
    base_commit: Annotated[str, msgspec.Meta(pattern="^([0-9a-fA-F]{7,64})?$")] = ""
    test_patch: str = ""
    parser: NotEmpty = "pytest"
    install: str = ""
    before: str = ""
    reward: Literal["resolved", "fraction"] = "resolved"
    timeout_s: Seconds = 1800.0


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: NotEmpty
    grader: _Script | _Function | _Swe
    weight: Positive = 1.0


class _Rubric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rubric"):
    parts: Annotated[tuple[_Part, ...], msgspec.Meta(min_length=1)]


class _Solution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    patch: str = ""
    files: Files = {}
    env: Mapping[str, str] = {}


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: NotEmpty
    instruction: NotEmpty
    files: Files = {}
    setup: str = ""
    setup_timeout_s: Seconds = 900.0
    image: str = ""
    workdir: Annotated[str, msgspec.Meta(pattern="^(/.*)?$")] = ""
    cpus: Positive | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    timeout_s: Seconds | None = None
    grader: _Script | _Function | _Swe | _Rubric | None = None
    solution: _Solution | None = None
    tools: tuple[HostTool, ...] = ()
    env: Mapping[str, str] = {}
    metadata: Mapping[str, Json] = {}


def build_task(fields: Mapping[str, Json], where: str, beside: Path | None = None) -> Task:
    """Build a task from a row.

    `where` names the file and row in messages. Paths to the files of grading functions are relative to the folder `beside`.
    """
    try:
        row = msgspec.convert(fields, _Row)
    except msgspec.ValidationError as error:
        problem, field = explain_error(error, _Row)
        name = fields.get("id")
        suffix = f" ({name})" if isinstance(name, str) and name else ""
        raise TaskError(f"task: {where}{suffix}: {problem}", param=field) from None
    here = f"{where} ({row.id})"
    return Task(
        id=to_task_id(row.id),
        instruction=check_instruction(row.instruction, f"{here}: instruction"),
        files=store_files(row.files, f"{here}: files"),
        setup=row.setup,
        setup_timeout_s=row.setup_timeout_s,
        image=row.image,
        workdir=row.workdir,
        cpus=row.cpus,
        memory_mb=row.memory_mb,
        timeout_s=row.timeout_s,
        grader=None if row.grader is None else _grader(row.grader, f"{here}: grader", beside),
        solution=None if row.solution is None else _solution(row.solution, f"{here}: solution"),
        tools=_tools(row.tools, here),
        env=row.env,
        metadata=row.metadata,
        source=where,
    )


def _grader(spec: _Script | _Function | _Swe | _Rubric, here: str, beside: Path | None) -> Grader:
    if isinstance(spec, _Rubric):
        names = [part.name for part in spec.parts]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise TaskError(
                f"task: {here}.parts contains two parts named {duplicate!r}; names must be unique", param="grader"
            )
        parts = (
            Part(
                name=part.name, weight=part.weight, grader=_single_grader(part.grader, f"{here} ({part.name})", beside)
            )
            for part in spec.parts
        )
        return Rubric(parts=tuple(parts))
    return _single_grader(spec, here, beside)


def _single_grader(spec: _Script | _Function | _Swe, here: str, beside: Path | None) -> Script | Function | Swe:
    match spec:
        case _Swe():
            return Swe(**msgspec.structs.asdict(spec))
        case _Function():
            location, _, attribute = spec.name.rpartition(":")
            name = f"{(beside / location).absolute()}:{attribute}" if beside and location.endswith(".py") else spec.name
            return Function(name=name, timeout_s=spec.timeout_s)
        case _Script():
            if not spec.command:
                raise TaskError(
                    f"task: {here}.command is empty; set it to the command that grades the outcome", param="grader"
                )
            if spec.command == ("bash", "/tests/test.sh") and "test.sh" not in spec.files:
                raise TaskError(f"task: {here}.files has no test.sh; add one, or set 'command'", param="grader")
            return Script(**{**msgspec.structs.asdict(spec), "files": store_files(spec.files, f"{here}.files")})


def _solution(spec: _Solution, here: str) -> Solution:
    if bool(spec.patch.strip()) == bool(spec.files):
        raise TaskError(f"task: {here} must set either 'patch' or 'files', but not both", param="solution")
    if spec.files and "solve.sh" not in spec.files:
        raise TaskError(f"task: {here}.files has no solve.sh; add one that solves the task", param="solution")
    return Solution(patch=spec.patch, files=store_files(spec.files, f"{here}.files"), env=spec.env)


def _tools(tools: tuple[HostTool, ...], here: str) -> tuple[HostTool, ...]:
    try:
        checked_tools(tools)
    except BadRequest as error:
        raise TaskError(f"task: {here}: {error.message}", param="tools") from None
    return tools


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def store_files(files: Files, here: str) -> Path | None:
    """Store files in the subfolder `tasks/<digest>` of the cache folder, where the digest is a hash of their names and content.

    Return the folder, or None if there are no files. In messages, `here` names the source of the files.
    """
    if not files:
        return None
    for name in files:
        _check_file_name(name, here)
    digest = hashlib.sha256(msgspec.json.encode(sorted(files.items()))).hexdigest()
    folder = cache_folder() / "tasks" / digest
    try:
        if not _holds_exactly(folder, files):
            _write_folder(folder, files)
    except OSError as error:
        raise TaskError(f"task: {here} cannot be stored ({error.filename or folder}: {error.strerror})") from None
    return folder


def _check_file_name(name: str, here: str) -> None:
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise TaskError(
            f"task: {here} contains {name!r}, which is not a plain relative path like src/main.py", param="files"
        )


def _holds_exactly(folder: Path, files: Files) -> bool:
    """Return whether the folder contains exactly these files.

    This is checked each time a row is loaded, because an agent may have changed a grader in the folder.
    """
    try:
        paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        return {path.relative_to(folder).as_posix() for path in paths} == set(files) and all(
            not path.is_symlink()
            and path.is_file()
            and path.read_bytes() == _encode_file(files, path.relative_to(folder))
            for path in paths
        )
    except OSError:  # unreadable, or another process has just replaced the folder
        return False


def _encode_file(files: Files, name: Path) -> bytes:
    return files[name.as_posix()].encode("utf-8", "surrogatepass")


def _write_folder(folder: Path, files: Files) -> None:
    """Write files into a temporary folder and rename it, so that no process sees an incomplete folder.

    Processes that load the same tasks take turns, so that none removes a folder that another one has just written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent.with_suffix(".lock")):
        if _holds_exactly(folder, files):  # another process was faster
            return
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            new = scratch / "new"
            for name, text in files.items():
                path = new / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode("utf-8", "surrogatepass"))
                path.chmod(0o755 if text.startswith("#!") else 0o644)
            if folder.exists() or folder.is_symlink():
                folder.rename(scratch / "old")
            new.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            # The file system has no locks. Two processes that write the same files at the same moment may then fail.
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # also releases copies that a forked process holds
