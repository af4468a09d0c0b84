"""Test prime-rl's rollout gateway API, as verifiers' mixin uses it, and where turngate improves on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.kit import Gated, Json, OpenSession, Running, calls, gateway, result, say, tokenizer, tool, until, user

HI = [user("Hi")]


async def post(g: Running, rollout: str, verb: str, body: Json = None) -> httpx.Response:
    return await g.admin.post(f"/v1/rollouts/{rollout}/{verb}", json=body)


async def register(g: Running, rollout: str = "r1", **body: Json) -> OpenSession:
    response = await post(g, rollout, "register", {"model": "m", **body})
    assert response.status_code == 200, response.text
    return OpenSession(rollout, response.json()["api_key"])


async def trajectory(g: Running, rollout: str = "r1") -> Json:
    response = await g.admin.get(f"/v1/rollouts/{rollout}/trajectory")
    assert response.status_code == 200, response.text
    return response.json()


def agent(g: Running, rollout: OpenSession, **options: Any) -> openai.AsyncOpenAI:
    """Return the client of an agent whose OPENAI_BASE_URL is the rollout's."""
    return g.client(rollout.key, base_url=f"{g.root}/v1/rollouts/{rollout.id}", **options)


async def chat(g: Running, rollout: OpenSession, messages: Json = HI, **request: Any) -> Any:
    return await agent(g, rollout).chat.completions.create(**{"model": "m", "messages": messages, **request})


# ── register ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_register_with_model_only() -> None:
    async with gateway() as g:
        response = await post(g, "r1", "register", {"model": "m"})
        assert response.status_code == 200
        body = response.json()
        secret = body.pop("api_key")
        assert body == {"rollout_id": "r1", "status": "active", "model": "m", "max_turns": -1, "max_seq_len": None}
        assert secret and secret != "r1"


async def test_register_with_all_fields() -> None:
    async with gateway() as g:
        request = {"model": "m", "sampling_params": {"temperature": 0.5}, "max_turns": 4, "max_seq_len": 4096}
        body = (await post(g, "r1", "register", request)).json()
        assert (body["max_turns"], body["max_seq_len"], body["status"]) == (4, 4096, "active")


async def test_second_registration_conflicts() -> None:
    async with gateway() as g:
        await register(g)
        assert (await post(g, "r1", "register", {"model": "m"})).status_code == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "model"),
        ({"model": 5}, "model"),
        ({"model": "m", "max_turns": "few"}, "max_turns"),
        ({"model": "m", "max_seq_len": "long"}, "max_seq_len"),
        ({"model": "m", "sampling_params": []}, "sampling_params"),
        ({"model": "m", "sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({"model": "m", "sampling_params": {"max_tokens": True}}, "sampling_params"),
        ([], "array"),
    ],
)
async def test_invalid_body_is_unprocessable(body: Json, field: str) -> None:
    async with gateway() as g:
        response = await post(g, "r1", "register", body)
        assert response.status_code == 422 and field in response.text


async def test_unserved_model_is_unprocessable() -> None:
    async with gateway(model="policy-1") as g:
        response = await post(g, "r1", "register", {"model": "other"})
        assert response.status_code == 422 and "policy-1" in response.text


@pytest.mark.parametrize("wrong", ["-a", "a b", "é"])
async def test_invalid_rollout_id_is_unprocessable(wrong: str) -> None:
    async with gateway() as g:
        assert (await post(g, wrong, "register", {"model": "m"})).status_code == 422


async def test_non_json_body_is_unprocessable() -> None:
    async with gateway() as g:
        response = await g.admin.post("/v1/rollouts/r1/register", content=b"{")
        assert response.status_code == 422


async def test_unknown_fields_are_ignored() -> None:
    async with gateway([say("Ok.")]) as g:
        sampling = {"temperature": 0.5, "top_k": -1, "max_tokens": 100, "extra_body": {"x": 1}, "n": 1, "seed": None}
        rollout = await register(g, sampling_params=sampling, dp_rank=3)
        await chat(g, rollout)
        assert g.engine.received[0].sampling.temperature == 0.5 and g.engine.received[0].sampling.top_k == 0


