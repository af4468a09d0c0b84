"""Test the gateway with the official `openai` client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pydantic
import pytest

from tests.kit import (
    CLIENT_MODES,
    Json,
    Reply,
    Running,
    calls,
    gateway,
    in_every_mode,
    join_chunks,
    renderer,
    result,
    say,
    say_pieces,
    tokenizer,
    tool,
    user,
)
from tests.render.template_conversation import build_tokenizer
from tests.render.test_transitions import ONE_CALL
from tests.verify.kit import verify_all
from turngate.engines.base import Generate, Health
from turngate.engines.scripted import Scripted, ScriptedTurn

SYSTEM = {"role": "system", "content": "You are a careful engineer."}
every_way = in_every_mode(CLIENT_MODES)


def prompts(g: Running) -> list[str]:
    """Decode the prompts that the engine received."""
    return [tokenizer().decode(request.prompt.tolist()) for request in g.engine.received]


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_text_answer(way: str) -> None:
    async with gateway([say("Hello there, friend.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Hi", way)
        assert (reply.content, reply.reasoning, reply.calls, reply.finish) == ("Hello there, friend.", "", [], "stop")
        # Usage matches what the engine received and sampled.
        [turn] = await g.turns(session.id)
        assert reply.usage.prompt_tokens == len(g.engine.received[0].prompt)
        assert reply.usage.completion_tokens == len(turn["ids"])
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert prompts(g) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


async def test_reply_and_chunk_fields() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open()
        client = g.client(session.key)
        reply = await client.chat.completions.create(model="some-model", messages=[user("Hi")])
        assert reply.object == "chat.completion" and reply.model == "some-model" and reply.id.startswith("chatcmpl-")
        assert reply.choices[0].index == 0 and reply.choices[0].message.role == "assistant"
        chunks = [
            c
            async for c in await client.chat.completions.create(model="some-model", messages=[user("Hi")], stream=True)
        ]
        assert {c.id for c in chunks} == {chunks[0].id} and chunks[0].id != reply.id
        assert {(c.object, c.model) for c in chunks} == {("chat.completion.chunk", "some-model")}
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all(c.usage is None for c in chunks)  # not requested


async def test_streamed_usage_is_only_in_last_chunk() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(
            model="m", messages=[user("Hi")], stream=True, stream_options={"include_usage": True}
        )
        chunks = [c async for c in stream]
        *others, last = chunks
        assert last.choices == [] and last.usage is not None
        assert all(c.usage is None and c.choices for c in others)


async def test_stream_has_sse_headers_and_ends_with_done() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        body = {"model": "m", "messages": [user("Hi")], "stream": True}
        response = await g.http(session.key).post("/v1/chat/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        *events, rest = response.text.split("\n\n")
        assert rest == "" and events[-1] == "data: [DONE]"
        assert all(event.startswith("data: {") for event in events[:-1])


@every_way
async def test_multi_token_characters_arrive_intact(way: str) -> None:
    text = "Größe 汉字 👩‍👩‍👧 é\n\n\tend"
    async with gateway([say(text)]) as g:
        session = await g.open()
        assert (await g.ask(session.key, "Hi", way)).content == text


@every_way
async def test_empty_answer_is_empty_string(way: str) -> None:
    async with gateway([say("")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Hi", way)
        assert (reply.content, reply.finish) == ("", "stop")


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_five_turns_with_tools_make_one_training_row(way: str) -> None:
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
    tools = [tool("read_file"), tool("write_file", path={"type": "string"}, text={"type": "string"})]
    async with gateway(script) as g:
        session = await g.open()
        history: list[Json] = [SYSTEM, user("Copy a and b into c.")]

        async def turn(*more: Json) -> Reply:
            history.extend(more)
            reply = await g.ask(session.key, history, way, tools=tools)
            history.append(reply.message())
            return reply

        first = await turn()
        assert (first.reasoning, first.content, first.finish) == ("I should look.", "Let me see.", "tool_calls")
        assert [(c.name, json.loads(c.arguments)) for c in first.calls] == [
            ("read_file", {"path": "a.py"}),
            ("read_file", {"path": "b.py"}),
        ]
        assert len({c.id for c in first.calls}) == 2
        second = await turn(*(result(c, f"contents of {c.arguments}") for c in first.calls))
        assert (second.content, second.finish) == ("", "tool_calls")
        assert json.loads(second.calls[0].arguments) == {"path": "c.py", "text": 'x = "1"\n'}
        third = await turn(result(second.calls[0], ""))
        assert (third.reasoning, third.content, third.finish) == ("Done now.", "All done.", "stop")
        fourth = await turn(user("What does c say?"))
        fifth = await turn(result(fourth.calls[0], "x = 1"))
        assert fifth.content == "It says x."

        [row] = await g.samples(session.id)
        assert [span["trained"] for span in row["spans"]] == [True] * 5
        for request, span in zip(g.engine.received, row["spans"], strict=True):
            assert request.prompt.tolist() == row["ids"][: span["start"]]  # the row matches what the engine received
        sampled = [i for turn_ in script for i in turn_.ids]
        assert [i for i, trained in zip(row["ids"], row["mask"], strict=True) if trained] == sampled
        assert all((p is not None) == bool(m) for p, m in zip(row["logprobs"], row["mask"], strict=True))
        assert {turn_["role"] for turn_ in await g.turns(session.id)} == {"main"}


@every_way
async def test_invalid_json_call_is_delivered_as_text(way: str) -> None:
    broken = '<tool_call>\n{"name": "read_file", "arguments": {"path": \n</tool_call>'
    async with gateway([say("Well: " + broken)]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Hi", way, tools=[tool()])
        assert (reply.calls, reply.finish) == ([], "stop")
        assert reply.content.startswith("Well:") and reply.content.endswith(broken)


MALFORMED_CALLS = {
    "a lone surrogate in string arguments": r'{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}',
    "a lone surrogate": r'{"name": "f", "arguments": {"a": "\ud800"}}',
    "a lone surrogate in the name": r'{"name": "\ud800", "arguments": {}}',
    "an invalid escape": r'{"name": "f", "arguments": "\q"}',
    "NaN": '{"name": "f", "arguments": {"a": NaN}}',
    "a huge number": '{"name": "f", "arguments": {"a": 1' + "0" * 400 + "}}",
    "arguments that are no object": '{"name": "f", "arguments": [1, "x", null]}',
    "nested 300 deep": '{"name": "f", "arguments": ' + "[" * 300 + "]" * 300 + "}",
    "nested 900 deep": '{"name": "f", "arguments": ' + "[" * 900 + "]" * 900 + "}",
    "nested 3000 deep": '{"name": "f", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    "a list": "[1]",
    "nothing": "",
}


@pytest.mark.parametrize("case", MALFORMED_CALLS)
async def test_malformed_call_is_delivered_and_recorded(case: str) -> None:
    text = f"<tool_call>\n{MALFORMED_CALLS[case]}\n</tool_call>"
    async with gateway([say(text), say("Next.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Hi", "async stream", tools=[tool("f")], max_tokens=10_000)
        assert reply.calls or reply.content
        [turn] = await g.turns(session.id)
        assert turn["ids"] == list(say(text).ids) and turn["role"] == "main"
        # The agent can continue from it.
        answers = [result(c, "x") for c in reply.calls] or [user("Go on")]
        await g.ask(session.key, [user("Hi"), reply.message(), *answers], tools=[tool("f")])
        assert len(await g.samples(session.id)) == 1


@every_way
@pytest.mark.parametrize("chunk", [0, 1, 7])
async def test_parallel_tool_calls_can_be_disabled(way: str, chunk: int) -> None:
    two = calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    async with gateway([say("Look:\n" + two, chunk=chunk), say("Thanks.")]) as g:
        session = await g.open()
        question = user("Read a and b")
        reply = await g.ask(session.key, [question], way, tools=[tool()], parallel_tool_calls=False)
        assert [json.loads(c.arguments) for c in reply.calls] == [{"path": "a"}]
        assert reply.finish == "tool_calls"
        # Text after the first call is not part of the turn: the agent never saw it.
        [turn] = await g.turns(session.id)
        text = tokenizer().decode(turn["ids"])
        assert text.count("<tool_call>") == 1 and text.endswith("</tool_call>")
        assert len(turn["logprobs"]) == len(turn["ids"]) == reply.usage.completion_tokens
        history = [question, reply.message(), result(reply.calls[0], "A")]
        await g.ask(session.key, history, way, tools=[tool()], parallel_tool_calls=False)
        assert len(await g.samples(session.id)) == 1
        assert prompts(g)[1].startswith(prompts(g)[0] + text + "<|im_end|>\n")


@pytest.mark.parametrize("chunk", [0, 1, 7])
async def test_turn_ends_after_the_only_call_that_the_template_can_render(chunk: int, tmp_path: Path) -> None:
    build_tokenizer(ONE_CALL, tmp_path)
    two = calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    async with gateway([say(two, chunk=chunk)], tokenizer=str(tmp_path)) as g:
        session = await g.open()
        reply = await g.ask(session.key, [user("Read a and b")], tools=[tool()])
        [turn] = await g.turns(session.id)
        text = tokenizer().decode(turn["ids"])
    assert [json.loads(call.arguments) for call in reply.calls] == [{"path": "a"}]
    assert text.count("<tool_call>") == 1 and text.endswith("</tool_call>")


@every_way
async def test_tool_choice_none_hides_tools_from_model(way: str) -> None:
    async with gateway([say("I cannot read files.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Read a", way, tools=[tool("read_file")], tool_choice="none")
        assert reply.content == "I cannot read files."
        assert "read_file" not in prompts(g)[0]


async def test_tool_choice_auto_is_unconstrained() -> None:
    async with gateway([say(calls(("read_file", {"path": "a"})))]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Read a", tools=[tool()], tool_choice="auto")
        assert reply.finish == "tool_calls"
        assert g.engine.received[0].constraint is None
        assert (await g.turns(session.id))[0]["biases"] == []


NAMED = {"type": "function", "function": {"name": "read_file"}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORCED: dict[str, tuple[dict[str, Json], str]] = {
    "tool": ({"tools": [tool()], "tool_choice": NAMED}, '{"path": "a"}'),
    "tools": ({"tools": [tool()], "tool_choice": "required"}, '[{"name": "read_file", "arguments": {"path": "a"}}]'),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"n": 1}'),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "N", "schema": SCHEMA, "strict": True}}},
        '{"n": 1}',
    ),
}


@pytest.mark.sample(4)
@every_way
@pytest.mark.parametrize("kind", FORCED)
async def test_constrained_output_is_trained_only_by_policy(kind: str, way: str) -> None:
    """A grammar biases sampling, so the turn is recorded, marked and left out of training."""
    request, text = FORCED[kind]
    async with gateway([say(text)] * 2) as g:
        default = await g.open()
        biased = await g.open(policy={"biased": True})
        for session in (default, biased):
            reply = await g.ask(session.key, "Go", way, **request)
            if kind in ("tool", "tools"):
                assert [(c.name, json.loads(c.arguments)) for c in reply.calls] == [("read_file", {"path": "a"})]
                assert reply.finish == "tool_calls" and reply.content == ""
            else:
                assert json.loads(reply.content) == {"n": 1} and reply.finish == "stop"
            [turn] = await g.turns(session.id)
            assert turn["biases"] == [f"constrained: {kind} after reasoning"]  # this model may reason first
        for seen in g.engine.received:
            assert seen.constraint is not None and seen.constraint.kind == kind
        assert await g.samples(default.id) == []
        [row] = await g.samples(default.id, keep_empty=True)
        assert not any(row["mask"]) and f"constrained: {kind}" in row["spans"][0]["reason"]
        [row] = await g.samples(biased.id)
        assert sum(row["mask"]) == len((await g.turns(biased.id))[0]["ids"])


async def test_engine_gets_constraint_schema() -> None:
    async with gateway([say('{"path": "a"}'), say("[]"), say('{"n": 1}')]) as g:
        session = await g.open()
        for kind in ("tool", "tools", "json_schema"):
            await g.ask(session.key, "Go", **FORCED[kind][0])
        single, several, json_schema = (r.constraint for r in g.engine.received)
        parameters = tool()["function"]["parameters"]
        assert single is not None and single.tool == "read_file" and single.schema == parameters
        assert several is not None and several.schema["type"] == "array" and several.schema["minItems"] == 1
        [item] = several.schema["items"]["anyOf"]
        assert item["properties"] == {"name": {"const": "read_file"}, "arguments": parameters}
        assert json_schema is not None and json_schema.schema == SCHEMA


@pytest.mark.parametrize("way", ["async", "async stream"])
async def test_required_tool_without_parallel_calls_is_one_call(way: str) -> None:
    """The model's context must not have two calls when the agent saw and answers one."""
    two = [{"name": "read_file", "arguments": {"path": p}} for p in "ab"]
    async with gateway([say(json.dumps(two))]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Go", way, tools=[tool()], tool_choice="required", parallel_tool_calls=False)
        assert len(reply.calls) == 1
        constraint = g.engine.received[0].constraint
        assert constraint is not None and constraint.schema.get("maxItems") == 1


@every_way
async def test_forced_tool_with_thinking_and_response_format(way: str) -> None:
    """The model thinks first; the constraint holds for what follows. The forced tool overrides the format."""
    thought = "<think>\nI look.\n</think>\n\n"
    async with gateway([say(thought + '{"path": "a"}'), say("Done.")]) as g:
        session = await g.open(policy={"biased": True})
        request = {**FORCED["tool"][0], **FORCED["json_schema"][0]}
        reply = await g.ask(session.key, "Go", way, **request)
        assert (reply.reasoning, reply.content) == ("I look.", "")
        assert [(c.name, c.arguments) for c in reply.calls] == [("read_file", '{"path": "a"}')]
        [seen] = g.engine.received
        assert seen.constraint is not None and seen.constraint.kind == "tool" and seen.constraint.after_reasoning
        assert seen.reasoning is not None and not seen.reasoning.is_open
        await g.ask(session.key, [user("Go"), reply.message(), result(reply.calls[0], "A")], way, tools=[tool()])
        assert len(await g.samples(session.id)) == 1
        await g.seal(session.id)
        verify_all(Path(g.app.config.data), renderer=renderer())


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches files."}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", [{"input": "*** Begin\n+x"}, {"input": "x", "file": "a"}], ids=["text", "other"])
async def test_custom_tool_loop_is_one_row(arguments: Json, stream: bool) -> None:
    async with gateway([say(calls(("patch", arguments))), say("Done.")]) as g:
        session = await g.open()
        client = g.client(session.key).chat.completions
        request: Json = {"model": "m", "tools": [PATCH, tool()], "stream": stream}
        reply = await client.create(messages=[user("Fix a")], **request)
        if stream:
            [call] = [c for chunk in [c async for c in reply] for c in chunk.choices[0].delta.tool_calls or ()]
            wire = call.model_dump(exclude_none=True, exclude={"index"})
        else:
            [call] = reply.choices[0].message.tool_calls
            wire = call.model_dump(exclude_none=True)
        assert wire["type"] == "custom" and wire["custom"]["name"] == "patch"
        assert wire["custom"]["input"] == (arguments["input"] if len(arguments) == 1 else json.dumps(arguments))
        answer = {"role": "assistant", "content": None, "tool_calls": [wire]}
        results = {"role": "tool", "tool_call_id": wire["id"], "content": "ok"}
        await client.create(messages=[user("Fix a"), answer, results], **{**request, "stream": False})
        assert prompts(g)[1].startswith(prompts(g)[0] + calls(("patch", arguments)) + "<|im_end|>\n")
        assert len(await g.samples(session.id)) == 1
        await g.seal(session.id)
        verify_all(Path(g.app.config.data), renderer=renderer())


