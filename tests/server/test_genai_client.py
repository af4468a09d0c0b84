"""Test the gateway with the official `google-genai` client."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import httpx
import pydantic
import pytest
from google import genai
from google.genai import errors, types

from tests.exact.agent import World, asgi
from tests.exact.invariants import check_invariants
from tests.exact.test_property import make_turn
from tests.kit import (
    CLIENT_MODES,
    Gated,
    Json,
    OpenSession,
    Running,
    calls,
    gateway,
    in_every_mode,
    real_tokenizer,
    say,
    tokenizer,
    until,
)
from tests.renderer_fixtures import (
    renderer_params,
    renderers,  # noqa: F401
)
from tests.speed import scaled
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn

every_way = in_every_mode(CLIENT_MODES)
THOUGHTS = {"include_thoughts": True}
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Reply(NamedTuple):
    """A reply, streamed or not."""

    text: str
    thoughts: str
    calls: list[types.FunctionCall]
    finish: types.FinishReason | None
    usage: types.GenerateContentResponseUsageMetadata | None
    contents: list[types.Content]  # for the agent's history: one per chunk


def join_chunks(chunks: Sequence[types.GenerateContentResponse]) -> Reply:
    contents = [c.candidates[0].content for c in chunks if c.candidates and c.candidates[0].content]
    parts = [part for content in contents for part in content.parts or ()]
    last = chunks[-1].candidates
    return Reply(
        "".join(p.text for p in parts if p.text and not p.thought),
        "".join(p.text for p in parts if p.text and p.thought),
        [p.function_call for p in parts if p.function_call],
        last[0].finish_reason if last else None,
        chunks[-1].usage_metadata,
        contents,
    )


@asynccontextmanager
async def client(g: Running, key: str, path: str = "", **options: Any) -> AsyncIterator[genai.Client]:
    """Open a client without retries and without certificates, which take 0.1 s to load."""
    async with aiohttp.ClientSession() as session:
        with httpx.Client(verify=False, trust_env=False, timeout=scaled(20)) as http:
            transport: Json = {"aiohttp_client": session, "httpx_client": http, "base_url": g.root + path}
            transport |= {"client_args": {"verify": NO_TLS}, "async_client_args": {"ssl": NO_TLS}}
            yield genai.Client(api_key=key, http_options=types.HttpOptions(**{**transport, **options}))


async def ask(g: Running, key: str, contents: Any, way: str = "async", **config: Any) -> Reply:
    async with client(g, key) as c:
        request: Json = {"model": "m", "contents": contents, "config": config or None}
        match way:
            case "async":
                return join_chunks([await c.aio.models.generate_content(**request)])
            case "async stream":
                return join_chunks([chunk async for chunk in await c.aio.models.generate_content_stream(**request)])
            case "sync":
                return join_chunks([await asyncio.to_thread(lambda: c.models.generate_content(**request))])
            case _:
                return join_chunks(await asyncio.to_thread(lambda: list(c.models.generate_content_stream(**request))))


def function(name: str = "read_file", **properties: Json) -> types.FunctionDeclaration:
    schema = {"type": "object", "properties": properties or {"path": {"type": "string"}}}
    return types.FunctionDeclaration(name=name, description=f"Does {name}.", parameters_json_schema=schema)


def tools(*functions: types.FunctionDeclaration) -> list[types.Tool]:
    return [types.Tool(function_declarations=list(functions or [function()]))]


def user(*parts: Any) -> types.Content:
    return types.UserContent(list(parts))


def result(call: types.FunctionCall, response: Json, *, with_ids: bool = True) -> types.Part:
    return types.Part(
        function_response=types.FunctionResponse(id=call.id if with_ids else None, name=call.name, response=response)
    )


def prompts(g: Running) -> list[str]:
    return [tokenizer().decode(request.prompt.tolist()) for request in g.engine.received]


async def assert_one_row(g: Running, session: OpenSession, turns: int) -> None:
    """Check that all samples are one row with exactly the ids the engine received."""
    [row] = await g.samples(session.id)
    assert [span["trained"] for span in row["spans"]] == [True] * turns
    for request, span in zip(g.engine.received, row["spans"], strict=True):
        assert request.prompt.tolist() == row["ids"][: span["start"]]
    assert {(t["role"], t["cause"]) for t in await g.turns(session.id)} == {("main", None)}


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_text_answer(way: str) -> None:
    async with gateway([say("Hello there, friend.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way)
        assert (reply.text, reply.thoughts, reply.calls, reply.finish) == ("Hello there, friend.", "", [], "STOP")
        [turn] = await g.turns(session.id)
        assert reply.usage is not None and reply.usage.prompt_token_count == len(g.engine.received[0].prompt)
        assert reply.usage.candidates_token_count == len(turn["ids"])
        assert reply.usage.total_token_count == len(g.engine.received[0].prompt) + len(turn["ids"])
        assert prompts(g) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


async def test_reply_and_chunk_fields() -> None:
    async with gateway([say("One."), say("Two two.")]) as g, client(g, (await g.open()).key) as c:
        reply = await c.aio.models.generate_content(model="some-model", contents="Hi")
        assert reply.text == "One." and reply.model_version == "some-model" and reply.response_id
        stream = await c.aio.models.generate_content_stream(model="some-model", contents="Hi")
        chunks = [chunk async for chunk in stream]
        assert len(chunks) > 2 and {chunk.response_id for chunk in chunks} == {chunks[0].response_id}
        assert chunks[0].response_id != reply.response_id
        reasons = [chunk.candidates[0].finish_reason for chunk in chunks if chunk.candidates]
        assert reasons == [None] * (len(chunks) - 1) + ["STOP"]
        assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@every_way
@pytest.mark.parametrize("text", ["Größe 汉字 👩‍👩‍👧 é\n\n\tend", "", "data: {}\r\n\r\n"])
async def test_text_arrives_exactly_as_sampled(way: str, text: str) -> None:
    async with gateway([say(text)]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way)
        assert (reply.text, reply.finish) == (text, "STOP")


@every_way
async def test_token_limit_and_stop_string(way: str) -> None:
    async with gateway([say("One two three four."), say("One END two")]) as g:
        session = await g.open()
        cut = await ask(g, session.key, "Count", way, max_output_tokens=3)
        assert cut.finish == "MAX_TOKENS" and cut.usage is not None and cut.usage.candidates_token_count == 3
        ended = await ask(g, session.key, "Again", way, stop_sequences=["END"], temperature=0.5, top_k=40, seed=7)
        assert (ended.text.strip(), ended.finish) == ("One", "STOP")
        sampling = g.engine.received[1].sampling
        assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 7, 0)  # neutral sampling ignores top_k


@every_way
async def test_system_instruction_reaches_model(way: str) -> None:
    async with gateway([say("Yes.")]) as g:
        session = await g.open()
        await ask(g, session.key, ["<context>", "Do it"], way, system_instruction="Be good.")
        assert "system\nBe good.<|im_end|>" in prompts(g)[0] and "user\n<context>\nDo it<|im_end|>" in prompts(g)[0]


async def test_stream_without_sse_is_json_array() -> None:
    async with gateway([say("Hello there.")] * 2) as g:
        session = await g.open()
        body = {"contents": [{"parts": [{"text": "Hi"}]}]}
        http = g.http()
        url = f"/v1beta/models/m:streamGenerateContent?key={session.key}"
        reply = await http.post(url, json=body)
        assert reply.headers["content-type"] == "application/json; charset=UTF-8"
        texts = [c["candidates"][0]["content"]["parts"][0]["text"] for c in reply.json()]
        assert "".join(texts) == "Hello there." and reply.json()[-1]["candidates"][0]["finishReason"] == "STOP"
        reply = await http.post(url + "&alt=sse", json=body)
        assert reply.headers["content-type"] == "text/event-stream"
        assert all(line.startswith("data: {") for line in reply.text.split("\r\n\r\n")[:-1])


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sample(4)
@every_way
@pytest.mark.parametrize("with_ids", [True, False], ids=["ids", "no ids"])
async def test_five_turns_with_tools_make_one_training_row(way: str, with_ids: bool) -> None:
    """Run a small agent with parallel calls, results, thinking, an answer and another question."""
    script = [
        say(
            "<think>\nI should look.\n</think>\n\nLet me see."
            + calls(("read_file", {"path": "a.py"}), ("read_file", {"path": "b.py"}))
        ),
        say(calls(("write_file", {"path": "c.py", "text": 'x = "1"\n'}))),
        say("<think>\nDone now.\n</think>\n\nAll done."),
        say(calls(("read_file", {"path": "c.py"}))),
        say("It says x."),
    ]
    write = function("write_file", path={"type": "string"}, text={"type": "string"})
    async with gateway(script) as g:
        session = await g.open()
        history: list[types.Content] = [user("Copy a and b into c.")]

        async def turn(*more: types.Content) -> Reply:
            history.extend(more)
            config: Json = {"system_instruction": "Be careful.", "thinking_config": THOUGHTS}
            reply = await ask(g, session.key, history, way, tools=tools(function(), write), **config)
            history.extend(reply.contents)
            return reply

        first = await turn()
        assert (first.thoughts, first.text, first.finish) == ("I should look.", "Let me see.", "STOP")
        assert [(c.name, c.args) for c in first.calls] == [
            ("read_file", {"path": "a.py"}),
            ("read_file", {"path": "b.py"}),
        ]
        assert len({c.id for c in first.calls}) == 2
        second = await turn(user(*(result(c, {"output": f"text of {c.args}"}, with_ids=with_ids) for c in first.calls)))
        assert second.text == "" and second.calls[0].args == {"path": "c.py", "text": 'x = "1"\n'}
        third = await turn(user(result(second.calls[0], {"error": "disk full"}, with_ids=with_ids)))
        assert (third.thoughts, third.text) == ("Done now.", "All done.")
        fourth = await turn(user("What does c say?"))
        fifth = await turn(user(result(fourth.calls[0], {"result": {"x": 1}}, with_ids=with_ids)))
        assert fifth.text == "It says x."
        assert "<tool_response>\nError: disk full\n</tool_response>" in prompts(g)[2]
        assert '<tool_response>\n{"x": 1}\n</tool_response>' in prompts(g)[4]
        await assert_one_row(g, session, 5)
        [row] = await g.samples(session.id)
        sampled = [i for turn_ in script for i in turn_.ids]
        assert [i for i, trained in zip(row["ids"], row["mask"], strict=True) if trained] == sampled


def read_file(path: str) -> str:
    """Reads a file."""
    if path == "missing":
        raise FileNotFoundError(path)
    return f"text of {path}"


@every_way
async def test_sdk_automatic_function_calling(way: str) -> None:
    """The SDK's chat loop answers calls without ids and keeps every chunk as its own content."""
    script = [
        say(
            "<think>\nLook.\n</think>\n\nI see."
            + calls(("read_file", {"path": "a"}), ("read_file", {"path": "missing"}))
        ),
        say(calls(("read_file", {"path": "b"}))),
        say("Both read."),
        say("You are welcome."),
    ]
    async with gateway(script) as g:
        session = await g.open()
        async with client(g, session.key) as c:
            config: Json = {"tools": [read_file], "system_instruction": "Work.", "thinking_config": THOUGHTS}
            texts = []
            if way.startswith("async"):
                chat = c.aio.chats.create(model="m", config=config)
                for message in ("Read a and b", "Thanks"):
                    if way == "async":
                        texts.append((await chat.send_message(message)).text)
                    else:
                        stream = await chat.send_message_stream(message)
                        texts.append("".join([chunk.text or "" async for chunk in stream]))
                history = chat.get_history(curated=True)
            else:
                talk = c.chats.create(model="m", config=config)

                def converse(message: str) -> str:
                    if way == "sync":
                        return talk.send_message(message).text or ""
                    return "".join(chunk.text or "" for chunk in talk.send_message_stream(message))

                texts = [await asyncio.to_thread(converse, message) for message in ("Read a and b", "Thanks")]
                history = talk.get_history(curated=True)
            expected = (
                ["Both read.", "You are welcome."] if "stream" not in way else ["I see.Both read.", "You are welcome."]
            )
            assert texts == expected
            assert history[-1].role == "model" and history[-1].parts
        assert "\ntext of a\n" in prompts(g)[1] and "\nError: Failed to invoke" in prompts(g)[1]
        assert "\ntext of b\n" in prompts(g)[2]
        await assert_one_row(g, session, 4)


