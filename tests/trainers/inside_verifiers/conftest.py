"""These run where `verifiers` is installed: `tests/trainers/test_verifiers.py` starts them there. Elsewhere they are not collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = [] if find_spec("verifiers") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent / "plugins"))  # where verifiers finds our harness by its name
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "verifiers"))
