"""Test errors as seen by the openai client: exception class, message and field name."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.kit import Json, Running, gateway, say, tokenizer, tool, user
from turngate.engines.base import Chunk, Generate
from turngate.engines.scripted import Scripted

HI = [user("Hi")]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def expect_error(g: Running, key: str, kind: type[openai.APIStatusError], **request: Any) -> Any:
    """Make a call that must fail as `kind`, and return the exception."""
    client = g.client(key, max_retries=2)  # as agents do: a retried error would reach the engine again
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(**{"model": "m", "messages": HI, **request})
    assert caught.type is kind
    assert isinstance(caught.value.body, dict) and set(caught.value.body) == {"message", "type", "param", "code"}
    return caught.value


async def post(g: Running, key: str, body: bytes | Json, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await g.http(key).post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json", **headers}
    )


# ── invalid requests ────────────────────────────────────────────────────────────────────────────────────────────────

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
INVALID_REQUESTS: dict[str, tuple[Json, str]] = {
    "several choices": ({"n": 2}, "n"),
    "log-probabilities": ({"logprobs": True}, "logprobs"),
    "alternatives without log-probabilities": ({"top_logprobs": 3}, "top_logprobs"),
    "too many alternatives": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "stream options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a logit bias": ({"logit_bias": {"5": 10}}, "logit_bias"),
    "an old function without a name": ({"functions": [{"parameters": {}}]}, "functions[0].name"),
    "old functions beside tools": ({"functions": [{"name": "f"}], "tools": [tool()]}, "functions"),
    "a forced old function without functions": ({"function_call": "auto"}, "function_call"),
    "an unknown old function": ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    "audio": ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "web search": ({"web_search_options": {}}, "web_search_options"),
    "no messages": ({"messages": []}, "messages"),
    "messages not a list": ({"messages": "Hi"}, "messages"),
    "a message that is not an object": ({"messages": ["Hi"]}, "messages[0]"),
    "a message without a role": ({"messages": [{"content": "Hi"}]}, "messages[0]"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    "a result without its call": ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    "an image": ({"messages": [*HI, IMAGE]}, "messages[1].content[0]"),
    "content of the wrong type": ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
    "an old result without a name": ({"messages": [*HI, {"role": "function", "content": "x"}]}, "messages[1].name"),
    "a temperature that is not a number": ({"temperature": "hot"}, "temperature"),
    "a temperature above 2": ({"temperature": 3}, "temperature"),
    "a top_p above 1": ({"top_p": 1.5}, "top_p"),
    "max_tokens that is not a number": ({"max_tokens": "many"}, "max_tokens"),
    "zero max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "negative max_completion_tokens": ({"max_completion_tokens": -1}, "max_completion_tokens"),
    "fractional max_tokens": ({"max_tokens": 1.5}, "max_tokens"),
    "an empty stop string": ({"stop": ["x", ""]}, "stop"),
    "too many stop strings": ({"stop": [str(n) for n in range(17)]}, "stop"),
    "a stop that is not a string": ({"stop": 5}, "stop"),
    "a stream that is not a boolean": ({"stream": "yes"}, "stream"),
    "tools not a list": ({"tools": "none"}, "tools"),
    "a provider's own tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a custom tool without a name": ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    "a custom tool of an unknown format": (
        {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "yaml"}}}]},
        "tools[0].custom.format",
    ),
    "a tool without a name": ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools[1].function.name"),
    "an unknown forced tool": (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
    ),
    "a forced tool without tools": ({"tool_choice": "required"}, "tool_choice"),
    "an unknown tool choice": ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
    "an unknown allowed tool": (
        {
            "tools": [tool()],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
            },
        },
        "tool_choice.allowed_tools.tools[0]",
    ),
    "no allowed tool": (
        {
            "tools": [tool()],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
        },
        "tool_choice",
    ),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format"),
    "a format without its schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "template arguments not an object": ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "reserved template arguments": ({"chat_template_kwargs": {"messages": []}}, "messages"),
}


async def test_invalid_request_names_its_field() -> None:
    async with gateway([say("Never said.")]) as g:
        session = await g.open()
        for case, (request, param) in INVALID_REQUESTS.items():
            error = await expect_error(g, session.key, openai.BadRequestError, extra_body=request)
            assert error.param == param, case
            assert error.message and param.split("[")[0].split(".")[0] in error.message, case
            assert error.type == "invalid_request_error", case
        # Nothing reached the engine or the trace.
        assert not g.engine.received and await g.turns(session.id) == []


async def test_invalid_streaming_request_has_error_status() -> None:
    async with gateway() as g:
        session = await g.open()
        error = await expect_error(g, session.key, openai.BadRequestError, n=3, stream=True)
        assert error.response.headers["content-type"] == "application/json"


NOT_JSON = {
    "nothing": b"",
    "a truncated object": b'{"messages": [',
    "plain text": b"hello",
    "a list": b"[]",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "not UTF-8 in the tool choice": b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "\xff"}',
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "nested 100,000 deep": b'{"messages": [{"role": "user", "content": "x", "y": '
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}]}",
}


async def test_lone_surrogate_becomes_replacement_character() -> None:
    async with gateway([say("Yes.")]) as g:
        session = await g.open()
        body = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'
        assert (await post(g, session.key, body)).status_code == 200
        assert "cut \ufffd" in tokenizer().decode(g.engine.received[0].prompt.tolist())


@pytest.mark.parametrize("case", NOT_JSON)
async def test_invalid_json_body_is_bad_request(case: str) -> None:
    async with gateway([say("Never said.")]) as g:
        session = await g.open()
        response = await post(g, session.key, NOT_JSON[case])
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_huge_numbers_do_not_crash() -> None:
    async with gateway([say("Never said.")] * 2) as g:
        session = await g.open()
        huge = {"type": "integer", "maximum": 2**70}
        for request in ({"tools": [tool("f", n=huge)]}, {"chat_template_kwargs": {"n": 2**70}}):
            response = await post(g, session.key, {"messages": HI, **request})
            assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("depth", [200, 300, 600, 900, 1100])
async def test_deep_schemas_do_not_crash(depth: int) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], %s}'
    deep = ('{"a":' * depth + '""' + "}" * depth).encode()
    wrapped = b'"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}]"
    async with gateway([say("Hello.")] * 3) as g:
        session = await g.open()
        for part in (wrapped, b'"chat_template_kwargs": {"x": ' + deep + b"}", b'"metadata": ' + deep):
            response = await post(g, session.key, body % part)
            assert response.status_code in (200, 400), response.text


async def test_wrong_method_and_path_are_not_found() -> None:
    async with gateway() as g:
        session = await g.open()
        http = g.http(session.key)
        for method, path in (("GET", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/nowhere")):
            response = await http.request(method, path)
            assert response.status_code == 404 and path in response.json()["error"]["message"]


async def test_session_serves_only_its_model() -> None:
    async with gateway([say("Hello.")]) as g:  # an unnamed gateway accepts any model
        session = await g.open(model="mine")
        error = await expect_error(g, session.key, openai.NotFoundError, model="yours")
        assert error.param == "model" and "mine" in error.message
        assert (await g.ask(session.key, "Hi", model="mine")).content == "Hello."


async def test_unserved_model_is_not_found() -> None:
    async with gateway([say("Hello.")], model="policy-1") as g:
        session = await g.open()
        error = await expect_error(g, session.key, openai.NotFoundError, model="gpt-4o")
        assert error.param == "model" and "policy-1" in error.message
        assert (await g.ask(session.key, "Hi", model="policy-1")).content == "Hello."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_too_large_request(stream: bool) -> None:
    async with gateway([say("Hello.")], max_body_mb=0.05) as g:
        session = await g.open()
        error = await expect_error(
            g, session.key, openai.APIStatusError, messages=[user("x" * 3_000_000)], stream=stream
        )
        assert error.status_code == 413

        # A chunked body without a length is refused as well.
        async def pieces() -> Any:
            for _ in range(60):
                yield b" " * 1000

        response = await g.http(session.key).post("/v1/chat/completions", content=pieces())
        assert response.status_code == 413
        assert (await g.ask(session.key, "Hi")).content == "Hello."  # the gateway still works


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}


async def test_compressed_bodies_are_decoded() -> None:
    body = json.dumps({"model": "m", "messages": HI}).encode()
    async with gateway([say("Hello.")] * len(CODINGS)) as g:
        session = await g.open()
        for coding, compress in CODINGS.items():
            response = await post(g, session.key, compress(body), **{"content-encoding": coding})
            assert response.status_code == 200, coding
        assert len({request.prompt.tobytes() for request in g.engine.received}) == 1


async def test_other_codings_and_damaged_bodies_are_refused() -> None:
    body = json.dumps({"model": "m", "messages": HI}).encode()
    packed = gzip.compress(body)
    cases = [
        ("br", body, "content-encoding 'br' is not supported"),
        ("zstd", body, "content-encoding 'zstd' is not supported"),
        ("gzip, gzip", gzip.compress(packed), "is not supported"),
        ("gzip", body, "not valid gzip"),
        ("gzip", packed[:-9], "incomplete"),
        ("gzip", packed + packed, "it has extra data at its end"),
        ("gzip", b"", "incomplete"),
        ("deflate", packed, "not valid deflate"),
    ]
    async with gateway() as g:
        session = await g.open()
        for coding, sent, words in cases:
            response = await post(g, session.key, sent, **{"content-encoding": coding})
            error = response.json()["error"]
            assert response.status_code == 400 and words in error["message"], (coding, error)
            assert error["param"] == "content-encoding"
        assert not g.engine.received


async def test_decompressed_size_is_limited() -> None:
    async with gateway(max_body_mb=0.05) as g:
        session = await g.open()
        for compress in (gzip.compress, zlib.compress):
            coding = "gzip" if compress is gzip.compress else "deflate"
            response = await post(g, session.key, compress(b" " * 5_000_000), **{"content-encoding": coding})
            assert response.status_code == 413 and "decompressed" in response.json()["error"]["message"]


# ── keys and sessions ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_wrong_and_missing_keys() -> None:
    async with gateway() as g:
        await g.open()
        for key in ("sk-wrong", "tg-" + "x" * 43, g.app.admin_key):
            error = await expect_error(g, key, openai.AuthenticationError)
            assert error.code == "invalid_api_key" and key not in error.message
        response = await g.http().post("/v1/chat/completions", json={"model": "m", "messages": HI})
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"


@STREAMED
@pytest.mark.parametrize("end", ["seal", "cancel"])
async def test_ended_session_is_conflict_without_retry(end: str, stream: bool) -> None:
    async with gateway([say("Never said.")]) as g:
        session = await g.open()
        await (g.seal if end == "seal" else g.cancel)(session.id)
        error = await expect_error(g, session.key, openai.ConflictError, stream=stream)
        # The openai client retries 409 responses unless told not to.
        assert error.response.headers["x-should-retry"] == "false"
        assert error.response.request.headers["x-stainless-retry-count"] == "0"
        assert "sealed" in error.message or "cancelled" in error.message


async def test_key_of_deleted_session_is_unauthorized() -> None:
    async with gateway() as g:
        session = await g.open()
        await g.admin.delete(f"/admin/sessions/{session.id}")
        await expect_error(g, session.key, openai.AuthenticationError)


# ── engine failures ─────────────────────────────────────────────────────────────────────────────────────────────────


@STREAMED
async def test_busy_engine_returns_retry_after(stream: bool) -> None:
    async with gateway([say("", busy=True)] * 3) as g:
        session = await g.open()
        client = g.client(session.key)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="m", messages=HI, stream=stream)
        assert caught.value.response.headers["retry-after"] == "1"
        assert "x-should-retry" not in caught.value.response.headers
        assert await g.turns(session.id) == []  # nothing was sampled


async def test_sdk_retry_succeeds_when_engine_recovers() -> None:
    async with gateway([say("", fail_before=True), say("Back.")]) as g:
        session = await g.open()
        reply = await g.client(session.key, max_retries=2).chat.completions.create(model="m", messages=HI)
        assert reply.choices[0].message.content == "Back."
        assert [t["role"] for t in await g.turns(session.id)] == ["main"]


@STREAMED
async def test_unavailable_engine_is_server_error(stream: bool) -> None:
    async with gateway([say("", fail_before=True)]) as g:
        session = await g.open()
        with pytest.raises(openai.InternalServerError) as caught:
            await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=stream)
        assert caught.value.status_code == 503
        assert await g.turns(session.id) == []


@STREAMED
async def test_silent_engine_is_gateway_timeout(stream: bool) -> None:
    async with gateway(engine=Scripted([say("Never said.", hang=True)], silence_s=0.05)) as g:
        session = await g.open()
        with pytest.raises(openai.InternalServerError) as caught:
            await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=stream)
        assert caught.value.status_code == 504


@STREAMED
async def test_too_long_prompt_is_context_length_error(stream: bool) -> None:
    async with gateway([say("", overflow=True)]) as g:
        session = await g.open()
        error = await expect_error(g, session.key, openai.BadRequestError, stream=stream)
        assert error.code == "context_length_exceeded"
    async with gateway([say("Hello.")], max_context=40) as g:
        session = await g.open()
        error = await expect_error(
            g, session.key, openai.BadRequestError, messages=[user("word " * 100)], stream=stream
        )
        assert error.code == "context_length_exceeded" and error.param == "messages"
        assert "maximum context length is 40 tokens" in error.message  # the phrase that agents look for
        assert not g.engine.received
        assert (await g.ask(session.key, "Hi")).content == "Hello."


async def test_engine_context_length_is_enforced() -> None:
    async with gateway(engine=Scripted([say("x " * 100)], max_context=30)) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Hi")
        assert reply.finish == "length" and reply.usage.total_tokens == 30
        await expect_error(g, session.key, openai.BadRequestError, messages=[user("word " * 100)])


async def test_engine_failure_during_stream() -> None:
    """The agent gets an error; the samples are kept as an aborted turn and never trained."""
    async with gateway([say("One two three four five.", cut_after=4), say("Six.")]) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=True)
        text = ""
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text and "before the generation finished" in caught.value.message
        [turn] = await g.turns(session.id)
        assert (turn["role"], turn["finish"], len(turn["ids"])) == ("aborted", "abort", 4)
        assert tokenizer().decode(turn["ids"]).startswith(text) and turn["fault"]
        assert await g.samples(session.id) == []
        # The agent retries, and that answer is the main line.
        assert (await g.ask(session.key, HI)).content == "Six."
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted", "main"]
        [row] = await g.samples(session.id)
        assert sum(row["mask"]) == len((await g.turns(session.id))[1]["ids"])


async def test_engine_failure_during_whole_reply() -> None:
    async with gateway([say("One two three four five.", cut_after=4)]) as g:
        session = await g.open()
        # A whole reply is one chunk, which may have arrived in part.
        with pytest.raises(openai.InternalServerError) as caught:
            await g.client(session.key).chat.completions.create(model="m", messages=HI)
        assert caught.value.status_code == 503
        [turn] = await g.turns(session.id)
        assert turn["role"] == "aborted" and await g.samples(session.id) == []


async def read_to_end(g: Running, key: str, stream: bool) -> None:
    """Make one call and read its reply to the end."""
    reply: Any = await g.client(key).chat.completions.create(model="m", messages=HI, stream=stream)
    if stream:
        async for _ in reply:
            pass


@STREAMED
async def test_engine_abort_is_error_for_agent(stream: bool) -> None:
    """An engine may abort a generation, for example for a weight update. The agent gets an error, not a finished answer."""
    async with gateway([say("One two three", close=False, finish="abort")]) as g:
        session = await g.open()
        with pytest.raises(openai.APIError):
            await read_to_end(g, session.key, stream)


@STREAMED
async def test_engine_abort_is_recorded_once(stream: bool) -> None:
    async with gateway([say("One two three", close=False, finish="abort")]) as g:
        session = await g.open()
        with suppress(openai.APIError):
            await read_to_end(g, session.key, stream)
        [turn] = await g.turns(session.id)
        assert turn["role"] == "aborted" and turn["fault"]
        assert await g.samples(session.id) == []


class BuggyEngine(Scripted):
    """An engine that raises an unexpected exception."""

    @asynccontextmanager
    async def generate(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with super().generate(request) as chunks:
            yield self._fail_after_first_chunk(chunks)

    async def _fail_after_first_chunk(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        yield msgspec.structs.replace(await anext(chunks), finish=None)
        raise ZeroDivisionError("the innermost secret of the gateway")


@STREAMED
async def test_internal_error_has_openai_shape(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The error has OpenAI's shape and no internal details, and the samples are kept."""
    async with gateway(engine=BuggyEngine([say("One two three.")])) as g:
        session = await g.open()
        with pytest.raises(openai.APIError) as caught:
            await read_to_end(g, session.key, stream)
        assert caught.value.code == "internal_error" and "secret" not in caught.value.message
        assert "the innermost secret" in caplog.text  # logged for the operator
        [turn] = await g.turns(session.id)
        assert turn["role"] == "aborted" and await g.samples(session.id) == []


