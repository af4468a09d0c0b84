"""What a service remembers when it is started again: all that had ended, and what was lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit import say
from tests.service.kit import KEY, config, open_sessions, served
from tests.speed import scaled
from turngate.errors import DataFolderInUse, StoreError
from turngate.service.result import RolloutEvent, RolloutState
from turngate.service.rollouts import Rollouts
from turngate.service.storage import ServiceStorage
from turngate.types import Json

pytestmark = pytest.mark.process

# A service in a process of its own, which is killed. Its agent has had one turn.
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.service.kit import served

async def main(data, root):
    async with served(data=Path(data), root=Path(root), running=1) as service:
        rollout = service.rollouts.start(service.asked('ask("Hi")\\ntime.sleep(600)', upload_files={"a": "b"}))
        waiting = service.rollouts.start(service.asked())
        while service.rollouts.state(rollout).turns < 1:
            assert not service.rollouts.state(rollout).done, await service.rollouts.finalize(rollout)
            await asyncio.sleep(0.02)
        page = await service.rollouts.events(rollout)
        while page.events[-1].kind != "turn": page = await service.rollouts.events(rollout)
        print(rollout, waiting, page.cursor, flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_results_events_and_messages_stay(tmp_path: Path) -> None:
    async with served([say("Hello.")], data=tmp_path) as service:
        result = await service.rollouts.run(service.asked('print(ask("Hi"))', test_script="true"))
        rollout = result.rollout_id
        events, messages = await service.all_events(rollout), await service.rollouts.messages(rollout)
        state = service.rollouts.state(rollout)
        with pytest.raises(DataFolderInUse):
            async with Rollouts(config(tmp_path)):
                pass
    async with served(data=tmp_path) as service:
        assert await service.rollouts.finalize(rollout) == result
        assert await service.all_events(rollout) == events
        assert await service.rollouts.messages(rollout) == messages
        assert service.rollouts.state(rollout) == state and service.rollouts.list().rollouts == [state]
        async with service.rollouts.gateway(rollout) as gateway:  # started again for this
            assert len(await gateway.samples(rollout)) == 1


def begun(rollout: str) -> RolloutState:
    about = {"task_id": "t", "agent": "shell", "model_key": KEY, "model": "m", "mode": "exact"}
    return RolloutState(rollout_id=rollout, status="running", stage="result", started=100.0, **about)


GRADED = ("outcome", {"kind": "graded", "reward": 0.5, "resolved": None})
DONE = ("stage", {"stage": "done", "status": "timed out", "class": "graded", "reward": 0.5})
KILLED: list[tuple[list[tuple[str, dict[str, Json]]], tuple[str, str | None, float | None]]] = [
    ([], ("error", "infrastructure fault", None)),
    ([GRADED], ("error", "graded", 0.5)),
    ([GRADED, DONE], ("timed out", "graded", 0.5)),
    ([("stage", {"stage": "done", "status": "cancelled", "class": None, "reward": None})], ("cancelled", None, None)),
    ([("outcome", {"kind": "?", "reward": "much"})], ("error", "infrastructure fault", None)),
]


async def test_a_grade_that_was_recorded_outlives_the_process(tmp_path: Path) -> None:
    storage = ServiceStorage(tmp_path / "service")
    for n, (told, _) in enumerate(KILLED):
        storage.save_state(begun(f"r{n}"), "place")
        happened = [("queued", {}), ("opened", {}), *told]
        for cursor, (kind, data) in enumerate(happened, 1):
            storage.add_event(f"r{n}", RolloutEvent(cursor=cursor, time=100.0 + cursor, kind=kind, data=data))
    storage.close()
    async with served(data=tmp_path) as service:
        for n, (told, known) in enumerate(KILLED):
            result, state = await service.rollouts.finalize(f"r{n}"), service.rollouts.state(f"r{n}")
            assert (result.status, result.kind, result.reward) == known == (state.status, state.kind, state.reward)
            assert (result.error is not None) == (result.status == "error") and result.done
            assert result.error is not None or "stopped before it wrote the result" in result.notes[0]
            assert result.wall_s == 2.0 + len(told)
            assert (await service.all_events(f"r{n}"))[-1].data["reward"] == known[2]


def test_what_is_forgotten_is_forgotten_whole(tmp_path: Path) -> None:
    storage = ServiceStorage(tmp_path / "service")
    for rollout in ("a", "b"):
        storage.save_state(begun(rollout), "place")
        storage.add_event(rollout, RolloutEvent(cursor=1, time=1.0, kind="queued"))
    with sqlite3.connect(tmp_path / "service" / "service.db") as db:
        db.execute("CREATE TRIGGER t BEFORE DELETE ON rollouts WHEN OLD.id = 'b' BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(StoreError):
        storage.delete_rows(["a", "b"])
    assert len(list(storage.read_states())) == 2 and len(storage.read_events("a", 0, 9)) == 1
    storage.delete_rows(["a"])
    assert [state.rollout_id for state, _ in storage.read_states()] == ["b"] and storage.read_events("a", 0, 9) == []
    storage.close()


async def test_what_ran_when_it_was_killed_is_told_as_lost(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(prefix="tg-"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(tmp_path), str(root)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    )
    try:
        assert process.stdout is not None
        said = (await asyncio.wait_for(process.stdout.readline(), scaled(60))).decode().split()
        rollout, waiting, cursor = said[0], said[1], int(said[2])
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert open_sessions(tmp_path) == [rollout]
    async with served(data=tmp_path, root=root) as service:
        assert service.left() == []  # swept, and what its caller gave is gone
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
        # The next rollout starts the gateway again, and the session that nobody runs is ended there.
        assert (await service.rollouts.run(service.asked())).status == "finished"
        assert open_sessions(tmp_path) == []
    shutil.rmtree(root, ignore_errors=True)