# ── model calls ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_agent_needs_only_rollout_key_and_url() -> None:
    async with gateway([say("Hello."), say("Again.")]) as g:
        rollout = await register(g)
        assert (await chat(g, rollout)).choices[0].message.content == "Hello."
        stream = await chat(g, rollout, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Again."


async def test_admin_key_opens_model_calls() -> None:
    async with gateway([say("Hello.")]) as g:
        rollout = await register(g)
        reply = await chat(g, OpenSession(rollout.id, g.app.admin_key))
        assert reply.choices[0].message.content == "Hello."


async def test_other_keys_are_unauthorized() -> None:
    async with gateway() as g:
        rollout, other = await register(g, "r1"), await register(g, "r2")
        for key in ("wrong", other.key, rollout.key + "x", rollout.id):
            with pytest.raises(openai.AuthenticationError):
                await chat(g, OpenSession("r1", key))
        with pytest.raises(openai.AuthenticationError):  # the reply does not reveal whether a rollout exists
            await chat(g, OpenSession("nobody", rollout.key))


async def test_invalid_body_unknown_rollout_and_ended_rollout() -> None:
    async with gateway([say("Hello.")] * 3) as g:
        rollout = await register(g)
        with pytest.raises(openai.BadRequestError):
            await chat(g, rollout, messages=[])
        with pytest.raises(openai.NotFoundError):
            await chat(g, OpenSession("nobody", g.app.admin_key))
        await post(g, "r1", "cancel")
        with pytest.raises(openai.ConflictError) as caught:
            await chat(g, rollout)
        assert caught.value.response.headers["x-should-retry"] == "false"


async def test_registered_sampling_overrides_agent() -> None:
    async with gateway([say("Hello.")]) as g:
        rollout = await register(g, sampling_params={"temperature": 0.5, "top_p": 1.0, "seed": 1})
        await chat(g, rollout, temperature=2.0, top_p=0.1, seed=9)
        sampling = g.engine.received[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 1.0, 1)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {"max_tokens": None, "max_completion_tokens": 3}])
async def test_registered_max_tokens_overrides_agent(params: dict[str, Any]) -> None:
    """`max_tokens` is one of prime-rl's sampling parameters, and the trainer's value wins."""
    async with gateway([say("One two three four five six.")]) as g:
        rollout = await register(g, sampling_params=params)
        reply = await chat(g, rollout, max_tokens=1000)
        assert reply.usage.completion_tokens == 3 and reply.choices[0].finish_reason == "length"


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_last_turn_completes_rollout(stream: bool) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        rollout = await register(g, max_turns=2)
        for status in ("active", "completed"):
            reply = await chat(g, rollout, stream=stream)
            if stream:
                assert [c async for c in reply]
            assert (await trajectory(g))["status"] == status
        with pytest.raises(openai.ConflictError):
            await chat(g, rollout, stream=stream)
        assert (await trajectory(g))["num_turns"] == 2


async def test_max_seq_len_truncates_conversation() -> None:
    async with gateway([say("word " * 60)]) as g:
        rollout = await register(g, max_seq_len=30)
        reply = await chat(g, rollout)
        assert reply.usage.total_tokens == 30 and reply.choices[0].finish_reason == "length"
        rollout_trajectory = await trajectory(g)
        assert rollout_trajectory["is_truncated"] and rollout_trajectory["trajectory"][0]["is_truncated"]
        assert rollout_trajectory["trajectory"][0]["tokens"]["is_truncated"]
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(g, rollout, [user("word " * 60)])
        assert caught.value.code == "context_length_exceeded"


async def test_too_long_prompt_marks_rollout_truncated(tmp_path: Path) -> None:
    async with gateway(data=tmp_path) as g:
        rollout = await register(g, max_seq_len=30)
        with pytest.raises(openai.BadRequestError):
            await chat(g, rollout, [user("word " * 60)])
        assert (await trajectory(g))["is_truncated"]
        await post(g, "r1", "unregister")
        assert (await trajectory(g))["is_truncated"]