MALFORMED_CALLS = {
    "a lone surrogate": r'{"name": "f", "arguments": {"a": "\ud800"}}',
    "an invalid escape": r'{"name": "f", "arguments": "\q"}',
    "NaN": '{"name": "f", "arguments": {"a": NaN}}',
    "a huge number": '{"name": "f", "arguments": {"a": 1' + "0" * 400 + "}}",
    "a large number": '{"name": "f", "arguments": {"a": 123456789012345678901234567890}}',
    "white space": '{"name": "f", "arguments": {\n "a" : [1,\n2.0]\n}}',
    "arguments that are no object": '{"name": "f", "arguments": [1, "x", null]}',
    "arguments in a string": r'{"name": "f", "arguments": "{\"a\": 1}"}',
    "nested 900 deep": '{"name": "f", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    "a list": "[1]",
    "nothing": "",
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("case", MALFORMED_CALLS)
@pytest.mark.parametrize("way", ["async", "async stream"])
async def test_malformed_call_is_delivered_and_continues(case: str, way: str) -> None:
    text = f"<tool_call>\n{MALFORMED_CALLS[case]}\n</tool_call>"
    async with gateway([say(text), say("Next.")]) as g:
        session = await g.open()
        offered = tools(function("f"))
        reply = await ask(g, session.key, [user("Hi")], way, tools=offered, max_output_tokens=10_000)
        assert reply.calls or reply.text
        answers = [result(c, {"output": "x"}) for c in reply.calls] or [types.Part(text="Go on")]
        await ask(g, session.key, [user("Hi"), *reply.contents, user(*answers)], way, tools=offered)
        await assert_one_row(g, session, 2)


@every_way
async def test_mode_none_hides_tools_from_model(way: str) -> None:
    async with gateway([say("I cannot."), say(calls(("read_file", {"path": "a"})))]) as g:
        session = await g.open()
        for mode, shown in (("NONE", False), ("VALIDATED", True)):
            config = {"function_calling_config": {"mode": mode}}
            await ask(g, session.key, "Read a", way, tools=tools(), tool_config=config)
            assert ("read_file" in prompts(g)[-1]) == shown
            assert g.engine.received[-1].constraint is None


@every_way
async def test_constrained_output_works_and_is_marked_biased(way: str) -> None:
    class Number(pydantic.BaseModel):
        n: int

    def script(request: Generate, index: int) -> ScriptedTurn:
        assert request.constraint is not None
        forced = '[{"name": "read_file", "arguments": {"path": "a"}}]'
        return say(forced if request.constraint.kind == "tools" else '{"n": 1}')

    async with gateway(script) as g:
        session = await g.open()
        config = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["read_file"]}}
        offered = tools(function(), function("other"))
        reply = await ask(g, session.key, "Go", way, tools=offered, tool_config=config)
        assert [(c.name, c.args) for c in reply.calls] == [("read_file", {"path": "a"})] and reply.text == ""
        reply = await ask(g, session.key, "Go", way, response_mime_type="application/json")
        assert json.loads(reply.text) == {"n": 1}
        reply = await ask(g, session.key, "Go", way, response_mime_type="application/json", response_schema=Number)
        kinds = [r.constraint.kind for r in g.engine.received if r.constraint is not None]
        assert kinds == ["tools", "json_object", "json_schema"]
        shape = g.engine.received[-1].constraint
        assert shape is not None and shape.schema["type"] == "object"
        assert shape.schema["properties"]["n"]["type"] == "integer"
        assert [t["biases"] for t in await g.turns(session.id)] == [
            [f"constrained: {kind} after reasoning"] for kind in kinds
        ]
        assert await g.samples(session.id) == []


