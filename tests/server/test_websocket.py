"""Test the WebSocket of the Responses API with the official `openai` client, and with a plain one where the SDK hides the frames."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest
import websockets

from tests.exact.invariants import check_invariants
from tests.kit import Gated, Json, OpenSession, Running, calls, gateway, say, until
from tests.server.test_forwarding import crew
from turngate.config import ServeConfig
from turngate.dialects.responses_socket import MAX_LANES
from turngate.server.asgi import ClientDisconnect
from turngate.server.run import uvicorn_config
from turngate.server.websocket import FrameStream

READ = {
    "type": "function",
    "name": "read_file",
    "description": "Reads.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
THOUGHT = "<think>\nI should look.\n</think>\n\n"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Socket:
    """A plain client, which sees every frame."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.connection = connection

    async def create(self, **request: Any) -> None:
        await self.send({"type": "response.create", "model": "m", "store": False, **request})

    async def send(self, event: Json) -> None:
        await self.connection.send(event if isinstance(event, str | bytes) else json.dumps(event))

    async def receive(self) -> Json:
        return json.loads(await self.connection.recv())

    async def finish(self, lane: str | None = None) -> list[Json]:
        """Receive the frames of a reply."""
        frames: list[Json] = []
        while not frames or frames[-1]["type"] not in ENDS:
            frame = await self.receive()
            if frame.get("stream_id") == lane:
                frames.append(frame)
        return frames

    async def ask(self, **request: Any) -> Json:
        """Return the last frame of the reply."""
        await self.create(**request)
        return (await self.finish(request.get("stream_id")))[-1]


@asynccontextmanager
async def connect(g: Running, key: str, path: str = "/v1/responses", **headers: str) -> AsyncIterator[Socket]:
    fields = {"Authorization": f"Bearer {key}", **headers}
    async with websockets.connect(
        g.root.replace("http", "ws") + path, additional_headers=fields, proxy=None
    ) as connection:
        yield Socket(connection)


def text(frame: Json) -> str:
    return "".join(part["text"] for item in frame["response"]["output"] for part in item.get("content", ()))


def previous(frame: Json) -> str:
    return str(frame["response"]["id"])


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("warm_up", [False, True], ids=["cold", "warmed up"])
@pytest.mark.parametrize("store", [False, None], ids=["not stored", "stored"])
async def test_tool_loop_with_openai_client_is_one_row(warm_up: bool, store: bool | None) -> None:
    script = [say(THOUGHT + calls(("read_file", {"path": "a"}))), say("It says x."), say("Bye.")]
    async with gateway(script) as g:
        session = await g.open()
        frame: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": [READ]}
        if store is not None:
            frame["store"] = store
        async with g.client(session.key).responses.connect() as connection:

            async def ask(**request: Any) -> Any:
                await connection.response.create(**frame, **request)
                async for event in connection:
                    if event.type in ENDS:
                        break
                assert event.type == "response.completed", event
                return event.response

            begun = {"previous_response_id": (await ask(input=[], generate=False)).id} if warm_up else {}
            first = await ask(input="Hi", **begun)
            call = next(item for item in first.output if item.type == "function_call")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}
            second = await ask(input=[result], previous_response_id=first.id)
            last = await ask(input="Done?", previous_response_id=second.id)
        assert (second.output_text, last.output_text) == ("It says x.", "Bye.")
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == 3 == len(g.engine.received)
        for request, span in zip(g.engine.received, row["spans"], strict=True):
            assert request.prompt.tolist() == row["ids"][: span["start"]]
        check_invariants(
            await g.app.sessions.find(session.id), [np.asarray(request.prompt) for request in g.engine.received]
        )
        assert g.rows("SELECT count(*) FROM replies") == [(0 if store is False else 3,)]


async def test_frames_are_events_of_stream() -> None:
    async with gateway([say("Hello there.")] * 2) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.create(input="Hi")
            frames = await socket.finish()
        events = [
            event
            async for event in await g.client(session.key).responses.create(
                model="m", input="Hi", store=False, stream=True
            )
        ]
        assert [frame["type"] for frame in frames] == [event.type for event in events]
        assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))


