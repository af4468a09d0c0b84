"""Startup errors of `turngate mcp`; tests/mcp tests the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.cli import mcp
from turngate.errors import DataFolderInUse, EngineError, TurngateError
from turngate.store.lock import lock_folder


def test_folder_in_use_is_one_error(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    with pytest.raises(DataFolderInUse) as refused:
        lock_folder(tmp_path)
    lock.close()
    group = BaseExceptionGroup("tasks", [ExceptionGroup("more", [refused.value])])
    found = mcp._unwrap(group, is_stdio=True)
    assert isinstance(found, TurngateError)
    assert "is in use" in found.message and "--http" in found.message
    assert mcp._unwrap(group, is_stdio=False) is refused.value


def test_other_exception_groups_are_kept() -> None:
    two = ExceptionGroup("tasks", [EngineError("a"), EngineError("b")])
    assert mcp._unwrap(two, is_stdio=True) is two
    assert mcp._unwrap(ExceptionGroup("tasks", [EngineError("a")]), is_stdio=True).args
    bug = ExceptionGroup("tasks", [ValueError("a")])
    assert mcp._unwrap(bug, is_stdio=True) is bug
