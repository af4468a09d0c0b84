"""Test the admin API: sessions from open to delete, their traces and samples, sampling settings, events and the fence."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import kit
from tests.kit import Gated, Json, Running, calls, gateway, result, say, tokenizer, tool, until, user
from tests.speed import scaled
from turngate.errors import ConfigError
from turngate.gateway.events import Events
from turngate.store import outcomes
from turngate.store.outcomes import decode_outcome
from turngate.store.store import Store

HI = [user("Hi")]


# ── open, list, show ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_opened_session_has_its_own_key() -> None:
    async with gateway() as g:
        response = await g.admin.post("/admin/sessions", json={"metadata": {"task": 7}})
        opened = response.json()
        assert response.status_code == 201 and opened["status"] == "open"
        assert len(opened["id"]) == 32 and opened["id"] not in opened["api_key"]
        assert opened["config"]["metadata"] == {"task": 7}
        shown = await g.show(opened["id"])
        assert "api_key" not in shown  # it is only returned once
        other = await g.open()
        assert other.id != opened["id"] and other.key != opened["api_key"]


async def test_chosen_id_conflicts_when_reused() -> None:
    async with gateway() as g:
        assert (await g.open(id="task-7.a:1")).id == "task-7.a:1"
        response = await g.admin.post("/admin/sessions", json={"id": "task-7.a:1"})
        assert response.status_code == 409 and "task-7.a:1" in response.json()["error"]["message"]
        await g.seal("task-7.a:1")
        assert (await g.admin.post("/admin/sessions", json={"id": "task-7.a:1"})).status_code == 409


@pytest.mark.parametrize("invalid_id", ["", "a/b", "../x", "-a", "a b", "é", "x" * 129])
async def test_invalid_id_is_refused(invalid_id: str) -> None:
    async with gateway() as g:
        response = await g.admin.post("/admin/sessions", json={"id": invalid_id})
        assert response.status_code == 400 and response.json()["error"]["param"] == "id"


INVALID_SETTINGS: list[tuple[Json, str]] = [
    ({"modle": "m"}, "modle"),
    ({"limits": {"turn": 5}}, "turn"),
    ({"limits": {"turns": "five"}}, "limits.turns"),
    ({"policy": {"role": []}}, "role"),
    ({"policy": {"roles": ["boss"]}}, "policy.roles"),
    ({"sampling": {"temprature": 1}}, "temprature"),
    ({"sampling": {"temperature": "hot"}}, "temperature"),
    ({"mode": "guess"}, "mode"),
    ({"bias": "some"}, "bias"),
    ({"thinking": "maybe"}, "thinking"),
    ({"metadata": 5}, "metadata"),
]


async def test_invalid_setting_is_named() -> None:
    async with gateway() as g:
        for body, name in INVALID_SETTINGS:
            response = await g.admin.post("/admin/sessions", json=body)
            assert response.status_code == 400 and name in response.json()["error"]["message"], body
        for raw in (b"{", b"[]", b"\xff", b"5"):
            assert (await g.admin.post("/admin/sessions", content=raw)).status_code == 400
        assert (await g.admin.post("/admin/sessions", content=b" " * 1_100_000)).status_code == 413
        assert (await g.admin.get("/admin/sessions")).json()["sessions"] == []


async def test_unserved_model_is_refused() -> None:
    async with gateway(model="policy-1") as g:
        response = await g.admin.post("/admin/sessions", json={"model": "other"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "model"
        assert "policy-1" in response.json()["error"]["message"]
        assert (await g.admin.post("/admin/sessions", json={"model": "policy-1"})).status_code == 201


async def test_unserved_mode_is_refused() -> None:
    async with gateway() as g:
        response = await g.admin.post("/admin/sessions", json={"mode": "observe"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "mode"
        assert "exact" in response.json()["error"]["message"]


async def test_invalid_limits_are_refused() -> None:
    async with gateway() as g:
        for name in ("turns", "sampled_tokens", "context_tokens", "seconds"):
            response = await g.admin.post("/admin/sessions", json={"limits": {name: -1}})
            assert response.status_code == 400 and name in response.text, response.text
        response = await g.admin.post("/admin/sessions", json={"max_tokens": 0})
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens", response.text


async def test_session_list_order_paging_and_status_filter() -> None:
    async with gateway() as g:
        opened = [(await g.open(id=f"s{n}")).id for n in range(7)]
        await g.seal("s2")
        await g.cancel("s4")

        async def list_sessions(**query: Any) -> list[Json]:
            page: list[Json] = (await g.admin.get("/admin/sessions", params=query)).json()["sessions"]
            return page

        assert [s["id"] for s in await list_sessions()] == opened[::-1]
        first = await list_sessions(limit=3)
        second = await list_sessions(limit=3, before=first[-1]["key"])
        third = await list_sessions(limit=3, before=second[-1]["key"])
        assert [s["id"] for s in [*first, *second, *third]] == opened[::-1] and len(third) == 1
        assert await list_sessions(before=third[-1]["key"]) == []
        assert [s["id"] for s in await list_sessions(status="sealed")] == ["s2"]
        assert [s["id"] for s in await list_sessions(status="cancelled")] == ["s4"]
        assert [s["id"] for s in await list_sessions(status="open", limit=2)] == ["s6", "s5"]


async def test_session_list_reads_only_the_listed_outcomes_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a store with many sessions, few may have the status. The sessions between them must not cost anything."""
    decoded: list[bytes] = []
    threads: set[int] = set()

    def decode(stored: bytes) -> object:
        decoded.append(stored)
        threads.add(threading.get_ident())
        return decode_outcome(stored)

    async with gateway() as g:
        for n in range(5):
            await g.open(id=f"s{n}")
        for n in (1, 2, 3):
            await g.seal(f"s{n}")
            reply = await g.admin.put(f"/admin/sessions/s{n}/outcome", json={"kind": "graded", "reward": 1.0})
            assert reply.status_code == 200, reply.text
        monkeypatch.setattr(outcomes, "decode_outcome", decode)
        listed = (await g.admin.get("/admin/sessions", params={"status": "open"})).json()["sessions"]
        assert [one["id"] for one in listed] == ["s4", "s0"] and not decoded
        listed = (await g.admin.get("/admin/sessions", params={"status": "sealed"})).json()["sessions"]
        assert [one["outcome"]["reward"] for one in listed] == [1.0] * 3
        assert decoded and threading.get_ident() not in threads


