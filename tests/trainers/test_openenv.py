"""Tests for the OpenEnv session API and training traces.

`test_openenv_real.py` checks them with the `openenv` package.
"""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from tests.kit import Gated, Json, Running, calls, gateway, read_reply, result, say, tool, until, user
from turngate.common.sharding import new_secret, slot_from_head, slot_of
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import Conflict
from turngate.views.training_trace import training_trace


async def open_session(g: Running, **wanted: Json) -> Json:
    response = await g.admin.post("/sessions", json=wanted)
    assert response.status_code == 200, response.text
    return response.json()


async def ask(g: Running, key: str, messages: Json, **request: Any) -> Any:
    return read_reply(await g.client(key).chat.completions.create(model="m", messages=messages, **request))


async def get_view(g: Running, name: str, what: str = "rollout", **query: Any) -> Json:
    response = await g.admin.get(f"/sessions/{name}/{what}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def run_tool_turns(g: Running, key: str) -> None:
    """Run two turns with a tool call."""
    history: list[Json] = [user("Fix it")]
    tools = [tool()]
    first = await ask(g, key, history, tools=tools)
    history += [first.message(), result(first.calls[0], "the file")]
    await ask(g, key, history, tools=tools)


WORK = [say(calls(("read_file", {"path": "a"}))), say("Done.")]


# ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_session_lifecycle_by_session_id() -> None:
    async with gateway(WORK) as g:
        session = await open_session(g, purpose="train", metadata={"task": "t"}, sampling={"temperature": 0.7})
        assert session["capture_level"] == "tokens" and session["rollout_type"] == "train"
        await run_tool_turns(g, session["session_id"])
        status = (await g.admin.get(f"/sessions/{session['session_id']}")).json()
        assert (status["n_turns"], status["n_roots"], status["n_forks"], status["n_discarded"]) == (2, 1, 0, 0)
        document = await get_view(g, session["session_id"])
        assert document["trainable"] and document["metadata"] == {"task": "t"}
        [listed] = (await g.admin.get("/sessions")).json()["sessions"]
        assert listed["session_id"] == session["id"] and listed["turns"] == 2 and listed["task"] == "t"
        assert g.engine.received[0].sampling.temperature == 0.7
        assert (await g.admin.delete(f"/sessions/{session['session_id']}")).json() == {"deleted": True}
        assert (await g.admin.delete(f"/sessions/{session['session_id']}")).json() == {"deleted": False}
        assert (await g.admin.get(f"/sessions/{session['session_id']}")).status_code == 404


async def test_list_counts_only_its_own_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.server.compat.openenv._PAGE", 3)
    async with gateway(WORK) as g:
        old = [(await open_session(g))["id"] for _ in range(2)]
        others = [(await g.open()).id for _ in range(4)]

        async def list_ids(**query: Json) -> list[str]:
            listed = (await g.admin.get("/sessions", params=query)).json()["sessions"]
            return [row["session_id"] for row in listed]

        assert len(others) == 4 and await list_ids(limit=1) == old[1:]
        assert await list_ids() == [old[1], old[0]]
        new = (await open_session(g))["id"]
        assert await list_ids(limit=2) == [new, old[1]]
        assert await list_ids(limit=3) == [new, old[1], old[0]]
        monkeypatch.setattr("turngate.server.compat.openenv._MAX_READ", 6)  # of 7 sessions
        page = (await g.admin.get("/sessions")).json()
        assert [row["session_id"] for row in page["sessions"]] == [new, old[1]]
        rest = (await g.admin.get("/sessions", params={"before": page["before"]})).json()
        assert [row["session_id"] for row in rest["sessions"]] == [old[0]] and rest["before"] is None


async def test_public_id_is_not_a_key() -> None:
    async with gateway(WORK) as g:
        session = await open_session(g, session_id="rollout-1")
        assert session["id"] == "rollout-1" and session["session_id"] != "rollout-1"
        with pytest.raises(openai.AuthenticationError):
            await ask(g, "rollout-1", [user("Hi")])
        await ask(g, session["session_id"], [user("Hi")])
        assert (await get_view(g, "rollout-1"))["stats"]["n_turns"] == 1
        assert (await g.admin.post("/sessions", json={"session_id": "rollout-1"})).status_code == 409


async def test_session_secret_has_no_admin_access() -> None:
    async with gateway(WORK) as g:
        session = await open_session(g)
        agent = g.http(session["session_id"])
        for method, path in (
            ("GET", "/sessions"),
            ("POST", "/sessions"),
            ("GET", f"/sessions/{session['id']}/rollout"),
        ):
            assert (await agent.request(method, path)).status_code == 401


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"llm_url": "http://somewhere"}, "llm_url"),
        ({"api_key": "k"}, "api_key"),
        ({"purpose": "fun"}, "purpose"),
        ({"max_model_calls": -1}, "max_model_calls"),
        ({"max_model_calls": 10**30}, "max_model_calls"),
        ({"purpose": "eval", "eval_sampling": {"top_k": 1e300}}, "eval_sampling.top_k"),
        ({"purpose": "eval", "eval_sampling": {"top_k": -2}}, "eval_sampling.top_k"),
        ({"purpose": "eval", "eval_sampling": {"top_k": 2.5}}, "eval_sampling.top_k"),
        ({"sampling": {"top_p": 1.0}}, "temperature"),
        ({"sampling": {"temperature": 0}}, "temperature"),
        ({"sampling": {"temperature": 1.0, "top_p": 0.9}}, "top_p"),
        ({"sampling": {"temperature": 1.0, "beams": 3}}, "beams"),
        ({"eval_sampling": {"top_p": 0.9}}, "eval_sampling"),
        ({"purpose": "eval", "sampling": {"temperature": 1.0}}, "sampling"),
        ({"session_id": "a b"}, "id"),
    ],
)
async def test_invalid_session_request_is_rejected(wanted: Json, named: str) -> None:
    async with gateway() as g:
        response = await g.admin.post("/sessions", json=wanted)
        assert response.status_code == 400 and named in response.json()["error"]["message"]