async def test_sdk_parses_structured_output() -> None:
    class Number(pydantic.BaseModel):
        n: int

    async with gateway([say('{"n": 7}')]) as g, client(g, (await g.open()).key) as c:
        config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Number)
        reply = await c.aio.models.generate_content(model="m", contents="Pick", config=config)
        assert reply.parsed == Number(n=7)


# ── thinking ────────────────────────────────────────────────────────────────────────────────────────────────────────

THINKING_SCRIPT = [
    say("<think>\nFirst thought.\n</think>\n\nA. " + calls(("read_file", {"path": "a"}))),
    say("<think>\nSecond thought.\n</think>\n\nB."),
    say("C."),
]


@pytest.mark.sample(4)
@every_way
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
async def test_thoughts_stay_in_context_if_agent_drops_them(way: str, shown: bool, kept: bool) -> None:
    async with gateway(THINKING_SCRIPT) as g:
        session = await g.open()
        history = [user("Go")]
        for more in (lambda h: user(result(h.calls[0], {"output": "x"})), lambda h: user("On"), None):
            config = {"tools": tools(), "thinking_config": {"include_thoughts": shown}}
            reply = await ask(g, session.key, history, way, **config)
            assert bool(reply.thoughts) == (shown and len(g.engine.received) < 3)
            contents = [
                types.Content(role="model", parts=[p for p in content.parts or () if kept or not p.thought])
                for content in reply.contents
            ]
            if more is not None:
                history += [c for c in contents if c.parts]
                history.append(more(reply))
        assert "First thought." in prompts(g)[1] and "Second thought." in prompts(g)[2]
        await assert_one_row(g, session, 3)


