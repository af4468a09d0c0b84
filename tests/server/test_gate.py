"""Test gate mode through the real server: SDK agents on one side, a trainer in this process or over HTTP on the other."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from tests.kit import OpenSession, Running, calls, gateway, renderer, until
from tests.sdk_agents import DIALECTS, agent
from tests.speed import scaled
from tests.verify.kit import verify_all
from turngate.client import gate as gate_client
from turngate.client import retry
from turngate.client.gate import RemoteGate
from turngate.client.gate_protocol import CallAnswer, LeasedCalls, TakeCalls
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import MAX_WAIT_S
from turngate.config import ServeConfig
from turngate.engines.gate import Gate, GateCall
from turngate.engines.scripted import ScriptedTurn, derive_logprobs
from turngate.errors import ConfigError, Conflict, Gone, NotFound, Unauthorized
from turngate.render import BUILTIN_TOKENIZER
from turngate.server import run
from turngate.server.run import run_embedded


def encode_words(text: str) -> list[int]:
    return [*renderer().tokenizer.encode(text), renderer().stop_ids[0]]


async def answer(call: GateCall, text: str = "Hello there.") -> None:
    ids = encode_words(text)
    await call.answer(ids, derive_logprobs(call.prompt, ids))


@asynccontextmanager
async def gated(**config: Any) -> AsyncIterator[tuple[Running, Gate]]:
    gate = Gate(silence_s=config.pop("engine_silence_s", 600.0))
    async with gateway(engine=gate, engine_url=[], **config) as g:
        yield g, gate


@asynccontextmanager
async def remote(g: Running, **options: Any) -> AsyncIterator[RemoteGate]:
    async with GatewayClient(g.root, g.app.admin_key) as client, RemoteGate(client, **options) as gate:
        yield gate


async def post(g: Running, path: str, value: object, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key or g.app.admin_key}"}
    return await g.admin.post(path, content=msgspec.msgpack.encode(value), headers=headers)


async def take_call(g: Running, **options: Any) -> Any:
    """Take one call over plain HTTP."""
    response = await post(g, "/admin/gate/take", TakeCalls(**{"wait_s": MAX_WAIT_S, **options}))
    [call] = msgspec.msgpack.decode(response.content, type=LeasedCalls).calls
    return call


# ── trainer in this process ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sample(4)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_trainer_answers_are_recorded_exactly(dialect: str, stream: bool) -> None:
    texts = [calls(("read_file", {"path": "a.py"})), "It is empty."]
    answers: list[tuple[list[int], list[int], list[float]]] = []

    async def trainer() -> None:
        async for call in gate:
            ids = encode_words(texts[len(answers)])
            answers.append((call.prompt.tolist(), ids, derive_logprobs(call.prompt, ids)))
            await call.answer(*answers[-1][1:])

    async with gated() as (g, gate):
        thread = threading.Thread(target=lambda: asyncio.run(trainer()))
        thread.start()
        session = await g.open()
        assert (await g.show(session.id))["config"]["mode"] == "gate"
        async with agent(dialect, g.root, session.key, stream=stream, tools=("read_file",)) as a:
            reply = await a.ask("What is in a.py?")
            assert [(c.name, c.arguments) for c in reply.calls] == [("read_file", {"path": "a.py"})]
            assert (await a.answer({"read_file": ""})).text == "It is empty."
        turns = await g.turns(session.id)
        assert [turn["ids"] for turn in turns] == [ids for _, ids, _ in answers]
        assert [turn["logprobs"] for turn in turns] == [logprobs for *_, logprobs in answers]
        [row] = await g.samples(session.id)
        assert row["ids"] == answers[1][0] + answers[1][1] and all(span["trained"] for span in row["spans"])
        await g.seal(session.id)
        verify_all(Path(g.app.config.data), renderer=renderer())
    await asyncio.to_thread(thread.join, scaled(5))
    assert not thread.is_alive()


async def test_gate_serves_only_gate_sessions() -> None:
    async with gated() as (g, _):
        refused = await g.admin.post("/admin/sessions", json={"mode": "exact"})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "mode 'exact' is not served by this gateway (it serves: gate)"
    async with gateway() as g:
        assert (await g.admin.post("/admin/sessions", json={"mode": "gate"})).status_code == 400
        assert (await g.admin.get("/admin/gate")).status_code == 404


async def test_session_keeps_its_mode_across_restart(tmp_path: Path) -> None:
    async with gateway([ScriptedTurn([1])], data=tmp_path) as g:
        session = await g.open()
    gate = Gate()
    async with gateway(engine=gate, data=tmp_path) as g:
        with pytest.raises(openai.ConflictError, match="mode 'exact', but this gateway's engine serves mode 'gate'"):
            await g.ask(session.key, "Hi")


async def test_turns_without_logprobs_are_not_trained() -> None:
    async with gated() as (g, gate):
        reasons = []
        for logprobs in (None, [None, *[-1.0] * (len(encode_words("Hi")) - 1)]):
            session = await g.open()
            asking = g.start(g.ask(session.key, "Hi"))
            [call] = await gate.take()
            await call.answer(encode_words("Hi"), logprobs)
            assert (await asking).content == "Hi"
            [row] = await g.samples(session.id, keep_empty=True)
            reasons += [span["reason"] for span in row["spans"]]
            assert not any(row["mask"]) and await g.samples(session.id) == []
        assert reasons == ["no log-probabilities", "missing log-probabilities"]


async def test_agent_streams_partial_answers() -> None:
    async with gated() as (g, gate):
        session = await g.open()
        stream = g.start(
            g.client(session.key).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
        )
        [call] = await gate.take()
        assert call.stream
        first, rest = encode_words("Hello")[:-1], encode_words(" there.")
        await call.send(first, [-1.0] * len(first))
        chunks = aiter(await stream)
        text = ""
        while not text:
            text += (await anext(chunks)).choices[0].delta.content or ""
        assert text == "Hello" and not call.over
        await call.send(rest, [-1.0] * len(rest))
        await call.finish()
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
        assert text == "Hello there."
        [turn] = await g.turns(session.id)
        assert turn["ids"] == [*first, *rest]


async def _disconnect(g: Running, session: OpenSession, asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _seal(g: Running, session: OpenSession, asking: asyncio.Task[Any]) -> None:
    await g.seal(session.id)


async def _unregister(g: Running, session: OpenSession, asking: asyncio.Task[Any]) -> None:
    assert (await g.admin.post(f"/v1/rollouts/{session.id}/unregister")).is_success


async def _delete(g: Running, session: OpenSession, asking: asyncio.Task[Any]) -> None:
    assert (await g.admin.delete(f"/admin/sessions/{session.id}")).is_success


@pytest.mark.parametrize("end", [_disconnect, _seal, _unregister, _delete])
@pytest.mark.parametrize("is_taken", [True, False])
async def test_call_of_ended_agent_leaves_queue(
    end: Callable[[Running, OpenSession, asyncio.Task[Any]], Awaitable[None]], is_taken: bool
) -> None:
    async with gated() as (g, gate):
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        await until(lambda: gate.queue_status().waiting == 1)
        taken = await gate.take() if is_taken else []
        await end(g, session, asking)
        await until(lambda: gate.queue_status().waiting + gate.queue_status().taken == 0)
        for call in taken:
            with pytest.raises(Gone, match="the agent disconnected, or its session ended"):
                await answer(call)
        await asyncio.gather(asking, return_exceptions=True)


async def test_timed_out_session_leaves_queue() -> None:
    async with gated() as (g, gate):
        session = await g.open(limits={"seconds": scaled(0.1)})
        asking = g.start(g.ask(session.key, "Hi"))
        [call] = await gate.take(wait_s=scaled(5))
        assert "limit" in (await asking).content
        with pytest.raises(Gone, match="its session timed out"):
            await answer(call)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_unanswered_call_times_out(dialect: str) -> None:
    async with gated(engine_silence_s=0.1) as (g, _):
        session = await g.open()
        async with agent(dialect, g.root, session.key, stream=False) as a:
            with pytest.raises(Exception, match=r"no trainer answered this call within 0\.1 s") as caught:
                await a.ask("Hi")
        status = getattr(caught.value, "status_code", None) or getattr(caught.value, "code", None)
        assert status == 504


async def test_stop_string_ends_turn_early() -> None:
    async with gated() as (g, gate):
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi", "async stream", stop=["END"]))
        [call] = await gate.take()
        assert call.stop == ("END",)
        ids = encode_words("Hello END")[:-1]
        await call.send(ids, [-1.0] * len(ids))
        assert (await asking).content == "Hello "
        with pytest.raises(Gone, match="ended before the whole answer arrived"):
            await call.finish()


async def test_turn_records_policy_versions() -> None:
    async with gated() as (g, gate):
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        [call] = await gate.take()
        await g.resume(4)
        await answer(call)
        await asking
        [turn] = await g.turns(session.id)
        assert (turn["version_start"], turn["version_end"]) == (0, 4)


# ── trainer over HTTP ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_remote_trainers_answer_many_agents() -> None:
    total, answered = 40, [0, 0]

    async with gated() as (g, _gate):

        async def train(number: int) -> None:
            async with remote(g) as remote_gate:
                async for call in remote_gate:
                    answered[number] += 1
                    await answer(call, f"for {call.session}")

        trainers = [g.start(train(n)) for n in range(2)]
        sessions = [await g.open() for _ in range(total)]
        replies = await asyncio.gather(*(g.ask(session.key, "Hi") for session in sessions))
        assert [reply.content for reply in replies] == [f"for {session.id}" for session in sessions]
        assert sum(answered) == total and all(answered), answered
        [row] = await g.samples(sessions[0].id)
        start = row["mask"].index(1)
        assert row["logprobs"][start:] == derive_logprobs(np.array(row["ids"][:start], np.int32), row["ids"][start:])
        assert (await g.admin.get("/admin/gate")).json()["waiting"] == 0
        for trainer in trainers:
            trainer.cancel()


async def test_remote_trainer_sends_parts_fails_and_releases() -> None:
    async with gated() as (g, _gate), remote(g) as remote_gate:
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        async with (await remote_gate.take())[0]:
            pass
        [call] = await remote_gate.take()
        ids = encode_words("Hello.")
        await call.send(ids[:1], [None])
        await call.answer(ids[1:], [-0.5] * (len(ids) - 1))
        assert (await asking).content == "Hello."
        [turn] = await g.turns(session.id)
        assert turn["logprobs"] == [None, *[-0.5] * (len(ids) - 1)]
        asking = g.start(g.ask(session.key, "Hi"))
        await (await remote_gate.take())[0].fail("out of memory")
        with pytest.raises(openai.InternalServerError, match="the trainer failed: out of memory"):
            await asking
        assert await remote_gate.take(wait_s=0.05) == []


async def test_late_duplicate_and_invalid_answers_are_refused() -> None:
    async with gated() as (g, _gate):
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        call = await take_call(g)
        path = f"/admin/gate/calls/{call.id}/answer"
        ids = b"".join(i.to_bytes(4, "little") for i in encode_words("Hello."))
        good = CallAnswer(lease=call.lease, ids=ids, logprobs=None, finish="stop")
        bad = {"lease": call.lease, "ids": ids[:-1], "logprobs": None, "finish": "stop"}
        wrong = await post(g, path, bad)
        assert wrong.status_code == 400 and "must be a multiple of 4, not" in wrong.text
        assert (await post(g, path, {"lease": call.lease})).status_code == 400
        assert (await post(g, path, good, key="x")).status_code == 401
        assert (await post(g, path, good, key=session.key)).status_code == 401  # the agent's own key
        assert (await post(g, path, msgspec.structs.replace(good, lease="x"))).status_code == 409
        assert (await post(g, path, good)).status_code == 200
        assert (await asking).content == "Hello."
        assert (await post(g, path, good)).status_code == 200  # repeated because the response was lost
        other = await post(g, path, msgspec.structs.replace(good, ids=ids[4:]))
        assert other.status_code == 409 and "has already ended: it was answered" in other.text
        assert (await post(g, "/admin/gate/calls/none/answer", good)).status_code == 404
        asking = g.start(g.ask(session.key, "Hi"))
        call = await take_call(g)
        await g.seal(session.id)
        late = await post(g, f"/admin/gate/calls/{call.id}/answer", msgspec.structs.replace(good, lease=call.lease))
        assert late.status_code == 410 and late.json()["error"]["code"] == "gone"
        await asyncio.gather(asking, return_exceptions=True)


async def test_expired_lease_goes_to_next_trainer() -> None:
    async with gated() as (g, _gate):
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        lost = await take_call(g, lease_s=0.1)
        async with remote(g) as remote_gate:
            [call] = await remote_gate.take()
            assert call.id == lost.id
            await answer(call)
        assert (await asking).content == "Hello there."
        assert len(await g.turns(session.id)) == 1


async def test_leases_are_renewed_and_report_gone_agents() -> None:
    lease_s = scaled(0.3)
    async with gated() as (g, gate), remote(g, lease_s=lease_s) as remote_gate:
        sessions = [await g.open() for _ in range(2)]
        asking = [g.start(g.ask(session.key, "Hi")) for session in sessions]
        first, second = [(await remote_gate.take())[0] for _ in range(2)]
        await asyncio.sleep(1.5 * lease_s)
        assert gate.queue_status().taken == 2
        gone = next(n for n in range(2) if sessions[n].id == second.session)
        await g.seal(sessions[gone].id)
        await until(lambda: second.gone != "")
        with pytest.raises(Gone):
            await answer(second)
        await answer(first)
        assert (await asking[1 - gone]).content == "Hello there."
        await asyncio.gather(*asking, return_exceptions=True)


async def test_disconnected_trainer_takes_no_call() -> None:
    async with gated() as (g, gate):
        waiting = g.start(take_call(g))
        await until(lambda: gate.queue_status().takers == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: gate.queue_status().takers == 0)
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        await answer((await gate.take())[0])
        assert (await asking).content == "Hello there."


async def test_calls_of_disconnected_trainer_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gated() as (g, gate):
        sessions = [await g.open(), await g.open()]
        asking = [g.start(g.ask(session.key, "Hi")) for session in sessions]
        await until(lambda: gate.queue_status().waiting == 2)
        take, taken = gate.take, asyncio.Event()

        async def take_until_cancelled(*args: Any, **options: Any) -> list[GateCall]:
            taken_calls = await take(*args, **options)
            taken.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:  # the trainer disconnects just as it gets the calls
                await g.cancel(taken_calls[0].session)
            return taken_calls

        monkeypatch.setattr(gate, "take", take_until_cancelled)
        trainer = g.start(post(g, "/admin/gate/take", TakeCalls(limit=2, lease_s=600.0)))
        await taken.wait()
        trainer.cancel()
        await until(lambda: gate.queue_status().waiting == 1)  # before the lease expires
        await answer((await take())[0])
        await asyncio.gather(*asking, return_exceptions=True)
        assert sum(task.exception() is None for task in asking) == 1


async def test_invalid_body_names_its_field() -> None:
    async with gated() as (g, _):

        async def post_raw(path: str, raw: bytes) -> tuple[int, Any, str]:
            headers = {"authorization": f"Bearer {g.app.admin_key}"}
            response = await g.admin.post(path, content=raw, headers=headers)
            error = response.json()["error"]
            return response.status_code, error["param"], error["message"]

        call_path = "/admin/gate/calls/x"
        assert (await post_raw(f"{call_path}/fail", b"\x82\xa5lease\xa2\xff\xfe\xa7message\xa1a"))[:2] == (400, "lease")
        assert (await post_raw("/admin/gate/renew", b"\x81\xa6leases\x81\xa1\xff\xa1a"))[:2] == (400, "leases")
        assert (await post_raw("/admin/gate/take", b"\x81\xa5limit\x00"))[:2] == (400, "limit")
        assert "not UTF-8" in (await post_raw("/admin/gate/take", b"\x81\xa1\xff\x01"))[2]
        assert "not valid msgpack" in (await post_raw("/admin/gate/take", b"\x81\xa5lim"))[2]


async def test_remote_trainer_survives_gateway_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's call fails when the gateway stops; after the restart it calls again and the same trainer answers.

    A stopping gateway does not wait for a trainer that polls for calls.
    """
    settings = run.uvicorn_config

    def without_shutdown_timeout(*arguments: Any) -> Any:
        config = settings(*arguments)
        config.timeout_graceful_shutdown = 3600
        return config

    monkeypatch.setattr(run, "uvicorn_config", without_shutdown_timeout)
    monkeypatch.setattr(gate_client, "_POLL_S", MAX_WAIT_S)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = ServeConfig(data=str(tmp_path), port=port, engine="gate", tokenizer=str(BUILTIN_TOKENIZER)).check()
    hi: Any = [{"role": "user", "content": "Hi"}]
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(openai.DefaultAsyncHttpxClient(verify=False, trust_env=False))
        gate, loop = Gate(), asyncio.get_running_loop()
        async with asyncio.timeout(None) as stopping, run_embedded(config, engine=gate) as address:
            client = await stack.enter_async_context(GatewayClient(address.url, address.admin_key))
            remote_gate = await stack.enter_async_context(RemoteGate(client))
            session = await client.open({})
            agent = openai.AsyncOpenAI(
                api_key=session.key, base_url=f"{address.url}/v1", http_client=http, max_retries=0
            )
            asking = asyncio.create_task(agent.chat.completions.create(model="m", messages=hi))
            [old] = await remote_gate.take()
            waiting = asyncio.create_task(remote_gate.take())
            await until(lambda: gate.queue_status().takers == 1)
            stopping.reschedule(loop.time() + min(scaled(5), MAX_WAIT_S / 2))
        with pytest.raises(openai.InternalServerError, match="the gateway is stopping"):
            await asking
        async with run_embedded(config):
            asking = asyncio.create_task(agent.chat.completions.create(model="m", messages=hi))
            [call] = await waiting  # polling since before the gateway stopped
            with pytest.raises(NotFound, match="restarted"):
                await answer(old)
            await answer(call)
            assert (await asking).choices[0].message.content == "Hello there."


