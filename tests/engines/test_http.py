"""Tests for the engine HTTP client: event parsing, error mapping and connection handling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.engines.standins import DONE, StandIn, answer_stream, answer_with, event, serving
from tests.ports import free_port
from tests.speed import scaled
from turngate.engines import http
from turngate.engines.http import EngineClient, EventParser, align_logprobs, error_from_status, extract_message
from turngate.errors import (
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineNotFound,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    TurngateError,
)

pytestmark = pytest.mark.asyncio

DEEP = b"[" * 5000 + b"]" * 5000


class _Raw(msgspec.Struct):
    error: msgspec.Raw


@asynccontextmanager
async def client_of(server: StandIn | str, **settings: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient("engine", server if isinstance(server, str) else server.url, **settings)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def read_all(client: EngineClient) -> list[bytes]:
    async with client.post("/", b"{}", {}) as reply:
        return [data async for batch in reply.events() for data in batch]


async def test_events_parse_at_any_read_boundary() -> None:
    values = [{"text": "grüße 🙂 日本"}, {"text": "a\nb"}, {"n": 1}]
    wire = b": keep-alive\n\n" + b"".join(
        b"event: x\ndata: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values
    )
    for ending in (b"\n", b"\r\n"):
        stream = wire.replace(b"\n", ending)
        for cut in range(len(stream) + 1):
            events = EventParser()
            found = events.feed(stream[:cut]) + events.feed(stream[cut:])
            assert [json.loads(data) for data in found] == values, cut
        events = EventParser()
        byte_by_byte = [data for byte in stream for data in events.feed(bytes([byte]))]
        assert [json.loads(data) for data in byte_by_byte] == values


async def test_multiline_event_is_joined() -> None:
    assert EventParser().feed(b"data: a\ndata:b\n\n\n\ndata: c\n") == [b"a\nb"]


async def test_oversized_event_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "EVENT_BYTES", 10)
    with pytest.raises(EngineError, match="larger than 10 bytes"):
        EventParser().feed(b"data: 12345678901")
    events = EventParser()
    with pytest.raises(EngineError, match="larger than 10 bytes"):
        for _ in range(3):  # lines of one event, whose end never comes
            events.feed(b"data:\n")
    events = EventParser()
    assert [events.feed(b": a comment\ndata:1\n\n") for _ in range(3)] == [[b"1"]] * 3


async def test_character_split_across_reads() -> None:
    wire = b"data: " + json.dumps({"text": "日本🙂"}, ensure_ascii=False).encode() + b"\n\n"
    at = wire.index("🙂".encode()) + 2
    answer = answer_stream(wire[:at], 0.02, wire[at:], DONE)
    async with serving(StandIn(answer)) as server, client_of(server) as client:
        assert [json.loads(data) for data in await read_all(client)] == [{"text": "日本🙂"}]


async def test_events_of_one_read_form_one_batch() -> None:
    read = asyncio.Event()
    server = StandIn(answer_stream(event(1) + event(2) + event(3), read, event(4) + DONE))
    batches = []
    async with serving(server), client_of(server) as client, client.post("/", b"{}", {}) as reply:
        async for batch in reply.events():
            batches.append(batch)
            read.set()
    assert batches == [[b"1", b"2", b"3"], [b"4"]]


async def test_request_is_sent_on_first_read() -> None:
    server = StandIn(answer_stream(DONE))
    async with serving(server), client_of(server) as client, client.post("/", b"{}", {}):
        await asyncio.sleep(0.02)
    assert server.bodies == []


async def test_early_exit_closes_connection() -> None:
    async with serving(StandIn(answer_stream(event(1), 3600.0, DONE))) as server, client_of(server) as client:
        async with client.post("/", b"{}", {}) as reply:
            async for _ in reply.events():
                break
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))
        assert client.in_flight == 0


async def test_cancelled_reader_closes_connection() -> None:
    async with serving(StandIn(answer_stream(3600.0, DONE))) as server, client_of(server) as client:
        task = asyncio.create_task(read_all(client))
        while not server.bodies:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


async def test_early_exit_ends_pending_read() -> None:
    async with serving(StandIn(answer_stream(event(1), 3600.0, DONE))) as server, client_of(server) as client:
        async with client.post("/", b"{}", {}) as reply:
            batches = reply.events()
            await anext(batches)
            pending = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable):
            await pending
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


async def test_connection_is_reused_after_finished_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DRAIN_S", scaled(0.25))
    monkeypatch.setattr(http, "KEEPALIVE_S", scaled(2))
    async with serving(StandIn(answer_stream(event(1), DONE))) as server, client_of(server) as client:
        for _ in range(3):
            async with client.post("/", b"{}", {}) as reply:
                async for _batch in reply.events():
                    reply.finished = True
                    break
        assert len(server.connections) == 1


async def test_finished_reply_that_stays_open_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DRAIN_S", 0.02)
    async with serving(StandIn(answer_stream(event(1), 3600.0))) as server, client_of(server) as client:
        async with client.post("/", b"{}", {}) as reply:
            async for _ in reply.events():
                reply.finished = True
                break
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


async def test_caller_errors_pass_through() -> None:
    """A timeout or broken pipe on the agent's side is not reported as an engine error."""
    for own in (TimeoutError("mine"), ConnectionResetError("mine"), KeyError("mine")):
        async with serving(StandIn(answer_stream(event(1), 3600.0))) as server, client_of(server) as client:
            with pytest.raises(type(own), match="mine"):
                async with client.post("/", b"{}", {}) as reply:
                    async for _ in reply.events():
                        raise own


