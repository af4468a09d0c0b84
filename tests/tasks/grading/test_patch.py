"""Find the files that a patch touches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tasks.grading import kit
from turngate.tasks.grading.patch import find_touched_files


def test_changed_and_added_files() -> None:
    assert find_touched_files(kit.TEST_PATCH) == ("tests/test_prices.py", "tests/test_more.py")
    assert find_touched_files("") == ()


def test_header_like_lines_in_hunk_are_ignored() -> None:
    patch = "--- a/x.sql\n+++ b/x.sql\n@@ -1,2 +1,2 @@\n--- a/not/this\n+++ b/nor/that\n same\n--- a/y\n+++ b/y\n@@ -0,0 +1 @@\n+z\n"
    assert find_touched_files(patch) == ("x.sql", "y")


@pytest.mark.process
def test_every_kind_of_change_in_git_diff(tmp_path: Path) -> None:
    """Cover renames, removals, modes, binary files, empty files, CRLF and non-ASCII names in git's own output."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout.decode(
            "utf-8", "surrogateescape"
        )

    git("init", "-q", ".")
    lines = "".join(f"line {n}\n" for n in range(40))
    kit.write_files(
        tmp_path,
        {
            "old name.py": lines,
            "gone.py": "x\n",
            "mode.sh": "x\n",
            "blob": bytes(range(256)),
            "crlf.txt": "a\r\nb\r\n",
            "täst.py": "a\n",
        },
    )
    git("add", "-A")
    git("commit", "-q", "-m", "1")
    (tmp_path / "old name.py").rename(tmp_path / "new name.py")
    (tmp_path / "new name.py").write_text(lines + "more\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "mode.sh").chmod(0o755)
    kit.write_files(
        tmp_path,
        {"blob": bytes(range(255, -1, -1)), "crlf.txt": "a\r\nc\r\n", "täst.py": "b\n", "empty": "", 'quo"te': "x\n"},
    )
    git("add", "-A")
    found = find_touched_files(git("diff", "--cached", "--binary", "-M"))
    expected = {"old name.py", "new name.py", "gone.py", "mode.sh", "blob", "crlf.txt", "täst.py", "empty", 'quo"te'}
    assert set(found) == expected
