"""A reference solution as shell commands: they write its files exactly, apply it, and each fits in one tool call."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from turngate.errors import TaskError
from turngate.sandboxes import get_backend
from turngate.tasks import BUNDLED_TASK, load_task
from turngate.tasks.reference import MAX_BYTES, reference_commands, solution_folders
from turngate.tasks.task import Solution

ROOT = Path(__file__).parents[2]


def run(commands: tuple[str, ...], workdir: Path, home: Path) -> None:
    """Run each command in a shell of its own, as agents do."""
    workdir.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=workdir, env={**os.environ, "HOME": str(home)}, check=True)


def test_example_is_the_bundled_task() -> None:
    assert (ROOT / "examples" / "tasks" / "fix-add").resolve() == BUNDLED_TASK.resolve()


def test_small_solution_is_one_command() -> None:
    solution = load_task(BUNDLED_TASK).solution
    assert solution is not None
    [command] = reference_commands(solution, get_backend("local"))
    assert (BUNDLED_TASK / "solution" / "solve.sh").read_text() in command
    assert command.endswith('TURNGATE_SOLUTION="$HOME"/solution bash "$HOME"/solution/solve.sh')


def test_solution_folder_in_sandbox_with_own_root() -> None:
    solution = load_task(BUNDLED_TASK).solution
    assert solution is not None
    [command] = reference_commands(solution, get_backend("bubblewrap"))
    assert command.endswith("TURNGATE_SOLUTION=/solution bash /solution/solve.sh")
    assert solution_folders(get_backend("bubblewrap")) == ("/solution",)
    assert solution_folders(get_backend("local")) == ()


@pytest.mark.process
def test_files_are_written_exactly(tmp_path: Path) -> None:
    files = {
        "text.txt": b'it\'s $HOME, `x` and "y"\n',
        "no newline": b"last line",
        "binary": bytes(range(256)),
        "sub folder/large.txt": b"line\n" * 4000,
        "tokens.txt": b"<|im_end|>\n<tool_call>\n",
        "empty": b"",
    }
    folder = tmp_path / "solution"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "program").write_text('#!/bin/sh\ncp -r "$TURNGATE_SOLUTION" copy\n')
    (folder / "program").chmod(0o755)
    (folder / "solve.sh").write_text('exec "$TURNGATE_SOLUTION/program"\n')
    commands = reference_commands(Solution(files=folder), get_backend("local"))
    assert len(commands) > 1 and all(len(command) < 8000 for command in commands)
    assert not any("<|im_end|>" in command or "<tool_call>" in command for command in commands)
    run(commands, tmp_path / "work", tmp_path / "home")
    for name, data in files.items():
        assert (tmp_path / "work" / "copy" / name).read_bytes() == data


@pytest.mark.process
def test_many_folders_and_programs_are_split_over_commands(tmp_path: Path) -> None:
    folder = tmp_path / "solution"
    names = [f"{number:03}-{'x' * 60}/program" for number in range(200)]
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    (folder / "solve.sh").write_text('cp -rp "$TURNGATE_SOLUTION" copy\n')
    commands = reference_commands(Solution(files=folder), get_backend("local"))
    assert max(map(len, commands)) <= 6000
    run(commands, tmp_path / "work", tmp_path / "home")
    assert all(os.access(tmp_path / "work" / "copy" / name, os.X_OK) for name in names)


@pytest.mark.process
def test_patch_is_applied(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("a = 1\n")
    patch = "--- a/main.py\n+++ b/main.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
    run(reference_commands(Solution(patch=patch), get_backend("local")), tmp_path / "work", tmp_path / "home")
    assert (tmp_path / "work" / "main.py").read_text() == "a = 2\n"


def test_unsupported_solutions_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "solve.sh").write_bytes(b"#" * (MAX_BYTES + 1))
    solution = Solution(files=tmp_path)
    with pytest.raises(
        TaskError, match=f"is {MAX_BYTES + 1} bytes long, but at most {MAX_BYTES} bytes can be replayed"
    ):
        reference_commands(solution, get_backend("local"))
    with pytest.raises(TaskError, match="cannot be replayed: it needs environment variables"):
        reference_commands(msgspec.structs.replace(solution, env={"KEY": "secret"}), get_backend("local"))


def test_links_are_rejected_unread(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("private")
    folder = tmp_path / "solution"
    folder.mkdir()
    (folder / "solve.sh").write_text("true\n")
    (folder / "key").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match="key is a symbolic link"):
        reference_commands(Solution(files=folder), get_backend("local"))
