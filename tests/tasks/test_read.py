"""Read tasks from every kind of source, filter them, and report errors with the row and the field."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.tasks.test_swe import row as swe_row
from turngate.api.task import _load_path
from turngate.cli.main import app
from turngate.errors import TaskError
from turngate.tasks import read_tasks
from turngate.tasks.loaders.load import scan_tasks
from turngate.tasks.task import Function, Part, Rubric, Script, Solution, Swe, Task


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_lines(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return str(path)


def make_row(name: str = "one", **more: Any) -> dict[str, Any]:
    return {"id": name, "instruction": "Do it.", **more}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "instruction.md").write_text("Do it.")
    return path


def ids(source: object, **options: Any) -> list[str]:
    return [task.id for task in read_tasks(str(source), **options)]


# ── sources ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_single_folder_and_folder_of_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_folder(tmp_path / "all" / name)
    (tmp_path / "all" / "notes").mkdir()
    assert ids(tmp_path / "all") == ["a", "b", "c"]
    assert ids(tmp_path / "all" / "b") == ["b"]


def test_native_row_with_every_field(tmp_path: Path) -> None:
    row = make_row(
        files={"src/main.py": "print(1)\n", "run": "#!/bin/sh\ntrue\n"},
        setup="true",
        setup_timeout_s=9,
        image="debian",
        workdir="/app",
        cpus=1.5,
        memory_mb=256,
        timeout_s=60,
        env={"A": "b"},
        metadata={"level": 3},
        solution={"patch": "diff"},
        tools=[{"name": "answer", "description": "Say it.", "schema": {"type": "object"}}],
        grader={
            "type": "rubric",
            "parts": [
                {
                    "name": "tests",
                    "weight": 2,
                    "grader": {"type": "script", "files": {"test.sh": "true"}, "timeout_s": 5},
                },
                {"name": "look", "grader": {"type": "function", "name": "grade.py:look"}},
            ],
        },
    )
    (task,) = read_tasks(write_lines(tmp_path / "t.jsonl", row))
    assert task.files is not None and (task.files / "src/main.py").read_text() == "print(1)\n"
    assert (task.files / "run").stat().st_mode & 0o111
    assert (task.setup, task.setup_timeout_s, task.image, task.workdir) == ("true", 9, "debian", "/app")
    assert (task.cpus, task.memory_mb, task.timeout_s, task.env) == (1.5, 256, 60, {"A": "b"})
    assert task.solution == Solution(patch="diff") and task.metadata == {"level": 3}
    assert task.tools[0].name == "answer"
    assert isinstance(task.grader, Rubric)
    tests, look_at = task.grader.parts
    assert isinstance(tests.grader, Script) and tests.grader.files is not None
    assert (tests.grader.files / "test.sh").read_text() == "true" and tests.weight == 2
    assert look_at == Part(name="look", weight=1.0, grader=Function(name=f"{tmp_path / 'grade.py'}:look"))
    assert task.source == f"{tmp_path / 't.jsonl'}, row 1"


@pytest.mark.process
def test_several_processes_can_load_the_same_rows(tmp_path: Path, cache: Path) -> None:
    rows = [make_row(str(n), files={f"{name}.txt": f"{n} {name}" for name in "abcdefgh"}) for n in range(150)]
    source = write_lines(tmp_path / "rows.jsonl", *rows)
    program = "import sys; from turngate.tasks import read_tasks; list(read_tasks(sys.argv[1]))"
    command = [sys.executable, "-c", program, source]
    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(4)))
    assert [end.returncode for end in ends] == [0] * 4, ends
    folders = [path for path in (cache / "tasks").iterdir() if path.is_dir()]
    assert len(folders) == 150 and all(len(list(folder.iterdir())) == 8 for folder in folders)


def test_row_files_are_stored_once_and_repaired(tmp_path: Path, cache: Path) -> None:
    source = write_lines(
        tmp_path / "t.jsonl",
        make_row("a", files={"x": "1"}),
        make_row("b", files={"x": "1"}),
        make_row("c", files={"x": "2"}),
    )
    a, b, c = read_tasks(source)
    assert a.files == b.files != c.files and a.files is not None and a.files.parent == cache / "tasks"
    (a.files / "x").write_text("tampered with")
    (a.files / "more").write_text("tampered with")
    again = next(read_tasks(source)).files
    assert again is not None and (again / "x").read_text() == "1" and [p.name for p in again.iterdir()] == ["x"]
    shutil.rmtree(again)
    again.symlink_to(tmp_path / "missing")
    assert next(read_tasks(source)).files == again and (again / "x").read_text() == "1" and not again.is_symlink()
    assert not [path for path in (cache / "tasks").iterdir() if path.name.startswith(".")]


def test_row_is_selected_by_the_number_in_messages(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "t.jsonl", make_row("a"), "", make_row("b"), {"id": "c"})
    assert _load_path(f"{rows}#2").id == "b"
    for where, load in ((rows, ids), (f"{rows}#3", _load_path)):
        with pytest.raises(TaskError, match=r"t.jsonl, row 3 \(c\): instruction is missing"):
            load(where)
    with pytest.raises(TaskError, match=r"t.jsonl has no row 4; its last row is 3"):
        _load_path(f"{rows}#4")


def test_swe_rows_are_detected_by_fields(tmp_path: Path) -> None:
    mixed = write_lines(tmp_path / "t.jsonl", swe_row(), "", make_row())
    swe_task, native_task = read_tasks(mixed)
    assert isinstance(swe_task.grader, Swe) and swe_task.source.endswith("t.jsonl, row 1")
    assert native_task.id == "one" and native_task.source.endswith("row 2"), "a blank line is not a row"
    (tmp_path / "t.json").write_text(json.dumps([swe_row(), make_row()]))
    assert ids(tmp_path / "t.json") == ["Org__repo-1", "one"]


def test_parquet(tmp_path: Path) -> None:
    rows = [
        swe_row(),
        swe_row(instance_id="Org__repo-2", install_config={"test_cmd": "pytest", "log_parser": "pytest"}),
    ]
    source = write_parquet(tmp_path / "t.parquet", rows)
    first, second = read_tasks(source)
    assert isinstance(first.grader, Swe) and first.grader.fail_to_pass == ("tests/test_a.py::test_1",)
    assert isinstance(second.grader, Swe) and (second.grader.install, second.source) == ("", f"{source}, row 2")
    (tmp_path / "broken.parquet").write_text("PAR0")
    with pytest.raises(TaskError, match="cannot be read as parquet"):
        ids(tmp_path / "broken.parquet")
    assert ids(tmp_path / "t.parquet", limit=1) == ["Org__repo-1"]


def test_folder_of_row_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", [make_row("a")])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", [make_row("b")])
    assert ids(tmp_path) == ["a", "b"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the Hugging Face cache, with the hub itself offline."""
    root = tmp_path / "hub"
    commit = "c" * 40
    snapshot = root / "datasets--org--rows" / "snapshots" / commit
    write_parquet(snapshot / "data" / "train-00000-of-00002.parquet", [make_row("a")])
    write_parquet(snapshot / "data" / "train-00001-of-00002-de6a857746501057.parquet", [make_row("b")])
    write_parquet(snapshot / "data" / "test-00000-of-00001.parquet", [make_row("c")])
    write_lines(snapshot / "lite" / "test.jsonl", make_row("d"))
    (root / "datasets--org--rows" / "refs").mkdir()
    (root / "datasets--org--rows" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return root


def test_hub_data_set(hub: Path) -> None:
    assert ids("hf://org/rows@train") == ["a", "b"]
    assert ids("hf://org/rows@test") == ["c"]
    assert ids("hf://org/rows@lite/test") == ["d"]
    assert next(read_tasks("hf://org/rows@test")).source.startswith(
        "hf://org/rows@test/data/test-00000-of-00001.parquet, row 1"
    )
    with pytest.raises(TaskError, match=r"choose one with @split; available: test, train, lite/test"):
        ids("hf://org/rows")
    with pytest.raises(TaskError, match="split 'dev' not found"):
        ids("hf://org/rows@dev")
    with pytest.raises(TaskError, match="hf://org/other cannot be downloaded"):
        ids("hf://org/other")
    with pytest.raises(TaskError, match="is not valid; write hf:"):
        ids("hf://rows")


def test_hub_data_set_without_rows_is_error(hub: Path) -> None:
    for file in [path for path in hub.rglob("*") if path.suffix in (".parquet", ".jsonl")]:
        file.unlink()
    with pytest.raises(TaskError, match=r"hf://org/rows has no \.jsonl or \.parquet files"):
        ids("hf://org/rows")


def test_tasks_from_functions(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(
        "from turngate.tasks import Task\n"
        "def tasks():\n"
        "    yield Task(id='a', instruction='Do it.')\n"
        "    yield {'id': 'b', 'instruction': 'Do it.'}\n"
        "def broken():\n"
        "    yield {'id': 'b', 'instruction': 'Do it.'}\n"
        "    raise KeyError('c')\n"
        "def odd():\n"
        "    return {'id': 'b'}\n"
        "async def later():\n"
        "    return []\n"
    )
    source = f"{tmp_path / 'make.py'}:tasks"
    first, second = read_tasks(source)
    assert (first.id, second.source) == ("a", f"{source}, item 2")
    assert ids("tests.tasks.test_read:a_few") == ["x", "y"]
    for name, complaint in {
        "broken": "KeyError: 'c'",
        "odd": "returned dict",
        "later": "returned coroutine",
        "missing": "no function missing",
    }.items():
        with pytest.raises(TaskError, match=complaint):
            ids(f"{tmp_path / 'make.py'}:{name}")
    with pytest.raises(TaskError, match="does not exist"):
        ids(f"{tmp_path / 'nothing.py'}:tasks")
    with pytest.raises(TaskError, match="cannot be imported: ModuleNotFoundError"):
        ids("no.such.module:tasks")


def a_few() -> list[Task | Mapping[str, Any]]:
    return [make_row("x"), Task(id="y", instruction="Do it.")]


# ── filters, duplicates, errors ─────────────────────────────────────────────────────────────────────────────────────


def test_only_and_limit_filters(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "t.jsonl", *(make_row(name) for name in ("a-1", "b-1", "a-2", "a-3")))
    assert ids(source, only=["a-*"]) == ["a-1", "a-2", "a-3"]
    assert ids(source, only=["a-*"], limit=2) == ["a-1", "a-2"]
    assert ids(source, only=["b-?", "a-3"]) == ["b-1", "a-3"]
    wrong = write_lines(tmp_path / "wrong.jsonl", make_row("a-1"), make_row("b-1", files=3), "{")
    assert ids(wrong, only=["a-*"]) == ["a-1"], "rows that do not match are not validated"
    with pytest.raises(TaskError, match=r"no task in .* matches z\*; available tasks: a-1, b-1, a-2, a-3$"):
        ids(source, only=["z*"])
    many = write_lines(tmp_path / "many.jsonl", *(make_row(f"a-{n}") for n in range(30)))
    with pytest.raises(TaskError, match=r"available tasks: a-0, .*, a-19, …$"):
        ids(many, only=["z*"])
    with pytest.raises(TaskError, match="limit must be at least 1, not 0"):
        ids(source, limit=0)


def test_duplicate_id_names_both_sources(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", make_row("same"))
    write_lines(tmp_path / "b.jsonl", make_row("other"), make_row("same"))
    with pytest.raises(TaskError, match=r"the id same is used in .*a.jsonl, row 1 and in .*b.jsonl, row 2"):
        ids(tmp_path)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"instruction": "x"}, r"t.jsonl, row 2: id is missing"),
        (make_row(instruction=3), r"t.jsonl, row 2 \(one\): instruction must be a string, not an integer"),
        (make_row(grade={}), r"\(one\): grade is not a known field; did you mean grader"),
        (make_row(grader={"type": "scirpt"}), "grader"),
        (make_row(grader={"type": "script", "timeout": 3}), "grader.timeout"),
        (make_row(grader={"type": "script"}), "grader.files has no test.sh"),
        (make_row(grader={"type": "function", "name": "grade"}), "grader.name"),
        (make_row(grader={"type": "rubric", "parts": []}), "grader.parts"),
        (make_row(files={"../x": "1"}), r"files contains '../x', which is not a plain relative path"),
        (make_row(files={"/x": "1"}), "not a plain relative path"),
        (make_row(files={"x": 1}), "files"),
        (make_row(files={"a": "1", "a/b": "2"}), "files cannot be stored"),
        (make_row(timeout_s=-1), "timeout_s"),
        (make_row(workdir="app"), "workdir"),
        (make_row(solution={}), "either 'patch' or 'files'"),
        (make_row(solution={"files": {"x": ""}}), "no solve.sh"),
        (make_row(instruction=" "), "is empty"),
        ("{not json", "t.jsonl, row 2 is not valid JSON"),
        ('{"id": "\udcff"}', "t.jsonl, row 2 is not valid JSON"),
        pytest.param("[" * 5000, "t.jsonl, row 2 is nested too deeply", id="nested"),
        ([1], "t.jsonl, row 2: a row must be a JSON object"),
        (swe_row(FAIL_TO_PASS="test_1"), r"t.jsonl, row 2 \(Org__repo-1\): FAIL_TO_PASS"),
    ],
)
def test_invalid_row_error_names_row_and_field(tmp_path: Path, row: object, complaint: str) -> None:
    source = write_lines(tmp_path / "t.jsonl", make_row("first"), row, make_row("last"))
    with pytest.raises(TaskError, match=complaint):
        ids(source)
    assert [found.error is None for found in scan_tasks(source)] == [True, False, True], "the other rows are still read"