async def test_allowed_tools_are_all_that_the_model_sees() -> None:
    async with gateway([say("No tool."), say('[{"name": "read_file", "arguments": {}}]')]) as g:
        session = await g.open()
        some: Json = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "read_file"}}]}
        tools = [tool("read_file"), tool("write_file")]
        choice = {"type": "allowed_tools", "allowed_tools": some}
        await g.ask(session.key, "Go", tools=tools, tool_choice=choice)
        assert "read_file" in prompts(g)[0] and "write_file" not in prompts(g)[0]
        must = {"type": "allowed_tools", "allowed_tools": {**some, "mode": "required"}}
        await g.ask(session.key, "Go", tools=tools, tool_choice=must)
        constraint = g.engine.received[1].constraint
        assert constraint is not None
        [only] = constraint.schema["items"]["anyOf"]
        assert only["properties"]["name"] == {"const": "read_file"} and "write_file" in prompts(g)[1]
        await g.seal(session.id)
        verify_all(Path(g.app.config.data), renderer=renderer())


@pytest.mark.parametrize("stream", [False, True])
async def test_old_functions_loop_is_one_row(stream: bool) -> None:
    text = calls(("read_file", {"path": "a"}))
    async with gateway([say(text), say("It says A.")]) as g:
        session = await g.open()
        client = g.client(session.key).chat.completions
        functions = [tool()["function"]]
        reply = await client.create(model="m", messages=[user("Read a")], functions=functions, stream=stream)
        if stream:
            chunks = [chunk.choices[0] async for chunk in reply]
            [function_call] = [c.delta.function_call for c in chunks if c.delta.function_call is not None]
            finish = chunks[-1].finish_reason
        else:
            function_call, finish = reply.choices[0].message.function_call, reply.choices[0].finish_reason
        assert finish == "function_call" and json.loads(function_call.arguments) == {"path": "a"}
        answer: Json = {"role": "assistant", "content": None, "function_call": function_call.model_dump()}
        results: Json = {"role": "function", "name": "read_file", "content": "A"}
        await client.create(model="m", messages=[user("Read a"), answer, results], functions=functions)
        assert prompts(g)[1].startswith(prompts(g)[0] + text + "<|im_end|>\n") and "\nA\n" in prompts(g)[1]
        assert len(await g.samples(session.id)) == 1
        await g.seal(session.id)
        verify_all(Path(g.app.config.data), renderer=renderer())


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_shown_if_the_session_allows_it(stream: bool) -> None:
    async with gateway([say("Größe 👍")]) as g:
        session = await g.open(show_logprobs=True)
        reply = await g.client(session.key).chat.completions.create(
            model="m", messages=[user("Hi")], logprobs=True, stream=stream
        )
        if stream:
            parts = [choice.logprobs for chunk in [c async for c in reply] for choice in chunk.choices]
            scores = [score for part in parts if part is not None for score in part.content]
        else:
            scores = reply.choices[0].logprobs.content
        [turn] = await g.turns(session.id)
        assert [score.logprob for score in scores] == turn["logprobs"]
        assert bytes(b for score in scores for b in score.bytes).decode() == "Größe 👍<|im_end|>"
        assert all(score.top_logprobs == [] for score in scores)