async def test_openenv_neutral_sampling_is_unbiased() -> None:
    async with gateway(WORK) as g:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        session = await open_session(g, sampling=sampling, auth_header="Authorization")
        await ask(g, session["session_id"], [user("Hi")])
        assert not g.engine.received[0].sampling.biases()


async def test_call_budget_ends_with_message() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await open_session(g, max_model_calls=1)
        await ask(g, session["session_id"], [user("Hi")])
        last = await ask(
            g, session["session_id"], [user("Hi"), {"role": "assistant", "content": "One."}, user("Go on")]
        )
        assert "limit" in last.content
        document = await get_view(g, session["session_id"])
        assert document["stats"]["n_turns"] == 1 and document["budget_stop_count"] == 1


async def test_eval_session_has_no_trained_tokens() -> None:
    async with gateway(WORK) as g:
        session = await open_session(g, purpose="eval", eval_sampling={"temperature": 0.3, "top_p": 0.9})
        await run_tool_turns(g, session["session_id"])
        document = await get_view(g, session["session_id"], include_messages=True)
        assert document["rollout_type"] == "eval" and not document["trainable"] and document["sequences"]
        assert not any(m for row in document["sequences"] for m in row["loss_mask"])
        assert document["turns"][0]["request_messages"] == [user("Fix it")]
        response = await g.admin.get(f"/sessions/{session['session_id']}/trace_entries")
        assert response.status_code == 409
        assert g.engine.received[0].sampling.top_p == 0.9


async def test_observed_endpoint_allows_only_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("Hello.")]) as endpoint:
        inner = await endpoint.open()
        monkeypatch.setenv("KEY_OF_THE_ENDPOINT", inner.key)
        relayed = {"engine_url": [endpoint.base_url], "engine_key_env": "KEY_OF_THE_ENDPOINT", "capture": "text"}
        async with gateway(observe="openai", **relayed) as g:
            refused = await g.admin.post("/sessions", json={"purpose": "train"})
            assert refused.status_code == 400 and "exact" in refused.text
            session = await open_session(g)
            assert (session["capture_level"], session["rollout_type"]) == ("text", "eval")
            await ask(g, session["session_id"], [user("Hi")])
            document = await get_view(g, session["session_id"], include_messages=True)
            assert document["turns"][0]["response_message"]["content"] == "Hello." and not document["trainable"]
            assert (await g.admin.get(f"/sessions/{session['id']}/trace_entries")).status_code == 409