@pytest.mark.parametrize("query", ["status=asleep", "limit=ten", "limit=-1", "before=x", "limit=²", f"before={2**70}"])
async def test_invalid_list_query_names_its_parameter(query: str) -> None:
    async with gateway() as g:
        response = await g.admin.get(f"/admin/sessions?{query}")
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == query.partition("=")[0]


async def test_session_shows_turns_tokens_and_forks() -> None:
    async with gateway([say("One."), say("Two.")], model="policy-1") as g:
        session = await g.open()
        reply = await g.ask(session.key, HI, model="policy-1")
        await g.ask(session.key, [user("Another thing entirely")], model="policy-1")
        shown = await g.show(session.id)
        assert shown["turns"] == 2 and shown["sampled_tokens"] == len(say("One.").ids) + len(say("Two.").ids)
        assert shown["tokens"] == sum(len(n["ids"]) for n in (await g.trace(session.id))["nodes"])
        assert sum(shown["roles"].values()) == 2 and len(shown["forks"]) == 2
        assert shown["in_flight"] == 0 and shown["last_used"] <= time.time() and reply.content


async def test_unknown_session_is_not_found() -> None:
    async with gateway() as g:
        for method, path in [
            ("GET", ""),
            ("GET", "/trace"),
            ("GET", "/samples"),
            ("GET", "/events"),
            ("POST", "/seal"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ]:
            response = await g.admin.request(method, f"/admin/sessions/nobody{path}")
            assert response.status_code == 404 and "nobody" in response.json()["error"]["message"]


async def test_list_does_not_mix_a_session_with_a_newer_one_of_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("x")]) as g:
        await g.open(id="same", metadata={"n": 1})
        await g.seal("same")
        views = g.app.session_views
        read = views.read

        async def replace_after_read(query: Any) -> Any:
            found = await read(query)
            await g.app.sessions.delete("same")
            await g.open(id="same", metadata={"n": 2})
            return found

        monkeypatch.setattr(views, "read", replace_after_read)
        [listed] = (await g.admin.get("/admin/sessions")).json()["sessions"]
        assert (listed["status"], listed["config"]["metadata"]) == ("sealed", {"n": 1})