async def test_turn_is_stored_before_its_last_frame() -> None:
    async with gateway([say("Hello."), say("Again.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            for turns in (1, 2):
                last = await socket.ask(input="Hi", store=True)
                assert g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(turns,)]
                assert (last["response"]["id"],) in g.rows("SELECT id FROM replies")


async def test_path_may_name_session() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        async with connect(g, session.key, f"/s/{session.id}/v1/responses") as socket:
            assert text(await socket.ask(input="Hi")) == "Hello."


async def test_headers_of_upgrade_do_not_mark_calls_as_retries() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open()
        marks = {"Idempotency-Key": "k", "X-Turngate-Attempt": "2", "X-Stainless-Retry-Count": "1"}
        async with connect(g, session.key, **marks) as socket:
            await socket.ask(input="Hi")
            await socket.ask(input="Hi")
        assert [turn["cause"] for turn in await g.turns(session.id)] == [None, "resample"]


@pytest.mark.parametrize(("delivered", "cause"), [(False, "retry"), (True, "resample")])
async def test_equal_call_on_new_connection_is_retry_if_answer_was_lost(
    delivered: bool, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = FrameStream._deliver
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open()

        async def lose_end(stream: FrameStream, data: bytes, last: bool) -> None:
            if last:
                raise ClientDisconnect
            await deliver(stream, data, last)

        async with connect(g, session.key) as socket:
            if delivered:
                await socket.ask(input="Hi")
            else:
                monkeypatch.setattr(FrameStream, "_deliver", lose_end)
                await socket.create(input="Hi")
                await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE delivered = 0") == [(1,)])
                monkeypatch.undo()
        async with connect(g, session.key) as socket:
            assert text(await socket.ask(input="Hi")) == "Two."
        assert [turn["cause"] for turn in await g.turns(session.id)] == [None, cause]


async def test_refused_calls_are_recorded() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open(model="m")
        async with connect(g, session.key) as socket:
            await socket.ask(input="Hi")
            refused = await socket.ask(input="Hi", model="editor")
            await socket.send("{")
            await socket.finish()
        shown = await g.show(session.id)
        assert shown["refused"] == {"count": 2, "status": 404, "message": refused["error"]["message"]}
        assert await g.samples(session.id) == []


async def test_only_calls_count_as_refused_and_may_be_repeated() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open(model="m")
        async with connect(g, session.key) as socket:
            await socket.send({"type": "response.cancel"})
            assert "'response.cancel'" in (await socket.receive())["message"]
            assert "refused" not in await g.show(session.id)
            for wrong in ({"type": "response.create", "stream_id": 7}, {}):
                await socket.send({"model": "m", "input": "Hi", **wrong})
                assert (await socket.receive())["type"] == "error"
            assert (await g.show(session.id))["refused"]["count"] == 2
            await socket.ask(input="Hi")
        assert "refused" not in await g.show(session.id) and len(await g.samples(session.id)) == 1


async def test_session_limits_hold() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open(limits={"turns": 1})
        async with connect(g, session.key) as socket:
            first = await socket.ask(input="Hi")
            last = await socket.ask(input="More", previous_response_id=previous(first))
            assert "reached its limit (turns)" in text(last)
            assert "reached its limit" in text(await socket.ask(input="More", previous_response_id=previous(last)))


async def test_silent_engine_gets_keep_alive_frames() -> None:
    async with gateway(engine=Gated([say("Hello.")]), alive_s=0.05) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.create(input="Hi")
            kinds = [(await socket.receive())["type"] for _ in range(4)]
            assert kinds == ["response.created", *["response.in_progress"] * 3]
            g.gated.gate.set()
            assert text((await socket.finish())[-1]) == "Hello."


# ── continuing ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_unstored_reply_is_known_only_on_its_connection() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket, connect(g, session.key) as other:
            first = await socket.ask(input="Hi")
            refused = await other.ask(input="More", previous_response_id=previous(first))
            assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
            assert refused["error"]["param"] == "previous_response_id" == refused["param"]
            second = await socket.ask(input="More", previous_response_id=previous(first))
            assert text(second) == "Two."
            refused = await socket.ask(input="Again", previous_response_id=previous(first))
            assert refused["error"]["code"] == "previous_response_not_found", "only the latest reply is kept"
            # A refused call does not forget the latest reply.
            assert text(await socket.ask(input="Again", previous_response_id=previous(second))) == "Three."


async def test_stored_reply_continues_over_http_and_back() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            first = await socket.ask(input="Hi", store=True)
        second = await g.client(session.key).responses.create(
            model="m", input="More", previous_response_id=previous(first)
        )
        async with connect(g, session.key) as socket:
            await socket.ask(input="Bye", previous_response_id=second.id)
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == 3


async def test_unstored_reply_survives_eviction() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            first = await socket.ask(input="Hi")
            assert await g.app.evictor.sweep(time.time() + 3600) == 1
            await socket.ask(input="More", previous_response_id=previous(first))
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == 2


# ── lanes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_lanes_run_at_the_same_time_and_in_order() -> None:
    async with gateway(engine=Gated([say("Same.")] * 4)) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            for lane in ("a", "b", "a"):
                await socket.create(input=f"Hi {lane}", stream_id=lane)
            await until(lambda: g.gated.waiting == 2)
            g.gated.gate.set()
            frames: list[Json] = []
            while [frame["type"] for frame in frames].count("response.completed") < 3:
                frames.append(await socket.receive())
        assert {frame["stream_id"] for frame in frames} == {"a", "b"}
        own = [frame["type"] for frame in frames if frame["stream_id"] == "a"]
        assert own.count("response.completed") == 2
        assert own.index("response.completed") < len(own) - 1 - own[::-1].index("response.created")


async def test_new_lane_can_fork_from_another() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            first = await socket.ask(input="Hi")
            for lane in ("a", "b"):
                await socket.ask(input=f"More {lane}", previous_response_id=previous(first), stream_id=lane)
        assert sorted(len(row["spans"]) for row in await g.samples(session.id)) == [2, 2]


async def test_too_many_lanes() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            for n in range(MAX_LANES):
                await socket.ask(input="Hi", generate=False, stream_id=f"lane-{n}")  # unread frames would delay closing
            refused = await socket.ask(input="Hi", stream_id="one more")
            assert refused["error"]["code"] == "websocket_stream_limit_reached"


async def test_waiting_calls_have_at_most_bytes_of_one_request() -> None:
    async with gateway(engine=Gated([say("Hello.")] * 3), max_body_mb=0.02) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            for lane in ("a", "b"):
                await socket.create(input="x" * 8_000, stream_id=lane)
            await until(lambda: g.gated.waiting == 2)
            await socket.create(input="x" * 8_000, stream_id="a")
            frames = []
            while not frames or frames[-1]["type"] != "error":
                frames.append(await socket.receive())
            assert frames[-1]["error"]["code"] == "websocket_stream_limit_reached"
            assert frames[-1]["stream_id"] == "a" and "max_body_mb" in frames[-1]["message"]
            g.gated.gate.set()
            for _ in range(2):
                while (await socket.receive())["type"] != "response.completed":
                    pass
            assert text(await socket.ask(input="x" * 18_000, stream_id="a")) == "Hello."
        assert "refused" not in await g.show(session.id)


async def test_latest_replies_are_forgotten_when_they_get_too_large() -> None:
    async with gateway([say("Hello.")] * 3, max_body_mb=0.02) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            replies = {lane: await socket.ask(input="x" * 12_000, stream_id=lane) for lane in ("a", "b")}
            frame = await socket.ask(input="More", previous_response_id=previous(replies["a"]), stream_id="a")
            assert frame["error"]["code"] == "previous_response_not_found"
            assert text(await socket.ask(input="More", previous_response_id=previous(replies["b"]))) == "Hello."


# ── calls that sample nothing ───────────────────────────────────────────────────────────────────────────────────────


async def test_prepared_conversation_has_at_most_bytes_of_one_request() -> None:
    async with gateway([say("Hello.")], max_body_mb=0.02) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            frame = await socket.ask(input="x" * 12_000, generate=False)
            frame = await socket.ask(input="x" * 12_000, generate=False, previous_response_id=previous(frame))
            assert (frame["status"], frame["error"]["param"]) == (413, "input")
            assert text(await socket.ask(input="Hi")) == "Hello."


async def test_prepared_call_is_admitted_like_a_turn() -> None:
    async with gateway() as g:
        session = await g.open(model="m")
        async with connect(g, session.key) as socket:
            frame = await socket.ask(input="Hi", generate=False, model="editor")
        assert (frame["status"], frame["error"]["param"]) == (404, "model")
        assert (await g.show(session.id))["refused"]["count"] == 1


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────

INVALID_EVENTS: dict[str, tuple[Json, str | None, str]] = {
    "not JSON": ("hello", None, "not valid JSON"),
    "not an object": ("[]", None, "Expected `object`"),
    "no type": ({"model": "m", "input": "Hi"}, "type", "must be 'response.create'"),
    "another event": ({"type": "response.steer", "input": "Hi"}, "type", "'response.steer'"),
    "no input": ({"type": "response.create", "model": "m"}, "input", "at least one item"),
    "a field": ({"type": "response.create", "input": "Hi", "temperature": "hot"}, "temperature", "Expected"),
    "background": ({"type": "response.create", "input": "Hi", "background": True}, "background", "not supported"),
    "a lane's name": ({"type": "response.create", "input": "Hi", "stream_id": 7}, "stream_id", "Expected"),
    "an item": (
        {"type": "response.create", "input": [{"type": "item_reference", "id": "x"}]},
        "input[0]",
        "no item with id 'x'",
    ),
}


async def test_invalid_events_are_answered_and_connection_stays() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            for case, (event, param, message) in INVALID_EVENTS.items():
                await socket.send(event)
                frame = await socket.receive()
                assert (frame["type"], frame["error"]["param"]) == ("error", param), case
                assert message in frame["error"]["message"] and frame["message"] == frame["error"]["message"], case
                assert frame["status"] == (404 if case == "an item" else 400), case
            assert not g.engine.received
            assert text(await socket.ask(input="Hi")) == "Hello."


async def test_generate_false_needs_websocket() -> None:
    async with gateway() as g:
        session = await g.open()
        with pytest.raises(openai.BadRequestError) as caught:
            await g.client(session.key).responses.create(model="m", input="Hi", extra_body={"generate": False})
        assert caught.value.param == "generate"


@pytest.mark.parametrize("how", ["busy", "fail_before"])
async def test_failing_engine_is_error_frame(how: str) -> None:
    async with gateway([say("", **{how: True}), say("Back.")]) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            frame = await socket.ask(input="Hi")
            assert (frame["type"], frame["status"]) == ("error", 429 if how == "busy" else 503)
            assert text(await socket.ask(input="Hi")) == "Back."


async def test_sealed_session_ends_calls_and_refuses_others() -> None:
    async with gateway(engine=Gated([say("Hello.")])) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.create(input="Hi")
            await until(lambda: g.gated.waiting)
            await g.seal(session.id)
            assert (await socket.finish())[-1]["error"]["code"] == "conflict"
            assert (await socket.ask(input="Hi"))["status"] == 409


async def test_aborted_call_is_answered_in_its_lane() -> None:
    async with gateway(engine=Gated([say("Hello.")])) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.create(input="Hi", stream_id="a")
            await until(lambda: g.gated.waiting)
            [call] = g.live(session.id).calls
            call.cancel()
            while (frame := await socket.receive())["type"] != "error":
                pass
        assert (frame["status"], frame.get("stream_id")) == (503, "a")


async def expect_refusal(g: Running, key: str, path: str, status: int) -> Json:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connect(g, key, path):
            pass
    response = caught.value.response
    assert response.status_code == status and response.headers["x-turngate"] == "1"
    return json.loads(response.body or b"{}")["error"]


async def test_upgrade_needs_session_key(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as g:
        session, other = await g.open(), await g.open()
        assert (await expect_refusal(g, "sk-wrong", "/v1/responses", 401))["code"] == "invalid_api_key"
        await expect_refusal(g, other.key, f"/s/{session.id}/v1/responses", 401)
    assert not caplog.records


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses/input_tokens", "/s/x/v1/messages", "/v1/realtime", "/", "/admin"]
)
async def test_other_paths_refuse_upgrade_with_words(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as g:
        session = await g.open()
        error = await expect_refusal(g, session.key, path, 426)
        assert "send the request over HTTP" in error["message"]
    assert not caplog.records


def test_frames_have_the_limit_of_bodies() -> None:
    async def app(*_: object) -> None:
        raise NotImplementedError

    assert uvicorn_config(app, ServeConfig(max_body_mb=3)).ws_max_size == 3_000_000


# ── hanging up ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_hang_up_aborts_and_records_calls(how: str) -> None:
    engine = Gated([say("A long answer that is never finished.")] * 2, tokens=3)
    async with gateway(engine=engine) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            for lane in ("a", "b"):
                await socket.create(input=f"Hi {lane}", stream_id=lane)
            await until(lambda: g.gated.waiting == 2)
            if how == "abort":
                socket.connection.transport.abort()
            else:
                await socket.connection.close()
        live = g.app.sessions.find_live(session.id)
        assert live is not None
        await until(lambda: not live.busy)
        turns = await g.turns(session.id)
        assert [(turn["finish"], len(turn["ids"])) for turn in turns] == [("abort", 3)] * 2


async def test_stopping_gateway_answers_calls() -> None:
    async with gateway(engine=Gated([say("Hello.")])) as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.create(input="Hi")
            await until(lambda: g.gated.waiting)
            await g.app.sessions.abort_all_calls()
            frame = (await socket.finish())[-1]
            assert (frame["status"], frame["error"]["code"]) == (503, "gateway_stopping")


async def send_oversized(g: Running, session: OpenSession) -> None:
    with pytest.raises(websockets.ConnectionClosed) as closed:
        async with connect(g, session.key) as socket:
            await socket.create(input="y" * 17_000_000)
            await socket.receive()
    assert (
        closed.value.rcvd is None or closed.value.rcvd.code == 1009
    )  # None: it was closed while the client was sending


async def expect_oversized(g: Running, session: OpenSession) -> None:
    await until(lambda: g.rows("SELECT * FROM refusals"))
    refused = (await g.show(session.id))["refused"]
    assert (refused["count"], refused["status"]) == (1, 413) and "max_body_mb" in refused["message"]


async def test_oversized_frame_is_refused_call() -> None:
    async with gateway() as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.connection.close(1009)  # a frame was too large for the client
        await send_oversized(g, session)
        await expect_oversized(g, session)


async def send_undecodable(g: Running, session: OpenSession) -> None:
    with pytest.raises(websockets.ConnectionClosed) as closed:
        async with connect(g, session.key) as socket:
            await socket.connection.send(b'{"type": "response.create", "input": "\xff"}', text=True)
            await socket.receive()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007


async def expect_undecodable(g: Running, session: OpenSession) -> None:
    await until(lambda: g.rows("SELECT * FROM refusals"))
    refused = (await g.show(session.id))["refused"]
    assert (refused["count"], refused["status"]) == (1, 400) and "not valid UTF-8" in refused["message"]


async def test_undecodable_frame_is_refused_call() -> None:
    async with gateway() as g:
        session = await g.open()
        async with connect(g, session.key) as socket:
            await socket.connection.close(1007)  # a frame was invalid for the client
        await send_undecodable(g, session)
        await expect_undecodable(g, session)


# ── several workers ─────────────────────────────────────────────────────────────────────────────────────────────────


async def ask_at(g: Running, session: OpenSession) -> list[Json]:
    async with connect(g, session.key) as socket:
        first = await socket.ask(input="Hi")
        return [first, await socket.ask(input="More", previous_response_id=previous(first))]


async def test_wrong_worker_forwards_frames() -> None:
    async with crew() as workers:
        session = await workers.open_at(0)
        frames = await ask_at(workers[1], session)
        assert [text(frame) for frame in frames] == ["Hello.", "Again."]
        [row] = await workers[0].samples(session.id)
        assert len(row["spans"]) == 2
        assert (await expect_refusal(workers[1], "sk-wrong", "/v1/responses", 401))["code"] == "invalid_api_key"
        assert "over HTTP" in (await expect_refusal(workers[1], session.key, "/v1/messages", 426))["message"]


async def test_hang_up_is_forwarded() -> None:
    engine = Gated([say("Never finished.")], tokens=2)
    async with crew([engine, Gated([])]) as workers:
        session = await workers.open_at(0)
        async with connect(workers[1], session.key) as socket:
            await socket.create(input="Hi")
            await until(lambda: engine.waiting)
        live = workers[0].app.sessions.find_live(session.id)
        assert live is not None
        await until(lambda: not live.busy)
        assert [turn["finish"] for turn in await workers[0].turns(session.id)] == ["abort"]


async def test_oversized_frame_is_recorded_by_owner() -> None:
    async with crew() as workers:
        session = await workers.open_at(0)
        await send_oversized(workers[1], session)
        await expect_oversized(workers[0], session)


async def test_undecodable_frame_is_recorded_by_owner() -> None:
    async with crew() as workers:
        session = await workers.open_at(0)
        await send_undecodable(workers[1], session)
        await expect_undecodable(workers[0], session)


async def test_refusal_by_owner_is_forwarded() -> None:
    async with crew() as workers:
        named, other = await workers.open_at(0), await workers.open_at(0)
        path = f"/s/{named.id}/v1/responses"
        by_owner = await expect_refusal(workers[0], other.key, path, 401)
        assert await expect_refusal(workers[1], other.key, path, 401) == by_owner
        assert "stopped" not in by_owner["message"]
        assert [text(frame) for frame in await ask_at(workers[1], named)] == ["Hello.", "Again."]
