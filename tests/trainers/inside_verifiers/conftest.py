"""These tests need `verifiers`: `tests/trainers/test_verifiers.py` runs them in its environment. Elsewhere they are not collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = [] if find_spec("verifiers") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent / "plugins"))  # verifiers imports the harness from here by name
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "verifiers"))
