"""Test the event stream: stored, ordered, and followed from a cursor across restarts, per session and for all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit import Gated, Running, gateway, say, until
from tests.speed import scaled
from turngate.client.gateway import GatewayClient, GatewayUnreachable, RequestRejected
from turngate.config import ServeConfig
from turngate.errors import ConfigError, Unauthorized
from turngate.gateway.events import LARGEST, PAGE, Events
from turngate.store import events as store_events
from turngate.store.events import GatewayEvent
from turngate.store.store import Store

HELLO = lambda request, index: say("Hello.")  # noqa: E731


async def read_events(g: Running, path: str = "/admin/events", **query: Any) -> list[Any]:
    """Read the events stored so far."""
    response = await g.admin.get(path, params={"wait": 0, **query})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def kinds(events: list[Any]) -> list[str]:
    return [event.kind if isinstance(event, GatewayEvent) else event["kind"] for event in events]


@asynccontextmanager
async def client(g: Running) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(g.root, g.app.admin_key) as connected:
        yield connected


# ── storage and following ───────────────────────────────────────────────────────────────────────────────────────────


async def test_events_survive_restart_and_numbering_continues(tmp_path: Path) -> None:
    async with gateway(HELLO, data=tmp_path) as g:
        session = await g.open(limits={"turns": 1})
        await g.ask(session.key, "Hi")
        await g.ask(session.key, "Hi")
        await g.ask(session.key, "Hi")  # past the limit again: reported once
        await g.pause()
        await g.resume(1)
        await g.seal(session.id)
        other = await g.open()
        await g.cancel(other.id)
        before = await read_events(g)
        assert kinds(before) == ["opened", "turn", "limit", "fence", "fence", "sealed", "opened", "cancelled"]
        assert before[1]["data"] | {"node": 0, "prompt_tokens": 0} == {
            "node": 0,
            "finish": "stop",
            "prompt_tokens": 0,
            "sampled_tokens": len(say("Hello.").ids),
            "cause": None,
        }
    async with gateway(HELLO, data=tmp_path) as g:
        assert await read_events(g) == before
        third = await g.open()
        after = await read_events(g)
        assert after[:-1] == before and after[-1]["session"] == third.id and after[-1]["seq"] > before[-1]["seq"]
        session_events = await read_events(g, f"/admin/sessions/{session.id}/events")
        assert session_events == [e for e in before if e["session"] == session.id]
        assert await read_events(g, after=before[3]["seq"]) == after[4:]
        assert [e.seq for e in g.app.events.page(after=before[3]["seq"])] == [e["seq"] for e in after[4:]]


@pytest.mark.parametrize(("limit", "value", "status"), [("turns", 0, 409), ("context_tokens", 20, 400)])
async def test_limit_that_refuses_calls_is_reported_once(limit: str, value: int, status: int) -> None:
    async with gateway(HELLO) as g:
        session = await g.open(limits={limit: value}, at_limit="conflict")
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as refused:
                await g.ask(session.key, "word " * 30)
            assert refused.value.status_code == status
        reached = [event["data"] for event in await read_events(g) if event["kind"] == "limit"]
        assert reached == [{"limit": limit}] and (await g.show(session.id))["stop"] == limit


async def test_follower_gets_each_event_once_across_restarts(tmp_path: Path) -> None:
    seen: list[Any] = []
    opened_ids: list[str] = []
    port: list[int] = []  # port of the running gateway

    async def follow(url: str, key: str) -> None:
        async with GatewayClient(url, key) as connected:
            async for event in connected.events():
                seen.append(event)

    following: asyncio.Task[None] | None = None
    for life in range(3):
        async with gateway(HELLO, data=tmp_path) as g:
            if following is None:
                # A proxy keeps the address while the gateway behind it restarts.
                server = await asyncio.start_server(lambda r, w: _pipe(r, w, port), "127.0.0.1", 0)
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                following = asyncio.create_task(follow(url, g.app.admin_key))
            port[:] = [int(g.root.rpartition(":")[2])]
            for n in range(5):
                session = await g.open()
                opened_ids.append(session.id)
                await g.ask(session.key, f"{life}.{n}")
            if life < 2:
                await until(lambda: len(seen) > 11 * life + 3, 10)  # noqa: B023
                opened_ids.append((await g.open()).id)  # may be unread when the gateway stops
            else:
                await until(lambda: {e.session for e in seen} == set(opened_ids) and len(seen) == 32, 10)
            g.app.events.close()
            port.clear()
    assert following is not None
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    server.close()
    assert [e.seq for e in seen] == sorted({e.seq for e in seen})
    assert [e.session for e in seen if e.kind == "opened"] == opened_ids
    assert kinds(seen).count("turn") == 15


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: list[int]) -> None:
    """Forward one connection to the running gateway."""
    try:
        if not port:
            return
        inner, outer = await asyncio.open_connection("127.0.0.1", port[0])
    except OSError:
        return
    else:

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.close()

        await asyncio.gather(copy(reader, outer), copy(inner, writer))
    finally:
        writer.close()


async def test_turn_and_event_are_stored_atomically(tmp_path: Path) -> None:
    """If one of the two cannot be written, neither is stored."""
    async with gateway(HELLO, data=tmp_path) as g:
        session = await g.open()
        g.app.store.database._db.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'broken'); END"
        )
        response = await g.http(session.key).post(
            "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        )
        assert response.status_code == 503
        assert await g.turns(session.id) == []
        g.app.store.database._db.execute("DROP TRIGGER broken")
        await g.ask(session.key, "Hi")
        assert kinds(await read_events(g)) == ["opened", "turn"] and len(await g.turns(session.id)) == 1


async def test_aborted_turn_has_an_event() -> None:
    async with gateway(engine=Gated([say("Hello there, all of you.")], tokens=2)) as g:
        session = await g.open()
        call = g.start(g.ask(session.key, "Hi", "async stream"))
        await until(lambda: g.gated.waiting)
        await g.cancel(session.id)
        await asyncio.gather(call, return_exceptions=True)
        assert [(e["kind"], e["data"].get("finish")) for e in await read_events(g)] == [
            ("opened", None),
            ("turn", "abort"),
            ("cancelled", None),
        ]


async def test_turns_in_one_transaction_each_have_an_event() -> None:
    async with gateway(HELLO, durability="disk") as g:
        sessions = [await g.open() for _ in range(6)]
        await asyncio.gather(*(g.ask(s.key, "Hi") for s in sessions))
        assert kinds(await read_events(g)).count("turn") == 6
        for session in sessions:
            assert kinds(await read_events(g, f"/admin/sessions/{session.id}/events")) == ["opened", "turn"]


@pytest.mark.usefixtures("no_keep_alive")
async def test_follow_reads_pages_and_removes_followers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    events = Events(store)
    count = 2 * PAGE + 7
    for n in range(count):
        events.add(f"s{n % 3}", "note", {"n": n})
    assert [e.data["n"] async for page in events.follow(wait=False) for e in page] == list(range(count))
    assert [e.data["n"] async for page in events.follow("s1", wait=False) for e in page] == list(range(1, count, 3))
    waiting = asyncio.ensure_future(anext(events.follow("s9")))
    await asyncio.sleep(0)
    events.add("s9", "note", {})
    assert [event.session for event in await asyncio.wait_for(waiting, scaled(5))] == ["s9"]
    following = events.follow(after=count)
    await anext(following)
    await following.aclose()
    await asyncio.sleep(0)
    assert set(events._followers) <= {"s9"}
    store.close()


async def test_cursor_beyond_newest_event_starts_over() -> None:
    async with gateway() as g:
        await g.open()
        assert kinds(await read_events(g, after=10**15)) == ["opened"]


@pytest.mark.usefixtures("no_keep_alive")
async def test_waiting_follower_ends_when_gateway_closes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    events = Events(store)
    following = events.follow()
    waiting = asyncio.ensure_future(anext(following, None))
    await asyncio.sleep(0.01)
    events.close()
    assert await asyncio.wait_for(waiting, scaled(5)) is None
    store.close()


async def test_client_raises_an_error_for_events_that_the_gateway_will_never_send() -> None:
    async with gateway() as g, client(g) as connected, asyncio.timeout(scaled(5)):
        with pytest.raises(RequestRejected, match="after") as rejected:
            await anext(connected.events(after=-1))
        assert rejected.value.answered == 400


# ── removal ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_deleting_session_leaves_only_deleted_event() -> None:
    async with gateway(HELLO) as g:
        gone, stays = await g.open(), await g.open()
        await g.ask(gone.key, "Hi")
        await g.ask(stays.key, "Hi")
        await g.admin.delete(f"/admin/sessions/{gone.id}")
        left = [(e["session"], e["kind"]) for e in await read_events(g)]
        assert left == [(stays.id, "opened"), (stays.id, "turn"), (gone.id, "deleted")]
        assert (await g.admin.get(f"/admin/sessions/{gone.id}/events")).status_code == 404


async def test_event_days_removes_old_events(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="event_days"):
        ServeConfig(event_days=-1).check()
    async with gateway(data=tmp_path) as g:
        session = await g.open()
        [first] = await read_events(g)
    db = Store(tmp_path)
    db.database._db.execute("UPDATE events SET time=?", (time.time() - 3 * 86400,))
    db.close()
    async with gateway(data=tmp_path) as g:
        assert len(await read_events(g)) == 1  # by default, they stay
    async with gateway(data=tmp_path, event_days=2, idle_s=0.4) as g:
        newer = await g.open()
        await until(lambda: session.id not in {e.session for e in g.app.events.page() if e.kind == "opened"})
        left = await read_events(g)
        assert left[0]["session"] == newer.id and left[0]["seq"] > first["seq"]


async def test_other_work_runs_between_the_transactions_that_remove_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_events, "_PRUNED", 2)  # events per transaction
    async with gateway() as g:
        for _ in range(6):
            g.app.events.add("", "note", {})
        left = []

        async def count_events() -> None:
            while not left or left[-1]:
                left.append(len(g.app.events.page()))
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_events())
        assert await g.app.events.prune(time.time() + 1) == 6
        await counting
        assert [count for count in dict.fromkeys(left) if count < 6] == [4, 2, 0]


# ── announced events ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_announced_stages_are_ordered_with_turns() -> None:
    async with gateway(HELLO) as g, client(g) as connected:
        first = await connected.announce("r-1", "stage", {"stage": "sandbox"})
        assert kinds([e async for e in connected.events("r-1", wait=False)]) == [
            "stage"
        ]  # it can be followed before the session opens
        opened = await connected.open({}, "r-1")
        await g.ask(opened.key, "Hi")
        assert await connected.announce("r-1", "graded", {"kind": "graded"}) > first
        await connected.announce("", "note", {"batch": "b"})
        events = [e async for e in connected.events("r-1", wait=False)]
        assert kinds(events) == ["stage", "opened", "turn", "graded"]
        assert events[0].data == {"stage": "sandbox"} and events[0].seq == first
        all_events = [e async for e in connected.events(after=first, wait=False)]
        assert kinds(all_events) == ["opened", "turn", "graded", "note"]
        assert [e async for e in connected.events("never", wait=False)] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session": "s", "kind": "turn"}, "kind"),
        ({"session": "s", "kind": "outcome"}, "kind"),
        ({"session": "s"}, "kind"),
        ({"session": "../x", "kind": "note"}, "session"),
        ({"session": 1, "kind": "note"}, "session"),
        ({"session": "s", "kind": "note", "data": [1]}, "data"),
        ({"session": "s", "kind": "note", "data": {"x": "y" * LARGEST}}, "data"),
        ({"session": "s", "kind": "note", "seq": 1}, "seq"),
    ],
)
async def test_invalid_announcement_names_its_field(body: Any, param: str) -> None:
    async with gateway() as g:
        response = await g.admin.post("/admin/events", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert await read_events(g) == []


async def test_events_need_admin_key() -> None:
    async with gateway() as g:
        session = await g.open()
        for key in ("", "wrong", session.key):
            http = g.http(key)
            for path in ("/admin/events", f"/admin/sessions/{session.id}/events"):
                assert (await http.get(path)).status_code == 401
            response = await http.post("/admin/events", json={"session": session.id, "kind": "note"})
            assert response.status_code == 401
        assert kinds(await read_events(g)) == ["opened"]


async def test_failed_announcement_raises_client_error() -> None:
    async with gateway() as g, client(g) as connected:
        with pytest.raises(RequestRejected, match="kind"):
            await connected.announce("s", "turn", {})
        async with GatewayClient(g.root, "x" * 20) as stranger:
            with pytest.raises(Unauthorized):
                await stranger.announce("s", "note", {})
        async with GatewayClient("http://127.0.0.1:9", "x" * 20) as unreachable:
            with pytest.raises(GatewayUnreachable):
                await unreachable.announce("s", "note", {})
