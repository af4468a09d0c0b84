"""A real Slurm on this machine, started by root: munged, slurmctld, and one slurmd for each of several nodes."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.needs import require, uses
from tests.ports import free_port
from tests.speed import scaled

START_S = 30.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class LocalSlurm:
    """A running Slurm. `environment` makes its commands use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=self.folder)
        assert done.returncode == 0, f"{command[0]}: {done.stderr}"
        return done.stdout.strip()


@uses("slurm")
@contextmanager
def start_slurm(*names: str) -> Iterator[LocalSlurm]:
    """Start Slurm with these nodes, and stop and delete it at the end."""
    require("slurm")
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    host = os.uname().nodename
    slurm = LocalSlurm(folder)
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
        for name in names
    )
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=f"{host}(127.0.0.1)", folder=folder, port=free_port(), nodes=nodes)
    )
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_keep(munge, slurm))
        _wait(lambda: (folder / "munge.socket").exists(), folder / "munge.log")
        stack.enter_context(_keep(["slurmctld", "-D", "-i"], slurm))
        for name in names:
            (folder / f"spool-{name}").mkdir()
            stack.enter_context(_keep(["slurmd", "-D", "-N", name], slurm))
        _wait(lambda: _count_idle(slurm) == len(names), folder / "slurmctld.log")
        yield slurm


@contextmanager
def _keep(command: list[str], slurm: LocalSlurm) -> Iterator[None]:
    """Run a daemon for the duration of the block."""
    with (slurm.folder / f"{command[0]}.out").open("ab") as output:
        process = subprocess.Popen(command, env=slurm.environment, stdout=output, stderr=output, cwd=slurm.folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(scaled(10))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _count_idle(slurm: LocalSlurm) -> int:
    done = subprocess.run(["sinfo", "-hN", "-o", "%t"], env=slurm.environment, capture_output=True, text=True)
    return done.stdout.split().count("idle")


def _wait(ready: object, log: Path) -> None:
    deadline = time.monotonic() + scaled(START_S)
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < deadline, log.read_text() if log.exists() else f"{log} does not exist"
        time.sleep(0.1)
