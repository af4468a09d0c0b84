"""The cache of teacher scores changes no file that is not a score cache."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from turngate.errors import ConfigError
from turngate.store.score_cache import ScoreCache


def get_mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


@pytest.mark.parametrize("kind", ["text", "database", "newer cache"])
def test_another_file_is_refused_and_not_changed(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    if kind == "text":
        file.write_text('{"a": 1}\n')
    else:
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            db.execute("CREATE TABLE mine (x)")
            db.execute(f"PRAGMA user_version={2 if kind == 'newer cache' else 0}")
    file.chmod(0o644)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"cannot be used .* pass another file as --teacher-cache"):
        ScoreCache(file)
    assert (file.read_bytes(), get_mode(file)) == (before, 0o644)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_cache_is_private(tmp_path: Path) -> None:
    file = tmp_path / "scores.db"
    for _ in range(2):
        ScoreCache(file).close()
        assert get_mode(file) == 0o600
        file.chmod(0o644)
