"""A batch of a real agent on a real Ray cluster, with PostgreSQL: nodes and drivers are killed, and nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cut_wire import CutWire
from tests.cluster.ray_kit import ROOT, LocalRay, ray_python, start_ray
from tests.postgres import PostgresServer
from tests.speed import scaled
from turngate.rollout.ledger import LEDGER_NAME, read_ledger
from turngate.sandboxes import get_backend

pytestmark = [pytest.mark.needs("ray", "postgres", "agent:mini-swe-agent")]
LEASE_S = 6


class Driver:
    """`turngate batch --ray` as a process."""

    def __init__(self, cluster: LocalRay, url: str, out: Path, *, n: int, concurrency: int, **env: str) -> None:
        config = out.with_suffix(".toml")
        config.write_text(f"lease_s = {LEASE_S}\n")
        self.out, self.started = out, time.monotonic()
        self._log = out.with_suffix(f".{time.monotonic_ns()}.log")
        command = [str(ray_python()), "-m", "turngate", "batch", "--ray", cluster.address, "--data", url]
        command += [
            "--config",
            str(config),
            "--tasks",
            str(ROOT / "examples" / "tasks" / "fix-add"),
            "--sandbox",
            "local",
        ]
        command += ["--agent", "mini-swe-agent", "--n", str(n), "--concurrency", str(concurrency), "--out", str(out)]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=cluster.environment(**env),
                cwd=cluster.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def finished(self) -> int:
        """How many rollouts are finished so far."""
        path = self.out / LEDGER_NAME
        return len(read_ledger(self.out).finished) if path.exists() else 0

    def wait_for(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + scaled(120)
        while not reached():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def wait(self, limit_s: float | None = None) -> None:
        assert self.process.wait(limit_s or scaled(240)) == 0, self.log()


def check_results(server: PostgresServer, url: str, out: Path, n: int) -> Counter[str]:
    """Check that every rollout ended in one class and counts once. Return how many attempts there were of each state."""
    database = url.rpartition("/")[2]
    finished = read_ledger(out).finished
    assert len(finished) == n and {one.kind for one in finished.values()} == {"graded"}, finished
    rows = server.query("SELECT rollout, attempt, state, session FROM attempts", database).splitlines()
    attempts = [line.split("|") for line in rows]
    settled = [rollout for rollout, _, state, _ in attempts if state == "settled"]
    assert sorted(settled) == sorted(finished), "each rollout has exactly one attempt that counts"
    sessions = {session for _, _, state, session in attempts if state == "settled"}
    assert sessions == {one.session for one in finished.values()}
    return Counter(state for _, _, state, _ in attempts)


def leftovers(pids: dict[int, str]) -> list[str]:
    """Return those of the processes that still run, after a while in which they may end."""
    deadline = time.monotonic() + scaled(10)
    while True:
        left = [command for pid, command in pids.items() if Path(f"/proc/{pid}").exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def sweep_sandboxes() -> None:
    """Remove the sandboxes of killed nodes, as the next cell on their machine would."""
    asyncio.run(get_backend("local").sweep())
    folder = Path(tempfile.gettempdir()) / f"turngate-{os.getuid()}"
    assert not folder.is_dir() or not list(folder.glob("local-*")), list(folder.iterdir())


def count_cells(cluster: LocalRay) -> int:
    """Count the processes of cells on all nodes."""
    return sum("order_runner" in line for node in cluster.nodes.values() for line in node.processes().values())


@pytest.mark.real
def test_rollouts_of_a_killed_node_run_again_elsewhere(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    with start_ray("a", "b", slots=2) as cluster:
        driver = Driver(cluster, postgres_url, tmp_path / "out", n=6, concurrency=6)
        driver.wait_for(lambda: driver.log().count("is ready") >= 3)
        driver.wait_for(lambda: any("mini-swe-agent" in line for line in cluster.nodes["b"].processes().values()))
        lost = cluster.nodes["b"].processes()
        cluster.nodes["b"].kill()
        driver.wait()
        states = check_results(postgres_server, postgres_url, tmp_path / "out", 6)
        assert states["settled"] == 6 and set(states) <= {"settled", "superseded"}
        assert not leftovers(lost)
        assert not count_cells(cluster), "the driver closes the cells of the other nodes"
    sweep_sandboxes()


@pytest.mark.full
def test_killed_driver_resumes_while_nodes_join_and_drain(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    with start_ray("a", slots=2) as cluster:
        first = Driver(cluster, postgres_url, tmp_path / "out", n=8, concurrency=4)
        first.wait_for(lambda: first.finished() >= 1)
        first.process.kill()
        first.process.wait()
        before = first.finished()
        second = Driver(cluster, postgres_url, tmp_path / "out", n=8, concurrency=4)
        second.wait_for(lambda: f"{before} of 8 rollouts are already finished" in second.log())
        cluster.add_node("b", slots=2)
        cluster.drain("a")
        second.wait()
        assert "cell on b is ready" in second.log() and "node a is draining" in second.log()
        check_results(postgres_server, postgres_url, tmp_path / "out", 8)
        assert not count_cells(cluster)
    sweep_sandboxes()


@pytest.mark.soak
@pytest.mark.full
@pytest.mark.timeout(scaled(1800))
def test_storm_of_lost_and_cut_off_nodes(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str, storm_scale: float
) -> None:
    port = str(postgres_server.port)
    n, cut_s = int(300 * storm_scale), max(3 * LEASE_S, 60 * storm_scale)
    with CutWire(postgres_server.port) as wire, start_ray(slots=4, PGPORT=port) as cluster:
        # Node b reaches PostgreSQL through the wire: libpq takes the port from the environment if the URL has none.
        url = postgres_url.replace(f":{port}", "")
        cluster.add_node("a", slots=4, PGPORT=port)
        cluster.add_node("b", slots=4, PGPORT=str(wire.port))
        driver = Driver(cluster, url, tmp_path / "out", n=n, concurrency=12, PGPORT=port)
        driver.wait_for(lambda: driver.finished() >= n // 6)
        wire.cut()
        started = time.monotonic()
        driver.wait_for(lambda: driver.finished() >= n // 2 or time.monotonic() - started > cut_s)
        lost = cluster.nodes["a"].processes()
        cluster.nodes["a"].kill()
        driver.wait_for(lambda: time.monotonic() - started > cut_s)
        wire.mend()
        driver.wait(scaled(1200))
        states = check_results(postgres_server, postgres_url, tmp_path / "out", n)
        print(f"{n} rollouts: {dict(states)} attempts in {time.monotonic() - driver.started:.0f} s")
        assert not leftovers(lost) and not count_cells(cluster)
    sweep_sandboxes()