# ── trajectory ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_trajectory_has_every_field_and_token() -> None:
    script = [say("<think>\nHm.\n</think>\n\n" + calls(("read_file", {"path": "a"}))), say("Done.")]
    async with gateway(script) as g:
        rollout = await register(g)
        system = {"role": "system", "content": "Be brief."}
        first = await chat(g, rollout, [system, *HI], tools=[tool()])
        message = first.choices[0].message
        [call] = message.tool_calls
        history = [system, *HI, message.model_dump(exclude_none=True), {**result(call, "A")}]
        await chat(g, rollout, history, tools=[tool()])
        rollout_trajectory = await trajectory(g)
        steps = rollout_trajectory.pop("trajectory")
        prompt, completion = rollout_trajectory.pop("prompt"), rollout_trajectory.pop("completion")
        assert rollout_trajectory == {
            "rollout_id": "r1",
            "status": "active",
            "num_turns": 2,
            "model": "m",
            "is_truncated": False,
        }
        assert prompt == [system, *HI]
        assert [m["role"] for m in completion] == ["assistant", "tool", "assistant"]
        assert completion[0]["tool_calls"][0]["function"]["name"] == "read_file"
        assert completion[0]["reasoning_content"] == "Hm." and completion[-1]["content"] == "Done."
        for step, request, turn in zip(steps, g.engine.received, script, strict=True):
            assert set(step) == {
                *("prompt", "completion", "tokens", "reward", "advantage", "is_truncated", "trajectory_id", "extras")
            }
            assert (step["reward"], step["advantage"], step["trajectory_id"]) == (None, None, "r1")
            tokens = step["tokens"]
            assert set(tokens) == {
                *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs"),
                *("overlong_prompt", "is_truncated", "routed_experts"),
            }
            assert tokens["prompt_ids"] == request.prompt.tolist() and tokens["completion_ids"] == list(turn.ids)
            assert tokens["prompt_mask"] == [0] * len(tokens["prompt_ids"])
            assert tokens["completion_mask"] == [1] * len(tokens["completion_ids"])
            assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"])
            assert all(p < 0 for p in tokens["completion_logprobs"])
            assert (tokens["overlong_prompt"], tokens["is_truncated"], tokens["routed_experts"]) == (False, False, None)
        assert [m["role"] for m in steps[1]["prompt"]] == ["system", "user", "assistant", "tool"]
        # Unlike in the original, the second prompt continues from exactly the sampled tokens.
        seen = steps[0]["tokens"]
        prefix = seen["prompt_ids"] + seen["completion_ids"]
        assert steps[1]["tokens"]["prompt_ids"][: len(prefix)] == prefix


async def test_trajectory_without_turns_is_empty() -> None:
    async with gateway() as g:
        await register(g)
        rollout_trajectory = await trajectory(g)
        assert (
            rollout_trajectory["num_turns"],
            rollout_trajectory["prompt"],
            rollout_trajectory["completion"],
            rollout_trajectory["trajectory"],
        ) == (0, [], [], [])


async def test_missing_logprobs_stay_missing() -> None:
    async with gateway([say("Hello.", null_logprobs=True)]) as g:
        await chat(g, await register(g))
        tokens = (await trajectory(g))["trajectory"][0]["tokens"]
        assert tokens["completion_logprobs"] == [None] * len(tokens["completion_ids"])


async def test_undelivered_steps_are_not_in_trajectory() -> None:
    engine = Gated([say("Lost."), say("One.")])
    async with gateway(engine=engine) as g:
        rollout = await register(g)
        task = g.start(chat(g, rollout))
        await until(lambda: engine.waiting)
        task.cancel()
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        await chat(g, rollout)
        rollout_trajectory = await trajectory(g)
        assert (
            rollout_trajectory["num_turns"] == 1
            and rollout_trajectory["trajectory"][0]["completion"][0]["content"] == "One."
        )


async def test_agent_replies_contain_no_tokens() -> None:
    async with gateway([say("Hello there.")]) as g:
        rollout = await register(g)
        response = await agent(g, rollout).chat.completions.with_raw_response.create(model="m", messages=HI)
        text = response.text if isinstance(response.text, str) else response.text()
        assert '"logprobs":null' in text.replace(" ", "") and "token_ids" not in text
        ids = (await trajectory(g))["trajectory"][0]["tokens"]["completion_ids"]
        assert json.dumps(ids)[1:-1] not in text


# ── cancel, unregister ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_cancel_aborts_running_call() -> None:
    async with gateway(engine=Gated([say("Never.")])) as g:
        rollout = await register(g)
        task = g.start(chat(g, rollout))
        await until(lambda: g.gated.waiting)
        response = await post(g, "r1", "cancel")
        assert (response.status_code, response.json()) == (200, {"rollout_id": "r1", "status": "cancelled"})
        assert g.engine.aborted == 1
        with pytest.raises(openai.ConflictError):
            await task
        assert (await trajectory(g))["status"] == "cancelled"
        assert (await post(g, "r1", "cancel")).json()["status"] == "cancelled"


async def test_unregister_is_idempotent_and_keeps_trajectory() -> None:
    async with gateway([say("One.")]) as g:
        rollout = await register(g)
        await chat(g, rollout)
        before = await trajectory(g)
        for _ in range(2):
            response = await post(g, "r1", "unregister")
            assert (response.status_code, response.json()) == (200, {"rollout_id": "r1", "status": "completed"})
        after = await trajectory(g)
        assert after == {**before, "status": "completed"}
        with pytest.raises(openai.ConflictError):
            await chat(g, rollout)


