"""Load a task from a `Task`, a path, a row, or an instruction. An error names the argument that is wrong."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from turngate.common.validation import path_exists
from turngate.errors import BadRequest, TaskError
from turngate.service.config import ServiceConfig
from turngate.service.planning import build_task, write_inputs
from turngate.service.request import Base64File, RolloutRequest
from turngate.tasks.loaders.load import HUB, names_function, read_tasks, scan_tasks, task_from_row
from turngate.tasks.task import Task
from turngate.types import Json

AnyTask: TypeAlias = Task | str | Path | Mapping[str, Json]
# A string without white space is a path if it contains a slash or ends like a task file, even if the file does not exist.
_PATH = re.compile(r"\S*/\S*|\S+\.(jsonl?|ndjson|parquet|md|txt|toml)")
_ROW = re.compile(r"(?P<file>.+\.(?:jsonl?|ndjson|parquet))#(?P<row>.+)", re.S)


def load_task(
    task: AnyTask,
    *,
    test_script: str,
    setup: str,
    files: Mapping[str, str | bytes],
    task_id: str,
    config: ServiceConfig,
    inputs: Path,
) -> Task:
    """Load one task. `test_script`, `setup`, `files` and `task_id` are allowed only if `task` is an instruction.

    The files and the test script of an instruction are written to the folder `inputs`.
    """
    if isinstance(task, str) and not _is_path(task):
        return _task_from_instruction(task, test_script, setup, files, task_id, config, inputs)
    given = {"test_script": test_script, "setup": setup, "files": files, "task_id": task_id}
    for name in (name for name, value in given.items() if value):
        raise BadRequest(
            f"{name}= applies only if the task is an instruction; remove it, or pass an instruction as the task",
            param=name,
        )
    if isinstance(task, Task):
        return task
    if isinstance(task, Mapping):
        return task_from_row(task, "the row")
    if not isinstance(task, str | Path):
        raise BadRequest(
            f"task must be a Task, a path, a row (a dict) or an instruction, not {type(task).__name__}",
            param="task",
        )
    return _load_path(str(task))


def iter_tasks(tasks: Iterable[AnyTask] | str | Path) -> Iterator[AnyTask]:
    """Yield the tasks of an iterable, or of a source: a path, hf://… or `file.py:function`."""
    if isinstance(tasks, str | Path):
        if isinstance(tasks, str) and not (_is_path(tasks) or names_function(tasks)):
            raise BadRequest(
                f"tasks must be a list of tasks, an existing path, hf://org/name or file.py:function, not {tasks[:80]!r}; "
                "for a single instruction, use run() or group()",
                param="tasks",
            )
        yield from read_tasks(str(tasks))
    elif isinstance(tasks, Mapping | Task) or not isinstance(tasks, Iterable):
        raise BadRequest(f"tasks must be a list of tasks or a path, not {type(tasks).__name__}", param="tasks")
    else:
        yield from tasks


def _is_path(text: str) -> bool:
    """Return whether a string is a path, not an instruction: the path exists, or the string looks like one."""
    if not text.strip() or "\n" in text or "\0" in text or len(text) > 1000:
        return False
    if text.startswith(HUB) or _ROW.fullmatch(text) or path_exists(os.path.expanduser(text)):  # noqa: PTH111
        return True
    return _PATH.fullmatch(text.strip()) is not None


def _task_from_instruction(
    instruction: str,
    test_script: str,
    setup: str,
    files: Mapping[str, str | bytes],
    task_id: str,
    config: ServiceConfig,
    inputs: Path,
) -> Task:
    """Build a task from an instruction, as the service does. The files and the test script are written to `inputs`."""
    request = RolloutRequest(
        model_key="any",
        instruction=instruction,
        test_script=test_script,
        setup_shell=setup,
        task_id=task_id,
        upload_files={name: _encode_file(data) for name, data in files.items()},
    )
    try:
        request.check()
        write_inputs(request, inputs)
        return build_task(request, config, inputs)
    except BadRequest as error:
        # Replace the service's field names with this API's argument names.
        for theirs, ours in (("upload_files", "files"), ("setup_shell", "setup"), ("instruction", "task")):
            if error.param == theirs:
                raise BadRequest(error.message.replace(theirs, ours), param=ours) from None
        raise


def _encode_file(data: str | bytes) -> str | Base64File:
    return data if isinstance(data, str) else Base64File(base64=base64.b64encode(data).decode())


def _load_path(where: str) -> Task:
    """Load the task at a path.

    `rows.jsonl#3` is the third row, and `rows.jsonl#fix-add` is the row with the id fix-add. If the path does not select a row, the file or
    folder must contain exactly one task.
    """
    row = _ROW.fullmatch(where)
    if row is not None and not path_exists(where):
        return _load_row(row["file"], row["row"])
    found = [*read_tasks(where, limit=2)]
    if len(found) > 1:
        raise TaskError(
            f"task: {where} contains several tasks; select one (rows.jsonl#ID or a task's folder), or run all of them with batch()",
            param="task",
        )
    return found[0]


def _load_row(file: str, row: str) -> Task:
    if not row.isdecimal() or len(row) > 18:
        return next(iter(read_tasks(file, only=[row])))
    number = int(row)
    found = [*scan_tasks(file, limit=number)] if number else []
    if len(found) < number or not found:
        raise TaskError(
            f"task: {file} has no row {row}; {f'its last row is {len(found)}' if found else 'rows are numbered from 1'}",
            param="task",
        )
    last = found[-1]
    if last.error is not None:
        raise last.error
    assert last.task is not None
    return last.task