async def test_signature_restores_thought_in_another_session() -> None:
    """The agent moves its conversation to another session, which knows only what the agent sends."""
    async with gateway([*THINKING_SCRIPT, say("D.")]) as g:
        first, second = await g.open(), await g.open()
        reply = await ask(g, first.key, [user("Go")], "async stream", tools=tools())
        assert reply.thoughts == "" and reply.contents[-2].parts
        assert reply.contents[-2].parts[0].thought_signature == b"tg1.First thought."
        history = [user("Go"), *reply.contents, user(result(reply.calls[0], {"output": "x"}))]
        await ask(g, second.key, history, tools=tools())
        assert "First thought." in prompts(g)[1]


@pytest.mark.needs("tokenizers")
async def test_thinking_budget_zero_disables_thinking() -> None:
    folder = real_tokenizer("qwen3")
    async with gateway([say("Yes.", folder=folder)] * 2, tokenizer=str(folder)) as g:
        session = await g.open()
        decode = tokenizer(folder).decode
        for budget, empty in ((0, True), (-1, False)):
            await ask(g, session.key, "Hi", thinking_config={"thinking_budget": budget})
            assert decode(g.engine.received[-1].prompt.tolist()).rstrip().endswith("</think>") == empty


# ── keep-alives ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["async stream", "sync stream"])
@pytest.mark.parametrize("shown", [True, False])
async def test_sdk_ignores_keep_alives(way: str, shown: bool) -> None:
    """Keep-alives before the first token, between tokens and during hidden thinking do not disturb the SDK."""
    slow = say("<think>\nLong thought here.\n</think>\n\nDone.", delay_s=0.15, pace_s=0.03)
    async with gateway([slow, say("Next.")], alive_s=0.02) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way, thinking_config={"include_thoughts": shown})
        assert reply.text == "Done." and reply.thoughts == ("Long thought here." if shown else "")
        assert all(content.parts for content in reply.contents)
        await ask(g, session.key, [user("Hi"), *reply.contents, user("More")], way)
        await assert_one_row(g, session, 2)