@pytest.mark.promise(2)
@STREAMED
async def test_missing_logprobs_are_never_filled_in(stream: bool) -> None:
    async with gateway([say("Hello.", null_logprobs=True)]) as g:
        session = await g.open()
        way = "async stream" if stream else "async"
        assert (await g.ask(session.key, "Hi", way)).content == "Hello."  # the agent is not affected
        [turn] = await g.turns(session.id)
        assert turn["logprobs"] == [None] * len(turn["ids"]) and turn["role"] == "main"
        assert await g.samples(session.id) == []
        [row] = await g.samples(session.id, keep_empty=True)
        assert not any(row["mask"]) and "log-probabilities" in row["spans"][0]["reason"]


@pytest.mark.promise(2)
async def test_one_missing_logprob_excludes_turn() -> None:
    ids = say("Hello.").ids
    async with gateway([say("Hello.", logprobs=[None, *[-0.5] * (len(ids) - 1)])]) as g:
        session = await g.open()
        await g.ask(session.key, "Hi")
        [turn] = await g.turns(session.id)
        assert turn["logprobs"] == [None, *[-0.5] * (len(ids) - 1)]
        assert await g.samples(session.id) == []


@STREAMED
async def test_too_few_logprobs_are_refused_and_logged(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway([say("Hello.", short_logprobs=True)]) as g:
        session = await g.open()
        with caplog.at_level(logging.WARNING, "turngate"):
            error = await expect_error(g, session.key, openai.InternalServerError, stream=stream)
        assert error.status_code == 502 and "log-probabilities" in error.message
        assert error.response.headers["x-should-retry"] == "false"
        assert "log-probabilities" in caplog.text
        assert await g.turns(session.id) == []


class TruncatingEngine(Scripted):
    """An engine that drops the first prompt token."""

    def generate(self, request: Generate) -> Any:
        return super().generate(msgspec.structs.replace(request, prompt=request.prompt[1:]))


@STREAMED
async def test_echo_prompt_detects_different_prompt(stream: bool) -> None:
    """With `echo_prompt` the engine returns the prompt it saw, and a different one is an error."""
    async with gateway([say("Hello.")], echo_prompt=True) as g:
        session = await g.open()
        assert (await g.ask(session.key, "Hi")).content == "Hello."
    async with gateway(engine=TruncatingEngine([say("Hello.")]), echo_prompt=True) as g:
        session = await g.open()
        error = await expect_error(g, session.key, openai.InternalServerError, stream=stream)
        assert error.status_code == 502 and "a different prompt" in error.message
        assert await g.samples(session.id) == []


async def test_read_only_store_refuses_calls() -> None:
    """Turns are recorded before delivery, so a call that cannot be recorded is not answered."""
    async with gateway([say("Lost."), say("Kept.")]) as g:
        session = await g.open()
        db = g.app.store.database._db
        db.execute("PRAGMA query_only=ON")  # like a disk that became read-only
        error = await expect_error(g, session.key, openai.InternalServerError)
        assert error.status_code == 503 and error.code == "store_error"
        calls_before = len(g.engine.received)
        await expect_error(g, session.key, openai.InternalServerError)
        assert len(g.engine.received) == calls_before  # refused before the engine is called
        db.execute("PRAGMA query_only=OFF")
        assert (await g.ask(session.key, "Hi")).content
        assert len(await g.turns(session.id)) == 1


async def test_unstorable_stream_ends_with_error() -> None:
    async with gateway([say("Lost words.")]) as g:
        session = await g.open()
        g.app.store.database._db.execute("PRAGMA query_only=ON")
        stream = await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=True)
        finishes = []
        with pytest.raises(openai.APIError):
            async for chunk in stream:
                finishes.append(chunk.choices[0].finish_reason)
        assert set(finishes) == {None}
        g.app.store.database._db.execute("PRAGMA query_only=OFF")


