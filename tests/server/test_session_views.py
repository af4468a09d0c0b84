"""Test session views: built off the event loop, from one consistent snapshot of the store."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.kit import gateway, say, user
from turngate.store.store import Store
from turngate.views.session import SessionView

PATHS = (
    "/admin/sessions/{}/trace",
    "/admin/sessions/{}/samples",
    "/sessions/{}",
    "/sessions/{}/rollout",
    "/sessions/{}/trace_entries",
    "/v1/rollouts/{}/trajectory",
)


@pytest.mark.parametrize("sealed", [False, True])
async def test_traces_are_read_and_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, sealed: bool) -> None:
    """Reading 100,000 tokens takes most of a second, which would block all other calls."""
    replies, threads = [], []

    def record_threads(kind: type, name: str) -> None:
        work = getattr(kind, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*args, **kwargs)

        monkeypatch.setattr(kind, name, wrapper)

    async with gateway([say("word " * 300)] * 3) as g:
        session = (await g.admin.post("/sessions", json={})).json()["id"]
        key = (await g.open()).key
        for name in (g.app.sessions.find_id_by_secret(key), session):
            assert name is not None
            await g.http(g.app.admin_key).post(
                f"/s/{name}/v1/chat/completions", json={"model": "m", "messages": [user("Hi")]}
            )
        if sealed:
            await g.seal(session)
        for kind, name in (
            (SessionView, "encode_trace"),
            (SessionView, "samples"),
            (Store, "load"),
            (Store, "messages"),
        ):
            record_threads(kind, name)
        for path in PATHS:
            response = await g.admin.get(path.format(session))
            assert response.status_code == 200, response.text
            replies.append(response.json())
        assert set(threads) == {"turngate-looks_0"}
        assert replies[0]["status"] == ("sealed" if sealed else "open") and len(replies[1]["samples"][0]["ids"]) > 300
        threads.clear()
        listed = (await g.admin.get("/sessions")).json()["sessions"]
        assert [(row["session_id"], row["turns"], row["roots"]) for row in listed] == [(session, 1, 1)]
        assert threads == []  # listing needs no trace
        assert (await g.show(session))["turns"] == 1
        assert set(threads) <= {"turngate-looks_0"}


async def test_trace_of_running_session_is_consistent() -> None:
    async with gateway(lambda request, index: say(f"Answer {index}.")) as g:
        session = await g.open()
        messages = [user("Hi")]

        async def work() -> None:
            for turn in range(40):
                reply = await g.ask(session.key, messages)
                messages.extend([reply.message(), user(f"Go on {turn}")])

        working = asyncio.create_task(work())
        seen = 0
        while not working.done():
            nodes = (await g.trace(session.id))["nodes"]
            ids = {node["id"] for node in nodes}
            assert all(node["parent"] is None or node["parent"] in ids for node in nodes)
            assert len(nodes) >= seen
            seen = len(nodes)
        await working
        assert len((await g.trace(session.id))["nodes"]) == 80  # every answered turn is there


async def test_deleted_session_is_complete_or_not_found() -> None:
    async with gateway([say("Hello.")] * 40) as g:
        for _ in range(10):
            session = await g.open()
            await g.ask(session.key, "Hi")
            requests = [asyncio.create_task(g.admin.get(f"/admin/sessions/{session.id}/trace")) for _ in range(4)]
            await asyncio.sleep(0)
            await g.admin.delete(f"/admin/sessions/{session.id}")
            for response in await asyncio.gather(*requests):
                assert response.status_code == 404 or len(response.json()["nodes"]) == 2


async def test_large_trace_is_sent_completely() -> None:
    async with gateway([say("word " * 20_000)], max_context=100_000) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
        response = await g.admin.get(f"/admin/sessions/{session.id}/trace")
        assert int(response.headers["content-length"]) == len(response.content) > 500_000
        assert len(response.json()["nodes"][1]["ids"]) > 20_000