async def test_keep_alives_during_hidden_thinking() -> None:
    engine = Gated([say("<think>\n" + "word " * 12 + "\n</think>\n\nDone.")], tokens=8)
    async with gateway(engine=engine, alive_s=0.05) as g, asyncio.timeout(scaled(10)):
        session = await g.open()
        body = {"contents": [{"parts": [{"text": "Hi"}]}]}
        url = "/v1beta/models/m:streamGenerateContent?alt=sse"
        text, keep_alives = "", 0
        async with g.http(session.key).stream("POST", url, json=body) as reply:
            async for piece in reply.aiter_text():
                text += piece
                keep_alives += bool(piece) and not piece.strip()
                if keep_alives == 2:
                    engine.gate.set()
        assert keep_alives >= 2 and "word" not in text and "Done" in text


# ── counting and models ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_tokens_matches_engine_prompt() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        async with client(g, session.key) as c:
            counted = await c.aio.models.count_tokens(model="m", contents=[user("How many tokens?")])
            assert not g.engine.received and await g.turns(session.id) == []
            await ask(g, session.key, [user("How many tokens?")])
            assert counted.total_tokens == len(g.engine.received[0].prompt)
        inner: Json = {
            "model": "models/m",
            "contents": [{"role": "user", "parts": [{"text": "How many tokens?"}]}],
            "systemInstruction": {"parts": [{"text": "Be good."}]},
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
        }
        reply = await g.http(session.key).post("/v1beta/models/m:countTokens", json={"generateContentRequest": inner})
        assert reply.json()["totalTokens"] > (counted.total_tokens or 0)


async def test_list_and_get_models() -> None:
    async with gateway(model="policy-1") as g:
        session = await g.open()
        for options in ({}, {"api_version": "v1beta"}):
            async with client(g, session.key, **options) as c:
                assert [m.name async for m in await c.aio.models.list()] == ["models/policy-1"]
                model = await c.aio.models.get(model="policy-1")
                assert model.name == "models/policy-1" and "generateContent" in (model.supported_actions or ())
                with pytest.raises(errors.ClientError) as caught:
                    await c.aio.models.get(model="gemini-pro")
                assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
        reply = await g.http().get(f"/v1beta/models?key={session.key}")
        assert reply.json()["models"][0]["name"] == "models/policy-1"


