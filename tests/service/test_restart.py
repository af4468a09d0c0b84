"""What a restarted service knows: finished rollouts, and those that were lost."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit import say
from tests.service.kit import KEY, config, open_sessions, run_service
from tests.speed import scaled
from turngate.errors import ConfigError, DataFolderInUse, StoreError
from turngate.service import final_state
from turngate.service.result import RolloutEvent, RolloutState
from turngate.service.rollouts import Rollouts
from turngate.service.storage import ServiceStorage
from turngate.store.lock import lock_folder
from turngate.types import Json

pytestmark = pytest.mark.process

# A service in its own process, killed after the agent's first turn.
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.service.kit import run_service

async def main(data, root):
    async with run_service(data=Path(data), root=Path(root), running=1) as service:
        rollout = service.rollouts.start(service.request('ask("Hi")\\ntime.sleep(600)', upload_files={"a": "b"}))
        waiting = service.rollouts.start(service.request())
        while service.rollouts.state(rollout).turns < 1:
            assert not service.rollouts.state(rollout).done, await service.rollouts.finalize(rollout)
            await asyncio.sleep(0.02)
        page = await service.rollouts.events(rollout)
        while page.events[-1].kind != "turn": page = await service.rollouts.events(rollout)
        print(rollout, waiting, page.cursor, flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_results_events_and_messages_survive_restart(tmp_path: Path) -> None:
    async with run_service([say("Hello.")], data=tmp_path) as service:
        result = await service.rollouts.run(service.request('print(ask("Hi"))', test_script="true"))
        rollout = result.rollout_id
        events, messages = await service.all_events(rollout), await service.rollouts.messages(rollout)
        state = service.rollouts.state(rollout)
        with pytest.raises(DataFolderInUse):
            async with Rollouts(config(tmp_path)):
                pass
    async with run_service(data=tmp_path) as service:
        assert await service.rollouts.finalize(rollout) == result
        assert await service.all_events(rollout) == events
        assert await service.rollouts.messages(rollout) == messages
        assert service.rollouts.state(rollout) == state and service.rollouts.list().rollouts == [state]
        async with service.rollouts.gateway(rollout) as gateway:  # restarts it
            assert len(await gateway.samples(rollout)) == 1


def running_state(rollout: str) -> RolloutState:
    fields = {"task_id": "t", "agent": "shell", "model_key": KEY, "model": "m", "mode": "exact"}
    return RolloutState(rollout_id=rollout, status="running", stage="result", started=100.0, **fields)


GRADED = ("outcome", {"kind": "graded", "reward": 0.5, "resolved": None})
DONE = ("stage", {"stage": "done", "status": "timed out", "class": "graded", "reward": 0.5})
KILLED: list[tuple[list[tuple[str, dict[str, Json]]], tuple[str, str | None, float | None]]] = [
    ([], ("error", "infrastructure fault", None)),
    ([GRADED], ("error", "graded", 0.5)),
    ([GRADED, DONE], ("timed out", "graded", 0.5)),
    ([("stage", {"stage": "done", "status": "cancelled", "class": None, "reward": None})], ("cancelled", None, None)),
    ([("outcome", {"kind": "?", "reward": "much"})], ("error", "infrastructure fault", None)),
]


async def test_recorded_grade_survives_kill(tmp_path: Path) -> None:
    storage = ServiceStorage(tmp_path / "service")
    for n, (events, _) in enumerate(KILLED):
        storage.save_state(running_state(f"r{n}"), "place")
        all_events = [("queued", {}), ("opened", {}), *events]
        for cursor, (kind, data) in enumerate(all_events, 1):
            storage.add_event(f"r{n}", RolloutEvent(cursor=cursor, time=100.0 + cursor, kind=kind, data=data))
    storage.close()
    async with run_service(data=tmp_path) as service:
        for n, (events, expected) in enumerate(KILLED):
            result, state = await service.rollouts.finalize(f"r{n}"), service.rollouts.state(f"r{n}")
            assert (result.status, result.kind, result.reward) == expected == (state.status, state.kind, state.reward)
            assert (result.error is not None) == (result.status == "error") and result.done
            said = result.notes[0] if result.error is None else result.error.message
            assert ("stopped before it wrote the result" if result.error is None else "lost: ") in said
            assert said.endswith("the rollout's gateway has the turns recorded before the stop")
            assert result.wall_s == 2.0 + len(events)
            assert (await service.all_events(f"r{n}"))[-1].data["reward"] == expected[2]


async def test_unreadable_files_and_rows_do_not_prevent_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = ServiceStorage(tmp_path / "service")
    for rollout in ("bad-result", "bad-event", "bad-state", "good"):
        storage.save_state(running_state(rollout), "place")
        storage.add_event(rollout, RolloutEvent(cursor=1, time=101.0, kind="queued"))
    storage.close()
    result = tmp_path / "service" / "results" / "bad-result.json"
    result.write_bytes(b'{"rollout_id": "\xff')
    with sqlite3.connect(tmp_path / "service" / "service.db") as db:
        db.execute("UPDATE rollouts SET state = ? WHERE id = 'bad-state'", (b'{"rollout_id": "\xff"}',))
        db.execute("UPDATE events SET event = '{' WHERE rollout = 'bad-event'")
    async with run_service(data=tmp_path) as service:
        states = {state.rollout_id: state for state in service.rollouts.list().rollouts}
        assert set(states) == {"bad-result", "bad-event", "good"}
        assert all(
            state.done and state.error is not None and "lost" in state.error.message for state in states.values()
        )
        assert "the state of rollout bad-state is damaged" in caplog.text
        assert (await service.rollouts.finalize("good")).status == "error"
        with pytest.raises(StoreError, match=r"bad-result\.json cannot be read"):
            await service.rollouts.finalize("bad-result")
        with pytest.raises(StoreError, match="database failed"):
            await service.rollouts.events("bad-event")
    result.unlink()
    async with run_service(data=tmp_path) as service:
        assert (await service.rollouts.finalize("bad-result")).status == "error"


async def test_full_disk_does_not_prevent_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ServiceStorage(tmp_path / "service")
    storage.save_state(running_state("r"), "place")
    storage.close()

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        async with run_service(data=tmp_path) as service:
            assert (await service.rollouts.finalize("r")).kind == "infrastructure fault"
    assert not list((tmp_path / "service" / "results").iterdir())
    async with run_service(data=tmp_path) as service:
        assert (await service.rollouts.finalize("r")).kind == "infrastructure fault"
        assert [event.kind for event in await service.all_events("r")] == ["ended"]
    assert (tmp_path / "service" / "results" / "r.json").is_file()


def test_deletion_is_atomic(tmp_path: Path) -> None:
    storage = ServiceStorage(tmp_path / "service")
    for rollout in ("a", "b"):
        storage.save_state(running_state(rollout), "place")
        storage.add_event(rollout, RolloutEvent(cursor=1, time=1.0, kind="queued"))
    with sqlite3.connect(tmp_path / "service" / "service.db") as db:
        db.execute("CREATE TRIGGER t BEFORE DELETE ON rollouts WHEN OLD.id = 'b' BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(StoreError):
        storage.delete_rows(["a", "b"])
    assert len(list(storage.read_states())) == 2 and len(storage.read_events("a", 0, 9)) == 1
    storage.delete_rows(["a"])
    assert [rollout for rollout, _, _ in storage.read_states()] == ["b"] and storage.read_events("a", 0, 9) == []
    storage.close()


def test_folder_with_another_schema_version_is_not_left_open(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "service.db")) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="has schema version 7") as raised:  # it refers to the storage
        ServiceStorage(tmp_path)
    lock_folder(tmp_path).close()
    assert not list(tmp_path.glob("service.db-*")), f"the database is still open after {raised.value!r}"


def test_lost_rollout_without_session_has_no_turns_at_gateway() -> None:
    state = final_state.from_events(running_state("r"), [RolloutEvent(cursor=1, time=100.0, kind="queued")])
    assert (
        state.error is not None
        and state.error.message == "lost: the service stopped before it wrote this rollout's result"
    )
    done = RolloutEvent(cursor=1, time=100.0, kind="stage", data=DONE[1])
    (note,) = final_state.list_notes(final_state.from_events(running_state("r"), [done]))
    assert note.endswith("were restored from the rollout's events")


async def test_rollouts_of_killed_service_are_reported_lost(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(prefix="tg-"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(tmp_path), str(root)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    )
    try:
        assert process.stdout is not None
        printed = (await asyncio.wait_for(process.stdout.readline(), scaled(60))).decode().split()
        rollout, waiting, cursor = printed[0], printed[1], int(printed[2])
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert open_sessions(tmp_path) == [rollout]
    async with run_service(data=tmp_path, root=root) as service:
        assert service.leftovers() == []  # swept, including inputs
        for lost in (rollout, waiting):
            result = await service.rollouts.finalize(lost)
            assert (result.done, result.status, result.kind, result.reward) == (
                True,
                "error",
                "infrastructure fault",
                None,
            )
            assert result.error is not None and "lost" in result.error.message
        assert (await service.rollouts.finalize(rollout)).turn_count == 1
        events = await service.all_events(rollout)
        assert [event.cursor for event in events] == list(range(1, cursor + 2)) and events[-1].kind == "ended"
        assert service.rollouts.list("error").rollouts[0].rollout_id == waiting
        # The next rollout restarts the gateway, which ends the orphaned session.
        assert (await service.rollouts.run(service.request())).status == "finished"
        assert open_sessions(tmp_path) == []
    shutil.rmtree(root, ignore_errors=True)