# ── training traces ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_log_probability_rounded_above_zero_is_trained_everywhere() -> None:
    """bfloat16 may raise a log-probability slightly above 0. OpenEnv rejects values above 0."""
    turn = say("Done.")
    async with gateway([msgspec.structs.replace(turn, logprobs=[5e-4, *[-0.5] * (len(turn.ids) - 1)])]) as g:
        session = await open_session(g)
        await ask(g, session["session_id"], [user("Hi")])
        [row] = await g.samples(session["id"])
        assert sum(row["mask"]) == len(turn.ids) and max(lp for lp in row["logprobs"] if lp) == pytest.approx(5e-4)
        [traced] = training_trace(await g.trace(session["id"]))["turns"]
        assert traced["loss_mask"].count(1) == len(turn.ids) and traced["per_token_logps"][0] == 0


async def test_training_trace_equals_rows() -> None:
    async with gateway(WORK) as g:
        session = await open_session(g)
        await run_tool_turns(g, session["session_id"])
        [row] = await g.samples(session["id"])
        trace = training_trace(await g.trace(session["id"]))
        turns = trace["turns"]
        assert [t["loss_mask"][-1] for t in turns] == [1, 1] and trace["schema_version"] == 1
        last = turns[-1]
        assert last["prompt_token_ids"] + last["completion_token_ids"] == row["ids"]
        assert [lp for t in turns for lp in t["per_token_logps"]] == [lp for lp in row["logprobs"] if lp is not None]
        assert sum(sum(t["loss_mask"]) for t in turns) == sum(row["mask"])
        assert last["request"]["messages"][1]["tool_calls"] and last["request"]["tools"][0]["type"] == "function"
        assert last["response"]["choices"][0] == {
            "message": {"role": "assistant", "content": "Done."},
            "finish_reason": "stop",
        }
        [sequence] = (await get_view(g, session["id"]))["sequences"]
        assert sequence["input_ids"] == row["ids"] and sequence["loss_mask"] == [int(m) for m in row["mask"]]
        entries = (await get_view(g, session["id"], "trace_entries"))["entries"]
        assert [e["metadata"].pop("node_id") for e in entries] == [t.pop("node_id") for t in turns] and entries == turns


async def test_shared_token_is_trained_once() -> None:
    async with gateway([say("A."), say("B."), say("C.")]) as g:
        session = await open_session(g)
        key = session["session_id"]
        first = await ask(g, key, [user("Hi")])
        for more in ("this", "that"):
            await ask(g, key, [user("Hi"), first.message(), user(more)])
        view = await g.trace(session["id"])
        trained = [t for t in training_trace(view)["turns"] if any(t["loss_mask"])]
        assert len({t["node_id"] for t in trained}) == len(trained)
        document = await get_view(g, session["id"], include_discarded=True)
        assert document["stats"]["n_leaves"] == 2 and document["stats"]["n_forks"] == 1
        tokens = [(n, t) for row in document["sequences"] for n, t in _trained_tokens(row, view)]
        assert len(tokens) == len(set(tokens)) == document["stats"]["n_trainable_tokens"]


def _trained_tokens(sequence: Json, view: Json) -> list[tuple[str, int]]:
    """Each trained token of a sequence as (node, offset)."""
    sizes = {str(node["id"]): len(node["ids"]) for node in view["nodes"]}
    mask, end = sequence["loss_mask"], len(sequence["loss_mask"])
    found: list[tuple[str, int]] = []
    parents = {str(n["id"]): str(n["parent"]) for n in view["nodes"]}
    for node in reversed(sequence["node_ids"]):
        start = end - sizes[node]
        found += [(node, at) for at in range(sizes[node]) if mask[start + at]]
        end = start - sizes[parents[node]]
    assert end == 0
    return found


