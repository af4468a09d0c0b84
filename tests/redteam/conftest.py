"""A place for sandboxes that has to be empty again at the end, and one ground to grade on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import uses
from tests.tasks.grading import kit
from turngate.tasks.grading.types import GradingEnvironment


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    left = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    assert not left, "sandboxes left folders behind"


@pytest.fixture
@uses("bubblewrap")
def walled(root: Path) -> GradingEnvironment:
    """bubblewrap: walls, and no second to lose."""
    return kit.ground("bubblewrap", root)
