"""The benchmark of shipping still runs with the code of the cells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.speed import scaled

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("postgres")
@pytest.mark.process
@pytest.mark.repeat  # of tests/cells/test_shipping.py, with a clock
def test_shipping_is_measured() -> None:
    command = [sys.executable, "-m", "bench.scale.shipping", "--seconds", "0.5", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.startswith("shippers") and len(rows) == 4
    assert all(float(cell) > 0 for row in rows for cell in row.split()[:5])