@pytest.mark.parametrize("version", ["v1beta", "v1", "v1alpha"])
async def test_every_api_version_and_session_path(version: str) -> None:
    async with gateway([say("Hello.")] * 2) as g:
        session = await g.open()
        for path in ("", f"/s/{session.id}"):
            async with client(g, session.key, path, api_version=version) as c:
                reply = await c.aio.models.generate_content(model="a/b:c", contents="Hi")
                assert reply.text == "Hello." and reply.model_version == "a/b:c"


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def ask_failing(g: Running, key: str, way: str = "async", contents: Any = "Hi", **config: Any) -> errors.APIError:
    with pytest.raises(errors.APIError) as caught:
        await ask(g, key, contents, way, **config)
    return caught.value


@every_way
async def test_engine_faults_map_to_google_errors(way: str) -> None:
    faults = [
        (ScriptedTurn((), busy=True), 429, "RESOURCE_EXHAUSTED"),
        (ScriptedTurn((), fail_before=True), 503, "UNAVAILABLE"),
        (ScriptedTurn((), overflow=True), 400, "INVALID_ARGUMENT"),
    ]
    async with gateway([turn for turn, _, _ in faults]) as g:
        session = await g.open()
        for _, code, status in faults:
            error = await ask_failing(g, session.key, way)
            assert (error.code, error.status) == (code, status)
            assert isinstance(error, errors.ServerError if code >= 500 else errors.ClientError)
        assert await g.turns(session.id) == []


@every_way
async def test_too_long_prompt_error_matches_google(way: str) -> None:
    async with gateway([say("x")], max_context=30) as g:
        session = await g.open()
        error = await ask_failing(g, session.key, way, "word " * 100)
        size = int(str(error.message).split("(")[1].split(")")[0])
        assert error.message == f"The input token count ({size}) exceeds the maximum number of tokens allowed (30)."
        assert (error.code, error.status) == (400, "INVALID_ARGUMENT") and size > 100


@every_way
async def test_wrong_and_missing_keys(way: str) -> None:
    async with gateway([say("x")]) as g:
        session = await g.open()
        error = await ask_failing(g, "wrong", way)
        assert (error.code, error.status) == (400, "INVALID_ARGUMENT")
        assert str(error.message).startswith("API key not valid. Please pass a valid API key.")
        assert "API_KEY_INVALID" in json.dumps(error.details) and not g.engine.received
        reply = await g.http().post("/v1beta/models/m:generateContent", json={})
        assert reply.status_code == 400 and "API_KEY_INVALID" in reply.text
        assert session.key not in reply.text


@every_way
async def test_ended_session_is_failed_precondition(way: str) -> None:
    async with gateway([say("x")]) as g:
        session = await g.open()
        await g.seal(session.id)
        error = await ask_failing(g, session.key, way)
        assert (error.code, error.status) == (400, "FAILED_PRECONDITION") and "sealed" in str(error.message)


@every_way
async def test_unknown_model_is_not_found(way: str) -> None:
    async with gateway([say("x")], model="policy-1") as g:
        session = await g.open()
        error = await ask_failing(g, session.key, way)
        assert (error.code, error.status) == (404, "NOT_FOUND") and "policy-1" in str(error.message)


@every_way
async def test_unsupported_features_are_named(way: str) -> None:
    async with gateway([say("x")]) as g:
        session = await g.open()
        image = types.Part.from_bytes(data=b"x", mime_type="image/png")
        error = await ask_failing(g, session.key, way, [user("Look", image)])
        assert (error.code, error.status) == (400, "INVALID_ARGUMENT")
        assert str(error.message).startswith("contents[0].parts[1].inlineData: ")
        error = await ask_failing(g, session.key, way, response_logprobs=True, logprobs=3)
        assert str(error.message).startswith("generationConfig.responseLogprobs ")
        error = await ask_failing(g, session.key, way, tools=[types.Tool(google_search=types.GoogleSearch())])
        assert str(error.message).startswith("tools[0].googleSearch ")
        error = await ask_failing(g, session.key, way, candidate_count=2)
        assert "fieldViolations" in json.dumps(error.details)
        assert not g.engine.received and await g.turns(session.id) == []


@pytest.mark.parametrize("way", ["async stream", "sync stream"])
async def test_engine_failure_during_stream(way: str) -> None:
    async with gateway([say("One two three four.", cut_after=3)]) as g:
        session = await g.open()
        error = await ask_failing(g, session.key, way)
        assert (error.code, error.status) == (503, "UNAVAILABLE") and isinstance(error, errors.ServerError)
        [turn] = await g.turns(session.id)
        assert (turn["role"], len(turn["ids"])) == ("aborted", 3)


