"""Load tasks from any of these sources:

a folder with an instruction.md          one task, in Harbor's format (`harbor.py`)
a folder of such folders                 all of them, sorted by name
a .jsonl, .json or .parquet file         rows in our own format (`rows.py`) or from a SWE data set (`swe.py`), recognized by their fields
a folder with .jsonl or .parquet files   the rows of all these files
hf://org/name[@split]                    a data set on the Hugging Face hub, or in its local cache
module:function, file.py:function        the tasks or rows that the function returns
any other file                           its text is the instruction

A .ndjson file is treated like a .jsonl file.
"""

from __future__ import annotations

import fnmatch
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import msgspec

from turngate.common.validation import path_exists
from turngate.errors import TaskError, TurngateError
from turngate.tasks.loaders import harbor, rows, swe
from turngate.tasks.task import Task, to_task_id
from turngate.types import Json

HUB = "hf://"
_LINES, _WHOLE, _COLUMNS = (".jsonl", ".ndjson"), (".json",), (".parquet",)
_ROWS = (*_LINES, *_WHOLE, *_COLUMNS)
_FUNCTION = re.compile(r"(?:(?P<file>.+\.py)|(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)):(?P<name>[A-Za-z_]\w*)")
_DATA_SET = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<split>[\w./-]+))?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
_MAX_LISTED = 20  # ids listed in an error
_BATCH_ROWS = 64  # rows decoded at a time


class LoadedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was loaded, or the error that prevented loading it."""

    id: str  # "?" if unknown
    source: str
    task: Task | None = None
    error: TaskError | None = None


class Candidate(NamedTuple):
    """A task that is built only when it is needed, so that selecting a few tasks does not require building all of them."""

    id: str
    source: str
    build: Callable[[], Task]


def read_tasks(where: str, *, only: Sequence[str] = (), limit: int | None = None) -> Iterator[Task]:
    """Yield the tasks of a source. Raise `TaskError` at the first invalid task or duplicate id.

    `only` and `limit` have the same meaning as in `scan_tasks`.
    """
    for loaded in scan_tasks(where, only=only, limit=limit):
        if loaded.error is not None:
            raise loaded.error
        assert loaded.task is not None
        yield loaded.task


def scan_tasks(where: str, *, only: Sequence[str] = (), limit: int | None = None) -> Iterator[LoadedTask]:
    """Yield the tasks of a source. For an invalid task or a duplicate id, yield the error instead.

    `only` lists glob patterns for ids, such as `django__*`. `limit` is the maximum number of tasks. Raise `TaskError` if `limit` is
    below 1, if the source cannot be read, or if no task matches.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"limit must be at least 1, not {limit}", param="limit")
    seen: dict[str, str] = {}
    count = 0
    others: list[str] = []  # ids that do not match
    for candidate in _find_candidates(where):
        if only and not any(fnmatch.fnmatchcase(candidate.id, pattern) for pattern in only):
            others += [candidate.id] if len(others) <= _MAX_LISTED else []
            continue
        loaded = _load_candidate(candidate)
        if loaded.error is None and loaded.id in seen:
            error = TaskError(
                f"task: the id {loaded.id} is used in {seen[loaded.id]} and in {loaded.source}; ids must be unique"
            )
            loaded = LoadedTask(id=loaded.id, source=loaded.source, error=error)
        seen.setdefault(loaded.id, loaded.source)
        yield loaded
        count += 1
        if count == limit:
            return
    if not count:
        if not others:
            raise TaskError(f"task: {where} has no tasks; add at least one", param="tasks")
        listed = ", ".join(others[:_MAX_LISTED]) + (", …" if len(others) > _MAX_LISTED else "")
        raise TaskError(f"task: no task in {where} matches {', '.join(only)}; available tasks: {listed}", param="only")


def names_function(where: str) -> bool:
    """Return whether a source has the form `module:function` or `file.py:function`."""
    return _FUNCTION.fullmatch(where) is not None


def load_single_task(where: str) -> Task:
    """Load one task from a folder or a text file. For a source of several tasks, raise a `TaskError` that says how to run them."""
    if where.startswith(HUB):
        kind = "a data set"
    elif names_function(where) and not path_exists(where):
        kind = "a function that returns tasks"
    else:
        return harbor.load_task(Path(where))
    raise TaskError(
        f"task: {where} is {kind}, not one task; run its tasks with `turngate batch --tasks {where}`, or specify one task: "
        "a folder with an instruction.md, or a text file",
        param="task",
    )