# ── trace and samples ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_trace_has_every_field_of_turn() -> None:
    async with gateway([say("<think>\nHm.\n</think>\n\nOk." + calls(("read_file", {"path": "a"})))], model="m") as g:
        session = await g.open(metadata={"n": 1})
        reply = await g.ask(session.key, HI, tools=[tool()], temperature=0.7, seed=3)
        trace = await g.trace(session.id)
        assert (trace["session"], trace["status"], trace["config"]["metadata"]) == (session.id, "open", {"n": 1})
        context, turn = trace["nodes"]
        assert (context["kind"], context["parent"], context["cause"]) == ("context", None, None)
        assert context["messages"] == HI and context["ids"] == g.engine.received[0].prompt.tolist()
        assert trace["preambles"][context["preamble"]]["tools"] == [tool()]
        assert (turn["kind"], turn["parent"], turn["role"], turn["finish"]) == (
            "sampled",
            context["id"],
            "main",
            "tool_calls",
        )
        assert turn["message"]["content"] == reply.content and turn["message"]["reasoning"] == "Hm."
        assert turn["message"]["tool_calls"][0]["id"] == reply.calls[0].id
        assert turn["sampling"] == {"temperature": 0.7, "seed": 3} and turn["biases"] == []
        assert turn["version_start"] == turn["version_end"] == 0 and turn["capture"] == "tokens"
        assert turn["delivered"] and not turn["fault"] and turn["started"] <= turn["ended"]
        assert all(-5 < p < 0 for p in turn["logprobs"])


