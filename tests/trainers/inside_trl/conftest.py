"""These tests need `trl`: `tests/trainers/test_trl.py` runs them in its environment. Elsewhere they are not collected."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "trl"))
