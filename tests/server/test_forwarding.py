"""Test several workers in this process, each with its own address, so that a test can choose which one it calls.

They share a data folder and talk over private sockets, as real workers do. Tests that need real processes are in `tests/workers`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request

from tests import kit
from tests.kit import Gated, OpenSession, Running, say, until, user
from tests.sdk_agents import DIALECTS, agent
from tests.speed import scaled
from turngate.common.sharding import Shard, slot_from_head, slot_of
from turngate.config import ServeConfig
from turngate.engines.scripted import Scripted
from turngate.errors import BadRequest
from turngate.server.app import Gateway
from turngate.server.http import read_cursor
from turngate.server.workers import forwarding
from turngate.server.workers.forwarding import socket_path
from turngate.server.workers.worker import WorkerGateway
from turngate.store.lock import lock_folder
from turngate.trace.tool_schema import MAX_WAIT_S

HI = [user("Hi")]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Crew:
    """Workers that can be called individually."""

    def __init__(self, workers: list[Running]) -> None:
        self.workers = workers

    def __getitem__(self, number: int) -> Running:
        return self.workers[number]

    def __len__(self) -> int:
        return len(self.workers)

    async def open_at(self, owner: int, **config: Any) -> OpenSession:
        """Open a session owned by this worker."""
        return await self[owner].open(id=Shard(owner, len(self)).new_session_id(), **config)


@asynccontextmanager
async def crew(
    engines: Sequence[Scripted] = (), *, data: Path | None = None, run: str = "run", **config: Any
) -> AsyncIterator[Crew]:
    """Run one worker per engine."""
    engines = engines or [Scripted([say("Hello."), say("Again."), say("More.")]) for _ in range(2)]
    async with AsyncExitStack() as stack:
        folder = data or stack.enter_context(kit.memory_folder())
        stack.enter_context(lock_folder(folder))
        (folder / "admin-key").write_text("k" * 40)
        (folder / "admin-key").chmod(0o600)
        workers = []
        for number, engine in enumerate(engines):
            shard = Shard(number, len(engines))
            settings = ServeConfig(data=str(folder), workers=len(engines), **config).check()
            worker = await stack.enter_async_context(
                _run_worker(Gateway(settings, engine=engine, shard=shard), shard, run)
            )
            port = await stack.enter_async_context(kit._serve(worker.outside))  # type: ignore[arg-type]
            root = f"http://127.0.0.1:{port}"
            workers.append(Running(worker.gateway, root, await stack.enter_async_context(AsyncExitStack())))
        yield Crew(workers)


@asynccontextmanager
async def _run_worker(gateway: Gateway, shard: Shard, run: str) -> AsyncIterator[WorkerGateway]:
    """Run a worker and serve its private socket."""
    folder = Path(gateway.config.data)
    worker = WorkerGateway(gateway, shard, folder, run)
    await worker.start()
    config = uvicorn.Config(worker.inside, http="httptools", lifespan="off", access_log=False, log_config=None)
    config.uds = socket_path(folder, shard.number)
    server = uvicorn.Server(config)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    try:
        yield worker
    finally:
        gateway.events.close()
        for part in server.servers:
            part.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for task in list(server.server_state.tasks):
            task.cancel()
        await asyncio.sleep(0)
        await worker.stop()


# ── session ownership ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "head",
    [
        b"POST /s/task-1/v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/rollouts/task-1/register HTTP/1.1\r\n",
        b"GET /admin/sessions/task-1 HTTP/1.1\r\n",
        b"GET /admin/sessions/task-1?x=1 HTTP/1.1\r\n",
        b"GET /s/task%2D1/v1/models HTTP/1.1\r\n",
    ],
)
def test_slot_from_path(head: bytes) -> None:
    assert slot_from_head(head + b"host: x\r\n\r\n") == slot_of("task-1")


def test_slot_from_session_key() -> None:
    from turngate.common.sharding import new_secret

    secret = new_secret("task-1").encode()
    line = b"POST /v1/chat/completions HTTP/1.1\r\n"
    assert slot_from_head(line + b"Authorization: Bearer " + secret + b"\r\n\r\n") == slot_of("task-1")
    assert slot_from_head(line + b"x-api-key: " + secret + b"\r\n\r\n") == slot_of("task-1")
    assert slot_from_head(
        b"POST /v1beta/models/m:generateContent?key=" + secret + b"&alt=sse HTTP/1.1\r\n\r\n"
    ) == slot_of("task-1")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x00\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer tg-"
        + b"a" * 43
        + b"\r\n\r\n",  # from an older version
        b"POST /admin/sessions HTTP/1.1\r\n\r\n",
        b"GET /x/s/task-1 HTTP/1.1\r\n\r\n",
    ],
)
def test_no_slot_in_head(head: bytes) -> None:
    assert slot_from_head(head) is None


async def test_sessions_are_spread_evenly_across_workers() -> None:
    async with crew() as c:
        opened = [await c[0].open() for _ in range(8)] + [await c[1].open() for _ in range(8)]
        owners = [slot_of(session.id) % 2 for session in opened]
        assert owners.count(0) == owners.count(1) == 8
        for session in opened:
            assert session.key.startswith(f"tg-{slot_of(session.id):04x}") and len(session.key) == 3 + 4 + 43
            assert session.id in c[slot_of(session.id) % 2].app.sessions._live
            assert session.id not in c[1 - slot_of(session.id) % 2].app.sessions._live


async def test_duplicate_id_conflicts_at_every_worker() -> None:
    async with crew() as c:
        for n in range(6):
            assert (await c[n % 2].open(id=f"task-{n}")).id == f"task-{n}"
            for worker in c.workers:
                again = await worker.admin.post("/admin/sessions", json={"id": f"task-{n}"})
                assert again.status_code == 409
                register = await worker.admin.post(f"/v1/rollouts/task-{n}/register", json={"model": "m"})
                assert register.status_code == 409
        for wrong in ({"id": 5}, {"id": "a/b"}, {"modle": "m"}, [1]):
            for worker in c.workers:
                assert (await worker.admin.post("/admin/sessions", json=wrong)).status_code == 400
        assert (await c[0].admin.post("/admin/sessions", content=b" " * 1_100_000)).status_code == 413
        assert (await c[0].http().post("/admin/sessions", json={})).status_code == 401


# ── calls to other workers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sample(4)
@STREAMED
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_call_reaches_its_session_from_every_worker(dialect: str, stream: bool) -> None:
    async with crew() as c:
        session = await c.open_at(1)
        async with agent(dialect, c[0].root, session.key, stream=stream) as remote:
            assert (await remote.ask("Hi")).text == "Hello."
            assert (await remote.ask("Go on")).text == "Again."
        async with agent(dialect, c[1].root, session.key, stream=stream) as local:
            local.history = remote.history
            assert (await local.ask("And now?")).text == "More."
        assert len(c[1].engine.received) == 3 and not c[0].engine.received
        [row] = await c[0].samples(session.id)
        assert len(row["spans"]) == 3 and session.id not in c[0].app.sessions._live


async def test_several_sessions_over_one_connection() -> None:
    async with crew() as c:
        sessions = [await c[0].open() for _ in range(6)]
        options: Any = {"limits": httpx.Limits(max_connections=1), "timeout": scaled(20)}
        async with httpx.AsyncClient(base_url=c[0].root, trust_env=False, verify=False, **options) as http:
            for text in ("Hello.", "Again."):
                for session in sessions:
                    key = {"authorization": f"Bearer {session.key}"}
                    reply = await http.post("/v1/chat/completions", json={"model": "m", "messages": HI}, headers=key)
                    assert reply.json()["choices"][0]["message"]["content"] == text
        for session in sessions:
            assert [t["finish"] for t in await c[1].turns(session.id)] == ["stop", "stop"]


@STREAMED
async def test_disconnect_reaches_owning_worker(stream: bool) -> None:
    sampled = 3 if stream else 0
    engines = [Gated([say("One two three four.")], tokens=sampled) for _ in range(2)]
    async with crew(engines) as c:
        session = await c.open_at(1)
        request = c[0].client(session.key).chat.completions.create(model="m", messages=HI, stream=stream)
        call = c[0].start(request)
        await until(lambda: engines[1].waiting)
        if stream:
            await (await call).close()
        else:
            call.cancel()
        await until(lambda: engines[1].aborted == 1)
        await until(lambda: c[1].rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
        [turn] = await c[0].turns(session.id)
        assert (turn["role"], len(turn["ids"])) == ("aborted", sampled)


async def test_forwarded_stream_is_not_buffered() -> None:
    engines = [Gated([say("One two three four.")], tokens=3) for _ in range(2)]
    async with crew(engines) as c:
        session = await c.open_at(1)
        stream = await c[0].client(session.key).chat.completions.create(model="m", messages=HI, stream=True)
        first = ""
        async for chunk in stream:
            first += chunk.choices[0].delta.content or ""
            if first:
                break
        assert engines[1].waiting and "four" not in first
        engines[1].gate.set()
        rest = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert first + rest == "One two three four."


async def test_every_verb_works_from_every_worker() -> None:
    async with crew() as c:
        for owner in (0, 1):
            session = await c.open_at(owner, metadata={"n": owner})
            await c[1 - owner].ask(session.key, "Hi")
            for worker in c.workers:
                assert (await worker.show(session.id))["turns"] == 1
                assert (await worker.admin.get(f"/v1/rollouts/{session.id}/trajectory")).json()["num_turns"] == 1
                models = await worker.http(session.key).get("/v1/models")
                assert models.status_code == 200
                assert (await worker.admin.get("/health")).status_code == 200
            assert (await c[1 - owner].seal(session.id))["status"] == "sealed"
            for worker in c.workers:
                refused = await worker.http(session.key).post(
                    "/v1/chat/completions", json={"model": "m", "messages": HI}
                )
                assert refused.status_code == 409 and "sealed" in refused.text
            assert (await c[1 - owner].admin.delete(f"/admin/sessions/{session.id}")).status_code == 200
            assert (await c[owner].admin.get(f"/admin/sessions/{session.id}")).status_code == 404
        listed = [(await worker.admin.get("/admin/sessions")).json() for worker in c.workers]
        assert listed[0] == listed[1]


async def test_compressed_bodies_are_forwarded() -> None:
    body = gzip.compress(json.dumps({"model": "m", "messages": HI}).encode())
    async with crew() as c:
        session = await c.open_at(1)
        for worker in c.workers:
            reply = await worker.http(session.key).post(
                "/v1/chat/completions", content=body, headers={"content-encoding": "gzip"}
            )
            assert reply.status_code == 200, reply.text


async def test_forwarded_errors_use_caller_dialect() -> None:
    async with crew(max_body_mb=0.01) as c:
        session = await c.open_at(1)
        http = c[0].http(session.key)
        large = await http.post("/v1/messages", json={"messages": [user("x" * 20_000)]})
        assert large.status_code == 413 and large.json()["type"] == "error"
        wrong = await http.post("/v1/chat/completions", json={"model": "m", "messages": HI, "n": 2})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"
        unknown = await c[0].http("tg-" + "0" * 47).post("/v1/chat/completions", json={"model": "m", "messages": HI})
        assert unknown.status_code == 401
        other = await c[0].http("wrong").post(f"/s/{session.id}/v1/messages", json={})
        assert other.status_code == 401 and other.json()["type"] == "error"
        missing = await c[0].admin.get(f"/admin/sessions/{session.id}/nothing")
        assert missing.status_code == 404 and missing.headers["x-turngate"] == "1"
        assert len(missing.headers.get_list("date")) <= 1, "the header is not repeated by the forwarding worker"


async def test_missing_owner_is_retryable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "RESTART_WAIT_S", 0.2)
    async with crew() as c:
        session = await c.open_at(1)
        (Path(c[0].app.config.data) / "1").rename(Path(c[0].app.config.data) / "gone")
        chat = await c[0].http(session.key).post("/v1/chat/completions", json={"model": "m", "messages": HI})
        assert chat.status_code == 503 and "x-should-retry" not in chat.headers
        assert "retry" in chat.json()["error"]["message"]
        messages = (
            await c[0].http(session.key).post("/v1/messages", json={"model": "m", "max_tokens": 5, "messages": HI})
        )
        assert messages.json()["type"] == "error" and messages.status_code >= 500
        (Path(c[0].app.config.data) / "gone").rename(Path(c[0].app.config.data) / "1")
        assert (await c[0].ask(session.key, "Hi")).content == "Hello."


async def test_client_address_is_forwarded_and_cannot_be_forged() -> None:
    async with crew(open_loopback=True) as c:
        for n in range(4):  # the other worker owns half of them
            response = await c[0].http().post(f"/v1/rollouts/r-{n}/register", json={"model": "m"})
            assert response.status_code == 200
        forged = {"x-turngate-client": "203.0.113.9"}
        for n in range(4):
            assert (await c[0].http().get(f"/v1/rollouts/r-{n}/trajectory", headers=forged)).status_code == 200
    async with crew() as c:
        for n in range(4):
            response = (
                await c[0].http().post(f"/v1/rollouts/r-{n}/register", json={}, headers={"x-turngate-client": "::1"})
            )
            assert response.status_code == 401


async def test_internal_paths_are_not_found() -> None:
    async with crew() as c:
        for worker in c.workers:
            for path in ("/worker/fence", "/worker/events"):
                assert (await worker.admin.get(path)).status_code == 404
            assert (await worker.admin.post("/worker/fence/pause")).status_code == 404
        assert not c[0].app.fence.paused


async def test_session_keys_without_or_with_wrong_slot_work(tmp_path: Path) -> None:
    """Keys may come from an older version or carry a wrong slot: the slot is only a routing hint."""
    async with kit.gateway(data=tmp_path) as before:
        sessions = [await before.open() for _ in range(4)]
    keys = ["tg-" + "A" * 43, "tg-" + "ffff" + "B" * 43, "tg-" + "0000" + "C" * 43, "tg-" + "D" * 43]
    async with kit.gateway(data=tmp_path) as before:
        for session, key in zip(sessions, keys, strict=True):
            digest = hashlib.sha256(key.encode()).digest()
            before.app.store.database._db.execute("UPDATE sessions SET secret=? WHERE id=?", (digest, session.id))
    async with crew(data=tmp_path) as c:
        for session, key in zip(sessions, keys, strict=True):
            for worker, text in zip(c.workers, ("Hello.", "Again."), strict=True):
                assert (await worker.ask(key, "Hi")).content == text
            assert len(await c[0].turns(session.id)) == 2


async def test_sessions_continue_with_other_number_of_workers(tmp_path: Path) -> None:
    async with crew([Scripted([say("Hello.")]) for _ in range(3)], data=tmp_path) as c:
        sessions = [await c[0].open() for _ in range(6)]
        for n, session in enumerate(sessions):
            assert (await c[n % 3].ask(session.key, "Hi")).content == "Hello."
    history = [*HI, {"role": "assistant", "content": "Hello."}, user("Go on")]
    async with crew([Scripted([say("Again.")]) for _ in range(2)], data=tmp_path) as c:
        for session in sessions:
            assert (await c[0].ask(session.key, history)).content == "Again."
    history += [{"role": "assistant", "content": "Again."}, user("Go on")]
    async with kit.gateway([say("More.")], data=tmp_path) as single:
        for session in sessions:
            assert (await single.ask(session.key, history)).content == "More."
            [row] = await single.samples(session.id)
            assert len(row["spans"]) == 3


async def test_only_owner_expires_idle_session() -> None:
    async with crew(idle_s=0.4) as c:
        sessions = [await c[0].open() for _ in range(4)]
        rows = "SELECT count(*) FROM sessions WHERE status='sealed' AND stop='idle'"
        await until(lambda: c[0].rows(rows) == [(4,)])
        kinds = [(event.session, event.kind) for event in c[1].app.events.page()]
        assert sorted(kinds) == sorted([(s.id, k) for s in sessions for k in ("opened", "sealed")])


# ── the fence ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_pause_and_resume_apply_to_every_worker() -> None:
    async with crew() as c:
        sessions = [await c.open_at(0), await c.open_at(1)]
        assert await c[1].pause() == {"version": 0, "paused": True, "in_flight": 0}
        held = [c[0].start(c[0].ask(s.key, "Hi")) for s in sessions]
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in held)
        for worker in c.workers:
            assert (await worker.admin.get("/admin/fence")).json()["paused"] is True
        assert await c[1].resume(7) == {"version": 7, "paused": False, "in_flight": 0}
        assert [(await call).content for call in held] == ["Hello.", "Hello."]
        for session in sessions:
            [turn] = await c[0].turns(session.id)
            assert (turn["version_start"], turn["version_end"]) == (7, 7)
        for worker in c.workers:
            assert worker.app.fence.version == 7
            stale = await worker.admin.post("/admin/fence/resume", json={"version": 6})
            assert stale.status_code == 409
            assert (await worker.http("wrong").get("/admin/fence")).status_code == 401
            assert (await worker.admin.post("/admin/fence/pause", json={"mode": "x"})).status_code == 400
        assert (await c[1].resume())["version"] == 7


async def test_drain_waits_for_calls_of_every_worker() -> None:
    engines = [Gated([say("One two three."), say("Four.")], tokens=0) for _ in range(2)]
    async with crew(engines) as c:
        sessions = [await c.open_at(0), await c.open_at(1)]
        calls = [c[0].start(c[0].ask(s.key, "Hi")) for s in sessions]
        await until(lambda: engines[0].waiting and engines[1].waiting)
        assert (await c[0].admin.get("/admin/fence")).json()["in_flight"] == 2
        draining = c[1].start(c[1].pause("drain"))
        await until(lambda: all(worker.app.fence.paused for worker in c.workers))
        engines[0].gate.set()
        await calls[0]
        await until(lambda: not c[0].app.fence.in_flight)
        await asyncio.sleep(0.05)
        assert not draining.done() and (await c[1].admin.get("/admin/fence")).json() == {
            "version": 0,
            "paused": True,
            "in_flight": 1,
        }
        engines[1].gate.set()
        assert await draining == {"version": 0, "paused": True, "in_flight": 0}


async def test_restarted_workers_stay_paused(tmp_path: Path) -> None:
    async with crew(data=tmp_path) as c:
        await c[0].resume(3)
        await c[0].pause()
    async with crew(data=tmp_path) as c:  # the same run with restarted workers
        assert [(w.app.fence.version, w.app.fence.paused) for w in c.workers] == [(3, True), (3, True)]
        await c[1].resume(4)
    async with crew(data=tmp_path) as c:
        assert [(w.app.fence.version, w.app.fence.paused) for w in c.workers] == [(4, False), (4, False)]
        await c[0].pause()
    async with crew(data=tmp_path, run="another") as c:  # also in a new run: a weight update may be incomplete
        assert [(w.app.fence.version, w.app.fence.paused) for w in c.workers] == [(4, True), (4, True)]


async def test_fence_of_all_workers_follows_a_request_that_names_a_project() -> None:
    async with crew() as c:
        await c[0].admin.post("/admin/projects", json={"name": "alpha"})
        await until(lambda: c[1].app.projects.ring.find_project("alpha") is not None)
        for number, worker in enumerate(c.workers):
            operator = worker.http("k" * 40)
            operator.headers["x-turngate-project"] = "alpha"
            assert (await operator.post("/admin/fence/pause")).is_success
            assert [w.app.fence.paused for w in c.workers] == [True, True]
            assert (await operator.post("/admin/fence/resume", json={"version": number + 1})).is_success
            assert [(w.app.fence.version, w.app.fence.paused) for w in c.workers] == [(number + 1, False)] * 2


async def test_fence_fails_when_worker_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "RESTART_WAIT_S", 0.1)
    async with crew() as c:
        socket_folder = Path(c[0].app.config.data) / "1"
        socket_folder.rename(socket_folder.with_name("gone"))
        assert (await c[0].admin.post("/admin/fence/pause")).status_code == 503
        assert (await c[0].admin.post("/admin/fence/resume", json={"version": 2})).status_code == 503
        socket_folder.with_name("gone").rename(socket_folder)
        assert (await c[0].admin.post("/admin/fence/resume", json={"version": 1})).status_code == 409
        assert await c[1].resume() == {"version": 2, "paused": False, "in_flight": 0}
        assert [w.app.fence.version for w in c.workers] == [2, 2]


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def read_events(
    worker: Running, count: int, path: str = "/admin/events", after: str = ""
) -> list[tuple[str, Any]]:
    """Read `count` events with their ids."""
    found: list[tuple[str, Any]] = []
    headers = {"last-event-id": after} if after else {}
    if not count:
        return found
    async with worker.admin.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        cursor = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                cursor = value
            elif name == "data":
                found.append((cursor, json.loads(value)))
                if len(found) == count:
                    return found
    raise AssertionError(f"the stream ended after {found}")


async def test_workers_share_one_event_stream_and_cursor() -> None:
    async with crew() as c:
        sessions = [await c.open_at(n % 2) for n in range(4)]
        for session in sessions:
            await c[0].ask(session.key, "Hi")
        await c[1].pause()
        expected = [("opened", s.id) for s in sessions] + [("turn", s.id) for s in sessions] + [("fence", "")]
        total = len(expected)  # one fence event, not one per worker
        for worker in c.workers:
            received = await read_events(worker, total)
            assert [(e["kind"], e["session"]) for _, e in received] == expected
            assert [int(cursor) for cursor, _ in received] == sorted({e["seq"] for _, e in received})
            for n, (cursor, _) in enumerate(received):
                rest = await read_events(c[n % 2], total - n - 1, after=cursor)
                assert [e["seq"] for _, e in received[: n + 1] + rest] == [e["seq"] for _, e in received]
        cursor = received[-1][0]
        await c[0].resume(1)
        [(_, newest)] = await read_events(c[1], 1, path=f"/admin/events?after={cursor}")
        assert newest["kind"] == "fence" and newest["data"]["version"] == 1
        bad = await c[0].admin.get("/admin/events?after=x.1")
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "after"
        assert (await c[0].http("wrong").get("/admin/events")).status_code == 401


@pytest.mark.usefixtures("no_keep_alive")
async def test_events_of_other_worker_arrive_live() -> None:
    async with crew() as c:
        before = await c.open_at(0)
        following = c[0].start(read_events(c[0], 4))
        await until(lambda: c[0].app.events._followers)
        session = await c.open_at(1)
        await c[0].admin.post(
            "/admin/events", json={"session": session.id, "kind": "stage", "data": {"stage": "setup"}}
        )
        await c[1].ask(session.key, "Hi")
        found = await asyncio.wait_for(following, scaled(10))
        assert [(e["session"], e["kind"]) for _, e in found] == [
            (before.id, "opened"),
            (session.id, "opened"),
            (session.id, "stage"),
            (session.id, "turn"),
        ]


async def test_tool_call_and_answer_at_different_workers() -> None:
    ask = {"name": "ask", "description": "Ask a person.", "schema": {"type": "object"}, "wait_s": MAX_WAIT_S}
    async with crew() as c:
        session = await c.open_at(1, tools=[ask])
        waiting = c[0].start(c[0].http(session.key).post("/v1/tools/ask", json={"n": 1}))
        await until(lambda: c[1].live(session.id).pending_tool_calls)
        [call] = (await c[0].admin.get(f"/admin/sessions/{session.id}/tools")).json()["calls"]
        assert call["waiting"] and call["arguments"] == {"n": 1}
        path = f"/admin/sessions/{session.id}/tools/{call['call']}/answer"
        assert (await c[0].admin.post(path, json={"reply": 7})).status_code == 200
        assert (await waiting).json() == 7
        gone = c[0].start(c[0].http(session.key).post(f"/rollout/{session.id}/v1/tools/ask", json={}))
        await until(lambda: c[1].live(session.id).pending_tool_calls)
        gone.cancel()
        await until(lambda: not c[1].live(session.id).pending_tool_calls)
        await c[0].seal(session.id)
        outcome = {"kind": "graded", "reward": 1.0}
        assert (await c[0].admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).status_code == 200
        assert [(await w.show(session.id))["outcome"]["reward"] for w in c.workers] == [1.0, 1.0]
        for key in ("wrong", session.key):
            refused = await c[0].http(key).put(f"/admin/sessions/{session.id}/outcome", json=outcome)
            assert refused.status_code == 401


@pytest.mark.usefixtures("no_keep_alive")
async def test_announcement_at_any_worker_wakes_followers() -> None:
    async with crew() as c:
        session = await c.open_at(1)
        following = c[0].start(read_events(c[0], 2, f"/admin/sessions/{session.id}/events"))
        await until(lambda: c[1].app.events._followers)
        for worker in c.workers[:1]:
            response = await worker.admin.post("/admin/events", json={"session": session.id, "kind": "note"})
            assert response.status_code == 201
        assert [e["kind"] for _, e in await asyncio.wait_for(following, scaled(5))] == ["opened", "note"]


async def test_session_events_come_from_owner() -> None:
    async with crew() as c:
        session = await c.open_at(1)
        await c[1].ask(session.key, "Hi")
        found = await read_events(c[0], 2, f"/admin/sessions/{session.id}/events")
        assert [e["kind"] for _, e in found] == ["opened", "turn"]
        assert all(cursor.isdigit() for cursor, _ in found)


def test_old_multi_worker_cursors_are_read() -> None:
    def read(cursor: str) -> int:
        return read_cursor(Request({"type": "http", "headers": []}), cursor)

    assert [read(""), read("9"), read("5.7"), read("7.5.6")] == [0, 9, 5, 5]
    with pytest.raises(BadRequest, match=r"'after' .* must be the id of an event, not '5.x'"):
        read("5.x")


# ── the store ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_concurrent_writes_never_find_database_busy() -> None:
    async with crew([Scripted(lambda request, index: say("Hello.")) for _ in range(3)]) as c:
        sessions = [await c[n % 3].open() for n in range(12)]
        for _ in range(3):
            await asyncio.gather(*(c[n % 3].ask(s.key, f"Question {n}") for n, s in enumerate(sessions)))
        assert c[0].rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(36,)]
        assert [worker.app.store.database._checkpoints is not None for worker in c.workers] == [True, False, False]


async def test_non_http_connection_gets_bad_request() -> None:
    async with crew() as c:
        port = int(c[0].root.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(wire, b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert (await asyncio.wait_for(loop.sock_recv(wire, 1000), scaled(5))).startswith(b"HTTP/1.1 400")
        assert (await c[0].admin.get("/health")).status_code == 200


# ── internal endpoints ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("target", ["/worker/fence", "/worker/events", "/%77orker/fence", "/worker/fence/resume"])
async def test_no_key_opens_internal_paths(target: str) -> None:
    """Session keys, the admin key and a forged run id give no access to internal endpoints."""
    async with crew() as c:
        session = await c.open_at(1)
        for key in (session.key, "k" * 40):
            for run in ({}, {"x-turngate-run": "0" * 16}):
                for method in ("GET", "POST"):
                    reply = await c[0].http(key).request(method, target, headers=run, json={"version": 999})
                    assert reply.status_code == 404, (method, key, run)
        assert c[1].app.fence.version == 0


async def test_unauthorized_call_is_refused_before_its_body() -> None:
    async with crew() as c:
        session = await c.open_at(1)
        sent = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(60):
                sent += 1
                yield b"x" * 1_000_000
                await asyncio.sleep(0.02)

        with suppress(httpx.WriteError, httpx.ReadError):  # the connection may be closed early
            reply = await c[0].http("nobody").post(f"/s/{session.id}/v1/chat/completions", content=body())
            assert reply.status_code == 401
        assert not c[1].live(session.id).trace.nodes


@pytest.mark.parametrize("is_declared", [True, False])
async def test_oversized_body_is_recorded_by_owner(is_declared: bool) -> None:
    async with crew(max_body_mb=0.01) as c:
        session = await c.open_at(0)
        body = b'{"messages": "%s"}' % (b"x" * 20_000)

        async def parts() -> AsyncIterator[bytes]:
            yield body

        for _ in range(2):  # the connection between the workers stays usable
            content = body if is_declared else parts()
            large = await c[1].http(session.key).post("/v1/chat/completions", content=content)
            assert large.status_code == 413 and "max_body_mb" in large.json()["error"]["message"]
        refused = (await c[0].show(session.id))["refused"]
        assert (refused["count"], refused["status"]) == (2, 413) and "max_body_mb" in refused["message"]
        assert (await c[1].ask(session.key, HI)).content == "Hello."
