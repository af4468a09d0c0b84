"""Tasks as folders, files and words; and what is wrong with them, said by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.errors import TaskError
from turngate.tasks import load_task, task_from_prompt


def folder(at: Path, **files: str) -> Path:
    for name, text in files.items():
        path = at / name.replace("__", "/").replace("_md", ".md").replace("_sh", ".sh").replace("_toml", ".toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return at


def test_a_folder_with_everything(tmp_path: Path) -> None:
    text = '[agent]\ntimeout_sec = 90.0\n[environment]\ncpus = 2\nmemory_mb = 512\ndocker_image = "debian"\n[verifier]\nx = 1\n'
    at = folder(
        tmp_path / "fix it!",
        instruction_md="Fix it.",
        task_toml=text,
        setup_sh="true",
        files__a="1",
        environment__Dockerfile="FROM x",
    )
    task = load_task(at)
    assert (task.id, task.instruction, task.setup, task.image) == ("fix-it", "Fix it.", "true", "debian")
    assert (task.timeout_s, task.cpus, task.memory_mb) == (90.0, 2, 512)
    assert task.files == at / "files" and task.dockerfile == at / "environment"


def test_a_folder_needs_nothing_but_an_instruction(tmp_path: Path) -> None:
    task = load_task(folder(tmp_path / "t", instruction_md="Do it."))
    assert (task.files, task.dockerfile, task.setup, task.timeout_s) == (None, None, "", None)


def test_a_file_and_plain_words_are_tasks_too(tmp_path: Path) -> None:
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
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(TaskError, match=complaint):
        load_task(folder(tmp_path / "t", **files))


def test_a_task_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not exist"):
        load_task(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="UTF-8"):
        load_task(tmp_path / "binary")
