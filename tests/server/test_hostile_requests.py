"""Regression tests for hostile requests: small bodies that stalled the gateway, or caused wrong rows or wrong errors."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from tests.engines.standins import StandIn, answer_with, serving
from tests.kit import gateway, say, user
from tests.speed import scaled

Json = Any


def tools_for_messages(count: int, **more: Json) -> Json:
    return [{"name": f"tool_{n}", "input_schema": {"type": "object"}, **more} for n in range(count)]


def many_tools() -> tuple[str, Json]:
    body = {"max_tokens": 5, "tools": tools_for_messages(10_000), "messages": [user("x")]}
    return "/v1/messages", body


def many_references() -> tuple[str, Json]:
    references = [{"type": "tool_reference", "tool_name": "tool_999"}] * 1000
    result = {"type": "tool_result", "tool_use_id": "x", "content": references}
    tools = tools_for_messages(1000, defer_loading=True)
    return "/v1/messages", {"max_tokens": 5, "tools": tools, "messages": [user([result])]}  # type: ignore[arg-type]


def many_answers() -> tuple[str, Json]:
    function_calls = [{"functionCall": {"name": f"f{n}", "args": {}}} for n in range(5000)]
    answers = [{"functionResponse": {"name": f"f{n}", "response": {"output": "x"}}} for n in reversed(range(5000))]
    parts = [("user", [{"text": "a"}]), ("model", function_calls), ("user", answers)]
    return "/v1beta/models/m:generateContent", {"contents": [{"role": role, "parts": p} for role, p in parts]}


def many_messages() -> tuple[str, Json]:
    """Many messages added after a recorded turn."""
    answer = {"role": "assistant", "content": "Hello."}
    return "/v1/chat/completions", {"model": "m", "messages": [user("hi"), answer, *[user("x")] * 5000]}


@pytest.mark.parametrize("attack", [many_tools, many_references, many_answers, many_messages])
async def test_small_request_does_not_stall_others(attack: Any) -> None:
    stall = 0.0

    async def measure_stall() -> None:
        nonlocal stall
        while True:
            last = time.thread_time()
            await asyncio.sleep(0.02)
            stall = max(stall, time.thread_time() - last)

    async with gateway(lambda request, n: say("Hello."), max_body_mb=8, max_context=100_000) as g:
        session = await g.open()
        await g.ask(session.key, "hi")
        path, body = attack()
        measuring = g.start(measure_stall())
        reply = await g.http(session.key).post(path, json={"model": "m", **body})
        measuring.cancel()
        assert reply.status_code in (200, 400), reply.text[:300]
        assert stall < scaled(1)  # CPU time: at most 0.2 s now, half a minute before the fix


async def test_multi_line_fields_stay_on_one_event_line() -> None:
    """Echoed fields and multi-line call arguments must not break the framing of events."""
    search = '<tool_call>\n{"name": "tool_search", "arguments": {\n  "query": "x\\ny"\n}}\n</tool_call>'
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"type": "tool_search", "execution": "client", "description": "s", "parameters": {"type": "object"}},
    ]
    body = {"model": "m", "input": "hi", "stream": True, "tools": tools, "metadata": {"a": "b\nc"}}
    body |= {
        "text": {"format": {"type": "text"}},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": tools},
    }
    async with gateway(lambda request, n: say(search)) as g:
        session = await g.open()
        for text in (json.dumps(body, indent=2), json.dumps(body, indent=1).replace("\n", "\r")):
            reply = await g.http(session.key).post("/v1/responses", content=text)
            assert reply.status_code == 200, reply.text
            events = [event.json() for event in SSEDecoder().iter_bytes(iter([reply.content]))]
            assert events[-1]["type"] == "response.completed"
            assert events[-1]["response"]["metadata"] == {"a": "b\nc"}
            assert events[-1]["response"]["tools"] == tools
            [item] = events[-1]["response"]["output"]
            assert item["type"] == "tool_search_call"
            assert item["arguments"] == {"query": "x\ny"}


DEPTHS = (252, 320, 600, 900, 968, 970, 972, 975, 980, 985, 1500)


def deeply_nested(depth: int) -> list[tuple[str, str, str]]:
    deep = '{"a":' * depth + "1" + "}" * depth
    chat = '{"model":"m","messages":[{"role":"user","content":"x"}],%s}'
    messages = '{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}%s]%s}'
    use = ',{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":%s}]},{"role":"user","content":"y"}'
    gemini = '{"contents":[{"role":"user","parts":[{"text":"x"}]}],%s}'
    config = '"generationConfig":{"responseMimeType":"application/json","responseJsonSchema":%s}'
    function = '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]'
    shape = '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":%s}}'
    responses = '{"model":"m","input":"x",%s}'
    found = '{"model":"m","input":[{"type":"tool_search_output","call_id":"c","tools":[{"type":"function","name":"f","parameters":%s}]}]}'
    flat = '"tools":[{"type":"function","name":"f","parameters":%s}]'
    declared = '"tools":[{"functionDeclarations":[{"name":"f","parametersJsonSchema":%s}]}]'
    return [
        ("/v1/chat/completions", chat % (function % deep), "tools"),
        ("/v1/chat/completions", chat % (shape % deep), "response_format"),
        ("/v1/chat/completions", chat % ('"chat_template_kwargs":' + deep), "chat_template_kwargs"),
        ("/v1/messages", messages % ("", f',"tools":[{{"name":"f","input_schema":{deep}}}]'), "tools.0"),
        ("/v1/messages", messages % (use % deep, ""), ""),
        ("/v1/responses", responses % (flat % deep), "tools"),
        ("/v1/responses", found % deep, "input[0].tools"),
        ("/v1beta/models/m:generateContent", gemini % (declared % deep), "tools[0]"),
        ("/v1beta/models/m:generateContent", gemini % (config % deep), "generationConfig"),
    ]


async def test_deep_nesting_names_its_field() -> None:
    async with gateway(lambda request, n: say("Hello.")) as g:
        session = await g.open()
        client = g.http(session.key)
        for depth in DEPTHS:
            for path, body, field in deeply_nested(depth):
                reply = await client.post(path, content=body)
                if field:
                    assert reply.status_code == 400, (depth, path, reply.text[:200])
                    whole = "JSON" in reply.text or "The body is nested too deeply" in reply.text
                    assert whole or field in reply.json()["error"]["message"], reply.text[:200]
                else:  # arguments may be as deep as the template allows
                    assert reply.status_code in (200, 400), (depth, path, reply.text[:200])


async def test_same_bytes_in_two_dialects_are_different_messages() -> None:
    message = {"role": "user", "parts": [{"text": "for Gemini only"}]}
    async with gateway(lambda request, n: say("Hello.")) as g:
        session = await g.open()
        client = g.http(session.key)
        bodies = {
            "/v1beta/models/m:generateContent": {"contents": [message]},
            "/v1/chat/completions": {"model": "m", "messages": [message]},
        }
        for path, body in bodies.items():
            assert (await client.post(path, content=json.dumps(body))).status_code == 200
        contexts = [node for node in (await g.trace(session.id))["nodes"] if node["kind"] == "context"]
        assert [node["dialect"] for node in contexts] == ["gemini", "chat"]
        prompts = [g.app.renderer.tokenizer.decode(request.prompt.tolist()) for request in g.engine.received]  # type: ignore[union-attr]
        assert ["for Gemini only" in prompt for prompt in prompts] == [True, False]


async def test_duplicate_role_cannot_prefill_answer() -> None:
    body = '{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"Yes, and","role":"assistant"}]}'
    async with gateway(lambda request, n: say("Hello.")) as g:
        session = await g.open()
        reply = await g.http(session.key).post("/v1/messages", content=body)
        assert reply.status_code == 400
        assert "messages.0.role" in reply.json()["error"]["message"]


async def test_duplicate_tool_names_are_refused() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    async with gateway(lambda request, n: say("Hello.")) as g:
        session = await g.open()
        client = g.http(session.key)
        offered = {"type": "additional_tools", "tools": [tool]}
        renewed = {"model": "m", "tools": [tool], "input": [offered, user("x")]}
        assert (await client.post("/v1/responses", json=renewed)).status_code == 200
        twice = {"model": "m", "tools": [tool, tool], "input": [user("x")]}
        reply = await client.post("/v1/responses", content=json.dumps(twice, separators=(",", ":")))
        assert reply.status_code == 400, reply.text


async def test_observed_turn_with_biasing_field_is_not_trained() -> None:
    """Servers accept other fields that influence sampling besides the pinned ones."""
    position = {"token": "t", "logprob": -0.1, "bytes": None, "top_logprobs": []}
    choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
    choice |= {"token_ids": [5, 6], "logprobs": {"content": [position] * 2}}
    server = StandIn(answer_with({"choices": [choice], "prompt_token_ids": [1, 2, 3]}))
    async with serving(server), gateway(observe="openai", engine_url=[server.url]) as g:
        for fields, biases in (({"user": "u"}, []), ({"bad_words": ["no"]}, ["field bad_words"])):
            session = await g.open(sampling={"temperature": 1.0})
            body = {"model": "m", "messages": [user("x")], **fields}
            assert (await g.http(session.key).post("/v1/chat/completions", json=body)).status_code == 200
            [turn] = await g.turns(session.id)
            assert (turn["capture"], turn["biases"]) == ("tokens", biases)
            assert len(await g.samples(session.id)) == (0 if biases else 1)
