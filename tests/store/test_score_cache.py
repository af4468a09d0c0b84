"""The cache of teacher scores changes no file that is not a score cache, and reports damage."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from turngate.errors import ConfigError, StoreError
from turngate.store.score_cache import CachedScores, ScoreCache, ScoreKey

KEY = ScoreKey("teacher", "1", 2)
_PAGE_BYTES = 4096


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
    opened = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    assert str(file.resolve()) not in opened
    assert (file.read_bytes(), get_mode(file)) == (before, 0o644)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_cache_is_private(tmp_path: Path) -> None:
    file = tmp_path / "scores.db"
    for _ in range(2):
        ScoreCache(file).close()
        assert get_mode(file) == 0o600
        file.chmod(0o644)


@pytest.mark.parametrize(
    ("use", "failed"),
    [
        (lambda cache: cache.read(KEY, b"1"), "read from"),
        (lambda cache: cache.sessions(), "read from"),
        (lambda cache: cache.remove(["s"]), "removed from"),
    ],
    ids=["read", "sessions", "remove"],
)
def test_damaged_file_is_an_error(tmp_path: Path, use: Callable[[ScoreCache], object], failed: str) -> None:
    file = tmp_path / "scores.db"
    scores = CachedScores(np.zeros(100, np.float32), np.zeros((100, 2), np.int32), np.zeros((100, 2), np.float32))
    with closing(ScoreCache(file)) as cache:
        cache.write(KEY, "s", [(str(number).encode(), scores) for number in range(50)])
    data = bytearray(file.read_bytes())
    for start in range(_PAGE_BYTES, len(data), _PAGE_BYTES):  # all pages but the first, which has the schema
        data[start : start + 64] = b"\xff" * 64
    file.write_bytes(data)
    with (
        closing(ScoreCache(file)) as cache,
        pytest.raises(StoreError, match=rf"cannot be {failed} .*scores\.db .*delete this one if it is damaged"),
    ):
        use(cache)
