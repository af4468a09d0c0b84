"""Test host tools: agents call them through the gateway with their own key, and the host sees and may answer the calls."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit import OpenSession, Running, gateway, say, until
from tests.speed import scaled
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.gateway import host_tools
from turngate.server.host_tools import MAX_ARGUMENTS
from turngate.trace.tool_schema import MAX_WAIT_S

ANSWER = {
    "name": "answer",
    "description": "Hand in the answer.",
    "schema": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "sure": {"type": "object", "properties": {"p": {"type": "number"}}}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
ASK = {"name": "ask", "description": "Ask a person.", "schema": {"type": "object"}, "wait_s": MAX_WAIT_S}


async def call(
    g: Running, session: OpenSession, arguments: Any, tool: str = "answer", **headers: str
) -> httpx.Response:
    return await g.http(session.key).post(f"/v1/tools/{tool}", json=arguments, headers=headers)


async def calls(g: Running, session: OpenSession) -> list[Any]:
    response = await g.admin.get(f"/admin/sessions/{session.id}/tools")
    assert response.status_code == 200
    found: list[Any] = response.json()["calls"]
    return found


async def answer(g: Running, session: OpenSession, number: int, reply: Any) -> httpx.Response:
    return await g.admin.post(f"/admin/sessions/{session.id}/tools/{number}/answer", json={"reply": reply})


def pending_calls(g: Running, session: OpenSession) -> Any:
    return g.live(session.id).pending_tool_calls


def kinds(g: Running) -> list[str]:
    return [event.kind for event in g.app.events.page()]


# ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_calls_are_recorded_in_order_and_answered(tmp_path: Path) -> None:
    started = time.time()
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open(tools=[ANSWER, {**ANSWER, "name": "submit", "reply": {"thanks": [1]}}])
        assert (await call(g, session, {"text": "first"})).json() == {"ok": True}
        assert (await call(g, session, {"text": "second", "sure": {"p": 0.5}}, "submit")).json() == {"thanks": [1]}
        await g.ask(session.key, "Hi")
        await g.seal(session.id)
    async with gateway(data=tmp_path) as g:
        found = await calls(g, session)
        assert [(c["call"], c["tool"], c["arguments"], c["reply"], c["answered_by"], c["waiting"]) for c in found] == [
            (1, "answer", {"text": "first"}, {"ok": True}, "tool", False),
            (2, "submit", {"text": "second", "sure": {"p": 0.5}}, {"thanks": [1]}, "tool", False),
        ]
        assert all(started <= c["time"] <= time.time() for c in found)
        assert kinds(g) == ["opened", "tool", "tool", "turn", "sealed"]
        await g.admin.delete(f"/admin/sessions/{session.id}")
        assert g.rows("SELECT count(*) FROM tool_calls") == [(0,)]


@pytest.mark.parametrize("base", ["", "/s/{id}", "/rollout/{id}"])
async def test_every_path_calls_and_lists_tools(base: str) -> None:
    async with gateway() as g:
        session, other = await g.open(tools=[ANSWER]), await g.open(tools=[ASK])
        path = base.format(id=session.id) + "/v1/tools"
        http = g.http(session.key)
        listed = (await http.get(path)).json()
        assert listed == {"tools": [{k: ANSWER[k] for k in ("name", "description", "schema")}]}
        answered = await http.post(f"{path}/answer", json={"text": "x"})
        assert (answered.status_code, answered.json()) == (200, {"ok": True})
        assert answered.headers["x-turngate"] == "1"
        for key in ("", "wrong", other.key if base else "tg-0000"):
            stranger = g.http(key)
            assert (await stranger.get(path)).status_code == 401
            assert (await stranger.post(f"{path}/answer", json={"text": "x"})).status_code == 401
        assert len(await calls(g, session)) == 1 and await calls(g, other) == []


async def test_lists_of_tools_and_models_do_not_load_the_trace(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open(tools=[ANSWER], model="m")
        await g.ask(session.key, "Hi")
    async with gateway(data=tmp_path) as g:
        for base in ("", f"/s/{session.id}"):
            listed = (await g.http(session.key).get(f"{base}/v1/tools")).json()
            assert [tool["name"] for tool in listed["tools"]] == ["answer"]
            models = (await g.http(session.key).get(f"{base}/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["m"]
        assert g.app.sessions.find_live(session.id) is None


async def test_model_call_by_rollout_path() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        client = g.client(session.key, f"{g.root}/rollout/{session.id}/v1")
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        assert reply.choices[0].message.content == "Hello."
        refused = await g.http().post(f"/rollout/{session.id}/v1/chat/completions", json={"model": "m", "messages": []})
        assert refused.status_code == 401


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({}, "text"),
        ({"text": 1}, "text"),
        ({"text": "x", "sure": {"p": "y"}}, "sure.p"),
        ({"text": "x", "txet": 1}, None),
        ([], None),
        ("x", None),
        ({"text": "x" * MAX_ARGUMENTS}, None),
    ],
)
async def test_invalid_arguments_are_named(arguments: Any, param: str | None) -> None:
    async with gateway() as g:
        session = await g.open(tools=[ANSWER])
        response = await call(g, session, arguments)
        big = len(str(arguments)) > MAX_ARGUMENTS
        assert response.status_code == (413 if big else 400)
        assert response.json()["error"]["param"] == param
        if param:
            assert response.json()["error"]["message"].startswith(f"{param}: ")
        assert len(response.text) < 1000
        assert await calls(g, session) == []


async def test_invalid_json_and_deep_nesting_are_refused() -> None:
    async with gateway() as g:
        session = await g.open(tools=[ASK | {"wait_s": None}])
        for body in (b"{", b"\xff", b'{"a":' * 20000 + b"1" + b"}" * 20000):
            response = await g.http(session.key).post("/v1/tools/ask", content=body)
            assert response.status_code in (400, 413), body[:10]
        assert (await g.http(session.key).post("/v1/tools/ask")).json() == {"ok": True}  # an empty body is allowed


async def test_unknown_tools_and_ended_sessions() -> None:
    async with gateway() as g:
        session, without_tools = await g.open(tools=[ANSWER, ASK]), await g.open()
        unknown = await call(g, session, {}, "reward")
        assert unknown.status_code == 404 and "answer, ask" in unknown.json()["error"]["message"]
        assert "has no tools" in (await call(g, without_tools, {}, "answer")).json()["error"]["message"]
        assert (await g.http(without_tools.key).get("/v1/tools")).json() == {"tools": []}
        await g.seal(session.id)
        ended = await call(g, session, {"text": "x"})
        assert ended.status_code == 409 and "sealed" in ended.json()["error"]["message"]
        for path in (f"/admin/sessions/{session.id}/tools", f"/admin/sessions/{session.id}/tools/1/answer"):
            for key in ("", session.key):
                response = await g.http(key).request("POST" if "answer" in path else "GET", path, json={"reply": 1})
                assert response.status_code == 401
        assert (await g.admin.get("/admin/sessions/never/tools")).status_code == 404


async def test_number_of_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tools, "MAX_CALLS", 3)
    async with gateway() as g:
        session, other = await g.open(tools=[ANSWER]), await g.open(tools=[ANSWER])
        for n in range(3):
            assert (await call(g, session, {"text": str(n)})).status_code == 200
        refused = await call(g, session, {"text": "4"})
        assert refused.status_code == 409 and "3 tool calls" in refused.json()["error"]["message"]
        assert (await call(g, other, {"text": "1"})).status_code == 200
        assert len(await calls(g, session)) == 3


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**ANSWER, "name": "Answer"}], "tools[0].name"),
        ([{**ANSWER, "name": "answer\n"}], "tools[0].name"),
        ([{**ANSWER, "name": "a/b"}], "tools[0].name"),
        ([ASK, ANSWER, ANSWER], "tools[2].name"),
        ([{**ANSWER, "schema": {"type": "string"}}], "tools[0].schema"),
        ([{**ANSWER, "schema": {"type": "object", "properties": {"a": {"type": "strnig"}}}}], "tools[0].schema"),
        ([{"name": "answer", "schema": {"type": "object"}}], "tools[0].description"),
        ([{**ASK, "wait_s": 0}], "tools[0].wait_s"),
        ([{**ASK, "wait_s": 1e9}], "tools[0].wait_s"),
        ([{**ASK, "name": f"a{n}"} for n in range(65)], "tools"),
        ([{**ASK, "score": 1}], "tools[0].score"),
        ([{**ASK, "reward": 1e31}], "tools[0].reward"),
    ],
)
async def test_invalid_tools_are_refused_at_open(tools: Any, param: str) -> None:
    async with gateway() as g:
        response = await g.admin.post("/admin/sessions", json={"tools": tools})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(param)
        assert g.rows("SELECT count(*) FROM sessions") == [(0,)]


async def test_schema_references_are_not_fetched() -> None:
    fetched = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetched.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/schema"
    async with server, gateway() as g:
        session = await g.open(tools=[{**ANSWER, "schema": {"type": "object", "$ref": url}}])
        assert (await call(g, session, {"text": "x"})).status_code == 400
        await asyncio.sleep(0.05)
    assert fetched == []


async def test_repeated_call_with_same_key_is_recorded_once() -> None:
    """The relay in a sandbox repeats an unanswered call with the same idempotency key."""
    async with gateway() as g:
        session = await g.open(tools=[ANSWER])
        for _ in range(2):
            headers = {"idempotency-key": "m1"}
            assert (await call(g, session, {"text": "x"}, **headers)).json() == {"ok": True}
        other = await call(g, session, {"text": "y"}, **headers)
        assert other.status_code == 409 and other.json()["error"]["param"] == "Idempotency-Key"
        await call(g, session, {"text": "x"})
        assert len(await calls(g, session)) == 2


# ── answers of the host ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_host_answers_waiting_calls() -> None:
    async with gateway() as g, GatewayClient(g.root, g.app.admin_key) as host:
        session = await g.open(tools=[ASK])
        waiting = [g.start(call(g, session, {"n": n}, "ask")) for n in range(2)]
        await until(lambda: len(pending_calls(g, session)) == 2)
        for tool_call in await host.tool_calls(session.id):
            assert tool_call.waiting and tool_call.reply is None
            done = await host.answer_tool(session.id, tool_call.call, {"you asked": tool_call.arguments["n"]})
            assert done.answered_by == "host"
        assert [(await w).json() for w in waiting] == [{"you asked": 0}, {"you asked": 1}]
        assert not any(tool_call.waiting for tool_call in await host.tool_calls(session.id))
        assert kinds(g) == ["opened", "tool", "tool", "answered", "answered"]
        with pytest.raises(RequestRejected, match="answered") as late:
            await host.answer_tool(session.id, 1, {})
        assert late.value.answered == 409
        with pytest.raises(RequestRejected) as unknown:
            await host.answer_tool(session.id, 9, {})
        assert unknown.value.answered == 404


async def test_client_lists_all_pages_of_calls() -> None:
    async with gateway() as g, GatewayClient(g.root, g.app.admin_key) as host:
        session = await g.open(tools=[ANSWER])
        for n in range(203):
            await g.app.host_tools.call(g.live(session.id), "answer", b'{"text": "%d"}' % n)
        assert [c.arguments["text"] for c in await host.tool_calls(session.id)] == [str(n) for n in range(203)]
        assert len(await calls(g, session)) == 100


async def test_unanswered_call_gets_default_reply() -> None:
    async with gateway() as g:
        session = await g.open(
            tools=[{**ASK, "wait_s": 0.1}, {**ASK, "name": "ask_2", "wait_s": 0.1, "reply": "go on"}]
        )
        started = time.monotonic()
        assert (await call(g, session, {}, "ask")).json() == {"ok": True, "answered": False}
        assert (await call(g, session, {}, "ask_2")).json() == "go on"
        assert time.monotonic() - started >= 0.2
        late = await answer(g, session, 1, "too late")
        assert late.status_code == 409 and "already answered with the default reply" in late.json()["error"]["message"]
        assert [c["answered_by"] for c in await calls(g, session)] == ["time", "time"]
        limited = await g.open(tools=[ASK], limits={"seconds": scaled(0.1)})
        assert (await asyncio.wait_for(call(g, limited, {}, "ask"), scaled(15))).json() == {
            "ok": True,
            "answered": False,
        }


async def test_ending_session_ends_waiting_calls() -> None:
    async with gateway() as g:
        for end in ("seal", "cancel", "delete"):
            session = await g.open(tools=[ASK])
            waiting = g.start(call(g, session, {}, "ask"))
            await until(lambda s=session: pending_calls(g, s))  # type: ignore[misc]
            if end == "delete":
                await g.admin.delete(f"/admin/sessions/{session.id}")
            else:
                await g.admin.post(f"/admin/sessions/{session.id}/{end}")
            response = await asyncio.wait_for(waiting, scaled(15))
            assert response.status_code == 409
            assert {"seal": "sealed"}.get(end, "cancelled") in response.json()["error"]["message"]
            if end != "delete":
                assert (await answer(g, session, 1, "late")).status_code == 409
        assert "answered" not in kinds(g)


async def test_waiting_call_resumes_after_restart(tmp_path: Path) -> None:
    async with gateway(data=tmp_path) as g:
        session = await g.open(tools=[ASK])
        waiting = g.start(call(g, session, {"q": 1}, "ask", **{"idempotency-key": "m"}))
        await until(lambda: pending_calls(g, session))
        await g.app.sessions.abort_all_calls()
        response = await asyncio.wait_for(waiting, scaled(15))
        assert response.status_code == 503 and "retry" in response.json()["error"]["message"]
    async with gateway(data=tmp_path) as g:
        assert (await answer(g, session, 1, "x")).status_code == 409  # no call is waiting
        waiting = g.start(call(g, session, {"q": 1}, "ask", **{"idempotency-key": "m"}))
        await until(lambda: pending_calls(g, session))
        assert (await answer(g, session, 1, "here")).status_code == 200
        assert (await waiting).json() == "here" and len(await calls(g, session)) == 1


async def test_disconnected_call_stops_waiting_unless_repeated() -> None:
    async with gateway() as g:
        session = await g.open(tools=[ASK])
        first, second = (g.start(call(g, session, {}, "ask", **{"idempotency-key": "m"})) for _ in range(2))
        await until(lambda: sum(g.app.host_tools._waiting.values()) == 2)
        first.cancel()
        await until(lambda: sum(g.app.host_tools._waiting.values()) == 1)
        assert (await answer(g, session, 1, "for the second")).status_code == 200
        assert (await second).json() == "for the second"
        gone = g.start(call(g, session, {}, "ask"))
        await until(lambda: pending_calls(g, session))
        gone.cancel()
        await until(lambda: not pending_calls(g, session))
        late = await answer(g, session, 2, "x")
        assert late.status_code == 409 and "is no longer waiting" in late.json()["error"]["message"]


async def test_waiting_call_is_not_a_turn_and_prevents_expiry() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open(tools=[ASK], limits={"turns": 1})
        waiting = g.start(call(g, session, {}, "ask"))
        await until(lambda: pending_calls(g, session))
        assert (await g.ask(session.key, "Hi")).content == "Hello."  # its only turn
        much_later = time.time() + 10**6
        assert g.app.sessions.find_idle(much_later, 24 * 3600) == []
        await answer(g, session, 1, "here")
        assert (await waiting).json() == "here"
        assert g.app.sessions.find_idle(much_later, 24 * 3600) == [session.id]
