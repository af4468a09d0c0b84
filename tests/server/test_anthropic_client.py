"""Test the gateway with the official `anthropic` client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pydantic
import pytest

from tests.kit import (
    Gated,
    Json,
    Running,
    calls,
    gateway,
    in_every_mode,
    real_tokenizer,
    renderer,
    say,
    say_pieces,
    tokenizer,
    until,
)
from tests.speed import scaled
from turngate.dialects import decode_stored_messages
from turngate.engines.scripted import Scripted, ScriptedTurn, derive_logprobs
from turngate.render import BUILTIN_TOKENIZER

CLIENT_MODES = ("async", "async stream", "sync", "sync stream", "beta", "beta stream")
every_way = in_every_mode(CLIENT_MODES)
both_ways = pytest.mark.parametrize("way", ["async", "async stream"])
READ = {
    "name": "read_file",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
WRITE = {
    "name": "write_file",
    "description": "Writes a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}


def client(g: Running, key: str, **options: Any) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    g._stack.push_async_callback(http.aclose)
    options = {"max_retries": 0, "timeout": scaled(20), "base_url": g.root, **options}
    return anthropic.AsyncAnthropic(api_key=key, http_client=http, **options)


def sync_client(g: Running, key: str) -> anthropic.Anthropic:
    """Return a blocking client. Call it through `asyncio.to_thread`: the gateway runs in the test's event loop."""
    http = anthropic.DefaultHttpxClient(verify=False, trust_env=False)
    g._stack.callback(http.close)
    return anthropic.Anthropic(api_key=key, base_url=g.root, http_client=http, max_retries=0, timeout=scaled(20))


async def ask(g: Running, key: str, messages: Json, way: str = "async", **request: Any) -> Any:
    """Send one message with the client, in one of `CLIENT_MODES`. `messages` is a list or the text of a question."""
    request = {"model": "m", "max_tokens": 10_000, **request}
    request["messages"] = [user(messages)] if isinstance(messages, str) else messages

    def send(sdk: anthropic.Anthropic) -> Any:
        if way == "sync":
            return sdk.messages.create(**request)
        with sdk.messages.stream(**request) as stream:
            return stream.get_final_message()

    if way.startswith("sync"):
        return await asyncio.to_thread(send, sync_client(g, key))
    sdk = client(g, key)
    area: Any = sdk.beta.messages if way.startswith("beta") else sdk.messages
    if way.startswith("beta"):
        request["betas"] = ["interleaved-thinking-2025-05-14"]
    if not way.endswith("stream"):
        return await area.create(**request)
    async with area.stream(**request) as stream:
        return await stream.get_final_message()


def user(content: Json) -> Json:
    return {"role": "user", "content": content}


def to_history(reply: Any) -> Json:
    """Return the assistant message that an agent adds to its history."""
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}


def tool_results(reply: Any, answer: Callable[[Any], Json] = lambda call: "ok") -> Json:
    """Return the user message with the tool results for the calls of a reply."""
    return user([{"type": "tool_result", "tool_use_id": call.id, "content": answer(call)} for call in tool_uses(reply)])


def tool_uses(reply: Any) -> list[Any]:
    return [block for block in reply.content if block.type == "tool_use"]


def text_of(reply: Any) -> str:
    return "".join(block.text for block in reply.content if block.type == "text")


def thinking_of(reply: Any) -> str:
    return "".join(block.thinking for block in reply.content if block.type == "thinking")


def prompts(g: Running) -> list[str]:
    """Decode the prompts that the engine received."""
    return [tokenizer().decode(request.prompt.tolist()) for request in g.engine.received]


