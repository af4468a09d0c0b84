"""`make demo-cluster`: PostgreSQL, three Ray nodes, a batch, and a killed node."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.ray_kit import ROOT
from tests.speed import scaled

ROLLOUTS = 6


@pytest.mark.repeat  # test_ray_batch.py kills a node, too
@pytest.mark.needs("ray", "postgres", "agent:mini-swe-agent")
def test_demo_runs_to_its_end() -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo_cluster.py"), "--no-page", "--n", str(ROLLOUTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(280))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Killing node b" in done.stdout and f"settled: {ROLLOUTS}" in done.stdout, done.stdout