def _find_candidates(where: str) -> Iterator[Candidate]:
    if where.startswith(HUB):
        return _hub_candidates(where)
    path = Path(os.path.expanduser(where))  # noqa: PTH111  (`Path.expanduser` raises an error for unknown users)
    if not path_exists(path):
        pass
    elif path.is_dir():
        return _folder_candidates(path)
    elif path.is_file():
        return _file_candidates(path)
    if (match := _FUNCTION.fullmatch(where)) is not None:
        return _function_candidates(where, match)
    raise TaskError(
        f"task: {where} does not exist; specify a task folder, a folder of task folders, a .jsonl or .parquet file, hf://org/name, "
        "or file.py:function",
        param="tasks",
    )


def _load_candidate(candidate: Candidate) -> LoadedTask:
    try:
        task = candidate.build()
    except TaskError as error:
        return LoadedTask(id=candidate.id, source=candidate.source, error=error)
    return LoadedTask(id=task.id, source=task.source or candidate.source, task=task)


# ── folders and files ───────────────────────────────────────────────────────────────────────────────────────────────


def _folder_candidates(path: Path) -> Iterator[Candidate]:
    if (path / "instruction.md").exists() or (path / "task.toml").exists():
        yield _harbor_candidate(path)
        return
    tasks = harbor.find_task_folders(path)
    for folder in tasks:
        yield _harbor_candidate(folder)
    if tasks:
        return
    files = _find_row_files(path)
    if not files:
        raise TaskError(
            f"task: {path} contains no instruction.md, no task folders, and no .jsonl or .parquet files; specify a folder with tasks",
            param="tasks",
        )
    for file in files:
        yield from _file_candidates(file)


def _harbor_candidate(path: Path) -> Candidate:
    return Candidate(
        to_task_id(path.stem if path.is_file() else path.absolute().name), str(path), partial(harbor.load_task, path)
    )


def _find_row_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix in (*_LINES, *_COLUMNS) and file.is_file())


def _file_candidates(path: Path, display_name: str = "") -> Iterator[Candidate]:
    """Yield the tasks of a file. Messages about a row refer to the file as `display_name` or, if that is empty, by its path."""
    if path.suffix not in _ROWS:
        yield _harbor_candidate(path)
        return
    read_rows = _read_parquet if path.suffix in _COLUMNS else _read_json_lines if path.suffix in _LINES else _read_json
    for number, row in read_rows(path):
        where = f"{display_name or path}, row {number}"
        yield _row_candidate(row, where, path.parent)


def _row_candidate(row: object, where: str, beside: Path | None) -> Candidate:
    name = ""
    if isinstance(row, Mapping):
        name = next((value for key in ("instance_id", "id") if isinstance(value := row.get(key), str)), "")
    return Candidate(to_task_id(name) if name else "?", where, partial(task_from_row, row, where, beside))


def task_from_row(row: object, where: str, beside: Path | None = None) -> Task:
    """Build a task from a row, which is in our own format or from a SWE data set. `where` names the row in messages."""
    if isinstance(row, ValueError):
        raise TaskError(f"task: {where} is not valid JSON: {row}", param="row")
    if isinstance(row, RecursionError):
        raise TaskError(f"task: {where} is nested too deeply", param="row")
    if not isinstance(row, Mapping):
        raise TaskError(f"task: {where}: a row must be a JSON object or, in Python, a dict", param="row")
    return swe.build_task(row, where) if swe.is_swe_row(row) else rows.build_task(row, where, beside)


def _read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(filter(bytes.strip, file), 1):  # blank lines are not rows
                yield number, _decode_json(line)
    except OSError as error:
        raise TaskError(f"task: {path} cannot be read ({error.strerror})", param="tasks") from None


def _read_json(path: Path) -> Iterator[tuple[int, object]]:
    try:
        whole = _decode_json(path.read_bytes())
    except OSError as error:
        raise TaskError(f"task: {path} cannot be read ({error.strerror})", param="tasks") from None
    if isinstance(whole, ValueError | RecursionError):
        reason = "is nested too deeply" if isinstance(whole, RecursionError) else f"is not valid JSON: {whole}"
        raise TaskError(f"task: {path} {reason}", param="tasks")
    yield from enumerate(whole if isinstance(whole, list) else [whole], 1)