async def test_remote_gate_reports_wrong_key_and_engine() -> None:
    async with gated() as (g, _), GatewayClient(g.root, "wrong") as client, RemoteGate(client) as remote_gate:
        with pytest.raises(Unauthorized):
            await remote_gate.take()
    async with gateway() as g, remote(g) as remote_gate:
        with pytest.raises(ConfigError, match="--engine gate"):
            await remote_gate.take()


async def test_take_returns_in_time_if_gateway_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PAUSES_S", (3600.0,))
    async with GatewayClient("http://127.0.0.1:9", "key") as client, RemoteGate(client) as remote_gate:
        async with asyncio.timeout(scaled(20)):
            assert await remote_gate.take(wait_s=0.2) == []


async def test_closing_remote_gate_releases_its_calls() -> None:
    async with gated() as (g, gate):
        session = await g.open()
        asking = g.start(g.ask(session.key, "Hi"))
        async with remote(g) as remote_gate:
            [call] = await remote_gate.take()
        assert gate.queue_status().waiting == 1
        with pytest.raises(Conflict):
            await answer(call)
        await answer((await gate.take())[0])
        await asking


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_invalid_gate_settings_are_refused() -> None:
    good = {"engine": "gate", "tokenizer": str(BUILTIN_TOKENIZER)}
    ServeConfig(**good).check()  # type: ignore[arg-type]
    for wrong, param in (
        ({"tokenizer": ""}, "tokenizer"),
        ({"workers": 2}, "workers"),
        ({"engine_url": ["http://x"]}, "engine_url"),
    ):
        with pytest.raises(ConfigError) as caught:
            ServeConfig(**{**good, **wrong}).check()  # type: ignore[arg-type]
        assert caught.value.param == param
