"""The script for Slurm, on a real Slurm: a job starts a Ray cluster on its nodes, runs a batch, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.ray_kit import ROOT, ray_environment, ray_python
from tests.cluster.slurm_kit import start_slurm
from tests.needs import require
from tests.postgres import PostgresServer
from tests.speed import scaled
from turngate.rollout.ledger import read_ledger


def make_environment(folder: Path) -> Path:
    """Make what the script expects of a Python environment: the programs `python`, `ray` and `turngate`."""
    (folder / "bin").mkdir(parents=True)
    for name, arguments in (("python", ""), ("ray", "-m ray.scripts.scripts"), ("turngate", "-m turngate")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {ray_python()} {arguments} "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.mark.real
@pytest.mark.needs("slurm", "ray", "postgres", "agent:pi")
def test_job_runs_batch_on_its_nodes(tmp_path: Path, postgres_server: PostgresServer, postgres_url: str) -> None:
    require("ray")
    with start_slurm("n1", "n2") as slurm:
        slurm.environment |= ray_environment(slurm.folder / "unused") | {
            "SLURM_CONF": str(slurm.folder / "slurm.conf"),
            "VENV": str(make_environment(tmp_path / "venv")),
            "TURNGATE_DATA": postgres_url,
            "TURNGATE_SLOTS": "2",
            "TURNGATE_CELL_DATA": str(slurm.folder / "cells"),
            "TOKEN_FOLDER": str(slurm.folder),
            "RAY_TMPDIR": str(slurm.folder),
        }
        batch = ["batch", "--tasks", str(ROOT / "examples" / "tasks" / "fix-add"), "--agent", "pi"]
        batch += ["--sandbox", "local", "--n", "3", "--concurrency", "3", "--out", str(tmp_path / "out")]
        log = tmp_path / "job.log"
        options = ["--parsable", "--nodes=2", f"--output={log}"]
        job = slurm.run("sbatch", *options, str(ROOT / "deploy" / "slurm" / "turngate.sbatch"), *batch)
        deadline = time.monotonic() + scaled(240)
        while slurm.run("squeue", "-h", "-j", job, "-o", "%T") or not log.exists():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        text = log.read_text(errors="replace")
        assert slurm.run("scontrol", "show", "job", job).count("JobState=COMPLETED") == 1, text
        finished = read_ledger(tmp_path / "out").finished
        assert len(finished) == 3 and {one.kind for one in finished.values()} == {"graded"}, text
        assert not list(slurm.folder.glob(".turngate-ray-*")), "the token is deleted"
        settled = "SELECT count(*) FROM attempts WHERE state='settled'"
        assert postgres_server.query(settled, postgres_url.rpartition("/")[2]) == "3"
