"""Verify must not share code, and thus bugs, with the code that records."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turngate.store.shared.tables import SHARED_VERSION
from turngate.verify.shared_reader import SHARED_SCHEMAS


@pytest.mark.process
def test_verify_does_not_import_recording_code() -> None:
    program = "import sys, turngate.verify; print(*(m for m in sys.modules if m.startswith('turngate.')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    recording = ("trace", "store", "gateway", "views", "server")
    assert not [name for name in loaded if name.split(".")[1] in recording]


def test_verifier_reads_the_newest_shared_store() -> None:
    assert SHARED_SCHEMAS[-1] == SHARED_VERSION
