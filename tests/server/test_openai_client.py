"""The official `openai` client against the gateway: it shall not be able to tell it from a provider."""

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
    join_chunks,
    renderer,
    result,
    say,
    say_pieces,
    tokenizer,
    tool,
    user,
)
from turngate.engines.base import Generate, Health
from turngate.engines.scripted import Scripted, ScriptedTurn

SYSTEM = {"role": "system", "content": "You are a careful engineer."}
every_way = pytest.mark.parametrize("way", CLIENT_MODES)


def prompts(g: Running) -> list[str]:
    """The prompts that the engine got, as text."""
    return [tokenizer().decode(request.prompt.tolist()) for request in g.engine.received]


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_a_plain_answer(way: str) -> None:
    async with gateway([say("Hello there, friend.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Hi", way)
        assert (heard.content, heard.reasoning, heard.calls, heard.finish) == ("Hello there, friend.", "", [], "stop")
        # The numbers are true: they are what the engine got and gave.
        [turn] = await g.turns(session.id)
        assert heard.usage.prompt_tokens == len(g.engine.received[0].prompt)
        assert heard.usage.completion_tokens == len(turn["ids"])
        assert heard.usage.total_tokens == heard.usage.prompt_tokens + heard.usage.completion_tokens
        assert prompts(g) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


async def test_a_reply_has_the_shape_of_a_providers() -> None:
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
        assert all(c.usage is None for c in chunks)  # it was not asked for


async def test_usage_of_a_stream_comes_last_and_only_once() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(
            model="m", messages=[user("Hi")], stream=True, stream_options={"include_usage": True}
        )
        chunks = [c async for c in stream]
        *others, last = chunks
        assert last.choices == [] and last.usage is not None
        assert all(c.usage is None and c.choices for c in others)


async def test_events_carry_server_sent_event_headers_and_end_with_done() -> None:
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
async def test_characters_that_span_tokens_arrive_whole(way: str) -> None:
    text = "Größe 汉字 👩‍👩‍👧 é\n\n\tend"
    async with gateway([say(text)]) as g:
        session = await g.open()
        assert (await g.ask(session.key, "Hi", way)).content == text


@every_way
async def test_an_answer_of_nothing_is_an_empty_string(way: str) -> None:
    async with gateway([say("")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Hi", way)
        assert (heard.content, heard.finish) == ("", "stop")


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_five_turns_with_tools_make_one_training_row(way: str) -> None:
    """The whole life of a small agent: parallel calls, results, thinking, an answer, another question."""
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
            heard = await g.ask(session.key, history, way, tools=tools)
            history.append(heard.message())
            return heard

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
            assert request.prompt.tolist() == row["ids"][: span["start"]]  # what was recorded is what the engine got
        sampled = [i for turn_ in script for i in turn_.ids]
        assert [i for i, trained in zip(row["ids"], row["mask"], strict=True) if trained] == sampled
        assert all((p is not None) == bool(m) for p, m in zip(row["logprobs"], row["mask"], strict=True))
        assert {turn_["role"] for turn_ in await g.turns(session.id)} == {"main"}


@every_way
async def test_a_call_that_is_not_json_is_delivered_as_text_and_not_dropped(way: str) -> None:
    broken = '<tool_call>\n{"name": "read_file", "arguments": {"path": \n</tool_call>'
    async with gateway([say("Well: " + broken)]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Hi", way, tools=[tool()])
        assert (heard.calls, heard.finish) == ([], "stop")
        assert heard.content.startswith("Well:") and heard.content.endswith(broken)


STRANGE = {
    "a lone surrogate in arguments given as text": r'{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}',
    "a lone surrogate": r'{"name": "f", "arguments": {"a": "\ud800"}}',
    "a lone surrogate in the name": r'{"name": "\ud800", "arguments": {}}',
    "an escape that JSON does not have": r'{"name": "f", "arguments": "\q"}',
    "a number that JSON does not have": '{"name": "f", "arguments": {"a": NaN}}',
    "a number too large": '{"name": "f", "arguments": {"a": 1' + "0" * 400 + "}}",
    "arguments that are no object": '{"name": "f", "arguments": [1, "x", null]}',
    "a pit": '{"name": "f", "arguments": ' + "[" * 300 + "]" * 300 + "}",
    "a deep pit": '{"name": "f", "arguments": ' + "[" * 900 + "]" * 900 + "}",
    "a pit without a bottom": '{"name": "f", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    "a list": "[1]",
    "nothing": "",
}


@pytest.mark.parametrize("case", STRANGE)
async def test_whatever_the_model_writes_into_a_call_the_turn_is_delivered_and_recorded(case: str) -> None:
    text = f"<tool_call>\n{STRANGE[case]}\n</tool_call>"
    async with gateway([say(text), say("Next.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Hi", "async stream", tools=[tool("f")], max_tokens=10_000)
        assert heard.calls or heard.content
        [turn] = await g.turns(session.id)
        assert turn["ids"] == list(say(text).ids) and turn["role"] == "main"
        # And the agent can go on from it, whatever it made of the call.
        answers = [result(c, "x") for c in heard.calls] or [user("Go on")]
        await g.ask(session.key, [user("Hi"), heard.message(), *answers], tools=[tool("f")])
        assert len(await g.samples(session.id)) == 1


@every_way
@pytest.mark.parametrize("chunk", [0, 1, 7])
async def test_one_call_at_a_time_if_the_agent_wants_it_so(way: str, chunk: int) -> None:
    two = calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    async with gateway([say("Look:\n" + two, chunk=chunk), say("Thanks.")]) as g:
        session = await g.open()
        question = user("Read a and b")
        heard = await g.ask(session.key, [question], way, tools=[tool()], parallel_tool_calls=False)
        assert [json.loads(c.arguments) for c in heard.calls] == [{"path": "a"}]
        assert heard.finish == "tool_calls"
        # What the model said after the call is not part of the turn: nobody saw it, and nothing may be conditioned on it.
        [turn] = await g.turns(session.id)
        text = tokenizer().decode(turn["ids"])
        assert text.count("<tool_call>") == 1 and text.endswith("</tool_call>")
        assert len(turn["logprobs"]) == len(turn["ids"]) == heard.usage.completion_tokens
        history = [question, heard.message(), result(heard.calls[0], "A")]
        await g.ask(session.key, history, way, tools=[tool()], parallel_tool_calls=False)
        assert len(await g.samples(session.id)) == 1
        assert prompts(g)[1].startswith(prompts(g)[0] + text + "<|im_end|>\n")


@every_way
async def test_tools_that_may_not_be_used_are_not_shown_to_the_model(way: str) -> None:
    async with gateway([say("I cannot read files.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Read a", way, tools=[tool("read_file")], tool_choice="none")
        assert heard.content == "I cannot read files."
        assert "read_file" not in prompts(g)[0]


async def test_tool_choice_auto_changes_nothing() -> None:
    async with gateway([say(calls(("read_file", {"path": "a"})))]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Read a", tools=[tool()], tool_choice="auto")
        assert heard.finish == "tool_calls"
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


@every_way
@pytest.mark.parametrize("kind", FORCED)
async def test_forced_shapes_work_and_are_not_trained_unless_wanted(kind: str, way: str) -> None:
    """A grammar changes what the policy would have sampled: the turn is recorded, marked and left out of training."""
    request, text = FORCED[kind]
    async with gateway([say(text)] * 2) as g:
        careful = await g.open()
        bold = await g.open(policy={"biased": True})
        for session in (careful, bold):
            heard = await g.ask(session.key, "Go", way, **request)
            if kind in ("tool", "tools"):
                assert [(c.name, json.loads(c.arguments)) for c in heard.calls] == [("read_file", {"path": "a"})]
                assert heard.finish == "tool_calls" and heard.content == ""
            else:
                assert json.loads(heard.content) == {"n": 1} and heard.finish == "stop"
            [turn] = await g.turns(session.id)
            assert turn["biases"] == [f"constrained: {kind}"]
        for seen in g.engine.received:
            assert seen.constraint is not None and seen.constraint.kind == kind
        assert await g.samples(careful.id) == []
        [row] = await g.samples(careful.id, keep_empty=True)
        assert not any(row["mask"]) and f"constrained: {kind}" in row["spans"][0]["reason"]
        [row] = await g.samples(bold.id)
        assert sum(row["mask"]) == len((await g.turns(bold.id))[0]["ids"])


async def test_the_engine_gets_the_schema_of_what_is_forced() -> None:
    async with gateway([say('{"path": "a"}'), say("[]"), say('{"n": 1}')]) as g:
        session = await g.open()
        for kind in ("tool", "tools", "json_schema"):
            await g.ask(session.key, "Go", **FORCED[kind][0])
        one, several, shape = (r.constraint for r in g.engine.received)
        parameters = tool()["function"]["parameters"]
        assert one is not None and one.tool == "read_file" and one.schema == parameters
        assert several is not None and several.schema["type"] == "array" and several.schema["minItems"] == 1
        [item] = several.schema["items"]["anyOf"]
        assert item["properties"] == {"name": {"const": "read_file"}, "arguments": parameters}
        assert shape is not None and shape.schema == SCHEMA


@pytest.mark.parametrize("way", ["async", "async stream"])
async def test_required_and_not_parallel_means_one_call_for_agent_engine_and_trace(way: str) -> None:
    """The model must not be left with two calls in its context when the agent saw, and answers, one."""
    two = [{"name": "read_file", "arguments": {"path": p}} for p in "ab"]
    async with gateway([say(json.dumps(two))]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Go", way, tools=[tool()], tool_choice="required", parallel_tool_calls=False)
        assert len(heard.calls) == 1
        constraint = g.engine.received[0].constraint
        assert constraint is not None and constraint.schema.get("maxItems") == 1


async def test_structured_outputs_through_the_clients_own_helper() -> None:
    class Number(pydantic.BaseModel):
        n: int

    async with gateway([say('{"n": 7}')]) as g:
        session = await g.open()
        reply = await g.client(session.key).chat.completions.parse(
            model="m", messages=[user("Pick")], response_format=Number
        )
        assert reply.choices[0].message.parsed == Number(n=7)


async def test_the_clients_own_stream_helper_accumulates_text_and_calls() -> None:
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
async def test_reasoning_comes_in_both_spellings_and_goes_back_in_either(way: str) -> None:
    script = [say("<think>\nHmm, two.\n</think>\n\nTwo."), say("Yes."), say("Really."), say("Still.")]
    async with gateway(script) as g:
        session = await g.open()
        client = g.client(session.key)
        reply = await client.chat.completions.create(model="m", messages=[user("1+1?")])
        message: Any = reply.choices[0].message
        assert message.reasoning == message.reasoning_content == "Hmm, two." and message.content == "Two."
        for spelling in ("reasoning", "reasoning_content", None):
            answer = {"role": "assistant", "content": "Two."} | ({spelling: "Hmm, two."} if spelling else {})
            heard = await g.ask(session.key, [user("1+1?"), answer, user(f"Sure? {spelling}")], way)
            assert heard.reasoning == "" and heard.content
        # Kept, renamed or dropped by the agent: the model always sees what it thought, as it thought it.
        for prompt in prompts(g)[1:]:
            assert "<think>\nHmm, two.\n</think>\n\nTwo.<|im_end|>" in prompt
        roots = [n for n in (await g.trace(session.id))["nodes"] if n["parent"] is None]
        assert len(roots) == 1


async def test_streamed_reasoning_comes_before_the_answer_and_in_both_spellings() -> None:
    async with gateway([say("<think>\nHmm, two.\n</think>\n\nTwo.")]) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(model="m", messages=[user("1+1?")], stream=True)
        deltas: list[Any] = [c.choices[0].delta async for c in stream]
        thought = [d for d in deltas if getattr(d, "reasoning", None)]
        assert "".join(d.reasoning for d in thought) == "".join(d.reasoning_content for d in thought) == "Hmm, two."
        told = [d for d in deltas if d.content]
        assert "".join(d.content for d in told) == "Two." and deltas.index(thought[-1]) < deltas.index(told[0])


@every_way
async def test_developer_messages_and_content_parts_reach_the_model_as_text(way: str) -> None:
    async with gateway([say("Ok.")] * 2) as g:
        session = await g.open()
        parts = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        await g.ask(session.key, messages, way)
        [prompt] = prompts(g)
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert "First.\nSecond." in prompt
        # The same said with a string, or by the older role name, is the same conversation.
        same = [{"role": "system", "content": "Be brief."}, user("First.\nSecond.")]
        await g.ask(session.key, [*same, {"role": "assistant", "content": "Ok."}, user("More")], way)
        assert len(await g.samples(session.id)) == 1


async def test_an_agent_that_spells_its_history_anew_stays_on_its_branch() -> None:
    """Other white space in arguments, renamed call ids, null for empty content: the same conversation, so no fork."""
    script = [say(calls(("read_file", {"path": "a", "lines": 3}))), say("Done.")]
    async with gateway(script) as g:
        session = await g.open()
        await g.ask(session.key, "Read a", tools=[tool()])
        spelled_anew = {"name": "read_file", "arguments": '{"lines":3.0,"path":"a"}'}
        history = [
            {"role": "user", "content": [{"type": "text", "text": "Read a "}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "x1", "type": "function", "function": spelled_anew}],
            },
            {"role": "tool", "tool_call_id": "x1", "content": [{"type": "text", "text": "A"}]},
        ]
        await g.ask(session.key, history, tools=[tool()])
        [row] = await g.samples(session.id)
        assert [span["trained"] for span in row["spans"]] == [True, True]


async def test_fields_of_other_providers_and_versions_are_taken_without_fuss() -> None:
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


# ── how an answer ends ──────────────────────────────────────────────────────────────────────────────────────────────


@every_way
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_that_may_not_be_longer_ends_with_length(field: str, way: str) -> None:
    async with gateway([say("One two three four five six.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Count", way, **{field: 3})
        assert heard.finish == "length" and heard.usage.completion_tokens == 3
        assert g.engine.received[0].max_tokens == 3
        [turn] = await g.turns(session.id)
        assert turn["finish"] == "length" and tokenizer().decode(turn["ids"]) == heard.content


async def test_the_newer_name_of_the_length_wins() -> None:
    async with gateway([say("One two three four five six.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Count", max_tokens=5, max_completion_tokens=2)
        assert heard.usage.completion_tokens == 2


@every_way
async def test_going_on_after_an_answer_that_was_cut_short_does_not_fork(way: str) -> None:
    async with gateway([say("One two three"), say("four.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Count", way, max_tokens=2)
        await g.ask(session.key, [user("Count"), heard.message(), user("Go on")], way)
        assert len(await g.samples(session.id)) == 1
        assert prompts(g)[1] == (
            f"{prompts(g)[0]}{heard.content}<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
        )


# What the model says in pieces of its own, the stop strings, what the agent sees, and the piece in which the turn ends.
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
async def test_a_stop_string_ends_the_answer_and_is_not_shown(way: str) -> None:
    """Wherever it falls: inside a token, across tokens, across the chunks in which the engine sends them."""

    def script(request: Generate, index: int) -> ScriptedTurn:
        case, chunk = request.session.split(".")
        return say_pieces(STOPS[case][0], chunk=int(chunk))

    async with gateway(script) as g:
        for case, (pieces, stop, shown, ends_in) in STOPS.items():
            for chunk in (0, 1, 2, 3):
                session = await g.open(id=f"{case}.{chunk}")
                heard = await g.ask(session.key, "Go", way, stop=stop)
                assert (heard.content, heard.finish) == (shown, "stop"), session.id
                assert g.engine.received[-1].stop == ((stop,) if isinstance(stop, str) else tuple(stop))
                [turn] = await g.turns(session.id)
                # The tokens up to the one that completed the stop string were sampled. What came after it never was.
                sampled = tokenizer().decode(turn["ids"])
                assert "".join(pieces[: ends_in - 1]) in sampled and sampled in "".join(pieces[:ends_in]), session.id
                assert len(turn["ids"]) == len(turn["logprobs"]) == heard.usage.completion_tokens


@every_way
async def test_what_only_looks_like_the_beginning_of_a_stop_string_is_shown(way: str) -> None:
    async with gateway([say_pieces(["Say E", "N", "T and EN"])]) as g:
        session = await g.open()
        heard = await g.ask(session.key, "Go", way, stop=["END", "ENDE"])
        assert heard.content == "Say ENT and EN"


# ── the other doors ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_models_are_listed_and_found() -> None:
    async with gateway(model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key)
        assert [m.id async for m in client.models.list()] == ["policy-1"]
        model = await client.models.retrieve("policy-1")
        assert model.id == "policy-1" and model.object == "model" and model.owned_by == "turngate"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4o")


async def test_a_gateway_without_a_model_name_lists_what_its_engine_serves() -> None:
    async with gateway() as g:
        session = await g.open()
        assert [m.id async for m in g.client(session.key).models.list()] == ["scripted"]
        own = await g.open(model="mine")
        assert [m.id async for m in g.client(own.key).models.list()] == ["mine"]


@pytest.mark.parametrize("prefix", ["/s/{id}/v1", "/s/{id}", "/v1/rollouts/{id}"])
async def test_a_session_named_by_its_path_works_like_one_found_by_its_key(prefix: str) -> None:
    async with gateway([say("Hello.")], model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key, base_url=g.root + prefix.format(id=session.id))
        reply = await client.chat.completions.create(model="policy-1", messages=[user("Hi")])
        assert reply.choices[0].message.content == "Hello."


@pytest.mark.parametrize("prefix", ["/s/{id}/v1", "/v1/rollouts/{id}"])
async def test_models_of_a_session_named_by_its_path(prefix: str) -> None:
    async with gateway(model="policy-1") as g:
        session = await g.open()
        client = g.client(session.key, base_url=g.root + prefix.format(id=session.id))
        assert [m.id async for m in client.models.list()] == ["policy-1"]
        assert (await client.models.retrieve("policy-1")).id == "policy-1"


async def test_health_needs_no_key_and_says_whether_calls_can_be_served() -> None:
    async with gateway() as g:
        response = await g.http().get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "ok")


class Ill(Scripted):
    async def health(self) -> list[Health]:
        return [Health(self.name, False, detail="http://10.0.0.7:8000 is on fire")]


async def test_health_without_an_engine_is_a_failure_and_gives_nothing_away() -> None:
    async with gateway(engine=Ill([])) as g:
        response = await g.http().get("/health")
        assert response.status_code == 503 and "10.0.0.7" not in response.text
        assert response.json() == {"status": "engine unavailable", "engines": 0, "engines_total": 1}


# ── real tokenizers ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_conversation_on_each_real_tokenizer_is_one_row(real_tokenizer: Path) -> None:
    replies = ["It prints a line.", "Größe 汉字 👩‍👩‍👧", "  indented\n\n\tend", "Done."]
    async with gateway([say(text, folder=real_tokenizer) for text in replies], tokenizer=str(real_tokenizer)) as g:
        session = await g.open()
        history: list[Json] = [SYSTEM, user("What does main.py do?")]
        for text in replies:
            stream = await g.client(session.key).chat.completions.create(model="m", messages=history, stream=True)
            heard = join_chunks([c async for c in stream])
            assert heard.content == text
            history += [heard.message(), user("And then? 👍🏽")]
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == len(replies)
        for request, span in zip(g.engine.received, row["spans"], strict=True):
            assert np.array_equal(request.prompt, row["ids"][: span["start"]])
            assert set(request.stop_ids) == set(renderer(real_tokenizer).stop_ids)
