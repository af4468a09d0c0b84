"""A batch of a real agent on a real Ray cluster, with PostgreSQL: nodes and drivers are killed, and nothing is lost or counted twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.batch_kit import (
    AGENT,
    LEASE_S,
    PROGRAM,
    Driver,
    GroupTrainer,
    check_leftovers,
    check_results,
    copy_tasks,
    list_abandoned_sandboxes,
    sweep_sandboxes,
    wait_for_end,
    wait_for_no_cells,
)
from tests.cluster.cut_wire import CutWire
from tests.cluster.ray_kit import start_ray
from tests.postgres import PostgresServer
from tests.speed import paced, scaled

pytestmark = [pytest.mark.needs("ray", "postgres", f"agent:{AGENT}")]


@pytest.mark.real
def test_rollouts_of_a_killed_node_run_again_elsewhere(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    with start_ray("a", "b", slots=2) as cluster:
        driver = Driver(cluster, postgres_url, tmp_path / "out", n=6, concurrency=6)
        driver.wait_for(lambda: driver.log().count("is ready") >= 3)
        driver.wait_for(
            lambda: any(line == AGENT or PROGRAM in line for line in cluster.nodes["b"].processes().values())
        )
        lost = cluster.nodes["b"].processes()
        cluster.nodes["b"].kill()
        driver.wait()
        states = check_results(postgres_server, postgres_url, tmp_path / "out", 6)
        assert states["settled"] == 6 and set(states) <= {"settled", "superseded"}
        wait_for_end(lost)
        wait_for_no_cells(cluster)  # the driver has closed those of the other nodes
    sweep_sandboxes()


@pytest.mark.full
def test_killed_driver_resumes_while_nodes_join_and_drain(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    out, tasks = tmp_path / "out", copy_tasks(tmp_path / "tasks", 2)
    with start_ray("a", slots=2) as cluster, GroupTrainer(postgres_url, n=3) as trainer:
        first = Driver(cluster, postgres_url, out, n=3, concurrency=2, tasks=tasks)
        first.wait_for(lambda: first.finished() >= 2)
        first.process.kill()
        first.process.wait()
        before = first.finished()
        check_leftovers(cluster)  # cells without a driver end their agents and themselves
        assert not list_abandoned_sandboxes()
        # A node needs a while to join: the rollouts take longer.
        second = Driver(cluster, postgres_url, out, n=3, concurrency=2, tasks=tasks, pause_s=round(paced(10)))
        # Cells may have graded rollouts that the first driver could not write to its ledger.
        second.wait_for(lambda: second.resumed() is not None)
        assert second.resumed() >= before
        cluster.add_node("b", slots=2)
        cluster.drain("a")
        second.wait()
        assert "cell on b is ready" in second.log() and "node a is draining" in second.log()
        check_results(postgres_server, postgres_url, out, 6)
        trainer.check(out, 2)
        check_leftovers(cluster)
    sweep_sandboxes()


# Other tests kill a node, and cut a cell off from the store (tests/cells/test_cell.py).
@pytest.mark.soak
@pytest.mark.repeat
@pytest.mark.timeout(scaled(3600))
def test_storm_of_lost_and_cut_off_nodes(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str, storm_scale: float
) -> None:
    port, out, n = str(postgres_server.port), tmp_path / "out", 10
    groups, cut_s = round(30 * storm_scale), max(3 * LEASE_S, 60 * storm_scale)
    total, tasks = groups * n, copy_tasks(tmp_path / "tasks", groups)
    with (
        CutWire(postgres_server.port) as wire,
        start_ray(slots=4, PGPORT=port) as cluster,
        GroupTrainer(postgres_url, n=n) as trainer,
    ):
        # Node b reaches PostgreSQL through the wire: libpq takes the port from the environment if the URL has none.
        url = postgres_url.replace(f":{port}", "")
        cluster.add_node("a", slots=4, PGPORT=port)
        cluster.add_node("b", slots=4, PGPORT=str(wire.port))
        driver = Driver(cluster, url, out, n=n, concurrency=12, tasks=tasks, PGPORT=port)
        driver.wait_for(lambda: driver.finished() >= total // 2, scaled(1800))
        wire.cut()
        cut = time.monotonic()
        lost = cluster.nodes["a"].processes()
        cluster.nodes["a"].kill()
        driver.wait_for(lambda: time.monotonic() - cut > cut_s)
        wire.mend()
        driver.wait(scaled(2400))
        took_s = time.monotonic() - driver.started
        states = check_results(postgres_server, postgres_url, out, total)
        trainer.check(out, groups)
        wait_for_end(lost)
        check_leftovers(cluster)
        print(f"{total} rollouts in {groups} groups: {dict(states)} attempts in {took_s:.0f} s")
    sweep_sandboxes()