async def test_sdk_retries_only_retryable_errors() -> None:
    async with gateway([ScriptedTurn((), busy=True), ScriptedTurn((), fail_before=True), say("At last.")]) as g:
        session = await g.open()
        retry = types.HttpRetryOptions(attempts=3, initial_delay=0.01, max_delay=0.02, jitter=0.01)
        async with client(g, session.key, retry_options=retry) as c:
            reply = await c.aio.models.generate_content(model="m", contents="Hi")
            assert reply.text == "At last."
        await g.seal(session.id)
        slow_retry = types.HttpRetryOptions(attempts=3, initial_delay=3600, max_delay=3600, jitter=0.01)
        async with client(g, session.key, retry_options=slow_retry) as c:
            with pytest.raises(errors.ClientError):  # no retry
                await asyncio.wait_for(c.aio.models.generate_content(model="m", contents="Hi"), scaled(5))


async def test_wrong_paths_and_bodies() -> None:
    async with gateway([say("x")], max_body_mb=0.01) as g:
        session = await g.open()
        http = g.http(session.key)
        for path in ("/v1beta/models/m:embedContent", "/v1beta/cachedContents", "/v1beta/models/m"):
            reply = await http.post(path, json={})
            assert reply.status_code in (404, 405) and reply.json()["error"]["status"] == "NOT_FOUND", path
        url = "/v1beta/models/m:generateContent"
        for body in (b"", b"{", b"[]", b"\xff", b'{"contents": []}', b'{"contents": ["x"]}'):
            reply = await http.post(url, content=body)
            assert (reply.status_code, reply.json()["error"]["status"]) == (400, "INVALID_ARGUMENT"), body
        reply = await http.post(url, content=b" " * 20_000)
        assert (reply.status_code, reply.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
        more: Json = {"unheard_of": 1, "safetySettings": [], "labels": {"a": "b"}}
        reply = await http.post(url, json={"contents": [{"parts": [{"text": "Hi"}]}], **more})
        assert reply.status_code == 200


# ── session end, disconnects and cancellation ───────────────────────────────────────────────────────────────────────


@every_way
async def test_session_limit_reads_as_final_answer(way: str) -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open(limits={"turns": 1})
        assert (await ask(g, session.key, "Hi", way)).text == "One."
        last = await ask(g, session.key, "Hi", way)
        assert "limit" in last.text and last.finish == "STOP" and not last.calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_disconnect_records_aborted_turn(stream: bool) -> None:
    engine = Gated([say("One two three four."), say("Five.")], tokens=3 if stream else 0)
    async with gateway(engine=engine) as g:
        session = await g.open()
        task = g.start(ask(g, session.key, "Hi", "async stream" if stream else "async"))
        await until(lambda: engine.waiting)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: engine.aborted == 1)
        await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
        [turn] = await g.turns(session.id)
        assert (turn["role"], len(turn["ids"])) == ("aborted", engine.tokens)
        engine.gate.set()
        assert (await ask(g, session.key, "Hi")).text == "Five."
        assert [(t["role"], t["cause"]) for t in await g.turns(session.id)][1] == ("main", "retry")
        assert len(await g.samples(session.id)) == 1


@pytest.mark.parametrize("way", ["async", "async stream", "sync stream"])
async def test_cancelled_session_fails_running_call(way: str) -> None:
    engine = Gated([say("One two three four.")], tokens=2 if "stream" in way else 0)
    async with gateway(engine=engine) as g:
        session = await g.open()
        task = g.start(ask(g, session.key, "Hi", way))
        await until(lambda: engine.waiting)
        await g.cancel(session.id)
        with pytest.raises(errors.ClientError) as caught:
            await task
        assert (caught.value.code, caught.value.status) == (400, "FAILED_PRECONDITION")
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted"]


# ── token exactness ─────────────────────────────────────────────────────────────────────────────────────────────────

FUNCTIONS = [
    {
        "functionDeclarations": [
            {
                "name": name,
                "description": f"Tool {name}.",
                "parameters": {
                    "type": "OBJECT",
                    "properties": {"path": {"type": "STRING"}, "n": {"type": "NUMBER", "nullable": True}},
                },
            }
            for name in ("read", "write", "run")
        ]
    }
]


