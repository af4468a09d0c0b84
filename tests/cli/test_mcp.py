"""What `turngate mcp` says when it cannot start. What it does when it can is in tests/mcp."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.cli import mcp
from turngate.errors import DataFolderInUse, EngineError, TurngateError
from turngate.store.lock import lock_folder


def test_a_folder_in_use_is_told_in_one_sentence(tmp_path: Path) -> None:
    held = lock_folder(tmp_path)
    with pytest.raises(DataFolderInUse) as refused:
        lock_folder(tmp_path)
    held.close()
    found = mcp._unwrap(BaseExceptionGroup("tasks", [ExceptionGroup("more", [refused.value])]))
    assert isinstance(found, TurngateError)
    assert "is in use" in found.message and "--http" in found.message


def test_what_is_not_ours_or_not_one_stays_whole() -> None:
    two = ExceptionGroup("tasks", [EngineError("a"), EngineError("b")])
    assert mcp._unwrap(two) is two
    assert mcp._unwrap(ExceptionGroup("tasks", [EngineError("a")])).args
    bug = ExceptionGroup("tasks", [ValueError("a")])
    assert mcp._unwrap(bug) is bug
