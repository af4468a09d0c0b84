"""Views of whole sessions: built off the event loop, from one consistent snapshot of the store."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.kit import gateway, say, user
from turngate.store.sqlite import Store
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
async def test_no_trace_is_read_or_written_down_in_the_loop(monkeypatch: pytest.MonkeyPatch, sealed: bool) -> None:
    """A session of a hundred thousand tokens takes the better part of a second, in which nobody else would be served."""
    wanted, worked = [], []

    def beside(kind: type, name: str) -> None:
        work = getattr(kind, name)

        def noted(*what: Any, **how: Any) -> Any:
            worked.append(threading.current_thread().name)
            return work(*what, **how)

        monkeypatch.setattr(kind, name, noted)

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
            beside(kind, name)
        for path in PATHS:
            response = await g.admin.get(path.format(session))
            assert response.status_code == 200, response.text
            wanted.append(response.json())
        assert set(worked) == {"turngate-looks_0"}
        assert wanted[0]["status"] == ("sealed" if sealed else "open") and len(wanted[1]["samples"][0]["ids"]) > 300
        worked.clear()
        listed = (await g.admin.get("/sessions")).json()["sessions"]
        assert [(one["session_id"], one["turns"], one["roots"]) for one in listed] == [(session, 1, 1)]
        assert worked == []  # a list tells of shapes, for which no trace is needed
        assert (await g.show(session))["turns"] == 1
        assert set(worked) <= {"turngate-looks_0"}


async def test_what_is_told_of_a_session_at_work_is_of_one_moment() -> None:
    async with gateway(lambda request, index: say(f"Answer {index}.")) as g:
        session = await g.open()
        messages = [user("Hi")]

        async def work() -> None:
            for turn in range(40):
                said = await g.ask(session.key, messages)
                messages.extend([said.message(), user(f"Go on {turn}")])

        working = asyncio.create_task(work())
        seen = 0
        while not working.done():
            nodes = (await g.trace(session.id))["nodes"]
            ids = {node["id"] for node in nodes}
            assert all(node["parent"] is None or node["parent"] in ids for node in nodes)
            assert len(nodes) >= seen
            seen = len(nodes)
        await working
        assert len((await g.trace(session.id))["nodes"]) == 80  # whatever was answered is there


async def test_a_session_that_is_deleted_meanwhile_is_whole_or_not_there() -> None:
    async with gateway([say("Hello.")] * 40) as g:
        for _ in range(10):
            session = await g.open()
            await g.ask(session.key, "Hi")
            looking = [asyncio.create_task(g.admin.get(f"/admin/sessions/{session.id}/trace")) for _ in range(4)]
            await asyncio.sleep(0)
            await g.admin.delete(f"/admin/sessions/{session.id}")
            for response in await asyncio.gather(*looking):
                assert response.status_code == 404 or len(response.json()["nodes"]) == 2


async def test_a_large_answer_arrives_whole() -> None:
    async with gateway([say("word " * 20_000)], max_context=100_000) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
        response = await g.admin.get(f"/admin/sessions/{session.id}/trace")
        assert int(response.headers["content-length"]) == len(response.content) > 500_000
        assert len(response.json()["nodes"][1]["ids"]) > 20_000
