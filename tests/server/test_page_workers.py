"""Test the web page with several workers: each serves login and lists, and the owner serves its rollouts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tests.server.test_forwarding import crew
from tests.server.test_page import OWN, events, fetch, log_in
from tests.speed import scaled
from turngate.common.sharding import SESSION_PATH, slot_from_head
from turngate.server.web.files import SECURITY_HEADERS


async def test_login_is_valid_at_every_worker() -> None:
    async with crew() as c:
        client = await log_in(c[0])
        cookie = client.cookies["turngate_page"]
        first, other = await c.open_at(0), await c.open_at(1)
        await c[1].ask(other.key, "Hi")
        for worker in c.workers:
            local = worker.http()
            local.cookies.set("turngate_page", cookie)
            listed = await fetch(local, "rollouts")
            assert {row["id"]: row["turns"] for row in listed["rollouts"]} == {first.id: 0, other.id: 1}
            assert (await fetch(local, "overview"))["gateway"]["workers"] == 2
            header = await fetch(local, f"rollouts/{other.id}")
            assert header["live"] == {"in_flight": 0, "last_error": None}, "served by the owning worker"
            assert len((await fetch(local, f"rollouts/{other.id}/tokens"))["nodes"]) == 2
        stranger = await c[0].http().get(f"/page/api/rollouts/{other.id}")
        assert stranger.status_code == 401 and stranger.headers["x-content-type-options"] == "nosniff"
        forwarded = await client.get(f"/page/api/rollouts/{other.id}")
        assert all(forwarded.headers.get_list(name) == [value] for name, value in SECURITY_HEADERS.items())
        assert (await client.get("/admin/sessions")).status_code == 401
        await client.post("/page/logout", headers=OWN)
        for worker in c.workers:
            local = worker.http()
            local.cookies.set("turngate_page", cookie)
            assert (await local.get("/page/api/me")).status_code == 401
            assert (await local.get(f"/page/api/rollouts/{other.id}")).status_code == 401


@pytest.mark.usefixtures("no_keep_alive")
async def test_events_and_cancel_across_workers() -> None:
    async with crew() as c:
        client = await log_in(c[0])
        other = await c.open_at(1)
        cursor = (await fetch(client, "rollouts"))["cursor"]
        async with aclosing(events(client, "events", after=cursor)) as following:
            await c[1].ask(other.key, "Hi")
            _, changed = await anext(following)
            assert [(row["id"], row["turns"]) for row in changed["rollouts"]] == [(other.id, 1)]
            async with aclosing(events(client, f"rollouts/{other.id}/events", after=cursor)) as alone:
                assert (await anext(alone))[0] == "turn"
                response = await client.post(f"/page/api/rollouts/{other.id}/cancel", headers=OWN)
                assert response.json()["rollout"]["status"] == "cancelled"
                assert (await anext(alone))[0] == "cancelled"
        assert c[1].app.sessions.find_live(other.id) is None and (await c[1].show(other.id))["status"] == "cancelled"
        foreign = await client.post(f"/page/api/rollouts/{other.id}/cancel", headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403


@pytest.mark.usefixtures("no_keep_alive")
async def test_batch_retry_event_reaches_every_worker() -> None:
    """The stream of a batch belongs to no session, so any worker may add to it."""
    async with crew() as c:
        for reader, writer in ((0, 1), (1, 0)):
            follower = c[reader].app.events.follow("batch:b", c[reader].app.events.newest())
            waiting = asyncio.create_task(anext(follower))
            await asyncio.sleep(0)
            c[writer].app.events.announce("batch:b", "retry", {"rollout": "b.t.0", "attempt": 1})
            assert [event.kind for event in await asyncio.wait_for(waiting, scaled(5))] == ["retry"]
            await follower.aclose()


def test_page_paths_route_to_owning_worker() -> None:
    assert SESSION_PATH.match(b"/page/api/rollouts/abc/tree") and not SESSION_PATH.match(b"/page/api/rollouts?limit=5")
    assert slot_from_head(b"GET /page/api/rollouts/abc HTTP/1.1\r\n") == slot_from_head(
        b"GET /admin/sessions/abc HTTP/1.1\r\n"
    )