@pytest.mark.parametrize(("text", "complaint"), [("[1,", "is not valid JSON"), ("[" * 5000, "is nested too deeply")])
def test_error_of_a_whole_file_names_no_row(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TaskError, match=rf"t\.json {complaint}"):
        ids(tmp_path / "t.json")


@pytest.mark.parametrize("source", ["nowhere", "nowhere.jsonl", "no/such/folder"])
def test_missing_source_is_error(source: str) -> None:
    with pytest.raises(TaskError, match=f"{source} does not exist"):
        ids(source)


def test_empty_source_is_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"contains no instruction.md, no task folders"):
        ids(tmp_path)
    with pytest.raises(TaskError, match="has no tasks"):
        ids(write_lines(tmp_path / "t.jsonl"))


# ── the commands ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_instruction_that_ends_with_an_issue_tag_is_listed(tmp_path: Path) -> None:
    tasks = write_lines(tmp_path / "t.jsonl", make_row(instruction="Explain the tag <issue>\n"))
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tasks", "list", tasks])
    assert done.exit_code == 0 and "Explain the tag <issue>" in done.output


@pytest.mark.process
@pytest.mark.needs("swebench")
def test_list_and_check_commands(tmp_path: Path) -> None:
    run = CliRunner(env={"COLUMNS": "200"}).invoke
    good = write_lines(tmp_path / "good.jsonl", make_row("a"), swe_row())
    bad = write_lines(tmp_path / "bad.jsonl", make_row("a"), make_row("b", files=7))
    done = run(app, ["tasks", "list", good])
    assert done.exit_code == 0 and "Org__repo-1" in done.output and "1 to fix, 2 to keep" in done.output
    assert run(app, ["tasks", "list", bad]).exit_code == 1
    done = run(app, ["tasks", "check", good, "--no-prove", "--json"])
    assert done.exit_code == 0
    assert [(line["id"], line["verdict"]) for line in json.loads(done.stdout)] == [
        ("a", "valid"),
        ("Org__repo-1", "valid"),
    ]
    done = run(app, ["tasks", "check", bad, "--no-prove", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)[1]["verdict"] == "wrong" and "files" in json.loads(done.stdout)[1]["message"]
    done = run(app, ["tasks", "check", bad, "--no-prove", "--only", "a"])
    assert done.exit_code == 0 and "Tasks that passed: 1 of 1" in done.output and "it cannot be proven" in done.output
    for wrong in (["nowhere"], [good, "--limit", "0"], [good, "--concurrency", "0"], [good, "--sandbox", "moon"]):
        assert run(app, ["tasks", "check", *wrong]).exit_code == 2, wrong


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"kind": "rename", "category": "files"}, "rename"),
        ({"category": "files"}, "files"),
        ({"kind": "", "category": "files"}, "files"),
        ({"kind": 3, "level": "hard"}, ""),
        ({}, ""),
    ],
)
def test_kind_of_task_is_in_its_metadata(metadata: dict[str, Any], kind: str) -> None:
    assert Task(id="t", instruction="Do it.", metadata=metadata).kind == kind
