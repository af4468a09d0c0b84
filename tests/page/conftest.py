"""The folder for screenshots."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    return tmp_path / "shots"
