"""Who checks must not share the faults of whom it checks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.process
def test_verify_is_loaded_without_the_code_that_records() -> None:
    program = "import sys, turngate.verify; print(*(m for m in sys.modules if m.startswith('turngate.')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    recording = ("trace", "store", "gateway", "views", "server")
    assert not [name for name in loaded if name.split(".")[1] in recording]