OVERFLOWS = [
    # vLLM: renderers/params.py, v1/engine/input_processor.py
    "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens, which "
    "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "The decoder prompt (length 4096) plus the number of requested output tokens (at least 1) is longer than the "
    "maximum model length of 4096.",
    "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",  # for a prompt of exactly max_model_len
    # SGLang: tokenizer_manager.py, scheduler
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000.",
    "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens).",
    # OpenAI
    "Your input exceeds the context window of this model.",
]


@pytest.mark.parametrize("text", OVERFLOWS)
async def test_overflow_message_is_context_overflow(text: str) -> None:
    body = {"error": {"message": text, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    async with serving(StandIn(answer_with(body, 400))) as server, client_of(server) as client:
        with pytest.raises(ContextOverflow, match="engine: "):
            await read_all(client)


async def test_overflow_code_is_context_overflow() -> None:
    body = {"error": {"message": "Too long.", "code": "context_length_exceeded"}}
    async with serving(StandIn(answer_with(body, 400))) as server, client_of(server) as client:
        with pytest.raises(ContextOverflow, match="Too long"):
            await read_all(client)


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (400, "bad top_p", EngineRejected),
        (404, "The model `x` does not exist.", EngineNotFound),
        (422, "unprocessable", EngineRejected),
        (401, "bad key", EngineError),
        (403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.", EngineError),
        (408, "", EngineTimeout),
        (429, "slow down", EngineBusy),
        (500, "Internal server error", EngineError),
        (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", EngineUnavailable),
        (502, "", EngineUnavailable),
        (503, "loading", EngineUnavailable),
        (503, "The engine is currently busy and cannot accept new requests.", EngineBusy),
        (503, "The request queue is full.", EngineBusy),
        (504, "", EngineTimeout),
        (302, "", EngineError),
    ],
)
async def test_status_maps_to_exception(status: int, text: str, expected: type[TurngateError]) -> None:
    async with (
        serving(StandIn(answer_with({"error": {"message": text}}, status))) as server,
        client_of(server) as client,
    ):
        with pytest.raises(TurngateError) as raised:
            await read_all(client)
    assert type(raised.value) is expected
    if status != 401:
        assert text in raised.value.message


async def test_refused_connection_is_unavailable() -> None:
    async with client_of(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(EngineUnavailable) as raised:
            await read_all(client)
    assert "connection refused" in raised.value.message and "127.0.0.1" not in raised.value.message


async def test_reset_connection_is_unavailable() -> None:
    async def abort_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    server = await asyncio.start_server(abort_connection, "127.0.0.1", 0)
    async with server, client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(EngineUnavailable):
            await read_all(client)


async def test_non_http_server_is_engine_error() -> None:
    async def send_smtp_banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp ready\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(send_smtp_banner, "127.0.0.1", 0)
    async with server, client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(EngineError):
            await read_all(client)


async def test_cut_stream_is_unavailable() -> None:
    async with serving(StandIn(answer_stream(event(1), 0.02, cut=True))) as server, client_of(server) as client:
        with pytest.raises(EngineUnavailable):
            await read_all(client)


async def test_silence_mid_stream_times_out() -> None:
    answer = answer_stream(event(1), 0.03, event(2), 3600.0)
    async with serving(StandIn(answer)) as server, client_of(server, silence_s=0.15) as client:
        with pytest.raises(EngineTimeout):
            await read_all(client)


async def test_silence_before_first_byte_times_out() -> None:
    async def never(request: Any) -> Any:
        await asyncio.sleep(3600)

    async with serving(StandIn(never)) as server, client_of(server, silence_s=0.1) as client:
        with pytest.raises(EngineTimeout):
            await read_all(client)


async def test_keep_alive_comments_reset_silence_timeout() -> None:
    parts: list[bytes | float] = [b": keep-alive\n\n", scaled(0.025)]
    answer = answer_stream(*(parts * 8), event(1), DONE)
    async with serving(StandIn(answer)) as server, client_of(server, silence_s=scaled(0.15)) as client:
        assert await read_all(client) == [b"1"]


async def test_error_messages_are_short_and_hide_key() -> None:
    key = "sk-very-secret"
    long = {"error": {"message": f"who is {key}? " + "x" * 5000}}
    async with serving(StandIn(answer_with(long, 400))) as server, client_of(server, key=key) as client:
        with pytest.raises(EngineRejected) as raised:
            await read_all(client)
        assert server.headers[0]["Authorization"] == f"Bearer {key}"
    assert key not in raised.value.message and key not in repr(client)
    assert len(raised.value.message) <= 500 + len("engine: ")


async def test_partial_key_in_error_is_hidden() -> None:
    half = {"error": {"message": "Incorrect API key provided: sk-very-se***et"}}
    async with serving(StandIn(answer_with(half, 401))) as server, client_of(server, key="sk-very-secret") as client:
        with pytest.raises(EngineError) as raised:
            await read_all(client)
    assert "sk-very" not in raised.value.message


async def test_unstarted_client_raises() -> None:
    with pytest.raises(RuntimeError, match="start"):
        await read_all(EngineClient("engine", "http://127.0.0.1:1"))


async def test_extract_message_formats() -> None:
    assert extract_message(b'{"error": {"message": "a", "code": 400}}') == "a"
    assert extract_message(b'{"object": "error", "message": "a", "code": 400}') == "a"
    assert extract_message(b'{"error": "a"}') == "a"
    assert extract_message(b'{"detail": "a"}') == "a"
    assert "return_token_ids" in extract_message(b'{"detail": [{"loc": ["body", "return_token_ids"], "msg": "extra"}]}')
    assert extract_message(b"<html>") == "<html>"
    assert extract_message(b"\xff") == "\ufffd"
    assert extract_message(b"") == ""
    assert extract_message(DEEP) == DEEP.decode()
    assert str(error_from_status("engine", 500, "")) == "engine returned status 500"


async def test_deeply_nested_replies_are_engine_errors() -> None:
    client = EngineClient("engine", "http://127.0.0.1:1")
    for decode in (msgspec.json.decode, msgspec.json.Decoder(_Raw).decode):
        with pytest.raises(EngineError, match="engine sent a response that cannot be decoded: a value is nested too"):
            client.decode(decode, b'{"error": ' + DEEP + b"}")
    assert "[[[" in client.failure(500, DEEP).message


async def test_error_event_that_is_not_utf8_keeps_its_text() -> None:
    error = msgspec.json.decode(b'{"error": {"message": "boom \xff"}}', type=_Raw).error
    assert "boom \ufffd" in EngineClient("engine", "http://127.0.0.1:1").failure_in_stream(error, 500).message


async def test_align_logprobs_never_pads_or_truncates() -> None:
    assert align_logprobs("engine", [1, 2], None) == [None, None]
    assert align_logprobs("engine", [1, 2], [-0.5, None]) == [-0.5, None]
    assert align_logprobs("engine", [1, 2], [-9999.0, 0.0]) == [None, 0.0]
    for wrong in ([-0.5], [-0.5, -0.5, -0.5], []):
        with pytest.raises(EngineError, match="different numbers of log-probabilities"):
            align_logprobs("engine", [1, 2], wrong)


@pytest.mark.parametrize(
    ("words", "most", "size"),
    [
        ("prompt is too long: 208310 tokens > 200000 maximum", 200_000, 208_310),
        ("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease", 200_000, 209_573),
        ("The input token count (1200) exceeds the maximum number of tokens allowed (1048).", 1048, 1200),
        ("The input token count exceeds the maximum number of tokens allowed 1048.", 1048, None),
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 10000 tokens.",
            8192,
            10_000,
        ),
        (
            "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, which "
            "exceeds this limit even without any output tokens.",
            2048,
            2049,
        ),
        (
            "This model's maximum context length is 2048 tokens. However, your prompt contains 90000 characters (more than 60000 "
            "characters, which is the upper bound for 2048 input tokens).",
            2048,
            None,
        ),
        ("The decoder prompt (length 3000) is longer than the maximum model length of 2048.", 2048, 3000),
        ("The input (9000 tokens) is longer than the model's context length (8192 tokens).", 8192, 9000),
        ("Your input exceeds the context window of this model.", None, None),
    ],
)
async def test_overflow_carries_limit_and_size(words: str, most: int | None, size: int | None) -> None:
    error = error_from_status("engine", 400, words)
    assert isinstance(error, ContextOverflow) and (error.limit, error.size) == (most, size)