async def test_samples_are_the_same_before_and_after_sealing() -> None:
    async with gateway([say("One."), say("Two."), say("Side.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        await g.ask(session.key, [*HI, reply.message(), user("More")])
        before = await g.samples(session.id)
        await g.seal(session.id)
        assert await g.samples(session.id) == before and len(before) == 1


async def test_shared_tokens_are_trained_once() -> None:
    async with gateway([say("One."), say("Left."), say("Right.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        await g.ask(session.key, [*HI, reply.message(), user("Go left")])
        await g.ask(session.key, [*HI, reply.message(), user("Go right")])
        rows = await g.samples(session.id)
        assert len(rows) == 2 and rows[0]["ids"] != rows[1]["ids"]
        assert sum(sum(r["mask"]) for r in rows) == sum(len(t["ids"]) for t in await g.turns(session.id))
        assert {s["reason"] for r in rows for s in r["spans"] if not s["trained"]} == {"trained in another row"}


# ── pinned and biased sampling ──────────────────────────────────────────────────────────────────────────────────────

AGENT_SAMPLING: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.9,
    "presence_penalty": 1.0,
    "seed": 7,
    "extra_body": {"top_k": 20, "min_p": 0.1},
}


async def test_biased_sampling_is_ignored_by_default() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI, **AGENT_SAMPLING)
        sampling = g.engine.received[0].sampling
        assert (sampling.temperature, sampling.seed) == (0.3, 7)
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.presence_penalty) == (1.0, 0, 0.0, 0.0)
        assert (await g.turns(session.id))[0]["biases"] == []
        assert len(await g.samples(session.id)) == 1


async def test_recorded_bias_is_applied_and_not_trained() -> None:
    async with gateway([say("Ok.")] * 2) as g:
        session = await g.open(bias="record")
        await g.ask(session.key, HI, **AGENT_SAMPLING)
        sampling = g.engine.received[0].sampling
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.presence_penalty) == (0.9, 20, 0.1, 1.0)
        [turn] = await g.turns(session.id)
        assert set(turn["biases"]) == {"top_p", "top_k", "min_p", "presence_penalty"}
        assert turn["sampling"]["top_p"] == 0.9
        assert await g.samples(session.id) == []
        # A turn without biases is trained.
        await g.ask(session.key, [user("Another")])
        assert len(await g.samples(session.id)) == 1


async def test_session_sampling_overrides_agent() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open(sampling={"temperature": 1.0, "top_p": 0.95, "seed": 1})
        await g.ask(session.key, HI, **AGENT_SAMPLING)
        sampling = g.engine.received[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 0.95, 1)
        assert (await g.turns(session.id))[0]["biases"] == ["top_p"]  # pinned parameters can bias too
        assert await g.samples(session.id) == []


async def test_greedy_sampling_is_marked() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI, temperature=0)
        assert (await g.turns(session.id))[0]["biases"] == ["greedy"] and await g.samples(session.id) == []


async def test_session_template_arguments_override_agent() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open(template_kwargs={"enable_thinking": False})
        await g.ask(session.key, HI, extra_body={"chat_template_kwargs": {"enable_thinking": True, "x": 1}})
        [preamble] = (await g.trace(session.id))["preambles"].values()
        assert preamble["template_kwargs"] == {"enable_thinking": False, "x": 1}


# ── the end of a session ────────────────────────────────────────────────────────────────────────────────────────────


async def test_sealing_twice_is_idempotent() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        first = (await g.admin.post(f"/admin/sessions/{session.id}/seal", json={"stop": "done"})).json()
        again = (await g.admin.post(f"/admin/sessions/{session.id}/seal", json={"stop": "other"})).json()
        assert first["status"] == again["status"] == "sealed" and first["stop"] == again["stop"] == "done"
        assert first["closed"] == again["closed"] and again["turns"] == 1
        assert (await g.cancel(session.id))["status"] == "sealed"  # an ended session keeps its status


async def test_sealed_session_survives_restart(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        await g.seal(session.id)
        before = await g.trace(session.id), await g.samples(session.id), await g.show(session.id)
    async with gateway(data=tmp_path) as g:
        after = await g.trace(session.id), await g.samples(session.id), await g.show(session.id)
        assert after[:2] == before[:2] and after[2]["closed"] == before[2]["closed"]
        with pytest.raises(openai.ConflictError):
            await g.ask(session.key, HI)


async def test_live_session_continues_exactly_after_restart(tmp_path: Path) -> None:
    script = [say(calls(("read_file", {"path": "a"}))), say("Done.")]
    async with gateway(script, data=tmp_path) as g:
        session = await g.open(limits={"turns": 2}, sampling={"temperature": 0.5})
        first = await g.ask(session.key, HI, tools=[tool()])
        prompt = g.engine.received[0].prompt.tolist()
    async with gateway(script[1:], data=tmp_path) as g:
        history = [*HI, first.message(), result(first.calls[0], "A")]
        assert (await g.ask(session.key, history, tools=[tool()])).content == "Done."
        request = g.engine.received[0]
        assert request.prompt.tolist()[: len(prompt) + len(script[0].ids)] == [*prompt, *script[0].ids]
        assert request.sampling.temperature == 0.5
        assert len(await g.samples(session.id)) == 1
        assert "limit" in (await g.ask(session.key, [user("More")])).content  # earlier turns still count


@pytest.mark.needs("tokenizers")
async def test_other_tokenizer_does_not_mix_vocabularies(tmp_path: Path) -> None:
    """The stored ids have another meaning there, so the gateway refuses or renders again but never appends to them."""
    other = kit.real_tokenizer("qwen3")
    async with gateway([say("One.")], data=tmp_path) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
    history = [*HI, reply.message(), user("More")]
    try:
        async with gateway([say("Two.", folder=other)], data=tmp_path, tokenizer=str(other)) as g:
            await g.ask(session.key, history)
            prompt = kit.tokenizer(other).decode(g.engine.received[0].prompt.tolist())
            assert "<|im_start|>user\nHi<|im_end|>" in prompt and "More" in prompt
    except (ConfigError, openai.APIStatusError):
        pass


async def test_idle_sessions_are_sealed() -> None:
    idle_s = scaled(0.1)
    async with gateway(engine=Gated([say("Hello.")]), idle_s=idle_s) as g:
        idle, busy = await g.open(), await g.open()
        task = g.start(g.ask(busy.key, HI))
        await until(lambda: g.gated.waiting)
        await until(lambda: g.rows("SELECT status FROM sessions WHERE id=?", idle.id) == [("sealed",)])
        shown = await g.show(idle.id)
        assert (shown["status"], shown["stop"]) == ("sealed", "idle")
        await asyncio.sleep(1.25 * idle_s)
        assert (await g.show(busy.id))["status"] == "open"  # a call in flight counts as use
        g.gated.gate.set()
        assert (await task).content == "Hello."
        await until(lambda: g.rows("SELECT status FROM sessions WHERE id=?", busy.id) == [("sealed",)])


async def test_restored_session_expires_after_idle_time(tmp_path: Path) -> None:
    async with gateway(data=tmp_path) as g:
        session = await g.open()
    async with gateway(data=tmp_path, idle_s=scaled(0.15)) as g:
        assert (await g.show(session.id))["status"] == "open"
        await until(lambda: g.rows("SELECT status FROM sessions") == [("sealed",)])


async def test_damaged_session_does_not_stop_expiry_of_others(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        damaged, intact = await g.open(), await g.open()
        await g.ask(damaged.key, HI)
        await g.ask(intact.key, HI)
        with g.app.store._writing() as db:
            db.execute(
                "UPDATE nodes SET ids=zeroblob(8) WHERE session=(SELECT key FROM sessions WHERE id=?)", (damaged.id,)
            )
    async with gateway(data=tmp_path, idle_s=0.1) as g:
        await until(lambda: g.rows("SELECT status FROM sessions WHERE id=?", intact.id) == [("sealed",)])


async def test_damaged_trace_is_refused(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET logprobs=zeroblob(length(logprobs)) WHERE kind='sampled'")
    async with gateway([say("Hello.")], data=tmp_path) as g:
        for path in ("trace", "samples"):
            response = await g.admin.get(f"/admin/sessions/{session.id}/{path}")
            assert response.status_code == 503 and "damaged" in response.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError):
            await g.ask(session.key, HI)
        assert not g.engine.received
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).is_success, "it can be deleted"
        assert g.rows("SELECT count(*) FROM sessions") == g.rows("SELECT count(*) FROM nodes") == [(0,)]
        with pytest.raises(openai.AuthenticationError):
            await g.ask(session.key, HI)


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def follow(g: Running, path: str, **headers: str) -> AsyncGenerator[Json, None]:
    """Yield the events of the stream."""
    async with g.admin.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        seen: dict[str, str] = {}
        async for line in response.aiter_lines():
            field, _, value = line.partition(": ")
            if line and field:
                seen[field] = value
            elif seen:
                event = json.loads(seen["data"])
                assert (seen["id"], seen["event"]) == (str(event["seq"]), event["kind"])
                yield event
                seen = {}


@pytest.mark.usefixtures("no_keep_alive")
async def test_session_events_are_replayed_and_live() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open(limits={"turns": 1})
        await g.open()  # events of other sessions are not sent
        events = follow(g, f"/admin/sessions/{session.id}/events")
        assert (await anext(events))["kind"] == "opened"
        waiting = g.start(anext(events))
        await g.ask(session.key, HI)
        turn = await asyncio.wait_for(waiting, scaled(5))
        assert (turn["kind"], turn["session"], turn["data"]["finish"]) == ("turn", session.id, "stop")
        assert turn["data"]["sampled_tokens"] == len(say("Hello.").ids)
        await g.ask(session.key, HI)
        assert (await anext(events))["data"] == {"limit": "turns"}
        await g.seal(session.id)
        sealed = await anext(events)
        assert (sealed["kind"], sealed["data"]["turns"]) == ("sealed", 1)
        await events.aclose()


async def test_follower_resumes_from_cursor() -> None:
    async with gateway() as g:
        sessions = [await g.open() for _ in range(5)]
        events = follow(g, "/admin/events")
        first = [await anext(events) for _ in range(3)]
        await events.aclose()
        for again in (
            follow(g, "/admin/events", **{"last-event-id": str(first[-1]["seq"])}),
            follow(g, f"/admin/events?after={first[-1]['seq']}"),
        ):
            rest = [await anext(again) for _ in range(2)]
            assert [e["session"] for e in rest] == [s.id for s in sessions[3:]]
            await again.aclose()


@pytest.mark.usefixtures("no_keep_alive")
async def test_fence_changes_are_events() -> None:
    async with gateway() as g:
        events = follow(g, "/admin/events")
        waiting = g.start(anext(events))
        await g.pause()
        assert (await asyncio.wait_for(waiting, scaled(5)))["data"] == {"paused": True, "mode": "hold"}
        await g.resume(3)
        assert (await anext(events))["data"] == {"paused": False, "version": 3}
        await events.aclose()


@pytest.mark.parametrize("after", ["x", "-1", "²"])
async def test_invalid_cursor_is_refused(after: str) -> None:
    async with gateway() as g:
        assert (await g.admin.get("/admin/events", params={"after": after})).status_code == 400


@pytest.mark.usefixtures("no_keep_alive")
async def test_slow_follower_misses_no_event(tmp_path: Path) -> None:
    """Events added while the follower is busy are delivered next."""
    store = Store(tmp_path)
    events = Events(store)
    events.add("s", "turn", {"n": 1})
    events.add("s", "turn", {"n": 2})
    following = events.follow("s")
    received = await anext(following)
    events.add("s", "turn", {"n": 3})
    received += await asyncio.wait_for(anext(following), scaled(5))
    assert [event.data["n"] for event in received] == [1, 2, 3]
    await following.aclose()
    store.close()


# ── the fence ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_calls_wait_at_fence_and_use_new_version() -> None:
    async with gateway([say("Old."), say("New."), say("New.")], alive_s=0.02) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        assert await g.pause() == {"version": 0, "paused": True, "in_flight": 0}
        chunks: list[Any] = []

        async def read() -> None:
            stream = await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=True)
            async for chunk in stream:
                chunks.append(chunk)

        streamed, whole = g.start(read()), g.start(g.ask(session.key, [user("Two")]))
        await until(lambda: len(chunks) >= 3)
        assert len(g.engine.received) == 1 and not whole.done()
        assert (await g.admin.get("/admin/fence")).json() == {"version": 0, "paused": True, "in_flight": 0}
        assert await g.resume(7) == {"version": 7, "paused": False, "in_flight": 0}
        await streamed
        assert (await whole).content == "New."
        assert [(t["version_start"], t["version_end"]) for t in await g.turns(session.id)] == [(0, 0), (7, 7), (7, 7)]
        assert [r.cache_salt for r in g.engine.received] == ["v0", "v7", "v7"]
        spans = [s for row in await g.samples(session.id, keep_empty=True) for s in row["spans"]]
        assert {s["version_end"] for s in spans} == {0, 7}


async def test_call_across_weight_update_records_both_versions() -> None:
    async with gateway(engine=Gated([say("One two three.")], tokens=2)) as g:
        session = await g.open()
        task = g.start(g.ask(session.key, HI, "async stream"))
        await until(lambda: g.gated.waiting)
        await g.pause("hold")
        await g.resume(1)
        g.gated.gate.set()
        await task
        [turn] = await g.turns(session.id)
        assert (turn["version_start"], turn["version_end"]) == (0, 1)


async def test_drain_waits_for_running_calls_and_holds_new_ones() -> None:
    async with gateway(engine=Gated([say("One two three.")] * 2, tokens=1)) as g:
        session = await g.open()
        running = g.start(g.ask(session.key, HI, "async stream"))
        await until(lambda: g.gated.waiting == 1)
        draining = g.start(g.pause("drain"))
        await until(lambda: g.app.fence.paused)
        late = g.start(g.ask(session.key, [user("Two")]))
        await asyncio.sleep(0.05)
        assert not draining.done() and len(g.engine.received) == 1
        g.gated.gate.set()
        assert (await asyncio.wait_for(draining, scaled(5)))["in_flight"] == 0
        assert (await running).content and not late.done()
        await g.resume(1)
        await late
        assert [t["version_start"] for t in await g.turns(session.id)] == [0, 1]


async def test_policy_version_cannot_decrease() -> None:
    async with gateway() as g:
        await g.resume(5)
        response = await g.admin.post("/admin/fence/resume", json={"version": 4})
        assert response.status_code == 409 and response.json()["error"]["param"] == "version"
        assert (await g.resume())["version"] == 5 and (await g.resume(5))["version"] == 5
        assert (await g.admin.post("/admin/fence/pause", json={"mode": "stop"})).status_code == 400
        assert (await g.admin.post("/admin/fence/resume", json={"version": "6"})).status_code == 400


async def test_refused_resume_keeps_pause() -> None:
    async with gateway() as g:
        await g.resume(5)
        await g.pause()
        await g.admin.post("/admin/fence/resume", json={"version": 4})
        assert (await g.admin.get("/admin/fence")).json()["paused"]


async def test_policy_version_survives_restart(tmp_path: Path) -> None:
    async with gateway(data=tmp_path) as g:
        await g.pause()
        await g.resume(9)
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        assert (await g.turns(session.id))[0]["version_start"] == 9
        assert (await g.admin.post("/admin/fence/resume", json={"version": 8})).status_code == 409


async def test_recorded_ids_decode_to_conversation() -> None:
    async with gateway([say("Größe 👩‍👩‍👧.")]) as g:
        session = await g.open()
        await g.ask(session.key, "é 汉字")
        [row] = await g.samples(session.id)
        text = tokenizer().decode(row["ids"])
        assert text == "<|im_start|>user\né 汉字<|im_end|>\n<|im_start|>assistant\nGröße 👩‍👩‍👧.<|im_end|>"
