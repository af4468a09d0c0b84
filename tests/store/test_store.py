"""Test store failures: calls are refused rather than left unrecorded."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exact.agent import World, asgi
from tests.exact.test_rows import SYSTEM, say, talk, user
from turngate.errors import ConfigError, StoreError
from turngate.store.checksums import node_checksum
from turngate.store.events import new_event
from turngate.store.journal import Journal
from turngate.store.store import NewTurn, Store
from turngate.trace.sample import build_samples
from turngate.trace.session import SessionConfig
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo
from turngate.types import Limits


@pytest.fixture
async def world(tmp_path: Path, renderers: Any):
    async with World.of(tmp_path, renderers("builtin")) as world:
        yield world


async def test_full_disk_refuses_calls_without_data_loss(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a", "b")
    db = world.gateway.store.database._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages}")
    agent.messages.append(user("x" * 100_000))
    refused = await agent.call(say(world, "c"))
    assert (refused.status, refused.error and refused.error["code"]) == (503, "store_error")
    world.queue.clear()
    again = await agent.call(say(world, "c"))
    assert again.status == 503, "the next call is refused before sampling"
    assert len(world.queue) == 1, "the engine was not called"
    world.queue.clear()
    db.execute("PRAGMA max_page_count=1000000")
    await talk(agent, "c")
    (row,) = build_samples(agent.session.trace)
    assert len(row.spans) == 3
    stored = world.gateway.store.load(world.gateway.store.find(agent.session_id))
    assert [n.id for n in stored.trace.nodes] == [n.id for n in agent.session.trace.nodes]


async def test_unrecordable_stream_ends_with_error_event(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("x" * 200_000)]
    db = world.gateway.store.database._db
    db.execute(f"PRAGMA max_page_count={db.execute('PRAGMA page_count').fetchone()[0]}")
    world.queue.append(say(world, "text that flows"))
    body = json.dumps({"model": "m", "messages": agent.messages, "stream": True}).encode()
    _, raw = await asgi(
        world.gateway, "POST", "/v1/chat/completions", body, [(b"authorization", f"Bearer {agent.key}".encode())]
    )
    assert b"[DONE]" not in raw
    assert b'"finish_reason":"stop"' not in raw
    assert json.loads(raw.decode().strip().split("\n\n")[-1][6:])["error"]["code"] == "store_error"


async def test_damaged_trace_refuses_only_its_session(tmp_path: Path, renderers: Any) -> None:
    async with World.of(tmp_path, renderers("builtin")) as world:
        damaged, intact = world.agent(), world.agent()
        for agent in (damaged, intact):
            agent.messages = [SYSTEM, user("work")]
            await talk(agent, "a")
        world.gateway.store.database._db.execute(
            "UPDATE nodes SET ids=zeroblob(length(ids)) WHERE session=? AND kind='sampled'", (damaged.session.key,)
        )
    async with World.of(tmp_path, renderers("builtin")) as world:
        damaged.world = intact.world = world
        reply = await damaged.call(say(world, "b"))
        assert (reply.status, reply.error and reply.error["code"]) == (503, "store_error")
        assert "damaged" in (reply.error or {})["message"]
        world.queue.clear()
        assert (await intact.call(say(world, "b"))).status == 200


async def test_live_session_continues_after_restart(tmp_path: Path, renderers: Any) -> None:
    for n in range(4):
        async with World.of(tmp_path, renderers("builtin")) as world:
            if n == 0:
                agent = world.agent(limits=Limits(turns=100))
                agent.messages = [SYSTEM, user("work")]
            agent.world = world
            await talk(agent, "<think>\nhm\n</think>\n\na", "b")
            assert agent.session.turns == 2 * (n + 1)
            (row,) = build_samples(agent.session.trace)
            assert len(row.spans) == 2 * (n + 1)


def test_invalid_database_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "turngate.db").write_bytes(b"this is not a database, not at all" * 100)
    with pytest.raises(ConfigError, match=r"turngate\.db cannot be used"):
        Store(tmp_path)


def test_unknown_schema_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "turngate.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="schema version 99"):
        Store(tmp_path)


def test_one_gateway_per_data_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="in use by another turngate"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def new_turn(key: int, number: int) -> NewTurn:
    context = Context(
        2 * number + 1,
        None,
        np.arange(3, dtype=np.int32),
        ContextInfo(b"p", b"m" * 16, "u", False),
    )
    info = SampledInfo(b"m", b"", b"", "stop", 0, 0, 0.0, 0.0)
    sampled = Sampled(2 * number + 2, context, np.arange(2, dtype=np.int32), np.zeros(2, np.float32), info)
    return NewTurn(key, context, b"[]", sampled, b"{}")


@pytest.mark.parametrize(
    ("parent", "kind", "problem"),
    [
        (None, "sampled", "has no parent, but a sampled node needs a parent"),
        (None, "remark", "has the unknown kind 'remark'"),
        (9, "sampled", "is not a valid child of node 9"),
    ],
)
def test_misplaced_node_is_explained(parent: int | None, kind: str, problem: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = store.add_session("s", b"secret", SessionConfig(), 0.0)
    store.commit([new_turn(key, 0)])
    with store.database.writing() as db:
        blobs = db.execute("SELECT ids, logprobs, info, messages FROM nodes WHERE id=2").fetchone()
        checksum = node_checksum(key, 2, parent, kind, *blobs)
        db.execute("UPDATE nodes SET parent=?, kind=?, checksum=? WHERE id=2", (parent, kind, checksum))
    row = store.find("s")
    assert row is not None
    with pytest.raises(StoreError) as error:
        store.load(row)
    assert error.value.message == f"session s: node 2 {problem}; the trace cannot be used"
    store.close()


async def test_concurrent_turns_share_synced_transactions(tmp_path: Path) -> None:
    store = Store(tmp_path, "disk")
    commits = 0
    original = store.commit

    def count_commit(turns: Any) -> None:
        nonlocal commits
        commits += 1
        original(turns)

    store.commit = count_commit  # type: ignore[method-assign]
    journal = Journal(store)
    key = store.add_session("s", b"secret", SessionConfig(), 0.0)
    await asyncio.gather(*(journal.commit(new_turn(key, n)) for n in range(50)))
    assert commits < 10
    assert len(store.messages(key)) == 100
    store.close()


async def test_cancelled_commit_waits_until_turn_is_durable(tmp_path: Path) -> None:
    store = Store(tmp_path, "disk")
    key = store.add_session("s", b"secret", SessionConfig(), 0.0)
    task = asyncio.create_task(Journal(store).commit(new_turn(key, 0)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(store.messages(key)) == 2
    store.close()


def test_batch_commit_is_atomic(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = store.add_session("s", b"secret", SessionConfig(), 0.0)
    with pytest.raises(StoreError):
        store.commit([new_turn(key, 0), new_turn(key, 0)])
    assert store.messages(key) == {}
    store.close()


def test_a_thread_sees_what_was_written_while_another_reads(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_session("s1", b"1", SessionConfig(), 1.0, "v", new_event("s1", "opened", {}))
    store.add_session("s2", b"2", SessionConfig(), 1.0, "v", new_event("s2", "opened", {}))
    is_reading, may_end = threading.Event(), threading.Event()

    def read_slowly() -> None:
        with store.database.reading() as db:
            rows = iter(db.execute("SELECT id FROM sessions"))
            next(rows)
            is_reading.set()
            may_end.wait(10)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    is_reading.wait(10)
    store.add_session("s3", b"3", SessionConfig(), 1.0, "v", new_event("s3", "opened", {}))
    found = store.find("s3")
    may_end.set()
    reader.join()
    store.close()
    assert found is not None