def _decode_json(data: bytes) -> object:
    """Decode a JSON value. Return an error instead of raising it, so that later rows are still read."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # `ValueError` includes invalid UTF-8
        return error


def _read_parquet(path: Path) -> Iterator[tuple[int, object]]:
    if find_spec("pyarrow") is None:
        raise TaskError(
            f"task: {path}: reading parquet needs pyarrow; run `pip install 'turngate[parquet]'`", param="tasks"
        )
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _drop_nulls(row)
    except (arrow.ArrowException, OSError) as error:
        raise TaskError(f"task: {path} cannot be read as parquet: {error}", param="tasks") from None


def _drop_nulls(value: Json) -> Json:
    """Return a value without its null fields, which come from the table format.

    In a table, every row has every column, and every object has the fields of all objects in its column.
    """
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _hub_candidates(where: str) -> Iterator[Candidate]:
    match = _DATA_SET.fullmatch(where.removeprefix(HUB))
    if match is None:
        raise TaskError(f"task: {where} is not valid; write hf://org/name or hf://org/name@split", param="tasks")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise TaskError(
            f"task: {where} needs huggingface_hub; run `pip install 'turngate[huggingface,parquet]'`", param="tasks"
        ) from None
    patterns = [f"*{suffix}" for suffix in (*_LINES, *_COLUMNS)]
    try:
        folder = Path(snapshot_download(match["repo"], repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # the library's HTTP client, cache and name checks raise many types of errors
        raise TaskError(
            f"task: {where} cannot be downloaded ({type(error).__name__}: {error}); check the name, the network connection and, for a "
            "private data set, HF_TOKEN",
            param="tasks",
        ) from None
    for file in _select_split(folder, where, match["split"] or ""):
        yield from _file_candidates(file, f"{where}/{file.relative_to(folder).as_posix()}")


def _select_split(folder: Path, where: str, split: str) -> list[Path]:
    """Return the files of one split of a data set.

    For example, `data/train-00000-of-00002.parquet` and `train.jsonl` belong to the split `train`, and `config/train/0.parquet` belongs
    to the split `config/train`.
    """
    by_split: dict[str, list[Path]] = {}
    for file in _find_row_files(folder):
        inside = file.relative_to(folder)
        stem = _SHARD.sub("", inside.stem)
        parts = [part for part in inside.parent.parts if part != "data"]
        by_split.setdefault("/".join([*parts] if stem.isdigit() and parts else [*parts, stem]), []).append(file)
    if not by_split:
        raise TaskError(f"task: {where} has no .jsonl or .parquet files; choose a different data set", param="tasks")
    if not split and len(by_split) == 1:
        return next(iter(by_split.values()))
    if split not in by_split:
        available = ", ".join(by_split)
        problem = f"split {split!r} not found" if split else "the data set has several splits; choose one with @split"
        raise TaskError(f"task: {where}: {problem}; available: {available}", param="tasks")
    return by_split[split]


# ── functions ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _function_candidates(where: str, match: re.Match[str]) -> Iterator[Candidate]:
    for number, item in enumerate(_call_function(where, _load_function(where, match)), 1):
        source = f"{where}, item {number}"
        if isinstance(item, Task):
            yield Candidate(item.id, source, partial(_with_source, item, source))
        else:
            yield _row_candidate(item, source, Path(match["file"]).parent if match["file"] else None)


def _with_source(task: Task, source: str) -> Task:
    return task if task.source else msgspec.structs.replace(task, source=source)


def _load_function(where: str, match: re.Match[str]) -> Callable[[], Iterable[object]]:
    try:
        module = _import_file(Path(match["file"])) if match["file"] else import_module(match["module"])
    except TurngateError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise TaskError(f"task: {where} cannot be imported: {type(error).__name__}: {error}", param="tasks") from error
    function = vars(module).get(match["name"])
    if not callable(function):
        raise TaskError(f"task: {where}: the module has no function {match['name']}", param="tasks")
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> object:
    spec = spec_from_file_location(f"turngate_tasks_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        problem = "is not a Python file" if path.exists() else "does not exist"
        raise TaskError(f"task: {path} {problem}", param="tasks")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _call_function(where: str, function: Callable[[], Iterable[object]]) -> Iterator[object]:
    try:
        items = function()
        if inspect.isawaitable(items) or isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            if inspect.iscoroutine(items):
                items.close()
            raise TaskError(
                f"task: {where} returned {type(items).__name__}; it must return an iterable of tasks or rows",
                param="tasks",
            )
        yield from items
    except TurngateError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise TaskError(f"task: {where} failed: {type(error).__name__}: {error}", param="tasks") from error
