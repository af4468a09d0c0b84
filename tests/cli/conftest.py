"""Fixtures for tests of `turngate run`."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put sandboxes into a temporary folder that must be empty afterwards. Needs `tmp_path` first: pytest creates it in TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", str(folder / "nobody"))  # without custom agents
    yield
    leftovers = [path.name for path in folder.glob("turngate-*/*")]
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert leftovers == []