async def check_one_row(g: Running, session_id: str, script: list[ScriptedTurn] | None = None) -> None:
    """Check that the session is one row with exactly the ids the engine received and sampled."""
    [row] = await g.samples(session_id)
    assert all(span["trained"] for span in row["spans"]) and len(row["spans"]) == len(g.engine.received)
    for request, span in zip(g.engine.received, row["spans"], strict=True):
        assert request.prompt.tolist() == row["ids"][: span["start"]]
        sampled = row["ids"][span["start"] : span["end"]]
        assert row["logprobs"][span["start"] : span["end"]] == derive_logprobs(request.prompt, sampled)
    if script is not None:
        sampled_ids = [i for turn in script for i in turn.ids]
        assert [i for i, trained in zip(row["ids"], row["mask"], strict=True) if trained] == sampled_ids
    assert {turn["role"] for turn in await g.turns(session_id)} == {"main"}


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_text_answer(way: str) -> None:
    async with gateway([say("Hello there, friend.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way)
        assert (text_of(reply), reply.stop_reason, reply.stop_sequence) == ("Hello there, friend.", "end_turn", None)
        assert (reply.type, reply.role, reply.model) == ("message", "assistant", "m") and reply.id.startswith("msg_")
        # Usage matches what the engine received and sampled.
        [turn] = await g.turns(session.id)
        assert reply.usage.input_tokens == len(g.engine.received[0].prompt)
        assert reply.usage.output_tokens == len(turn["ids"])
        assert prompts(g) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


async def test_stream_events_are_in_anthropic_order() -> None:
    async with gateway([say("<think>\nHm.\n</think>\n\nHi. " + calls(("read_file", {"path": "a"})))]) as g:
        session = await g.open()
        body = {"model": "m", "max_tokens": 500, "messages": [user("Hi")], "tools": [READ], "stream": True}
        body["thinking"] = ADAPTIVE
        response = await g.http().post("/v1/messages?beta=true", json=body, headers={"x-api-key": session.key})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["request-id"].startswith("req_")
        *events, rest = response.text.split("\n\n")
        names = [event.split("\n")[0].removeprefix("event: ") for event in events]
        assert rest == "" and all(
            json.loads(e.split("data: ")[1])["type"] == n for e, n in zip(events, names, strict=True)
        )
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        once = [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]
        assert once == ["message_start", *block * 3, "message_delta", "message_stop"]


async def test_sdk_stream_helper() -> None:
    async with gateway([say("<think>\nHm.\n</think>\n\nLook. " + calls(("read_file", {"path": "a"})))]) as g:
        session = await g.open()
        kinds: list[str] = []
        async with client(g, session.key).messages.stream(
            model="m",
            max_tokens=500,
            messages=[{"role": "user", "content": "Read"}],
            tools=[READ],  # type: ignore[list-item]
            thinking={"type": "adaptive"},
        ) as stream:
            async for event in stream:
                kinds.append(event.type)
            assert await stream.get_final_text() == "Look."
        assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
        assert (await stream.get_final_message()).stop_reason == "tool_use"


async def test_message_and_call_ids_are_unique() -> None:
    """Claude Code merges messages that share an id."""
    async with gateway([say("Hi." + calls(("read_file", {"path": "a"}), ("read_file", {"path": "a"})))] * 2) as g:
        session = await g.open()
        replies = [await ask(g, session.key, "Hi", way, tools=[READ]) for way in ("async", "async stream")]
        ids = [r.id for r in replies] + [call.id for r in replies for call in tool_uses(r)]
        assert len(set(ids)) == 6 and all(i.startswith("toolu_") for i in ids[2:])


@every_way
async def test_multi_token_characters_arrive_intact(way: str) -> None:
    text = "Größe 汉字 👩‍👩‍👧 é\n\n\tend"
    async with gateway([say(text)]) as g:
        session = await g.open()
        assert text_of(await ask(g, session.key, "Hi", way)) == text


@every_way
async def test_empty_answer(way: str) -> None:
    async with gateway([say(""), say("Here.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way)
        assert (reply.content, reply.stop_reason) == ([], "end_turn")
        await ask(g, session.key, [user("Hi"), to_history(reply), user("Are you there?")], way)
        assert len(await g.samples(session.id)) == 1


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
    async with gateway(script) as g:
        session = await g.open()
        history: list[Json] = [user("Copy a and b into c.")]

        async def turn(*more: Json) -> Any:
            history.extend(more)
            reply = await ask(
                g, session.key, history, way, tools=[READ, WRITE], system="You are careful.", thinking=ADAPTIVE
            )
            history.append(to_history(reply))
            return reply

        first = await turn()
        assert (thinking_of(first), text_of(first), first.stop_reason) == ("I should look.", "Let me see.", "tool_use")
        assert [(c.name, c.input) for c in tool_uses(first)] == [
            ("read_file", {"path": "a.py"}),
            ("read_file", {"path": "b.py"}),
        ]
        second = await turn(tool_results(first, lambda call: f"contents of {call.input['path']}"))
        assert tool_uses(second)[0].input == {"path": "c.py", "text": 'x = "1"\n'} and text_of(second) == ""
        third = await turn(tool_results(second, lambda call: ""))
        assert (thinking_of(third), text_of(third), third.stop_reason) == ("Done now.", "All done.", "end_turn")
        fourth = await turn(user("What does c say?"))
        fifth = await turn(tool_results(fourth, lambda call: [{"type": "text", "text": "x = 1"}]))
        assert text_of(fifth) == "It says x."
        await check_one_row(g, session.id, script)


async def test_sdk_tool_runner() -> None:
    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    script = [say(calls(("add", {"a": 1, "b": 2}))), say(calls(("add", {"a": 3, "b": "x"}))), say("It is 3.")]
    async with gateway(script) as g:
        session = await g.open()
        runner = client(g, session.key).beta.messages.tool_runner(
            model="m", max_tokens=1000, tools=[add], messages=[{"role": "user", "content": "1+2?"}]
        )
        final = await runner.until_done()
        assert text_of(final) == "It is 3."
        assert "<tool_response>\n3\n</tool_response>" in prompts(g)[1]
        assert "<tool_response>\nError" in prompts(g)[2]
        await check_one_row(g, session.id, script)


MALFORMED_CALLS = {
    "a lone surrogate": r'{"name": "f", "arguments": {"a": "\ud800"}}',
    "arguments that are no object": '{"name": "f", "arguments": [1, "x", null]}',
    "arguments that are text": r'{"name": "f", "arguments": "rm -rf {oops"}',
    "an object like our own wrapper": '{"name": "f", "arguments": {"INVALID_JSON": "x"}}',
    "a huge number": '{"name": "f", "arguments": {"a": 1' + "0" * 400 + "}}",
    "a duplicate key": '{"name": "f", "arguments": {"a": 1, "a": 2}}',
    "nested 150 deep": '{"name": "f", "arguments": {"a": ' + "[" * 150 + "]" * 150 + "}}",
    "nested 900 deep": '{"name": "f", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    "nested 3000 deep": '{"name": "f", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    "nothing": "",
    "truncated": '{"name": "f", "arguments": {"a": ',
}


@both_ways
@pytest.mark.parametrize("case", MALFORMED_CALLS)
async def test_malformed_call_is_delivered_and_recorded(case: str, way: str) -> None:
    script = [say(f"<tool_call>\n{MALFORMED_CALLS[case]}\n</tool_call>"), say("Next.")]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    async with gateway(script) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Hi", way, tools=tools)
        assert reply.content
        # The agent can continue from it.
        more = tool_results(reply) if tool_uses(reply) else user("Go on")
        sent = json.dumps([user("Hi"), to_history(reply), more])  # with escapes, as some clients send it
        body = f'{{"model": "m", "max_tokens": 10, "messages": {sent}, "tools": {json.dumps(tools)}}}'
        response = await g.http(session.key).post("/v1/messages", content=body)
        assert response.status_code == 200, response.text
        await check_one_row(g, session.id, script)


@both_ways
async def test_parallel_tool_use_can_be_disabled(way: str) -> None:
    two = calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    async with gateway([say("Look:\n" + two), say("Thanks.")]) as g:
        session = await g.open()
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        reply = await ask(g, session.key, "Read a and b", way, tools=[READ], tool_choice=choice)
        assert [c.input for c in tool_uses(reply)] == [{"path": "a"}] and reply.stop_reason == "tool_use"
        history = [user("Read a and b"), to_history(reply), tool_results(reply)]
        await ask(g, session.key, history, way, tools=[READ], tool_choice=choice)
        await check_one_row(g, session.id)


@both_ways
async def test_tool_choice_none_hides_tools_from_model(way: str) -> None:
    async with gateway([say("I cannot.")]) as g:
        session = await g.open()
        await ask(g, session.key, "Read a", way, tools=[READ], tool_choice={"type": "none"})
        assert "read_file" not in prompts(g)[0]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORCED: dict[str, tuple[dict[str, Json], str]] = {
    "tool": ({"tools": [READ], "tool_choice": {"type": "tool", "name": "read_file"}}, '{"path": "a"}'),
    "tools": (
        {"tools": [READ], "tool_choice": {"type": "any"}},
        '[{"name": "read_file", "arguments": {"path": "a"}}]',
    ),
    "json_schema": ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, '{"n": 1}'),
}


@both_ways
@pytest.mark.parametrize("kind", FORCED)
async def test_constrained_output_works_and_is_not_trained(kind: str, way: str) -> None:
    request, text = FORCED[kind]
    async with gateway([say(text)]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Go", way, **request)
        if kind == "json_schema":
            assert json.loads(text_of(reply)) == {"n": 1} and reply.stop_reason == "end_turn"
        else:
            assert [(c.name, c.input) for c in tool_uses(reply)] == [("read_file", {"path": "a"})]
            assert reply.stop_reason == "tool_use"
        constraint = g.engine.received[0].constraint
        assert constraint is not None and constraint.kind == kind
        assert await g.samples(session.id) == []
        [row] = await g.samples(session.id, keep_empty=True)
        assert f"constrained: {kind}" in row["spans"][0]["reason"]


async def test_sdk_parse_helper_returns_structured_output() -> None:
    class Number(pydantic.BaseModel):
        n: int

    async with gateway([say('{"n": 7}')]) as g:
        session = await g.open()
        reply = await client(g, session.key).messages.parse(
            model="m", max_tokens=100, messages=[{"role": "user", "content": "Pick"}], output_format=Number
        )
        assert reply.parsed_output == Number(n=7)


# ── thinking ────────────────────────────────────────────────────────────────────────────────────────────────────────

ADAPTIVE = {"type": "adaptive"}
OMITTED = {"type": "adaptive", "display": "omitted"}
REPLAYS: dict[str, Callable[[Json], Json]] = {
    "unchanged": lambda blocks: blocks,
    "dropped": lambda blocks: [b for b in blocks if b["type"] != "thinking"],
    "redacted": lambda blocks: [{"type": "redacted_thinking", "data": "x"}, *blocks[1:]],
    "without its signature": lambda blocks: [{**blocks[0], "signature": ""}, *blocks[1:]],
}


@every_way
@pytest.mark.parametrize("thinking", [ADAPTIVE, OMITTED], ids=["shown", "omitted"])
async def test_thinking_round_trips(thinking: Json, way: str) -> None:
    thought = "<think>\nHmm, two.\n</think>\n\nTwo."
    async with gateway([say(thought), *[say("Yes.")] * len(REPLAYS)]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "1+1?", way, thinking=thinking)
        first, second = reply.content
        assert first.type == "thinking" and first.signature.startswith("tg1.") and second.text == "Two."
        assert first.thinking == ("" if thinking is OMITTED else "Hmm, two.")
        for name, replay in REPLAYS.items():
            answer = {"role": "assistant", "content": replay(to_history(reply)["content"])}
            await ask(g, session.key, [user("1+1?"), answer, user(f"Sure? ({name})")], way, thinking=thinking)
        # The model always sees its own thinking, even if the agent hid or dropped it.
        for prompt in prompts(g)[1:]:
            assert f"{thought}<|im_end|>" in prompt
        roots = [n for n in (await g.trace(session.id))["nodes"] if n["parent"] is None]
        assert len(roots) == 1


@every_way
@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}], ids=["unset", "disabled"])
async def test_unrequested_thinking_is_recorded_but_not_sent(thinking: Json, way: str) -> None:
    """The client gets no blocks that it did not ask for, and the model still has its thinking in its context."""
    request = {"thinking": thinking, "tools": [READ]} if thinking else {"tools": [READ]}
    texts = [
        "<think>\nI look.\n</think>\n\n" + calls(("read_file", {"path": "a"})),
        "<think>\nAn A.\n</think>\n\nIt says A.",
        "Yes.",
    ]
    async with gateway([say(text) for text in texts]) as g:
        session = await g.open()
        first = await ask(g, session.key, "Read a", way, **request)
        assert [block.type for block in first.content] == ["tool_use"]
        history = [user("Read a"), to_history(first), tool_results(first)]
        second = await ask(g, session.key, history, way, **request)
        assert [block.type for block in second.content] == ["text"] and text_of(second) == "It says A."
        await ask(g, session.key, [*history, to_history(second), user("Sure?")], way, **request)
        assert [turn["message"].get("reasoning") for turn in await g.turns(session.id)] == ["I look.", "An A.", None]
        for n, text in enumerate(texts[:2]):
            assert prompts(g)[n + 1].startswith(prompts(g)[n] + text + "<|im_end|>\n")
        await check_one_row(g, session.id)


async def test_message_start_has_the_size_of_the_prompt() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        request: Json = {"model": "m", "max_tokens": 100, "messages": [user("Hi")], "stream": True}
        events = [event async for event in await client(g, session.key).messages.create(**request)]
        size = len(g.engine.received[0].prompt)
        assert events[0].type == "message_start" and events[0].message.usage.input_tokens == size
        [end] = [event for event in events if event.type == "message_delta"]
        assert end.usage.input_tokens == size


async def test_hidden_thinking_is_carried_in_its_signature() -> None:
    """It is restored when the conversation has to be rendered again."""
    async with gateway([say("<think>\nHmm, two.\n</think>\n\nTwo."), say("Yes.")]) as g:
        first, second = await g.open(), await g.open()
        reply = await ask(g, first.key, "1+1?", thinking=OMITTED)
        await ask(g, second.key, [user("1+1?"), to_history(reply), user("Sure?")])
        assert decode_stored_messages("messages", json.dumps([to_history(reply)]).encode())[0].reasoning == "Hmm, two."
        assert "Hmm, two." in prompts(g)[1]


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize(
    ("thinking", "seen"), [({"type": "disabled"}, True), (ADAPTIVE, False), (None, False)], ids=["off", "on", "unset"]
)
async def test_disabled_thinking_reaches_template(thinking: Json, seen: bool) -> None:
    folder = real_tokenizer("qwen3")
    async with gateway([say("Two.", folder=folder)], tokenizer=str(folder)) as g:
        session = await g.open()
        await ask(g, session.key, "1+1?", **({"thinking": thinking} if thinking else {}))
        prompt = tokenizer(folder).decode(g.engine.received[0].prompt.tolist())
        assert prompt.endswith("<think>\n\n</think>\n\n") == seen


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_system_parts_and_mid_conversation_system_messages() -> None:
    async with gateway([say("Ok."), say("Ok.")]) as g:
        session = await g.open()
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=1;"}
        parts = [{"type": "text", "text": "You work.", "cache_control": {"type": "ephemeral"}}]
        note = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
        history = [user("Hi"), note]
        reply = await ask(g, session.key, history, system=[billing, *parts])
        assert prompts(g)[0] == (
            "<|im_start|>system\nYou work.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
        )
        changed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"}
        history = [user("Hi"), {"role": "system", "content": "Be brief."}, to_history(reply), user("More"), note]
        await ask(g, session.key, history, system=[changed, *parts])
        await check_one_row(g, session.id)


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("name", ["deepseek_v3"])
async def test_later_system_message_does_not_fork_single_system_template(name: str) -> None:
    folder = real_tokenizer(name)
    async with gateway([say("One.", folder=folder), say("Two.", folder=folder)], tokenizer=str(folder)) as g:
        session = await g.open()
        history: list[Json] = [user("Hi"), {"role": "system", "content": "Be brief."}]
        reply = await ask(g, session.key, history, system="You work.")
        history += [to_history(reply), user("More"), {"role": "system", "content": "Stay brief."}]
        await ask(g, session.key, history, system="You work.")
        await check_one_row(g, session.id)
        assert "Stay brief." in tokenizer(folder).decode(g.engine.received[1].prompt.tolist())


async def test_normalized_arguments_in_history_do_not_fork() -> None:
    """Claude Code fills in defaults, reorders keys, drops a redundant `cd`, trims blanks and turns "5" into 5."""
    edit = {"file_path": "/w/a.py", "old_string": "x", "new_string": "y  \n", "line": "5"}
    script = [say(calls(("Edit", edit), ("Bash", {"command": "cd /w && ls"}))), say("Done.")]
    tools = [{"name": n, "input_schema": {"type": "object"}} for n in ("Edit", "Bash")]
    async with gateway(script) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Go", "async stream", tools=tools)
        message = to_history(reply)
        first, second = message["content"]
        first["input"] = {"replace_all": False, **dict(sorted(edit.items())), "new_string": "y\n", "line": 5}
        second["input"] = {"command": "ls"}
        await ask(g, session.key, [user("Go"), message, tool_results(reply)], tools=tools)
        await check_one_row(g, session.id, script)


async def test_truncated_argument_in_history_forks_as_edited() -> None:
    script = [say(calls(("write_file", {"path": "a", "text": "line\n" * 1000}))), say("Done.")]
    async with gateway(script) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Go", tools=[WRITE])
        message = to_history(reply)
        message["content"][0]["input"]["text"] = "[cut]"
        await ask(g, session.key, [user("Go"), message, tool_results(reply)], tools=[WRITE])
        assert [turn["cause"] for turn in await g.turns(session.id)] == [None, "edited"]
        assert "[cut]" in prompts(g)[1]


async def test_tool_errors_reach_the_model() -> None:
    async with gateway([say(calls(("read_file", {"path": "a"}))), say("Oh.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Read a", tools=[READ])
        failed = tool_results(reply, lambda call: "No such file.")
        failed["content"][0]["is_error"] = True
        await ask(g, session.key, [user("Read a"), to_history(reply), failed], tools=[READ])
        assert "<tool_response>\nError: No such file.\n</tool_response>" in prompts(g)[1]


async def test_unknown_and_beta_fields_are_accepted() -> None:
    async with gateway([say("Ok.")]) as g:
        session = await g.open()
        reply = await client(g, session.key).beta.messages.create(
            model="m",
            max_tokens=100,
            messages=[{"role": "user", "content": "Hi"}],
            metadata={"user_id": "u"},
            service_tier="auto",
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            output_config={"effort": "high"},
            betas=["context-management-2025-06-27"],
            extra_body={"unheard_of": {"x": [1]}, "cache_control": {"type": "ephemeral"}},
        )
        assert text_of(reply) == "Ok."
        assert reply.context_management is not None and reply.context_management.applied_edits == []


# ── stop reasons ────────────────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_max_tokens_stops_answer_and_continues_in_one_row(way: str) -> None:
    async with gateway([say("One two three four five six."), say("Seven.")]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Count", way, max_tokens=3)
        assert reply.stop_reason == "max_tokens" and reply.usage.output_tokens == 3
        await ask(g, session.key, [user("Count"), to_history(reply), user("Go on")], way)
        await check_one_row(g, session.id)


@every_way
async def test_stop_sequence_ends_answer_and_is_reported(way: str) -> None:
    async with gateway([say_pieces(["Say ", "hello EN", "D more"])]) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Go", way, stop_sequences=["STOP", "END"])
        assert (text_of(reply), reply.stop_reason, reply.stop_sequence) == ("Say hello ", "stop_sequence", "END")


@both_ways
async def test_session_limit_reads_as_final_answer(way: str) -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open(limits={"turns": 1})
        await ask(g, session.key, "Hi", way)
        reply = await ask(g, session.key, "More", way)
        assert reply.stop_reason == "end_turn" and "limit (turns)" in text_of(reply)
        assert (await g.show(session.id))["stop"] == "turns"


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@both_ways
async def test_wrong_key_and_unknown_model(way: str) -> None:
    async with gateway([], model="policy-1") as g:
        session = await g.open()
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await ask(g, "wrong", "Hi", way)
        assert denied.value.type == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await ask(g, session.key, "Hi", way, model="claude-x")
        assert missing.value.type == "not_found_error" and "claude-x" in str(missing.value.api_message)
        assert missing.value.request_id is not None


@both_ways
@pytest.mark.parametrize("end", ["seal", "cancel"])
async def test_ended_session_returns_permission_error(end: str, way: str) -> None:
    async with gateway([]) as g:
        session = await g.open()
        await (g.seal(session.id) if end == "seal" else g.cancel(session.id))
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            await ask(g, session.key, "Hi", way)
        assert caught.value.type == "permission_error" and caught.value.response.headers["x-should-retry"] == "false"


@both_ways
async def test_too_long_prompt_is_bad_request(way: str) -> None:
    async with gateway([say("One.")], max_context=20) as g:
        session = await g.open()
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(g, session.key, "Hi " * 100, way)
        assert caught.value.type == "invalid_request_error"
        size = int(str(caught.value.api_message).removeprefix("prompt is too long: ").split()[0])
        assert caught.value.api_message == f"prompt is too long: {size} tokens > 20 maximum" and size > 100


ENGINE_FAULTS: dict[str, tuple[ScriptedTurn, type[anthropic.APIStatusError], str]] = {
    "busy": (ScriptedTurn(busy=True), anthropic.RateLimitError, "rate_limit_error"),
    "gone": (ScriptedTurn(fail_before=True), anthropic.OverloadedError, "overloaded_error"),
    "overflow": (ScriptedTurn(overflow=True), anthropic.BadRequestError, "invalid_request_error"),
    "silent": (say("Hi.", delay_s=5), anthropic.GatewayTimeoutError, "timeout_error"),
    "nonsense": (say("Hi.", short_logprobs=True), anthropic.InternalServerError, "api_error"),
}


@both_ways
@pytest.mark.parametrize("fault", ENGINE_FAULTS)
async def test_engine_faults_map_to_sdk_errors(fault: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    turn, error, kind = ENGINE_FAULTS[fault]
    async with gateway(engine=Scripted([turn], silence_s=0.1)) as g:
        session = await g.open()
        with pytest.raises(error) as caught:
            await ask(g, session.key, "Hi", way)
        assert caught.value.type == kind
        if fault == "overflow":
            assert str(caught.value.api_message).startswith("prompt is too long")


async def test_sdk_retry_succeeds_when_engine_recovers() -> None:
    async with gateway([ScriptedTurn(fail_before=True), say("Hello.")]) as g:
        session = await g.open()
        reply = await client(g, session.key, max_retries=2).messages.create(
            model="m", max_tokens=10, messages=[{"role": "user", "content": "Hi"}]
        )
        assert text_of(reply) == "Hello."
        assert len(await g.samples(session.id)) == 1


async def test_engine_failure_during_stream_is_recorded() -> None:
    async with gateway([say("One two three four.", cut_after=3)]) as g:
        session = await g.open()
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(g, session.key, "Hi", "async stream")
        assert caught.value.type == "overloaded_error"
        [turn] = await g.turns(session.id)
        assert (turn["role"], len(turn["ids"])) == ("aborted", 3)


@both_ways
async def test_internal_error_is_api_error(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway([say("Hi.")]) as g:
        session = await g.open()
        monkeypatch.setattr(type(renderer()), "reader", None)
        with pytest.raises(anthropic.InternalServerError) as caught:
            await ask(g, session.key, "Hi", way)
        assert caught.value.type == "api_error" and "internal error" in str(caught.value.api_message)


@both_ways
async def test_too_large_request(way: str) -> None:
    async with gateway([], max_body_mb=0.001) as g:
        session = await g.open()
        with pytest.raises(anthropic.RequestTooLargeError) as caught:
            await ask(g, session.key, "Hi " * 1000, way)
        assert caught.value.type == "request_too_large"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
INVALID_REQUESTS: dict[str, tuple[Json, str]] = {
    "an image": ({"messages": [user([IMAGE])]}, "messages.0.content.0: 'image'"),
    "an image from a tool": (
        {"messages": [user([{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}])]},
        "messages.0.content.0.content.0: 'image'",
    ),
    "a document": (
        {"messages": [user([{"type": "document", "source": {"type": "text", "data": "x"}}])]},
        "messages.0.content.0: 'document'",
    ),
    "a server tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0.type: tools of type 'web_search",
    ),
    "a prefilled answer": (
        {"messages": [user("Hi"), {"role": "assistant", "content": "{"}]},
        "messages: This model does not support assistant message prefill",
    ),
    "a wrong role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "no messages": ({"messages": []}, "messages"),
    "an invalid temperature": ({"temperature": 5}, "temperature"),
}


@both_ways
@pytest.mark.parametrize("case", INVALID_REQUESTS)
async def test_invalid_request_names_its_field(case: str, way: str) -> None:
    request, message = INVALID_REQUESTS[case]
    async with gateway([]) as g:
        session = await g.open()
        body = {"model": "m", "max_tokens": 10, "messages": [user("Hi")], **request, "stream": way == "async stream"}
        response = await g.http(session.key).post("/v1/messages", json=body)
        assert response.status_code == 400 and response.headers["x-should-retry"] == "false"
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert error["error"]["message"].startswith(message)


# ── disconnects and cancellation ────────────────────────────────────────────────────────────────────────────────────


async def test_disconnect_during_stream_records_aborted_turn() -> None:
    engine = Gated([say("One two three four."), say("Five.")], tokens=3)
    async with gateway(engine=engine) as g:
        session = await g.open()
        stream = await client(g, session.key).messages.create(
            model="m", max_tokens=100, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await until(lambda: engine.waiting)
        await stream.close()
        await until(lambda: engine.aborted == 1)
        await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
        [turn] = await g.turns(session.id)
        assert (turn["role"], turn["finish"], len(turn["ids"])) == ("aborted", "abort", 3)
        engine.gate.set()
        assert text_of(await ask(g, session.key, "Hi")) == "Five."
        assert [t["cause"] for t in await g.turns(session.id)] == [None, "retry"]
        [row] = await g.samples(session.id)
        assert sum(row["mask"]) == len(say("Five.").ids)


async def test_cancelled_session_ends_stream_with_error() -> None:
    engine = Gated([say("One two three four.")], tokens=2)
    async with gateway(engine=engine) as g:
        session = await g.open()
        asking = g.start(ask(g, session.key, "Hi", "async stream"))
        await until(lambda: engine.waiting)
        await g.cancel(session.id)
        with pytest.raises(anthropic.APIStatusError) as caught:
            await asking
        assert caught.value.type == "permission_error" and engine.aborted == 1
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted"]


@pytest.mark.parametrize("thinking", [ADAPTIVE, OMITTED], ids=["shown", "omitted"])
async def test_keep_alive_during_silence_and_hidden_thinking(thinking: Json) -> None:
    """Hidden thinking sends no text; the agent must not take that for a dead connection."""
    turn = say("<think>\none two three four five six\n</think>\n\nHi.")
    engine = Gated([turn])
    async with gateway(engine=engine, alive_s=0.05) as g, asyncio.timeout(scaled(10)):
        session = await g.open()
        body = {"model": "m", "max_tokens": 500, "messages": [user("Hi")], "stream": True, "thinking": thinking}
        names: list[str] = []
        async with g.http(session.key).stream("POST", "/v1/messages", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
                if line == "event: ping" and not engine.tokens:
                    engine.tokens = len(turn.ids) // 2  # go to the middle of the thinking and pause again
                    engine.gate.set()
                    engine.gate.clear()
                elif line == "event: ping" and "content_block_start" in names:
                    engine.gate.set()
        assert names[0] == "message_start" and names[-1] == "message_stop" and names.count("message_start") == 1
        block_start = names.index("content_block_start")
        assert "ping" in names[:block_start]
        assert "ping" in names[block_start : names.index("content_block_stop")]


# ── other endpoints ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_tokens_records_nothing() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        sdk = client(g, session.key)
        request: Json = {"model": "m", "messages": [user("Hi")], "system": "Be brief.", "tools": [READ]}
        counted = await sdk.messages.count_tokens(**request)
        beta = await sdk.beta.messages.count_tokens(**request, betas=["token-counting-2024-11-01"])
        assert len((await g.trace(session.id))["nodes"]) == 0
        await sdk.messages.create(max_tokens=10, **request)
        assert counted.input_tokens == beta.input_tokens == len(g.engine.received[0].prompt)


async def test_list_and_retrieve_models() -> None:
    async with gateway(model="policy-1") as g:
        session = await g.open()
        sdk = client(g, session.key)
        assert [m.id async for m in sdk.models.list()] == ["policy-1"]
        model = await sdk.models.retrieve("policy-1")
        assert (model.id, model.type, model.display_name) == ("policy-1", "model", "policy-1")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await sdk.models.retrieve("claude-x")
        assert missing.value.type == "not_found_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/messages"])
@pytest.mark.parametrize("area", ["", "/s/{id}", "/v1/rollouts/{id}"])
@pytest.mark.parametrize("carrier", ["x-api-key", "authorization"])
async def test_every_path_and_key_header(path: str, area: str, carrier: str) -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        key = f"Bearer {session.key}" if carrier == "authorization" else session.key
        body = {"model": "m", "max_tokens": 10, "messages": [user("Hi")]}
        response = await g.http().post(
            area.format(id=session.id) + path + "?beta=true", json=body, headers={carrier: key}
        )
        assert response.status_code == 200 and response.json()["content"][0]["text"] == "Hello."


async def test_unknown_endpoints_return_anthropic_not_found() -> None:
    async with gateway([]) as g:
        session = await g.open()
        for path in ("/v1/messages/batches", "/v1/files"):
            response = await g.http().get(path, headers={"x-api-key": session.key, "anthropic-version": "2023-06-01"})
            assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


# ── token exactness ─────────────────────────────────────────────────────────────────────────────────────────────────


def rewrite_history(messages: list[Json], draw: random.Random) -> list[Json]:
    """Return the same conversation in different bytes, as agents rewrite their history."""
    rewritten: list[Json] = []
    for message in json.loads(json.dumps(messages)):
        blocks = message["content"]
        if isinstance(blocks, str):
            message["content"] = blocks if draw.random() < 0.5 else [{"type": "text", "text": blocks}]
            rewritten.append(message)
            continue
        if message["role"] == "assistant" and draw.random() < 0.3:
            blocks = [b for b in blocks if b["type"] != "thinking"]
        for block in blocks:
            if draw.random() < 0.3:
                block["cache_control"] = {"type": "ephemeral"}
            if block["type"] == "tool_use" and draw.random() < 0.5:
                block["input"] = {"added": None, **dict(sorted(block["input"].items()))}
            if block["type"] == "tool_result" and isinstance(block["content"], str) and draw.random() < 0.5:
                block["content"] = [{"type": "text", "text": block["content"]}]
        if len(blocks) > 1 and draw.random() < 0.3:  # each block as its own message
            rewritten += [{"role": message["role"], "content": [block]} for block in blocks]
        else:
            rewritten.append({"content": blocks, "role": message["role"]})
    return rewritten


def scripted_turn(kind: str, n: int, folder: Path, draw: random.Random) -> ScriptedTurn:
    call = calls(("read_file", {"path": f"a/é{n}.py", "n": 1.0}))
    texts = {
        "text": f"Step {n}: 汉字\n\n",
        "call": f"Look {n}.\n{call}",
        "calls": f"{call}\n{call}",
        "think+call": f"<think>\nthought {n}\n</think>\n\n{call}",
        "think": f"<think>\nthought {n}\n</think>\n\nSo: {n}",
        "malformed": '<tool_call>\n{"name": "read_file", "arguments": {oops}\n</tool_call>',
        "after": f"Before. {call} After {n}.",
        "empty": "",
    }
    stop = set(renderer(folder).stop_ids)
    if kind == "random":
        ids = [i for i in draw.choices(range(tokenizer(folder).vocab_size), k=30) if i not in stop]
        return ScriptedTurn([*ids, renderer(folder).stop_ids[0]])
    return say(texts[kind], folder=folder)


@pytest.mark.sample(2)
@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["builtin", "qwen3", "llama3_1", "deepseek_v3"])
async def test_long_conversation_with_rewritten_history_is_one_row(name: str, seed: int) -> None:
    folder = BUILTIN_TOKENIZER if name == "builtin" else real_tokenizer(name)
    draw = random.Random(f"{name} {seed}")
    kinds = ("text", "call", "calls", "think+call", "think", "malformed", "after", "empty", "random")
    script = [scripted_turn(draw.choice(kinds), n, folder, draw) for n in range(20)]
    async with gateway(script, tokenizer="" if name == "builtin" else str(folder)) as g:
        session = await g.open()
        history: list[Json] = [user("Begin."), {"role": "system", "content": "Be brief."}]
        for n in range(len(script)):
            reply = await ask(
                g,
                session.key,
                rewrite_history(history, draw) if draw.random() < 0.6 else history,
                draw.choice(["async", "async stream"]),
                tools=[READ],
                system=[{"type": "text", "text": "You work."}],
                thinking=draw.choice([ADAPTIVE, OMITTED]),
            )
            history.append(to_history(reply))
            more: list[Json] = tool_results(reply, lambda call, n=n: f"output {n}")["content"]  # type: ignore[misc]
            if not more or draw.random() < 0.2:
                more.append({"type": "text", "text": f"Go on {n}."})
            history.append(user(more))
            if draw.random() < 0.2:
                history.append({"role": "system", "content": f"Note {n}."})
        await check_one_row(g, session.id, script)


async def test_session_continues_exactly_after_restart(tmp_path: Path) -> None:
    script = [say("<think>\nHm.\n</think>\n\n" + calls(("read_file", {"path": "a"}))), say("Done.")]
    async with gateway(script[:1], data=tmp_path) as g:
        session = await g.open()
        reply = await ask(g, session.key, "Read a", "async stream", tools=[READ], system="You work.", thinking=OMITTED)
        before = g.engine.received[0].prompt
    async with gateway(script[1:], data=tmp_path) as g:
        history = [user("Read a"), to_history(reply), tool_results(reply)]
        await ask(g, session.key, history, tools=[READ], system="You work.", thinking=OMITTED)
        [row] = await g.samples(session.id)
        assert [span["trained"] for span in row["spans"]] == [True, True]
        second = g.engine.received[0].prompt
        assert np.array_equal(second[: len(before)], before)
        messages = [n for n in (await g.trace(session.id))["nodes"] if n["kind"] == "context"]
        assert len(messages) == 2