def rewrite_history(contents: list[Json], draw: random.Random) -> list[Json]:
    """Return the same conversation in different bytes, as agents and SDKs rewrite their history."""
    rewritten: list[Json] = []
    without_ids = draw.random() < 0.3  # in all parts or in none
    for content in json.loads(json.dumps(contents)):
        parts = content["parts"]
        if content["role"] == "model":
            thoughts, signed = draw.random() < 0.5, draw.random() < 0.5
            parts = [p for p in parts if thoughts or not p.get("thought")]
            for part in parts:
                if not signed:
                    part.pop("thoughtSignature", None)
                if "functionCall" in part and draw.random() < 0.5:
                    args = part["functionCall"]["args"]
                    part["functionCall"]["args"] = dict(reversed(args.items()))
        for part in parts:
            for name in ("functionCall", "functionResponse"):
                if without_ids and name in part:
                    part[name].pop("id")
        if draw.random() < 0.3:
            parts = [{("thought_signature" if n == "thoughtSignature" else n): v for n, v in p.items()} for p in parts]
        cut = draw.randrange(len(parts) + 1) if draw.random() < 0.5 else 0
        pieces = [p for p in (parts[:cut], parts[cut:]) if p] or ([[]] if content["role"] == "model" else [])
        rewritten += [
            {"role": content["role"], "parts": p} if draw.random() < 0.5 else {"parts": p, "role": content["role"]}
            for p in pieces
        ]
    return rewritten


class Agent:
    """A small in-process agent that speaks Gemini."""

    def __init__(self, world: World, renderer: Any, seed: int) -> None:
        self.world, self.renderer = world, renderer
        self.agent = world.agent()
        self.draw = random.Random(seed)
        self.contents: list[Json] = [{"role": "user", "parts": [{"text": "Begin."}]}]

    async def turn(self, kind: str, text: str) -> None:
        draw = self.draw
        self.world.queue.append(make_turn(self.renderer, kind, text, draw))
        contents = rewrite_history(self.contents, draw) if draw.random() < 0.6 else self.contents
        body = {
            "contents": contents,
            "systemInstruction": {"parts": [{"text": "You work."}]},
            "tools": FUNCTIONS,
            "generationConfig": {"thinkingConfig": {"includeThoughts": draw.random() < 0.5}},
        }
        verb = draw.choice(["generateContent", "streamGenerateContent"])
        headers = [(b"x-goog-api-key", self.agent.key.encode())]
        path = f"/v1beta/models/m:{verb}"
        raw = json.dumps(body, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5).encode()
        status, data = await asgi(self.world.gateway, "POST", path, raw, headers)
        assert status == 200, data
        chunks = json.loads(data) if verb.startswith("stream") else [json.loads(data)]
        answers_ = [c["candidates"][0]["content"] for c in chunks]
        joined = [part for content in answers_ for part in content["parts"]]
        self.contents += answers_ if draw.random() < 0.5 else [{"role": "model", "parts": joined}]
        self.answer_calls([part["functionCall"] for part in joined if "functionCall" in part], text)

    def answer_calls(self, function_calls: list[Json], text: str) -> None:
        """Answer the tool calls in random order, or send a new message."""
        answers: list[Json] = [
            {"functionResponse": {"id": c["id"], "name": c["name"], "response": {"output": f"{n}: {text}"}}}
            for n, c in enumerate(function_calls)
        ]
        if len({c["name"] for c in function_calls}) == len(function_calls):
            self.draw.shuffle(answers)
        self.contents.append({"role": "user", "parts": answers or [{"text": text}]})


KINDS = ["text", "think", "call", "calls", "think+call", "malformed", "truncated", "random", "random, cut", "empty"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", renderer_params(["builtin", "qwen3", "llama3_1", "deepseek_v3"]))
@pytest.mark.parametrize("seed", range(6))
async def test_long_conversation_with_rewritten_history_is_one_row(
    name: str,
    seed: int,
    renderers: Callable[[str], Any],  # noqa: F811
) -> None:
    renderer = renderers(name)
    with tempfile.TemporaryDirectory() as folder:
        async with World.of(folder, renderer) as world:
            agent = Agent(world, renderer, seed)
            for n in range(20):
                await agent.turn(
                    agent.draw.choice(KINDS), agent.draw.choice(["ok", "Größe 👍🏽", "  x\n\n", f"step {n}"])
                )
            session = agent.agent.session
            check_invariants(session, [request.prompt for request in world.engine.received])
            assert [node.info.cause for node in session.trace.nodes] == [None] * 40
            assert len(session.trace.roots) == 1
            stored = world.gateway.store.load(world.gateway.store.find(agent.agent.session_id))
            check_invariants(stored, [request.prompt for request in world.engine.received])
