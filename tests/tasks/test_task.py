"""Tasks from folders, files and prompts, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.errors import TaskError
from turngate.tasks import load_task, task_from_prompt


def write_folder(parent: Path, **files: str) -> Path:
    for name, text in files.items():
        path = parent / name.replace("__", "/").replace("_md", ".md").replace("_sh", ".sh").replace("_toml", ".toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return parent


def test_folder_with_every_part(tmp_path: Path) -> None:
    text = '[agent]\ntimeout_sec = 90.0\n[environment]\ncpus = 2\nmemory_mb = 512\ndocker_image = "debian"\n[verifier]\nx = 1\n'
    path = write_folder(
        tmp_path / "fix it!",
        instruction_md="Fix it.",
        task_toml=text,
        setup_sh="true",
        files__a="1",
        environment__Dockerfile="FROM x",
    )
    task = load_task(path)
    assert (task.id, task.instruction, task.setup, task.image) == ("fix-it", "Fix it.", "true", "debian")
    assert (task.timeout_s, task.cpus, task.memory_mb) == (90.0, 2, 512)
    assert task.files == path / "files" and task.dockerfile == path / "environment"


def test_folder_needs_only_instruction(tmp_path: Path) -> None:
    task = load_task(write_folder(tmp_path / "t", instruction_md="Do it."))
    assert (task.files, task.dockerfile, task.setup, task.timeout_s) == (None, None, "", None)


def test_file_and_prompt_become_tasks(tmp_path: Path) -> None:
    (tmp_path / "wish.txt").write_text("Do it.")
    assert load_task(tmp_path / "wish.txt").id == "wish"
    assert task_from_prompt("Do it.").instruction == "Do it."


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "no instruction.md"),
        ({"instruction_md": " \n"}, "is empty"),
        ({"instruction_md": "a\0b"}, "NUL character"),
        ({"instruction_md": "x", "task_toml": "[agent"}, "not valid TOML"),
        ({"instruction_md": "x", "task_toml": "[agent]\ntimeout_sec = 'soon'"}, "agent.timeout_sec"),
        ({"instruction_md": "x", "task_toml": "[agent]\ntimeout_sec = -1"}, "agent.timeout_sec"),
    ],
)
def test_invalid_folder_error_names_problem(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(TaskError, match=complaint):
        load_task(write_folder(tmp_path / "t", **files))


def test_missing_or_binary_file_is_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not exist"):
        load_task(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="UTF-8"):
        load_task(tmp_path / "binary")