async def test_log_probabilities_are_refused_otherwise() -> None:
    """They are out of an agent's reach unless the operator opens the session with `show_logprobs`."""
    async with gateway([say("Hi.")] * 2) as g:
        closed, shown = await g.open(), await g.open(show_logprobs=True)
        with pytest.raises(openai.BadRequestError, match="show_logprobs") as caught:
            await g.ask(closed.key, "Hi", logprobs=True)
        assert caught.value.param == "logprobs" and not g.engine.received
        with pytest.raises(openai.BadRequestError, match="set top_logprobs to 0") as caught:
            await g.ask(shown.key, "Hi", logprobs=True, top_logprobs=3)
        assert caught.value.param == "top_logprobs"
        assert (await g.show(shown.id))["config"]["show_logprobs"] is True


async def test_sdk_parse_helper_returns_structured_output() -> None:
    class Number(pydantic.BaseModel):
        n: int

    async with gateway([say('{"n": 7}')]) as g:
        session = await g.open()
        reply = await g.client(session.key).chat.completions.parse(
            model="m", messages=[user("Pick")], response_format=Number
        )
        assert reply.choices[0].message.parsed == Number(n=7)


async def test_sdk_stream_helper_accumulates_text_and_calls() -> None:
    async with gateway([say("Look. " + calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"})))]) as g:
        session = await g.open()
        kinds = set()
        async with g.client(session.key).chat.completions.stream(
            model="m", messages=[user("Read")], tools=[tool()]
        ) as stream:
            async for event in stream:
                kinds.add(event.type)
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Look." and [c.function.name for c in message.tool_calls or ()] == ["read_file"] * 2
        assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_reasoning_has_both_field_names_and_accepts_either(way: str) -> None:
    script = [say("<think>\nHmm, two.\n</think>\n\nTwo."), say("Yes."), say("Really."), say("Still.")]
    async with gateway(script) as g:
        session = await g.open()
        client = g.client(session.key)
        reply = await client.chat.completions.create(model="m", messages=[user("1+1?")])
        message: Any = reply.choices[0].message
        assert message.reasoning == message.reasoning_content == "Hmm, two." and message.content == "Two."
        for spelling in ("reasoning", "reasoning_content", None):
            answer = {"role": "assistant", "content": "Two."} | ({spelling: "Hmm, two."} if spelling else {})
            later = await g.ask(session.key, [user("1+1?"), answer, user(f"Sure? {spelling}")], way)
            assert later.reasoning == "" and later.content
        # The model always sees its own reasoning, even if the agent renamed or dropped it.
        for prompt in prompts(g)[1:]:
            assert "<think>\nHmm, two.\n</think>\n\nTwo.<|im_end|>" in prompt
        roots = [n for n in (await g.trace(session.id))["nodes"] if n["parent"] is None]
        assert len(roots) == 1


async def test_streamed_reasoning_precedes_answer_in_both_fields() -> None:
    async with gateway([say("<think>\nHmm, two.\n</think>\n\nTwo.")]) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(model="m", messages=[user("1+1?")], stream=True)
        deltas: list[Any] = [c.choices[0].delta async for c in stream]
        thought = [d for d in deltas if getattr(d, "reasoning", None)]
        assert "".join(d.reasoning for d in thought) == "".join(d.reasoning_content for d in thought) == "Hmm, two."
        answer = [d for d in deltas if d.content]
        assert "".join(d.content for d in answer) == "Two." and deltas.index(thought[-1]) < deltas.index(answer[0])


@every_way
async def test_developer_messages_and_content_parts_become_text(way: str) -> None:
    async with gateway([say("Ok.")] * 2) as g:
        session = await g.open()
        parts = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        await g.ask(session.key, messages, way)
        [prompt] = prompts(g)
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert "First.\nSecond." in prompt
        # A plain string and the older role name are the same conversation.
        equivalent = [{"role": "system", "content": "Be brief."}, user("First.\nSecond.")]
        await g.ask(session.key, [*equivalent, {"role": "assistant", "content": "Ok."}, user("More")], way)
        assert len(await g.samples(session.id)) == 1


async def test_rewritten_history_does_not_fork() -> None:
    """Different white space in arguments, renamed call ids and null content do not fork the conversation."""
    script = [say(calls(("read_file", {"path": "a", "lines": 3}))), say("Done.")]
    async with gateway(script) as g:
        session = await g.open()
        await g.ask(session.key, "Read a", tools=[tool()])
        rewritten = {"name": "read_file", "arguments": '{"lines":3.0,"path":"a"}'}
        history = [
            {"role": "user", "content": [{"type": "text", "text": "Read a "}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "x1", "type": "function", "function": rewritten}],
            },
            {"role": "tool", "tool_call_id": "x1", "content": [{"type": "text", "text": "A"}]},
        ]
        await g.ask(session.key, history, tools=[tool()])
        [row] = await g.samples(session.id)
        assert [span["trained"] for span in row["spans"]] == [True, True]


async def test_unknown_and_provider_fields_are_accepted() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open()
        reply = await g.client(session.key).chat.completions.create(
            model="m",
            messages=[user("Hi")],
            store=False,
            user="u",
            metadata={"a": "b"},
            service_tier="auto",
            n=1,
            logprobs=False,
            modalities=["text"],
            tools=[],
            stop=[],
            seed=7,
            extra_body={"prompt_cache_key": "k", "safety_identifier": "s", "cache": {"x": [1]}, "tool_choice": "auto"},
        )
        assert reply.choices[0].message.content == "Ok."
        assert g.engine.received[0].sampling.seed == 7


# ── finish reasons ──────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_ends_answer_with_length(field: str, way: str) -> None:
    async with gateway([say("One two three four five six.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Count", way, **{field: 3})
        assert reply.finish == "length" and reply.usage.completion_tokens == 3
        assert g.engine.received[0].max_tokens == 3
        [turn] = await g.turns(session.id)
        assert turn["finish"] == "length" and tokenizer().decode(turn["ids"]) == reply.content


async def test_max_completion_tokens_wins_over_max_tokens() -> None:
    async with gateway([say("One two three four five six.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Count", max_tokens=5, max_completion_tokens=2)
        assert reply.usage.completion_tokens == 2


@every_way
async def test_continuing_after_truncated_answer_does_not_fork(way: str) -> None:
    async with gateway([say("One two three"), say("four.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Count", way, max_tokens=2)
        await g.ask(session.key, [user("Count"), reply.message(), user("Go on")], way)
        assert len(await g.samples(session.id)) == 1
        assert prompts(g)[1] == (
            f"{prompts(g)[0]}{reply.content}<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
        )


# Pieces sampled by the model, stop strings, text shown to the agent, and the number of the piece that ends the turn.
STOPS: dict[str, tuple[list[str], str | list[str], str, int]] = {
    "inside-one-token": (["Say ", "hello", " END", " more"], "END", "Say hello ", 3),
    "across-two-tokens": (["Say hello EN", "D more"], "END", "Say hello ", 2),
    "across-many-tokens": (["a", "S", "T", "O", "P", "b"], "STOP", "a", 5),
    "the-first-of-several": (["one ", "two ", "three ", "four"], ["three", "two", "four"], "one ", 2),
    "one-begins-another": (["x ", "A", "B", "C"], ["ABC", "AB"], "x ", 3),
    "at-the-very-start": (["END", " more"], "END", "", 1),
    "a-newline": (["one", "\n", "\n", "two"], "\n\n", "one", 3),
    "not-ascii": (["ein ", "Sch", "luß", " mehr"], "Schluß", "ein ", 3),
}


@every_way
async def test_stop_string_ends_answer_and_is_hidden(way: str) -> None:
    """The stop string may fall inside a token, across tokens or across engine chunks."""

    def script(request: Generate, index: int) -> ScriptedTurn:
        case, chunk = request.session.split(".")
        return say_pieces(STOPS[case][0], chunk=int(chunk))

    async with gateway(script) as g:
        for case, (pieces, stop, shown, ends_in) in STOPS.items():
            for chunk in (0, 1, 2, 3):
                session = await g.open(id=f"{case}.{chunk}")
                reply = await g.ask(session.key, "Go", way, stop=stop)
                assert (reply.content, reply.finish) == (shown, "stop"), session.id
                assert g.engine.received[-1].stop == ((stop,) if isinstance(stop, str) else tuple(stop))
                [turn] = await g.turns(session.id)
                # The turn ends with the token that completes the stop string.
                sampled = tokenizer().decode(turn["ids"])
                assert "".join(pieces[: ends_in - 1]) in sampled and sampled in "".join(pieces[:ends_in]), session.id
                assert len(turn["ids"]) == len(turn["logprobs"]) == reply.usage.completion_tokens


@every_way
async def test_partial_stop_string_is_shown(way: str) -> None:
    async with gateway([say_pieces(["Say E", "N", "T and EN"])]) as g:
        session = await g.open()
        reply = await g.ask(session.key, "Go", way, stop=["END", "ENDE"])
        assert reply.content == "Say ENT and EN"


# ── other endpoints ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_list_and_retrieve_models() -> None:
    async with gateway(model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key)
        assert [m.id async for m in client.models.list()] == ["policy-1"]
        model = await client.models.retrieve("policy-1")
        assert model.id == "policy-1" and model.object == "model" and model.owned_by == "turngate"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4o")


async def test_unnamed_gateway_lists_engine_models() -> None:
    async with gateway() as g:
        session = await g.open()
        assert [m.id async for m in g.client(session.key).models.list()] == ["scripted"]
        own = await g.open(model="mine")
        assert [m.id async for m in g.client(own.key).models.list()] == ["mine"]


@pytest.mark.parametrize("prefix", ["/s/{id}/v1", "/s/{id}", "/v1/rollouts/{id}"])
async def test_session_by_path_serves_calls(prefix: str) -> None:
    async with gateway([say("Hello.")], model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key, base_url=g.root + prefix.format(id=session.id))
        reply = await client.chat.completions.create(model="policy-1", messages=[user("Hi")])
        assert reply.choices[0].message.content == "Hello."


@pytest.mark.parametrize("prefix", ["/s/{id}/v1", "/v1/rollouts/{id}"])
async def test_session_by_path_lists_models(prefix: str) -> None:
    async with gateway(model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key, base_url=g.root + prefix.format(id=session.id))
        assert [m.id async for m in client.models.list()] == ["policy-1"]
        assert (await client.models.retrieve("policy-1")).id == "policy-1"


async def test_health_needs_no_key() -> None:
    async with gateway() as g:
        response = await g.http().get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "ok")


class UnhealthyEngine(Scripted):
    async def health(self) -> list[Health]:
        return [Health(self.name, False, detail="http://10.0.0.7:8000 is on fire")]


async def test_unhealthy_engine_fails_health_without_details() -> None:
    async with gateway(engine=UnhealthyEngine([])) as g:
        response = await g.http().get("/health")
        assert response.status_code == 503 and "10.0.0.7" not in response.text
        assert response.json() == {"status": "engine unavailable", "engines": 0, "engines_total": 1}


# ── real tokenizers ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_conversation_on_real_tokenizer_is_one_row(real_tokenizer: Path) -> None:
    replies = ["It prints a line.", "Größe 汉字 👩‍👩‍👧", "  indented\n\n\tend", "Done."]
    async with gateway([say(text, folder=real_tokenizer) for text in replies], tokenizer=str(real_tokenizer)) as g:
        session = await g.open()
        history: list[Json] = [SYSTEM, user("What does main.py do?")]
        for text in replies:
            stream = await g.client(session.key).chat.completions.create(model="m", messages=history, stream=True)
            reply = join_chunks([c async for c in stream])
            assert reply.content == text
            history += [reply.message(), user("And then? 👍🏽")]
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == len(replies)
        for request, span in zip(g.engine.received, row["spans"], strict=True):
            assert np.array_equal(request.prompt, row["ids"][: span["start"]])
            assert set(request.stop_ids) == set(renderer(real_tokenizer).stop_ids)
