"""`make demo-cluster`: a batch of a real agent on three Ray nodes and PostgreSQL, all on this machine. One node is killed in the middle.

The nodes are processes of their own, with their own folders, and know each other only through Ray and PostgreSQL, as on three machines. The
model is scripted: the agent is real, and so are its sandboxes, grades and tokens. The demo ends with the page of the whole cluster,
which stays open until Ctrl-C (not with --no-page).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from tests.cluster.ray_kit import LocalRay, ray_python, start_ray
from tests.postgres import start_postgres
from tools import base_image, parts
from turngate.agents.install import ensure_installed
from turngate.agents.spec import find_agent
from turngate.errors import TurngateError

ROOT = Path(__file__).parents[1]
N, CONCURRENCY, SLOTS = 12, 6, 2
LEASE_S = 10
LIMIT_S = 900.0


def install(console: Console) -> None:
    """Install what the demo needs: PostgreSQL, Ray and the agent."""
    console.print("[dim]Installing PostgreSQL, Ray and mini-SWE-agent, if they are missing …")
    if os.geteuid() == 0:
        base_image.ensure_postgres()
    else:
        parts.ensure("postgres")
    parts.ensure("ray")
    ensure_installed(find_agent("mini-swe-agent").spec, lambda line: console.print(f"[dim]{line}"))


def start_batch(cluster: LocalRay, url: str, folder: Path, n: int) -> subprocess.Popen[bytes]:
    config = folder / "cells.toml"
    config.write_text(f"lease_s = {LEASE_S}\n")
    command = [str(ray_python()), "-m", "turngate", "batch", "--ray", cluster.address, "--data", url]
    command += ["--config", str(config), "--tasks", str(ROOT / "examples" / "tasks" / "fix-add")]
    command += ["--agent", "mini-swe-agent", "--sandbox", "local", "--n", str(n), "--concurrency", str(CONCURRENCY)]
    command += ["--out", str(folder / "batch")]
    return subprocess.Popen(command, env=cluster.environment(), cwd=folder)


def count_finished(out: Path) -> int:
    """Count the finished rollouts in the ledger of the batch, which has one JSON object per line."""
    ledger = out / "ledger.jsonl"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return sum(line.startswith('{"type":"finished"') for line in lines)


def wait_for_third(batch: subprocess.Popen[bytes], out: Path, n: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while batch.poll() is None and time.monotonic() < deadline:
        if count_finished(out) >= n // 3:
            return
        time.sleep(0.5)


def serve_page(cluster: LocalRay, url: str, console: Console) -> None:
    """Serve the page of the shared store until Ctrl-C."""
    console.print("\nThe page of all three nodes. Press Ctrl-C to end the demo and remove everything that it started.")
    server = subprocess.Popen(
        [str(ray_python()), "-m", "turngate", "serve", "--data", url, "--port", "0"], env=cluster.environment()
    )
    try:
        server.wait()
    except KeyboardInterrupt:
        server.terminate()
        server.wait()


def run_demo(console: Console, page: bool, n: int) -> int:
    install(console)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo")))
        console.print("Starting PostgreSQL and three Ray nodes: head, a and b …")
        server = stack.enter_context(start_postgres())
        cluster = stack.enter_context(start_ray("a", "b", slots=SLOTS))
        url = server.create_database()
        console.print(
            f"Running {n} rollouts, {CONCURRENCY} at a time, with:\n  turngate batch --ray {cluster.address} --data {url} …"
        )
        batch = start_batch(cluster, url, folder, n)
        wait_for_third(batch, folder / "batch", n)
        console.print("[bold red]Killing node b, with its cell, its agents and its sandboxes.")
        cluster.nodes["b"].kill()
        code = batch.wait()
        table = "SELECT state, count(*) FROM attempts GROUP BY state ORDER BY state"
        states = server.query(table, url.rpartition("/")[2]).replace("|", ": ").splitlines()
        console.print(
            f"\nAttempts in PostgreSQL: {', '.join(states)}. Only settled ones are in groups, feeds and exports."
        )
        shown = [str(ray_python()), "-m", "turngate", "verify", "--all", "--data", url]
        verified = subprocess.run(shown, env=cluster.environment()).returncode
        if page and not code:
            serve_page(cluster, url, console)
        return code or verified


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run a batch on three Ray nodes of this machine, and kill one of them."
    )
    parser.add_argument("--no-page", action="store_true", help="end after the batch")
    parser.add_argument("--n", type=int, default=N, help=f"number of rollouts (default: {N})")
    arguments = parser.parse_args()
    console = Console()
    try:
        return run_demo(console, not arguments.no_page, arguments.n)
    except (TurngateError, parts.PartError, base_image.ImageError) as error:
        console.print(f"[red]{error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
