"""Test the gateway with the Responses API of the official `openai` client."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pydantic
import pytest

from tests.exact.invariants import check_invariants
from tests.kit import (
    CLIENT_MODES,
    Gated,
    Json,
    OpenSession,
    Running,
    calls,
    gateway,
    in_every_mode,
    say,
    tokenizer,
    until,
)
from turngate.engines.base import Generate
from turngate.engines.scripted import Scripted, ScriptedTurn

every_way = in_every_mode([*CLIENT_MODES, "async stream helper", "sync stream helper"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

READ = {
    "type": "function",
    "name": "read_file",
    "description": "Reads.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
TEAM = {"type": "namespace", "name": "team", "description": "Helpers.", "tools": [{**READ, "name": "spawn"}]}
THINK = "<think>\n{}\n</think>\n\n"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def result(call: Json, text: Json) -> Json:
    kind = "custom_tool_call_output" if call.type == "custom_tool_call" else "function_call_output"
    return {"type": kind, "call_id": call.call_id, "output": text}


class Reply(NamedTuple):
    """A reply, streamed or not."""

    response: Any
    events: list[Any]

    @property
    def text(self) -> str:
        return str(self.response.output_text)

    @property
    def reasoning(self) -> str:
        parts = [p.text for i in self.response.output if i.type == "reasoning" for p in (i.summary or i.content or ())]
        return "".join(parts)

    @property
    def calls(self) -> list[Any]:
        return [item for item in self.response.output if item.type in ("function_call", "custom_tool_call")]

    def items(self) -> list[Json]:
        """Return the items that an agent adds to its history."""
        return [item.to_dict() for item in self.response.output]


async def ask(g: Running, key: str, input_: Json, way: str = "async", **request: Any) -> Reply:
    request = {"model": "m", "input": input_, **request}
    events: list[Any] = []
    if way == "async":
        return Reply(await g.client(key).responses.create(**request), events)
    if way == "async stream":
        events = [e async for e in await g.client(key).responses.create(stream=True, **request)]
    elif way == "async stream helper":
        async with g.client(key).responses.stream(**request) as stream:
            events = [e async for e in stream]
    elif way == "sync":
        return Reply(await asyncio.to_thread(lambda: g.sync_client(key).responses.create(**request)), events)
    elif way == "sync stream":
        create = g.sync_client(key).responses.create
        events = await asyncio.to_thread(lambda: list(create(stream=True, **request)))
    else:
        events = await asyncio.to_thread(_collect_stream, g.sync_client(key), request)
    assert events[-1].type in ("response.completed", "response.incomplete"), events[-1]
    return Reply(events[-1].response, events)


def _collect_stream(client: openai.OpenAI, request: Json) -> list[Any]:
    with client.responses.stream(**request) as stream:
        return list(stream)


def prompts(g: Running) -> list[str]:
    """Decode the prompts that the engine received."""
    return [tokenizer().decode(request.prompt.tolist()) for request in g.engine.received]


async def check_one_row(g: Running, session: OpenSession) -> Json:
    """Check that the session is one row with exactly the ids the engine received, and return it."""
    [row] = await g.samples(session.id)
    assert len(row["spans"]) == len(g.engine.received)
    for request, span in zip(g.engine.received, row["spans"], strict=True):
        assert request.prompt.tolist() == row["ids"][: span["start"]]
    return row


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_text_answer(way: str) -> None:
    async with gateway([say("Hello there, friend.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way, instructions="Be brief.")
        assert (reply.text, reply.reasoning, reply.calls) == ("Hello there, friend.", "", [])
        assert reply.response.status == "completed" and reply.response.id.startswith("resp_")
        [turn] = await g.turns(session.id)
        usage = reply.response.usage
        assert usage.input_tokens == len(g.engine.received[0].prompt)
        assert usage.output_tokens == len(turn["ids"])
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert prompts(g) == [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        ]


async def test_deltas_match_final_response() -> None:
    text = "Größe 汉字 👩‍👩‍👧 é\n\n\tend"
    async with gateway([say(THINK.format("Hm, so.") + text)]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", "async stream", reasoning={"summary": "auto"})
        deltas = {
            kind: [e.delta for e in reply.events if e.type == f"response.{kind}.delta"]
            for kind in ("output_text", "reasoning_summary_text")
        }
        assert len(deltas["output_text"]) > 3 and "".join(deltas["output_text"]) == text == reply.text
        assert "".join(deltas["reasoning_summary_text"]) == "Hm, so." == reply.reasoning
        assert [e.sequence_number for e in reply.events] == list(range(len(reply.events)))
        assert [e.type for e in reply.events][:2] == ["response.created", "response.in_progress"]


async def test_stream_has_sse_headers_and_event_names() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        response = await g.http(session.key).post("/v1/responses", json={"model": "m", "input": "Hi", "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"].startswith("req_")
        *events, rest = response.text.split("\n\n")
        assert rest == "" and events[-1].startswith("event: response.completed\ndata: {")


@every_way
async def test_empty_answer(way: str) -> None:
    async with gateway([say(""), say("Now.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, [user("Hi")], way)
        assert reply.text == "" and reply.response.status == "completed"
        await ask(g, session.key, [user("Hi"), *reply.items(), user("Well?")], way)
        await check_one_row(g, session)


async def test_sdk_parse_helper_returns_structured_output() -> None:
    class Number(pydantic.BaseModel):
        n: int

    async with gateway([say('{"n": 7}')] * 2) as g:
        session = await g.open()
        reply = await g.client(session.key).responses.parse(model="m", input="Pick", text_format=Number)
        assert reply.output_parsed == Number(n=7)
        constraint = g.engine.received[0].constraint
        assert constraint is not None and constraint.kind == "json_schema"
        async with g.client(session.key).responses.stream(model="m", input="Pick", text_format=Number) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == Number(n=7)
        assert all(turn["biases"] == ["constrained: json_schema after reasoning"] for turn in await g.turns(session.id))


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sample(6)
@every_way
@pytest.mark.parametrize(
    "options", [{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}]
)
async def test_seven_turns_with_tools_make_one_training_row(way: str, options: Json) -> None:
    """Run a small agent with thinking, parallel calls, custom tools, namespaces, answers and another question."""
    script = [
        say(THINK.format("I should look.") + "Let me see. " + calls(*(("read_file", {"path": p}) for p in "ab"))),
        say(calls(("apply_patch", {"input": '*** Begin Patch\n+x = "1"\n*** End Patch'}))),
        say(calls(("apply_patch", {"patch": "wrong"}))),
        say(THINK.format("Ask.") + calls(("team__spawn", {"path": "c"}), ("nobody", {}))),
        say(THINK.format("Done now.") + "  All done. \n"),
        say(calls(("read_file", {"path": "c"}))),
        say("It says x."),
    ]
    async with gateway(script) as g:
        session = await g.open()
        history: list[Json] = [{"role": "developer", "content": "Be careful."}, user("Copy a and b into c.")]

        async def turn(*more: Json) -> Reply:
            history.extend(more)
            reply = await ask(g, session.key, history, way, tools=[READ, PATCH, TEAM], **options)
            history.extend(reply.items())
            return reply

        first = await turn()
        assert (first.reasoning, first.text) == ("I should look.", "Let me see.")
        assert [(c.name, json.loads(c.arguments)["path"]) for c in first.calls] == [
            ("read_file", "a"),
            ("read_file", "b"),
        ]
        second = await turn(*(result(c, [{"type": "input_text", "text": "A"}]) for c in first.calls))
        assert [(c.type, c.input) for c in second.calls] == [
            ("custom_tool_call", '*** Begin Patch\n+x = "1"\n*** End Patch')
        ]
        third = await turn(result(second.calls[0], "ok"))
        assert third.calls[0].type == "custom_tool_call" and "wrong" in third.calls[0].input
        fourth = await turn(result(third.calls[0], "no patch"))
        assert [(c.name, c.namespace) for c in fourth.calls] == [("spawn", "team"), ("nobody", None)]
        fifth = await turn(*(result(c, "hm") for c in fourth.calls))
        assert (fifth.reasoning, fifth.text.strip()) == ("Done now.", "All done.")
        sixth = await turn(user("What does c say?"))
        seventh = await turn(result(sixth.calls[0], "x = 1"))
        assert seventh.text == "It says x."

        row = await check_one_row(g, session)
        sampled = [i for turn_ in script for i in turn_.ids]
        assert [i for i, trained in zip(row["ids"], row["mask"], strict=True) if trained] == sampled
        assert {turn_["role"] for turn_ in await g.turns(session.id)} == {"main"}
        check_invariants(await g.app.sessions.find(session.id), [r.prompt for r in g.engine.received])


async def test_interleaved_calls_and_results_do_not_fork() -> None:
    async with gateway([say(calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))), say("Done.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, [user("Go")], tools=[READ])
        first_item, second_item = reply.items()
        first, second = reply.calls
        mixed = [user("Go"), first_item, result(first, "A"), second_item, result(second, "B")]
        assert (await ask(g, session.key, mixed, tools=[READ])).text == "Done."
        await check_one_row(g, session)


async def test_tools_become_functions_and_results_become_text() -> None:
    async with gateway([say(calls(("apply_patch", {"input": "p"}))), say("Done.")]) as g:
        session = await g.open()
        tools = [READ, PATCH, TEAM, {"type": "web_search", "external_web_access": True}]
        reply = await ask(g, session.key, [user("Go")], tools=tools)
        output = [{"type": "input_text", "text": "Output:\n"}, {"type": "input_text", "text": "fine"}]
        await ask(g, session.key, [user("Go"), *reply.items(), result(reply.calls[0], output)], tools=tools)
        first, second = prompts(g)
        for shown in ('"read_file"', '"apply_patch"', "start: /.+/", '"team__spawn"', "About the team tools: Helpers."):
            assert shown in first
        assert "web_search" not in first and "Output:\nfine" in second
        assert [t.type for t in reply.response.tools] == ["function", "custom", "namespace", "web_search"]


async def test_additional_tools_and_agent_messages() -> None:
    """Codex sends these for models that it knows."""
    tools = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [
        {"type": "namespace", "name": "functions", "description": "", "tools": [{**PATCH, "name": "exec"}]}
    ]}  # fmt: skip
    task = {
        "type": "agent_message",
        "id": "amsg_1",
        "author": "/root",
        "recipient": "/root/count",
        "content": [
            {"type": "input_text", "text": "Payload:\n"},
            {"type": "encrypted_content", "encrypted_content": "Count."},
        ],
    }
    async with gateway([say(calls(("exec", {"input": "text(1)"}))), say("One.")]) as g:
        session = await g.open()
        first = await ask(g, session.key, [tools, user("Hi"), task])
        [call] = first.calls
        assert (call.type, call.name, call.namespace, call.input) == (
            "custom_tool_call",
            "exec",
            "functions",
            "text(1)",
        )
        await ask(g, session.key, [tools, user("Hi"), task, *first.items(), result(call, "1")])
        assert "Payload:\nCount." in prompts(g)[0] and '"exec"' in prompts(g)[0]
        await check_one_row(g, session)


async def test_client_tool_search() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}
    script = [say(calls(("tool_search", {"query": "spawn"}))), say(calls(("team__spawn", {"path": "x"}))), say("Done.")]
    async with gateway(script) as g:
        session = await g.open()
        history = [user("Go")]
        first = await ask(g, session.key, history, tools=[search], way="async stream")
        [item] = first.response.output
        assert (item.type, item.arguments, item.execution) == ("tool_search_call", {"query": "spawn"}, "client")
        found = {"type": "tool_search_output", "call_id": item.call_id, "execution": "client", "tools": [TEAM]}
        history += [*first.items(), found]
        second = await ask(g, session.key, history, tools=[search])
        assert [(c.name, c.namespace) for c in second.calls] == [("spawn", "team")]
        history += [*second.items(), result(second.calls[0], "ok")]
        await ask(g, session.key, history, tools=[search])
        assert "team__spawn" not in prompts(g)[0] and "team__spawn" in prompts(g)[1]
        await check_one_row(g, session)


@every_way
async def test_parallel_tool_calls_can_be_disabled(way: str) -> None:
    two = calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    async with gateway([say("Look:\n" + two), say("Thanks.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, [user("Go")], way, tools=[READ], parallel_tool_calls=False)
        assert len(reply.calls) == 1
        history = [user("Go"), *reply.items(), result(reply.calls[0], "A")]
        await ask(g, session.key, history, way, tools=[READ], parallel_tool_calls=False)
        await check_one_row(g, session)


FORCED: dict[str, tuple[dict[str, Json], str]] = {
    "function": ({"tool_choice": {"type": "function", "name": "read_file"}}, '{"path": "a"}'),
    "custom": ({"tool_choice": {"type": "custom", "name": "apply_patch"}}, '{"input": "p"}'),
    "required": ({"tool_choice": "required"}, '[{"name": "read_file", "arguments": {"path": "a"}}]'),
    "allowed": (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "apply_patch"}],
            }
        },
        '[{"name": "apply_patch", "arguments": {"input": "p"}}]',
    ),
}


@every_way
@pytest.mark.parametrize("kind", FORCED)
async def test_forced_tools_work_and_are_not_trained(kind: str, way: str) -> None:
    request, text = FORCED[kind]
    async with gateway([say(text)]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Go", way, tools=[READ, PATCH], **request)
        [call] = reply.calls
        expected = "apply_patch" if "apply_patch" in str(request) else "read_file"
        assert call.name == expected and (call.type == "custom_tool_call") == (expected == "apply_patch")
        assert await g.samples(session.id) == []


async def test_disallowed_tools_are_hidden_from_model() -> None:
    async with gateway([say("Ok.")] * 2) as g:
        session = await g.open()
        await ask(g, session.key, "Go", tools=[READ], tool_choice="none")
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
        await ask(g, session.key, "Go", tools=[READ, PATCH], tool_choice=allowed)
        assert all("read_file" not in prompt for prompt in prompts(g)) and "apply_patch" in prompts(g)[1]


# ── reasoning ───────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_reasoning_kept_dropped_or_encrypted_stays_in_context(way: str) -> None:
    script = [say(THINK.format("Hmm, two.") + "Two.")] + [say(f"Yes {n}.") for n in range(4)]
    async with gateway(script) as g:
        session = await g.open()
        reply = await ask(g, session.key, [user("1+1?")], way, include=["reasoning.encrypted_content"])
        thinking, message = reply.items()
        assert reply.reasoning == "Hmm, two." and thinking["encrypted_content"].startswith("tg1.")
        sealed_only = {"type": "reasoning", "id": thinking["id"], "summary": [], "content": None}
        sealed_only["encrypted_content"] = thinking["encrypted_content"]
        plain = {"role": "assistant", "content": "Two."}
        for n, kept in enumerate(([thinking, message], [sealed_only, message], [message], [plain])):
            await ask(g, session.key, [user("1+1?"), *kept, user(f"Sure? {n}")], way)
        # The model always sees its own reasoning, even if the agent dropped it.
        for prompt in prompts(g)[1:]:
            assert "<think>\nHmm, two.\n</think>\n\nTwo.<|im_end|>" in prompt
        assert len([n for n in (await g.trace(session.id))["nodes"] if n["parent"] is None]) == 1


async def test_rewritten_history_does_not_fork() -> None:
    script = [say(THINK.format("Hm.") + "Look. " + calls(("read_file", {"path": "a", "n": 3}))), say("Done.")]
    async with gateway(script) as g:
        session = await g.open()
        await ask(g, session.key, "Read a", tools=[READ], instructions="Be brief.")
        history = [
            {"role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "id": "msg_x", "role": "user", "content": [{"type": "input_text", "text": "Read a"}]},
            {"role": "assistant", "content": "Look."},
            {"type": "function_call", "call_id": "x", "name": "read_file", "arguments": '{"n":3.0,"path":"a"}'},
            {"type": "function_call_output", "call_id": "x", "output": "A"},
        ]
        await ask(g, session.key, history, tools=[READ])
        await check_one_row(g, session)


async def test_two_dialects_in_one_session_are_one_row() -> None:
    async with gateway([say("Two."), say("Yes.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "1+1?", instructions="Be brief.")
        messages = [
            {"role": "system", "content": "Be brief."},
            user("1+1?"),
            {"role": "assistant", "content": reply.text},
            user("Sure?"),
        ]
        await g.ask(session.key, messages)
        await check_one_row(g, session)


# ── stop reasons, disconnects and the end of a stream ───────────────────────────────────────────────────────────────


@every_way
async def test_truncated_answer_is_incomplete_and_continues(way: str) -> None:
    async with gateway([say("One two three"), say("four.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, [user("Count")], way, max_output_tokens=2)
        assert reply.response.status == "incomplete"
        assert reply.response.incomplete_details.reason == "max_output_tokens"
        assert reply.response.usage.output_tokens == 2 and reply.items()[-1]["status"] == "incomplete"
        await ask(g, session.key, [user("Count"), *reply.items(), user("Go on")], way)
        await check_one_row(g, session)


@every_way
async def test_session_limit_reads_as_final_answer(way: str) -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open(limits={"turns": 1})
        await ask(g, session.key, "Hi", way)
        last = await ask(g, session.key, "Hi", way)
        assert last.response.status == "completed" and "limit" in last.text
        assert last.response.usage.output_tokens == 0 and len(g.engine.received) == 1


async def test_silent_engine_sends_keep_alives() -> None:
    engine = Gated([say("One two three.")], tokens=2)
    async with gateway(engine=engine, alive_s=0.05) as g:
        session = await g.open()
        stream = await g.client(session.key).responses.create(model="m", input="Hi", stream=True)
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if kinds.count("response.in_progress") == 3:
                engine.gate.set()
        assert kinds[-1] == "response.completed"


@STREAMED
async def test_disconnect_records_aborted_turn(stream: bool) -> None:
    sampled = 3 if stream else 0
    engine = Gated([say("One two three four."), say("Five.")], tokens=sampled)
    async with gateway(engine=engine) as g:
        session = await g.open()

        async def call() -> None:
            reply: Any = await g.client(session.key).responses.create(model="m", input="Hi", stream=stream)
            [event async for event in reply]

        task = g.start(call())
        await until(lambda: engine.waiting)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: engine.aborted == 1)
        await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
        [turn] = await g.turns(session.id)
        assert (turn["role"], turn["finish"], len(turn["ids"])) == ("aborted", "abort", sampled)
        engine.gate.set()
        assert (await ask(g, session.key, "Hi")).text == "Five."
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted", "main"]


async def test_terminal_event_waits_for_stored_turn() -> None:
    async with gateway([say("Hello.")], durability="disk") as g:
        session = await g.open()
        seen: list[str] = []

        async def listen() -> None:
            async for event in await g.client(session.key).responses.create(model="m", input="Hi", stream=True):
                seen.append(event.type)

        with g.locked_database():
            task = g.start(listen())
            await until(lambda: "response.output_text.delta" in seen)
            await asyncio.sleep(0.05)
            assert "response.completed" not in seen
        await task
        assert seen[-1] == "response.completed" and len(await g.turns(session.id)) == 1


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def expect_error(g: Running, key: str, kind: type[openai.APIStatusError], **request: Any) -> Any:
    """Make a call that must fail as `kind`, and return the exception."""
    client = g.client(key, max_retries=2)
    with pytest.raises(kind) as caught:
        await client.responses.create(**{"model": "m", "input": "Hi", **request})
    assert caught.type is kind
    assert isinstance(caught.value.body, dict) and set(caught.value.body) == {"message", "type", "param", "code"}
    return caught.value


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
INVALID_REQUESTS: dict[str, tuple[Json, str]] = {
    "no input": ({"input": []}, "input"),
    "an image": ({"input": [user("Hi"), IMAGE]}, "input[1].content[0].type"),
    "a result with an image": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": IMAGE["content"]}]},
        "input[0].output[0].type",
    ),
    "an unknown item": ({"input": [user("Hi"), {"type": "hologram"}]}, "input[1].type"),
    "a provider's search call": ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input[0].type"),
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "background mode": ({"background": True}, "background"),
    "log-probabilities": ({"include": ["message.output_text.logprobs"]}, "include"),
    "a provider's tool": ({"tools": [{"type": "code_interpreter", "container": "c"}]}, "tools[0].type"),
    "forged reasoning": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "tg1.AAAA"}, user("Hi")]},
        "input[0].encrypted_content",
    ),
}


@STREAMED
async def test_invalid_request_names_its_field(stream: bool) -> None:
    async with gateway([say("Never said.")]) as g:
        session = await g.open()
        for case, (request, param) in INVALID_REQUESTS.items():
            error = await expect_error(g, session.key, openai.BadRequestError, stream=stream, extra_body=request)
            assert error.param == param, case
            assert error.type == "invalid_request_error", case
            assert error.response.request.headers["x-stainless-retry-count"] == "0", case
        assert not g.engine.received and await g.turns(session.id) == []


@STREAMED
async def test_wrong_key_unknown_model_and_cancelled_session(stream: bool) -> None:
    async with gateway([say("Never said.")], model="policy-1") as g:
        session = await g.open()
        error = await expect_error(g, "sk-wrong", openai.AuthenticationError, stream=stream)
        assert error.code == "invalid_api_key"
        error = await expect_error(g, session.key, openai.NotFoundError, model="gpt-4o", stream=stream)
        assert error.param == "model" and error.code == "model_not_found"
        await g.cancel(session.id)
        error = await expect_error(g, session.key, openai.ConflictError, model="policy-1", stream=stream)
        assert error.response.headers["x-should-retry"] == "false" and "cancelled" in error.message


@STREAMED
async def test_busy_and_unavailable_engine(stream: bool) -> None:
    async with gateway([say("", busy=True), say("", fail_before=True), say("Back.")]) as g:
        session = await g.open()
        client = g.client(session.key)
        with pytest.raises(openai.RateLimitError) as busy:
            await client.responses.create(model="m", input="Hi", stream=stream)
        assert busy.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError) as gone:
            await client.responses.create(model="m", input="Hi", stream=stream)
        assert gone.value.status_code == 503 and "x-should-retry" not in gone.value.response.headers
        assert (await ask(g, session.key, "Hi")).text == "Back."


async def test_too_large_request() -> None:
    async with gateway(max_body_mb=0.05) as g:
        session = await g.open()
        error = await expect_error(g, session.key, openai.APIStatusError, input="x" * 100_000)
        assert error.status_code == 413


async def test_too_long_prompt_is_bad_request_or_failed_response() -> None:
    async with gateway([say("Never said.")], max_context=20) as g:
        session = await g.open()
        long = "word " * 50
        error = await expect_error(g, session.key, openai.BadRequestError, input=long)
        assert (error.code, error.param) == ("context_length_exceeded", "input")
        # A stream reports it as a failed response, where agents look for it.
        stream = await g.client(session.key).responses.create(model="m", input=long, stream=True)
        events: list[Any] = [e async for e in stream]
        assert [e.type for e in events] == ["response.created", "response.in_progress", "response.failed"]
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
        assert "maximum context length is 20 tokens" in failed.error.message
        assert await g.turns(session.id) == []


async def test_engine_failure_during_stream_fails_response() -> None:
    async with gateway([say("One two three four.", cut_after=3)]) as g:
        session = await g.open()
        stream = await g.client(session.key).responses.create(model="m", input="Hi", stream=True)
        events: list[Any] = [e async for e in stream]
        assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
        [turn] = await g.turns(session.id)
        assert turn["finish"] == "abort"


async def test_cancelled_session_fails_response() -> None:
    engine = Gated([say("One two three four.")], tokens=2)
    async with gateway(engine=engine) as g:
        session = await g.open()

        async def call() -> list[Any]:
            stream = await g.client(session.key).responses.create(model="m", input="Hi", stream=True)
            return [event async for event in stream]

        task = g.start(call())
        await until(lambda: engine.waiting)
        await g.cancel(session.id)
        last = (await task)[-1]
        # Agents do not retry after this code.
        assert last.type == "response.failed" and last.response.error.code == "invalid_prompt"
        assert "cancelled" in last.response.error.message


class BrokenEngine(Scripted):
    def generate(self, request: Generate) -> Any:
        raise ZeroDivisionError("a secret detail")


@STREAMED
async def test_internal_error_is_server_error(stream: bool) -> None:
    async with gateway(engine=BrokenEngine([])) as g:
        session = await g.open()
        error = await expect_error(g, session.key, openai.InternalServerError, stream=stream)
        assert error.status_code == 500 and "secret" not in error.message


# ── other endpoints ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_input_tokens_records_nothing() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        request: Json = {"input": [user("Hi")], "instructions": "Be brief.", "tools": [READ, PATCH]}
        counted = await g.client(session.key).responses.input_tokens.count(model="m", **request)
        assert counted.object == "response.input_tokens" and await g.turns(session.id) == []
        reply = await ask(g, session.key, request.pop("input"), **request)
        assert reply.response.usage.input_tokens == counted.input_tokens


@pytest.mark.parametrize("prefix", ["/v1", "", "/s/{id}/v1", "/s/{id}", "/v1/rollouts/{id}"])
async def test_every_base_url(prefix: str) -> None:
    async with gateway([say("Hello.")], model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key, base_url=g.root + prefix.format(id=session.id))
        assert (await client.responses.create(model="policy-1", input="Hi")).output_text == "Hello."


async def test_unknown_and_ignored_fields_are_accepted() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open()
        reply = await g.client(session.key).responses.create(
            model="m",
            input="Hi",
            store=False,
            user="u",
            metadata={"a": "b"},
            service_tier="auto",
            include=["file_search_call.results"],
            truncation="auto",
            tools=[],
            text={"verbosity": "low"},
            reasoning={"effort": "low"},
            prompt_cache_key="k",
            safety_identifier="s",
            max_tool_calls=2,
            extra_body={"client_metadata": {"x": [1]}, "something_new": {"y": None}},
        )
        assert reply.output_text == "Ok." and reply.metadata == {"a": "b"}


NOT_JSON = [b"", b"{", b"hello", b"[]", b'{"input": "\xff"}', b'{"input": [' + b"[" * 5000 + b"]" * 5000 + b"]}"]


async def test_invalid_json_body_is_bad_request() -> None:
    async with gateway() as g:
        session = await g.open()
        for body in NOT_JSON:
            response = await g.http(session.key).post("/v1/responses", content=body)
            assert response.status_code == 400 and response.json()["error"]["message"], body


async def test_unknown_paths_are_not_found() -> None:
    async with gateway() as g:
        session = await g.open()
        for method, path in (
            ("GET", "/v1/responses"),
            ("POST", "/v1/responses/compact"),
            ("POST", "/v1/responses/x/cancel"),
        ):
            response = await g.http(session.key).request(method, path)
            assert response.status_code == 404 and path in response.json()["error"]["message"]


async def test_replies_contain_no_token_ids_or_logprobs() -> None:
    async with gateway([say("Hello.")] * 2) as g:
        session = await g.open()
        for stream in (False, True):
            response: httpx.Response = await g.http(session.key).post(
                "/v1/responses", json={"model": "m", "input": "Hi", "stream": stream}
            )
            text = response.text.replace('"logprobs":[]', "").replace('"top_logprobs":0', "")
            assert "logprob" not in text and "token_ids" not in text


# ── token exactness ─────────────────────────────────────────────────────────────────────────────────────────────────

WORDS = ["x = 1", "Größe 汉字", "  indented\n\ttoo", "👩‍👩‍👧", '"quoted" \\ back', "tail \n"]


def random_turn(draw: random.Random) -> str:
    """Make a random turn with or without thinking, text and calls."""
    text = THINK.format(draw.choice(WORDS)) if draw.random() < 0.5 else ""
    text += draw.choice(WORDS) if draw.random() < 0.6 else ""
    arguments = {
        "read_file": {"path": draw.choice(WORDS), "n": draw.choice([1, 1.0, 1e3])},
        "apply_patch": draw.choice([{"input": draw.choice(WORDS)}, {"patch": draw.choice(WORDS)}, {}]),
        "team__spawn": {},
        "nobody": {"a": [None, {"b": draw.choice(WORDS)}]},
    }
    chosen = [(name, arguments[name]) for name in draw.sample(list(arguments), draw.randrange(4))]
    return (text + ("\n" if text else "") + calls(*chosen)) if chosen else text + "."


def rewrite_items(items: list[Json], draw: random.Random) -> list[Json]:
    """Return the same items in different bytes, as agents rewrite their history."""
    rewritten = []
    for item in json.loads(json.dumps(items)):
        if item["type"] == "reasoning":
            if draw.random() < 0.4:
                continue
            if "encrypted_content" in item:
                item["summary"], item["content"] = [], None
        if "arguments" in item:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), indent=draw.choice([None, 1]))
        if item["type"] == "message" and draw.random() < 0.3:
            item = {"role": "assistant", "content": item["content"][0]["text"]}
        if item.get("type") != "custom_tool_call" and draw.random() < 0.3:
            item.pop("id", None)  # a custom call may need its id to be decoded
        item.pop("status", None)
        rewritten.append(dict(sorted(item.items())) if draw.random() < 0.5 else item)
    return rewritten


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
async def test_long_conversation_with_rewritten_history_is_one_row(seed: int) -> None:
    draw = random.Random(seed)
    texts = [random_turn(draw) for _ in range(25)]
    script: list[ScriptedTurn] = [say(text) for text in texts]
    async with gateway(script) as g:
        session = await g.open()
        history: list[Json] = [user("Begin.")]
        options: Json = {"tools": [READ, PATCH, TEAM], "instructions": "You work."}
        if seed % 2:
            options |= {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
        for _ in texts:
            reply = await ask(g, session.key, history, draw.choice(CLIENT_MODES), **options)
            items = reply.items()
            if not any(item["type"] != "reasoning" for item in items):
                history += items  # dropping all items of a turn would change the history
            else:
                history += rewrite_items(items, draw) if draw.random() < 0.7 else items
            results = [result(call, draw.choice(WORDS)) for call in reply.calls]
            history += results or [user(draw.choice(WORDS))]
        row = await check_one_row(g, session)
        assert np.sum(row["mask"]) == sum(len(turn.ids) for turn in script)
        check_invariants(await g.app.sessions.find(session.id), [r.prompt for r in g.engine.received])


async def test_conversation_on_real_tokenizer_is_one_row(real_tokenizer: Path) -> None:
    replies = ["It prints a line.", "Größe 汉字 👩‍👩‍👧", "  indented\n\n\tend", "Done."]
    async with gateway([say(text, folder=real_tokenizer) for text in replies], tokenizer=str(real_tokenizer)) as g:
        session = await g.open()
        history: list[Json] = [user("What does main.py do?")]
        for text in replies:
            reply = await ask(g, session.key, history, "async stream", instructions="Be careful.")
            assert reply.text == text
            history += [*reply.items(), user("And then? 👍🏽")]
        await check_one_row(g, session)


async def test_conversation_continues_after_restart(tmp_path: Path) -> None:
    async with gateway([say(THINK.format("Hm.") + calls(("read_file", {"path": "a"})))], data=tmp_path) as g:
        session = await g.open()
        reply = await ask(g, session.key, [user("Go")], tools=[READ], instructions="Be brief.")
    async with gateway([say("Done.")], data=tmp_path) as g:
        history = [user("Go"), *reply.items(), result(reply.calls[0], "A")]
        await ask(g, session.key, history, tools=[READ], instructions="Be brief.")
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == 2