async def test_turn_without_logprobs_is_not_trained() -> None:
    ids = say("Hello.").ids
    async with gateway([ScriptedTurn(ids, null_logprobs=True), say("Bye.")]) as g:
        session = await open_session(g)
        first = await ask(g, session["session_id"], [user("Hi")])
        await ask(g, session["session_id"], [user("Hi"), first.message(), user("Bye")])
        without, scored = training_trace(await g.trace(session["id"]))["turns"]
        assert without["completion_token_ids"] == without["per_token_logps"] == []
        assert without["metadata"]["sampled_token_ids"] == list(ids) and "log-prob" in without["metadata"]["untrained"]
        assert not any(without["loss_mask"]) and len(without["loss_mask"]) == len(without["prompt_token_ids"])
        # It is still context for the next turn.
        assert scored["prompt_token_ids"][: len(without["prompt_token_ids"]) + len(ids)][-len(ids) :] == list(ids)
        assert scored["loss_mask"][-1] == 1
        [sequence] = (await get_view(g, session["id"]))["sequences"]
        assert sum(sequence["loss_mask"]) == len(scored["completion_token_ids"])


async def test_forced_calls_are_not_trained() -> None:
    async with gateway(lambda request, index: say('[{"name": "read_file", "parameters": {"path": "a"}}]')) as g:
        session = await open_session(g, purpose="train")
        await ask(g, session["session_id"], [user("Hi")], tools=[tool()], tool_choice="required")
        [turn] = training_trace(await g.trace(session["id"]))["turns"]
        assert "biased" in turn["metadata"]["untrained"] and not any(turn["loss_mask"])
        assert len(turn["per_token_logps"]) == len(turn["completion_token_ids"]) > 0


async def test_aborted_turn_is_kept_but_not_trained() -> None:
    async with gateway(engine=Gated([say("A long answer that nobody waits for.")], tokens=3)) as g:
        session = await open_session(g)
        stream = await g.client(session["session_id"]).chat.completions.create(
            model="m", messages=[user("Hi")], stream=True
        )
        await anext(aiter(stream))
        await until(lambda: g.gated.waiting)
        await stream.close()  # the agent disconnects
        await until(lambda: list(g.live(session["id"]).trace.turns()))
        turns = training_trace(await g.trace(session["id"]))["turns"]
        [turn] = turns
        assert turn["metadata"]["role"] == "aborted" and turn["metadata"]["untrained"] and not any(turn["loss_mask"])
        document = await get_view(g, session["id"])
        assert document["sequences"] == [] and document["turns"][0]["discarded"]


def test_trace_without_ids_is_rejected() -> None:
    view = {
        "session": "s",
        "status": "sealed",
        "stop": "",
        "config": {"mode": "observe"},
        "vocabulary": "",
        "preambles": {},
        "nodes": [
            {"id": 1, "parent": None, "kind": "context", "ids": [], "messages": [user("Hi")], "preamble": "", "cause": None,
             "dialect": "chat", "told": {}},
            {"id": 2, "parent": 1, "kind": "sampled", "role": "main", "ids": [], "logprobs": None,
             "message": {"role": "assistant", "content": "Hello."}, "finish": "stop", "cause": None, "version_start": 0,
             "version_end": 0, "started": 0.0, "ended": 0.0, "sampling": None, "biases": [], "capture": "text", "fault": "",
             "engine": "", "lost": [], "delivered": True},
        ],
    }  # fmt: skip
    with pytest.raises(Conflict, match="text only"):
        training_trace(view)


def test_secret_routes_to_session_worker() -> None:
    """Paths with a session's secret and with its id route to the same worker."""
    secret = new_secret("rollout-1")
    heads = [f"GET /sessions/{name}/rollout HTTP/1.1\r\n\r\n".encode() for name in (secret, "rollout-1")]
    assert slot_from_head(heads[0]) == slot_from_head(heads[1]) == slot_of(secret) == slot_of("rollout-1")
