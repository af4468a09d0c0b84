"""Fifty concurrent rollouts, polled throughout, a third of them aborted: nothing leaks and no event is lost."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.kit import say
from tests.service.kit import Service, run_service
from tests.speed import scaled
from turngate.service.result import RolloutEvent, RolloutResult

pytestmark = [pytest.mark.process, pytest.mark.full]

COUNT = 50
PROGRAM = 'print(ask("Hi"))\nprint(ask("Hi", "Hello.", "Go on"))\nopen("out.txt", "w").write("done")'


async def test_fifty_concurrent_rollouts() -> None:
    files = len(os.listdir("/proc/self/fd"))
    async with run_service([say("Hello."), say("Bye.")], running=8) as service:
        began = time.monotonic()
        ids = [
            service.rollouts.start(
                service.request(
                    PROGRAM, task_id=f"t{n}", upload_files={"in.txt": "x"}, test_script="grep -q done out.txt"
                )
            )
            for n in range(COUNT)
        ]
        assert len(set(ids)) == COUNT and ids == sorted(ids)
        polled = asyncio.create_task(poll(service, ids))
        followed = [asyncio.create_task(service.all_events(rollout, 1 + n % 7)) for n, rollout in enumerate(ids)]
        ended = [asyncio.create_task(finish(service, rollout, n)) for n, rollout in enumerate(ids)]
        results = await asyncio.gather(*ended)
        events = await asyncio.gather(*followed)
        duration = time.monotonic() - began
        assert await polled > 0
        again = await asyncio.gather(*(service.rollouts.finalize(rollout) for rollout in ids))
        assert list(again) == list(results)
        for n, (result, seen) in enumerate(zip(results, events, strict=True)):
            check(n, result, seen)
            assert result.wall_s <= duration
        recorded = read_gateway_events(service.data)
        for rollout, seen in zip(ids, events, strict=True):
            assert [event.seq for event in seen if event.seq is not None] == recorded.get(rollout, [])
        aborted = [result for result in results if result.status == "cancelled"]
        assert COUNT // 6 <= len(aborted) <= COUNT // 3 + 1  # some finish before they are aborted
        assert service.leftovers() == [] and service.engine.in_flight == 0
        listing = service.rollouts.list(limit=COUNT)
        assert (listing.running, listing.queued, len(listing.rollouts)) == (0, 0, COUNT)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= files


async def poll(service: Service, ids: list[str]) -> int:
    """Poll all rollouts until they are done. Counters never decrease."""
    rounds = 0
    before = dict.fromkeys(ids, (0, 0.0, 0))
    while not all(service.rollouts.state(rollout).done for rollout in ids):
        for rollout in ids:
            state = service.rollouts.state(rollout)
            now = (state.turns, state.wall_s, state.cursor)
            assert all(new >= old for new, old in zip(now, before[rollout], strict=True)) or state.done
            before[rollout] = now
        encode_result = await service.rollouts.messages(ids[rounds % len(ids)])
        assert [one.cursor for one in encode_result.messages] == list(range(1, len(encode_result.messages) + 1))
        rounds += 1
        await asyncio.sleep(0.05)
    return rounds


async def finish(service: Service, rollout: str, n: int) -> RolloutResult:
    """Wait for the result; abort every third rollout, at varying stages."""
    if n % 3 == 0:
        stage = ("queued", "sandbox", "relay", "agent", "collect", "grade")[n // 3 % 6]
        while service.rollouts.state(rollout).stage not in (stage, "result", "done"):
            await asyncio.sleep(0.005)
        await service.rollouts.abort(rollout, "by the test")
    return await service.rollouts.finalize(rollout)


def check(n: int, result: RolloutResult, events: list[RolloutEvent]) -> None:
    assert result.done and result.task_id == f"t{n}"
    assert [event.cursor for event in events] == list(range(1, len(events) + 1))
    assert events[0].kind == "queued" and [event.kind for event in events].count("ended") == 1
    assert events[-1].kind == "ended" and events[-1].data["status"] == result.status
    assert abs(result.wall_s - (events[-1].time - events[0].time)) < scaled(1)  # measured by another clock
    assert "queued" in result.seconds and sum(result.seconds.values()) < result.wall_s + scaled(0.5)
    if n % 3 or result.status == "finished":
        assert (result.status, result.reward, result.turn_count) == ("finished", 1.0, 2), encode_result(result)
        assert [turn.text for turn in result.turns] == ["Hello.", "Bye."]
        assert len([event for event in events if event.kind == "turn"]) == 2
    else:
        assert (result.status, result.reward, result.error) == ("cancelled", None, None), encode_result(result)
        assert len([event for event in events if event.kind == "turn"]) == result.turn_count


def read_gateway_events(data: Path) -> dict[str, list[int]]:
    """Event numbers in the gateway's store, by session."""
    [store] = data.glob("gateways/*/turngate.db")
    with closing(sqlite3.connect(store)) as db:
        found: dict[str, list[int]] = {}
        for seq, session in db.execute("SELECT seq, session FROM events ORDER BY seq"):
            found.setdefault(session, []).append(seq)
    return found


def encode_result(result: RolloutResult) -> str:
    """The full result, for assertion messages."""
    return msgspec.json.encode(result).decode()
