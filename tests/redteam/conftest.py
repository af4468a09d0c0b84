"""A folder for sandboxes that must be empty at the end, and a grading environment in it."""

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
    leftovers = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    assert not leftovers, "sandboxes left folders behind"


@pytest.fixture
@uses("bubblewrap")
def isolated(root: Path) -> GradingEnvironment:
    """An isolated grading environment that starts quickly: bubblewrap."""
    return kit.grading_environment("bubblewrap", root)