async def test_parallel_calls_fail_independently() -> None:
    def script(request: Any, index: int) -> Any:
        return say("", busy=True) if index % 2 else say(f"Answer {index}.")

    async with gateway(script) as g:
        session = await g.open()
        replies = await asyncio.gather(*(g.ask(session.key, f"Question {n}") for n in range(8)), return_exceptions=True)
        assert sum(isinstance(r, openai.RateLimitError) for r in replies) == 4
        assert len(await g.turns(session.id)) == 4


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/admin/sessions", '{"model": "[{", "metadata": {"a": %s}}', "metadata"),
        ("POST", "/sessions", '{"metadata": {"a": %s}}', "metadata"),
        ("PUT", "/admin/sessions/ended/outcome", '{"kind": "graded", "reward": 1, "data": %s}', "data"),
        ("POST", "/v1/rollouts/r/register", '{"model": "m", "sampling_params": %s}', "sampling_params"),
        ("POST", "/admin/events", '{"kind": "note", "data": {"\\"": %s}}', "data"),
        ("PUT", "/admin/feeds/f", "%s", None),
    ],
)
@pytest.mark.parametrize("depth", [250, 900, 100_000])
async def test_deeply_nested_body_names_its_field(
    method: str, path: str, body: str, field: str | None, depth: int
) -> None:
    """Bodies near the parser's limit are refused too, because later readers may fail on them."""
    async with gateway() as g:
        await g.open(id="ended")
        await g.seal("ended")
        response = await g.admin.request(method, path, content=body % ("[" * depth + "]" * depth))
        error = response.json()["error"]
        assert response.status_code in (400, 422) and error["param"] == field and "nested" in error["message"]
        fine = await g.admin.post("/admin/sessions", json={"metadata": {"many": [[{}]] * 10_000, "text": "[" * 1000}})
        assert fine.status_code == 201