async def test_unregister_after_cancel_is_still_cancelled() -> None:
    async with gateway() as g:
        await register(g)
        await post(g, "r1", "cancel")
        assert (await post(g, "r1", "unregister")).json()["status"] == "cancelled"


async def test_unknown_rollouts_are_not_found() -> None:
    async with gateway() as g:
        for verb in ("cancel", "unregister"):
            assert (await post(g, "nobody", verb)).status_code == 404
        assert (await g.admin.get("/v1/rollouts/nobody/trajectory")).status_code == 404


# ── authorization ───────────────────────────────────────────────────────────────────────────────────────────────────

VERBS = [("POST", "register"), ("GET", "trajectory"), ("POST", "cancel"), ("POST", "unregister")]


async def test_control_endpoints_need_admin_key() -> None:
    async with gateway() as g:
        rollout = await register(g)
        for key in ("", "wrong", rollout.key):
            for method, verb in VERBS:
                response = await g.http(key).request(method, f"/v1/rollouts/r1/{verb}", json={"model": "m"})
                assert response.status_code == 401, (key, verb)
        assert (await trajectory(g))["status"] == "active"


@asynccontextmanager
async def open_gateway() -> AsyncIterator[Running]:
    async with gateway([say("Hello.")] * 2, open_loopback=True) as g:
        yield g


async def test_open_loopback_allows_keyless_local_clients() -> None:
    async with open_gateway() as g:
        keyless = g.http()
        body = (await keyless.post("/v1/rollouts/r1/register", json={"model": "m"})).json()
        assert body["status"] == "active"
        call = {"model": "m", "messages": HI}
        reply = await keyless.post("/v1/rollouts/r1/chat/completions", json=call)
        assert reply.json()["choices"][0]["message"]["content"] == "Hello."
        assert (await keyless.get("/v1/rollouts/r1/trajectory")).json()["num_turns"] == 1
        # A key that is sent must still be valid, and no other endpoint is open.
        assert (await g.http("wrong").get("/v1/rollouts/r1/trajectory")).status_code == 401
        assert (await g.http("wrong").post("/v1/rollouts/r1/chat/completions", json=call)).status_code == 401
        for path in ("/admin/sessions", "/v1/models", "/admin/fence"):
            assert (await keyless.get(path)).status_code == 401
        assert (await keyless.post("/v1/chat/completions", json=call)).status_code == 401
        assert (await keyless.post("/s/r1/v1/chat/completions", json=call)).status_code == 401
        assert (await keyless.post("/v1/rollouts/r1/unregister")).json()["status"] == "completed"


async def test_open_loopback_refuses_forwarded_clients() -> None:
    async with open_gateway() as g:
        await register(g)
        response = await g.http().get("/v1/rollouts/r1/trajectory", headers={"x-forwarded-for": "203.0.113.9"})
        assert response.status_code == 401


# ── full cycle as in verifiers' mixin ───────────────────────────────────────────────────────────────────────────────


async def test_parallel_rollouts_from_register_to_unregister() -> None:
    script = [say(calls(("read_file", {"path": "a"}))), say("Done.")]
    async with gateway(script) as g:

        async def run_rollout(n: int) -> Json:
            rollout = await register(g, f"group-{n}", max_turns=2, sampling_params={"temperature": 1.0})
            first = await chat(g, rollout, [user(f"Task {n}")], tools=[tool()])
            message = first.choices[0].message
            history = [user(f"Task {n}"), message.model_dump(exclude_none=True), result(message.tool_calls[0], str(n))]
            await chat(g, rollout, history, tools=[tool()])
            rollout_trajectory = await trajectory(g, rollout.id)
            await post(g, rollout.id, "unregister")
            return rollout_trajectory

        for n, rollout_trajectory in enumerate(await asyncio.gather(*(run_rollout(n) for n in range(8)))):
            assert (rollout_trajectory["status"], rollout_trajectory["num_turns"]) == ("completed", 2)
            assert rollout_trajectory["prompt"] == [user(f"Task {n}")] and rollout_trajectory["completion"][1][
                "content"
            ] == str(n)
            text = tokenizer().decode(rollout_trajectory["trajectory"][1]["tokens"]["prompt_ids"])
            assert f"Task {n}" in text and f"<tool_response>\n{n}\n</tool_response>" in text
