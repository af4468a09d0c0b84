"""Cells as processes against a real PostgreSQL: zombies, outages, cut cables, several workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.cells.kit import (
    delivered,
    give_up,
    open_shared_store,
    start_cell,
    start_shared_gateway,
    wait_for,
)
from tests.postgres import CutOffProxy, start_postgres
from tests.speed import scaled
from tests.workers.test_processes import ENV, ROOT
from turngate.store.shared.fence import FenceStage
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.process, pytest.mark.full]
CONNECTIONS = 5  # of a cell: see docs/scale.md


def count_connections(shared: SharedStore) -> int:
    with shared.database.reading() as db:
        clients = "datname=current_database() AND backend_type='client backend'"  # autovacuum also connects
        query = f"SELECT count(*) FROM pg_stat_activity WHERE {clients}"
        return int(db.execute(query).fetchone()[0])


def cell_id(shared: SharedStore, name: str) -> str:
    """Return the id of a cell with a lease, or an empty string while it has none."""
    return next((cell.id for cell in shared.cells.list_cells() if cell.name == name), "")


@pytest.mark.real
@pytest.mark.promise(3)
def test_nothing_of_a_zombie_cell_is_trained(tmp_path: Path, postgres_url: str) -> None:
    with open_shared_store(postgres_url) as shared, start_cell(tmp_path / "a", postgres_url) as zombie:
        shared.feeds.open("f", b"{}", 1, "", from_start=False)
        done = zombie.finish("r0")
        wait_for(lambda: delivered(shared) == [done])
        # The test itself has two. The server ends replaced connections a little later.
        wait_for(lambda: count_connections(shared) <= 2 + CONNECTIONS)
        sealed = zombie.open(rollout="r1", attempt=1)
        zombie.say(sealed["api_key"])
        zombie.ask("POST", f"/admin/sessions/{sealed['id']}/seal", json={})
        running = zombie.open(rollout="r2", attempt=1)
        old = cell_id(shared, "a")
        assert not give_up(shared, "r2")
        os.kill(zombie.process.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: give_up(shared, "r2"))  # takes over the whole cell
            with start_cell(tmp_path / "b", postgres_url) as other:
                retries = [other.finish("r1", 2), other.finish("r2", 2)]
                wait_for(lambda: len(delivered(shared)) == 3)
        finally:
            os.kill(zombie.process.pid, signal.SIGCONT)
        wait_for(lambda: cell_id(shared, "a") not in ("", old))
        wait_for(lambda: zombie.metric("turngate_cell_lease_seconds") > 0)
        shown = zombie.ask("GET", f"/admin/sessions/{running['id']}")
        assert (shown["status"], shown["stop"]) == ("cancelled", "lease lost")
        late = zombie.record(sealed["id"])  # the zombie's runner does not know what happened
        assert late.is_success or late.status_code in (409, 503), late.text
        next_one = zombie.finish("r3")
        wait_for(lambda: next_one in delivered(shared))
        wait_for(lambda: zombie.metric("turngate_cell_unshipped_sessions") <= 2)
        assert sorted(delivered(shared)) == sorted([done, *retries, next_one])
        if late.is_success:
            wait_for(lambda: shared.find(sealed["id"]) is not None)
            assert shared.attempts.filter_superseded([sealed["id"]]) == [sealed["id"]]


@pytest.mark.real
@pytest.mark.promise(5)
def test_postgres_killed_and_restarted_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with start_postgres() as server, start_cell(tmp_path / "a", server.create_database(), lease_s=60) as cell:
        url = server.url("test_1")
        with open_shared_store(url) as shared:
            shared.feeds.open("f", b"{}", 2, "", from_start=False)
        sessions = [cell.finish(f"r{n}") for n in range(3)]
        server.kill()
        sessions += [cell.finish(f"r{n}") for n in range(3, 6)]  # turns and outcomes do not wait for PostgreSQL
        server.start()
        sessions += [cell.finish(f"r{n}") for n in range(6, 8)]
        wait_for(lambda: cell.metric("turngate_cell_unshipped_sessions") == 0)
        with open_shared_store(url) as shared:
            assert sorted(delivered(shared)) == sorted(sessions)
        verified = _verify(cell.data)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_cell_cut_off_for_longer_than_its_lease_holds_calls_and_refuses_the_rest(
    tmp_path: Path, postgres_url: str, cut_off_proxy: CutOffProxy
) -> None:
    with open_shared_store(postgres_url) as shared, start_cell(tmp_path / "a", cut_off_proxy.url) as cell:
        shared.feeds.open("f", b"{}", 1, "", from_start=False)
        opened = cell.open(rollout="r1", attempt=1)
        sealed = cell.open(rollout="r2", attempt=1)
        cell.say(opened["api_key"])
        cell.ask("POST", f"/admin/sessions/{sealed['id']}/seal", json={})
        cut_off_proxy.cut()
        cell.say(opened["api_key"])  # the lease lasts
        wait_for(lambda: cell.metric("turngate_cell_lease_seconds") == 0)
        for refused in (cell.request("POST", "/admin/sessions", json={}), cell.record(sealed["id"])):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "lease_lapsed"
        replies: list[str] = []
        held = threading.Thread(target=lambda: replies.append(cell.say(opened["api_key"])))
        held.start()
        held.join(1.0)
        assert held.is_alive() and not replies
        cut_off_proxy.mend()
        held.join(20)
        assert replies  # it was held, not refused
        assert cell.record(sealed["id"]).is_success
        wait_for(lambda: delivered(shared) == [sealed["id"]])  # it was cut off, not taken over


def test_a_cell_stops_while_the_shared_store_does_not_answer(
    tmp_path: Path, postgres_url: str, cut_off_proxy: CutOffProxy
) -> None:
    with start_cell(tmp_path / "a", cut_off_proxy.url, lease_s=60) as cell, open_shared_store(postgres_url) as shared:
        first = cell.finish("first")
        wait_for(lambda: shared.find(first) is not None)  # so that all its connections are open
        cut_off_proxy.cut()
        session = cell.finish("r")
        cell.process.terminate()
        assert cell.process.wait(scaled(25)) == 0, cell.log.read_text()
    with start_cell(tmp_path / "a", postgres_url), open_shared_store(postgres_url) as shared:
        wait_for(lambda: shared.find(session) is not None)


def test_a_gateway_on_a_shared_store_that_does_not_answer_says_so_recovers_and_stops(
    tmp_path: Path, postgres_url: str, cut_off_proxy: CutOffProxy
) -> None:
    with start_shared_gateway(tmp_path, cut_off_proxy.url) as gateway:
        assert gateway.request("GET", "/admin/sessions").is_success
        cut_off_proxy.cut()
        refused = gateway.request("GET", "/admin/sessions")
        assert refused.status_code == 503 and "answer" in refused.text
        assert gateway.request("GET", "/health").is_success
        refused = gateway.request("PUT", "/admin/feeds/f", json={"n": 1})
        assert refused.status_code == 503 and "does not answer" in refused.text
        cut_off_proxy.mend()
        wait_for(lambda: gateway.request("GET", "/admin/sessions").is_success)
        cut_off_proxy.cut()
        gateway.process.terminate()
        assert gateway.process.wait(scaled(25)) == 0, gateway.log.read_text()
        assert "Traceback" not in gateway.log.read_text()


def test_a_cell_refuses_an_attempt_that_is_superseded_in_the_shared_store(
    tmp_path: Path, postgres_url: str, cut_off_proxy: CutOffProxy
) -> None:
    with (
        open_shared_store(postgres_url) as shared,
        start_cell(tmp_path / "a", postgres_url) as first,
        start_cell(tmp_path / "b", cut_off_proxy.url, "--rest-s", "1", lease_s=30) as second,
    ):
        assert give_up(shared, "r") and give_up(shared, "late")  # before any cell has opened them
        refused = first.request("POST", "/admin/sessions", json={"rollout": "r", "attempt": 1})
        assert refused.status_code == 409 and "superseded in the shared store" in refused.text
        assert second.open(rollout="r", attempt=2)["status"] == "open"
        done = first.finish("q")
        wait_for(lambda: shared.find(done) is not None)
        refused = second.request("POST", "/admin/sessions", json={"rollout": "q", "attempt": 2})
        assert refused.status_code == 409  # the rollout has an outcome
        assert first.finish("q2") and second.finish("q3")
        cut_off_proxy.cut()
        opened = second.open(rollout="late", attempt=1)  # the lease lasts, so it is served
        assert second.say(opened["api_key"])
        cut_off_proxy.mend()
        session = f"/admin/sessions/{opened['id']}"
        wait_for(lambda: second.ask("GET", session)["status"] == "cancelled")
        assert second.ask("GET", session)["stop"] == "superseded"


def test_workers_of_a_cell_share_its_lease_and_its_outbox(tmp_path: Path, postgres_url: str) -> None:
    with (
        open_shared_store(postgres_url) as shared,
        start_cell(tmp_path / "a", postgres_url, "--workers", "2") as cell,
    ):
        shared.feeds.open("f", b"{}", 1, "", from_start=False)
        sessions = [cell.finish(f"r{n}") for n in range(4)]
        wait_for(lambda: sorted(delivered(shared)) == sorted(sessions))
        old = cell_id(shared, "a")
        os.kill(cell.workers[0], signal.SIGKILL)  # the worker with the lease
        wait_for(lambda: len(cell.workers) == 2)
        wait_for(lambda: cell.metric("turngate_cell_lease_seconds") > 0)  # the lease may have lapsed meanwhile
        running = [cell.open(rollout=f"q{number}", attempt=1) for number in range(4)]
        assert cell_id(shared, "a") == old
        workers = cell.workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: give_up(shared, "q0"))
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
        wait_for(lambda: {cell.ask("GET", f"/admin/sessions/{s['id']}")["status"] for s in running} == {"cancelled"})
        wait_for(lambda: cell_id(shared, "a") not in ("", old))
        wait_for(lambda: cell.metric("turngate_cell_lease_seconds") > 0)
        more = cell.finish("r9")
        wait_for(lambda: more in delivered(shared))


def test_a_killed_cell_ships_after_its_restart_and_continues_its_sessions(tmp_path: Path, postgres_url: str) -> None:
    with open_shared_store(postgres_url) as shared:
        shared.feeds.open("f", b"{}", 1, "", from_start=False)
        with start_cell(tmp_path / "a", postgres_url) as cell:
            opened = cell.open(rollout="r1", attempt=1)
            cell.say(opened["api_key"])
            cell.process.kill()
            cell.process.wait()
        with start_cell(tmp_path / "a", postgres_url) as cell:
            assert cell.say(opened["api_key"])
            cell.ask("POST", f"/admin/sessions/{opened['id']}/seal", json={})
            assert cell.record(opened["id"]).is_success
            wait_for(lambda: delivered(shared) == [opened["id"]])
        assert [row.state for row in shared.cells.list_cells("ended")] == ["ended"]


def test_a_cell_that_stops_has_shipped_everything(tmp_path: Path, postgres_url: str) -> None:
    with start_cell(tmp_path / "a", postgres_url) as cell:
        session = cell.finish("r1")
    with open_shared_store(postgres_url) as shared:
        assert shared.find(session) is not None
    store = Store.reading(tmp_path / "a")
    assert store.outbox.state().unshipped == 0
    store.close()


def test_bad_settings_name_the_fix_and_no_password(tmp_path: Path, postgres_url: str) -> None:
    def fail(*arguments: str, **env: str) -> str:
        command = [sys.executable, "-m", "turngate", "cell", "--port", "0", "--data", str(tmp_path / "c"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**ENV, **env}, check=False)
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "TURNGATE_SHARED" in fail()
    secret = fail("--shared", postgres_url.replace("turngate@", "turngate:hunter2@"))
    assert "PGPASSFILE" in secret and "hunter2" not in secret
    assert "shared: the address of the shared store names no database" in fail("--shared", "postgresql://host")
    assert "pass a folder as --data" in fail("--shared", postgres_url, "--data", postgres_url)
    away = fail(TURNGATE_SHARED="postgresql://u:hunter2@127.0.0.1:1/db")
    assert "shared: cannot reach postgresql://u@127.0.0.1:1/db" in away and "hunter2" not in away


def _verify(data: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turngate", "verify", "--data", str(data)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, check=False)


def has_carried_out(shared: SharedStore, epoch: int) -> bool:
    return [row.epoch for row in shared.fence.list_followers()] == [epoch]


def test_cell_follows_the_fence_of_the_shared_store(tmp_path: Path, postgres_url: str) -> None:
    with open_shared_store(postgres_url) as shared, start_cell(tmp_path / "a", postgres_url) as cell:
        opened = cell.open()
        assert cell.say(opened["api_key"])
        changes: list[tuple[FenceStage, int]] = [("hold", 0), ("open", 4)]
        for stage, version in changes:
            epoch = shared.fence.write(stage, version, "", "")
            wait_for(partial(has_carried_out, shared, epoch))
            state = cell.ask("GET", "/admin/fence")
            assert (state["version"], state["paused"]) == (version, stage == "hold")
        assert cell.say(opened["api_key"])
        nodes = cell.ask("GET", f"/admin/sessions/{opened['id']}/trace")["nodes"]
        assert [node["version_start"] for node in nodes if node["kind"] == "sampled"] == [0, 4]
        refused = cell.request("POST", "/admin/fence/resume", json={"version": 5})
        assert refused.status_code == 409 and "load weights, use the gateway on the shared store" in refused.text
    with open_shared_store(postgres_url) as shared:
        assert not shared.fence.list_followers()  # it stopped, so no update waits for it
